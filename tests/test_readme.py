"""What the README says exists, and its tour shows the files as they are."""

import ast
import importlib
import re

import pytest
from conftest import ROOT
from tour import replace

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = README.partition("<!-- tour")[0] + README.partition("<!-- end of tour -->")[2]


def test_the_tour_shows_the_files():
    assert replace(README) == README, "run: python tests/tour.py"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+)\.(?:\w+))`", TEXT))))
def test_what_is_named_exists(name):
    module, attribute = name.split(".")
    if attribute in ("py", "md", "txt", "jsonl", "json", "png"):
        written = {"metrics.jsonl", "samples.jsonl", "curves.png", "args.json"}  # by a run
        assert name in written or (ROOT / name).exists() or (ROOT / "tiny" / name).exists()
    else:
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/\w+\.py)`", TEXT))))
def test_a_test_that_is_named_exists(path):
    assert (ROOT / path).exists()


SCRIPT = r"(?:reinforce|rloo|ppo|grpo|gspo|cispo)\.py"
COMMANDS = sorted(set(re.findall(rf"{SCRIPT}(?: [^\n`|]*)?--[^\n`|]+", TEXT)))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_a_command_exist(command):
    script = command.split(".py")[0].split()[-1]
    tree = ast.parse((ROOT / f"{script}.py").read_text(encoding="utf-8"))
    (args,) = [node for node in tree.body if getattr(node, "name", "") == "Args"]
    known = {node.target.id for node in args.body if isinstance(node, ast.AnnAssign)} | {"help"}
    for flag in re.findall(r"--([a-z0-9-]+)", command):
        flag = flag.replace("-", "_")
        assert flag in known or flag.removeprefix("no_") in known, f"{script}.py has no --{flag}"


def test_ci_finds_the_one_command_that_tests():
    assert len(re.findall(r"^ .*-m pytest$", README, re.MULTILINE)) == 1
    assert len(re.findall(r"-m pytest", README)) == 1


def test_the_table_of_variances_is_the_measured_one():
    assert (ROOT / "results" / "variance.md").read_text(encoding="utf-8").strip() in README
