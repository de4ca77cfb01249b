"""plot.py averages runs that differ in their seed alone, and draws the others apart."""

import json

import pytest
from conftest import ROOT

import plot


def write_run(folder, seed, rate, rewards):
    folder.mkdir()
    args = {"script": "grpo", "seed": seed, "learning_rate": rate, "output_dir": str(folder)}
    (folder / "args.json").write_text(json.dumps(args))
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_seed_is_averaged_and_another_flag_is_named(tmp_path):
    runs = [write_run(tmp_path / str(seed), seed, 1e-4, [0.1, 0.2]) for seed in (0, 1)]
    assert plot.read_labels(runs) == ["grpo", "grpo"]
    runs.append(write_run(tmp_path / "other", 0, 1e-3, [0.1, 0.9]))
    labels = ["grpo learning_rate=0.0001"] * 2 + ["grpo learning_rate=0.001"]
    assert plot.read_labels(runs) == labels


@pytest.mark.parametrize("count", [1, 2])
def test_the_picture_is_drawn_where_it_is_said(count, tmp_path, monkeypatch, capsys):
    runs = [write_run(tmp_path / str(seed), seed, 1e-4, [0.1, 0.2]) for seed in range(count)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["plot.py", *map(str, runs)])
    plot.main()
    path = runs[0] / "curves.png" if count == 1 else tmp_path / "curves.png"
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out == f"curves: {path if count == 1 else path.name}\n"


def test_a_folder_without_metrics_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plot.py", str(tmp_path), str(ROOT / "tests")])
    with pytest.raises(SystemExit, match="^error: no metrics in"):
        plot.main()
