"""Two processes train as one does: gradients, metrics, checkpoints, errors and the way out."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, read_jsonl, run_script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import common

SCRIPTS = ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"]
SMALL = "--rollout-engine transformers --prompts-per-step 4 --eval-problems 8 --minibatches 1"

# Runs the command once per case with rollouts and rewards that are functions of the prompt, and
# writes the gradients of its one update, whole ones, and what else only a process can see.
WORKER = """
import importlib, json, random, sys
from pathlib import Path

import torch

folder, root, *names = sys.argv[1:]
sys.path.insert(0, root)
import common

device = common.start_processes()
common.start_processes = lambda: device
common.save_checkpoint = common.finish_run = lambda *inputs, **options: None


class Engine:
    def __init__(self, *inputs):
        pass

    def sync(self, weights):
        list(weights)

    def sleep(self):
        pass

    def generate(self, prompts, samples, temperature, max_tokens, seed):
        rows = [random.Random(f"{prompt} {i}") for prompt in prompts for i in range(samples)]
        ids = [[row.randrange(6, 80) for _ in range(row.randint(1, 12))] for row in rows]
        return ids, [[-3.0 - row.random() for _ in line] for row, line in zip(rows, ids)]


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def gradients(name, uniform, flags):
    module = importlib.import_module(name)
    module.evaluate = lambda *inputs: 0.0
    common.TransformersEngine = Engine
    half, kept = set(), []
    problems_of_step = common.problems_of_step

    def chosen(train, step, per_step, seed):
        problems = problems_of_step(train, step, per_step, seed)
        half.update(problem["prompt"] for problem in problems[per_step // 2 :])
        return problems

    def reward(prompt, completion, answer):
        if uniform and prompt in half:  # the second process has nothing to train on
            return 1.0
        return float(len(completion) % 3)

    def step(optimizer, closure=None):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept.append([whole(p.grad) for p in parameters])

    common.problems_of_step, module.reward = chosen, reward
    original, torch.optim.AdamW.step = torch.optim.AdamW.step, step
    run = f"{folder}/{name}-{'-'.join(flags)}-{uniform}-{common.world_size()}".replace("--", "")
    sys.argv = [f"{name}.py", *flags, "--output-dir", run, "--rollout-engine", "transformers"]
    sys.argv += "--steps 1 --prompts-per-step 4 --tokens-per-micro-batch 40".split()
    sys.argv += "--mismatch-limit 1000 --max-grad-norm 1e9".split()
    module.main(common.parse_args(module.Args, module.TINY, module.__doc__))
    common.problems_of_step, torch.optim.AdamW.step = problems_of_step, original
    row = json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[-1])
    return kept, {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))}


cases = {}
for name in names:
    fields = importlib.import_module(name).Args.__dataclass_fields__
    group = [flag for flag in ("minibatches", "update_epochs") if flag in fields]
    fixed = [part for flag in group for part in (f"--{flag.replace('_', '-')}", "1")]
    if "value_warmup_steps" in fields:  # or the policy would wait
        fixed += ["--value-warmup-steps", "0"]
    how = ["sequence-sum", "sequence-mean", "token-mean", "constant"]
    if "loss_aggregation" not in fields:
        how = how[:1]
    for aggregation in how:
        given = ["--loss-aggregation", aggregation] if "loss_aggregation" in fields else []
        for uniform in (False, True):
            cases[name, aggregation, uniform] = gradients(name, uniform, [*fixed, *given])
    cases[name, "reference", True] = gradients(name, True, [*fixed, "--beta", "0.1"])

import grpo

