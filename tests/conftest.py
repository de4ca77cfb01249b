"""What several test files use: the tiny model, and scripts run as their users run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the scripts do; threads of two workers

import torch

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tiny"


def run_script(name, *flags, cwd=None, processes=0, timeout=300, env=None):
    """The CompletedProcess of `python name.py flags`, or torchrun's with so many processes."""
    command = [sys.executable]
    if processes:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        command += [
            "--master-port",
            "0",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
    command += [f"{name}.py" if cwd else str(ROOT / f"{name}.py"), *map(str, flags)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )


def read_jsonl(path):
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]]


def without_times(rows):
    """Rows of metrics without the two groups that may differ between a run and its repetition."""
    return [
        {key: row[key] for key in row if not key.startswith(("time/", "throughput/"))}
        for row in rows
    ]


@pytest.fixture
def tiny_model():
    """A fresh copy of the built-in model, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32)


@pytest.fixture
def tokenizer():
    """The built-in model's tokenizer."""
    import common

    return common.load_tokenizer(TINY / "model")
