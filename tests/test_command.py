"""The scripts as their users run them: what a run learns, writes and prints, and how one fails."""

import importlib
import importlib.machinery
import inspect
import json
import re
import shutil
import sys
import types

import matplotlib.pyplot as plt
import pytest
import torch
from conftest import ROOT, TINY, read_jsonl, run_script, without_times
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import common

SCRIPTS = ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"]
GROUPED = [name for name in SCRIPTS if name in ("rloo", "grpo", "gspo", "cispo")]
KL_IN_LOSS = [name for name in SCRIPTS if name in ("grpo", "gspo", "cispo")]
# The sampler and the dtype of any machine, so that a repetition has the same numbers.
MACHINE = ["--rollout-engine", "transformers", "--dtype", "float32"]
OWN = ["--model", TINY / "model", *MACHINE, "--max-completion-tokens", 32]  # with one's own data
SMALL = ["--steps", 1, "--prompts-per-step", 2, "--eval-problems", 4]
HEADER = " parameters\n"  # the screen's first line ends so, once the model is loaded


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count, **fields):
    """Problems of this task that are not the built-in ones, as text."""
    return [{"prompt": f"{i}+{i}=?", "answer": str(2 * i), **fields} for i in range(1, count + 1)]


def call(script, *flags):
    """The script in this process: no seconds of imports. pytest keeps its signal handlers."""
    module = importlib.import_module(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        patch.setattr(common, "catch_signals", list)
        module.main(common.parse_args(module.Args, module.TINY, module.__doc__))


def succeeds(script, *flags, **options):
    """What the script prints when it runs through."""
    done = run_script(script, *flags, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------- Learning -------------------------------------------
@pytest.fixture(scope="module", params=SCRIPTS)
def learned(request, tmp_path_factory):
    """(script, run folder, screen) of 15 steps of the defaults, which is all it takes."""
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    screen = succeeds(request.param, "--steps", 15, *MACHINE, "--output-dir", run_dir)
    return request.param, run_dir, screen


def test_the_defaults_learn(learned):
    _, run_dir, screen = learned
    rows = read_jsonl(run_dir / "metrics.jsonl")
    accuracy = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    assert sorted(accuracy) == [0, 5, 10, 15]
    assert accuracy[0] < 0.3
    assert accuracy[15] >= 0.9
    trained = [row["reward/mean"] for row in rows[1:]]
    assert sum(trained[-3:]) / 3 > sum(trained[:3]) / 3 + 0.2
    assert f"held-out accuracy {accuracy[0]:.3f} -> {accuracy[15]:.3f}" in screen


def test_what_a_run_writes(learned):
    script, run_dir, _ = learned
    names = {"args.json", "metrics.jsonl", "samples.jsonl", "curves.png", "model", "checkpoints"}
    assert {path.name for path in run_dir.iterdir()} == names
    args = json.loads((run_dir / "args.json").read_text())
    assert args["script"] == script and args["steps"] == 15
    assert args["output_dir"] == str(run_dir)

    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(16))
    always = {"reward/mean", "reward/std", "loss/policy", "policy/entropy", "policy/grad_norm"}
    always |= {"generation/length", "generation/truncated", "engine/mismatch"}
    if script in GROUPED:
        always |= {"reward/uniform_groups"}
    if script in KL_IN_LOSS:
        always |= {"policy/clip_frac"}
    for row in rows[1:]:
        assert always <= {key for key, value in row.items() if isinstance(value, float)}
        assert {key.split("/")[0] for key in row} >= {"time", "throughput"}
        assert "kl/mean" not in row  # there is no reference model
        assert row["engine/mismatch"] < 1e-4  # both compute in float32
    shares = ("reward/mean", "generation/truncated", "reward/uniform_groups", "policy/clip_frac")
    assert all(0 <= row[key] <= 1 for row in rows[1:] for key in shares if key in row)

    samples = read_jsonl(run_dir / "samples.jsonl")
    assert {row["step"] for row in samples} == set(range(1, 16))
    by_prompt = {row["prompt"]: row["answer"] for row in read_jsonl(TINY / "train.jsonl")}
    for row in samples:
        assert set(row) == {"step", "prompt", "answer", "completion", "reward"}
        assert row["answer"] == by_prompt[row["prompt"]]
        assert row["reward"] == (common.final_number(row["completion"]) == int(row["answer"]))
    assert {row["reward"] for row in samples} == {0.0, 1.0}

    assert (run_dir / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = plt.imread(run_dir / "curves.png")
    assert min(picture.shape[:2]) > 200 and picture.std() > 0.05  # it is not blank


def test_what_a_run_shows(learned):
    script, run_dir, screen = learned
    lines = screen.splitlines()
    assert re.fullmatch(rf"{script} +\S*tiny/model, 112,320 parameters", lines[0])
    assert "tiny/train.jsonl: 2,000 problems, and 200 held out" in screen
    assert "transformers (as asked)" in screen and "in each of 15 steps" in screen
    assert "A loss near 0 is no fault" in screen
    first = read_jsonl(TINY / "heldout.jsonl")[0]["prompt"]
    assert sum(repr(first) in line and "->" in line for line in lines) == 4  # each evaluation
    rows = read_jsonl(run_dir / "metrics.jsonl")
    for row in rows[1:]:
        (line,) = [line for line in lines if line.startswith(f"{row['step']:4d}/15 ")]
        assert f"reward {row['reward/mean']:.3f}" in line
        assert f"entropy {row['policy/entropy']:.3f}" in line
    assert lines[-1] == f'AutoModelForCausalLM.from_pretrained("{run_dir / "model"}")'
    assert f"curves: {run_dir / 'curves.png'}" in lines


def test_the_saved_model_is_the_trained_one(learned):
    _, run_dir, _ = learned
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model", padding_side="left")
    problems = read_jsonl(TINY / "heldout.jsonl")
    chats = [[{"role": "user", "content": problem["prompt"]}] for problem in problems]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=32,
    )
    answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], True)
    right = [
        answer.split("####")[-1].strip() == problem["answer"]
        for answer, problem in zip(answers, problems, strict=True)
    ]
    last = read_jsonl(run_dir / "metrics.jsonl")[-1]["eval/accuracy"]
    assert sum(right) / len(right) == pytest.approx(last, abs=0.01)  # a tie may break otherwise


