"""A run that was stopped, killed or refused by the disk, and resumed, is the run never stopped."""

import importlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, read_jsonl, without_times
from kill_many import kill_many
from torch.distributed.checkpoint.api import CheckpointException

import common

SCRIPTS = ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"]
RATE = 3e-4


class Killed(BaseException):
    """Ends a run in this process where a kill would have: no `except` of the project sees it."""


@pytest.fixture(autouse=True)
def handlers():
    """Gives pytest its signal handlers back, and the files their size."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def uncaught(*inputs):  # by the run: the test fails, and the tests go on
        raise Killed

    for number in kept:
        signal.signal(number, uncaught)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for number, handler in kept.items():
        signal.signal(number, handler)


def parse(name, *flags):
    """(the script's module, its Args from these flags)."""
    module = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        return module, common.parse_args(module.Args, module.TINY, module.__doc__)


def run(name, *flags):
    """`python name.py flags`, in this process: no seconds of imports. Without the curves."""
    module, args = parse(name, *flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "__file__", str(ROOT / "no-plot-here" / "common.py"))
        module.main(args)


def small(name):
    """Flags of a run of a tenth of a second a step, with a warm-up of 5 steps and a reference."""
    given = {
        "rollout_engine": "transformers",
        "steps": 6,
        "prompts_per_step": 4,
        "group_size": 4,
        "eval_problems": 8,
        "eval_every": 3,
        "save_every": 1,
        "learning_rate": RATE,
        "warmup_steps": 5,
        "beta": 0.05,
    }
    known = {field.name for field in fields(importlib.import_module(name).Args)}
    given = {flag: value for flag, value in given.items() if flag in known}
    return [part for k, v in given.items() for part in (f"--{k.replace('_', '-')}", v)]


def weights(run_dir):
    return (run_dir / "model" / "model.safetensors").read_bytes()


def saved_steps(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def assert_same(run_dir, whole):
    """Everything a run leaves, but for its times, to the bit."""
    rows = [without_times(read_jsonl(path / "metrics.jsonl")) for path in (run_dir, whole)]
    assert [row["step"] for row in rows[0]] == [0, 1, 2, 3, 4, 5, 6]
    assert rows[0] == rows[1]
    samples = [(path / "samples.jsonl").read_bytes() for path in (run_dir, whole)]
    assert samples[0] == samples[1]
    assert weights(run_dir) == weights(whole)


@pytest.fixture(scope="module", params=SCRIPTS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def whole(name, tmp_path_factory):
    """The folder of six steps at once."""
    path = tmp_path_factory.mktemp(name) / "whole"
    run(name, *small(name), "--output-dir", path)
    return path


@pytest.fixture(scope="module")
def halves(name, tmp_path_factory):
    """The folder of three steps, resumed, and three more."""
    path = tmp_path_factory.mktemp(name) / "halves"
    run(name, *small(name), "--steps", 3, "--output-dir", path)
    run(name, "--resume", path, "--steps", 6)
    return path


def in_step(patch, name, step, action):
    """Makes `action` happen while the second completion of a step is scored."""
    module = importlib.import_module(name)
    original, steps = module.reward, {"now": 0, "scored": 0}
    problems_of_step = common.problems_of_step

    def chosen(train, number, *rest):
        steps.update(now=number, scored=0)
        return problems_of_step(train, number, *rest)

    def reward(*inputs):
        steps["scored"] += 1
        if steps["now"] == step and steps["scored"] == 2:
            action()
        return original(*inputs)

    patch.setattr(common, "problems_of_step", chosen)
    patch.setattr(module, "reward", reward)


# ------------------------------------------- Resume --------------------------------------------
def test_three_steps_and_three_more_are_six(whole, halves):
    assert_same(halves, whole)


def test_warm_up_goes_on(tmp_path, monkeypatch):
    rates, step = [], torch.optim.AdamW.step

    def spy(optimizer, closure=None):
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    flags = [*small("grpo"), "--minibatches", 1, "--steps", 3]
    run("grpo", *flags, "--output-dir", tmp_path / "run")
    run("grpo", "--resume", tmp_path / "run", "--steps", 6)
    # A checkpoint is loaded into what a step with rate 0 makes.
    assert [rate for rate in rates if rate] == [RATE * min(1, step / 5) for step in range(1, 7)]


def test_reference_is_the_model_the_run_began_with(whole, halves):
    # Were it the model of the resume, the KL would begin again at 0.
    kept, alone = [
        # PPO's policy waits for its critic in the first three steps, and its KL is 0 in the fourth.
        [row["kl/mean"] for row in read_jsonl(path / "metrics.jsonl")[5:]]
        for path in (halves, whole)
    ]
    assert kept == alone
    assert all(abs(kl) > 1e-4 for kl in kept)  # measured: 0.02 to 0.14


def test_only_the_last_two_checkpoints_are_kept(halves):
    assert saved_steps(halves) == ["step-000005", "step-000006"]


def test_flags_that_may_change(name, tmp_path):
    path = tmp_path / "run"
    run(name, *small(name), "--steps", 2, "--output-dir", path)
    changed = ["--eval-every", 1, "--tokens-per-micro-batch", 200]
    run(name, "--resume", path, "--steps", 4, *changed)
    rows = read_jsonl(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert "eval/accuracy" in rows[3]  # step 3 of --eval-every 1


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--learning-rate", 1e-5),
        ("--seed", 3),
        ("--temperature", 0.5),
        ("--prompts-per-step", 8),
        ("--dataset", TINY / "heldout.jsonl"),
        ("--beta", 0),
        ("--warmup-steps", 6),
        ("--max-completion-tokens", 16),
    ],
)
def test_flags_that_may_not_change(name, halves, flag, value):
    with pytest.raises(SystemExit) as stopped:
        parse(name, "--resume", halves, "--steps", 7, flag, value)
    message = str(stopped.value)
    assert flag in message and str(value) in message and "\n" not in message


def test_resume_of_another_script_is_refused(name, halves, tmp_path):
    other = tmp_path / "run"
    other.mkdir()
    saved = (halves / "args.json").read_text()
    (other / "args.json").write_text(saved.replace(f'"script": "{name}"', '"script": "other"'))
    with pytest.raises(SystemExit, match=f"not a run of {name}.py"):
        parse(name, "--resume", other)


def test_a_finished_run_says_so(name, halves):
    before = weights(halves)
    with pytest.raises(SystemExit, match="has done all of its 6 steps"):
        run(name, "--resume", halves)
    saved = (halves / "args.json").read_text()
    with pytest.raises(SystemExit, match="has done all of its 6 steps"):
        run(name, "--resume", halves, "--steps", 5)
    assert weights(halves) == before and (halves / "args.json").read_text() == saved


def test_no_checkpoint_is_an_error(name, halves, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(halves / "args.json", tmp_path)
    with pytest.raises(SystemExit, match="has no checkpoint"):
        run(name, "--resume", tmp_path)


def test_no_run_is_an_error(name, tmp_path):
    with pytest.raises(SystemExit, match="^error: --resume .*nowhere is not the folder of a run"):
        parse(name, "--resume", tmp_path / "nowhere")


def test_killed_after_the_last_checkpoint(name, whole, tmp_path, monkeypatch):
    # All steps are done, the model is not saved yet: a resume must end in a model all the same.
    path = tmp_path / "run"

    def kill(*inputs, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(common, "save_model", kill)
        with pytest.raises(Killed):
            run(name, *small(name), "--output-dir", path)
    run(name, "--resume", path)
    assert_same(path, whole)


# ------------------------------------------- Signals -------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step(name, whole, number, tmp_path, monkeypatch, capsys):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        in_step(patch, name, 2, lambda: os.kill(os.getpid(), number))
        with pytest.raises(SystemExit) as stopped:
            run(name, *small(name), "--save-every", 50, "--output-dir", path)
    assert stopped.value.code in (130, 128 + number)
    assert f"--resume {path}" in capsys.readouterr().out
    assert saved_steps(path) == ["step-000002"]
    assert read_jsonl(path / "metrics.jsonl")[-1]["step"] == 2
    assert not (path / "model").exists()
    run(name, "--resume", path)
    assert_same(path, whole)


def test_ctrl_c_and_the_line_it_prints(tmp_path):
    """What a user does: Ctrl-C at any moment, then the printed command."""
    path = tmp_path / "run"
    flags = [*small("grpo"), "--steps", 500, "--eval-every", 500, "--output-dir", path]
    command = [sys.executable, ROOT / "grpo.py", *flags]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.lstrip().startswith("2/500"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 130
    line = re.search(r"python grpo\.py (--resume .*)", rest)[1]
    done = read_jsonl(path / "metrics.jsonl")[-1]["step"]
    assert saved_steps(path)[-1] == f"step-{done:06d}"
    run("grpo", *line.split(), "--steps", done + 1)
    assert [row["step"] for row in read_jsonl(path / "metrics.jsonl")] == list(range(done + 2))


def test_second_ctrl_c_quits_at_once(tmp_path):
    """A step of ten minutes, which a reward that sleeps stands for."""
    text = (ROOT / "grpo.py").read_text(encoding="utf-8")
    slow = "    if completion:\n        print('asleep', flush=True)\n        time.sleep(600)\n"
    target = "    target = common.final_number(answer)\n"
    assert target in text
    (tmp_path / "grpo.py").write_text(text.replace(target, slow + target), encoding="utf-8")
    shutil.copy(ROOT / "common.py", tmp_path)
    (tmp_path / "tiny").symlink_to(TINY)
    # The evaluation before the first step sleeps too, and comes before the signals are caught.
    text = (tmp_path / "grpo.py").read_text(encoding="utf-8")
    evaluation = 'row = {"step": 0, "eval/accuracy": evaluate(*evaluation)}'
    assert evaluation in text
    text = text.replace(evaluation, 'row = {"step": 0, "eval/accuracy": 0.0}')
    (tmp_path / "grpo.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "grpo.py", *map(str, small("grpo")), "--output-dir", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(process, "asleep")
        process.send_signal(signal.SIGINT)
        wait_for(process, "stopping after this step")
        process.send_signal(signal.SIGINT)  # torchrun's copy of the first one: no second wish
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
    assert saved_steps(tmp_path / "run") == []


def wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the run ended without {text!r}")


# --------------------------------------- Kills and disks ---------------------------------------
def test_kills_at_random_moments(tmp_path):
    killed, alone = kill_many(tmp_path, kills=2)
    assert weights(killed) == weights(alone)


def rename_is_never_reached(patch, step):
    rename = os.rename

    def kill(source, target):
        if f"step-{step:06d}" in str(target):
            raise Killed
        rename(source, target)

    patch.setattr(common.os, "rename", kill)


def save_is_cut_off(patch, step):
    save, calls = common.dcp.save, []

    def kill(*inputs, checkpoint_id, **options):
        calls.append(checkpoint_id)
        result = save(*inputs, checkpoint_id=checkpoint_id, **options)
        if len(calls) == step:
            for file in Path(checkpoint_id).iterdir():
                os.truncate(file, file.stat().st_size // 2)
            raise Killed
        return result

    patch.setattr(common.dcp, "save", kill)


@pytest.mark.parametrize("fault", [rename_is_never_reached, save_is_cut_off])
def test_half_a_checkpoint_is_not_read(name, whole, fault, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        fault(patch, 3)
        with pytest.raises(Killed):
            run(name, *small(name), "--output-dir", path)
    assert saved_steps(path) == ["step-000001", "step-000002"]
    run(name, "--resume", path)
    assert_same(path, whole)


def test_half_a_line_is_cut_off(name, whole, tmp_path, monkeypatch):
    # A kill, or a full disk, may leave half a character of what a model wrote.
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        rename_is_never_reached(patch, 3)
        with pytest.raises(Killed):
            run(name, *small(name), "--output-dir", path)
    with open(path / "samples.jsonl", "ab") as file:
        file.write(b'{"step": 3, "prompt": "1+1=?", "completion": "\xe2\x88')
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "reward/m')
    run(name, "--resume", path)
    assert_same(path, whole)


def files_grow_no_more():
    # 100 kB is less than the weights: the disk refuses them, as one that is full does.
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


def files_grow_again():
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def assert_one_line(error):
    assert re.fullmatch(r"error: [^\n]+", str(error.value.code)), error.value.code


def test_full_disk_under_a_checkpoint(name, whole, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        in_step(patch, name, 3, files_grow_no_more)
        with pytest.raises(SystemExit) as stopped:
            run(name, *small(name), "--output-dir", path)
    files_grow_again()
    assert_one_line(stopped)
    assert "step 3" in stopped.value.code
    assert saved_steps(path)[-1] == "step-000002"
    run(name, "--resume", path)
    assert_same(path, whole)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), CheckpointException("disk", {})]
)
def test_errors_of_a_checkpoint_are_one_line(name, error, tmp_path, monkeypatch):
    def refuse(*inputs, **options):
        raise error

    monkeypatch.setattr(common.dcp, "save", refuse)
    with pytest.raises(SystemExit) as stopped:
        run(name, *small(name), "--output-dir", tmp_path / "run")
    assert_one_line(stopped)


def test_full_disk_under_the_model(name, whole, tmp_path, monkeypatch):
    path = tmp_path / "run"
    save_model = common.save_model

    def save(*inputs):
        files_grow_no_more()
        save_model(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(common, "save_model", save)
        with pytest.raises(SystemExit) as stopped:
            run(name, *small(name), "--output-dir", path)
    files_grow_again()
    assert_one_line(stopped)
    assert not (path / "model").exists()
    assert saved_steps(path)[-1] == "step-000006"


def test_full_disk_under_the_rows(name, tmp_path, monkeypatch):
    path = tmp_path / "run"

    def fill():
        (path / "samples.jsonl").unlink()
        (path / "samples.jsonl").symlink_to("/dev/full")

    in_step(monkeypatch, name, 2, fill)
    with pytest.raises(SystemExit) as stopped:
        run(name, *small(name), "--output-dir", path)
    assert_one_line(stopped)
    assert "samples.jsonl" in stopped.value.code
    assert saved_steps(path) == ["step-000001"]


def test_unwritable_folder(name, tmp_path):
    # The tests may run as root, whom no mode stops: a file stands where a folder has to be.
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        run(name, *small(name), "--output-dir", tmp_path / "file" / "run")
    assert_one_line(stopped)
    assert "--output-dir" in stopped.value.code
