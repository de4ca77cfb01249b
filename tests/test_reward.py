"""The reward of the built-in scripts, the reading of the data's answers, and a reward's misuse.

The six have one text, so GRPO's is tested.
"""

import json
import math
import time

import datasets
import pytest
from conftest import TINY

import common
import grpo

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72"


@pytest.mark.parametrize(
    "completion, answer, expected",
    [
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}", 1),  # not cut at the first brace
        (r"\boxed{4}", r"\frac{3}{4}", 0),
        (r"\boxed{\frac{1}{2}}", "1/2", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{3}", r"\frac{1}{3}", 0),
        ("13", r"3\sqrt{13}", 0),
        (r"\boxed{3\sqrt{13}}", r"3\sqrt{13}", 1),
        (r"\boxed{2}", r"(3,\pi/2)", 0),
        (r"\boxed{(3,\frac{\pi}{2})}", r"(3,\pi/2)", 1),
        (r"\boxed{24\text{ cm}^2}", "24", 1),
        (r"\boxed{10,\!080}", "10080", 1),
        (r"\boxed{10080}", r"10,\!080", 1),
        (r"\boxed{80}", r"10,\!080", 0),
        ("$1,234.50", "1234.5", 1),
        ("1,000", "1000", 1),
        ("1,000", "1", 0),
        ("#### 70000", "$70,000", 1),
        ("#### -5", "-5", 1),
        ("#### 5", "-5", 0),
        ("#### -5", "5", 0),
        ("#### \N{MINUS SIGN}5", "-5", 1),
        ("I think 3-5 = -2", "-2", 1),
        ("3-5", "-5", 0),
        ("The answer is 17.", "17", 1),
        ("The answer is 17.", "7", 0),
        ("#### 1\n#### 2", "2", 1),
        ("#### 1\n#### 2", "1", 0),  # the last one counts
        ("So $x = 3$, and\n#### 5", "5", 1),  # and nothing before it, LaTeX or boxed
        (r"\boxed{3} #### 5", "5", 1),
        ("Half of 48 is 24.\n#### 72", GSM8K, 1),
        ("#### 24", GSM8K, 0),  # not a number on the way
        ("0.00001", "0.00001", 1),
        ("#### 5", "0.00001", 0),
        ("#### 5", "1e-05", 0),
        ("#### 43", "43.0", 1),
        ("", "5", 0),
        ("####", "5", 0),
        ("no number", "5", 0),
    ],
)
def test_reward(completion, answer, expected):
    found = grpo.reward("How many?", completion, answer)
    assert found == expected and isinstance(found, float)


@pytest.mark.parametrize("form", ["#### {}", "The answer is {}.", "{}", r"\boxed{{{}}}"])
@pytest.mark.parametrize("answer", ["72", "-5", "1,000", "0.00001", "10^5", "$5", "12 hours"])
def test_an_answer_as_the_data_has_it_scores_1(form, answer):
    assert grpo.reward("", form.format(answer), answer) == 1.0


@pytest.mark.parametrize(
    "answer", [r"\frac{1}{3}", r"3\sqrt{13}", r"(3,\pi/2)", "x+1", "x>3", "x/y"]
)
def test_an_answer_of_signs_scores_1_in_latexs_marks(answer):
    for form in ("#### ${}$", r"\boxed{{{}}}", r"So $\boxed{{{}}}$."):
        assert grpo.reward("", form.format(answer), answer) == 1.0


@pytest.mark.parametrize(
    "number, answer",
    [
        ("3.4", "3,4"),  # two numbers
        ("1.2", "1,2,3"),
        ("1", "1 1/2"),
        ("2024", "2024-01-05"),
        ("0", "1 000"),
    ],
)
def test_an_answer_is_not_taken_for_another_number(number, answer):
    assert grpo.reward("", number, answer) == 0.0


