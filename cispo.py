"""CISPO: clipped importance-sampling weights (MiniMax-M1, 2025, section 3.1).

REINFORCE with the ratio as a weight that is capped and not differentiated. PPO and GRPO drop a
token's gradient once its ratio leaves the clip range; here every token keeps it, only bounded:

    A_i     = (R_i - mean(R)) / (std(R) + eps)
    rho_it  = exp(logp_it - old_logp_it)                    (1 in the first update of a batch)
    loss_it = -stop_gradient(clip(rho_it, 1 - eps_low, 1 + eps_high)) A_i logp_it c_it + beta KL_it
    loss    = sum over all tokens / number of tokens

c = min(p_trainer / p_engine, cap) is not the paper's: it is nearly 1, and corrects for an engine
that samples in another arithmetic (--mismatch-cap). Nor is the KL, k3's or k2's with --beta.

Rare tokens that turn a solution around ("wait", "however") are those whose ratios leave the range
first, which is why the paper keeps them. There is no lower bound by default (eps_low = 1), and the
weight is at most 5 (eps_high = 4): a bound, but no trust region. With one update the ratio is
1, and GRPO, GSPO and CISPO have one gradient but for their weights of the tokens. Left out: the
length penalty and the sampling of the paper.

Watch reward/mean and eval/accuracy rise, policy/entropy fall slowly, policy/clip_frac stay small.
The loss says nothing: its value is not the objective's, only its gradient is.

    python cispo.py                                       # the built-in task, on any machine
    python cispo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --group-size 16
    torchrun --nproc-per-node 8 cispo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k
"""

import glob
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve other processes
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over within one process
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import datasets
import math_verify
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import tyro
from filelock import FileLock
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM
from transformers.utils import cached_file

import common

SCRIPT, HERE = Path(__file__).stem, Path(__file__).resolve().parent
ENGINE = "vllm" if importlib.util.find_spec("vllm") else "transformers"
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
Aggregation = Literal["sequence-sum", "sequence-mean", "token-mean", "constant"]


@dataclass
class Args:
    # data
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"  # causal language model: a folder or a hub name
    dataset: str = "openai/gsm8k"  # problems: a hub name, or a .jsonl, .json, .csv or .parquet file
    dataset_config: str = ""  # the hub data set's configuration ("": main, or the only one)
    split: str = "train"  # what to train on, such as train[:90%]; a file is one split, train
    eval_dataset: str = ""  # where the held-out problems are, if not in --dataset
    eval_split: str = "test[:200]"  # what is held out, such as train[90%:]
    prompt_field: str = "question"  # field of the prompt: text, or a list of chat messages
    answer_field: str = "answer"  # field of the right answer; a.b is field b of field a
    seed: int = 0  # decides the order of the problems, and the samples
    output_dir: str = ""  # the run's folder ("": runs/<script>-<time>)
    resume: str | None = None  # folder of a run to go on with, from its last checkpoint
    # rollouts
    steps: int = 200  # batches of rollouts to train on
    prompts_per_step: int = 16  # prompts in a batch, over all processes
    group_size: int = 16  # completions sampled for each prompt
    max_completion_tokens: int = 512  # where a completion is cut; it is scored as it is
    temperature: float = 1.0  # divides the logits, in sampling and in the update
    # algorithm
    minibatches: int = 4  # updates made of each pass over a batch; one in all: no clip acts
    update_epochs: int = 1  # passes over each batch
    clip_eps_low: float = 1.0  # eps_low: the weight is at least 1 - eps_low
    clip_eps_high: float = 4.0  # eps_high: the weight is at most 1 + eps_high
    beta: float = 0.0  # weight of KL(policy || first model) in the loss; 0: no reference model
    kl_estimator: Literal["k2", "k3"] = "k3"  # k2: the KL's gradient; k3: nearly, near the first
    scale_by_std: bool = True  # divide advantages by the group's standard deviation
    loss_aggregation: Aggregation = "token-mean"  # constant: over --max-completion-tokens
    # optimizer
    learning_rate: float = 1e-6  # AdamW's, after the warm-up
    warmup_steps: int = 10  # steps over which the learning rate rises from 0
    max_grad_norm: float = 1.0  # a longer gradient is scaled down to this norm
    # engine
    rollout_engine: Literal["vllm", "transformers"] = ENGINE  # what samples: vLLM if installed
    gpu_memory_utilization: float = 0.4  # share of the GPU's memory that vLLM takes
    mismatch_cap: float = 2.0  # cap of the factor p_trainer / p_engine on a loss; 0: no factor
    mismatch_limit: float = 0.1  # mean |log p_trainer - log p_engine| that stops the run, in nats
    micro_batch_size: int = 8  # completions in one forward pass: fewer take less memory
    gradient_checkpointing: bool = False  # recompute activations: less memory, more time
    dtype: Literal["bfloat16", "float32"] = DTYPE  # to compute in: bfloat16 on a GPU
    # logging
    eval_every: int = 20  # steps between evaluations on the held-out problems
    save_every: int = 20  # steps between checkpoints; the last one is kept
    track: Literal["none", "wandb", "trackio"] = "none"  # where else to send the metrics

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 1 if type(value) is int and not name.endswith(("seed", "warmup_steps")) else 0
            least = 2 if name == "group_size" else least  # one completion has no group
            if isinstance(value, int | float) and not least <= value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
        if not 0.01 <= self.temperature <= 2:
            raise ValueError(f"--temperature must be from 0.01 to 2, not {self.temperature}")
        if self.prompts_per_step % self.minibatches:
            raise ValueError("--prompts-per-step must divide by --minibatches: groups stay whole")


