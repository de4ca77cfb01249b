"""What the README says exists, its commands' flags are flags, the gallery's numbers the runs'."""

import ast
import difflib
import importlib
import re
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
SCRIPT = r"(?:reinforce|rloo|ppo|grpo|gspo|cispo)\.py"
DOCSTRINGS = "".join(
    ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8")))
    for name in ("reinforce", "rloo", "ppo", "grpo", "gspo", "cispo")
)
TEXT = README + RESULTS + DOCSTRINGS
COMMANDS = sorted(set(re.findall(rf"{SCRIPT}(?: [^\n`|]*)?--[^\n`|]+", TEXT)))


def test_the_readme_is_short_and_free_of_diffs():
    assert len(README.splitlines()) <= 350 and "```diff" not in README


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+)\.(?:\w+))`", README))))
def test_what_is_named_exists(name):
    module, attribute = name.split(".")
    if attribute in ("py", "md", "txt", "jsonl", "json", "png"):
        written = {"metrics.jsonl", "samples.jsonl", "curves.png", "args.json"}  # by a run
        assert name in written or any((ROOT / at / name).exists() for at in (".", "tiny", "tests"))
    else:
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`?((?:tests|benchmarks)/\w+\.py)", TEXT))))
def test_a_file_that_is_named_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_a_command_exist_and_are_accepted(command):
    script = command.split(".py")[0].split()[-1]
    fields = {name.replace("_", "-") for name in vars(importlib.import_module(script).Args())}
    for flag in re.findall(r"--([a-z0-9-]+)", command):
        assert flag in fields or flag.removeprefix("no-") in fields or flag == "help", flag


def test_the_changed_lines_in_the_table_are_the_files():
    rows = re.findall(r"\| (\d+): `diff (\w+)\.py (\w+)\.py`", README)
    assert len(rows) == 5
    for count, first, second in rows:
        bodies = []
        for name in (first, second):
            text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
            bodies.append(text.splitlines()[ast.parse(text).body[0].end_lineno :])
        diff = difflib.unified_diff(*bodies, n=0, lineterm="")
        changed = [d for d in diff if d[0] in "+-" and d[:3] not in ("+++", "---")]
        assert len(changed) == int(count), f"diff {first}.py {second}.py is {len(changed)} lines"


def test_ci_finds_the_one_command_that_tests():
    assert len(re.findall(r"^ .*-m pytest$", README, re.MULTILINE)) == 1


def test_the_numbers_of_the_gallery_are_those_of_the_stored_runs():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    lecture = importlib.import_module("lecture")
    assert lecture.readme() == RESULTS, "run: python benchmarks/lecture.py --draw"
    assert RESULTS.count(" the spread of 3 seeds)") >= 3
