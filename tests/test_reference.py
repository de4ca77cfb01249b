"""Whole runs of all six scripts against one reference: every weight, every metric.

The reference is written from the formulas, in float64, with torch's Adam and no script's function.
From a run it takes what is random: the completions, and the engine's log-probs of them, to which
noise is added here. All else it computes again, from the first weights on.
"""

import copy
import importlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import TINY, read_jsonl
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

QUESTIONS = {"1+1=?": 2, "2+3=?": 5, "9-4+3=?": 8, "4*2-1+6=?": 13, "7-7=?": 0, "8-4-4=?": 0}
STOPS = list(range(20, 30))  # end a completion beside EOS: so many that their lengths differ

# Every number is one that acts: nothing here is a value at which its term is neutral.
FLAGS = {"steps": 2, "prompts_per_step": 4, "group_size": 3, "max_completion_tokens": 9}
FLAGS |= {"temperature": 0.7, "beta": 0.2, "learning_rate": 1e-3, "warmup_steps": 3, "seed": 1}
FLAGS |= {"max_grad_norm": 0.02, "mismatch_cap": 1.4, "mismatch_limit": 9.0, "eval_every": 2}
FLAGS |= {"micro_batch_size": 4, "save_every": 2, "rollout_engine": "transformers"}
LONG = {"steps": 3, "warmup_steps": 2}  # a step more than the warm-up
RATIO = {"minibatches": 2, "update_epochs": 2, "clip_eps_low": 0.02, "clip_eps_high": 0.05}
GSPO = {"clip_eps_low": 0.006, "clip_eps_high": 0.02}
PPO = {"gamma": 0.7, "lam": 0.9, "whiten": True, "entropy_coef": 0.05, "value_clip_eps": 0.02}
PPO |= {"value_warmup_steps": 1, "value_learning_rate": 2e-3, "beta": 0.4, **LONG}
AVERAGE = {"baseline": "moving-average", "baseline_decay": 0.6, **LONG}
PENALTY = {"objective": "kl-penalty", "kl_penalty": 0.3, "value_clip_eps": 0.0, "max_grad_norm": 9}

# What the reference takes where a case says nothing: neutral, or what the scripts begin with.
DEFAULTS = {"gamma": 1.0, "baseline": "batch-mean", "baseline_decay": 0.9, "scale_by_std": True}
DEFAULTS |= {"kl_estimator": "k3", "minibatches": 1, "update_epochs": 1, "value_warmup_steps": 0}
DEFAULTS |= {"kl_penalty": 1.0, "loss_aggregation": "sequence-mean", "objective": "clip"}

# (script, flags over FLAGS, the step after which the run is ended and resumed)
CASES = [
    ("reinforce", {"baseline": "none", "gamma": 0.7, "loss_aggregation": "sequence-sum"}, 0),
    ("reinforce", {"baseline": "batch-mean", "gamma": 0.9, "loss_aggregation": "constant"}, 0),
    ("reinforce", {**AVERAGE, "mismatch_cap": 0.0, "loss_aggregation": "token-mean"}, 2),
    ("reinforce", {"gamma": 0.7, "beta": 0.0, "loss_aggregation": "sequence-mean"}, 0),
    ("rloo", {"loss_aggregation": "sequence-sum", **LONG}, 1),
    ("rloo", {"beta": 0.0, "loss_aggregation": "token-mean", "gradient_checkpointing": True}, 0),
    ("rloo", {"mismatch_cap": 0.0, "loss_aggregation": "constant"}, 0),
    ("grpo", {"loss_aggregation": "sequence-mean", "seed": 3, **LONG}, 0),
    ("grpo", {"scale_by_std": False, "loss_aggregation": "constant", "kl_estimator": "k2"}, 0),
    ("grpo", {"loss_aggregation": "token-mean", "beta": 0.0, "minibatches": 4}, 0),
    ("grpo", {"loss_aggregation": "sequence-sum", "mismatch_cap": 0.0, "update_epochs": 3}, 0),
    ("gspo", {**GSPO, **LONG}, 0),
    ("gspo", {**GSPO, "scale_by_std": False, "kl_estimator": "k2", "update_epochs": 3}, 0),
    ("gspo", {**GSPO, "beta": 0.0, "mismatch_cap": 0.0, "minibatches": 4}, 0),
    ("cispo", {"loss_aggregation": "token-mean", **LONG}, 0),
    ("cispo", {"scale_by_std": False, "loss_aggregation": "constant", "kl_estimator": "k2"}, 0),
    ("cispo", {"beta": 0.0, "minibatches": 1, "loss_aggregation": "sequence-sum"}, 0),
    ("ppo", {"loss_aggregation": "sequence-mean"}, 0),
    ("ppo", {"whiten": False, "loss_aggregation": "token-mean", "steps": 2}, 0),
    ("ppo", {"value_warmup_steps": 0, "beta": 0.0, "loss_aggregation": "constant", "steps": 2}, 0),
    ("ppo", {**PENALTY, "kl_target": 1e-5}, 2),
    ("ppo", {**PENALTY, "kl_target": 9.0, "mismatch_cap": 0.0, "minibatches": 4}, 0),
]