# Without --model and --dataset: 112,000 parameters learn sums in 40 seconds on two cores.
TINY = {"model": f"{HERE}/tiny/model", "dataset": f"{HERE}/tiny/train.jsonl"}
TINY |= {"eval_dataset": f"{HERE}/tiny/heldout.jsonl", "eval_split": "train", "eval_every": 5}
TINY |= {"steps": 40, "group_size": 8, "max_completion_tokens": 40, "micro_batch_size": 64}
TINY |= {"learning_rate": 1e-4, "warmup_steps": 3}
# What may change when a run is resumed: it stays the same run.
MAY_CHANGE = {"resume", "steps", "eval_every", "save_every", "track"}
MAY_CHANGE |= {"micro_batch_size", "gradient_checkpointing", "gpu_memory_utilization"}


def parse_args():
    """The flags, over TINY without --model and --dataset, and over the run's own with --resume."""
    own = any(word.split("=")[0] in ("--model", "--dataset") for word in sys.argv)
    args = tyro.cli(Args, default=Args() if own else Args(**TINY), description=__doc__)
    if args.resume is None:
        return args
    with explain(f"--resume {args.resume} is not the folder of a run of {SCRIPT}.py"):
        saved = json.loads(Path(args.resume, "args.json").read_text(encoding="utf-8"))[SCRIPT]
        args = tyro.cli(Args, default=Args(**saved), description=__doc__)
    for name in saved.keys() - MAY_CHANGE:
        if getattr(args, name) != saved[name]:
            sys.exit(f"error: --resume goes on with the run's {name}, which is {saved[name]}")
    return args


@contextmanager
def explain(what):
    """Ends the run with one line, `what` and the error's words, where the code inside raises."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # the end of this file says what helps
    except Exception as error:
        sys.exit(f"error: {what}: " + " ".join(f"{error} {error.__cause__ or ''}".split())[:400])


# ------------------------------------ The functions to edit ------------------------------------
def load_problems(args, tokenizer, name, split):
    """[{"prompt": text or chat messages, "ids": its tokens, "answer": text}], one for each row."""
    path, config, problems = Path(name), args.dataset_config or None, []
    with explain(f"cannot read the split {split} of {name}"):
        if path.is_file():
            for line in path.open("rb") if path.suffix == ".jsonl" else []:
                if line.count(b"[") + line.count(b"{") > 5_000:
                    json.loads(line)  # raises where it is nested so deeply that pyarrow crashes
            files = glob.escape(path.name)
            rows = datasets.load_dataset(str(path.parent), data_files=files, split=split)
        else:
            if not config and "main" in datasets.get_dataset_config_names(name):
                config = "main"
            rows = datasets.load_dataset(name, config, split=split)
    for number, row in enumerate(rows.flatten()):  # field b of field a becomes a.b
        with explain(f"row {number} of {split} of {name}, with the fields {sorted(row)}"):
            prompt, answer = row[args.prompt_field], row[args.answer_field]
            if isinstance(answer, float):
                answer = format(Decimal(str(answer)), "f")  # 0.00001, and not 1e-05
            usable = isinstance(answer, str | int) and read_answer(str(answer))
            if not usable:
                raise ValueError(f"reward and read_answer cannot use the --answer-field {answer!r}")
            ids = common.encode_prompt(tokenizer, prompt)
        problems.append({"prompt": prompt, "ids": ids, "answer": str(answer)})
    return problems


read = lru_cache(maxsize=10_000)(math_verify.parse)  # many completions end alike


def read_answer(answer):
    """What math-verify reads in an answer of the data's, or [] where it is nothing to compare."""
    answer = answer.split("####")[-1].strip().strip("$")  # GSM8K writes #### before its answers
    if re.fullmatch(r"-?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?|-?\d+/\d+", answer):
        return read(answer)
    if re.fullmatch(r"(\\text\{)?[A-Za-z ]{2,}\}?|[-\d. /e]+|\d+:\d\d\b.*", answer):
        return []  # words, dates and times, which it takes for products and differences
    return read(f"${answer}$")


