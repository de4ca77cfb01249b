"""benchmarks/gpu.py, which a machine with a GPU runs whole, at small sizes on what is here."""

import subprocess
import sys
from pathlib import Path

GPU = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu.py"


def test_every_check_passes_at_small_sizes():
    command = [sys.executable, GPU, "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    table = done.stdout.split("| check | expected | found | |")[1]
    for what in ("bfloat16 gradient", "fused AdamW", "FSDP2", "naive", "update of", "ppo.py"):
        assert what in table


def test_a_machine_without_a_gpu_needs_the_flag():
    code = "import sys, torch; sys.exit(torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode == 0:
        done = subprocess.run([sys.executable, GPU], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "--tiny" in done.stderr
