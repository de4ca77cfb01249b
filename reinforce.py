"""REINFORCE: the policy gradient itself (Williams, 1992), token by token.

Raise the log-probability of each sampled token in proportion to the reward that came after it,
less a baseline b that does not depend on what was sampled:

    G_t     = sum_{k >= t} gamma^(k - t) r_k      (with gamma = 1 and a score at the end, G_t = R)
    r_t     = -beta (logp_t - ref_logp_t), plus the score on the last token
    loss_t  = -(G_t - b) logp_t
    loss    = mean over completions of the sum over their tokens

The baseline changes the variance, not the mean: 0, the mean return of the batch (which has the
completion's own in it, and so shrinks the expected gradient by (B - 1) / B), or the moving average
of the batches before. One update is made of each batch, so there is no ratio. Left out: a learned
baseline, which makes it actor-critic: ppo.py --lam 1 --minibatches 1.

Watch reward/mean and eval/accuracy rise and policy/entropy fall slowly: nothing guards the size of
an update but --learning-rate and --max-grad-norm. The loss says nothing of how well it goes.

    python reinforce.py                                   # the built-in task, on any machine
    python reinforce.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --group-size 1  # on a GPU
    torchrun --nproc-per-node 8 reinforce.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k
"""

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve other processes
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over within one process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from transformers import AutoModelForCausalLM

import common
from common import across, fail

SCRIPT, HERE = Path(__file__).stem, Path(__file__).resolve().parent
Aggregation = Literal["sequence-sum", "sequence-mean", "token-mean", "constant"]


@dataclass
class Args:
    # data
    model: str = "Qwen/Qwen3-0.6B"  # causal language model to train: a folder or a hub name
    dataset: str = "openai/gsm8k"  # problems to train on: a .jsonl file or a hub name
    dataset_config: str = ""  # the hub data set's configuration ("": main, or the only one)
    split: str = "train"  # the hub data set's split to train on
    prompt_field: str = ""  # name of the prompt's field ("": prompt, question or problem)
    answer_field: str = "answer"  # name of the right answer's field, handed to `reward`
    prompt_template: str = "{prompt}"  # text around a text prompt, which replaces {prompt}
    eval_dataset: str = ""  # held-out problems: a .jsonl file or a hub name ("": as --eval-split)
    eval_split: str = "test"  # hub split held out (of a file: its last tenth)
    eval_problems: int = 200  # held-out problems scored at each evaluation, at most
    reward_model: str = ""  # folder or hub name of a one-label classifier to use as the reward
    output_dir: str = ""  # the run's folder, new or empty ("": runs/<script>-<time>)
    resume: str = ""  # folder of a stopped run to go on with; its flags hold
    seed: int = 0  # decides the order of the problems, and the samples

    # rollouts
    steps: int = 200  # batches of rollouts to train on
    prompts_per_step: int = 16  # prompts in a batch, over all processes
    group_size: int = 16  # completions sampled for each prompt
    max_prompt_tokens: int = 512  # longest prompt, chat template included; a longer one is an error
    max_completion_tokens: int = 512  # where a completion is cut; it is scored as it is
    temperature: float = 1.0  # divides the logits, in sampling and in the update

    # algorithm
    baseline: Literal["none", "batch-mean", "moving-average"] = "batch-mean"  # b, off each return
    baseline_decay: float = 0.9  # share of its last value that the moving average keeps a step
    gamma: float = 1.0  # discount of later rewards, per token
    beta: float = 0.0  # weight of KL(policy || initial model) in the reward (0: no reference model)
    loss_aggregation: Aggregation = "sequence-sum"  # losses over 1, length, all tokens or limit

    # optimizer
    learning_rate: float = 1e-6  # AdamW's, after the warm-up
    warmup_steps: int = 10  # steps over which the learning rate rises from 0
    weight_decay: float = 0.0  # AdamW's: share of the learning rate that weights shrink by
    max_grad_norm: float = 1.0  # a longer gradient is scaled down to this norm

    # engine
    rollout_engine: Literal["auto", "vllm", "transformers"] = "auto"  # auto: vLLM if it runs here
    gpu_memory_utilization: float = 0.4  # share of the GPU's memory that vLLM takes in all
    mismatch_cap: float = 2.0  # cap of the loss's factor p_trainer / p_engine (0: no factor)
    mismatch_limit: float = 0.1  # mean |trainer - engine| log-prob, in nats, that stops the run
    tokens_per_micro_batch: int = 8192  # tokens in one forward pass: fewer take less memory
    gradient_checkpointing: bool = False  # recompute activations: less memory, more time
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the compute; auto: bfloat16 on GPU

    # logging
    eval_every: int = 20  # steps between evaluations on the held-out problems
    save_every: int = 20  # steps between checkpoints to resume from; the last two are kept
    sample_every: int = 1  # steps between groups of completions written to samples.jsonl
    track: Literal["none", "wandb", "trackio"] = "none"  # where else to send the metrics


