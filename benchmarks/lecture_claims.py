"""What benchmarks/lecture.py runs: each claim of the lecture as settings, a metric and a step.

settings: name in the legend -> (script, flags, edits of the script). All else is the built-in
task's: 16 prompts x 8 samples a step, four updates of each batch where the script has them. `at` is
the step whose row is compared, or the first and last of the steps whose rows are averaged. They
were fixed before the seeds were run.
"""

# Kinds of answers are counted in every run.
MEAN = '        row["reward/mean"] = rewards.mean().item()\n'
RECORD = {
    MEAN: MEAN + '        row["worked"] = sum("=" in text for text in texts) / len(texts)\n'
    '        row["rambling"] = sum(".." in text for text in texts) / len(texts)\n'
}
TENSOR = "        rewards = torch.tensor(rewards, dtype=torch.float64)"
PLUS_ONE = {TENSOR: TENSOR.replace("= torch", "= 1 + torch")}
LENGTH = "[r + 0.01 * len(text) for r, text in zip(rewards, texts, strict=True)]"
LONGER = {TENSOR: TENSOR.replace("(rewards", f"({LENGTH}")}
SYNC = "        engine.sync((name"
OLD_WEIGHTS = {SYNC: f"        step > start or {SYNC.strip()}"}
SAMPLED = "sampled = rollout(engine, tokenizer, rows, args.temperature"
COLD = {SAMPLED: SAMPLED.replace("args.temperature", "0.7")}
MANY = "--update-epochs 8 --minibatches 1"
OFF = "--clip-eps-low 1e9 --clip-eps-high 1e9"


def claim(name, title, lecture, metric, at, steps, says, settings, **more):
    """A claim as a dict. `says` has [setting] for its numbers, and [a | b] for whether the ranges
    of two settings touch."""
    return {"name": name, "title": title, "lecture": lecture, "metric": metric, "at": at} | {
        "steps": steps, "says": says, "settings": settings, "seeds": 3, "flags": "", **more
    }  # fmt: skip


