"""Changes one line of a copy of the scripts at a time, and prints what no test notices.

    python tests/mutate.py               # all mutations, two at a time
    python tests/mutate.py clip          # those that have "clip" in them

It is run by hand: half an hour. Each is tried on the fast tests, and what lives on those of whole
runs. A survivor is a missing test, or a change that changes nothing.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"]
WHOLE_RUNS = [f"tests/test_{name}.py" for name in ("runs", "resume", "command", "vllm")]
FORK = multiprocessing.get_context("fork")

# files: old text ⇒ new text. The old text is once in each of the files; * is all six scripts.
MUTATIONS = """
common: {tokenizer.eos_token_id, *listed} ⇒ {tokenizer.eos_token_id}
common: (column < end) ⇒ (column <= end)
common: input_ids[:, 1:][mask] ⇒ input_ids[:, :-1][mask]
common: weight, bias).div_(temperature) ⇒ weight, bias)
common: .mul_(scale / temperature) ⇒ .mul_(scale)
common: sub_(total.log()).add_(entropies ⇒ sub_(total.log()).sub_(entropies
common: d_weight.addmm_(z.T, hidden[rows]) ⇒ d_weight = z.T @ hidden[rows]
common: rtol=1e-3, atol=1e-3 ⇒ rtol=1e9, atol=1e9
common: inside.exp() * (1 + x - inside) ⇒ x.exp()
common: bounded_exp(-difference) - 1 + difference ⇒ bounded_exp(difference) - 1 - difference
common: old_logprobs - rollout_logprobs ⇒ rollout_logprobs - old_logprobs
common: log_ratio.clamp(max=math.log(cap)) ⇒ log_ratio.clamp(-math.log(cap), math.log(cap))
common: 0.0).detach() ⇒ 0.0)
common: [0] * (width - len(prompt)) + [1] ⇒ [1] * (width - len(prompt)) + [1]
common: manual_seed(seed) for seed in ⇒ manual_seed(seeds[0]) for seed in
common: (temperature or 1.0) ⇒ 1.0
common: token = drawn if temperature else ⇒ token = drawn if True else
common: uniform[:, len(chosen_logprobs), None] ⇒ uniform[:, 0, None]
*: sample {place}" ⇒ sample {place % args.prompts_per_step}"
*: f"{args.seed} sample ⇒ f"sample
*: f"{args.seed} {len(order)}" ⇒ f"{len(order)}"
*: f"{args.seed} {len(order)}" ⇒ f"{args.seed}"
*: (order[place], seed + k) ⇒ (order[place], seed)
*: tokenizer, rows, args.temperature) ⇒ tokenizer, rows, 1.0)
*: temperature=0.0) ⇒ temperature=1.0)
*: args.eval_dataset or args.dataset, ⇒ args.dataset,
*: part["mask"], args.temperature) ⇒ part["mask"], 1.0)
*: (model, ids, mask, args.temperature) ⇒ (model, ids, mask, 1.0)
*: .nonzero().max() + 1 ⇒ .nonzero().max()
*: "sequence-sum": sequences, ⇒ "sequence-sum": 1,
*: "constant": sequences * max_tokens ⇒ "constant": max_tokens
*: loss = (losses * part["weights"]).sum() ⇒ loss = losses.sum() / mask.sum()
ppo grpo gspo cispo: (batch["mask"][m], how, limit) ⇒ (batch["mask"], how, limit)[m]
*: clip_grad_norm_(model.parameters(), args.max_grad_norm ⇒ clip_grad_norm_(model.parameters(), 1e9
*: model.zero_grad() ⇒ pass
ppo: critic.zero_grad() ⇒ pass
*: warm = min(1, (step + 1) ⇒ warm = min(1, step
*: warm = min(1, (step + 1) ⇒ warm = min(9, (step + 1)
*: (0.9, 0.95) ⇒ (0.9, 0.999)
*: "weight_decay": 0.0 ⇒ "weight_decay": 0.01
*: module.training = checkpointing and ⇒ module.training = checkpointing or
*: if cap := args.mismatch_cap: ⇒ if cap := 0:
*: rollout_correction(old_logprobs, engine ⇒ rollout_correction(logprobs.detach(), engine
*: engine_logprobs, mask, cap) ⇒ engine_logprobs, mask, 2.0)
*: if not abs(values[-1]) < 1e30: ⇒ if False:
*: if step < args.steps: ⇒ if True:
*: engine.sync((name, ⇒ step > start or engine.sync((name,
*: self.model.load_state_dict(dict(weights)) ⇒ pass
*: if not mismatch <= args.mismatch_limit: ⇒ if mismatch > 1e9:
*: kind="k3")\\n            row["kl/mean"] ⇒ kind="k1")\\n            row["kl/mean"]
*: kl[mask].mean().item()\\n        mismatch ⇒ kl.mean().item()\\n        mismatch
*: .abs()[mask].mean() ⇒ .abs().mean()
*: uniform.double().mean() ⇒ uniform.double().std()
*: entropies[mask].mean() ⇒ entropies.mean()
*: 1 - sum(ended) / len(ended) ⇒ sum(ended) / len(ended)
*: if step % args.eval_every == 0 or step == args.steps: ⇒ if step % args.eval_every == 0:
*: (step % args.save_every == 0 or step == args.steps) ⇒ step % args.save_every == 0
*: "optimizer": optimizer.state_dict()["state"]} ⇒ }
*: dcp.load(trained, ⇒ dcp.load({"model": trained["model"]},
*: step = int(last.parent.name) if last else 0 ⇒ step = 0
*: .splitlines(keepends=True)[:step] ⇒ .splitlines(keepends=True)[: step + 1]
*: shutil.rmtree(old) ⇒ pass
*: default=Args(**saved) ⇒ default=Args()
*: self.llm.sleep(level=2) ⇒ pass
*: params = [self.Params(seed=seed, ⇒ params = [self.Params(
reinforce rloo grpo gspo cispo: [minibatch].any(1) ⇒ [minibatch].gt(0).any(1)
grpo gspo cispo: .any(1) | (args.beta > 0) ⇒ .any(1)
ppo grpo gspo cispo: in minibatches * args.update_epochs: ⇒ in minibatches:
ppo grpo gspo cispo: ["loss/policy"] += loss.item() / updates ⇒ ["loss/policy"] += loss.item()
ppo: ["loss/value"] += loss.item() / updates ⇒ ["loss/value"] += loss.item()
ppo grpo gspo cispo: whole(norm).item() / updates ⇒ whole(norm).item()
*: / processes  # each ⇒ # each
ppo grpo gspo cispo: mask, low, high) ⇒ mask, high, high)
ppo grpo gspo cispo: mask, low, high) ⇒ mask, low, low)
ppo grpo gspo cispo: advantages, mask, low, high) ⇒ advantages, mask)
ppo grpo gspo cispo: clamp(1 - clip_eps_low, 1 + clip_eps_high) ⇒ clamp(max=1 + clip_eps_high)
grpo gspo cispo: losses + args.beta * kl ⇒ losses - args.beta * kl
grpo gspo cispo: (logprobs, part["ref_logprobs"], ⇒ (part["ref_logprobs"], logprobs,
grpo gspo cispo: part["ref_logprobs"], args.kl_estimator) ⇒ part["ref_logprobs"], "k3")
grpo gspo cispo: group_advantages(rewards, args.scale_by_std) ⇒ group_advantages(rewards)
grpo gspo cispo: rewards.std(1, correction=0, keepdim=True) ⇒ rewards.std(1, keepdim=True)
gspo: log_ratio / mask.sum(1, keepdim=True).clamp(min=1) ⇒ log_ratio
cispo: weight = weight.detach() ⇒ pass
cispo: mask & (weight != ratio) ⇒ mask & (weight < ratio)
rloo: others / (rewards.shape[1] - 1) ⇒ others / rewards.shape[1]
rloo: rewards - args.beta * (kl * mask) ⇒ rewards + args.beta * (kl * mask)
rloo: leave_one_out_advantages(returns).view ⇒ leave_one_out_advantages(rewards).view
rloo reinforce ppo: kind="k1") ⇒ kind="k3")
reinforce: returns_to_go(token_rewards, args.gamma) ⇒ returns_to_go(token_rewards)
reinforce: token_rewards -= args.beta ⇒ token_rewards += args.beta
reinforce: returns.gather(1, first).mean() ⇒ returns.mean()
reinforce: "moving-average": average} ⇒ "moving-average": mean}
reinforce: 1 - args.baseline_decay if ⇒ args.baseline_decay if
reinforce: if step else 1.0) ⇒ if True else 1.0)
reinforce: average = trained["average"] = ⇒ average =
ppo: torch.where(mask, -beta * kl, 0.0) ⇒ torch.where(mask, beta * kl, 0.0)
ppo: delta + gamma * lam * advantage ⇒ delta + lam * advantage
ppo: shaped, values, mask, args.gamma, args.lam) ⇒ shaped, values, mask)
ppo: if args.whiten else advantages ⇒ if True else advantages
ppo: part["returns"], args.value_clip_eps) ⇒ part["returns"])
ppo: torch.max(loss, ⇒ torch.min(loss,
ppo: losses - args.entropy_coef ⇒ losses + args.entropy_coef
ppo: args.value_learning_rate * warm ⇒ args.value_learning_rate
ppo: waits = step < args ⇒ waits = step <= args
ppo: (critic.parameters(), args.max_grad_norm ⇒ (critic.parameters(), 1e9
ppo: trained["critic"] = critic.state_dict() ⇒ pass
ppo: trained["value_optimizer"] = ⇒ _ =
ppo: kl_penalty = trained["kl_penalty"] = ⇒ kl_penalty =
ppo: batch, args, kl_penalty.item()) ⇒ batch, args, args.kl_penalty)
ppo: kl_penalty.fill_( ⇒ (
ppo: and not waits: ⇒ and True:
ppo: beta * kl - common.bounded_exp ⇒ -beta * kl - common.bounded_exp
ppo: kl_estimate(-log_ratio, ⇒ kl_estimate(log_ratio,
ppo: (batch["old_logprobs"], logprobs, kind="k3") ⇒ (logprobs, batch["old_logprobs"], kind="k3")
ppo: explained_variance(values[mask], returns[mask]) ⇒ explained_variance(values, returns)
ppo: [range(len(part)), last] ⇒ [:, -1]
ppo: values = critic(ids)[:, :-1] ⇒ values = critic(ids)[:, 1:]
ppo: critic(part["input_ids"])[:, :-1] ⇒ critic(part["input_ids"])[:, 1:]
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("substring", nargs="?", default="")
    parser.add_argument("--tests", nargs="*", default=[], help="test files, not the fast ones")
    options = parser.parse_args()
    lines = [line for line in MUTATIONS.strip().splitlines() if options.substring in line]
    for line in lines:
        names, old, _ = parts(line)
        sources = [(ROOT / f"{name}.py").read_text(encoding="utf-8") for name in names]
        if {source.count(old) for source in sources} != {1}:
            sys.exit(f"this is not once in each file: {old!r}")
    # What takes long to import is imported once: each mutation is tried in a fork of this process.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    import datasets, math_verify, torch.distributed.checkpoint, torch.distributed.fsdp  # noqa
    import transformers.models.llama, transformers.generation, tyro  # noqa

    survivors = ["", *lines]  # "" is no change: it must survive
    with ThreadPoolExecutor(2) as pool:
        for tests in [options.tests] if options.tests else [[], WHOLE_RUNS]:
            tried, survivors = survivors, []
            jobs = [(line, tests) for line in tried]
            for line, failure in zip(tried, pool.map(in_a_fork, jobs), strict=True):
                print(failure or "survived", line or "(no change)", sep="    ", flush=True)
                survivors += [] if failure else [line]
            if survivors[:1] != [""]:
                sys.exit("the tests fail without any change")
    print(f"{len(survivors) - 1} of {len(lines)} survived:", *survivors[1:], sep="\n")


def parts(line):
    """(names of the scripts, old text, new text) of a line of MUTATIONS."""
    names, change = line.split(": ", 1)
    old, new = change.replace("\\n", "\n").split(" ⇒ ")
    return SCRIPTS if names == "*" else names.split(), old, new


def in_a_fork(job):
    """first_failure in a process that may start others, as the tests of whole runs do."""
    try:
        with ProcessPoolExecutor(1, FORK) as process:
            return process.submit(first_failure, job).result()
    except BrokenExecutor:
        return "DIED"


def first_failure(job):
    """The first test that fails in a copy that a line of MUTATIONS was applied to, or ""."""
    line, tests = job
    names, old, new = parts(line) if line else (SCRIPTS, "", "")
    with tempfile.TemporaryDirectory() as folder:
        skip = shutil.ignore_patterns(".*", "__pycache__", "runs", "results", "benchmarks")
        copy = shutil.copytree(ROOT, Path(folder, "copy"), ignore=skip)
        for name in names if line else []:
            path = copy / f"{name}.py"
            path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        about = ["common", "reward", *SCRIPTS] if names in (SCRIPTS, ["common"]) else names
        tests = tests or [f"tests/test_{name}.py" for name in [*about, "reference"]]
        command = ["-x", "-q", "-n0", "-p", "no:cacheprovider", f"--basetemp={folder}/temp"]
        command += [test for test in tests if (copy / test).exists()]
        command += ["-k", " or ".join(names)] if about == names else []
        os.chdir(copy)
        with open(Path(folder, "out"), "w+") as out, contextlib.redirect_stdout(out):
            status = pytest.main(command)
            out.seek(0)
            lines = out.read().splitlines()
        os.chdir(ROOT)
    failed = [text for text in lines if text.startswith(("FAILED", "ERROR"))]
    return "" if status == 0 else (failed or lines[-1:] or ["no test was found"])[0]


if __name__ == "__main__":
    main()