# Without --model and --dataset: 112,000 parameters learn sums in half a minute on two cores.
TINY = {
    "model": f"{HERE}/tiny/model",
    "dataset": f"{HERE}/tiny/train.jsonl",
    "eval_dataset": f"{HERE}/tiny/heldout.jsonl",
    "steps": 60,
    "max_completion_tokens": 32,
    "learning_rate": 3e-4,
    "warmup_steps": 3,
    "eval_every": 5,
}


def check(args):
    """Refuses what can be known to be wrong before anything is loaded."""
    common.check_flags(args)
    if args.baseline == "batch-mean" and args.prompts_per_step * args.group_size < 2:
        fail("--baseline batch-mean needs two completions or more in a step")
    if args.gamma > 1 or args.baseline_decay >= 1:
        fail("--gamma must be at most 1, and --baseline-decay below 1")


def load_problems(args):
    """(training, held-out) problems, lists of {"prompt": text or chat messages, "answer": text}."""
    problems = common.read_problems(args.dataset, args, args.split)
    if args.eval_dataset or (args.eval_split and not args.dataset.endswith(common.FILES)):
        name = args.eval_dataset or args.dataset
        return problems, common.read_problems(name, args, args.eval_split)[: args.eval_problems]
    return common.hold_out(problems, args.eval_problems)


# ------------------------------------ The function to edit -------------------------------------
def reward(prompt, completion, answer):
    """Score (a float) of a completion (text): 1 if the number it ends with is the answer's, else 0.

    prompt and answer are the data's; the prompt has its template, but not the chat's.
    """
    target = common.final_number(answer)
    if target is None:
        raise ValueError(f"the answer {answer[:80]!r} has no number, so edit this function")
    return float(common.final_number(completion) == target)


# ---------------------------------------- The algorithm ----------------------------------------
def returns_to_go(rewards, gamma=1.0):
    """G_t = sum over k >= t of gamma^(k-t) r_k (Williams, 1992): rewards and result (B, T)."""
    returns = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        later = rewards[:, t] + gamma * later
        returns[:, t] = later
    return returns


def policy_loss(logprobs, advantages):
    """-A logp per token, whose gradient is REINFORCE's: logprobs (B, T), advantages (B, 1 or T)."""
    return -advantages * logprobs


def loss_weights(mask, how, max_tokens):
    """Weights (B, T) of the per-token losses: loss = (per_token * weights).sum().

    mask (B, T) has all of this process's rows of one update. Sequences and tokens are counted over
    all processes, so that no split into micro-batches or processes changes the gradient.
    """
    sequences = across(torch.tensor(float(len(mask))))
    tokens = across(mask.sum().float()).clamp(min=1)
    length = mask.sum(1, keepdim=True).clamp(min=1)
    divisors = {
        "sequence-sum": sequences,
        "sequence-mean": sequences * length,
        "token-mean": tokens,
        "constant": sequences * max_tokens,  # Dr. GRPO's
    }
    return mask / divisors[how]


def objective(model, batch, args, autocast, totals):
    """The loss of a micro-batch, its share of that of the whole update; counts its metrics."""
    ids, mask, engine_logprobs = batch["input_ids"], batch["mask"], batch["engine_logprobs"]
    with autocast:
        logprobs, entropy = common.token_logprobs(model, ids, mask, args.temperature)
    # In a batch's only update the policy is the one that sampled: no pass is paid for these.
    old_logprobs = logprobs.detach()
    metrics = {"policy/entropy": entropy, "engine/mismatch": (old_logprobs - engine_logprobs).abs()}
    losses = policy_loss(logprobs, batch["advantages"])
    if cap := args.mismatch_cap:  # not the algorithm's: the engine's arithmetic is another
        losses = losses * common.rollout_correction(old_logprobs, engine_logprobs, mask, cap)
    loss = (losses * batch["weights"]).sum()
    totals.count(mask, loss, metrics)
    return loss


