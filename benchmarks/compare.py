"""All six on the built-in task: same samples a step, same steps, several seeds, one table.

    python benchmarks/compare.py [--seeds 3] [--steps 30] [--output results/compare]

Writes <output>.md (the table), <output>.png (made by plot.py), and the metrics of each run,
without times, to <output>/<script>-<seed>.jsonl.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"]


def run(script, seed, steps, folder):
    """Runs a script; returns its rows of metrics and the peak memory of its process in MiB."""
    run_dir = folder / f"{script}-{seed}"
    command = [sys.executable, ROOT / f"{script}.py", "--seed", seed, "--steps", steps]
    command += ["--eval-every", 1, "--rollout-engine", "transformers", "--output-dir", run_dir]
    # KL to the initial model in the reward or loss, too light to matter, so that it is measured.
    command += ["--beta", 1e-6]
    child = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)  # the memory of this child alone
    if status:
        sys.exit(f"{' '.join(map(str, command))} failed")
    peak = usage.ru_maxrss / 1024
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines], peak, run_dir


def summary(rows, steps):
    """One run's numbers: accuracy before and after, steps, samples and seconds to 90 %, the end."""
    reached = [row["step"] for row in rows if row["eval/accuracy"] >= 0.9]
    first = reached[0] if reached else None
    seconds = sum(row["time/step"] for row in rows[1:] if first and row["step"] <= first)
    entropy = [row["policy/entropy"] for row in rows[1:] if row["policy/entropy"] is not None]
    return {
        "accuracy before": rows[0]["eval/accuracy"],
        "after": rows[-1]["eval/accuracy"],
        "steps to 90 %": first,
        "samples to 90 %": first and first * 256,
        "seconds to 90 %": seconds if first else None,
        "seconds a step": sum(row["time/step"] for row in rows[1:]) / steps,
        "entropy at the end": entropy[-1],
        "KL at the end": rows[-1]["kl/mean"],
    }


def spread(values, digits):
    """`mean (lowest to highest)` of values, or that some run did not get there."""
    if None in values:
        return "not in all runs"
    low, high, mean = min(values), max(values), sum(values) / len(values)
    return f"{mean:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each script")
    parser.add_argument("--steps", type=int, default=30, help="steps of 256 samples")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "compare", help="prefix")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    digits = {"seconds to 90 %": 1, "seconds a step": 2, "samples to 90 %": 0, "steps to 90 %": 1}
    table, runs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS:
            numbers = []
            for seed in range(args.seeds):
                rows, peak, run_dir = run(script, seed, args.steps, Path(folder))
                numbers.append(summary(rows, args.steps))
                runs.append(run_dir)
                kept = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
                text = "".join(json.dumps(row) + "\n" for row in kept)
                text = re.sub(r"(\.\d{6})\d+", r"\1", text)  # small files
                (args.output / f"{script}-{seed}.jsonl").write_text(text, encoding="utf-8")
                print(script, seed, numbers[-1], flush=True)
            names = list(numbers[0])
            cells = [spread([n[name] for n in numbers], digits.get(name, 3)) for name in names]
            table.append(f"| `{script}.py` | " + " | ".join(cells) + f" | {peak:.0f} |")
        plot = [sys.executable, ROOT / "plot.py", *runs, "--output", f"{args.output}.png"]
        subprocess.run(plot, check=True)
    header = (
        "| | " + " | ".join(names) + " | peak memory, MiB |\n" + "|---" * (len(names) + 2) + "|"
    )
    when = time.strftime("%Y-%m-%d")
    text = (
        f"{args.seeds} seeds, {args.steps} steps of 256 samples: mean (lowest–highest). {when}.\n"
    )
    text += "\n" + header + "\n" + "\n".join(table) + "\n"
    args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
