"""plot.py draws one run into its folder, and averages runs that differ in their seed alone."""

import json
import sys

import matplotlib.pyplot as plt
import pytest

import plot

KEYS = ["reward/mean", "eval/accuracy", "policy/entropy", "critic/explained_variance"]


def write_run(folder, script="grpo", **flags):
    """The folder of a run of five steps, which evaluated in each second."""
    folder.mkdir()
    flags = {"seed": 0, "learning_rate": 1e-4, "output_dir": str(folder), **flags}
    (folder / "args.json").write_text(json.dumps({script: flags, "data": "0"}))
    rows = [{"step": n, **{key: n / 4 for key in KEYS}} for n in range(5)]
    del rows[1]["eval/accuracy"], rows[3]["eval/accuracy"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def draw(monkeypatch, *inputs):
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, inputs)])
    plot.main()


def test_runs_that_differ_in_their_seed_are_one_curve(tmp_path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    assert plot.read_labels(runs) == ["grpo", "grpo"]
    runs += [write_run(tmp_path / "fast", learning_rate=1e-3), write_run(tmp_path / "ppo", "ppo")]
    slow = "grpo learning_rate=0.0001"
    assert plot.read_labels(runs) == [slow, slow, "grpo learning_rate=0.001", "ppo"]


@pytest.mark.parametrize("count, output", [(1, None), (3, None), (1, "mine.png")])
def test_the_picture_is_where_it_is_said_to_be(count, output, tmp_path, monkeypatch, capsys):
    runs = [write_run(tmp_path / str(n), seed=n // 2, script=f"s{n // 2}") for n in range(count)]
    monkeypatch.chdir(tmp_path)
    draw(monkeypatch, *runs, *(["--output", output] if output else []))
    path = tmp_path / (output or ("0/curves.png" if count == 1 else "curves.png"))
    said = capsys.readouterr().out.removeprefix("curves: ").strip()
    assert (tmp_path / said).samefile(path) and len(list(tmp_path.rglob("*.png"))) == 1
    picture = plt.imread(path)
    assert min(picture.shape[:2]) > 200 and picture.std() > 0.05  # it is not blank


def test_a_mean_and_its_range_are_drawn(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    text = (runs[1] / "metrics.jsonl").read_text()
    (runs[1] / "metrics.jsonl").write_text(text.replace('"reward/mean": 1.0', '"reward/mean": 0.0'))
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    plot.draw(runs, tmp_path / "curves.png")
    monkeypatch.undo()
    axes = {axis.get_title(): axis for axis in drawn[0].axes if axis.get_title()}
    assert list(axes) == [plot.PANELS[key] for key in plot.PANELS if key in KEYS]
    (line,) = axes["mean reward of the samples"].get_lines()
    assert list(line.get_ydata()) == [0, 0.25, 0.5, 0.75, 0.5]
    assert list(axes["held-out accuracy (greedy)"].get_lines()[0].get_xdata()) == [0, 2, 4]
    (shade,) = axes["mean reward of the samples"].collections
    assert {tuple(p) for p in shade.get_paths()[0].vertices} >= {(4, 0), (4, 1)}
    plt.close("all")


def test_what_is_no_run_or_half_a_row_is_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "other").mkdir()
    with pytest.raises(SystemExit, match="^error: no metrics in .*other"):
        draw(monkeypatch, tmp_path / "other")
    capsys.readouterr()
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "reward/m')
    draw(monkeypatch, run, tmp_path / "other")
    assert str(tmp_path / "other") in capsys.readouterr().err
    assert [row["step"] for row in plot.read_rows(run)] == [0, 1, 2, 3, 4]
    assert (run / "curves.png").exists() and not list((tmp_path / "other").iterdir())
