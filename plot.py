"""Draws runs: `python plot.py runs/grpo-1 runs/grpo-2 …` writes curves.png.

The picture of one run goes into its own folder. Of several, those of one script are drawn as their
mean, shaded from the lowest to the highest: `python plot.py runs/*` compares scripts over seeds.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)

PANELS = {
    "reward/mean": "mean reward of the samples",
    "eval/accuracy": "held-out accuracy (greedy)",
    "policy/entropy": "entropy (nats per token)",
    "generation/length": "completion length (tokens)",
    "kl/mean": "KL to the reference (nats per token)",
    "policy/clip_frac": "fraction of tokens clipped",
    "critic/explained_variance": "critic's explained variance",
}


def read_rows(run_dir):
    """The rows of a run's metrics.jsonl; a last line that was cut off by a kill is left out."""
    rows = []
    for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def read_label(run_dir):
    """The name of the script that made a run."""
    return json.loads((Path(run_dir) / "args.json").read_text())["script"]


def draw(run_dirs, path):
    """Draws the metrics of `run_dirs` into the PNG at `path`."""
    groups = defaultdict(list)
    for run_dir in run_dirs:
        groups[read_label(run_dir)].append(read_rows(run_dir))
    used = [
        key
        for key in PANELS
        if any(row.get(key) is not None for runs in groups.values() for r in runs for row in r)
    ]
    columns = min(3, len(used))
    lines = -(-len(used) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.2 * lines), squeeze=False)
    colors = {label: f"C{number}" for number, label in enumerate(groups)}  # the same in all panels
    for axis, key in zip(axes.flat, used, strict=False):
        for label, runs in groups.items():
            points = defaultdict(list)
            for row in (row for run in runs for row in run):
                if row.get(key) is not None:
                    points[row["step"]].append(row[key])
            steps = sorted(points)
            if not steps:
                continue
            mean = [sum(points[s]) / len(points[s]) for s in steps]
            name = f"{label} ({len(runs)} runs)" if len(runs) > 1 else label
            marker = "o" if key == "eval/accuracy" else ""
            axis.plot(steps, mean, label=name, color=colors[label], marker=marker, markersize=3)
            if len(runs) > 1:
                low, high = [min(points[s]) for s in steps], [max(points[s]) for s in steps]
                axis.fill_between(steps, low, high, color=colors[label], alpha=0.15, linewidth=0)
        axis.set(title=PANELS[key], xlabel="step")
        axis.grid(alpha=0.3)
        if key in ("reward/mean", "eval/accuracy") and axis.get_ylim()[1] <= 1.1:
            axis.set_ylim(-0.02, 1.02)
        if key == "critic/explained_variance":
            axis.set_ylim(max(-1.0, axis.get_ylim()[0]), 1.02)
    for axis in axes.flat[len(used) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, each with a metrics.jsonl")
    parser.add_argument(
        "--output", type=Path, help="the PNG to write (one run: in its folder; several: here)"
    )
    args = parser.parse_args()
    runs = [
        run
        for run in args.runs
        if (run / "metrics.jsonl").exists() and (run / "args.json").exists()
    ]
    if not any(read_rows(run) for run in runs):
        sys.exit(f"error: no metrics in {', '.join(map(str, args.runs))}: give folders under runs/")
    path = args.output or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
    draw(runs, path)
    print(path)


if __name__ == "__main__":
    main()
