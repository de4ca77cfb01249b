"""The lecture's claims, each as runs on the built-in task and one picture.

    python benchmarks/lecture.py                   # all of them: about 40 minutes on two cores
    python benchmarks/lecture.py baseline clip     # some
    python benchmarks/lecture.py --draw            # no run: pictures and results/README.md again

Each setting of a claim is run with several seeds, two runs at a time, one thread each; a run that
two claims have in common is made once. A reward or an engine is edited the way a user does it: the
script is copied beside common.py, and a line of the copy is replaced. What is compared, and at
which step, stands in lecture_claims.py, and stood there before the seeds were run. A line of
results/lecture/<claim>.jsonl is a run. Two settings are called apart where the ranges of their
seeds do not touch; nothing more is claimed of so few, but whether each seed, with the same prompts
and random numbers for both, shows the same sign.
"""

import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import variance
from lecture_claims import CLAIMS, RECORD

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
FORK = multiprocessing.get_context("forkserver")  # imports torch once, not in each run
NAMES = {
    "eval/accuracy": "held-out accuracy",
    "critic/explained_variance": "critic's explained variance",
    "generation/length": "completion length (tokens)",
    "reward/mean": "mean reward of the samples",
    "kl/mean": "KL to the first model (nats a token)",
    "policy/entropy": "entropy (nats a token)",
    "policy/clip_frac": "share of tokens clipped",
    "engine/mismatch": "|trainer - engine| (nats a token)",
    "worked": "share of samples with a worked step",
    "rambling": "share of rambling samples",
}


def start(folder, words):
    """What a forked process does: it becomes `python words` in a folder."""
    os.chdir(folder)
    screen = os.open("screen", os.O_WRONLY)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    sys.argv, sys.path = words, [folder, *sys.path]
    for name in ("common", "ppo", "reinforce", "rloo"):
        sys.modules.pop(name, None)  # what lies in the folder counts
    runpy.run_path(words[0], run_name="__main__")


def run(script, flags, edits, seed, steps):
    """One run: {"seed", "rows": metrics by step, "samples": two by step}."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "common.py", folder)
        shutil.copytree(ROOT / "tiny", Path(folder, "tiny"))
        text = (ROOT / f"{script}.py").read_text(encoding="utf-8")
        for old, new in (*RECORD.items(), *edits):
            if text.count(old) != 1:
                raise ValueError(f"{script}.py has this line {text.count(old)} times: {old}")
            text = text.replace(old, new)
        Path(folder, f"{script}.py").write_text(text, encoding="utf-8")
        words = [f"{script}.py", "--rollout-engine", "transformers", "--output-dir", "run"]
        words += [*f"--seed {seed} --steps {steps} --save-every 1000".split(), *flags]
        screen = Path(folder, "screen")
        screen.touch()
        process = FORK.Process(target=start, args=(folder, words))
        process.start()
        process.join()
        if not Path(folder, "run", "model").exists():  # is written last; an exit status may be
            raise RuntimeError(f"{' '.join(words)}\n{screen.read_text()}")  # another thread's
        rows = [json.loads(line) for line in open(Path(folder, "run", "metrics.jsonl"))]
        samples = [json.loads(line) for line in open(Path(folder, "run", "samples.jsonl"))]
    keep = ["step", "eval/accuracy", "reward/mean", "generation/length", "policy/entropy"]
    keep += ["policy/clip_frac", "kl/mean", "critic/explained_variance", "worked", "rambling"]
    keep += ["engine/mismatch", "time/step"]
    rows = [{k: round(row[k], 5) for k in keep if k in row} for row in rows]
    keep = ("step", "prompt", "completions")
    samples = [{k: s[k][:2] if k == "completions" else s[k] for k in keep} for s in samples]
    return {"seed": seed, "rows": rows, "samples": samples}


def inputs(claim, label, seed):
    """What `run` takes, but for the steps."""
    script, flags, edits = claim["settings"][label]
    return script, tuple(f"{claim['flags']} {flags}".split()), tuple(edits.items()), seed


def part(claim, label, record):
    """What a claim keeps of a run, which another claim may have made longer."""
    rows = [row for row in record["rows"] if row["step"] <= claim["steps"]]
    samples = [s for s in record["samples"] if s["step"] in (0, claim["steps"])]
    return {"setting": label, "seed": record["seed"], "rows": rows, "samples": samples}


def value(claim, record):
    """What is compared of one run: the metric in the row of its step, or averaged over steps."""
    first, last = claim["at"] if isinstance(claim["at"], tuple) else (claim["at"], claim["at"])
    rows = [row for row in record["rows"] if claim["metric"] in row]
    inside = [row for row in rows if first <= row["step"] <= last]
    return sum(row[claim["metric"]] for row in inside) / len(inside)


def numbers(claim, records):
    """{setting: (mean, lowest, highest, runs)} of what is compared."""
    found = defaultdict(list)
    for record in records:
        found[record["setting"]].append(value(claim, record))
    return {k: (sum(v) / len(v), min(v), max(v), len(v)) for k, v in found.items()}


def says(claim, records):
    """The claim's sentence with its numbers, and whether ranges touch, filled in."""
    found = numbers(claim, records)

    def fill(match):
        first, _, second = match[1].partition(" | ")
        if first.startswith("stop"):
            return stop(second, records, float(first.removeprefix("stop ")))
        if not second:
            mean, low, high, _ = found[first]
            return f"{mean:.3f} ({low:.3f}–{high:.3f})"
        (_, a, b, runs), (_, c, d, _) = found[first], found[second]
        if b < c or d < a:
            return f"{first} against {second}: beyond the spread of {runs} seeds"
        pairs = {seed: [] for seed in range(runs)}
        for record in records:
            if record["setting"] in (first, second):
                pairs[record["seed"]].append(value(claim, record))
        signs = {(one > other) - (one < other) for one, other in pairs.values()}
        each = ", though apart the same way in each of them" if signs in ({1}, {-1}) else ""
        return f"{first} against {second}: within the spread of {runs} seeds{each}"

    return re.sub(r"\[([^\]]+)\]", fill, claim["says"])


