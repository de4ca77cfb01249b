"""The variance of a step's gradient by baseline, on one batch of prompts and a policy held still.

    python benchmarks/lecture.py variance          # some minutes on one core

16 prompts x 8 samples are drawn 100 times. Each draw gives a gradient of reinforce.py's loss for
each baseline, all from the same samples. The variance of a gradient g is that of all its entries
together, E|g - E g|^2; |E g| is the length of what they estimate. Two policies: the built-in one,
and what rloo.py makes of it in 20 steps. The learned baseline is ppo.py's critic, fitted to returns
of the same policy on other prompts. The best constant is the b with the least variance of
g_none - b g_1, g_1 being the gradient with each advantage 1: cov(g_none, g_1) / var(g_1).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

import common
import ppo
import reinforce
import rloo

DRAWS, PROMPTS, GROUP, FITS, RLOO_STEPS = 100, 16, 8, 100, 20


def sample(engine, tokenizer, problems, seed):
    """(input_ids (B, T), mask (B, T-1), rewards (B,)) of GROUP completions of each problem."""
    rows = [problem for problem in problems for _ in range(GROUP)]
    seeds = range(seed * len(rows), (seed + 1) * len(rows))
    prompts = [row["ids"] for row in rows]
    completions = [ids for ids, _ in engine.generate(prompts, list(seeds), 1.0)]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    scored = zip(rows, texts, strict=True)
    rewards = [reinforce.reward(row["prompt"], text, row["answer"]) for row, text in scored]
    return *common.collate(prompts, completions, 0), torch.tensor(rewards)


def fit(critic, engine, tokenizer, problems):
    """Fits a critic to the returns, which are the rewards, of FITS batches of problems."""
    optimizer = torch.optim.AdamW(critic.parameters(), 1e-3)
    for batch in range(FITS):
        part = [problems[(batch * PROMPTS + i) % len(problems)] for i in range(PROMPTS)]
        ids, mask, rewards = sample(engine, tokenizer, part, DRAWS + batch)
        values = critic(ids)[:, :-1]
        ppo.value_loss(values, values.detach(), rewards[:, None])[mask].mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def measure(folder):
    """{"reward", "constant", "baselines": {name: [variance, its standard error, |E g|^2]}}."""
    args = reinforce.Args(**{**reinforce.TINY, "model": str(folder)})
    tokenizer = common.load_tokenizer(args.model)
    problems = reinforce.load_problems(args, tokenizer, args.dataset, "train")
    model = reinforce.load_model(reinforce.AutoModelForCausalLM, args.model, torch.float32)
    stop_ids = common.stop_token_ids(tokenizer, model.generation_config)
    engine = reinforce.TransformersEngine(args, stop_ids, 0, torch.float32)
    critic = ppo.Critic(ppo.Args(model=args.model), torch.float32)
    fit(critic, engine, tokenizer, problems[PROMPTS:])
    gradients, mean = {}, 0.0
    for draw in range(DRAWS):
        ids, mask, rewards = sample(engine, tokenizer, problems[:PROMPTS], draw)
        mean += rewards.mean().item() / DRAWS
        alone = rloo.leave_one_out_advantages(rewards.view(-1, GROUP)).view(-1, 1)
        advantages = {"none": rewards[:, None], "batch mean": (rewards - rewards.mean())[:, None]}
        advantages |= {"leave-one-out": alone, "1": torch.ones(1, 1)}
        advantages["learned (critic)"] = rewards[:, None] - critic(ids)[:, :-1].detach()
        logprobs, _ = common.token_logprobs(model, ids, mask)
        weights = reinforce.loss_weights(mask, "sequence-sum", args.max_completion_tokens)
        for name, values in advantages.items():
            loss = (reinforce.policy_loss(logprobs, values) * weights).sum()
            parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            gradients.setdefault(name, []).append(torch.cat([part.flatten() for part in parts]))
    gradients = {name: torch.stack(rows) for name, rows in gradients.items()}
    none, ones = gradients["none"], gradients.pop("1")
    score = ones - ones.mean(0)
    best = (((none - none.mean(0)) * score).sum() / score.square().sum()).item()
    gradients["best constant"] = none - best * ones
    gradients["none, each reward + 1"] = none + ones  # the others stay as they are
    spreads = {name: spread(rows) for name, rows in gradients.items()}
    return {"reward": round(mean, 4), "constant": round(best, 4), "baselines": spreads}


def spread(gradients):
    """[variance, its standard error, |E g|^2] of gradients (draws, parameters), without bias."""
    draws = len(gradients)
    squares = (gradients - gradients.mean(0)).square().sum(1) * draws / (draws - 1)
    variance = squares.mean().item()
    signal = gradients.mean(0).square().sum().item() - variance / draws
    return [round(number, 5) for number in (variance, squares.std().item() / draws**0.5, signal)]


def run(path):
    """Measures the two policies, one thread each, and writes what measure returns of them."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "rloo.py", "--steps", str(RLOO_STEPS)]
        command += ["--rollout-engine", "transformers", "--output-dir", f"{folder}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        models = ROOT / "tiny" / "model", Path(folder, "run", "model")
        text = json.dumps([measure(model) for model in models], indent=1) + "\n"
    path.write_text(text, encoding="utf-8")


def table(policies):
    """The lines of a table of what run wrote."""
    titles = ""
    for policy in policies:
        titles += f" variance at mean reward {policy['reward']:.2f} | of none | length of E g |"
    lines = [f"| baseline |{titles}", "|---" * (1 + 3 * len(policies)) + "|"]
    for name in policies[0]["baselines"]:
        cells = ""
        for policy in policies:
            variance, error, signal = policy["baselines"][name]
            share = variance / policy["baselines"]["none"][0]
            cells += f" {variance:.2f} ± {error:.2f} | {share:.0%} | {max(0, signal) ** 0.5:.2f} |"
        lines.append(f"| {name} |{cells}")
    times = []
    for policy in policies:
        share, mean = policy["constant"], policy["reward"]
        times.append((1 - share) / (1 - mean) / (share / mean))
    text = f"The best constant was {policies[0]['constant']:.2f} and {policies[1]['constant']:.2f}."
    text += (
        " It is the mean reward weighed by the squared length of ∇ log π: by it a wrong answer's"
    )
    text += f" squared gradient is {times[0]:.1f} times a right one's at first, and after"
    text += f" {RLOO_STEPS} steps {times[1]:.0f} times, when right answers have become the likely"
    text += " ones. So there the mean reward is no good baseline, and none at all is a better one,"
    text += " as long as a wrong answer's reward is 0; with 1 added to every reward the baselines"
    text += " earn their keep. All rows estimate one gradient."
    return [*lines, "", text]
