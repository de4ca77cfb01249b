"""Whole runs of a script, or of a copy with lines changed, in processes that are forked from one
that has imported what the scripts import: that alone takes ten times as long as a small run. Each
then runs the file as `python` or torchrun does: a kill, an exit status and a screen are real.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, read_jsonl
from safetensors.torch import load_file

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["grpo", "ppo", "transformers.models.llama.modeling_llama"])
# Even numbers are good: about half of the first samples are, so that each update has a gradient.
EASY = (
    "return float(math_verify.verify(read_answer(answer), read(ending)))",
    'return float(completion.endswith(tuple("02468")))',
)
# Four problems of eight, four completions each, in two minibatches where the script has them.
SMALL = "--split train[:8] --eval-split train[:16] --steps 8 --prompts-per-step 4 --group-size 4"
SMALL += " --max-completion-tokens 24 --learning-rate 3e-4 --rollout-engine transformers"
SMALL += " --dtype float32 --eval-every 50 --save-every 50"


def small(name, *flags):
    """The flags of a small run of a script."""
    own = [] if name in ("reinforce", "rloo") else ["--minibatches", 2]
    return [*SMALL.split(), *own, *flags]


def copy(folder, name, *edits):
    """A script in its own folder, beside common.py and tiny/, with (old, new) texts changed."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "common.py", folder)
    if not (folder / "tiny").exists():
        (folder / "tiny").symlink_to(TINY)
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder / f"{name}.py"


def _run(script, flags, environment, screen):
    """What a forked process does: it becomes `python script flags`."""
    for number, path in enumerate(screen, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.argv = [str(script), *flags]
    first = [str(script.parent), *filter(None, [environment.get("PYTHONPATH")])]
    sys.path[:] = first + [p for p in sys.path if Path(p) not in (ROOT, ROOT / "tests")]
    for name in ("common", "grpo", "ppo"):
        sys.modules.pop(name, None)  # what lies beside the script counts
    runpy.run_path(str(script), run_name="__main__")


def start(script, *flags, processes=1, env=()):
    """The processes of a run, started; their screens go to files beside the script."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        forkserver.ensure_running()
    started = []
    for rank in range(processes):
        environment = {"HF_HUB_OFFLINE": "1", **dict(env)}
        if processes > 1:  # what torchrun sets
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(processes)}
        screen = [script.parent / f"{script.stem}-{name}-{rank}" for name in ("out", "err")]
        inputs = script, [str(flag) for flag in flags], environment, screen
        started.append(SERVER.Process(target=_run, args=inputs, daemon=True))
        started[-1].start()
    return started


def finish(script, started, timeout=200):
    """The CompletedProcess of a run with the first process's screen, when all have ended."""
    for process in started:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
    screen = [(script.parent / f"{script.stem}-{name}-0").read_text() for name in ("out", "err")]
    codes = [process.exitcode for process in started]
    return subprocess.CompletedProcess(script, max(codes, key=abs), *screen)


def attempt(script, *flags, **options):
    """The CompletedProcess of a run."""
    return finish(script, start(script, *flags, **options))


def run(script, *flags, **options):
    """The screen of a run that must end well."""
    done = attempt(script, *flags, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(run_dir):
    """The rows of a run's metrics, without what may differ between a run and its repetition."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [{k: row[k] for k in row if not k.startswith(("time/", "throughput/"))} for row in rows]


def weights(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


def assert_same(first, second):
    """Two runs left the same, to the bit."""
    assert metrics(first) == metrics(second)
    for name in ("samples.jsonl", "model/model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def assert_near(first, second, in_metrics=1e-4, in_weights=1e-5):
    """Two runs left the same samples, and the same numbers but for float32's rounding."""
    assert (first / "samples.jsonl").read_bytes() == (second / "samples.jsonl").read_bytes()
    for row, other in zip(metrics(first), metrics(second), strict=True):
        assert row == pytest.approx(other, rel=0, abs=in_metrics)
    torch.testing.assert_close(weights(first), weights(second), rtol=0, atol=in_weights)
