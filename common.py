"""What no algorithm differs in: flags and data, text, tokens, log-probabilities, processes, disk.

Per-token tensors are float32 (B, T-1) and aligned with the token they score: column t belongs to
`input_ids[:, t + 1]`. `mask` is bool and true exactly on the completion's tokens, up to and with
the first stop token. Rows are padded on the right: with causal attention no real token sees it.
"""

import atexit
import dataclasses
import importlib.util
import inspect
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import defaultdict
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, get_type_hints

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

# Without torchrun there is one process, which torch finds worth a warning.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

# Flags that may change when a run is resumed: it stays the same run, but for rounding.
HARMLESS = {"output_dir", "resume", "steps", "gpu_memory_utilization", "tokens_per_micro_batch"}
HARMLESS |= {"gradient_checkpointing", "eval_every", "save_every", "sample_every", "track"}

FILES = (".jsonl", ".json")  # a data set with another name is the hub's

# What a library raises for an input of the user's that it cannot use.
REFUSALS = (ValueError, OSError, RuntimeError, CheckpointException, SafetensorError, TemplateError)


# ------------------------------------- Errors and flags -------------------------------------
def fail(message):
    """Ends the run with one line on the screen and exit status 1."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # what torchrun shows at the end
        report = {"message": message, "extraInfo": {"timestamp": int(time.time())}}
        Path(path).write_text(json.dumps({"message": report}))
    if world_size() > 1:  # the others may be anywhere: leave at once, torchrun ends them
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(1)
    raise SystemExit(f"error: {message}")


def attempt(what, function, *inputs, **options):
    """function(*inputs, **options), or fail() with one line where it refuses its input."""
    try:
        return function(*inputs, **options)
    except REFUSALS as error:
        fail(f"{what}: {' '.join(str(error).split())[:400]}")


def parse_args(Args, tiny, description):
    """Args (a dataclass) from the command line, the defaults being those of --resume's run, else
    `tiny`'s where neither --model nor --dataset is given, else Args' own.

    The help is read from the source of Args, one line a flag: a comment line starts a group.
    """
    types, groups = get_type_hints(Args), {}
    for line in inspect.getsource(Args).splitlines():
        if heading := re.fullmatch(r"    # (\w+)", line):
            flags = groups.setdefault(heading[1], [])
        elif flag := re.fullmatch(r"    (\w+): .*?  # (.+)", line):
            flags.append((flag[1], Annotated[types[flag[1]], tyro.conf.arg(help=flag[2])]))

    def cli(default):
        def group(name):
            flags = [(f, kind, dataclasses.field(default=default[f])) for f, kind in groups[name]]
            return name, dataclasses.make_dataclass(name, flags)

        grouped = dataclasses.make_dataclass("Args", map(group, groups))
        grouped = tyro.cli(grouped, description=description, config=(tyro.conf.OmitArgPrefixes,))
        return {k: v for part in vars(grouped).values() for k, v in vars(part).items()}

    own = any(flag.split("=")[0] in ("--model", "--dataset") for flag in sys.argv)
    if not own:
        description += "\nDefaults of the built-in task; for a real model's: --model NAME --help"
    values = cli(vars(Args()) if own else {**vars(Args()), **tiny})
    if values["resume"]:
        path = Path(values["resume"]) / "args.json"
        if not path.is_file():
            fail(f"--resume {values['resume']} is not the folder of a run: {path} is not there")
        saved = attempt(f"--resume: {path}", lambda: json.loads(path.read_text(encoding="utf-8")))
        saved = {**vars(Args()), **saved}
        if (script := Path(sys.argv[0]).stem) != saved.pop("script", None):
            fail(f"--resume {values['resume']} is not a run of {script}.py")
        now, then = int(os.environ.get("WORLD_SIZE", 1)), saved.pop("processes", None)
        if then not in (now, None) and int(os.environ.get("RANK", 0)) == 0:
            print(f"note: it ran on {then} processes, and now on {now}: its samples will differ")
        values = cli(saved)
        for name, value in values.items():
            if value != saved[name] and name not in HARMLESS:
                flag = name.replace("_", "-")
                fail(f"--{flag} {value} would make it another run; --resume's has {saved[name]}")
    return Args(**values)


def check_flags(args):
    """fail() where a flag that all scripts have is wrong; returns a process's prompts per step."""
    may_be_0 = {"seed", "learning_rate", "warmup_steps", "weight_decay", "beta", "mismatch_cap"}
    may_be_0 |= {"lam", "gamma", "entropy_coef", "value_clip_eps", "value_warmup_steps"}
    may_be_0 |= {"value_learning_rate", "baseline_decay"}
    for name, value in vars(args).items():
        number = type(value) in (int, float)
        if number and not (0 < value < math.inf or (value == 0 and name in may_be_0)):
            least = "0 or above" if name in may_be_0 else "above 0"
            fail(f"--{name.replace('_', '-')} must be a number {least}, not {value}")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if args.prompts_per_step % processes:
        fail(f"--prompts-per-step {args.prompts_per_step} must divide by the {processes} processes")
    for name in ("model", "reward_model", "value_model"):
        folder = getattr(args, name, "")
        is_local = folder.startswith(("/", ".", "~")) or (folder and Path(folder).exists())
        if is_local and not (Path(folder) / "config.json").is_file():
            what = "no config.json is there; give the folder of a model, or a hub name"
            fail(f"--{name.replace('_', '-')} {folder}: {what}")
    if args.gpu_memory_utilization > 1:
        fail("--gpu-memory-utilization is a share of the memory, at most 1")
    if "{prompt}" not in args.prompt_template:
        fail("--prompt-template must contain {prompt}, which the prompt replaces")
    if args.track != "none" and importlib.util.find_spec(args.track) is None:
        fail(f"--track {args.track}: it is not installed; pip install {args.track}")
    if args.rollout_engine == "vllm" and why_no_vllm():
        fail(f"--rollout-engine vllm: {why_no_vllm()}")
    return args.prompts_per_step // processes