# test_resume.py compares runs of all scripts, to the bit.
@pytest.mark.parametrize("learned", ["grpo"], indirect=True)
def test_a_run_repeats_with_its_seed_only(learned, tmp_path):
    # Three steps are the first three of fifteen, evaluations aside: nothing looks ahead.
    script, run_dir, _ = learned

    def numbers(folder):
        rows = without_times(read_jsonl(folder / "metrics.jsonl"))[:4]
        return [{k: v for k, v in row.items() if k != "eval/accuracy"} for row in rows]

    def samples(folder):
        return [row for row in read_jsonl(folder / "samples.jsonl") if row["step"] <= 3]

    flags = ["--steps", 3, "--eval-problems", 4, *MACHINE, "--output-dir"]
    succeeds(script, *flags, tmp_path / "same")
    call(script, *flags, tmp_path / "other", "--seed", 1)
    assert numbers(tmp_path / "same") == numbers(run_dir)
    assert samples(tmp_path / "same") == samples(run_dir)
    assert numbers(tmp_path / "other")[1:] != numbers(run_dir)[1:]
    prompts = [{row["prompt"] for row in samples(tmp_path / name)} for name in ("same", "other")]
    assert prompts[0] != prompts[1]


# ----------------------------------------- One's own data ---------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_chat_messages_and_the_last_problems_held_out(script, tmp_path, capsys):
    rows = sums(20)
    for row in rows:
        system = {"role": "system", "content": "Add."}
        row["prompt"] = [system, {"role": "user", "content": row["prompt"]}]
    flags = ["--dataset", write_jsonl(tmp_path / "chats.jsonl", rows), "--output-dir", "run"]
    # --eval-problems 1 of 20: the very last one is held out, and shown at the evaluation.
    flags += ["--steps", 1, "--prompts-per-step", 19, "--eval-problems", 1, "--beta", 0.1]
    call(script, *OWN, *flags)
    screen = capsys.readouterr().out
    assert "19 problems, and 1 held out" in screen
    assert "20+20=?" in screen
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples[0]["prompt"] in [row["prompt"] for row in rows[:-1]]
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[1]["kl/mean"] >= 0


