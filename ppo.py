"""PPO: Proximal Policy Optimization (Schulman et al., 2017) as RLHF uses it (Ouyang et al., 2022).

A critic V, a model of its own, learns what each state is worth. A token's reward is minus the KL it
adds, and on the last one the score too; its advantage is what came of it beyond V's expectation:

    r_t      = -beta (logp_t - ref_logp_t), plus the score on the last token
    delta_t  = r_t + gamma V_{t+1} - V_t                              (V after the last token is 0)
    A_t      = sum_l (gamma lam)^l delta_{t+l}                                              (GAE)
    policy_t = -min(rho_t A'_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A'_t) - c2 entropy_t
    value_t  = 1/2 max((V_t - G_t)^2, (clip(V_t, V_old +- eps) - G_t)^2),    G_t = A_t + V_old
    loss     = mean over completions of the mean over their tokens, for each of the two

A' is A whitened over the batch (A itself with --no-whiten). With --lam 1 and one update per batch
it is actor-critic. `--objective kl-penalty` is the paper's other objective, rho A - beta' KL(old ||
new), with beta' adapted. Four models: policy, reference (with --beta), critic, and a reward model
(with --reward-model). A completion that is cut counts as ended. Left out: c1, for policy and critic
share no weights and have an optimiser each.

Watch critic/explained_variance rise above 0, below which the critic adds noise: for that
--value-warmup-steps train it alone. It falls to 0 again when nearly all rewards are equal.

    python ppo.py                                         # the built-in task, on any machine
    python ppo.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --group-size 4        # on a GPU
    torchrun --nproc-per-node 8 ppo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k
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
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

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
    minibatches: int = 1  # updates made of each pass over a batch; above 1 the clip acts
    update_epochs: int = 1  # passes over each batch; above 1 the clip acts
    clip_eps_low: float = 0.2  # eps_low: the ratio is clipped below 1 - eps_low
    clip_eps_high: float = 0.2  # eps_high: the ratio is clipped above 1 + eps_high
    beta: float = 0.0  # weight of KL(policy || initial model) in the reward (0: no reference model)
    gamma: float = 1.0  # discount of later rewards, per token
    lam: float = 0.95  # GAE's lambda: 0 trusts the critic alone, 1 the observed return alone
    whiten: bool = True  # shift and scale a batch's advantages to mean 0 and std 1
    entropy_coef: float = 0.0  # weight of the entropy (c2), a bonus for staying uncertain
    objective: Literal["clip", "kl-penalty"] = "clip"  # what keeps the policy near the old one
    kl_penalty: float = 1.0  # weight of the KL in --objective kl-penalty at the start (beta')
    kl_target: float = 0.01  # KL(old || new), in nats a token, that this weight is adapted to
    value_model: str = ""  # folder or hub name of the critic ("": --reward-model, else --model)
    value_clip_eps: float = 0.0  # the value is clipped this far around the old one (0: never)
    value_warmup_steps: int = 3  # steps at the start that train the critic alone
    value_learning_rate: float = 1e-5  # the critic's learning rate
    loss_aggregation: Aggregation = "sequence-mean"  # losses over 1, length, all tokens or limit

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
    "minibatches": 4,
    "learning_rate": 1e-4,
    "value_learning_rate": 1e-3,
    "warmup_steps": 3,
    "eval_every": 5,
}


def check(args):
    """Refuses what can be known to be wrong before anything is loaded."""
    rows = common.check_flags(args) * args.group_size  # of this process
    if rows % args.minibatches:
        fail(f"--minibatches {args.minibatches} must divide the {rows} completions of a process")
    if args.gamma > 1 or args.lam > 1:
        fail("--gamma and --lam must be at most 1")


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
def shaped_rewards(scores, kl, mask, beta):
    """-beta kl (B, T) on each token of mask (B, T), plus the score (B,) on the last: (B, T)."""
    return common.at_last_token(scores, mask) - beta * torch.where(mask, kl, 0.0)


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """(advantages, returns), both (B, T), 0 where mask is 0 (Schulman et al., 2015, GAE, eq. 16).

    The value after the last completion token is 0, ended or cut. returns = advantages + values are
    what the critic is fitted to. rewards, values, mask (B, T).
    """
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = (delta + gamma * lam * advantage) * mask[:, t]
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages, advantages + values


def whiten(advantages, mask):
    """(A - mean) / std over the completion tokens of all processes, 0 elsewhere: both (B, T)."""
    mean, std = common.global_mean(advantages[mask]), common.global_std(advantages[mask])
    return torch.where(mask, (advantages - mean) / (std + 1e-8), 0.0)


def value_loss(values, old_values, returns, clip_eps=None):
    """1/2 max((V - G)^2, (clip(V, V_old +- clip_eps) - G)^2) per token, all (B, T)."""
    loss = (values - returns) ** 2
    if clip_eps:
        clipped = values.clamp(old_values - clip_eps, old_values + clip_eps)
        loss = torch.max(loss, (clipped - returns) ** 2)
    return loss / 2


def update_beta(beta, kl, target):
    """beta, halved if kl < target / 1.5, doubled if kl > 1.5 target (PPO, section 4)."""
    return beta / 2 if kl < target / 1.5 else beta * 2 if kl > target * 1.5 else beta


def penalty_loss(logprobs, old_logprobs, advantages, mask, beta):
    """-rho A + beta k3 per token, all (B, T), k3 estimating KL(old || new) (PPO, equation 8)."""
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    kl = log_ratio.exp() - 1 - log_ratio
    return torch.where(mask, beta * kl - log_ratio.exp() * advantages, 0.0)


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_eps_low=0.2, clip_eps_high=0.2):
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) per token (PPO, 2017, equation 7).

    logprobs, old_logprobs, mask (B, T), advantages (B, 1) or (B, T). Returns the loss (B, T), 0
    where mask is 0, and a bool (B, T) that is true where the clip took the gradient away.
    """
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    loss = -torch.min(unclipped, clipped)
    return torch.where(mask, loss, 0.0), mask & (clipped < unclipped)  # min took a constant there


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