def stop(setting, records, limit):
    """At which steps a --mismatch-limit would have stopped the runs of a setting."""
    found = set()
    for record in records:
        over = [row["step"] for row in record["rows"] if row["engine/mismatch"] > limit]
        found |= {over[0] if over else "never"} if record["setting"] == setting else set()
    return "never" if found == {"never"} else f"at step {' or '.join(map(str, sorted(found)))}"


def reached(claim, records):
    """The lines of a table: the first step, and the samples and seconds up to it, with a share of
    the held-out problems right, in the mean (lowest-highest) of a setting's seeds."""
    lines = [
        "",
        "| first to have right | " + " | ".join(f"{share:.0%}" for share in claim["reach"]) + " |",
    ]
    lines += ["|---" * (1 + len(claim["reach"])) + "|"]
    for label in claim["settings"]:
        runs = [record["rows"] for record in records if record["setting"] == label]
        cells = []
        for share in claim["reach"]:
            steps, seconds = [], []
            for rows in runs:
                right = [row for row in rows if row.get("eval/accuracy", 0) >= share]
                if right:
                    steps.append(right[0]["step"])
                    seconds.append(sum(row["time/step"] for row in rows[: steps[-1]]))
            mean = sum(steps) / max(1, len(steps))
            cell = f"step {mean:.0f} ({min(steps)}–{max(steps)})" if steps else "never"
            cell += (
                f", {mean * 128:,.0f} samples, {sum(seconds) / len(steps):.0f} s" if steps else ""
            )
            missing = f", {len(steps)} of {len(runs)} seeds" if 0 < len(steps) < len(runs) else ""
            cells.append(cell + missing)
        lines += [f"| {label} | " + " | ".join(cells) + " |"]
    return lines


