"""What a whole run does, in all six scripts: it learns, and it is the same run in halves."""

import json
from types import SimpleNamespace

import pytest
from conftest import SCRIPTS
from runs import EASY, assert_same, copy, metrics, run, small

# What has a state of its own, which a resumed run must have kept.
OWN = {"reinforce": ["--baseline", "moving-average", "--beta", 0.01]}
OWN |= {"ppo": ["--objective", "kl-penalty", "--kl-target", 1e-4, "--beta", 0.01]}


@pytest.fixture(scope="module", params=SCRIPTS)
def whole(request, tmp_path_factory):
    """A run of eight steps: script, folder and flags."""
    name = request.param
    script = copy(tmp_path_factory.mktemp(name), name, EASY)
    flags, folder = small(name, *OWN.get(name, [])), script.parent / "whole"
    run(script, *flags, "--output-dir", folder)
    return SimpleNamespace(script=script, dir=folder, flags=flags)


def test_held_out_accuracy_rises(whole):
    rows = metrics(whole.dir)
    assert rows[-1]["eval/accuracy"] >= rows[0]["eval/accuracy"] + 0.3


def test_four_steps_and_four_more_are_eight(whole):
    folder = whole.script.parent / "halves"
    run(whole.script, *whole.flags, "--steps", 4, "--output-dir", folder)
    run(whole.script, "--resume", folder, "--steps", 8)
    assert_same(folder, whole.dir)


def test_the_folder_of_a_run(whole):
    names = {"args.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "model"}
    assert {path.name for path in whole.dir.iterdir()} == names  # plot.py was not copied
    assert [path.name for path in whole.dir.glob("checkpoints/*")] == ["000008"]
    args = json.loads((whole.dir / "args.json").read_text())[whole.script.stem]
    assert args["steps"] == 8 and args["output_dir"] == str(whole.dir)


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