ACCURACY = "eval/accuracy"
CLAIMS = [
    claim(
        "baseline",
        "A baseline: the step no longer depends on where the rewards' zero lies",
        "∇ log π(τ) (R(τ) − b) has the same mean for every b, not the same variance. Here 1 is "
        "added to every reward (†), which changes nothing about the task.",
        ACCURACY,
        30,
        30,
        "With every reward 1 higher, no baseline reaches [none], the moving average "
        "[moving average], the batch mean [batch mean] ([none | batch mean]). With rewards of 0 "
        "and 1 a 0 is centred enough, and none is needed: [none, rewards 0 and 1].",
        {
            "none": ("reinforce", "--baseline none", PLUS_ONE),
            "moving average": ("reinforce", "--baseline moving-average", PLUS_ONE),
            "batch mean": ("reinforce", "--baseline batch-mean", PLUS_ONE),
            "none, rewards 0 and 1": ("reinforce", "--baseline none", {}),
        },
    ),
    claim(
        "step-size",
        "The size of a step: too large stalls, too small crawls",
        "θ ← θ + α ∇J, and J's gradient says nothing of how far it holds.",
        ACCURACY,
        25,
        25,
        "RLOO at 1e-3 reaches [1e-3], at 3e-4 [3e-4], at 3e-5 [3e-5] ([3e-4 | 1e-3], "
        "[3e-4 | 3e-5]).",
        {
            "1e-3": ("rloo", "--learning-rate 1e-3", {}),
            "3e-4": ("rloo", "", {}),
            "3e-5": ("rloo", "--learning-rate 3e-5", {}),
        },
        flag="--learning-rate",
        beside=["policy/entropy"],
    ),
    claim(
        "clip",
        "Many updates on one batch need the clip",
        "min(ρA, clip(ρ, 1 − ε, 1 + ε)A): beyond ε a batch gives no more gradient. Eight epochs.",
        ACCURACY,
        20,
        20,
        "GRPO with ε = .2 reaches [clip .2], without a clip [no clip] ([clip .2 | no clip]).",
        {"clip .2": ("grpo", "", {}), "no clip": ("grpo", OFF, {})},
        flags=MANY,
        beside=["policy/entropy"],
    ),
    claim(
        "ppo-clip",
        "PPO's two ways of staying near the old policy",
        "The clip, or a penalty β' KL(old ‖ new) with β' adapted. Eight epochs.",
        ACCURACY,
        25,
        25,
        "PPO with ε = .2 reaches [clip .2], with the adapted penalty [KL penalty], with neither "
        "[no clip] ([clip .2 | no clip], [KL penalty | no clip]).",
        {
            "clip .2": ("ppo", "", {}),
            "KL penalty": ("ppo", "--objective kl-penalty", {}),
            "no clip": ("ppo", OFF, {}),
        },
        flags=MANY,
        seeds=5,
    ),
    claim(
        "gspo-many",
        "A sequence's ratio wants a clip of its own size",
        "s is a mean over the completion, so it moves far less than a token's ρ. Eight epochs.",
        ACCURACY,
        20,
        20,
        "GSPO with ε = .01 reaches [.01], with GRPO's .2 [.2] ([.01 | .2]).",
        {
            ".01": ("gspo", "--clip-eps-low 0.01 --clip-eps-high 0.01", {}),
            ".2": ("gspo", "--clip-eps-low 0.2 --clip-eps-high 0.2", {}),
        },
        flags=MANY,
        flag="--clip-eps-low, -high",
    ),
    claim(
        "gspo-short",
        "The paper's ε is for long completions",
        "On 20 tokens a mean moves more than on 2,000: at ε = 3e-4 the later updates of a batch "
        "lose many tokens to the clip, at .01 hardly any.",
        ACCURACY,
        15,
        25,
        "One epoch, four minibatches: ε = 3e-4 reaches [3e-4], .01 [.01], .2 [.2] at that step "
        "([3e-4 | .01]).",
        {
            "3e-4": ("gspo", "--clip-eps-low 3e-4 --clip-eps-high 4e-4", {}),
            ".01": ("gspo", "", {}),
            ".2": ("gspo", "--clip-eps-low 0.2 --clip-eps-high 0.2", {}),
        },
        flag="--clip-eps-low, -high",
        beside=["policy/clip_frac"],
    ),
    claim(
        "lambda",
        "GAE's λ: trust the critic, or what was seen",
        "λ = 0 is the TD residual, λ = 1 is G − V. A critic that is wrong rules at λ = 0.",
        ACCURACY,
        30,
        30,
        "PPO with λ = 0 reaches [0], with .95 [.95], with 1 [1] ([0 | 1]). At λ = 0 the critic is "
        "fitted to its own next guess, so the score at the end reaches the tokens before it one by "
        "one, and until then the policy is taught noise.",
        {
            "0": ("ppo", "--lam 0", {}),
            ".95": ("ppo", "", {}),
            "1": ("ppo", "--lam 1", {}),
        },
        flag="--lam",
        beside=["critic/explained_variance"],
    ),
    claim(
        "rare",
        "The clip holds back rare tokens",
        "A token whose ratio passes 1 + ε loses its gradient; CISPO's keeps it. Eight epochs. "
        "CISPO weighs all tokens alike, so GRPO is shown with that too.",
        "worked",
        (6, 8),
        20,
        "The share of samples that work a step is [GRPO] under GRPO, [GRPO, token-mean] with its "
        "tokens weighed as CISPO's, and [CISPO] under CISPO ([GRPO, token-mean | CISPO]).",
        {
            "GRPO": ("grpo", "", {}),
            "GRPO, token-mean": ("grpo", "--loss-aggregation token-mean", {}),
            "CISPO": ("cispo", "", {}),
        },
        flags=MANY,
        beside=[ACCURACY],
    ),
    claim(
        "length-bias",
        "A mean over each completion spares the long wrong ones",
        "Divided by its length, a long wrong completion is pushed down less, token by token.",
        "rambling",
        (6, 12),
        12,
        "The share of rambling samples is [sequence-mean] with GRPO's mean, [token-mean] over all "
        "tokens, [constant] over a constant, [Dr. GRPO] without the std as well "
        "([sequence-mean | Dr. GRPO]).",
        {
            "sequence-mean": ("grpo", "", {}),
            "token-mean": ("grpo", "--loss-aggregation token-mean", {}),
            "constant": ("grpo", "--loss-aggregation constant", {}),
            "Dr. GRPO": ("grpo", "--loss-aggregation constant --no-scale-by-std", {}),
        },
        seeds=5,
    ),
    claim(
        "hacking",
        "Reward hacking, and what a KL to the reference does about it",
        "The reward trained on is right + .01 × characters (†); the accuracy is of the true one. "
        "(A first try, with .02 and compared at step 20, ended at .02 to .07 with every β.)",
        ACCURACY,
        30,
        30,
        "β = 0 reaches a true accuracy of [0], β = .05 [.05], β = .3 [.3] ([0 | .3]), while the "
        "proxy rises in all three: forty dots are worth .4, and easier to find than a sum.",
        {
            "0": ("grpo", "--beta 0", LONGER),
            ".05": ("grpo", "--beta 0.05", LONGER),
            ".3": ("grpo", "--beta 0.3", LONGER),
        },
        flag="--beta",
        seeds=5,
        beside=["generation/length", "reward/mean"],
        look=["0", ".3"],
    ),
    claim(
        "temperature",
        "What is never sampled is never learned",
        "The policy gradient is a mean over samples: a rare habit must be drawn to be reinforced.",
        ACCURACY,
        25,
        25,
        "GRPO at temperature .5 reaches [.5], at 1 [1], at 1.5 [1.5] ([.5 | 1]).",
        {
            ".5": ("grpo", "--temperature 0.5", {}),
            "1": ("grpo", "", {}),
            "1.5": ("grpo", "--temperature 1.5", {}),
        },
        flag="--temperature",
    ),
    claim(
        "kl",
        "β holds the policy at the model it began as",
        "J − β KL(π ‖ ref).",
        ACCURACY,
        30,
        30,
        "GRPO with β = .05 reaches [.05], with β = 1 [1] ([.05 | 1]); the KL is beside it.",
        {".05": ("grpo", "--beta 0.05", {}), "1": ("grpo", "--beta 1", {})},
        flag="--beta",
        beside=["kl/mean"],
    ),
    claim(
        "reuse",
        "A batch is worth more than one update",
        "K updates of each batch, with the ratio to the policy that sampled it.",
        ACCURACY,
        20,
        20,
        "GRPO with one update a batch reaches [1 update], with four [4 updates] "
        "([1 update | 4 updates]).",
        {
            "1 update": ("grpo", "--minibatches 1", {}),
            "4 updates": ("grpo", "", {}),
        },
    ),
    claim(
        "engine",
        "An engine that samples from another policy",
        "Old weights, or another temperature than is scored (†). --mismatch-limit stops "
        "such runs; here it and the correction are off.",
        ACCURACY,
        25,
        25,
        "A right engine reaches [right], one that samples at .7 [temperature .7], one that keeps "
        "the first weights [old weights] ([right | old weights]). The default limit, .1 for the "
        "rounding of bfloat16, would have ended the last [stop .1 | old weights] and the second "
        "[stop .1 | temperature .7], for this model's tokens are nearly certain. In float32 a "
        "limit of .001 ends them [stop .001 | old weights] and [stop .001 | temperature .7], and "
        "the right one [stop .001 | right].",
        {
            "right": ("grpo", "", {}),
            "temperature .7": ("grpo", "", COLD),
            "old weights": ("grpo", "", OLD_WEIGHTS),
        },
        flags="--mismatch-limit 1000 --mismatch-cap 0",
        beside=["engine/mismatch"],
    ),
    claim(
        "group-size",
        "128 samples: many prompts or large groups",
        "A group's mean is a better baseline the larger it is, of fewer prompts.",
        ACCURACY,
        20,
        20,
        "Groups of 2 reach [2], of 4 [4], of 8 [8], of 32 [32] ([8 | 2], [8 | 32]).",
        {
            "2": ("grpo", "--prompts-per-step 64 --group-size 2", {}),
            "4": ("grpo", "--prompts-per-step 32 --group-size 4", {}),
            "8": ("grpo", "", {}),
            "32": ("grpo", "--prompts-per-step 4 --group-size 32", {}),
        },
        flag="--group-size",
    ),
    claim(
        "six",
        "The six side by side",
        "The built-in task with each script's own defaults. Seconds are of two runs at a time on a "
        "shared machine, and have the evaluations in them.",
        ACCURACY,
        40,
        40,
        "They end at [reinforce], [rloo], [ppo], [grpo], [gspo] and [cispo], in this order.",
        {name: (name, "", {}) for name in ("reinforce", "rloo", "ppo", "grpo", "gspo", "cispo")},
        seeds=5,
        reach=[0.5, 0.75, 0.9],
        beside=["reward/mean"],
    ),
    claim(
        "small-things",
        "What does not show at this scale",
        "Choices of the lecture that lie within each other's seeds at this step, near the ceiling. "
        "On the way there PPO is some steps behind, with any of its flags.",
        ACCURACY,
        25,
        25,
        "GRPO [GRPO]; without the std [no std]; clip-higher [clip-higher]; RLOO's baseline [RLOO]; "
        "PPO [PPO], without a critic warm-up [no warm-up], with an entropy bonus [entropy bonus].",
        {
            "GRPO": ("grpo", "", {}),
            "no std": ("grpo", "--no-scale-by-std", {}),
            "clip-higher": ("grpo", "--clip-eps-high 0.28", {}),
            "RLOO": ("rloo", "", {}),
            "PPO": ("ppo", "", {}),
            "no warm-up": ("ppo", "--value-warmup-steps 0", {}),
            "entropy bonus": ("ppo", "--entropy-coef 0.01", {}),
        },
    ),
]