def setup_copy(folder, script, reward):
    """A copy of the script and of common.py alone, with another `reward`."""
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    old = inspect.getsource(importlib.import_module(script).reward)
    assert source.count(old) == 1
    source = source.replace(old, reward)
    (folder / f"{script}.py").write_text(source, encoding="utf-8")
    shutil.copy(ROOT / "common.py", folder)
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copied_script_with_an_edited_reward_and_template(script, tmp_path):
    reward = (
        "def reward(prompt, completion, answer):\n"
        '    assert prompt.startswith("Sum: ") and answer.startswith("is ")\n'
        "    return len(completion) / 100\n"
    )
    rows = [{"text": f"{i}+1=?", "target": "is so"} for i in range(8)]
    data = ["--dataset", write_jsonl(tmp_path / "own.jsonl", rows), "--answer-field", "target"]
    data += ["--prompt-field", "text", "--prompt-template", "Sum: {prompt}"]
    flags = [*OWN, *data, *SMALL, "--output-dir", "run"]
    succeeds(script, *flags, cwd=setup_copy(tmp_path, script, reward))
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples
    for row in samples:
        assert re.fullmatch(r"Sum: \d\+1=\?", row["prompt"])
        assert row["reward"] == len(row["completion"]) / 100
    assert not (tmp_path / "run" / "curves.png").exists()  # plot.py was not copied


