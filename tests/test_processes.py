"""A whole run is the same run on any number of processes and in micro-batches of any size."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from runs import EASY, assert_near, assert_same, attempt, copy, metrics, run, small, weights
from safetensors.torch import load_file

KILL = "if step == 5 and dist.get_rank() == 1: os.kill(os.getpid(), 9)"
KILLED = "        # 4. Update.\n", f"        {KILL}\n"


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def one(request, tmp_path_factory):
    """A run of eight steps on one process: its script, flags and folder."""
    script = copy(tmp_path_factory.mktemp(request.param), request.param, EASY)
    flags = small(request.param, "--beta", 0.05, "--micro-batch-size", 64)
    run(script, *flags, "--output-dir", script.parent / "one")
    return SimpleNamespace(script=script, flags=flags, dir=script.parent / "one")


@pytest.fixture(scope="module")
def two(one):
    """The folder of the same run on two processes."""
    folder = one.script.parent / "two"
    run(one.script, *one.flags, "--output-dir", folder, processes=2)
    return folder


def test_two_and_four_processes(one, two):
    four = one.script.parent / "four"
    run(one.script, *one.flags, "--output-dir", four, processes=4)
    assert_near(two, one.dir)
    assert_near(four, one.dir)


def test_small_micro_batches_and_gradient_checkpointing(one, tmp_path):
    flags = [*one.flags, "--micro-batch-size", 3, "--gradient-checkpointing"]
    run(one.script, *flags, "--output-dir", tmp_path / "run")
    assert_near(tmp_path / "run", one.dir, 1e-5, 1e-5)


@pytest.mark.parametrize("one", ["grpo"], indirect=True)
def test_one_of_two_is_killed_and_the_run_resumed_on_one_or_two(one, two):
    killed = one.script.parent / "killed"
    script = copy(one.script.parent, "grpo", EASY, KILLED)
    flags = [*one.flags, "--save-every", 2, "--output-dir", killed]
    assert attempt(script, *flags, processes=2).returncode != 0
    assert [path.name for path in killed.glob("checkpoints/*")] == ["000004"]
    copy(one.script.parent, "grpo", EASY)
    other = shutil.copytree(killed, one.script.parent / "other")
    run(script, "--resume", killed)
    assert_near(killed, one.dir)
    run(script, "--resume", other, processes=2)
    assert_same(other, two)


def test_bfloat16_and_gradient_checkpointing_on_two_processes(one, tmp_path):
    flags = [*one.flags, "--dtype", "bfloat16", "--steps", 2]
    flags += ["--value-warmup-steps", 0] if one.script.stem == "ppo" else []
    folders = [tmp_path / "one", tmp_path / "two"]
    run(one.script, *flags, "--output-dir", folders[0])
    run(one.script, *flags, "--gradient-checkpointing", "--output-dir", folders[1], processes=2)
    samples = [(folder / "samples.jsonl").open().readline() for folder in folders]
    assert samples[0] == samples[1]  # of step 0: later weights may be rounded to others
    first, other = (metrics(folder)[0] for folder in folders)
    # bfloat16 rounds to 2^-9. In a row, other batches are rounded otherwise in a few layers.
    for key in ("policy/entropy", "policy/grad_norm", "reward/mean"):
        assert other[key] == pytest.approx(first[key], rel=8 * 2**-9)
    before, moved = load_file(TINY / "model" / "model.safetensors"), []
    for model in map(weights, folders):
        assert all(weight.dtype == torch.bfloat16 for weight in model.values())
        parts = [(model[k].float() - before[k].bfloat16().float()).flatten() for k in before]
        moved.append(torch.cat(parts))
    assert moved[0].norm() > 0.01
    assert torch.cosine_similarity(*moved, dim=0) > 0.9


def test_a_machine_holds_one_whole_model_at_a_time(tmp_path):
    note = 'open("turns", "a").write(f"{dist.get_rank()}\\n" + " " * (time.sleep(0.5) or 0))\n'
    first, last = "        model, ref_model = load_model(", "        if args.reward_model:\n"
    loaded = f"gradient_checkpointing)\n{last}", f"gradient_checkpointing)\n        {note}{last}"
    script = copy(tmp_path, "ppo", (first, f"        {note}{first}"), loaded)
    run(script, *small("ppo", "--steps", 1, "--output-dir", tmp_path / "run"), processes=2)
    turns = (tmp_path / "turns").read_text().split()
    assert turns in (["0", "0", "1", "1"], ["1", "1", "0", "0"])