def reward(prompt, completion, answer):
    """Score (a float) of a completion (text): 1 if it ends with the data's answer, else 0."""
    ending = completion.split("####")[-1].replace("\N{MINUS SIGN}", "-")
    return float(math_verify.verify(read_answer(answer), read(ending)))


# ---------------------------------------- The algorithm ----------------------------------------
# input_ids are (B, T); all else per token is (B, T-1), and column t is about input_ids[:, t + 1].
# The mask is true on the tokens that are trained: the completion's, its stop token included. One
# cut at the limit has none, and is trained as it is. Row p * G + k is prompt p's k-th completion.
def group_advantages(rewards, scale_by_std=True, eps=1e-8):
    """A_i = (R_i - mean) / (std + eps) in each prompt's group (DeepSeekMath, section 4.1.2).

    rewards and result (P, G), computed in float64. The std is the population's (divided by G); a
    uniform group gets exactly 0. Unscaled: Dr. GRPO's (Liu et al., 2025), (G-1)/G times RLOO's.
    """
    rewards = rewards.double()
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scale_by_std:
        advantages /= rewards.std(1, correction=0, keepdim=True) + eps
    uniform = torch.isclose(rewards, rewards[:, :1], rtol=1e-12, atol=0).all(1, keepdim=True)
    return advantages.masked_fill(uniform, 0.0).float()


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_eps_low=1.0, clip_eps_high=4.0):
    """-stop_gradient(clip(rho, 1 - eps_low, 1 + eps_high)) A logp per token (MiniMax-M1, eq. 4).

    logprobs, old_logprobs, mask (B, T-1), advantages (B, 1) or (B, T-1). Returns the loss (B, T-1),
    0 where mask is 0, and a bool (B, T-1), true where the weight was capped.
    """
    ratio = common.bounded_exp(torch.where(mask, logprobs - old_logprobs, 0.0))
    weight = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    weight = weight.detach()  # or the gradient would be the ratio's, as GRPO's
    loss = -weight * advantages * torch.where(mask, logprobs, 0.0)
    return torch.where(mask, loss, 0.0), mask & (weight != ratio)


def loss_weights(mask, how, max_tokens):
    """Weights (B, T-1) of the per-token losses: loss = (per_token * weights).sum().

    mask (B, T-1) has the rows of a whole update, so no split into parts changes the gradient.
    """
    sequences, length = len(mask), mask.sum(1, keepdim=True).clamp(min=1)
    divisors = {"sequence-sum": sequences, "sequence-mean": sequences * length}
    divisors |= {"token-mean": mask.sum().clamp(min=1), "constant": sequences * max_tokens}
    return mask / divisors[how]


def micro_batches(batch, rows, size, device):
    """This process's share of `rows`, as (their numbers, their tensors), at most `size` at a time.

    Dealt out by length, as many to each process: so none waits for another. Columns that no row
    needs are cut off.
    """
    lengths = batch["mask"].sum(1)
    rows = rows[lengths[rows].argsort(stable=True)][dist.get_rank() :: dist.get_world_size()]
    for numbers in rows.split(size):
        width = batch["mask"][numbers].any(0).nonzero().max() + 1
        part = {name: tensor[numbers, :width].to(device) for name, tensor in batch.items()}
        part["input_ids"] = batch["input_ids"][numbers, : width + 1].to(device)
        yield numbers, part