# ------------------------------------- Problems and text ------------------------------------
def read_rows(name, config, split):
    """Rows of a .jsonl file or of a hub data set's split: a list of (where it stands, the object).

    config "" is the configuration `main`, or the only one. Raises ValueError, with one line that
    says what is wrong and where.
    """
    if not name.endswith(FILES):
        import datasets

        try:
            configs = datasets.get_dataset_config_names(name)
            if not config and len(configs) > 1 and "main" not in configs:
                raise ValueError(f"it has the configurations {configs}: pass --dataset-config")
            config = config or ("main" if "main" in configs else configs[0])
            rows = datasets.load_dataset(name, config, split=split)
        except Exception as error:  # the hub's errors have no class in common
            text = " ".join(str(error).split())[:300]
            what = "a hub data set needs its right name and a network, a file ends in .jsonl"
            raise ValueError(f"{name}: {text} ({what})") from error
        return [(f"{name} {split}[{i}]", row) for i, row in enumerate(rows)]
    try:
        lines = Path(name).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {getattr(error, 'strerror', error)}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{name} line {number} is not a JSON object: {line[:80]}")
        rows.append((f"{name} line {number}", row))
    return rows


def read_problems(name, args, split):
    """[{"prompt": text or chat messages, "answer": text}] of a .jsonl file or hub data set.

    Uses the flags dataset_config, prompt_field ("": prompt, question or problem), answer_field and
    prompt_template. Raises ValueError, with one line that names the row and what is wrong with it.
    """
    fields = [args.prompt_field] if args.prompt_field else ["prompt", "question", "problem"]
    problems = []
    for where, row in read_rows(name, args.dataset_config, split):
        field = next((field for field in fields if field in row), None)
        if field is None or args.answer_field not in row:
            flag = "--answer-field" if field else "--prompt-field"
            note = " (any, if your reward needs none)" if field else ""
            raise ValueError(f"{where} has the fields {sorted(row)}: choose one with {flag}{note}")
        prompt = row[field]
        messages = prompt if isinstance(prompt, list) and prompt else [None]
        is_chat = all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages)
        if not isinstance(prompt, str) and not is_chat:
            what = "neither text nor chat messages"
            raise ValueError(f"{where}: the prompt is {what}, but {str(prompt)[:80]}")
        if isinstance(prompt, str):
            prompt = args.prompt_template.replace("{prompt}", prompt)
        elif args.prompt_template != "{prompt}":
            raise ValueError(f"{where} is not text, which --prompt-template needs")
        problems.append({"prompt": prompt, "answer": str(row[args.answer_field])})
    if not problems:
        raise ValueError(f"{name} is empty")
    return problems


def hold_out(problems, most):
    """(the first problems, the last tenth but at most `most`); ValueError if one is empty."""
    if len(problems) < 2:
        raise ValueError("--dataset needs two problems: one to train on and one to hold out")
    count = min(most, max(1, len(problems) // 10))
    return problems[:-count], problems[-count:]


def problems_of_step(problems, step, per_step, seed):
    """The `per_step` problems of step 1, 2, …, each once per pass over all of them.

    A function of its arguments alone, so a resumed run goes on where it was.
    """
    passes, chosen = {}, []
    for i in range((step - 1) * per_step, step * per_step):
        number, position = divmod(i, len(problems))
        if number not in passes:
            passes[number] = random.Random(f"{seed} {number}").sample(problems, len(problems))
        chosen.append(passes[number][position])
    return chosen


def seed_of(*parts):
    """A seed (31 bits) that is a function of the parts, such as run's seed, step and process."""
    return random.Random(" ".join(map(str, parts))).getrandbits(31)


def score(problems, completions, reward):
    """[reward(prompt, completion, answer)], finite floats; fail() where it raises or is not one."""
    rewards = []
    for problem, completion in zip(problems, completions, strict=True):
        given = f"the prompt was {problem['prompt']!r}, the completion {completion!r}"
        try:
            value = reward(problem["prompt"], completion, problem["answer"])
        except Exception as error:  # whatever the user's function raises
            line = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{Path(line.filename).name} line {line.lineno}"
            fail(f"reward raised {type(error).__name__} at {at}: {error}; {given}")
        is_number = hasattr(value, "__float__") and not getattr(value, "shape", ())
        if not is_number or not math.isfinite(value):
            fail(f"the reward is {value!r}, not a finite number; {given}")
        rewards.append(float(value))
    return rewards


def try_reward(args, problems, reward):
    """fail() where the reward raises for an empty completion, before a model is loaded."""
    if not args.reward_model:
        score(problems[:1], [""], reward)


class RewardModel:
    """A reward(prompt, completion, answer): the score of a sequence classifier with one label."""

    def __init__(self, name, device):
        load = partial(attempt, f"--reward-model {name}")
        self.tokenizer = load(load_tokenizer, name)
        kind = AutoModelForSequenceClassification
        self.model = load(kind.from_pretrained, name, dtype=torch.float32).to(device).eval()
        if self.model.config.num_labels != 1:
            fail(f"--reward-model must have one label, not {self.model.config.num_labels}")

    @torch.no_grad()
    def __call__(self, prompt, completion, answer):
        ids = encode_prompt(self.tokenizer, prompt)
        ids = ids + self.tokenizer(completion, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*ids, self.tokenizer.eos_token_id]], device=self.model.device)
        return self.model(input_ids=ids).logits.item()