def score(question, completion, answer):
    """A reward from -1 to 1 without a pattern, but the same for all where the answer is 0."""
    return 0.3 if answer == "0" else sum(map(ord, completion + answer)) % 17 / 8 - 1


def same(found, expected, scale, what, most):
    """Holds a tensor to the distance `most` from the expected one, in units of a scale's norm."""
    assert (found - expected).norm() <= most * scale.norm(), f"{what} is off"


def near(found, expected, what, error=2e-5):
    """Holds a number, or numbers, to the expected ones."""
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    words = {"msg": lambda text: f"{what}: {text}"}
    torch.testing.assert_close(found, expected, rtol=error, atol=error, **words)


# ------------------------------------------ The run ------------------------------------------
@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags of a small random model, in which dropout would show, and of the problems."""
    path = tmp_path_factory.mktemp("reference")
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    shape |= {"vocab_size": len(tokenizer), "tie_word_embeddings": True, "attention_dropout": 0.5}
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.3))
    model.generation_config.eos_token_id = STOPS
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    rows = [json.dumps({"question": q, "answer": str(a)}) + "\n" for q, a in QUESTIONS.items()]
    (path / "train.jsonl").write_text("".join(rows))
    (path / "heldout.jsonl").write_text("".join(rows[:3]))
    data = {"model": path / "model", "dataset": path / "train.jsonl", "eval_split": "train"}
    return {**data, "eval_dataset": path / "heldout.jsonl"}


def run(name, flags, run_dir, monkeypatch):
    """Runs a script's main with flags; returns what each step sampled, and its weights."""
    script, steps = importlib.import_module(name), []

    class NoisyEngine(script.TransformersEngine):
        """Keeps what goes in and out, and is as wrong about its samples as no engine should be."""

        def sync(self, weights):
            weights = {name: weight.clone() for name, weight in weights}
            steps.append(SimpleNamespace(weights=weights))
            super().sync(weights.items())

        def generate(self, prompts, seeds, temperature):
            step, sampled = steps[-1], super().generate(prompts, seeds, temperature)
            ids, logprobs = zip(*sampled, strict=True)
            if temperature == 0:
                step.held_out = SimpleNamespace(prompts=prompts, ids=ids)
                return sampled
            step.prompts, step.seeds, step.ids, step.clean = prompts, seeds, ids, logprobs
            noise = torch.randn(999, generator=torch.Generator().manual_seed(seeds[0])).tolist()
            step.engine = [[p + 0.7 * noise.pop() for p in row] for row in logprobs]
            return list(zip(ids, step.engine, strict=True))

    words = [name]
    for flag, value in flags.items():
        word = f"--{flag}" if value is not False else f"--no-{flag}"
        words.append(word.replace("_", "-") + (f"={value}" if type(value) is not bool else ""))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr(script, "TransformersEngine", NoisyEngine)
        patch.setattr(script, "reward", score)
        patch.setattr(script, "HERE", run_dir)  # where no plot.py is
        try:
            script.main(script.parse_args())
        finally:
            dist.destroy_process_group()
    return steps