@pytest.mark.parametrize("completion, answer", [(r"\boxed{3,4}", "3,4"), ("0.00001", "1e-05")])
def test_an_answer_is_read_or_refused(completion, answer):
    assert not grpo.read_answer(answer) or grpo.reward("", completion, answer) == 1.0


@pytest.mark.parametrize("unit", ["9", "{", r"\boxed{", "####", "1,", "-", "$", "1/", r"\frac{1}"])
def test_five_thousand_repeats_are_read_in_a_second(unit):
    begun = time.process_time()
    assert grpo.reward("", unit * 5000, "7") == 0.0
    assert grpo.reward("", f"#### {unit * 5000}", "7") == 0.0
    assert time.process_time() - begun < 2  # of two


WORDS = [r"\text{even}", "even", "yes or no", "null", "", "  ", "#### "]


@pytest.mark.parametrize("answer", [*WORDS, "2024-01-05", "3:30", "12:05 PM"])
def test_words_dates_and_nothing_are_no_answer_to_compare(answer):
    assert grpo.read_answer(answer) == []


# ---------------------------------- Where the answers are read ----------------------------------
@pytest.fixture
def load(tmp_path, monkeypatch, tokenizer):
    """load_problems of grpo.py on a file with these rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def load(*rows, **flags):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        args = grpo.Args(model=str(TINY / "model"), prompt_field="p", **flags)
        return grpo.load_problems(args, tokenizer, str(path), "train")

    return load


@pytest.mark.parametrize(
    "answer, text, flags",
    [
        (0.00001, "0.00001", {}),  # and not 1e-05, which reads as 5
        (43.0, "43.0", {}),
        (1e22, "10000000000000000000000", {}),
        (72, "72", {}),
        (GSM8K, GSM8K, {}),
        ({"ground_truth": "34", "style": "rule"}, "34", {"answer_field": "answer.ground_truth"}),
    ],
)
def test_an_answer_is_text_that_scores_1(load, tokenizer, answer, text, flags):
    (problem,) = load({"p": "1+1=?", "answer": answer}, **flags)
    ids = common.encode_prompt(tokenizer, "1+1=?")
    assert problem == {"prompt": "1+1=?", "ids": ids, "answer": text}
    assert grpo.reward("", "#### " + text.split("####")[-1].strip(), problem["answer"]) == 1.0


REFUSED = r"row 0 .*\'answer\'.*read_answer cannot use"


def test_a_field_that_has_fields_is_refused_with_their_names(load):
    with pytest.raises(SystemExit, match=r"row 0 .*'answer\.ground_truth'.*: 'answer'$"):
        load({"p": "1+1=?", "answer": {"ground_truth": "34"}})


@pytest.mark.parametrize("answer", [r"\text{even}", "", None, True, ["34"], math.inf])
def test_an_answer_that_cannot_be_used_ends_the_run_with_its_row(load, answer):
    with pytest.raises(SystemExit, match=REFUSED) as caught:
        load({"p": "1+1=?", "answer": answer})
    assert "\n" not in str(caught.value)
    if isinstance(answer, str):  # a column is of one type
        with pytest.raises(SystemExit, match=REFUSED.replace("0", "8")):
            load(*[{"p": "1+1=?", "answer": "2"}] * 8, {"p": "2?", "answer": answer})


# ------------------------------------- A reward of one's own -------------------------------------
PROBLEM = {"prompt": "1+1=?", "answer": "2"}


def test_score_hands_over_prompt_completion_and_answer_in_this_order(monkeypatch):
    monkeypatch.setattr(grpo, "reward", lambda *inputs: inputs == ("1+1=?", "x", "2"))
    found = grpo.score([PROBLEM] * 2, ["x", "y"])
    assert found == [1.0, 0.0] and type(found[0]) is float


def test_a_reward_that_exits_is_an_error_and_no_success(monkeypatch):
    monkeypatch.setattr(grpo, "reward", lambda *inputs: exit())
    with pytest.raises(RuntimeError, match="exit"):
        grpo.score([PROBLEM], ["x"])
