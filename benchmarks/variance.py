"""Variance of a step's gradient by baseline, measured on one fixed batch of prompts.

    python benchmarks/variance.py [--draws 100] [--output results/variance.md]

16 prompts x 16 samples are drawn again and again from a policy that is held still. Each draw gives
one gradient of reinforce.py's loss for each baseline, all from the same samples. The variance of a
gradient g is that of all its entries together, E|g - E g|^2; |E g| is the length of what they
estimate. Two policies: the built-in one, and what rloo.py makes of it in six steps. The learned
baseline is ppo.py's critic, fitted to the policy's returns on other prompts before the first draw,
at lambda = 1. The best constant is the b that makes the variance of g_none - b g_1 smallest, where
g_1 is the gradient with all advantages 1: cov(g_none, g_1) / var(g_1), known only afterwards.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

import common
import ppo
import reinforce
import rloo

CPU = torch.device("cpu")
FLOAT32, AUTOCAST = common.precision("float32", CPU)


def sample(engine, problems, args, seed):
    """(a batch, its rewards (B,)) of args.group_size completions of each problem."""
    prompts, limit = [problem["ids"] for problem in problems], args.max_completion_tokens
    rollouts = engine.generate(prompts, args.group_size, args.temperature, limit, seed)
    problems = [problem for problem in problems for _ in range(args.group_size)]
    texts = [engine.tokenizer.decode(ids, skip_special_tokens=True) for ids in rollouts[0]]
    rewards = common.score(problems, texts, reinforce.reward)
    return common.make_batch(problems, *rollouts, 0), torch.tensor(rewards)


def advantages_of(rewards, mask, values, group_size):
    """{baseline: advantages (B, T)} of one draw; values (B, T) are the critic's."""
    token_rewards = common.at_last_token(rewards, mask)
    returns = reinforce.returns_to_go(token_rewards)
    alone = rloo.leave_one_out_advantages(rewards.view(-1, group_size)).view(-1, 1)
    learned, _ = ppo.gae(token_rewards, values, mask, lam=1.0)
    return {
        "none": returns * mask,
        "batch mean": (returns - rewards.mean()) * mask,
        "leave-one-out": alone * mask,
        "learned (critic)": learned,
        "1": mask.float(),
    }


def fit_critic(folder, engine, problems, args, steps):
    """ppo.py's critic after `steps` batches of the policy's own returns."""
    torch.manual_seed(0)
    critic = common.load_model(ppo.AutoModelForTokenClassification, folder, CPU, num_labels=1)
    optimizer = torch.optim.AdamW(critic.parameters(), 1e-3)
    for step in range(1, steps + 1):
        chosen = common.problems_of_step(problems, step, args.prompts_per_step, 1)
        batch, rewards = sample(engine, chosen, args, common.seed_of("critic", step))
        returns = reinforce.returns_to_go(common.at_last_token(rewards, batch["mask"]))
        values = ppo.token_values(critic, AUTOCAST, batch)
        loss = ppo.value_loss(values, values.detach(), returns)[batch["mask"]].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return critic


def measure(folder, draws, critic_steps):
    """(mean reward, best constant, the critic's explained variance, {baseline: gradients (draws,
    parameters)}) of the policy in a folder."""
    args = reinforce.Args(**{**reinforce.TINY, "model": str(folder), "group_size": 16})
    tokenizer = common.load_tokenizer(folder)
    problems = reinforce.load_problems(args)[0]
    common.encode_problems(problems, tokenizer, args.max_prompt_tokens)
    model = common.load_model(reinforce.AutoModelForCausalLM, folder, CPU)
    stop_ids = common.stop_token_ids(tokenizer, model.generation_config)
    engine = common.TransformersEngine(args, stop_ids, 0, CPU, FLOAT32)
    engine.tokenizer = tokenizer
    fixed, others = problems[: args.prompts_per_step], problems[args.prompts_per_step :]
    critic = fit_critic(folder, engine, others, args, critic_steps)
    gradients, mean_reward, seen = {}, 0.0, []
    for draw in range(draws):
        batch, rewards = sample(engine, fixed, args, common.seed_of("draw", draw))
        mean_reward += rewards.mean().item() / draws
        ids, mask = batch["input_ids"], batch["mask"]
        with torch.no_grad():
            values = ppo.token_values(critic, AUTOCAST, batch)
        returns = reinforce.returns_to_go(common.at_last_token(rewards, mask))
        seen.append((values[mask], returns[mask]))
        logprobs, _ = common.token_logprobs(model, ids, mask, args.temperature)
        weights = reinforce.loss_weights(mask, "sequence-sum", args.max_completion_tokens)
        for name, advantages in advantages_of(rewards, mask, values, args.group_size).items():
            loss = (reinforce.policy_loss(logprobs, advantages) * weights).sum()
            parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            gradients.setdefault(name, []).append(torch.cat([part.flatten() for part in parts]))
    gradients = {name: torch.stack(rows) for name, rows in gradients.items()}
    none, ones = gradients["none"], gradients.pop("1")
    score = ones - ones.mean(0)
    best = ((none - none.mean(0)) * score).sum() / score.square().sum()
    gradients["best constant"] = none - best * ones
    gradients["none, each reward + 1"] = none + ones  # the others stay as they are
    explained = ppo.explained_variance(*map(torch.cat, zip(*seen, strict=True)))
    return mean_reward, best.item(), explained, gradients


def spread(gradients):
    """(variance, its standard error, |mean|^2) of gradients (draws, parameters), without bias."""
    draws = len(gradients)
    squares = (gradients - gradients.mean(0)).square().sum(1) * draws / (draws - 1)
    variance = squares.mean().item()
    signal = gradients.mean(0).square().sum().item() - variance / draws
    return variance, squares.std().item() / draws**0.5, signal


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=100, help="gradients of each baseline")
    parser.add_argument("--critic-steps", type=int, default=100, help="batches to fit the critic")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "variance.md")
    args = parser.parse_args()
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, ROOT / "rloo.py", "--steps", "6", "--rollout-engine", "transformers"]
        run += ["--output-dir", f"{folder}/run"]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        for path in (ROOT / "tiny" / "model", Path(folder, "run", "model")):
            *numbers, gradients = measure(path, args.draws, args.critic_steps)
            columns.append((*numbers, {name: spread(rows) for name, rows in gradients.items()}))
            print(columns[-1], flush=True)
    titles = "".join(
        f" mean reward {reward:.2f}: variance | of none | length of E g |" for reward, *_ in columns
    )
    lines = [f"| baseline |{titles}", "|---" * (1 + 3 * len(columns)) + "|"]
    for name in columns[0][-1]:
        cells = ""
        for *_, spreads in columns:
            variance, error, signal = spreads[name]
            share, length = variance / spreads["none"][0], max(0, signal) ** 0.5
            cells += f" {variance:.2f} ± {error:.2f} | {share:.0%} | {length:.2f} |"
        lines.append(f"| {name} |{cells}")
    text = f"{args.draws} gradients of 16 prompts x 16 samples. {time.strftime('%Y-%m-%d')}.\n\n"
    text += "\n".join(lines) + "\n\n"
    best, explained = ([f"{column[i]:.2f}" for column in columns] for i in (1, 2))
    text += f"The best constants are {' and '.join(best)}; the critic's explained variance is "
    text += f"{' and '.join(explained)}.\n"
    args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