def objective(model, batch, args, autocast, totals, kl_penalty):
    """The loss of a micro-batch, its share of that of the whole update; counts its metrics."""
    ids, mask, engine_logprobs = batch["input_ids"], batch["mask"], batch["engine_logprobs"]
    with autocast:
        logprobs, entropy = common.token_logprobs(model, ids, mask, args.temperature)
    # In a batch's only update the policy is the one that sampled: no pass is paid for these.
    old_logprobs = batch.get("old_logprobs", logprobs.detach())
    metrics = {"policy/entropy": entropy, "engine/mismatch": (old_logprobs - engine_logprobs).abs()}
    given = (logprobs, old_logprobs, batch["advantages"], mask)
    if args.objective == "clip":
        losses, clipped = policy_loss(*given, args.clip_eps_low, args.clip_eps_high)
        metrics["policy/clip_frac"] = clipped
    else:
        losses = penalty_loss(*given, kl_penalty)
    if cap := args.mismatch_cap:  # not the algorithm's: the engine's arithmetic is another
        losses = losses * common.rollout_correction(old_logprobs, engine_logprobs, mask, cap)
    losses = losses - args.entropy_coef * entropy
    loss = (losses * batch["weights"]).sum()
    totals.count(mask, loss, metrics)
    return loss


def explained_variance(values, returns):
    """1 - var(returns - values) / var(returns): 1 is a perfect critic. None if all are equal."""
    spread = common.global_std(returns)
    return 1 - (common.global_std(returns - values) / spread) ** 2 if spread else None


def token_values(critic, autocast, batch):
    """V of the state before each token, (B, T), float32, 0 where mask is 0."""
    with autocast:
        values = critic(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1, 0]
    return torch.where(batch["mask"], values.float(), 0.0)