def update(model, optimizer, batch, rows, args, autocast, totals):
    """One step of the optimiser on `rows` (a tensor) of a batch, those that are "trained"."""
    mask, how, limit = batch["mask"], args.loss_aggregation, args.max_completion_tokens
    batch["weights"] = torch.zeros(mask.shape)
    batch["weights"][rows] = loss_weights(mask[rows], how, limit)
    trained = rows[batch["trained"][rows, 0]].tolist()  # the others count in the weights' means
    for _, part in common.micro_batches(batch, trained, args.tokens_per_micro_batch, model.device):
        objective(model, part, args, autocast, totals).backward()
    totals.norms.append(common.clip_gradient(model, args.max_grad_norm))
    optimizer.step()
    optimizer.zero_grad()


# ------------------------------------------ Rollouts -------------------------------------------
class VLLMEngine:
    """Rollouts with vLLM in this process, with the interface of common.TransformersEngine."""

    def __init__(self, args, stop_ids, pad_id, device, dtype):
        from vllm import LLM, SamplingParams

        self.sleeps = on_gpu = device.type == "cuda"
        options = {"gpu_memory_utilization": args.gpu_memory_utilization}
        if not on_gpu:  # compiling takes longer than it saves, and so does a larger cache
            options = {"enforce_eager": True, "kv_cache_memory_bytes": 512 << 20}
            options["enable_chunked_prefill"] = False  # fails with seeds on a CPU
            torch.compiler.set_stance("force_eager")
        if "RANK" in os.environ:
            options["distributed_executor_backend"] = "external_launcher"
        self.llm = LLM(
            args.model,
            dtype=dtype,
            max_model_len=args.max_prompt_tokens + args.max_completion_tokens,
            logprobs_mode="processed_logprobs",  # those of the temperature it samples at
            generation_config="vllm",  # not the checkpoint's sampling settings
            enable_sleep_mode=on_gpu,
            use_tqdm_on_load=False,
            **options,
        )
        sampling = {"top_p": 1.0, "top_k": 0, "logprobs": 0, "detokenize": False}
        self.params = partial(SamplingParams, stop_token_ids=sorted(stop_ids), **sampling)
        self.sleep()

    def sync(self, weights):
        """Wakes up, takes (name, tensor) of all weights, forgets what the old ones computed."""
        if self.sleeps:
            self.llm.wake_up(["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.sleeps:
            self.llm.wake_up(["kv_cache"])
        self.llm.reset_prefix_cache()

    def generate(self, prompts, samples, temperature, max_tokens, seed):
        params = {"n": samples, "temperature": temperature, "max_tokens": max_tokens}
        # vLLM gives a prompt's k-th sample the prompt's seed + k.
        params = [self.params(seed=seed + i * samples, **params) for i in range(len(prompts))]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        requests = self.llm.generate(inputs, params, use_tqdm=False) if prompts else []
        outputs = [output for request in requests for output in request.outputs]
        completions = [list(output.token_ids) for output in outputs]
        steps = [zip(output.token_ids, output.logprobs, strict=True) for output in outputs]
        return completions, [[at[token].logprob for token, at in step] for step in steps]

    def sleep(self):
        """Leaves the GPU's memory to the update, until the next sync."""
        if self.sleeps:
            self.llm.sleep(level=2)  # 2: without a copy of the weights, for sync brings new ones


def evaluate(engine, model, tokenizer, problems, args, scorer):
    """Mean reward of a greedy completion of each problem, over all processes; shows three."""
    problems = common.share(problems)
    engine.sync(common.full_weights(model))
    prompts = [problem["ids"] for problem in problems]
    completions, _ = engine.generate(prompts, 1, 0.0, args.max_completion_tokens, args.seed)
    engine.sleep()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    rewards = common.score(problems, texts, scorer)
    common.show_samples(problems, texts, rewards)
    return common.global_mean(torch.tensor(rewards))


def main(args):
    check(args)
    train, held_out = common.attempt("cannot load the problems", load_problems, args)
    common.try_reward(args, train, reward)
    device = common.start_processes()
    run_dir = common.open_run(args, SCRIPT)

    # The policy: float32 weights, computing in `dtype`. The reference is the model it starts from.
    tokenizer = common.attempt(f"--model {args.model}", common.load_tokenizer, args.model)
    common.encode_problems(train + held_out, tokenizer, args.max_prompt_tokens)
    dtype, autocast = common.precision(args.dtype, device)
    model = common.load_model(AutoModelForCausalLM, args.model, device, args.gradient_checkpointing)
    ref_model = common.load_model(AutoModelForCausalLM, args.model, device) if args.beta else None
    adamw = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=device.type == "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, **adamw)
    scorer = common.RewardModel(args.reward_model, device) if args.reward_model else reward
    stop_ids = common.stop_token_ids(tokenizer, model.generation_config)

    no_vllm = "as asked" if args.rollout_engine == "transformers" else common.why_no_vllm()
    make_engine = common.TransformersEngine if no_vllm else VLLMEngine
    given = (args, stop_ids, tokenizer.pad_token_id, device, dtype)
    engine = common.attempt("the rollout engine did not start", make_engine, *given)
    common.show_header(SCRIPT, args, run_dir, model, no_vllm, dtype, len(train), len(held_out))

    tracker = common.start_tracker(args, run_dir)
    evaluation = (engine, model, tokenizer, held_out, args, scorer)
    start, began, numbers = 0, time.perf_counter(), {"average": 0.0}
    if args.resume:
        start = common.load_checkpoint(run_dir, args.steps, numbers, policy=(model, optimizer))
    else:
        row = {"step": 0, "eval/accuracy": evaluate(*evaluation)}
        common.log_step(run_dir, row, args.steps, tracker)
    signals = common.catch_signals()

    for step in range(start + 1, args.steps + 1):
        clock = [time.perf_counter()]
        warm = min(1, step / max(1, args.warmup_steps))
        optimizer.param_groups[0]["lr"] = args.learning_rate * warm

        # 1. Generate: this process's prompts, with this step's weights.
        problems = common.problems_of_step(train, step, args.prompts_per_step, args.seed)
        problems = [problem for problem in common.share(problems) for _ in range(args.group_size)]
        prompts = [problem["ids"] for problem in problems[:: args.group_size]]
        limit, seed = args.max_completion_tokens, common.seed_of(args.seed, step, common.rank())
        engine.sync(common.full_weights(model))
        rollouts = engine.generate(prompts, args.group_size, args.temperature, limit, seed)
        engine.sleep()
        clock.append(time.perf_counter())

        # 2. Score: the group of prompt p is the rows from p * group_size on.
        batch = common.make_batch(problems, *rollouts, tokenizer.pad_token_id)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rollouts[0]]
        rewards = common.score(problems, texts, scorer)
        clock.append(time.perf_counter())

        # 3. Advantages. The KL is a part of the reward, and k1 its unbiased estimate.
        token_rewards, kl = common.at_last_token(torch.tensor(rewards), batch["mask"]), {}
        if ref_model:
            kl_tokens, kl = common.batch_kl(model, ref_model, batch, args, autocast)
            token_rewards = token_rewards - args.beta * kl_tokens
        returns, average = returns_to_go(token_rewards, args.gamma), numbers["average"]
        first_tokens = batch["mask"].int().argmax(1, keepdim=True)
        mean = common.global_mean(returns.gather(1, first_tokens))
        baseline = {"none": 0.0, "batch-mean": mean, "moving-average": average}[args.baseline]
        batch["advantages"] = (returns - baseline) * batch["mask"]
        kept = args.baseline_decay if step > 1 else 0.0
        numbers["average"] = kept * average + (1 - kept) * mean

        # 4. Update. Without an advantage there is no gradient.
        batch["trained"] = (batch["advantages"] != 0).any(1, keepdim=True)
        totals = common.Totals()
        update(model, optimizer, batch, torch.arange(len(rewards)), args, autocast, totals)
        metrics = {**kl, **totals.metrics()}
        clock.append(time.perf_counter())

        # 5. Log, evaluate, save. The next step begins by synchronising the engine.
        common.check_mismatch(metrics["engine/mismatch"], args.mismatch_limit)
        given = (clock, rewards, rollouts[0], stop_ids, args.group_size)
        row = {"step": step, **metrics, **common.rollout_metrics(*given)}
        stop = step < args.steps and common.gather(signals)  # the last step ends by itself
        if step % args.eval_every == 0 or step == args.steps:
            row["eval/accuracy"] = evaluate(*evaluation)
        common.log_step(run_dir, row, args.steps, tracker)
        if step % args.sample_every == 0:
            common.log_samples(run_dir, step, problems, texts, rewards, args.group_size)
        if stop or step % args.save_every == 0 or step == args.steps:
            common.save_checkpoint(run_dir, step, numbers, policy=(model, optimizer))
        if stop:
            common.stop_run(run_dir, SCRIPT, tracker)
    common.finish_run(run_dir, model, tokenizer, dtype, began, tracker)


if __name__ == "__main__":
    main(common.parse_args(Args, TINY, __doc__))
