"""A run that is killed with SIGKILL, wherever it is, and resumed, is the run never killed."""

import shutil

import pytest
from conftest import read_jsonl
from runs import EASY, assert_same, attempt, copy, metrics, run, small

KILL = "os.kill(os.getpid(), 9)"
FLAGS = small("grpo", "--steps", 6, "--save-every", 2, "--max-completion-tokens", 16)
# (what is edited, what it becomes): step 4 is saved while checkpoints/000002 is there.
UPDATE = "        # 4. Update.\n"
SAVE = "    dcp.save(trained, checkpoint_id=path)\n"
REMOVE = "        shutil.rmtree(old)\n"
WRITE = '            file.write(json.dumps(line) + "\\n")\n'
MODEL, TOKENIZER = "    save_model(run_dir,", "    tokenizer.save_pretrained(run_dir"
# The tensors are there, what says where they are is not; the rest of a line is not.
UNFINISHED = f"    if step == 4:\n        dcp.FileSystemWriter.finish = lambda *_, **kept: {KILL}\n"
HALF = f"file.write(json.dumps(line)[:99]), file.flush(), {KILL}"
LAST = '            row["step"] == 5 and name =='
PLACES = {
    "before the first checkpoint": (UPDATE, f"        step == 1 and {KILL}\n"),
    "in a later step": (UPDATE, f"        step == 5 and {KILL}\n"),
    "before a checkpoint is whole": (SAVE, UNFINISHED + SAVE),
    "before the old checkpoint is removed": (SAVE, f"{SAVE}    step == 4 and {KILL}\n"),
    "while the old checkpoint is removed": (
        REMOVE,
        f"        (old / '__0_0.distcp').unlink(), step == 4 and {KILL}\n" + REMOVE,
    ),
    "in a line of the metrics": (WRITE, f'{LAST} "metrics" and ({HALF})\n{WRITE}'),
    "between the two lines": (WRITE, f'{LAST} "samples" and {KILL}\n{WRITE}'),
    "before the model is saved": (MODEL, f"    {KILL}\n{MODEL}"),
    "while the model is saved": (TOKENIZER, f"    {KILL}\n{TOKENIZER}"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of six steps that nobody killed, beside its script."""
    script = copy(tmp_path_factory.mktemp("whole"), "grpo", EASY)
    run(script, *FLAGS, "--output-dir", script.parent / "whole")
    return script.parent / "whole"


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_resumed(place, whole):
    folder = whole.parent / place.replace(" ", "-")
    script = copy(whole.parent, "grpo", EASY, PLACES[place])
    assert attempt(script, *FLAGS, "--output-dir", folder).returncode == -9
    copy(whole.parent, "grpo", EASY)
    run(script, "--resume", folder)
    assert_same(folder, whole)
    assert [path.name for path in folder.glob("checkpoints/*")] == ["000006"]


def test_half_a_character_of_a_killed_run_is_cut_off(whole, tmp_path):
    folder, script = shutil.copytree(whole, tmp_path / "run"), copy(whole.parent, "grpo", EASY)
    with open(folder / "samples.jsonl", "ab") as file:
        file.write(b'{"step": 7, "prompt": "\xe2\x88')
    run(script, "--resume", folder)
    assert_same(folder, whole)


def test_a_finished_run_goes_on(whole, tmp_path):
    folder, script = shutil.copytree(whole, tmp_path / "run"), copy(whole.parent, "grpo", EASY)
    flags = ["--steps", 7, "--eval-every", 1, "--save-every", 9, "--micro-batch-size", 16]
    run(script, "--resume", folder, *flags)
    rows = metrics(folder)
    assert rows[:6] == metrics(whole)[:6] and len(rows) == 8
    assert "eval/accuracy" in rows[6] and "loss/policy" in rows[6]
    assert [row["step"] for row in read_jsonl(folder / "samples.jsonl")] == list(range(8))
    assert [path.name for path in folder.glob("checkpoints/*")] == ["000007"]