def update(model, critic, optimizers, batch, rows, args, autocast, totals, kl_penalty):
    """One step of the given optimisers on `rows` (a tensor) of a batch."""
    mask, how, limit = batch["mask"], args.loss_aggregation, args.max_completion_tokens
    batch["weights"] = torch.zeros(mask.shape)
    batch["weights"][rows] = loss_weights(mask[rows], how, limit)
    rows = rows.tolist()
    for _, part in common.micro_batches(batch, rows, args.tokens_per_micro_batch, model.device):
        objective(model, part, args, autocast, totals, kl_penalty).backward()
        values = token_values(critic, autocast, part)
        losses = value_loss(values, part["old_values"], part["returns"], args.value_clip_eps)
        loss = (losses * part["weights"]).sum()
        totals.losses["loss/value"] += loss.item()
        loss.backward()
    totals.norms.append(common.clip_gradient(model, args.max_grad_norm))
    common.clip_gradient(critic, args.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    critic.zero_grad()


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
    torch.manual_seed(args.seed)  # of a head that a value model lacks
    kind, name = AutoModelForTokenClassification, args.value_model or args.reward_model
    options = {"gradient_checkpointing": args.gradient_checkpointing, "num_labels": 1}
    critic = common.load_model(kind, name or args.model, device, **options)
    for weight in list(critic.children())[-1].parameters() if not name else []:
        torch.nn.init.zeros_(weight)  # a policy has no such head: V = 0 at first, and not noise
    value_optimizer = torch.optim.AdamW(critic.parameters(), args.value_learning_rate, **adamw)
    trained = {"policy": (model, optimizer), "critic": (critic, value_optimizer)}
    scorer = common.RewardModel(args.reward_model, device) if args.reward_model else reward
    stop_ids = common.stop_token_ids(tokenizer, model.generation_config)

    no_vllm = "as asked" if args.rollout_engine == "transformers" else common.why_no_vllm()
    make_engine = common.TransformersEngine if no_vllm else VLLMEngine
    given = (args, stop_ids, tokenizer.pad_token_id, device, dtype)
    engine = common.attempt("the rollout engine did not start", make_engine, *given)
    common.show_header(SCRIPT, args, run_dir, model, no_vllm, dtype, len(train), len(held_out))

    tracker = common.start_tracker(args, run_dir)
    evaluation = (engine, model, tokenizer, held_out, args, scorer)
    start, began, numbers = 0, time.perf_counter(), {"kl_penalty": args.kl_penalty}
    if args.resume:
        start = common.load_checkpoint(run_dir, args.steps, numbers, **trained)
    else:
        row = {"step": 0, "eval/accuracy": evaluate(*evaluation)}
        common.log_step(run_dir, row, args.steps, tracker)
    signals = common.catch_signals()

    for step in range(start + 1, args.steps + 1):
        clock = [time.perf_counter()]
        warm = min(1, step / max(1, args.warmup_steps))
        value_optimizer.param_groups[0]["lr"] = args.value_learning_rate * warm
        alone = step <= args.value_warmup_steps  # the critic learns, the policy waits
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
        mask, kl, metrics = batch["mask"], torch.zeros(()), {}
        updates, penalised = args.minibatches * args.update_epochs, args.objective == "kl-penalty"
        if ref_model:
            kl, metrics = common.batch_kl(model, ref_model, batch, args, autocast)
        elif updates > 1 or penalised:
            batch["old_logprobs"] = common.batch_logprobs(model, batch, args, autocast)
        budget, values = args.tokens_per_micro_batch, partial(token_values, critic, autocast)
        batch["old_values"] = common.score_batch(batch, budget, device, values)
        shaped = shaped_rewards(torch.tensor(rewards), kl, mask, args.beta)
        values = batch["old_values"]
        advantages, batch["returns"] = gae(shaped, values, mask, args.gamma, args.lam)
        batch["advantages"] = whiten(advantages, mask) if args.whiten else advantages

        # 4. Update, of policy and critic on the same batch.
        totals = common.Totals()
        optimizers = (value_optimizer,) if alone else (optimizer, value_optimizer)
        for rows in common.minibatches(len(rewards), args.minibatches, args.update_epochs, seed):
            penalty = numbers["kl_penalty"]
            update(model, critic, optimizers, batch, rows, args, autocast, totals, penalty)
        metrics |= totals.metrics()
        explained = explained_variance(batch["old_values"][mask], batch["returns"][mask])
        metrics["critic/explained_variance"] = explained
        if penalised and not alone:
            logprobs = common.batch_logprobs(model, batch, args, autocast)
            kl = common.kl_estimate(batch["old_logprobs"], logprobs, "k3")  # sampled from the old
            kl = metrics["kl/old_new"] = common.global_mean(kl[mask])
            numbers["kl_penalty"] = update_beta(numbers["kl_penalty"], kl, args.kl_target)
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
            common.save_checkpoint(run_dir, step, numbers, **trained)
        if stop:
            common.stop_run(run_dir, SCRIPT, tracker)
    common.finish_run(run_dir, model, tokenizer, dtype, began, tracker)


if __name__ == "__main__":
    main(common.parse_args(Args, TINY, __doc__))
