"""The memory table: the simulation against a real update of a small model, and its smallest row."""

import json

import pytest
from conftest import ROOT, printed

BENCHMARKS = ROOT / "benchmarks"
EACH = """
import json, sys, torch, memory
real, *settings = json.loads(sys.argv[1])
if real:
    group = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **group)
for sizes, dtype, checkpointing in settings:
    config, dtype = memory.shape(memory.Qwen2Config, *sizes), getattr(torch, dtype)
    if not real:
        print(memory.simulate(config, 1, checkpointing, 4, 256, dtype)[1])
        continue
    with memory.Storages() as storages:
        model = memory.AutoModelForCausalLM.from_config(config)
        print(memory.learn(model, torch.device("cpu"), dtype, checkpointing, 4, 256, storages)[1])
"""
SETTINGS = [([256, 1024, 4, 4, 2, 8192], "float32", each) for each in (False, True)]
SETTINGS += [([128, 512, 2, 2, 1, 4096], "bfloat16", False)]  # which is sharded


def test_simulation_is_what_a_real_update_creates():
    programs = [("-c", EACH, json.dumps([real, *SETTINGS])) for real in (True, False)]
    texts = [printed(*program, PYTHONPATH=str(BENCHMARKS)) for program in programs]
    real, simulated = (list(map(int, text.split()[-3:])) for text in texts)
    assert real == pytest.approx(simulated, rel=0.01)


def test_smallest_row():
    lines = printed(BENCHMARKS / "memory.py", "Qwen2.5-0.5B", 8).splitlines()
    assert len(lines) == 3
    *_, name, parameters, gpus, update, checkpointed, kept, sampling, _ = lines[-1].split("|")
    assert (name.strip(), parameters.strip(), gpus.strip()) == ("Qwen2.5-0.5B", "0.49 B", "8")
    update, checkpointed, kept, sampling = map(float, (update, checkpointed, kept, sampling))
    assert kept == pytest.approx(12 * 494e6 / 8 / 2**30, abs=0.06)
    assert sampling == pytest.approx(kept + 2 * 494e6 / 2**30, abs=0.06)
    assert kept < checkpointed < update < 16
