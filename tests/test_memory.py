"""The memory table: the simulation against a real update of a small model, and its smallest row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
COMMON = """
import json, sys
folder, kind, checkpointing, rows, length, sizes = json.loads(sys.argv[1])
sys.path.insert(0, folder)
import torch, memory
kind = getattr(torch, kind)
def peak(sizes, rows, length):
    config = memory.shape(memory.Qwen2Config, *sizes)
    with memory.Storages() as storages:
        model = memory.AutoModelForCausalLM.from_config(config)
        device = torch.device("cpu")
        return memory.learn(model, device, kind, checkpointing, rows, length, storages)[1]
"""
REAL = """
group = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
torch.distributed.init_process_group("gloo", **group)
print(peak(sizes, rows, length))
"""
SIMULATED = """
config = memory.shape(memory.Qwen2Config, *sizes)
print(memory.simulate(config, 1, checkpointing, rows, length, kind)[1])
"""


def python(code, *settings):
    """The numbers that code prints in a process of its own, where nothing else takes memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", COMMON + code, json.dumps([str(BENCHMARKS), *settings])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return list(map(int, done.stdout.splitlines()[-1].split()))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_simulation_is_what_a_real_update_creates(checkpointing):
    settings = "float32", checkpointing, 4, 256, [256, 1024, 4, 4, 2, 8192]
    (counted,) = python(REAL, *settings)
    (simulated,) = python(SIMULATED, *settings)
    assert counted == pytest.approx(simulated, rel=0.01)


def test_simulation_is_what_a_sharded_update_in_bfloat16_creates():
    settings = "bfloat16", False, 2, 128, [128, 512, 2, 2, 1, 4096]
    (counted,) = python(REAL, *settings)
    (simulated,) = python(SIMULATED, *settings)
    assert counted == pytest.approx(simulated, rel=0.01)


def test_smallest_row():
    command = [sys.executable, BENCHMARKS / "memory.py", "Qwen2.5-0.5B", "8"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 3
    *_, name, parameters, gpus, update, checkpointed, kept, sampling, _ = lines[-1].split("|")
    assert (name.strip(), parameters.strip(), gpus.strip()) == ("Qwen2.5-0.5B", "0.49 B", "8")
    update, checkpointed, kept, sampling = map(float, (update, checkpointed, kept, sampling))
    assert kept == pytest.approx(12 * 494e6 / 8 / 2**30, abs=0.06)
    assert sampling == pytest.approx(kept + 2 * 494e6 / 2**30, abs=0.06)
    assert kept < checkpointed < update < 16
