"""Kills a run with SIGKILL at random moments, resumes it each time, and compares its weights with
those of the same run that nobody killed: python tests/kill_many.py --kills 20
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "--rollout-engine transformers --prompts-per-step 2 --eval-problems 8 --save-every 1"


def start(script, *flags):
    """The process of a command, its output in a pipe."""
    command = [sys.executable, str(ROOT / f"{script}.py"), *map(str, flags)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process):
    """Waits for a process; raises RuntimeError with its output where it failed."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}:\n{output}")


def kill_at_random(process, run_dir, chance):
    """Kills a process while it starts, in a step, or while it saves; False where it had ended."""
    rows = run_dir / "metrics.jsonl"
    where = chance.choice(["start", "step", "save", "save"])
    before = rows.read_bytes().count(b"\n") if rows.exists() else 1
    steps, delay = chance.randint(1, 3), chance.uniform(0, 0.3)
    if where == "start":
        delay = chance.uniform(0.5, 6)
    while where != "start" and process.poll() is None:
        begun = rows.read_bytes().count(b"\n") if rows.exists() else 0
        # A resumed run may have to cut the row of its unfinished step first.
        if begun >= before + steps:
            break
        time.sleep(0.002)
    while where == "save" and process.poll() is None:
        if (run_dir / "checkpoints" / "incomplete").exists():
            delay = chance.uniform(0, 0.02)
            break
        time.sleep(0.0005)
    try:
        process.wait(delay)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True


def kill_many(folder, kills, seed=0, script="grpo"):
    """(folder of a run killed and resumed `kills` times, folder of the same run left alone).

    Raises RuntimeError where a resume fails, or the run ended before it was killed that often.
    """
    chance = random.Random(seed)
    flags = [*FLAGS.split(), "--steps", 6 * kills + 2]
    killed, alone = Path(folder) / "killed", Path(folder) / "alone"
    other = start(script, *flags, "--output-dir", alone)  # meanwhile, on another core
    for number in range(kills):
        process = start(script, *resume_flags(killed, flags))
        if not kill_at_random(process, killed, chance):
            output, _ = process.communicate()
            raise RuntimeError(f"ended before kill {number + 1} of {kills}:\n{output}")
        saved = sorted(path.name for path in (killed / "checkpoints").glob("*"))
        print(f"kill {number + 1}: it had {', '.join(saved) or 'no checkpoint'}", flush=True)
    finish(start(script, *resume_flags(killed, flags)))
    finish(other)
    return killed, alone


def resume_flags(run_dir, flags):
    """Flags that go on with a run, or begin it again where it was killed before a checkpoint."""
    if any((run_dir / "checkpoints").glob("step-*")):
        return ["--resume", run_dir]
    if run_dir.exists():
        run_dir.rename(run_dir.with_name(f"{run_dir.name}-{time.monotonic_ns()}"))
    return [*flags, "--output-dir", run_dir]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--script", default="grpo")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = kill_many(folder, options.kills, options.seed, options.script)
        weights = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
    if weights[0] != weights[1]:
        sys.exit("the weights differ from those of the run that was not killed")
    print(f"{options.kills} kills: the weights are those of the run that was not killed")
