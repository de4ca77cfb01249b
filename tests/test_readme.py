"""What the README says exists, its commands' flags are flags, the gallery's numbers the runs'."""

import ast
import importlib
import re

import lecture
import pytest
import torch
from conftest import ROOT, SCRIPTS, read_jsonl
from test_form import changed, source, text_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
SCRIPT = rf"(?:{'|'.join(SCRIPTS)})\.py"
TEXT = README + RESULTS + "".join(ast.get_docstring(ast.parse(text_of(name))) for name in SCRIPTS)
COMMANDS = sorted(set(re.findall(rf"{SCRIPT}(?: [^\n`|]*)?--[^\n`|]+", TEXT)))


def test_the_readme_is_short_without_diffs_and_has_the_command_that_ci_runs():
    assert len(README.splitlines()) <= 350 and "```diff" not in README
    assert len(re.findall(r"^ .*-m pytest$", README, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+)\.(?:\w+))`", README))))
def test_what_is_named_exists(name):
    module, attribute = name.split(".")
    if attribute in ("py", "md", "txt", "jsonl", "json", "png"):
        written = {"metrics.jsonl", "samples.jsonl", "curves.png", "args.json"}  # by a run
        assert name in written or any((ROOT / at / name).exists() for at in (".", "tiny", "tests"))
    else:
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_a_command_exist_and_are_accepted(command):
    script = command.split(".py")[0].split()[-1]
    fields = {name.replace("_", "-") for name in vars(importlib.import_module(script).Args())}
    for flag in re.findall(r"--([a-z0-9-]+)", command):
        assert flag in fields or flag.removeprefix("no-") in fields or flag == "help", flag


def test_the_changed_lines_in_the_table_are_the_files():
    rows = re.findall(r"\| (\d+): `diff (\w+)\.py (\w+)\.py`", README)
    assert len(rows) == 5
    for count, *pair in rows:
        assert len(changed(*(source(name).splitlines() for name in pair))) == int(count), pair


def test_the_pictures_and_files_that_are_named_are_there():
    links = set(re.findall(r"results/README\.md#([\w-]+)", README))
    assert len(links) >= 15 and links <= set(re.findall(r'<a id="([\w-]+)">', RESULTS))
    for path in re.findall(r"(?:tests|benchmarks)/\w+\.py", TEXT):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", RESULTS):
        assert (ROOT / "results" / path).exists(), path


def test_the_numbers_of_the_gallery_are_those_of_the_stored_runs():
    assert lecture.readme() == RESULTS, "run: python benchmarks/lecture.py --draw"
    assert RESULTS.count(" the spread of ") >= 3
    for claim in lecture.CLAIMS:
        for record in lecture.read(claim):
            last = record["rows"][-1]["step"]
            assert last == claim["steps"] and 0 <= lecture.value(claim, record) <= 1
    runs = read_jsonl(ROOT / "results" / "lecture" / "baseline.jsonl")
    runs = [run["rows"] for run in runs if run["setting"] == "none"]
    right = [row["eval/accuracy"] for rows in runs for row in rows if row["step"] == 30]
    numbers = f"{sum(right) / 3:.3f} ({min(right):.3f}–{max(right):.3f})"
    assert len(right) == 3 and f"| none | {numbers} |" in RESULTS


def test_when_a_share_is_reached_and_when_a_run_is_stopped():
    records, keys = [], ("step", "eval/accuracy", "time/step", "engine/mismatch")
    for shares in ([0.1, 0.3, 0.6], [0.1, 0.3, 0.3, 0.3, 0.7, 0.8]):  # .15 nats in row 2
        rows = [(i, share, 2.0, share / 4) for i, share in enumerate(shares)]
        rows = [dict(zip(keys, row, strict=True)) for row in rows]
        records.append({"setting": "a", "rows": rows})
    lines = lecture.reached({"settings": {"a": 0}, "reach": [0.5, 0.75, 0.9]}, records)
    # Steps 2 and 4, 3 x 128 samples in the mean, 2 s for each row before: (4 + 8) / 2.
    cells = ["step 3 (2–4), 384 samples, 6 s", "step 5 (5–5), 640 samples, 10 s, 1 of 2 seeds"]
    assert lines[-1] == f"| a | {cells[0]} | {cells[1]} | never |"
    assert lecture.stop("a", records, 0.1) == "at step 2 or 4"
    assert lecture.stop("a", records, 0.2) == "never"


def test_the_spread_of_gradients():
    # Entries (0, 2) and (1, 1): variances 2 and 0, means 1 and 1; |mean|^2 - variance / 2 = 1.
    variance, _, signal = lecture.variance.spread(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    assert (variance, signal) == (2, 1)
