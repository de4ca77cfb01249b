"""What several test files use: the tiny model, and a policy small enough to count it all out."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the scripts do, before torch is imported

import torch
import torch.distributed as dist

import common

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tiny"
SCRIPTS = ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"]


def printed(*words, cwd=None, **environment):
    """What `python words` prints; it must end well."""
    command, env = [sys.executable, *map(str, words)], {**os.environ, **environment}
    options = {"cwd": cwd, "env": env, "capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_jsonl(path):
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]]


def near(found, expected, atol=1e-6):
    """Raises unless two tensors, or what makes one, are equal up to atol."""
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def one_process():
    """A process group of one, for what counts over processes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def tiny_model():
    """A fresh copy of the built-in model, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer():
    """The built-in model's tokenizer."""
    return common.load_tokenizer(TINY / "model")


# Three tokens, at most two a completion. Token 0 stops, or nothing does and two are sampled.
STOPPING = [(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
FIXED = list(itertools.product(range(3), repeat=2))


class Policy:
    """Logits of the first token, and of the second given the first; a reward of each completion."""

    def __init__(self, completions=STOPPING):
        options = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
        self.tables = [torch.randn(3, **options) / 2, torch.randn(3, 3, **options) / 2]
        for table in self.tables:
            table.requires_grad_()
        self.completions = completions
        self.rewards = 3 * torch.randn(len(completions), **options)  # of no pattern
        self.mask = torch.tensor([[True, len(c) == 2] for c in completions])

    def logprobs(self, padding=0.0):
        """Log-probs (completions, 2) of all completions' tokens."""
        padding = torch.tensor(padding, dtype=torch.float64)
        first, second = self.tables[0].log_softmax(0), self.tables[1].log_softmax(1)
        rows = [[first[c[0]], second[c] if len(c) == 2 else padding] for c in self.completions]
        return torch.stack([torch.stack(row) for row in rows])

    def probabilities(self):
        return self.logprobs().sum(1).exp()

    def gradient(self, value):
        """The gradient of a scalar with respect to all logits, flat."""
        options = {"retain_graph": True, "materialize_grads": True}
        gradients = torch.autograd.grad(value, self.tables, **options)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def exact_gradient(self):
        """The gradient of the expected reward."""
        return self.gradient((self.probabilities() * self.rewards).sum())

    def expected_gradient(self, loss, size):
        """-E[gradient of loss(rows)] over all batches of `size` completions: nothing is sampled."""
        probabilities, total = self.probabilities().detach(), 0.0
        for rows in itertools.product(range(len(self.completions)), repeat=size):
            rows = torch.tensor(rows)
            total = total + probabilities[rows].prod() * loss(rows)
        return -self.gradient(total)


# ------------------------------ One update of the built-in model ------------------------------
def make_batch(model, advantages):
    """Twelve completions of 2 to 9 tokens for `update`, sampled by `model` as far as it can tell,
    of the tokenizer's 86 words: 2 is the user's turn, 3 the assistant's, 5 ends it."""
    noise = torch.Generator().manual_seed(0)
    prompts = [[2, *range(10, 12 + row % 3), 3] for row in range(12)]
    lengths = [1 + 5 * row % 8 for row in range(12)]
    completions = [torch.randint(6, 86, (n,), generator=noise).tolist() + [5] for n in lengths]
    input_ids, mask = common.collate(prompts, completions, pad_id=5)
    logprobs = naive(model, input_ids, mask)[0].detach()
    batch = {"input_ids": input_ids, "mask": mask, "advantages": advantages}
    return {**batch, "old_logprobs": logprobs, "engine_logprobs": logprobs}


def naive(model, input_ids, mask, temperature=1.0):
    """(log-probs, entropies), 0 where mask is 0, from all logits of the model's own forward."""
    logits = model(input_ids=input_ids).logits[:, :-1].float() / temperature
    taken = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    return taken * mask, torch.distributions.Categorical(logits=logits).entropy() * mask


def flat_gradient(model, loss):
    """The gradient of a loss with respect to a model's parameters, flat."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


class Recorder:
    """An optimizer that changes nothing and keeps the gradient of each step, flat."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        gradients = [weight.grad.flatten() for weight in self.model.parameters()]
        self.gradients.append(torch.cat(gradients))