def draw(claim, records):
    """The claim's picture: a curve for each setting, shaded from the lowest seed to the highest."""
    panels = [claim["metric"], *claim.get("beside", [])]
    size = (max(7.6, 3.8 * len(panels)), 3.8)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for axis, metric in zip(axes[0], panels, strict=True):
        for number, label in enumerate(claim["settings"]):
            points = defaultdict(list)
            for record in records:
                for row in record["rows"]:
                    if record["setting"] == label and metric in row:
                        points[row["step"]].append(row[metric])
            steps = sorted(points)
            mean = [sum(points[step]) / len(points[step]) for step in steps]
            axis.plot(steps, mean, color=f"C{number}", label=label, linewidth=1.8)
            low, high = [min(points[s]) for s in steps], [max(points[s]) for s in steps]
            axis.fill_between(steps, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
        axis.set(xlabel="step", ylabel=NAMES[metric])
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if metric == claim["metric"]:
            first, last = claim["at"] if isinstance(claim["at"], tuple) else (claim["at"],) * 2
            axis.axvspan(first - 0.15, last + 0.15, color="grey", alpha=0.25, linewidth=0)
    figure.suptitle(claim["title"], fontsize=11)
    handles, labels = axes[0][0].get_legend_handles_labels()
    labels = [f"{claim.get('flag', '')} {label}".strip() for label in labels]
    place = {"loc": "lower center", "ncols": min(4, len(labels)), "frameon": False}
    figure.legend(handles, labels, fontsize=9, **place)
    figure.tight_layout(rect=(0, 0.05 + 0.05 * ((len(labels) - 1) // 4), 1, 1))
    figure.savefig(RESULTS / "lecture" / f"{claim['name']}.png", dpi=110)
    plt.close(figure)


def section(claim, records):
    """The claim's part of results/README.md."""
    metric, at = NAMES[claim["metric"]], claim["at"]
    at = f"steps {at[0]} to {at[1]}" if isinstance(at, tuple) else f"step {at}"
    lines = [f'<a id="{claim["name"]}"></a>', "", f"### {claim['title']}", "", claim["lecture"], ""]
    lines += [f"![{claim['title']}](lecture/{claim['name']}.png)", ""]
    runs = next(iter(numbers(claim, records).values()))[3]
    lines += [f"| setting | {metric}, {at}: mean (lowest–highest of {runs} seeds) | command |"]
    lines += ["|---|---|---|"]
    for label, (mean, low, high, _) in numbers(claim, records).items():
        script, flags, edits = claim["settings"][label]
        command = " ".join(f"python {script}.py {claim['flags']} {flags}".split())
        edited = " †" if edits else ""
        lines += [f"| {label} | {mean:.3f} ({low:.3f}–{high:.3f}) | `{command}`{edited} |"]
    lines += reached(claim, records) if "reach" in claim else []
    lines += ["", says(claim, records), ""]
    for label in claim.get("look", []):
        record = next(r for r in records if r["setting"] == label and r["seed"] == 0)
        for when, sample in zip(("before", "after"), record["samples"], strict=True):
            texts = "  ".join(f"`{text}`" for text in sample["completions"])
            lines += [f"{label}, {when}: `{sample['prompt']}` → {texts}", ""]
    return "\n".join(lines)


def read(claim):
    """The stored runs of a claim, [] where it was never run."""
    path = RESULTS / "lecture" / f"{claim['name']}.jsonl"
    return [json.loads(line) for line in open(path)] if path.exists() else []


def readme():
    """The text of results/README.md with the claims' sections between its marks made anew."""
    begin, end = "<!-- claims: made by benchmarks/lecture.py -->", "<!-- end of claims -->"
    before, _, rest = (RESULTS / "README.md").read_text(encoding="utf-8").partition(begin)
    parts = [section(claim, read(claim)) for claim in CLAIMS if read(claim)]
    title = '<a id="variance"></a>\n\n### The variance of the gradient, by baseline'
    table = variance.table(json.loads((RESULTS / "lecture" / "variance.json").read_text()))
    text = f"{variance.__doc__.split('one core')[1].strip()}\n\n" + "\n".join(table)
    parts += [f"{title}\n\n{text}\n"]
    return f"{before}{begin}\n\n" + "\n".join(parts) + f"{end}{rest.partition(end)[2]}"


def main():
    wanted = [name for name in sys.argv[1:] if name != "--draw"]
    names = [claim["name"] for claim in CLAIMS] + ["variance"]
    if not set(wanted) <= set(names):
        sys.exit(f"error: no claim {sorted(set(wanted) - set(names))}; there are {names}")
    again = [] if "--draw" in sys.argv else wanted or names
    jobs = [
        (claim, label, seed)
        for claim in CLAIMS
        if claim["name"] in again
        for label in claim["settings"]
        for seed in range(claim["seeds"])
    ]
    steps = Counter()  # of each run: the most that a claim wants
    for job in jobs:
        steps[inputs(*job)] = max(steps[inputs(*job)], job[0]["steps"])
    (RESULTS / "lecture").mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = f"{ROOT}/benchmarks{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # of what a script left behind
    imports = ["variance", "matplotlib.pyplot", "transformers.models.llama.modeling_llama"]
    FORK.set_forkserver_preload(imports)
    gradients = RESULTS / "lecture" / "variance.json"
    if "variance" in again:
        gradients.unlink(missing_ok=True)
        process = FORK.Process(target=variance.run, args=(gradients,), daemon=True)
        process.start()
    pool = ThreadPoolExecutor(2)
    try:
        runs = {key: pool.submit(run, *key, most) for key, most in steps.items()}
        for claim in CLAIMS:
            path = RESULTS / "lecture" / f"{claim['name']}.jsonl"
            own = [job for job in jobs if job[0] is claim]
            records = [part(*job[:2], runs[inputs(*job)].result()) for job in own]
            if records:
                lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
                path.write_text("".join(lines), encoding="utf-8")
            records = read(claim) if records or "--draw" in sys.argv else []
            if records:
                draw(claim, records)
            for label, (mean, low, high, _) in numbers(claim, records).items():
                words = f"{claim['name']:14} {label:28} {mean:.3f} ({low:.3f}-{high:.3f})"
                print(words, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    if "variance" in again:
        process.join()
        if not gradients.exists():
            sys.exit("error: the variance was not measured; what is above says why")
    (RESULTS / "README.md").write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
