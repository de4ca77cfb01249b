"""Each benchmark runs, at small sizes, and prints what its docstring says."""

import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, printed

BENCHMARKS = ROOT / "benchmarks"


def test_logprobs():
    # Large enough that the logits, 64 MiB, stand out from what a first call loads.
    naive, ours, ratio = printed(BENCHMARKS / "logprobs.py", 2048, 8192, 64).splitlines()[-3:]
    gradients = [float(line.split("|g|")[1]) for line in (naive, ours)]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-4)
    assert float(ratio.split()[-1]) < 0.5


def test_update_of_ours():
    text = printed(BENCHMARKS / "update.py", "ours", TINY / "model", 16, 16)
    assert re.search(r'"seconds": [\d.]+, "mib": [\d.]+, "norm": [\d.]+, "tokens": \d+', text)


def test_every_check_of_a_gpu_passes_at_small_sizes():
    """What a machine with a GPU runs whole."""
    text = printed(BENCHMARKS / "gpu.py", "--tiny")
    assert "FAILED" not in text
    table = text.split("| check | expected | found | |")[1]
    for what in ("bfloat16 gradient", "fused AdamW", "FSDP2", "naive", "update of", "ppo.py"):
        assert what in table
    if not torch.cuda.is_available():  # without the flag it wants one
        command = [sys.executable, BENCHMARKS / "gpu.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "--tiny" in done.stderr
