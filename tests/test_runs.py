"""What a whole run does, in all six scripts: it learns, and it is the same run in halves."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import SCRIPTS, TINY, read_jsonl
from runs import DRAWN, EASY, RATES, assert_same, copy, metrics, run, small, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

# What has a state of its own, which a resumed run must have kept.
OWN = {"reinforce": ["--baseline", "moving-average", "--beta", 0.01]}
OWN |= {"ppo": ["--objective", "kl-penalty", "--kl-target", 1e-4, "--beta", 0.01]}


@pytest.fixture(scope="module", params=SCRIPTS)
def whole(request, tmp_path_factory):
    """A run of eight steps: script, name, folder, flags and screen."""
    name = request.param
    script = copy(tmp_path_factory.mktemp(name), name, EASY, DRAWN, RATES)
    flags, folder = small(name, *OWN.get(name, [])), script.parent / "whole"
    screen = run(script, *flags, "--output-dir", folder)
    return SimpleNamespace(script=script, name=name, dir=folder, flags=flags, screen=screen)


def shown(screen, word):
    """What the lines of a screen that begin with a word have behind it."""
    return [line.split()[1:] for line in screen.splitlines() if line.startswith(word)]


def test_held_out_accuracy_rises(whole):
    rows = metrics(whole.dir)
    assert rows[-1]["eval/accuracy"] >= rows[0]["eval/accuracy"] + 0.3


def test_four_steps_and_four_more_are_eight(whole):
    folder = whole.script.parent / "halves"
    run(whole.script, *whole.flags, "--steps", 4, "--output-dir", folder)
    run(whole.script, "--resume", folder, "--steps", 8)
    assert_same(folder, whole.dir)


def test_line_n_is_step_n(whole):
    rows, samples = metrics(whole.dir), read_jsonl(whole.dir / "samples.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in samples] == list(range(9))
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 8]
    always = {"reward/mean", "reward/std", "reward/uniform_groups", "policy/entropy"}
    always |= {"engine/mismatch", "generation/length", "generation/truncated"}
    trained = {"loss/policy", "policy/grad_norm"}
    trained |= set() if whole.name in ("reinforce", "rloo") else {"policy/clip_frac"}
    assert all(always <= row.keys() for row in rows)
    assert all(trained <= row.keys() for row in rows[:-1]) and not trained & rows[-1].keys()
    assert all(("kl/mean" in row) == ("--beta" in whole.flags) for row in rows)
    for row, group in zip(rows, samples, strict=True):
        assert row["engine/mismatch"] < 1e-5  # float32 on both sides
        assert group.keys() == {"step", "prompt", "answer", "completions", "rewards"}
        right = [float(text.endswith(tuple("02468"))) for text in group["completions"]]
        assert group["rewards"] == right and len(right) == 4


def test_the_folder_of_a_run(whole):
    names = {"args.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "model"}
    assert {path.name for path in whole.dir.iterdir()} == names  # plot.py was not copied
    assert [path.name for path in whole.dir.glob("checkpoints/*")] == ["000008"]
    args = json.loads((whole.dir / "args.json").read_text())[whole.name]
    assert args["steps"] == 8 and args["output_dir"] == str(whole.dir)


def test_each_problem_is_drawn_once_in_each_pass(whole):
    drawn = sum(shown(whole.screen, "drawn"), [])
    everything = {row["question"] for row in read_jsonl(TINY / "train.jsonl")[:8]}
    passes = [drawn[start : start + 8] for start in range(0, 32, 8)]
    assert len(drawn) == 36 and all(set(each) == everything for each in passes)
    assert len(set(map(tuple, passes))) == 4  # in another order each time


def test_the_learning_rate_rises_from_0(whole):
    rates = [float(rate) for (rate,) in shown(whole.screen, "rate")]
    minibatches = 2 if "--minibatches" in whole.flags else 1
    if whole.name == "ppo":  # the critic alone in the first three steps, then both
        assert len(rates) == 3 * 2 + 5 * 4
        assert rates[:6] == pytest.approx([1e-3 / 3] * 2 + [2e-3 / 3] * 2 + [1e-3] * 2)
        assert rates[6:] == pytest.approx([3e-4, 1e-3] * 10)
    else:
        steps = [1e-4, 2e-4, *[3e-4] * 6]
        assert rates == pytest.approx([rate for rate in steps for _ in range(minibatches)])


@pytest.mark.parametrize("whole", ["grpo", "ppo"], indirect=True)
def test_observing_changes_nothing(whole):
    folder = whole.script.parent / "observed"
    run(whole.script, *whole.flags, "--eval-every", 1, "--save-every", 1, "--output-dir", folder)
    rows = metrics(folder)
    assert all("eval/accuracy" in row for row in rows)
    for row in rows[1:-1]:
        del row["eval/accuracy"]
    assert rows == metrics(whole.dir)
    for name in ("samples.jsonl", "model/model.safetensors"):
        assert (folder / name).read_bytes() == (whole.dir / name).read_bytes()


@pytest.mark.parametrize("whole", ["grpo"], indirect=True)
def test_another_seed_draws_and_samples_otherwise(whole):
    folder, texts = whole.script.parent, []
    screen = run(whole.script, *whole.flags, "--seed", 1, "--steps", 1, "--output-dir", "other")
    assert shown(screen, "drawn")[0] != shown(whole.screen, "drawn")[0]
    flags = [*whole.flags, "--split", "train[:1]", "--learning-rate", 0, "--steps", 1]
    for seed in (1, 2):  # one problem and one policy: only the samples can differ
        run(whole.script, *flags, "--seed", seed, "--output-dir", f"seed-{seed}")
        texts += [row["completions"] for row in read_jsonl(folder / f"seed-{seed}/samples.jsonl")]
    assert len(set(map(tuple, texts))) == 4  # in each step, and for each seed


@pytest.mark.parametrize("whole", ["grpo", "ppo"], indirect=True)
def test_the_saved_model_is_the_trained_one(whole):
    first = AutoModelForCausalLM.from_pretrained(TINY / "model").state_dict()
    assert any(
        (weight - first[name]).abs().max() > 1e-4 for name, weight in weights(whole.dir).items()
    )
    model = AutoModelForCausalLM.from_pretrained(whole.dir / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(whole.dir / "model")
    right = []
    for row in read_jsonl(TINY / "heldout.jsonl")[:16]:
        chat = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        ids = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
        right.append(tokenizer.decode(ids, True).endswith(tuple("02468")))
    assert sum(right) / 16 == metrics(whole.dir)[-1]["eval/accuracy"]
