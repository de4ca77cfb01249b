"""Each benchmark runs, at small sizes, and prints what its docstring says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(name, *arguments):
    """What benchmarks/<name>.py prints."""
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_logprobs():
    # Large enough that the logits, 64 MiB, stand out from what a first call loads.
    text = run("logprobs", 2048, 8192, 64)
    naive, ours, ratio = text.splitlines()[-3:]
    gradients = [float(line.split("|g|")[1]) for line in (naive, ours)]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-4)
    assert float(ratio.split()[-1]) < 0.5


def test_update_of_ours():
    text = run("update", "ours", ROOT / "tiny/model", 16, 16)
    assert re.search(r'"seconds": [\d.]+, "mib": [\d.]+, "norm": [\d.]+, "tokens": \d+', text)
