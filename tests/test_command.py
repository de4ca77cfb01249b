"""What a user may get wrong is one line and an exit status, and nothing written is lost."""

import importlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import fields

import pandas
import pytest
from conftest import SCRIPTS, TINY, read_jsonl
from runs import EASY, attempt, copy, finish, metrics, run, small, start
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import grpo

FLAGS = small("grpo", "--steps", 2, "--max-completion-tokens", 12)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A copy of grpo.py in a folder without plot.py."""
    return copy(tmp_path_factory.mktemp("command"), "grpo", EASY)


@pytest.fixture(scope="module")
def finished(script):
    """The folder of a run of two steps."""
    run(script, *FLAGS, "--output-dir", script.parent / "finished")
    return script.parent / "finished"


def content(folder):
    """{path: bytes} of all files under a folder."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def one_line(done):
    """The one line on stderr of a run that was refused."""
    assert done.returncode not in (0, None), done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def refused(script, *flags, **options):
    """The line of a run that is refused before it has a folder."""
    folder = script.parent / "refused"
    line = one_line(attempt(script, *flags, "--output-dir", folder, **options))
    assert not folder.exists()
    return line


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count):
    return [{"question": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(1, count + 1)]


# -------------------------------------------- Flags --------------------------------------------
RANGES = {"temperature": [0, 0.001, 3], "minibatches": [3], "group_size": [1], "gamma": [1.5]}
RANGES |= {"lam": [1.5], "baseline_decay": [1]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_numbers_without_sense_are_refused(name):
    Args, free = importlib.import_module(name).Args, ("seed", "warmup_steps", "value_warmup_steps")
    numbers = [field for field in fields(Args) if field.type in (int, float)]
    assert {"steps", "group_size", "micro_batch_size"} < {field.name for field in numbers}
    for field in numbers:
        wrong = [-1, float("nan"), float("inf"), *RANGES.get(field.name, [])]
        wrong += [0] if field.type is int and field.name not in free else []
        if field.name == "group_size" and name in ("reinforce", "ppo"):
            wrong.remove(1)  # there one is a group
        for value in wrong:
            with pytest.raises(ValueError, match=f"--{field.name.replace('_', '-')}"):
                Args(**{field.name: value})


WRONG = "--temperature=0 --steps=many --rollout-engine=sglang --kl-estimator=k1 --group-sise=4"


@pytest.mark.parametrize("flag", WRONG.split())
def test_a_box_that_names_it_is_all_that_a_wrong_flag_shows(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo.py", flag])
    with pytest.raises(SystemExit) as ended:
        grpo.parse_args()
    shown = capsys.readouterr()
    said = "--temperature must be from 0.01 to 2, not 0" if "temp" in flag else flag.split("=")[0]
    assert ended.value.code == 2 and said in shown.err and shown.out == ""


@pytest.mark.parametrize("rows, processes", [(["--minibatches", 4, "--group-size", 3], 2), ([], 3)])
def test_processes_that_do_not_divide(script, rows, processes):
    flags = [*FLAGS, *rows]
    line = refused(script, *flags, processes=processes)
    assert "--prompts-per-step" in line and f"{processes} processes" in line


# -------------------------------------------- Data ---------------------------------------------
def load(tokenizer, path, split="train"):
    return grpo.load_problems(grpo.Args(), tokenizer, str(path), split)


def not_loaded(tokenizer, path):
    """The line with which a file is refused."""
    with pytest.raises(SystemExit) as ended:
        load(tokenizer, path)
    line = ended.value.code
    assert line.startswith("error: ") and "\n" not in line
    return line


WRITERS = {
    "own.jsonl": write,
    "own.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "own.csv": lambda path, rows: pandas.DataFrame(rows).to_csv(path, index=False),
    "own.parquet": lambda path, rows: pandas.DataFrame(rows).to_parquet(path),
    "mark.jsonl": lambda path, rows: path.write_text("\ufeff" + write(path, rows).read_text()),
    "own [1].jsonl": write,  # no pattern
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_ones_own(name, tmp_path, tokenizer):
    WRITERS[name](tmp_path / name, sums(20))
    problems = load(tokenizer, tmp_path / name, "train[:90%]")
    assert [p["answer"] for p in problems] == [str(2 * i) for i in range(1, 19)]
    assert problems[0]["prompt"] == "1+1=?"
    assert tokenizer.decode(problems[0]["ids"]) == "<|user|>1+1=?<|assistant|>"


ROW = '{"question": "1+1=?", "answer": "2"}\n'
TEXTS = [None, "", "[1, 2]\n", "[" * 100_000, ROW + '{"question": "1+2=?", \n']
TEXTS += [ROW.replace('"1+1=?"', bad) for bad in ("12", "null", r'"\ud800"')]
TEXTS += [ROW.replace("question", "prompt")]
TEXTS += [ROW.replace("}", f', "x": {"[" * 100_000}{"]" * 100_000}}}')]  # pyarrow would crash
UNREADABLE = [("own.xyz", "1+1=?"), ("own.JSONL", ROW)]  # datasets knows .jsonl alone
UNREADABLE += [("own.jsonl", text) for text in TEXTS]


@pytest.mark.parametrize("name, text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_file_that_is_not_read(name, text, tmp_path, tokenizer):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert name in not_loaded(tokenizer, tmp_path / name)


def test_text_may_have_many_brackets(tmp_path, tokenizer):
    rows = [{**row, "x": "[" * 100_000} for row in sums(16)]
    assert len(load(tokenizer, write(tmp_path / "own.jsonl", rows))) == 16


def test_chat_messages_and_parts(tmp_path, tokenizer):
    system = {"role": "system", "content": [{"type": "text", "text": "Add."}]}
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1=?"}]
    for first, content in (({"role": "system", "content": "Add."}, "1+1=?"), (system, parts)):
        chat = [first, {"role": "user", "content": content}]
        path = write(tmp_path / "own.jsonl", [{"question": chat, "answer": 2}])
        ids = load(tokenizer, path)[0]["ids"]
        assert tokenizer.decode(ids) == "<|system|>Add.<|user|>1+1=?<|assistant|>"
    parts[1]["type"] = "image"
    line = not_loaded(tokenizer, write(path, [{"question": chat, "answer": 2}]))
    assert "row 0 " in line and "image" in line


@pytest.mark.parametrize("flag", ["--split", "--eval-split"])
def test_a_split_without_problems(flag, script):
    assert "train[:0]" in refused(script, *FLAGS, flag, "train[:0]")


# -------------------------------------------- Models -------------------------------------------
@pytest.fixture
def model(tmp_path):
    """A copy of the built-in model to spoil, and the flags of a run with it."""
    folder = shutil.copytree(TINY / "model", tmp_path / "model")
    return folder, [*FLAGS, "--model", folder, "--dataset", TINY / "train.jsonl"]


RENAMED = [("model.layers", "module.model.layers", "model.layers.0.")]
RENAMED += [("model.", "_orig_mod.model.", "model.embed_tokens.weight")]
RENAMED += [("model.layers.1.mlp", "mlp", "model.layers.1.mlp.down_proj.weight")]


@pytest.mark.parametrize("old, new, said", RENAMED)
def test_weights_that_are_not_there(old, new, said, script, model):
    folder, flags = model
    path = folder / "model.safetensors"
    renamed = {name.replace(old, new): weight for name, weight in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})
    assert said in refused(script, *flags, "--eval-split", "train[:4]")


@pytest.mark.parametrize("lost", ["config", "tokenizer", "model", "all"])
def test_a_folder_that_is_no_model(lost, script, model):
    folder, flags = model
    for path in folder.iterdir():
        if lost in ("all", path.stem.removesuffix("_config")):
            path.unlink()
    assert str(folder) in refused(script, *flags)


QUANTISED = [{"quant_method": "gptq", "bits": 4}, {"quant_method": "awq"}]
QUANTISED += [{"quant_method": "bitsandbytes", "load_in_8bit": True}]


@pytest.mark.parametrize("method", QUANTISED)
def test_a_quantised_model_without_its_library(method, script, model):
    folder, flags = model
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    assert f"cannot load the model {folder}" in refused(script, *flags, "--eval-split", "train[:4]")


def test_a_prompt_and_a_completion_over_the_context(script, model):
    folder, flags = model
    size = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 86}
    GPT2LMHeadModel(GPT2Config(**size, eos_token_id=5)).save_pretrained(folder)
    line = refused(script, *flags, "--max-completion-tokens", 60)
    assert "--max-completion-tokens" in line and "64" in line
    flags += ["--max-completion-tokens", 40, "--steps", 1]
    run(script, *flags, "--output-dir", folder / "run")


def test_generation_config_is_saved_as_it_was(script, model):
    folder, flags = model
    text = '{"do_sample": false, "temperature": 0.9, "top_p": 0.6, "eos_token_id": 5}'
    (folder / "generation_config.json").write_text(text)
    run(script, *flags, "--output-dir", folder / "run")
    assert (folder / "run/model/generation_config.json").read_text() == text
    AutoModelForCausalLM.from_pretrained(folder / "run/model")


@pytest.mark.parametrize("flag, module", [("--rollout-engine", "vllm"), ("--track", "trackio")])
def test_a_library_that_does_not_load(flag, module, script, tmp_path):
    (tmp_path / f"{module}.py").write_text("raise ImportError('libcuda is missing')")
    line = refused(script, *FLAGS, flag, module, env={"PYTHONPATH": str(tmp_path)})
    assert f"{flag} {module}" in line and "libcuda is missing" in line


# --------------------------------------- Folders and resume --------------------------------------
CHANGED = ["--temperature 0.5", "--beta 0.5", "--split train[:7]", "--steps 1", "--output-dir x"]
KEPT = {f"--resume {{}} {flag}": flag.split()[0][2:].replace("-", "_") for flag in CHANGED}
KEPT |= {f"--output-dir {{}}{path}": "--output-dir" for path in ("", "/args.json/run")}


@pytest.mark.parametrize("flags", KEPT)
def test_a_finished_run_is_kept_as_it_is(flags, script, finished):
    before, own = content(finished), [] if "--resume" in flags else FLAGS
    line = one_line(attempt(script, *own, *flags.format(finished).split()))
    assert KEPT[flags] in line and content(finished) == before


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_resume_of_no_run(folder, script):
    assert f"--resume {folder} is" in one_line(attempt(script, "--resume", folder))
    assert not (script.parent / "runs").exists()


OLDER = '{"grpo": {"sum": 1}}'  # a flag that is no more


@pytest.mark.parametrize("saved", ['{"rloo": {}, "data": ""}', OLDER, "", "[]"])
def test_resume_of_what_this_script_did_not_write(saved, script, tmp_path):
    (tmp_path / "args.json").write_text(saved)
    line = one_line(attempt(script, "--resume", tmp_path))
    assert f"--resume {tmp_path} is not the folder of a run of grpo.py" in line


def test_a_data_file_that_changed_before_a_resume(script, tmp_path):
    data = write(tmp_path / "own.jsonl", sums(20))
    flags = [*FLAGS, "--model", TINY / "model", "--dataset", data, "--output-dir", tmp_path / "run"]
    run(script, *flags)
    write(data, [*sums(19), {"question": "7+7=?", "answer": "15"}])  # a row that is in no split
    run(script, "--resume", tmp_path / "run", "--steps", 3)
    write(data, [{"question": "7+7=?", "answer": "15"}, *sums(19)])
    before = content(tmp_path / "run")
    line = one_line(attempt(script, "--resume", tmp_path / "run", "--steps", 4))
    assert "--resume" in line and "problems" in line
    assert content(tmp_path / "run") == before


def test_two_runs_that_start_in_one_folder(script, tmp_path):
    others = [copy(tmp_path / str(number), "grpo", EASY) for number in (0, 1)]
    started = [start(other, *FLAGS, "--output-dir", tmp_path / "run") for other in others]
    ended = [finish(other, run) for other, run in zip(others, started, strict=True)]
    done, lost = sorted(ended, key=lambda each: each.returncode)
    assert done.returncode == 0 and "--output-dir" in one_line(lost)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]


def test_ctrl_c_says_how_to_go_on(tmp_path):
    script = copy(tmp_path, "grpo", EASY)
    started = start(script, *FLAGS, "--steps", 500, "--output-dir", tmp_path / "run")
    deadline = time.time() + 100
    while not (tmp_path / "run/metrics.jsonl").exists() and time.time() < deadline:
        time.sleep(0.05)
    os.kill(started[0].pid, signal.SIGINT)
    done = finish(script, started)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "--resume" in done.stderr
    run(script, "--resume", tmp_path / "run", "--steps", 1)


# --------------------------------------- Reward and engine ---------------------------------------
@pytest.mark.parametrize("line", ["return 1 / len(completion)", "exit()", "sys.exit(0)"])
def test_a_reward_that_raises_shows_where(line, tmp_path):
    script = copy(tmp_path, "grpo", (EASY[0], line))
    done = attempt(script, *FLAGS, "--output-dir", tmp_path / "run")
    assert done.returncode == 1 and line in done.stderr
    assert str(script) in done.stderr and not (tmp_path / "run").exists()


SYNC = "        self.model.load_state_dict(dict(weights))\n"
OTHER = "        self.model.load_state_dict({k: v * 1.2 for k, v in weights})\n"
FAST = ["--learning-rate", 0.03, "--warmup-steps", 0]


# The second from step 0, where every group is uniform.
WRONG_ENGINES = [(FAST, EASY[1], "        pass\n"), ([], "return 0.0", OTHER)]


@pytest.mark.parametrize("flags, reward, sync", WRONG_ENGINES)
def test_an_engine_with_other_weights_is_stopped(flags, reward, sync, tmp_path):
    script = copy(tmp_path, "grpo", (EASY[0], reward), (SYNC, sync))
    done = attempt(script, *FLAGS, *flags, "--output-dir", tmp_path / "run")
    assert "--mismatch-limit" in one_line(done)
    assert not (tmp_path / "run/model").exists()


# -------------------------------------------- Trackers -------------------------------------------
TRACKER = """
import json
def init(project, name, config): note("init", name, config["steps"])
def log(row, step): note("log", row, step)
def finish(): note("finish")
def note(*what): open("tracked.jsonl", "a").write(json.dumps(what) + chr(10))
"""


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_metrics(name, tmp_path):
    (tmp_path / f"{name}.py").write_text(TRACKER)
    script = copy(tmp_path, "grpo", EASY)
    flags = [*FLAGS, "--track", name, "--output-dir", "run"]
    run(script, *flags, processes=2, env={"PYTHONPATH": str(tmp_path)})
    first, *rows, last = read_jsonl(tmp_path / "tracked.jsonl")
    assert first == ["init", "run", 2] and last == ["finish"]
    assert rows == [["log", row, row["step"]] for row in read_jsonl(tmp_path / "run/metrics.jsonl")]