seen = {"cases": cases}
mask = torch.ones(1, 5, dtype=torch.bool) if common.rank() == 0 else torch.eye(5)[:1].bool()
values = torch.full((1, 5), 1.0 if common.rank() == 0 else 7.0)
weights = grpo.loss_weights(mask, "token-mean", 5)
seen["loss"] = common.across((values * weights).sum()).item()
kind = grpo.AutoModelForCausalLM
model = common.load_model(kind, f"{root}/tiny/model", device)
seen["tied"] = model.get_input_embeddings().weight is model.get_output_embeddings().weight
optimizer = torch.optim.AdamW(model.parameters())
seen["step"] = common.load_checkpoint(Path(folder, "one"), 99, policy=(model, optimizer))
seen["weights"] = {name: weight.clone() for name, weight in common.full_weights(model)}
seen["moments"] = [whole(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
if common.rank() == 0:
    torch.save(seen, f"{folder}/seen-{common.world_size()}.pt")
common.leave(0, None)
"""


def good(result):
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def copy_script(folder, extra, name="grpo"):
    """A copy of a script, with a few lines before its last two."""
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    end = 'if __name__ == "__main__":\n'
    assert text.count(end) == 1
    (folder / f"{name}.py").write_text(text.replace(end, extra + "\n\n" + end), encoding="utf-8")
    shutil.copy(ROOT / "common.py", folder)
    (folder / "tiny").symlink_to(TINY)


def resume_here(name, *flags):
    """`python name.py flags`, in this process and without the curves."""
    module = importlib.import_module(name)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        patch.setattr(common, "__file__", str(ROOT / "no-plot-here" / "common.py"))
        module.main(common.parse_args(module.Args, module.TINY, module.__doc__))
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run of one process and two steps, saved after each."""
    path = tmp_path_factory.mktemp("processes") / "one"
    flags = [*SMALL.split(), "--steps", 2, "--save-every", 1, "--learning-rate", 1e-3]
    resume_here("grpo", *flags, "--output-dir", path)
    return path


@pytest.fixture(scope="module")
def seen(one):
    """What the worker saw alone, and what two of them saw."""
    folder = one.parent
    (folder / "worker.py").write_text(WORKER)
    for processes in (0, 2):
        good(run_script("worker", folder, ROOT, *SCRIPTS, cwd=folder, processes=processes))
    return [torch.load(folder / f"seen-{count}.pt", weights_only=True) for count in (1, 2)]


@pytest.fixture(scope="module", params=["grpo"])
def learned(request, tmp_path_factory):
    """(script, folder, result) of the command on two processes, for 15 steps."""
    path = tmp_path_factory.mktemp(request.param) / "two"
    flags = ["--rollout-engine", "transformers", "--steps", 15, "--output-dir", path]
    return request.param, path, run_script(request.param, *flags, processes=2)


# ------------------------------------------ Gradients ------------------------------------------
def test_gradients_are_those_of_one_process(seen):
    alone, both = (part["cases"] for part in seen)
    assert alone.keys() == both.keys() and len(alone) >= 5
    for case, (expected, _) in alone.items():
        # One update, of a policy and, in PPO, a critic.
        assert len(expected) == len(both[case][0]) == 1 + (case[0] == "ppo"), case
        for first, second in zip(expected, both[case][0], strict=True):
            largest = max(part.abs().max() for part in first)
            for a, b in zip(first, second, strict=True):
                # Measured: 2e-7 at most, where the largest entry is 0.9.
                assert (a - b).abs().max() <= 1e-5 * largest, case
            assert any(part.abs().max() > 1e-3 for part in first), case


def test_metrics_are_those_of_one_process(seen):
    alone, both = (part["cases"] for part in seen)
    for case, (_, row) in alone.items():
        assert both[case][1] == pytest.approx(row, rel=1e-5, abs=1e-6), case  # float32 sums


def test_loss_counts_tokens_over_the_processes(seen):
    # 5 tokens of loss 1 on one process and 1 token of loss 7 on the other: 12 / 6.
    assert seen[1]["loss"] == pytest.approx(2.0)


# ----------------------------------------- The command -----------------------------------------
def test_two_processes_learn(learned):
    _, path, result = learned
    good(result)
    rows = read_jsonl(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(16))  # one process writes
    assert rows[-1]["eval/accuracy"] >= 0.9  # measured: 1.0
    assert len(read_jsonl(path / "samples.jsonl")) == 15 * 16
    # A second process would say it a second time.
    assert len(re.findall(r"^ *15/15 ", result.stdout, re.MULTILINE)) == 1


def test_saved_model_is_whole_and_tied(learned):
    _, path, result = learned
    good(result)
    saved, first = (load_file(p / "model.safetensors") for p in (path / "model", TINY / "model"))
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in first.items()}
    model = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert accuracy(model) == pytest.approx(read_jsonl(path / "metrics.jsonl")[-1]["eval/accuracy"])


def accuracy(model):
    """Greedy accuracy on the held-out problems, without the project's engines."""
    tokenizer, right = common.load_tokenizer(TINY / "model"), []
    for problem in read_jsonl(TINY / "heldout.jsonl"):
        ids = torch.tensor([common.encode_prompt(tokenizer, problem["prompt"])])
        out = model.generate(ids, do_sample=False, max_new_tokens=32)[0, ids.shape[1] :]
        text = tokenizer.decode(out, skip_special_tokens=True)
        right.append(common.final_number(text) == common.final_number(problem["answer"]))
    return sum(right) / len(right)


def test_embeddings_stay_tied_in_the_shards(seen):
    assert seen[1]["tied"]


def test_short_runs_end_well(tmp_path):
    # What ends a process group at the wrong moment aborts in one of a few runs.
    copy_script(tmp_path, "")
    for number in range(3):
        flags = [*SMALL.split(), "--prompts-per-step", 2, "--group-size", 2, "--steps", 1]
        good(run_script("grpo", *flags, "--output-dir", number, cwd=tmp_path, processes=2))


def test_processes_sample_apart_and_count_together(tmp_path):
    """One problem for both processes, and a reward that is the number of the process."""
    extra = """
def reward(prompt, completion, answer):
    rank = os.environ["RANK"]
    with open(f"rank-{rank}.txt", "a") as file:
        file.write(completion + chr(10))
    return float(rank)
"""
    copy_script(tmp_path, extra)
    problem = json.dumps({"prompt": "7+8-5=?", "answer": "10"}) + "\n"
    (tmp_path / "one.jsonl").write_text(problem)
    (tmp_path / "two.jsonl").write_text(problem * 2)
    flags = [*SMALL.split(), "--model", TINY / "model", "--dataset", "one.jsonl", "--steps", 2]
    flags += ["--eval-dataset", "two.jsonl", "--prompts-per-step", 2, "--group-size", 8]
    flags += ["--max-completion-tokens", 32, "--eval-every", 2, "--output-dir", "run"]
    good(run_script("grpo", *flags, cwd=tmp_path, processes=2))
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for row in rows[1:]:
        assert row["reward/mean"] == 0.5 and row["reward/std"] == 0.5
        assert row["reward/uniform_groups"] == 1.0
        assert row["policy/entropy"] is None  # of no token at all
    assert rows[0]["eval/accuracy"] == rows[2]["eval/accuracy"] == 0.5
    texts = [(tmp_path / f"rank-{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    # Each checks the reward, evaluates one problem, samples 8 twice, and evaluates again.
    assert len(texts[0]) == len(texts[1]) == 19
    assert texts[0][2:10] != texts[1][2:10] and texts[0][10:18] != texts[1][10:18]


def test_a_process_without_held_out_problems(tiny_model, tokenizer, monkeypatch):
    # Fewer problems than processes: some have none, and take part in the mean all the same.
    grpo = importlib.import_module("grpo")
    args = grpo.Args(**grpo.TINY)
    engine = common.TransformersEngine(args, {5}, 0, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(common, "share", lambda problems: [])
    counted = []
    monkeypatch.setattr(common, "across", lambda total, *rest: counted.append(total) or total + 1)
    assert grpo.evaluate(engine, tiny_model, tokenizer, [{}], args, grpo.reward) == 1.0
    assert len(counted) == 1


# ----------------------------------------- Checkpoints -----------------------------------------
def test_checkpoint_of_one_is_read_by_two(one, seen):
    saved = load_file(one / "model" / "model.safetensors")
    assert seen[1]["step"] == 2
    for name, weight in saved.items():
        assert torch.equal(seen[1]["weights"][name], weight), name
    moments = zip(seen[0]["moments"], seen[1]["moments"], strict=True)
    assert all(torch.equal(a, b) and b.abs().max() > 0 for a, b in moments)


def test_run_of_one_goes_on_with_two(one, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(one, path)
    good(run_script("grpo", "--resume", path, "--steps", 4, processes=2))
    assert [row["step"] for row in read_jsonl(path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_checkpoint_of_two_is_read_by_one(learned, tmp_path):
    name, two, _ = learned
    path = tmp_path / "run"
    shutil.copytree(two, path)
    saved = load_file(path / "model" / "model.safetensors")
    before = {}
    problems_of_step = common.problems_of_step

    def look(*inputs):  # the first thing a step does
        before.setdefault("step", inputs[1])
        return problems_of_step(*inputs)

    load = common.load_checkpoint

    def loaded(run_dir, steps, *rest, policy, **others):
        step = load(run_dir, steps, *rest, policy=policy, **others)
        before.update({k: v.clone() for k, v in common.full_weights(policy[0])})
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "problems_of_step", look)
        patch.setattr(common, "load_checkpoint", loaded)
        resume_here(name, "--resume", path, "--steps", 17)
    assert before["step"] == 16
    assert all(torch.equal(before[key], weight) for key, weight in saved.items())
    rows = read_jsonl(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(18))
    assert rows[-1]["eval/accuracy"] >= 0.85  # measured: 1.0 before, and after two steps more


# ------------------------------------------- Errors --------------------------------------------
def test_prompts_that_do_not_divide(tmp_path):
    flags = [*SMALL.split(), "--prompts-per-step", 3, "--output-dir", tmp_path / "run"]
    # What torchrun sets, without torchrun's own lines: nothing is loaded or joined before.
    result = run_script("grpo", *flags, env={"WORLD_SIZE": "2", "RANK": "1"})
    assert result.returncode == 1
    line = "error: --prompts-per-step 3 must divide by the 2 processes"
    assert result.stderr.splitlines() == [line]
    assert not (tmp_path / "run").exists()


RAISES = {
    "reward": """
right = reward


def reward(prompt, completion, answer):
    if completion and os.environ["RANK"] == "1":
        raise ValueError("the second process is out of luck")
    return right(prompt, completion, answer)
""",
    "elsewhere": """
def group_advantages(*inputs):
    if os.environ["RANK"] == "1":
        raise RuntimeError("the second process is out of luck")
    return torch.zeros(inputs[0].shape)
""",
}


@pytest.mark.parametrize("where", RAISES)
def test_one_process_that_fails_ends_the_run(where, tmp_path):
    copy_script(tmp_path, RAISES[where])
    flags = [*SMALL.split(), "--steps", 3, "--output-dir", "run"]
    result = run_script("grpo", *flags, cwd=tmp_path, processes=2, timeout=60)
    assert result.returncode == 1
    assert "the second process is out of luck" in result.stderr
    if where == "reward":
        # The last screen of a terminal.
        assert "the second process is out of luck" in "".join(result.stderr.splitlines()[-24:])


def test_ctrl_c_stops_both(tmp_path):
    # A terminal sends it to torchrun and to both processes; torchrun then sends them SIGTERM.
    path = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", ROOT / "grpo.py"]
    command += [*SMALL.split(), "--steps", 500, "--eval-every", 500, "--output-dir", path]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    for line in process.stdout:
        if line.lstrip().startswith("2/500"):
            os.killpg(process.pid, signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait(60) != 0
    assert f"--resume {path}" in rest
    done = read_jsonl(path / "metrics.jsonl")[-1]["step"]
    assert [p.name for p in (path / "checkpoints").iterdir()] == [f"step-{done:06d}"]