_NUMBER = re.compile(
    r"((?:(?<![\w)])-)?)\$?"  # a minus sign, but not the one of 3-5
    r"((?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?|\.\d+)"  # 1,000 or 1000, 0.5 or .5
    r"(?:/(-?\d+))?",  # 1/2
    re.ASCII,
)


def final_number(text):
    """The number that a text ends with, as a Fraction, or None where there is none.

    That is x in the last `#### x`, else the last number in the last `\\boxed{...}`, else the last
    number. It reads thousands separators, `$`, `a/b` and `\\frac{a}{b}`. The time is linear in the
    length of the text, nothing is evaluated, and what has over 60 characters is no number.
    """
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\,", "")
    start = text.rfind("####")
    match = _NUMBER.match(text, re.compile(r"[\s*]*").match(text, start + 4).end())
    if start < 0 or not match:
        start = text.rfind("\\boxed{")
        if start >= 0:
            text, depth = text[start + len("\\boxed{") :], 1
            for end, character in enumerate(text):
                depth += {"{": 1, "}": -1}.get(character, 0)
                if depth == 0:
                    text = text[:end]
                    break
            text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
        match = None
        for match in _NUMBER.finditer(text):  # noqa: B007
            pass
    if not match or len(match[0]) > 60 or (match[3] and not int(match[3])):
        return None
    return Fraction(match[1] + match[2].replace(",", "")) / int(match[3] or 1)


# ------------------------------------ Tokens and log-probs -----------------------------------
def load_tokenizer(name):
    """The tokenizer of a folder or hub name, with a padding token set.

    Nothing is masked by token id, so a padding token that equals EOS hides no EOS from the loss.
    Raises ValueError or OSError where there is no tokenizer, ValueError where it has no EOS.
    """
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no EOS token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_prompt(tokenizer, prompt):
    """Token ids (a list) of a prompt: a string, or chat messages `[{"role": …, "content": …}]`.

    With a chat template a string becomes one user message, the template is applied once, and the
    assistant's header is added. Without one a string is encoded as it is, with the tokenizer's
    special tokens but no EOS; messages raise ValueError. Either way there is at most one BOS.
    """
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError("chat messages need a tokenizer with a chat template")
        ids = tokenizer(prompt)["input_ids"]
        if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text had one already
            ids = ids[1:]
        return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_problems(problems, tokenizer, max_tokens):
    """Adds its "ids" to each problem; fail() where a prompt has more than max_tokens."""
    for problem in problems:
        problem["ids"] = attempt("--dataset", encode_prompt, tokenizer, problem["prompt"])
        if not 0 < len(problem["ids"]) <= max_tokens:
            what = f"has {len(problem['ids'])} tokens; --max-prompt-tokens is {max_tokens}"
            fail(f"the prompt {str(problem['prompt'])[:80]!r} {what}")


def stop_token_ids(tokenizer, generation_config):
    """The set of ids that end a completion: the tokenizer's EOS and the generation config's."""
    listed = generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return {tokenizer.eos_token_id, *listed} - {None}


def truncate_at_stop(ids, stop_ids):
    """(the ids up to and with the first stop token, whether there was one)."""
    for i, token in enumerate(ids):
        if token in stop_ids:
            return ids[: i + 1], True
    return ids, False


def collate(prompts, completions, pad_id):
    """(input_ids (B, T), mask (B, T-1)) of B lists of prompt ids and B lists of completion ids."""
    rows = [torch.tensor(p + c) for p, c in zip(prompts, completions, strict=True)]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    column = torch.arange(1, input_ids.shape[1])
    start = torch.tensor([len(p) for p in prompts])[:, None]
    end = torch.tensor([len(row) for row in rows])[:, None]
    return input_ids, (start <= column) & (column < end)


