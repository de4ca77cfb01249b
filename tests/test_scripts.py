"""The promise: the difference between two scripts is the difference between two algorithms."""

import ast
import difflib
import re
import shutil

import pytest
from conftest import ROOT, TINY, read_jsonl, run_script

SCRIPTS = ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"]
# The most changed lines, module docstrings left out, that leave room for the algorithm alone.
NEIGHBOURS = [
    ("reinforce", "rloo", 60),
    ("rloo", "grpo", 90),
    ("grpo", "gspo", 50),
    ("grpo", "cispo", 40),
    ("grpo", "ppo", 220),
]
# What may differ between two scripts that both have it: it is the algorithm, or feeds it.
OWN = {"Args", "TINY", "check", "policy_loss", "objective", "update", "main"}


def source(name):
    """The text of a script without its module docstring."""
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    docstring = ast.parse(text).body[0]
    return "\n".join(text.splitlines()[docstring.end_lineno :]) + "\n"


def parts(name):
    """{name: text} of the functions, classes and assignments at the top level of a script."""
    text, found = source(name), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_source_segment(text, node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.get_source_segment(text, node)
    return found


def flags(name):
    """{flag: its line without the default} of a script's Args."""
    lines = re.findall(r"^    (\w+): (.+?) = .+?  # (.+)$", parts(name)["Args"], re.MULTILINE)
    return {flag: (kind, text) for flag, kind, text in lines}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "grpo"])
def test_what_two_scripts_share_is_the_same_text(name):
    grpo, other = parts("grpo"), parts(name)
    drifted = [part for part in grpo if part in other and part not in OWN]
    drifted = [part for part in drifted if grpo[part] != other[part]]
    assert not drifted, f"{name}.py and grpo.py differ in {drifted}"
    assert {"reward", "loss_weights", "VLLMEngine", "evaluate", "load_problems"} <= set(other)


# Flags whose meaning the algorithm decides, so that their help says something else.
MEANINGS = {"beta": ("reinforce", "rloo", "ppo"), "clip_eps_low": ("cispo",)}
MEANINGS["clip_eps_high"] = ("cispo",)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "grpo"])
def test_a_flag_that_two_scripts_share_is_the_same_flag(name):
    grpo, other = flags("grpo"), flags(name)
    drifted = [flag for flag in grpo if flag in other and grpo[flag] != other[flag]]
    assert [flag for flag in drifted if name not in MEANINGS.get(flag, ())] == []
    assert len(set(grpo) & set(other)) > 30


@pytest.mark.parametrize("first, second, most", NEIGHBOURS)
def test_neighbours_differ_by_little(first, second, most):
    lines = difflib.unified_diff(
        source(first).splitlines(), source(second).splitlines(), n=0, lineterm=""
    )
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) <= most


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short(name):
    lines = (ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (480 if name == "ppo" else 400)
    assert max(map(len, lines)) <= 100
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef) and node.name != "main":
            assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_beside_a_copy_of_common_alone(name, tmp_path):
    for file in (f"{name}.py", "common.py"):
        shutil.copy(ROOT / file, tmp_path)
    flags = ["--model", TINY / "model", "--dataset", TINY / "train.jsonl", "--steps", 1]
    flags += ["--prompts-per-step", 4, "--group-size", 2, "--max-completion-tokens", 16]
    flags += ["--rollout-engine", "transformers", "--output-dir", "run"]
    done = run_script(name, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
