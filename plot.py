"""Draws runs: `python plot.py runs/grpo-1 runs/grpo-2 …` writes curves.png.

The picture of one run goes into its own folder. Of several, those that differ in nothing but their
seed are drawn as their mean, shaded from the lowest to the highest: `python plot.py runs/*`.
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
    "kl/mean": "KL to the first model (nats per token)",
    "policy/clip_frac": "fraction of tokens clipped",
    "critic/explained_variance": "critic's explained variance",
}
# What runs may differ in and still be averaged.
SAME_RUN = {"seed", "output_dir", "resume", "track"}


def read_rows(run_dir):
    """The rows of a run's metrics.jsonl; a last line that was cut off by a kill is left out."""
    rows = []
    for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def read_labels(run_dirs):
    """The script of each run, and its flags that another run of the script has otherwise."""
    saved = [json.loads((Path(run_dir) / "args.json").read_text()) for run_dir in run_dirs]
    runs = [next(iter(each.items())) for each in saved]  # the script and its flags
    labels = []
    for script, args in runs:
        others = [other for name, other in runs if name == script]
        differ = [k for k in args if any(other.get(k) != args[k] for other in others)]
        own = [f"{k}={'off' if args[k] == 1e9 else args[k]}" for k in differ if k not in SAME_RUN]
        labels.append(" ".join([script, *own]))
    return labels


def draw(run_dirs, path):
    """Draws the metrics of `run_dirs` into the PNG at `path`."""
    groups = defaultdict(list)
    for label, run_dir in zip(read_labels(run_dirs), run_dirs, strict=True):
        groups[label].append(read_rows(run_dir))
    rows = [row for runs in groups.values() for run in runs for row in run]
    used = [key for key in PANELS if any(row.get(key) is not None for row in rows)]
    columns = min(3, len(used))
    lines = -(-len(used) // columns)
    size = (4.6 * columns, 3.2 * lines + 0.6)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    colors = {label: f"C{number}" for number, label in enumerate(groups)}  # the same in all panels
    for axis, key in zip(axes.flat, used, strict=False):
        for label, runs in groups.items():
            points = defaultdict(list)
            for row in (row for run in runs for row in run):
                if row.get(key) is not None:
                    points[row["step"]].append(row[key])
            steps = sorted(points)
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
    handles, labels = axes.flat[0].get_legend_handles_labels()
    place = {"loc": "lower center", "ncols": min(4, len(labels)), "frameon": False}
    figure.legend(handles, labels, fontsize=9, **place)  # below the panels, over no curve
    if len(run_dirs) > 1:
        figure.suptitle(f"{len(run_dirs)} runs")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, each with a metrics.jsonl")
    parser.add_argument("--output", type=Path, help="PNG (one run: in its folder; several: here)")
    args = parser.parse_args()
    names = ("metrics.jsonl", "args.json")
    runs = [run for run in args.runs if all((run / name).exists() for name in names)]
    for run in set(args.runs) - set(runs):
        print(f"left out, for it is not the folder of a run: {run}", file=sys.stderr)
    if not any(read_rows(run) for run in runs):
        sys.exit(f"error: no metrics in {', '.join(map(str, args.runs))}: give folders under runs/")
    path = args.output or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
    draw(runs, path)
    print(f"curves: {path}")


if __name__ == "__main__":
    main()