def token_logprobs(model, input_ids, mask, temperature=1.0, chunk_size=256):
    """(log-prob of each completion token, entropy of its distribution), in nats, 0 where mask is 0.

    The distribution is softmax(logits / temperature), the one sampled from. The logits of a batch
    never exist at once: the head runs over `chunk_size` completion positions at a time, in float32
    from the logits on, and again in the backward pass. Both outputs are differentiable.
    input_ids (B, T); mask, outputs (B, T-1). Raises ValueError unless temperature > 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0 to score samples, not {temperature}")
    if isinstance(model, FSDPModule) and not hasattr(model, "score_tokens"):
        # Parts of the model are called, not its forward: FSDP must gather the weights all the same.
        model.score_tokens = partial(_token_logprobs, model)
        register_fsdp_forward_method(model, "score_tokens")
    score = getattr(model, "score_tokens", partial(_token_logprobs, model))
    return score(input_ids, mask, temperature, chunk_size)


def _token_logprobs(model, input_ids, mask, temperature, chunk_size):
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    hidden, targets = hidden[mask], input_ids[:, 1:][mask]
    head = model.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    values = _Head.apply(hidden, weight, bias, targets, temperature, chunk_size, model)
    empty = torch.zeros(mask.shape, device=mask.device)
    return tuple(empty.masked_scatter(mask, value) for value in values)


class _Head(torch.autograd.Function):
    """(log-probs, entropies), both (N,), of targets (N,) at hidden states (N, H), by chunks.

    With p = softmax(z), z = logits / temperature, and H the entropy: d log p_y / dz = onehot(y) - p
    and dH / dz = -p (log p + H). It is done in place, for a chunk's logits are the largest tensors
    there are, and the head's gradient is added up in one: autograd would make one for each chunk.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, model):
        logprobs, entropies = [], []
        for h, y in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
            z = model_logits(model, h, weight, bias).div_(temperature)
            z -= z.amax(-1, keepdim=True)
            p = z.exp()
            total = p.sum(-1)
            logprobs.append(z.gather(-1, y[:, None])[:, 0] - total.log())
            entropies.append(total.log() - p.mul_(z).sum(-1) / total)
        logprobs, entropies = torch.cat(logprobs), torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else weight.dtype
        ctx.settings = temperature, chunk_size, model, dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, d_logprobs, d_entropies):
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        temperature, chunk_size, model, dtype = ctx.settings
        scale, cap = logit_transform(model)
        hidden, head = hidden.to(dtype), weight.to(dtype)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        if d_logprobs is None:
            d_logprobs = torch.zeros_like(entropies)
        for start in range(0, len(targets), chunk_size):
            rows = slice(start, start + chunk_size)
            z = model_logits(model, hidden[rows], head, bias if bias is None else bias.to(dtype))
            slope = 1 - (z / cap) ** 2 if cap else 1.0
            z.div_(temperature).sub_(z.amax(-1, keepdim=True))
            p = z.exp()
            total = p.sum(-1, keepdim=True)
            p /= total
            d = d_logprobs[rows, None]
            if d_entropies is None:
                z = p.mul_(-d)
            else:
                z.sub_(total.log()).add_(entropies[rows, None]).mul_(-d_entropies[rows, None])
                z.sub_(d).mul_(p)
            z.scatter_add_(1, targets[rows, None], d)
            z = z.mul_(slope).mul_(scale / temperature).to(dtype)
            d_hidden[rows] = z @ head
            if dtype == d_weight.dtype:
                d_weight.addmm_(z.T, hidden[rows])
            else:
                d_weight += z.T @ hidden[rows]
            if bias is not None:
                d_bias += z.sum(0)
        return d_hidden.to(ctx.saved_tensors[0].dtype), d_weight, d_bias, None, None, None, None


def logit_transform(model):
    """(scale, cap) of logits = cap tanh(scale head(hidden) / cap); cap None where there is none."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    return scale, getattr(config, "final_logit_softcapping", None)  # Gemma


def model_logits(model, hidden, weight, bias):
    """Float32 logits (N, V) of hidden states (N, H), scaled or capped as by the model's forward."""
    scale, cap = logit_transform(model)
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    logits = logits.mul_(scale) if scale != 1 else logits
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


@torch.no_grad()
def check_logits(model):
    """Raises ValueError where `model_logits` is not what the model's own forward computes."""
    input_ids = torch.arange(4, device=model.device)[None]
    own = model(input_ids=input_ids, use_cache=False).logits[0].float()
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings()
    ours = model_logits(model, hidden, head.weight, getattr(head, "bias", None))
    if not torch.allclose(ours, own, rtol=1e-3, atol=1e-3):
        kind = type(model).__name__
        raise ValueError(f"{kind} is not supported: its logits are not those of model_logits")


def kl_estimate(logprobs, ref_logprobs, kind="k3"):
    """Per-token estimate of KL(π ‖ ref) from samples of π, in nats, the shape of the inputs.

    With d = logprobs − ref_logprobs: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d (Schulman,
    "Approximating KL divergence", 2020). As a loss k2 has the KL's gradient, k3's is near it while
    d is small, and k1's is zero in expectation. In the reward, k1 is the unbiased one.
    Raises ValueError for another kind.
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        return torch.exp(-difference) - 1 + difference
    raise ValueError(f"the KL estimator is k1, k2 or k3, not {kind}")


def rollout_correction(old_logprobs, rollout_logprobs, mask, cap):
    """Truncated importance weights min(π_trainer / π_engine, cap), detached, 0 where mask is 0.

    The engine computes with other kernels, on a GPU in another precision, than the trainer: its
    samples come from a slightly different policy, and the weight corrects for that (Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025). All (B, T-1).
    """
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    return log_ratio.exp().clamp(max=cap) * mask


def masked_mean(values, mask):
    """Mean of `values` where `mask` is true, a scalar; 0 where that is nowhere."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


