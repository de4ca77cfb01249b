"""Policies small enough to count everything out, and a script's main with its batches kept."""

import copy
import itertools
import json
from types import SimpleNamespace

import torch
from conftest import TINY, read_jsonl

import common

# Three tokens, at most two a completion. Token 0 stops, or nothing does and two are sampled.
STOPPING = [(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
FIXED = list(itertools.product(range(3), repeat=2))


class Policy:
    """Logits of the first token, and of the second given the first; a reward of each completion."""

    def __init__(self, completions=STOPPING, seed=0):
        options = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
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
        gradients = torch.autograd.grad(value, self.tables, retain_graph=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def exact_gradient(self, rewards=None):
        """The gradient of the expected reward."""
        rewards = self.rewards if rewards is None else rewards
        return self.gradient((self.probabilities() * rewards).sum())

    def expected_gradient(self, loss, size):
        """-E[gradient of loss(rows)] over all batches of `size` completions: nothing is sampled."""
        probabilities, total = self.probabilities().detach(), 0.0
        for rows in itertools.product(range(len(self.completions)), repeat=size):
            rows = torch.tensor(rows)
            total = total + probabilities[rows].prod() * loss(rows)
        return -self.gradient(total)


def near(found, expected, atol=1e-6):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# ------------------------------ One update of the built-in model ------------------------------
class Recorder:
    """An optimizer that changes nothing and keeps the gradient of each step, flat."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        gradients = [w.grad for w in self.model.parameters() if w.grad is not None]
        self.gradients.append(torch.cat([gradient.flatten() for gradient in gradients]))

    def zero_grad(self):
        self.model.zero_grad()


def make_batch(model, tokenizer):
    """Five completions of unequal length, with advantages per token, for `update`."""
    texts = {"1+2=?": ["#### 3", "1+2=3 #### 3"], "3+4-5=?": ["3+4=7 7-5=2 #### 2", "2", "12"]}
    problems = [{"ids": common.encode_prompt(tokenizer, p)} for p, c in texts.items() for _ in c]
    completions = sum(texts.values(), [])
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in completions]
    batch = common.make_batch(problems, ids, [[0.0] * len(row) for row in ids], 0)
    batch["engine_logprobs"] = plain_logprobs(model, batch).detach()
    generator = torch.Generator().manual_seed(0)
    batch["advantages"] = torch.randn(batch["mask"].shape, generator=generator) * batch["mask"]
    batch["trained"] = torch.ones(len(ids), 1, dtype=torch.bool)
    return batch


def plain_logprobs(model, batch):
    """Log-probs of the tokens (B, T-1) by the plain forward, 0 where mask is 0."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    logprobs = logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.where(batch["mask"], logprobs, 0.0)


def gradient_of_update(script, model, batch, **flags):
    """The gradient of script.update on all rows of a batch, in micro-batches of two or so."""
    size = {"tokens_per_micro_batch": 60, "max_completion_tokens": 32, "max_grad_norm": 1e9}
    args, recorder = script.Args(**{**size, **flags}), Recorder(model)
    autocast = common.precision("float32", torch.device("cpu"))[1]
    rows = torch.arange(len(batch["mask"]))
    script.update(model, recorder, dict(batch), rows, args, autocast, common.Totals())
    return recorder.gradients[0]


def flat_gradient(model, loss):
    """The gradient of a loss with respect to a model's parameters, flat."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


# ---------------------------------------- A run of main ----------------------------------------
def any_reward(prompt, completion, answer):
    """A reward from -1 to 1 that differs from sample to sample."""
    return sum(map(ord, completion)) % 17 / 8 - 1


def run_main(script, tmp_path, monkeypatch, reward=any_reward, **flags):
    """Runs script.main on two prompts, four completions each, without drawing curves.

    Returns (what each update got, rows of metrics). The former have batch and rewards, models:
    copies of policy and critic from before the update, live: these models, and given: the rest.
    """
    problems = [{"prompt": "1+2=?", "answer": "3"}, {"prompt": "3+4=?", "answer": "7"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    seen, updates = [], []

    def scoring(*given):
        seen.append(reward(*given))
        return seen[-1]

    with monkeypatch.context() as patch:
        original = script.update

        def keeping(*given):
            (batch,) = (each for each in given if isinstance(each, dict))
            models = [each for each in given if isinstance(each, torch.nn.Module)]
            kept = {name: tensor.clone() for name, tensor in batch.items()}
            rewards = torch.tensor(seen[-len(batch["mask"]) :])
            copies = copy.deepcopy(models)
            kept = {"batch": kept, "rewards": rewards, "models": copies, "live": models}
            updates.append(SimpleNamespace(**kept, given=given))
            return original(*given)

        patch.setattr(script, "update", keeping)
        patch.setattr(script, "reward", scoring)
        patch.setattr(common, "catch_signals", list)  # pytest keeps its own handlers
        patch.setattr(common, "__file__", str(tmp_path / "common.py"))  # beside no plot.py
        data = {"model": str(TINY / "model"), "dataset": str(tmp_path / "data.jsonl")}
        data |= {"eval_dataset": data["dataset"], "output_dir": str(tmp_path / "run")}
        size = {"steps": 1, "prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 16}
        machine = {"rollout_engine": "transformers", "dtype": "float32", "warmup_steps": 0}
        script.main(script.Args(**{**data, **size, **machine, **flags}))
    return updates, read_jsonl(tmp_path / "run" / "metrics.jsonl")


def initial_model():
    """The model that a run begins with, and its reference."""
    kind = common.AutoModelForCausalLM
    return common.load_model(kind, TINY / "model", torch.device("cpu"))