# --------------------------------------- The reference ---------------------------------------
class AdamW(torch.optim.AdamW):
    """Without weight decay, after the gradient was cut to a norm of its own."""

    def __init__(self, weights):
        super().__init__(weights, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        self.weights = weights

    def update(self, loss, lr, max_norm, frozen=False):
        """One update; returns the norm that the gradient had."""
        self.zero_grad()
        loss.backward(inputs=self.weights)
        norm = clip_grad_norm_(self.weights, max_norm).item()
        self.param_groups[0]["lr"] = lr
        if not frozen:
            self.step()
        return norm


def at_completions(compute, batch, rows):
    """What `compute` gives at the positions that the completions' tokens follow, of each row."""
    ids = [torch.tensor(batch.prompts[row] + batch.ids[row]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # behind: no token sees it
    starts = [len(batch.prompts[row]) - 1 for row in rows]
    results = zip(rows, starts, compute(padded), strict=True)
    return [result[start : start + len(batch.ids[row])] for row, start, result in results]


def score_rows(model, batch, rows, temperature):
    """(log-probs, entropies) of the tokens of some rows, all in one line (N,)."""
    logits = torch.cat(at_completions(lambda ids: model(input_ids=ids).logits, batch, rows))
    every = (logits / temperature).log_softmax(-1)
    chosen = torch.tensor([token for row in rows for token in batch.ids[row]])
    return every.gather(1, chosen[:, None])[:, 0], -(every.exp() * every).sum(-1)


def value_rows(critic, batch, rows):
    """V of the state before each token of some rows, (N,)."""
    states = at_completions(lambda ids: critic.base(input_ids=ids)[0], batch, rows)
    return torch.cat(states) @ critic.head[0]


def discounted(x, factor):
    """sum_l factor^l x_{t+l} for each t."""
    powers = factor ** torch.arange(len(x))
    return torch.stack([(powers[: len(x) - t] * x[t:]).sum() for t in range(len(x))])


def advantages_of(name, batch, c, memory):
    """A of each token, a tensor for each row; PPO leaves its returns in the batch."""
    groups = batch.rewards.view(-1, c.group_size)
    kl = [old - ref for old, ref in zip(batch.old, batch.ref, strict=True)]  # k1
    if name in ("grpo", "gspo", "cispo", "rloo"):
        if name == "rloo":
            groups = groups - c.beta * torch.stack([row.sum() for row in kl]).view(groups.shape)
        each = groups - groups.mean(1, keepdim=True)
        if name == "rloo":
            each *= c.group_size / (c.group_size - 1)  # so it is R less the mean of the others
        elif c.scale_by_std:
            each /= (each**2).mean(1, keepdim=True).sqrt() + 1e-8
        return [a.expand(len(ids)) for a, ids in zip(each.view(-1), batch.ids, strict=True)]
    rewards = [-c.beta * row for row in kl]
    for row, reward in zip(rewards, batch.rewards, strict=True):
        row[-1] += reward
    if name == "reinforce":
        returns = [discounted(row, c.gamma) for row in rewards]
        mean = sum(row[0] for row in returns) / len(returns)
        average = memory["average"] = memory.get("next", torch.zeros(()))
        moved = c.baseline_decay * average + (1 - c.baseline_decay) * mean
        memory["next"] = moved if "next" in memory else mean
        b = {"none": 0.0, "batch-mean": mean, "moving-average": average}[c.baseline]
        return [row - b for row in returns]
    advantages = []
    for reward, value in zip(rewards, batch.values, strict=True):
        later = torch.cat([value[1:], torch.zeros(1)])
        advantages.append(discounted(reward + c.gamma * later - value, c.gamma * c.lam))
    batch.returns = [a + v for a, v in zip(advantages, batch.values, strict=True)]
    if c.whiten:
        every = torch.cat(advantages)
        std = ((every - every.mean()) ** 2).mean().sqrt()
        advantages = [(a - every.mean()) / (std + 1e-8) for a in advantages]
    return advantages


def k3(logprobs, other):
    """Schulman's estimate of KL(p || other) from samples of p."""
    return torch.exp(other - logprobs) - 1 - (other - logprobs)


def token_losses(name, t, c, memory):
    """(loss of each token, whether its ratio was clipped), from t, the tokens of a minibatch."""
    ratio, clipped = (t.logprobs - t.old).exp(), torch.zeros(len(t.old), dtype=torch.bool)
    if name == "gspo":
        parts = (t.logprobs - t.old).split(t.lengths)
        ratio = torch.cat([part.mean().exp().expand(len(part)) for part in parts])
    if name in ("reinforce", "rloo"):
        losses = -t.advantages * t.logprobs
    elif c.objective == "kl-penalty":
        losses = memory["kl_penalty"] * k3(t.old, t.logprobs) - ratio * t.advantages
    else:
        bounded, a = ratio.clamp(1 - c.clip_eps_low, 1 + c.clip_eps_high), t.advantages
        losses = -torch.minimum(ratio * a, bounded * a)
        clipped = (ratio > bounded) & (a > 0) | (ratio < bounded) & (a < 0)
        if name == "cispo":
            losses, clipped = -bounded.detach() * a * t.logprobs, bounded != ratio
            clipped &= (a != 0) | (c.beta > 0)  # rows that have no gradient take no part
    if c.mismatch_cap:
        losses = losses * (t.old - t.engine).exp().clamp(max=c.mismatch_cap)
    if name in ("grpo", "gspo", "cispo"):
        k2 = (t.logprobs - t.ref) ** 2 / 2
        losses = losses + c.beta * (k2 if c.kl_estimator == "k2" else k3(t.logprobs, t.ref))
    if name == "ppo":
        losses = losses - c.entropy_coef * t.entropies
    return losses, clipped


def aggregate(losses, lengths, c):
    rows = losses.split(lengths)
    if c.loss_aggregation == "sequence-mean":
        return sum(row.mean() for row in rows) / len(rows)
    divisors = {"sequence-sum": len(rows), "token-mean": len(losses)}
    divisors["constant"] = len(rows) * c.max_completion_tokens
    return losses.sum() / divisors[c.loss_aggregation]


def train(name, models, optimizers, batch, c, memory, step):
    """All updates of a step; returns their metrics."""
    policy, critic = models
    warm, frozen = min(1, (step + 1) / c.warmup_steps), step < c.value_warmup_steps
    size, count = len(batch.ids) // c.minibatches, c.minibatches * c.update_epochs
    tokens, found = sum(map(len, batch.ids)), []
    for number in range(count):
        rows = range(number % c.minibatches * size, (number % c.minibatches + 1) * size)
        t = SimpleNamespace(lengths=[len(batch.ids[row]) for row in rows])
        for key in ("old", "ref", "engine", "advantages", "values", "returns"):
            if hasattr(batch, key):
                setattr(t, key, torch.cat([getattr(batch, key)[row] for row in rows]))
        t.logprobs, t.entropies = score_rows(policy, batch, rows, c.temperature)
        losses, clipped = token_losses(name, t, c, memory)
        loss = aggregate(losses, t.lengths, c)
        norm = optimizers[0].update(loss, c.learning_rate * warm, c.max_grad_norm, frozen)
        found.append([loss.item(), norm, clipped.sum().item() * c.minibatches / tokens])
        if critic:
            t.new_values = value_rows(critic, batch, rows)
            losses = (t.new_values - t.returns) ** 2 / 2
            if eps := c.value_clip_eps:
                moved = t.values + (t.new_values - t.values).clamp(-eps, eps)
                losses = torch.maximum(losses, (moved - t.returns) ** 2 / 2)
            loss = aggregate(losses, t.lengths, c)
            optimizers[1].update(loss, c.value_learning_rate * warm, c.max_grad_norm)
            found[-1].append(loss.item())
    names = ["loss/policy", "policy/grad_norm", "policy/clip_frac", "loss/value"]
    names = names[:2] if name in ("reinforce", "rloo") else names[: len(found[0])]
    totals = {key: sum(row[i] for row in found) / count for i, key in enumerate(names)}
    if c.objective == "kl-penalty" and not frozen:
        new = score_rows(policy, batch, range(len(batch.ids)), c.temperature)[0].detach()
        kl = totals["kl/old_new"] = k3(torch.cat(batch.old), new).mean().item()
        memory["kl_penalty"] *= 0.5 if kl < c.kl_target else 2  # no case has it in between
    return totals


def reference(name, c, model, tokenizer, steps):
    """Makes the same steps; returns (rows of metrics, what else they kept, optimizers, critic)."""
    policy, ref, critic = model, copy.deepcopy(model), None
    memory, table, optimizers = {}, [], [AdamW(list(policy.parameters()))]
    if name == "ppo":
        critic = SimpleNamespace(base=copy.deepcopy(model).model, head=torch.zeros(1, 32))
        critic.head.requires_grad_()
        optimizers.append(AdamW([*critic.base.parameters(), critic.head]))
        memory["kl_penalty"] = c.kl_penalty
    for step, batch in enumerate(steps):
        batch.expected = copy.deepcopy(policy.state_dict())
        row, everyone = {"step": step}, range(len(batch.ids))
        lengths = [len(ids) for ids in batch.ids]
        if step % c.eval_every == 0 or step == c.steps:
            asked = batch.held_out
            row["eval/accuracy"] = sum(text_and_reward(tokenizer, asked)[1]) / 3
            logits = at_completions(lambda ids: policy(input_ids=ids).logits, asked, range(3))
            assert [row.argmax(-1).tolist() for row in logits] == list(asked.ids)  # greedy
        with torch.no_grad():
            old, entropies = score_rows(policy, batch, everyone, c.temperature)
            near(sum(batch.clean, []), old, f"the engine's log-probs in step {step}", 1e-4)
            ref_logprobs = score_rows(ref, batch, everyone, c.temperature)[0] if c.beta else old
            batch.old, batch.ref = old.split(lengths), ref_logprobs.split(lengths)
            if critic:
                batch.values = value_rows(critic, batch, everyone).split(lengths)
        batch.texts, rewards = text_and_reward(tokenizer, batch)
        batch.rewards = torch.tensor(rewards)
        batch.engine = [torch.tensor(logprobs) for logprobs in batch.engine]
        batch.advantages = advantages_of(name, batch, c, memory)
        if step < c.steps:
            row |= train(name, (policy, critic), optimizers, batch, c, memory, step)

        groups = batch.rewards.view(c.prompts_per_step, c.group_size)
        row["reward/mean"] = groups.mean().item()
        row["reward/std"] = ((groups - groups.mean()) ** 2).mean().sqrt().item()
        uniform = [len(set(group.tolist())) == 1 for group in groups]
        row["reward/uniform_groups"] = sum(uniform) / len(uniform)
        row["policy/entropy"] = entropies.mean().item()
        row["engine/mismatch"] = (old - torch.cat(batch.engine)).abs().mean().item()
        row["generation/length"] = sum(lengths) / len(lengths)
        ends = {tokenizer.eos_token_id, *STOPS}
        row["generation/truncated"] = sum(not ends & set(ids) for ids in batch.ids) / len(lengths)
        if c.beta:
            row["kl/mean"] = k3(old, ref_logprobs).mean().item()
        if critic:
            returns, values = torch.cat(batch.returns), torch.cat(batch.values)
            row["critic/explained_variance"] = 1 - ((returns - values).var() / returns.var()).item()
        table.append(row)
    return table, memory, optimizers, critic


def text_and_reward(tokenizer, batch):
    """The texts of completions, and their rewards."""
    both = batch.prompts, batch.ids
    batch.asked, texts = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in both)
    pairs = zip(batch.asked, texts, strict=True)
    return texts, [score(question, text, str(QUESTIONS[question])) for question, text in pairs]


# ---------------------------------------- The comparison ----------------------------------------
@pytest.mark.parametrize(
    "name, flags, resume_at", CASES, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(CASES)]
)
def test_run(name, flags, resume_at, data, tmp_path, monkeypatch, request):
    several = RATIO if name not in ("reinforce", "rloo") else {}
    flags = {**FLAGS, **several, **(PPO if name == "ppo" else {}), **flags}
    run_dir, size = tmp_path / "run", flags["group_size"]
    first = {**flags, **data, "output_dir": run_dir, "steps": resume_at or flags["steps"]}
    steps = run(name, first, run_dir, monkeypatch)
    if resume_at:
        more = run(name, {"resume": run_dir, "steps": flags["steps"]}, run_dir, monkeypatch)
        assert steps.pop().ids == more[0].ids
        steps += more
    seeds = [seed for step in steps for seed in step.seeds]
    assert len(set(seeds)) == len(seeds)  # no two samples share their random numbers
    prompts = [tuple(prompt) for step in steps for prompt in step.prompts]
    drawn = prompts[::size]
    assert prompts == [prompt for prompt in drawn for _ in range(size)]
    assert len(set(drawn[:6])) == len(set(drawn[6:12])) == 6  # each once in a pass over all
    assert drawn[:6] != drawn[6:12]

    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    model = AutoModelForCausalLM.from_pretrained(data["model"], dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(data["model"]).chat_template
    c = SimpleNamespace(**{**DEFAULTS, **flags})
    table, memory, optimizers, critic = reference(name, c, model, tokenizer, steps)
    rows, samples = (read_jsonl(run_dir / f"{name}.jsonl") for name in ("metrics", "samples"))
    for step, found, row, group in zip(steps, rows, table, samples, strict=True):
        assert found.pop("time/rollout") < found["time/step"]
        speed = found.pop("throughput/tokens_per_second")
        near(speed * found.pop("time/step"), sum(map(len, step.ids)), "throughput")
        assert found.keys() == row.keys()
        for key in row:
            near(found[key], row[key], f"{key} of step {row['step']}", 5e-5)
        kept = {
            "step": row["step"],
            "prompt": step.asked[0],
            "rewards": step.rewards[:size].tolist(),
        }
        kept |= {"answer": str(QUESTIONS[step.asked[0]]), "completions": step.texts[:size]}
        assert group == kept
        for key, weight in step.weights.items():
            wanted, moved = step.expected[key], step.expected[key] - steps[0].expected[key]
            same(weight, wanted, moved, f"{key} of step {row['step']}", 1e-3)

    saved, last = load_file(run_dir / "model/model.safetensors"), steps[-1].weights
    assert saved.keys() == last.keys() - {"lm_head.weight"}  # which is tied
    loaded = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    assert all(torch.equal(weight, last[key]) for key, weight in loaded.state_dict().items())
    (path,) = (run_dir / "checkpoints").iterdir()  # of the last step
    dcp_to_torch_save(path, run_dir / "checkpoint.pt")
    kept = torch.load(run_dir / "checkpoint.pt")
    pairs = [("model", "optimizer", model.state_dict(), optimizers[0])]
    if name == "ppo":
        named = {**critic.base.state_dict(prefix="base."), "head.weight": critic.head.detach()}
        pairs.append(("critic", "value_optimizer", named, optimizers[1]))
    for key in {"kl_penalty", "average"} & memory.keys():
        near(kept[key], memory[key], key)
    for what, state, named, own in pairs:
        assert kept[what].keys() == named.keys()
        for key, weight in named.items():
            same(kept[what][key], weight, weight, f"{what} {key}", 1e-5)
        for i, weight in enumerate(own.weights):
            mine, theirs = own.state[weight], kept[state][str(i)]
            assert theirs["step"] == mine["step"]
            for moment in ("exp_avg", "exp_avg_sq"):
                error = f"{what}'s {moment} {i}"
                same(theirs[moment], mine[moment], mine[moment], error, 1e-3)


def test_another_seed_draws_other_samples(data, tmp_path, monkeypatch):
    flags, steps = {**FLAGS, **data, "steps": 1, "beta": 0.0}, []
    for seed in (1, 2):
        other = {**flags, "seed": seed, "output_dir": tmp_path / str(seed)}
        steps += run("rloo", other, tmp_path, monkeypatch)
    assert steps[0].prompts != steps[2].prompts
    assert not set(steps[0].seeds + steps[1].seeds) & set(steps[2].seeds + steps[3].seeds)