@torch.no_grad()
def score_tokens(model, batch, args):
    """(log-probs, entropies) of a batch's tokens under a model, (B, T-1) each, no gradient."""
    scores, rows = torch.zeros(2, *batch["mask"].shape), torch.arange(len(batch["mask"]))
    for numbers, part in micro_batches(batch, rows, args.micro_batch_size, model.device):
        values = common.token_logprobs(model, part["input_ids"], part["mask"], args.temperature)
        scores[:, numbers, : part["mask"].shape[1]] = torch.stack(values).cpu()
    dist.all_reduce(scores)  # a sum: each row is one process's, and 0 in the others
    return scores


def update(model, optimizer, batch, args):
    """The learning step: --update-epochs passes over the batch, --minibatches updates in each.

    batch, the same in all processes: input_ids (B, T); mask, old_logprobs, engine_logprobs and,
    with beta, ref_logprobs (B, T-1); advantages (B, 1). A minibatch is whole groups in the order
    they were drawn, which is random already: so it is the same for any number of processes.
    """
    minibatches = torch.arange(len(batch["mask"])).chunk(args.minibatches)
    how, limit = args.loss_aggregation, args.max_completion_tokens
    batch["weights"] = torch.cat([loss_weights(batch["mask"][m], how, limit) for m in minibatches])
    updates = args.minibatches * args.update_epochs
    tokens = batch["mask"].sum().item() * args.update_epochs
    processes, metrics = dist.get_world_size(), Counter()
    for minibatch in minibatches * args.update_epochs:
        # Rows without an advantage have no gradient, unless the reference gives them one: no pass
        # is paid for them, but where they fill up the processes' equal shares. (Adam's momentum
        # moves the weights in an update without any gradient, too.)
        has_gradient = batch["advantages"][minibatch].any(1) | (args.beta > 0)
        count = processes * max(1, math.ceil(has_gradient.sum().item() / processes))
        rows = minibatch[has_gradient.int().argsort(descending=True, stable=True)[:count]]
        for _, part in micro_batches(batch, rows, args.micro_batch_size, model.device):
            ids, mask, old_logprobs = part["input_ids"], part["mask"], part["old_logprobs"]
            logprobs, _ = common.token_logprobs(model, ids, mask, args.temperature)  # with gradient
            advantages, low, high = part["advantages"], args.clip_eps_low, args.clip_eps_high
            losses, clipped = policy_loss(logprobs, old_logprobs, advantages, mask, low, high)
            if cap := args.mismatch_cap:  # (b, t-1), no gradient
                engine_logprobs = part["engine_logprobs"]
                losses *= common.rollout_correction(old_logprobs, engine_logprobs, mask, cap)
            if args.beta:  # (b, t-1), with gradient
                kl = common.kl_estimate(logprobs, part["ref_logprobs"], args.kl_estimator)
                losses = losses + args.beta * kl
            loss = (losses * part["weights"]).sum()  # this part's share of the update's loss
            loss.backward()  # adds up over the parts and, as shard has it, the processes
            metrics["loss/policy"] += loss.item() / updates
            metrics["policy/clip_frac"] += clipped.sum().item() / tokens
        norm = clip_grad_norm_(model.parameters(), args.max_grad_norm, error_if_nonfinite=True)
        metrics["policy/grad_norm"] += whole(norm).item() / updates / processes  # each has it
        optimizer.step()
        model.zero_grad()
    totals = torch.tensor(list(metrics.values()), dtype=torch.float64)
    dist.all_reduce(totals)
    return dict(zip(metrics, totals.tolist(), strict=True))


# ------------------------------------ Processes and weights ------------------------------------
def start_processes(args):
    """Joins the processes of torchrun, or makes a group of one; returns (device, dtype)."""
    on_gpu = torch.cuda.is_available()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else None
    with explain("cannot start the processes, each with a GPU of its own"):
        if on_gpu:
            torch.cuda.set_device(gpu)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # what is counted is on the CPU
        dist.init_process_group(backend, device_id=gpu, **alone)
    rows = args.prompts_per_step // vars(args).get("minibatches", 1) * args.group_size
    if rows % dist.get_world_size():
        what = f"the {rows} completions of an update by {dist.get_world_size()} processes"
        sys.exit(f"error: cannot divide {what}: change --prompts-per-step")
    if dist.get_rank() > 0:
        sys.stdout = open(os.devnull, "w")  # the first process speaks for all
    return gpu or torch.device("cpu"), getattr(torch, args.dtype)