@pytest.fixture
def reward_model(tmp_path, tokenizer):
    """A folder with a random classifier with one label, and the built-in tokenizer."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    size |= {"num_attention_heads": 2, "vocab_size": len(tokenizer), "num_labels": 1}
    config = LlamaConfig(**size, pad_token_id=tokenizer.pad_token_id)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "scorer")
    tokenizer.save_pretrained(tmp_path / "scorer")
    return tmp_path / "scorer"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reward_model_scores_instead_of_reward(script, tmp_path, reward_model, tokenizer):
    # There is no number in these answers, which `reward` would refuse: it is not to be called.
    data = write_jsonl(tmp_path / "own.jsonl", sums(8, answer="a matter of taste"))
    flags = ["--dataset", data, "--reward-model", reward_model, *SMALL]
    call(script, *OWN, *flags, "--output-dir", tmp_path / "run")
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    model = LlamaForSequenceClassification.from_pretrained(reward_model)
    for row in samples[:4]:
        # The completion is decoded without its special tokens, and ended again.
        text = f"<|user|>{row['prompt']}<|assistant|>{row['completion']}<|end|>"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            score = model(input_ids=ids).logits.item()
        assert row["reward"] == pytest.approx(score, abs=1e-5)
    assert len({row["reward"] for row in samples}) > 1


# ------------------------------------------ What fails ------------------------------------------
def fails(script, *flags, before_the_model=True):
    """The one line that the script ends with when it refuses to run."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        if before_the_model:
            patch.setattr(common, "load_model", lambda *_: pytest.fail("a model was loaded"))
        call(script, *flags)
    message = ended.value.code  # a text is printed to stderr, with exit status 1
    assert isinstance(message, str) and message.startswith("error: ")
    assert "\n" not in message
    return message


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """runs/ is made in the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", 0),
        ("--temperature", -1),
        ("--learning-rate", "nan"),
        ("--learning-rate", -1e-4),
        ("--beta", -0.1),
        ("--beta", "inf"),
        ("--steps", 0),
        ("--prompts-per-step", 0),
        ("--max-completion-tokens", 0),
        ("--tokens-per-micro-batch", -5),
        ("--eval-every", 0),
        ("--prompt-template", "no braces"),
    ],
)
def test_a_value_that_is_no_use(script, flag, value):
    assert f"{flag} " in fails(script, f"{flag}={value}")


@pytest.mark.parametrize("script", GROUPED)
def test_a_group_of_one(script):
    assert "--group-size" in fails(script, "--group-size", 1)


@pytest.mark.parametrize("script", [*KL_IN_LOSS, "ppo"])
def test_minibatches_that_do_not_divide(script):
    message = fails(script, "--minibatches", 3, "--prompts-per-step", 4, "--group-size", 4)
    assert "--minibatches 3" in message and "16" in message


@pytest.mark.parametrize("script", KL_IN_LOSS)
def test_k1_in_the_loss(script):
    assert "--kl-estimator k1" in fails(script, "--kl-estimator", "k1", "--beta", 0.1)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "data.jsonl"),
        ('{"prompt": "1+1=?", "answer": "2"}\n', "--dataset"),  # none is left to train on
        ('{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?", \n', "data.jsonl line 2"),
        ("[1, 2]\n", "data.jsonl line 1"),
        ('{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?"}\n', "--answer-field"),
        ('{"promt": "1+1=?", "answer": "2"}\n', "--prompt-field"),
        ('{"prompt": null, "answer": "2"}\n{"prompt": "1", "answer": "2"}\n', "line 1"),
        ('{"prompt": 12, "answer": "2"}\n{"prompt": "1", "answer": "2"}\n', "line 1"),
        ('{"prompt": "1", "answer": "none"}\n{"prompt": "1", "answer": "2"}\n', "'none'"),
    ],
)
def test_data_that_is_not_to_be_used(script, tmp_path, text, said):
    if text is not None:
        (tmp_path / "data.jsonl").write_text(text)
    assert said in fails(script, *OWN, "--dataset", tmp_path / "data.jsonl")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_prompt_that_is_too_long(script, tmp_path):
    rows = [*sums(20), {"prompt": "1+" * 50 + "1=?", "answer": "51"}]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    message = fails(script, *OWN, "--dataset", data, "--max-prompt-tokens", 100)
    # 103 characters are as many tokens, and the template adds <|user|> and <|assistant|>.
    assert (
        "'1+1+" in message and "105 tokens" in message and "--max-prompt-tokens is 100" in message
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_output_folder_in_use(script, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    message = fails(script, "--output-dir", tmp_path / "run")
    assert str(tmp_path / "run") in message and "--output-dir" in message
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_refused_run_leaves_its_folder_free(script, tmp_path):
    flags = ["--dataset", TINY / "train.jsonl", "--output-dir", tmp_path / "run"]
    fails(script, "--model", tmp_path / "nowhere", *flags)
    assert "not an empty" not in fails(script, "--model", tmp_path / "nowhere", *flags)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_folder_that_is_none(script, tmp_path):
    flags = ["--dataset", TINY / "train.jsonl", "--output-dir"]
    message = fails(script, "--model", tmp_path / "nowhere", *flags, "one")
    assert "--model" in message and "nowhere" in message
    for path in (TINY / "model").iterdir():
        if "token" not in path.name:
            (tmp_path / "model").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "model")
    message = fails(script, "--model", tmp_path / "model", *flags, "two")
    assert "--model" in message and "tokenizer" in message


@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_that_were_cut_off(script, tmp_path):
    shutil.copytree(TINY / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    flags = ["--model", tmp_path / "model", "--dataset", TINY / "train.jsonl"]
    assert "--model" in fails(script, *flags, before_the_model=False)


def test_a_refused_run_leaves_no_folder(tmp_path):
    shutil.copytree(TINY / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    flags = ["--model", tmp_path / "model", "--dataset", TINY / "train.jsonl"]
    result = run_script("grpo", *flags, "--output-dir", tmp_path / "run")
    assert result.returncode == 1 and result.stderr.startswith("error: --model")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_vllm_that_does_not_import(script, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text('raise ImportError("libcuda is missing")')
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    message = fails(script, "--rollout-engine", "vllm")
    assert "--rollout-engine vllm" in message and "libcuda is missing" in message


@pytest.mark.parametrize("script", SCRIPTS)
def test_resuming_nothing(script, tmp_path):
    assert "--resume" in fails(script, "--resume", tmp_path / "nothing")
    saved = {"script": script, "steps": 3}
    (tmp_path / "args.json").write_text(json.dumps({**saved, "script": "other"}))
    assert f"is not a run of {script}.py" in fails(script, "--resume", tmp_path)
    (tmp_path / "args.json").write_text('{"script"')
    assert "--resume" in fails(script, "--resume", tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, torch.ones(2)])
def test_a_reward_that_is_no_number(script, tmp_path, monkeypatch, value):
    # An empty completion, which is tried first, scores 0: the samples show the fault.
    def reward(prompt, completion, answer):
        return value if completion else 0.0

    monkeypatch.setattr(importlib.import_module(script), "reward", reward)
    message = fails(script, *SMALL, *MACHINE, before_the_model=False)
    prompt = read_jsonl(TINY / "heldout.jsonl")[0]["prompt"]
    assert repr(prompt) in message
    assert f"the reward is {value!r}, not a finite number" in message


# Two as processes: what is on the screen, and the exit status.
def refused(done):
    """The last line on stderr of a run that ended with an error, and only that."""
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert HEADER not in done.stdout
    return lines[-1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_that_does_not_exist_as_a_process(script):
    flags = ["--model", "nobody/nothing", "--dataset", TINY / "train.jsonl"]
    message = refused(run_script(script, *flags))
    assert "--model" in message and "nobody/nothing" in message


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reward_that_raises_as_a_process(script, tmp_path):
    reward = "def reward(prompt, completion, answer):\n    return 1 / len(completion)\n"
    folder = setup_copy(tmp_path, script, reward)
    flags = [*OWN, "--dataset", TINY / "train.jsonl", *SMALL]
    message = refused(run_script(script, *flags, cwd=folder))
    lines = (folder / f"{script}.py").read_text().splitlines()
    number = lines.index("    return 1 / len(completion)") + 1
    assert f"ZeroDivisionError at {script}.py line {number}: division by zero" in message


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rollout-engine", "sglang"], ["--rollout-engine", "vllm"]),
        (["--group-sise", "4"], ["--group-sise"]),
        (["--steps", "many"], ["--steps", "many"]),
    ],
)
def test_flags_that_do_not_parse(script, capsys, flags, named):
    with pytest.raises(SystemExit) as ended:
        call(script, *flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(word in error for word in named)


# ------------------------------------------- Tracker -------------------------------------------
class Tracker(types.ModuleType):
    """What wandb and trackio have in common, keeping what it is sent."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)  # as of what was imported
        self.config, self.rows, self.finished = None, [], False

    def init(self, project, name, config):
        self.config = config

    def log(self, row, step):
        self.rows.append({**row, "step": step})

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_metrics(name, tmp_path, monkeypatch):
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    run_dir = tmp_path / "run"
    call("grpo", *SMALL, *MACHINE, "--steps", 2, "--track", name, "--output-dir", run_dir)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert tracker.rows == [{k: v for k, v in row.items() if v is not None} for row in rows]
    assert tracker.config["steps"] == 2 and tracker.finished


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)  # import raises ImportError
    flags = [*SMALL, *MACHINE, "--track", "trackio", "--output-dir", tmp_path / "run"]
    assert "pip install trackio" in fails("grpo", *flags)