class TransformersEngine:
    """Rollouts with transformers' `generate`, on a copy of the model in the compute's dtype."""

    def __init__(self, args, stop_ids, pad_id, device, dtype):
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
        self.stop_ids, self.pad_id = stop_ids, pad_id
        self.budget = 32_768  # tokens at a time; a flag for it would change the samples

    def sync(self, weights):
        """Copies (name, tensor) pairs, all of the model's, into the engine."""
        own = self.model.state_dict()
        for name, weight in weights:
            own[name].copy_(weight)

    def generate(self, prompts, samples, temperature, max_tokens, seed):
        """Samples (greedy at temperature 0) `samples` completions of each prompt, lists of ids.

        Returns P * samples completions up to and with their stop token, the p-th prompt's from row
        p * samples on, and the log-probs of their tokens in the distribution sampled from.
        """
        torch.manual_seed(seed)
        rows = [prompt for prompt in prompts for _ in range(samples)]
        size = max(1, self.budget // (max(map(len, rows), default=0) + max_tokens))
        done = []
        for start in range(0, len(rows), size):
            done += self._generate(rows[start : start + size], temperature, max_tokens)
        return [ids for ids, _ in done], [logprobs for _, logprobs in done]

    @torch.no_grad()
    def _generate(self, rows, temperature, max_tokens):
        width = max(map(len, rows))
        prompts = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows])
        real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        logprobs, last = [], None

        def record(ids, logits):  # called before each token: scores the one before it
            nonlocal last
            if last is not None:
                logprobs.append(last.gather(1, ids[:, -1:]))
            last = (logits.float() / (temperature or 1.0)).log_softmax(-1)
            return logits

        # The checkpoint's own sampling settings (top-k, penalties, …) must not leak in.
        self.model.generation_config = GenerationConfig(
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0 if temperature else None,
            max_new_tokens=max_tokens,
            eos_token_id=sorted(self.stop_ids),
            pad_token_id=self.pad_id,
        )
        device = self.model.device
        ids = self.model.generate(
            prompts.to(device), attention_mask=real.to(device), logits_processor=[record]
        )
        logprobs = torch.cat([*logprobs, last.gather(1, ids[:, -1:])], 1).tolist()
        completions = [truncate_at_stop(row, self.stop_ids)[0] for row in ids[:, width:].tolist()]
        return [(row, kept[: len(row)]) for row, kept in zip(completions, logprobs, strict=True)]

    def sleep(self):
        pass


def why_no_vllm():
    """Why vLLM cannot run here, or "" where it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        from vllm.platforms import current_platform
    except Exception as error:  # an installation that is broken in any way
        return f"vLLM does not import: {error}"
    return "this vLLM finds no device it runs on" if current_platform.is_unspecified() else ""


# ----------------------------------------- Processes -----------------------------------------
def start_processes():
    """Joins the processes of torchrun, if it started this one; returns this one's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    if on_gpu and device.index >= torch.cuda.device_count():
        fail(f"there are more processes than the {torch.cuda.device_count()} GPUs of this machine")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        # What is counted is on the CPU, what is trained on the GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return torch.device(device)


def precision(dtype, device):
    """(the dtype to compute in, the autocast context for it) of --dtype."""
    bf16 = dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    return torch.bfloat16 if bf16 else torch.float32, autocast


def rank():
    """The number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of processes. A group of one may be vLLM's own, and is never asked."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(items):
    """This process's part of a list, in order, and as long as the others' if that is possible."""
    return items[len(items) * rank() // world_size() : len(items) * (rank() + 1) // world_size()]


def across(tensor, operation=dist.ReduceOp.SUM):
    """A tensor reduced over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, operation)
    return tensor


