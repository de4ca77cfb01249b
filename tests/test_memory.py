"""The memory table: the simulation against a real update of a small model, and its smallest row."""

import json

import pytest
from conftest import ROOT, printed

BENCHMARKS = ROOT / "benchmarks"
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


def number(code, *settings):
    """The number that code prints in a process of its own, where nothing else takes memory."""
    words = "-c", COMMON + code, json.dumps([str(BENCHMARKS), *settings])
    return int(printed(*words, OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536").split()[-1])


@pytest.mark.parametrize(
    "settings",
    [
        ("float32", False, 4, 256, [256, 1024, 4, 4, 2, 8192]),
        ("float32", True, 4, 256, [256, 1024, 4, 4, 2, 8192]),
        ("bfloat16", False, 2, 128, [128, 512, 2, 2, 1, 4096]),  # which is sharded
    ],
)
def test_simulation_is_what_a_real_update_creates(settings):
    assert number(REAL, *settings) == pytest.approx(number(SIMULATED, *settings), rel=0.01)


def test_smallest_row():
    lines = printed(BENCHMARKS / "memory.py", "Qwen2.5-0.5B", 8).splitlines()
    assert len(lines) == 3
    *_, name, parameters, gpus, update, checkpointed, kept, sampling, _ = lines[-1].split("|")
    assert (name.strip(), parameters.strip(), gpus.strip()) == ("Qwen2.5-0.5B", "0.49 B", "8")
    update, checkpointed, kept, sampling = map(float, (update, checkpointed, kept, sampling))
    assert kept == pytest.approx(12 * 494e6 / 8 / 2**30, abs=0.06)
    assert sampling == pytest.approx(kept + 2 * 494e6 / 2**30, abs=0.06)
    assert kept < checkpointed < update < 16