def load_model(kind, name, dtype):
    """A transformers model of class `kind`; ends the run where the folder lacks some weights."""
    with explain(f"cannot load the model {name}"):
        model, info = kind.from_pretrained(name, dtype=dtype, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks the weights {sorted(info['missing_keys'])[:3]}")
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the default leaves Gemma 2's cap out, silently
    return model


def shard(model, device, dtype, checkpointing=False):
    """The model on its device, computing in `dtype`, its weights shared out over the processes.

    A layer gathers and casts its weights where it runs. Its backward pass sums the gradient over
    the processes and takes no mean: each computes its share of the loss, which is a sum.
    """
    if checkpointing:
        model.gradient_checkpointing_enable()
    for module in model.modules():  # dropout would move the ratio of an unchanged policy from 1
        module.training = checkpointing and hasattr(module, "gradient_checkpointing")
    if dist.get_world_size() > 1 or dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
        for module in [*layers, model]:
            fully_shard(module, mp_policy=policy, reshard_after_forward=True)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model.to(device)


def whole(tensor):
    """The whole of a tensor that may be sharded over the processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def make_optimizer(model):
    """AdamW with its state in place: for checkpoints, and for the engine to see what is free."""
    adamw = {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": model.device.type == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, **adamw)
    for weight in model.parameters():
        optimizer.state[weight] = {"step": torch.zeros((), device=model.device)}
        optimizer.state[weight] |= {k: torch.zeros_like(weight) for k in ("exp_avg", "exp_avg_sq")}
    return optimizer


# ----------------------------------------- The engines -----------------------------------------
class VLLMEngine:
    """Samples with vLLM, in this process."""

    def __init__(self, args, stop_ids, max_length, dtype):
        import vllm

        options = {"gpu_memory_utilization": args.gpu_memory_utilization, "enable_sleep_mode": True}
        if not torch.cuda.is_available():  # compiling does not pay, and chunks fail with seeds
            options = {"kv_cache_memory_bytes": 512 << 20, "enable_chunked_prefill": False}
            options["enforce_eager"] = True
            torch.compiler.set_stance("force_eager")
        if "RANK" in os.environ:
            options["distributed_executor_backend"] = "external_launcher"
        options["logprobs_mode"] = "processed_logprobs"  # at the temperature it samples at
        options |= {"dtype": dtype, "max_model_len": max_length, "use_tqdm_on_load": False}
        self.llm, self.Params = vllm.LLM(args.model, **options), vllm.SamplingParams
        # vLLM changes the class of a model that it runs by transformers' code: it wants this then.
        transformers.PreTrainedModel.do_not_compile = True
        self.has_head = self.llm.apply_model(lambda model: "(lm_head)" in str(model))[0]
        # With top-p or top-k the samples would be another policy's than the one trained.
        self.sampling = {"top_p": 1.0, "top_k": 0, "max_tokens": args.max_completion_tokens}
        self.sampling |= {"stop_token_ids": sorted(stop_ids), "detokenize": False}
        self.sampling |= {"logprobs": 0, "flat_logprobs": True}  # 0: of the sampled token alone
        self.sleep()

    def sync(self, weights):
        """Wakes up and takes (name, tensor) of all weights."""
        self.llm.wake_up(["weights"])
        # A tied head is sent too: on a CPU vLLM keeps a copy. Gemma 2 has none, and refuses it.
        weights = (pair for pair in weights if self.has_head or pair[0] != "lm_head.weight")
        with explain("vLLM does not take this model's weights"):
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.wake_up(["kv_cache"])

    def generate(self, prompts, seeds, temperature):
        """[(ids up to and with the stop token, their log-probs)], one for each prompt and seed."""
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = {**self.sampling, "temperature": temperature}
        params = [self.Params(seed=seed, **sampling) for seed in seeds]
        requests = self.llm.generate(inputs, params, use_tqdm=False)
        samples = [request.outputs[0] for request in requests]
        return [(list(sample.token_ids), sample.logprobs.logprobs) for sample in samples]

    def sleep(self):
        """Forgets what these weights computed and leaves the GPU's memory to the update, until the
        next sync."""
        self.llm.sleep(level=2)


class TransformersEngine:
    """The same with transformers, on a copy of the model, for where vLLM is not."""

    def __init__(self, args, stop_ids, max_length, dtype):
        self.model = load_model(AutoModelForCausalLM, args.model, dtype)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.limits = args.max_completion_tokens, stop_ids

    def sync(self, weights):
        self.model.load_state_dict(dict(weights))

    def generate(self, prompts, seeds, temperature):
        return common.sample(self.model, prompts, seeds, temperature, *self.limits)

    def sleep(self):
        pass


def start_engine(args, config, stop_ids, problems, dtype):
    """The engine of --rollout-engine, with room for the longest prompt and a completion."""
    longest = max(len(problem["ids"]) for problem in problems) + args.max_completion_tokens
    context = getattr(config.get_text_config(), "max_position_embeddings", math.inf)
    if longest > context:
        sys.exit(f"error: --max-completion-tokens: {longest} with a prompt, but {context} are all")
    kind = VLLMEngine if args.rollout_engine == "vllm" else TransformersEngine
    with explain(f"--rollout-engine {args.rollout_engine} does not start"):
        return kind(args, stop_ids, longest, dtype)


# ------------------------------------------- The run -------------------------------------------
def rollout(engine, tokenizer, rows, temperature):
    """Samples and scores a completion for each row, (problem, seed): each process does a part, all
    get all. Returns (ids, the engine's log-probs of them, text, reward) of each."""
    gathered = [None] * dist.get_world_size()
    share = math.ceil(len(rows) / len(gathered))
    rows = rows[dist.get_rank() * share :][:share]
    problems, seeds = [problem for problem, _ in rows], [seed for _, seed in rows]
    sampled = engine.generate([problem["ids"] for problem in problems], seeds, temperature)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in sampled]
    scored = zip(sampled, texts, score(problems, texts), strict=True)
    done = [(ids, logprobs, text, value) for (ids, logprobs), text, value in scored]
    dist.all_gather_object(gathered, done)
    return sum(gathered, [])


def score(problems, texts):
    """The rewards of completions. Ends the run where one is no finite number."""
    values = []
    for problem, text in zip(problems, texts, strict=True):
        try:
            values.append(float(reward(problem["prompt"], text, problem["answer"])))
        except SystemExit as error:  # or the run would end as if it were done
            raise RuntimeError("reward called exit") from error
        if not abs(values[-1]) < 1e30:
            sys.exit(f"error: the reward of {text!r} for {problem['prompt']!r} is {values[-1]}")
    return values


def evaluate(engine, tokenizer, problems):
    """Mean reward of a greedy completion of each problem; shows three."""
    done = rollout(engine, tokenizer, [(problem, 0) for problem in problems], temperature=0.0)
    for problem, (_, _, text, value) in zip(problems[:3], done[:3], strict=True):
        print(f"    {value:g}  {str(problem['prompt'])[-60:]!r} -> {text[-160:]!r}")
    return sum(value for *_, value in done) / len(done)


def open_run(args, problems, trained):
    """(the run's folder, step). A new one gets its args.json and begins at step 0; that of --resume
    goes on from its last checkpoint, which is loaded into the tensors `trained`."""
    name = [args.resume or args.output_dir or time.strftime(f"runs/{SCRIPT}-%Y%m%d-%H%M%S")]
    dist.broadcast_object_list(name)  # the first process's clock counts
    run_dir, first = Path(name[0]), dist.get_rank() == 0
    data = hashlib.sha256(json.dumps(problems).encode()).hexdigest()
    what = f"--output-dir {run_dir}, where no other run may be"
    with explain(what if args.resume is None else f"--resume {run_dir}"):
        if first and args.resume is None:
            run_dir.mkdir(parents=True, exist_ok=True)
            with open(run_dir / "args.json", "x", encoding="utf-8") as file:  # x: not there yet
                json.dump({SCRIPT: vars(args), "data": data}, file, indent=1)
        dist.barrier()
        if json.loads((run_dir / "args.json").read_text(encoding="utf-8"))["data"] != data:
            raise ValueError("the problems are not those that the run began with")
        last = max(run_dir.glob("checkpoints/*/.metadata"), default=None)  # is written last
        step = int(last.parent.name) if last else 0
        if step > args.steps:
            raise ValueError(f"it has made {step} steps: raise --steps")
        if last:
            dcp.load(trained, checkpoint_id=last.parent)
    for path in run_dir.glob("*.jsonl") if first else []:
        lines = path.read_bytes().splitlines(keepends=True)[:step]  # line n is about step n
        path.write_bytes(b"".join(lines))
    return run_dir, step


def save_checkpoint(run_dir, step, trained):
    """Writes checkpoints/<step>, and when it is whole removes the one before."""
    path = run_dir / f"checkpoints/{step:06d}"
    dcp.save(trained, checkpoint_id=path)
    for old in set(path.parent.iterdir()) - {path} if dist.get_rank() == 0 else []:
        shutil.rmtree(old)


def log_step(run_dir, row, group, tracker):
    """Appends a row of metrics and a group of samples to the run's files, and shows the row."""
    for name, line in (("metrics", row), ("samples", group)) if dist.get_rank() == 0 else []:
        with open(run_dir / f"{name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if tracker:
        tracker.log(row, step=row["step"])
    shown = {"reward": "reward/mean", "uniform": "reward/uniform_groups", "kl": "kl/mean"}
    shown |= {"length": "generation/length", "entropy": "policy/entropy"}
    shown |= {"clipped": "policy/clip_frac", "explained": "critic/explained_variance"}
    shown |= {"held-out": "eval/accuracy"}
    words = [f"{word} {row[name]:.3f}" for word, name in shown.items() if name in row]
    print(f"{row['step']:4d}", *words, sep="  ", flush=True)


def save_model(run_dir, model, tokenizer, source, dtype):
    """Writes model/, a folder that transformers and vLLM load; `source` is what it began as."""
    weights = ((name, whole(weight.to(dtype))) for name, weight in model.state_dict().items())
    weights = {name: weight.cpu() for name, weight in weights if dist.get_rank() == 0}
    model.to(dtype)  # so that its configuration names it
    if dist.get_rank() > 0:
        return
    for name in model.all_tied_weights_keys:  # is stored under its other name
        weights.pop(name, None)
    quiet = {"_raise_exceptions_for_missing_entries": False}
    sampling = cached_file(source, "generation_config.json", **quiet)
    if sampling:  # kept as it is, though transformers may refuse to write such a one
        model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(run_dir / "model", state_dict=weights)
    tokenizer.save_pretrained(run_dir / "model")
    if sampling:
        shutil.copy(sampling, run_dir / "model")


def main(args):
    # What is wrong in the flags and the data shows before a model is loaded.
    device, dtype = start_processes(args)
    with explain(f"--track {args.track}"):
        off = args.track == "none" or dist.get_rank() > 0
        tracker = None if off else importlib.import_module(args.track)
    with explain(f"--model {args.model}"):
        tokenizer = common.load_tokenizer(args.model)
    train = load_problems(args, tokenizer, args.dataset, args.split)
    held_out = load_problems(args, tokenizer, args.eval_dataset or args.dataset, args.eval_split)
    score(train[:1], [""])
    order = []  # of the problems: each once in every pass over all
    while len(order) < args.prompts_per_step * (args.steps + 1):
        order += random.Random(f"{args.seed} {len(order)}").sample(train, len(train))

    # Weights are float32, for in bfloat16 steps of 1e-6 would vanish; the reference never moves.
    with FileLock(f"{tempfile.gettempdir()}/{Path.home().name}-{os.getppid()}.lock"):  # in turn
        model, ref_model = load_model(AutoModelForCausalLM, args.model, torch.float32), None
        with explain(f"--model {args.model}"):
            common.check_logits(model)
        model = shard(model, device, dtype, args.gradient_checkpointing)
        if args.beta:
            ref_model = shard(load_model(AutoModelForCausalLM, args.model, dtype), device, dtype)
    optimizer = make_optimizer(model)
    trained = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    stop_ids = common.stop_token_ids(tokenizer, model.generation_config)
    engine = start_engine(args, model.config, stop_ids, train + held_out, dtype)
    run_dir, start = open_run(args, train + held_out, trained)
    if tracker:
        tracker.init(project="rl-for-lm", name=run_dir.name, config=vars(args))
    print(f"{args.model} in {dtype} on {dist.get_world_size()} x {device}, {type(engine).__name__}")
    print(f"{len(train)} problems, {len(held_out)} held out; the run is in {run_dir}", flush=True)

    for step in range(start, args.steps + 1):  # `step` batches were trained on before
        row, began = {"step": step}, time.perf_counter()
        engine.sync((name, whole(weight.to(dtype))) for name, weight in model.state_dict().items())

        # 1. Generate and 2. score. Row p * G + k is the k-th completion of prompt p.
        rows = []
        for place in range(step * args.prompts_per_step, (step + 1) * args.prompts_per_step):
            seed = random.Random(f"{args.seed} sample {place}").getrandbits(31)
            rows += [(order[place], seed + k) for k in range(args.group_size)]
        sampled = rollout(engine, tokenizer, rows, args.temperature)
        completions, engine_logprobs, texts, rewards = zip(*sampled, strict=True)
        row["time/rollout"] = time.perf_counter() - began
        if step % args.eval_every == 0 or step == args.steps:
            row["eval/accuracy"] = evaluate(engine, tokenizer, held_out)
        engine.sleep()
        if step > start and (step % args.save_every == 0 or step == args.steps):
            save_checkpoint(run_dir, step, trained)

        prompts = [problem["ids"] for problem, _ in rows]
        input_ids, mask = common.collate(prompts, completions, tokenizer.eos_token_id)
        batch = {"input_ids": input_ids, "mask": mask}  # (B, T), (B, T-1)
        flat = torch.tensor([value for logprobs in engine_logprobs for value in logprobs])
        batch["engine_logprobs"] = torch.zeros(mask.shape).masked_scatter(mask, flat)
        batch["old_logprobs"], entropies = score_tokens(model, batch, args)  # (B, T-1), no gradient
        if ref_model:
            batch["ref_logprobs"], _ = score_tokens(ref_model, batch, args)  # (B, T-1)
            kl = common.kl_estimate(batch["old_logprobs"], batch["ref_logprobs"], kind="k3")
            row["kl/mean"] = kl[mask].mean().item()
        mismatch = (batch["old_logprobs"] - batch["engine_logprobs"]).abs()[mask].mean().item()
        if not mismatch <= args.mismatch_limit:
            what = "nats a token, over --mismatch-limit: it does not run the trainer's weights"
            sys.exit(f"error: the engine's log-probs are off by {mismatch:.2g} {what}")

        # 3. Advantages, of whole groups.
        rewards = torch.tensor(rewards, dtype=torch.float64).view(-1, args.group_size)  # (P, G)
        batch["advantages"] = group_advantages(rewards, args.scale_by_std).view(-1, 1)  # (B, 1)

        # 4. Update.
        if step < args.steps:
            warm = min(1, (step + 1) / max(1, args.warmup_steps))
            optimizer.param_groups[0]["lr"] = args.learning_rate * warm
            row |= update(model, optimizer, batch, args)

        # 5. Log.
        ended = [ids[-1] in stop_ids for ids in completions]
        row["reward/mean"] = rewards.mean().item()
        row["reward/std"] = rewards.std(correction=0).item()
        uniform = torch.isclose(rewards, rewards[:, :1], rtol=1e-12, atol=0).all(1)
        row["reward/uniform_groups"] = uniform.double().mean().item()
        row["policy/entropy"] = entropies[mask].mean().item()
        row["engine/mismatch"] = mismatch
        row["generation/length"] = mask.sum().item() / len(mask)
        row["generation/truncated"] = 1 - sum(ended) / len(ended)
        row["time/step"] = time.perf_counter() - began
        row["throughput/tokens_per_second"] = mask.sum().item() / row["time/step"]
        group = {"step": step, "prompt": rows[0][0]["prompt"], "answer": rows[0][0]["answer"]}
        group |= {"completions": texts[: args.group_size], "rewards": rewards[0].tolist()}
        log_step(run_dir, row, group, tracker)

    save_model(run_dir, model, tokenizer, args.model, dtype)
    if tracker:
        tracker.finish()
    if dist.get_rank() == 0 and (HERE / "plot.py").exists():
        subprocess.run([sys.executable, HERE / "plot.py", run_dir], check=False)
    print(f"AutoModelForCausalLM.from_pretrained('{run_dir}/model') loads the model", flush=True)


if __name__ == "__main__":
    try:
        main(parse_args())
    except KeyboardInterrupt:
        sys.exit("stopped: to go on, the same command with --resume and the run's folder")
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        flags = "lower --micro-batch-size, --gpu-memory-utilization, or --gradient-checkpointing"
        sys.exit(f"error: {flags}: {error}")
    os._exit(0)  # Python's own way out aborts now and then, in threads of gloo