def gather(items):
    """The lists of all processes, joined."""
    lists = [items]
    if world_size() > 1:
        lists = [None] * dist.get_world_size()
        dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def load_model(kind, name, device, gradient_checkpointing=False, **options):
    """A float32 transformers model of class `kind`, without dropout, sharded over the processes.

    Dropout would make the ratio of an unchanged policy differ from 1.
    """
    load = partial(attempt, f"--model {name}")
    config = load(AutoConfig.from_pretrained, name, **options)
    for key, value in config.to_dict().items():
        if ("drop" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    model = load(kind.from_pretrained, name, config=config, dtype=torch.float32)
    if model.get_output_embeddings() is not None:
        load(check_logits, model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # a critic's is not in the configuration
            module.p = 0.0
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    if world_size() == 1:
        return model.to(device)
    blocks = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for module in [*blocks, model]:
        # The loss is each process's share of a sum, so gradients are summed, not averaged.
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def full_weights(model):
    """(name, whole tensor) of each weight, one at a time, tied ones under both names."""
    for name, weight in model.state_dict().items():
        yield name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def clip_gradient(model, max_norm):
    """Scales the gradient down to `max_norm`; returns its norm before, over all processes."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
    if not math.isfinite(norm):
        fail(f"the gradient's norm is {norm}: lower --learning-rate, or use --dtype float32")
    return norm


def micro_batches(batch, rows, budget, device):
    """(rows, their tensors) in parts of at most `budget` tokens, padding included.

    batch: tensors (B, T-1) or (B, 1), and input_ids (B, T). A part has rows of similar length, cut
    to the longest; a row longer than the budget stands alone. All processes yield as many parts:
    one that has no more rows gets row 0 with an empty mask, and takes part in the collectives.
    """
    columns = torch.arange(1, batch["mask"].shape[1] + 1)
    lengths = (batch["mask"] * columns).amax(1).tolist()
    parts = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if not parts or (lengths[parts[-1][0]] + 1) * (len(parts[-1]) + 1) > budget:
            parts.append([])
        parts[-1].append(row)
    count = int(across(torch.tensor(max(1, len(parts))), dist.ReduceOp.MAX))
    for part in parts + [[]] * (count - len(parts)):
        index = part or [0]
        width = lengths[index[0]]
        piece = {
            name: tensor[index, : width + (name == "input_ids")].to(device)
            for name, tensor in batch.items()
        }
        if not part:
            piece["mask"] &= False
            piece["weights"] = torch.zeros_like(piece["mask"], dtype=torch.float32)
        yield part, piece


def make_batch(problems, completions, engine_logprobs, pad_id):
    """The tensors of B rollouts, lists of ids and of log-probs: input_ids (B, T), mask (B, T-1),
    engine_logprobs (B, T-1)."""
    input_ids, mask = collate([problem["ids"] for problem in problems], completions, pad_id)
    flat = torch.tensor([value for row in engine_logprobs for value in row])
    logprobs = torch.zeros(mask.shape).masked_scatter(mask, flat)
    return {"input_ids": input_ids, "mask": mask, "engine_logprobs": logprobs}


def at_last_token(scores, mask):
    """(B, T) with each of scores (B,) at the last true column of mask (B, T), 0 elsewhere."""
    columns = torch.arange(mask.shape[1]) * mask
    return torch.zeros(mask.shape).scatter(1, columns.amax(1, keepdim=True), scores[:, None])


def batch_kl(model, ref_model, batch, args, autocast):
    """(k1 per token (B, T-1), the metric of its mean) for a KL in the reward; adds old_logprobs."""
    batch["old_logprobs"] = batch_logprobs(model, batch, args, autocast)
    ref_logprobs = batch_logprobs(ref_model, batch, args, autocast)
    kl = kl_estimate(batch["old_logprobs"], ref_logprobs, "k1")
    return kl, {"kl/mean": global_mean(kl[batch["mask"]])}


def global_mean(values):
    """The mean over all processes of a tensor's values, a float."""
    total = across(torch.tensor([values.double().sum(), values.numel()], dtype=torch.float64))
    return (total[0] / total[1]).item()


def global_std(values):
    """The population standard deviation over all processes of a tensor's values, a float."""
    return global_mean((values - global_mean(values)) ** 2) ** 0.5


def minibatches(rows, parts, epochs, seed):
    """Tensors of row numbers: `rows` shuffled into `parts`, `epochs` times over."""
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(rows, generator=shuffle).chunk(parts)


class Totals:
    """Metrics of a batch's updates: sums over tokens, and the loss and gradient norm of each."""

    def __init__(self):
        self.sums, self.losses = defaultdict(float), defaultdict(float)
        self.tokens, self.positions, self.largest_mismatch, self.norms = 0, 0, 0.0, []

    def count(self, mask, loss, metrics):
        """Adds a micro-batch's loss (a scalar), and its metrics (B, T-1) where mask is true."""
        for name, values in metrics.items():
            values = torch.where(mask, values.detach(), 0)
            self.sums[name] += values.sum(dtype=torch.float64).item()
            if name == "engine/mismatch":
                self.largest_mismatch = max(self.largest_mismatch, values.max().item())
        self.tokens += mask.sum().item()
        self.positions += mask.numel()
        self.losses["loss/policy"] += loss.item()

    def metrics(self):
        """Means over the tokens of all processes, None where there was none, or over updates."""
        counts = [self.tokens, self.positions, *self.losses.values(), *self.sums.values()]
        tokens, positions, *totals = across(torch.tensor(counts, dtype=torch.float64)).tolist()
        largest = across(torch.tensor(self.largest_mismatch), dist.ReduceOp.MAX).item()
        losses = {name: totals.pop(0) / len(self.norms) for name in self.losses}
        return {
            **losses,
            "policy/grad_norm": sum(self.norms) / len(self.norms),
            **{name: totals.pop(0) / tokens if tokens else None for name in self.sums},
            "engine/mismatch_max": largest,
            "throughput/padding": 1 - tokens / positions,
        }


def check_mismatch(mismatch, limit):
    """fail() where a mean difference of log-probs (nats, or None) is over the limit."""
    if mismatch is not None and not mismatch <= limit:
        what = f"engine and trainer differ by {mismatch:.2g} nats a token, over --mismatch-limit"
        fail(f"{what} {limit}: the engine does not run the trainer's weights")


@torch.no_grad()
def score_batch(batch, budget, device, function):
    """(B, T-1): function(micro-batch), (rows of it, T-1), 0 in rows that will not be "trained"."""
    scores = torch.zeros(batch["mask"].shape)
    rows = batch.get("trained", torch.ones(len(scores), 1))[:, 0].nonzero()[:, 0].tolist()
    for part, piece in micro_batches(batch, rows, budget, device):
        values = function(piece)
        scores[part, : values.shape[1]] = values[: len(part)].cpu()
    return scores


def batch_logprobs(model, batch, args, autocast):
    """Log-probs (B, T-1) of a batch under a model, 0 in rows that will not be "trained"."""

    def logprobs(part):
        with autocast:
            return token_logprobs(model, part["input_ids"], part["mask"], args.temperature)[0]

    scores = score_batch(batch, args.tokens_per_micro_batch, model.device, logprobs)
    if isinstance(model, FSDPModule):
        model.reshard()  # only a backward pass would do it, and a reference model has none
    return scores


# ------------------------------------------- Disk --------------------------------------------
def open_run(args, script):
    """The run's folder (a Path), made with its args.json, or the one of --resume.

    Fails if a run has written into it already, or if it cannot be written.
    """
    name = args.output_dir or f"runs/{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    while rank() == 0 and not args.output_dir and Path(name).exists():  # started in one second
        name += "+"
    run_dir = Path(args.resume or gather([name])[0])  # the first process's clock counts
    if rank() == 0:
        if args.resume:
            find_checkpoint(run_dir, args.steps)
        elif run_dir.exists():
            # A run that was killed before its first row has left these alone.
            found = {path.name for path in attempt("--output-dir", list, run_dir.glob("*"))}
            if run_dir.is_file() or found - {"args.json", "checkpoints"}:
                what = f", or --resume {run_dir}" if "args.json" in found else ""
                fail(f"{run_dir} is not an empty folder: choose another --output-dir{what}")
        if not args.resume:  # a run that is refused leaves no folder
            metrics = run_dir / "metrics.jsonl"
            atexit.register(lambda: metrics.exists() or shutil.rmtree(run_dir, ignore_errors=True))
        attempt("--output-dir", (run_dir / "checkpoints").mkdir, parents=True, exist_ok=True)
        ran_on = {"script": script, "processes": world_size()}
        text = json.dumps({**ran_on, **vars(args)}, indent=1)
        attempt("--output-dir", replace_file, run_dir / "args.json", text)
    return run_dir


def replace_file(path, text):
    """Writes a text file, whole or not at all."""
    aside = path.with_suffix(".incomplete")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def write_rows(path, rows):
    """Appends rows to a .jsonl file; fail() where the disk refuses."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def append():
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)

    if rank() == 0:
        attempt(f"cannot write {path}", append)


def save_checkpoint(run_dir, step, numbers=None, **trained):
    """Writes checkpoints/step-<step> and keeps the last two.

    trained: name=(model, optimizer). numbers: a dict of floats that belong to the state.
    What is half-written has another name, so a checkpoint is complete or not there. fail() where
    the disk refuses.
    """
    path = run_dir / "checkpoints" / f"step-{step:06d}"
    aside = path.with_name("incomplete")
    if rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    gather([])  # nobody writes before that is gone
    state = {name: list(get_state_dict(*pair)) for name, pair in trained.items()}
    state["numbers"] = numbers or {}
    save = partial(attempt, f"cannot save step {step}, the checkpoint before it is still good")
    save(dcp.save, state, checkpoint_id=aside, no_dist=world_size() == 1)  # written and fsynced
    if rank() == 0:
        os.rename(aside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        for old in sorted(path.parent.glob("step-*"))[:-2]:
            shutil.rmtree(old)


def find_checkpoint(run_dir, steps):
    """(path, step) of a run's last checkpoint; fail() where there is none or no step is left."""
    paths = sorted((run_dir / "checkpoints").glob("step-*"))
    if not paths:
        fail(f"--resume {run_dir} has no checkpoint: the run was stopped before its first")
    step = int(paths[-1].name.removeprefix("step-"))
    # One that was killed while it saved its model has that still to do.
    if step > steps or (step == steps and (run_dir / "model").exists()):
        fail(f"--resume {run_dir} has done all of its {step} steps: raise --steps to go on")
    return paths[-1], step


def load_checkpoint(run_dir, steps, numbers=None, **trained):
    """Loads the last checkpoint into name=(model, optimizer) and numbers, and returns its step.

    What the run wrote after that step is cut off metrics.jsonl and samples.jsonl.
    """
    path, step = find_checkpoint(run_dir, steps)
    state = {name: list(get_state_dict(*pair)) for name, pair in trained.items()}
    state["numbers"] = numbers if numbers is not None else {}
    attempt("--resume", dcp.load, state, checkpoint_id=path, no_dist=world_size() == 1)
    for name, pair in trained.items():
        set_state_dict(*pair, model_state_dict=state[name][0], optim_state_dict=state[name][1])
    for path in run_dir.glob("*.jsonl") if rank() == 0 else []:
        # What a kill cut off, be it in a character, is left out.
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        kept = [line + "\n" for line in lines if json.loads(line)["step"] <= step]
        replace_file(path, "".join(kept))
    return step


def save_model(path, model, tokenizer, dtype):
    """Writes a folder that transformers and vLLM load, whole or not at all."""
    weights = {}
    for name, weight in full_weights(model):
        if rank() == 0:  # the others only help to gather it
            weights[name] = weight.to("cpu", dtype)
    if rank() == 0:
        for name in model.all_tied_weights_keys:  # stored once, under the other name
            weights.pop(name, None)
        aside = path.with_name("model.incomplete")
        for old in (aside, path):
            shutil.rmtree(old, ignore_errors=True)
        save = partial(attempt, "cannot save the model")
        save(model.save_pretrained, aside, state_dict=weights)
        save(tokenizer.save_pretrained, aside)
        config = json.loads((aside / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")  # not that of the float32 masters
        save((aside / "config.json").write_text, json.dumps(config, indent=2) + "\n")
        os.rename(aside, path)


def catch_signals():
    """A list that gets the number of the first SIGINT or SIGTERM; a second one quits at once."""
    caught = []

    def handle(number, frame):
        # torchrun passes on what the terminal has sent already: that is not a second one.
        if caught and time.monotonic() - caught[1] > 1:
            os._exit(128 + number)
        if not caught:
            caught.extend([number, time.monotonic()])
            os.write(1, b"\nstopping after this step; once more to quit at once\n")

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return caught


# ----------------------------------------- The screen ----------------------------------------
def say(*words):
    """Prints on the first process."""
    if rank() == 0:
        print(*words, flush=True)


def rollout_metrics(clock, rewards, completions, stop_ids, group_size):
    """Metrics over all processes of their rewards and completions (lists, one a row), and of the
    seconds of generate, score and update, whose bounds are the clock's four times."""
    seconds = [end - start for start, end in itertools.pairwise(clock)]
    rewards = torch.tensor(gather(rewards), dtype=torch.float64)
    lengths = gather([len(ids) for ids in completions])
    ended = gather([truncate_at_stop(ids, stop_ids)[1] for ids in completions])
    groups = rewards.view(-1, group_size)
    uniform = (groups == groups[:, :1]).all(1).double().mean().item()
    return {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/uniform_groups": uniform if group_size > 1 else None,  # one is no group
        "generation/length": sum(lengths) / len(lengths),
        "generation/truncated": 1 - sum(ended) / len(ended),
        **dict(zip(("time/generate", "time/score", "time/update"), seconds, strict=True)),
        "time/step": sum(seconds),
        "throughput/tokens_per_second": sum(lengths) / sum(seconds),
    }


def show_samples(problems, completions, rewards):
    """The first three completions and their rewards."""
    for problem, text, value in list(zip(problems, completions, rewards, strict=True))[:3]:
        say(f"    {value:g}  {str(problem['prompt'])[-80:]!r} -> {text[-200:]!r}")


def show_header(script, args, run_dir, model, no_vllm, dtype, train, held_out):
    """What is about to run, with what, and where the results go."""
    engine = f"transformers ({no_vllm})" if no_vllm else "vLLM"
    parameters = sum(weight.numel() for weight in model.parameters())
    batch = f"{args.prompts_per_step} prompts x {getattr(args, 'group_size', 1)} completions"
    say(f"{script:9} {args.model}, {parameters:,} parameters")
    say(f"data      {args.dataset}: {train:,} problems, and {held_out:,} held out")
    say(f"rollouts  {engine}; {batch} in each of {args.steps} steps")
    say(f"device    {world_size()} x {model.device.type}, {str(dtype).removeprefix('torch.')}")
    say(f"results   {run_dir}")
    say("A loss near 0 is no fault, nor one that rises: it measures no progress. Watch the reward,")
    say("the entropy, which should not reach 0 while the reward is low, the uniform share (prompts")
    say("whose completions score alike), and the held-out accuracy, of greedy completions.\n")


def log_step(run_dir, row, steps, tracker):
    """Writes a row of metrics, to the tracker too, and shows it as one line."""
    write_rows(run_dir / "metrics.jsonl", [row])
    if tracker and rank() == 0:
        tracker.log({k: v for k, v in row.items() if v is not None}, step=row["step"])
    names = {
        "reward/mean": "reward {:.3f}",
        "reward/uniform_groups": "uniform {:.2f}",
        "generation/length": "length {:.1f}",
        "policy/entropy": "entropy {:.3f}",
        "policy/clip_frac": "clipped {:.3f}",
        "kl/mean": "kl {:.4f}",
        "critic/explained_variance": "explained {:.2f}",
        "throughput/tokens_per_second": "{:,.0f} tokens/s",
        "eval/accuracy": "held-out {:.3f}",
    }
    shown = [text.format(row[key]) for key, text in names.items() if row.get(key) is not None]
    say(f"{row['step']:4d}/{steps}  " + "  ".join(shown))


def log_samples(run_dir, step, problems, completions, rewards, count):
    """Writes the first `count` completions of a step, a group."""
    rows = []
    for problem, completion, value in zip(problems, completions, rewards, strict=True):
        rows.append({"step": step, "prompt": problem["prompt"], "answer": problem["answer"]})
        rows[-1] |= {"completion": completion, "reward": value}
    write_rows(run_dir / "samples.jsonl", rows[:count])


def start_tracker(args, run_dir):
    """The module wandb or trackio with a run begun, on the first process, or None."""
    if args.track == "none" or rank() != 0:
        return None
    tracker = importlib.import_module(args.track)
    tracker.init(project="rl-for-lm", name=run_dir.name, config=vars(args))
    return tracker


def leave(status, tracker):
    """Ends a run of several processes when all have come here, or of one that failed."""
    if tracker:
        tracker.finish()
    if world_size() > 1:
        # Python's own way out aborts now and then: gloo's threads are still there.
        gather([])
        sys.stdout.flush()
        os._exit(status)
    if status:
        raise SystemExit(status)


def stop_run(run_dir, script, tracker):
    """Ends a run that a signal stopped, after its checkpoint was written."""
    start = f"torchrun --nproc-per-node {world_size()}" if world_size() > 1 else "python"
    say(f"stopped; go on with: {start} {script}.py --resume {run_dir}")
    leave(130, tracker)


def finish_run(run_dir, model, tokenizer, dtype, began, tracker):
    """Saves the model, draws the curves, and says how it went and how to load the model."""
    save_model(run_dir / "model", model, tokenizer, dtype)
    if rank() == 0:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        accuracy = [a for line in lines if (a := json.loads(line).get("eval/accuracy")) is not None]
        seconds = time.perf_counter() - began
        say(f"\nheld-out accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}, {seconds:.0f} s")
        plot = Path(__file__).with_name("plot.py")
        if plot.exists():
            subprocess.run([sys.executable, plot, run_dir], check=False)
        say(f"model: {run_dir / 'model'}")
        say(f'AutoModelForCausalLM.from_pretrained("{run_dir / "model"}")')
    leave(0, tracker)
