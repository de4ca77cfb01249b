"""The form: a script stands alone, and two scripts differ by what their algorithms differ in."""

import ast
import difflib
import re
import shutil
from functools import cache

import pytest
from conftest import ROOT, SCRIPTS, TINY, printed, read_jsonl

SCRIPT_LINES = {name: 705 for name in SCRIPTS} | {"ppo": 840}
COMMON_LINES, COMMON_NAMES, MAIN_LINES, PARAMETERS, COLUMNS = 300, 12, 120, 6, 100
# The most changed lines, module docstrings left out.
NEIGHBOURS = {("reinforce", "rloo"): 60, ("rloo", "grpo"): 90, ("grpo", "gspo"): 40}
NEIGHBOURS |= {("grpo", "cispo"): 40, ("grpo", "ppo"): 220}
OTHERS = [name for name in SCRIPTS if name != "grpo"]
# What is the algorithm's own, or shows it.
OWN = {"Args": OTHERS, "TINY": OTHERS, "policy_loss": OTHERS, "update": OTHERS, "main": OTHERS}
OWN |= {"load_problems": ["ppo"]}  # its reward model, and its critic
# Flags whose meaning is the algorithm's, so that the help says another thing.
MEANINGS = {"beta": ["reinforce", "rloo", "ppo"]}
MEANINGS |= {"clip_eps_low": ["cispo"], "clip_eps_high": ["cispo"]}
# Sections of main that are the algorithm, and lines outside of them that are.
SECTIONS = ("# 3. Advantages", "# 4. Update.")
OWN_LINES = {"reinforce": {"average"}}
OWN_LINES |= {"ppo": {"critic", "value_optimizer", "reward_model", "global", "RewardModel"}}
OWN_LINES["ppo"] |= {"kl_penalty"}


def text_of(name):
    return (ROOT / f"{name}.py").read_text(encoding="utf-8")


def source(name):
    """The text of a script behind its module docstring."""
    text = text_of(name)
    return "\n".join(text.splitlines()[ast.parse(text).body[0].end_lineno :]) + "\n"


@cache
def parts(name):
    """{name: text} of the functions, classes, assignments and environment of a script, in order."""
    text, found = source(name), {}
    for node in ast.parse(text).body:
        segment = ast.get_source_segment(text, node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
            found[node.name] = decorators + segment
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = ast.unparse(targets[0])
            found[name] = found.get(name, "") + segment + "\n"
        else:
            found[segment.split("\n")[0]] = segment
    return found


def changed(before, after):
    """The lines that `diff` would show, with their sign."""
    lines = difflib.unified_diff(before, after, n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


# ---------------------------------------- Each script -----------------------------------------
@pytest.mark.parametrize("name", SCRIPTS)
def test_sizes(name):
    text = text_of(name)
    nodes = list(ast.walk(ast.parse(text)))
    assert len(text.splitlines()) <= SCRIPT_LINES[name]
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert len(parts(name)["main"].splitlines()) <= MAIN_LINES
    for arguments in (node.args for node in nodes if isinstance(node, ast.FunctionDef)):
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        assert count - (arguments.args[:1] != [] and arguments.args[0].arg == "self") <= PARAMETERS
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value) == "common"}
    assert {"token_logprobs", "encode_prompt", "kl_estimate"} <= used and len(used) <= COMMON_NAMES
    assert "from common" not in text


def test_a_user_runs_a_copy_beside_common_alone_on_two_processes(tmp_path):
    for file in ("grpo.py", "common.py"):
        shutil.copy(ROOT / file, tmp_path)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "grpo.py"]
    words += ["--model", TINY / "model", "--dataset", TINY / "train.jsonl", "--split", "train[:4]"]
    words += ["--eval-split", "train[4:8]", "--steps", 1, "--prompts-per-step", 4]
    words += ["--group-size", 2, "--max-completion-tokens", 16, "--output-dir", "run"]
    words += ["--rollout-engine", "transformers"]
    printed(*words, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


# --------------------------------------- Shared by two ----------------------------------------
@pytest.mark.parametrize("pair", NEIGHBOURS)
def test_neighbours_differ_by_little(pair):
    lines = changed(*(source(name).splitlines() for name in pair))
    assert 10 < len(lines) <= NEIGHBOURS[pair]


@pytest.mark.parametrize("name", OTHERS)
def test_what_two_scripts_share_is_the_same_text_in_the_same_order(name):
    grpo, other = parts("grpo"), parts(name)
    shared = [part for part in grpo if part in other]
    assert [p for p in shared if grpo[p] != other[p] and name not in OWN.get(p, ())] == []
    assert shared == [part for part in other if part in grpo]
    assert {"reward", "parse_args", "micro_batches", "VLLMEngine", "MAY_CHANGE"} <= set(shared)
    assert len(shared) >= 60 - 8 * (name == "ppo")


def flags(name):
    """{flag: (type, help)} of a script's Args."""
    found = re.findall(r"^    (\w+): (.+?) = .+?  # (.+)$", parts(name)["Args"], re.MULTILINE)
    return {flag: rest for flag, *rest in found}


@pytest.mark.parametrize("name", OTHERS)
def test_a_flag_that_two_scripts_share_is_the_same_flag(name):
    grpo, other = flags("grpo"), flags(name)
    shared = [flag for flag in grpo if flag in other]
    drifted = [flag for flag in shared if grpo[flag] != other[flag]]
    assert [flag for flag in drifted if name not in MEANINGS.get(flag, ())] == []
    assert shared == [flag for flag in other if flag in grpo] and len(shared) >= 29
    assert len(other) == parts(name)["Args"].split("def ")[0].count(" = ")  # each has its help


def sections(name):
    """{heading: lines} of main; its set-up is under "def main(args):"."""
    found, heading = {}, ""
    for line in parts(name)["main"].splitlines():
        if re.match(r" +# \d\. |def ", line):
            heading = next((each for each in SECTIONS if each in line), line)
        found.setdefault(heading, []).append(line)
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_main_differs_in_its_advantages_and_its_update_alone(name):
    grpo, other = sections("grpo"), sections(name)
    assert list(grpo) == list(other) and len(grpo) == 5
    for heading in grpo.keys() - set(SECTIONS):
        lines = changed(grpo[heading], other[heading])
        for line in [line for line in lines if line[0] == "+"]:
            assert set(re.findall(r"\w+", line)) & OWN_LINES.get(name, set()), line
        gone = {line[1:].strip() for line in lines if line[0] == "-"}
        assert gone <= ({"optimizer = make_optimizer(model)"} if name == "ppo" else set())


# ------------------------------------------ common.py -------------------------------------------
def test_common_knows_nothing_of_a_run():
    text = text_of("common")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= COMMON_LINES and max(map(len, text.splitlines())) <= COLUMNS
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    # FSDP's two names gather a model's weights where its parts are called; there is no group.
    assert imported <= {"math", "functools", "torch", "torch.distributed.fsdp", "transformers"}
    assert {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}.isdisjoint(
        {"args", "path", "run_dir", "folder", "rank", "processes"}
    )
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called.isdisjoint({"print", "open", "exit", "sys.exit", "input"})
    assert not [name for name in called if name.startswith(("torch.distributed", "os.", "dist."))]
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        most = 7 if function.name in ("forward", "backward") else PARAMETERS
        arguments = [each.arg for each in function.args.args if each.arg != "ctx"]
        assert len(arguments) <= most, function.name
