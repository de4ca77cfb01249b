"""The reward, the reading of the data's answers, and a reward's misuse; the six have one text."""

import json
import math
import time

import datasets
import pytest
from conftest import TINY

import common
import grpo

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72"
# {answer: (completions that score 1, completions that score 0)}
CASES = {
    r"\frac{3}{4}": ([r"\boxed{\frac{3}{4}}"], [r"\boxed{4}"]),  # not cut at the first brace
    "1/2": ([r"\boxed{\frac{1}{2}}"], []),
    r"\frac{1}{2}": ([r"\boxed{0.5}"], []),
    r"\frac{1}{3}": ([], [r"\boxed{3}"]),
    r"3\sqrt{13}": ([r"\boxed{3\sqrt{13}}"], ["13"]),
    r"(3,\pi/2)": ([r"\boxed{(3,\frac{\pi}{2})}"], [r"\boxed{2}"]),
    "24": ([r"\boxed{24\text{ cm}^2}"], []),
    "10080": ([r"\boxed{10,\!080}"], []),
    r"10,\!080": ([r"\boxed{10080}"], [r"\boxed{80}"]),
    "1234.5": (["$1,234.50"], []),
    "1000": (["1,000"], []),
    "$70,000": (["#### 70000"], []),
    "-5": (["#### -5", "#### \N{MINUS SIGN}5"], ["#### 5", "3-5"]),
    "-2": (["I think 3-5 = -2"], []),
    "17": (["The answer is 17."], []),
    "7": ([], ["The answer is 17."]),
    "2": (["#### 1\n#### 2"], []),
    # The last one counts, and nothing before it, LaTeX or boxed.
    "1": ([], ["#### 1\n#### 2", "1,000"]),
    "5": (["So $x = 3$, and\n#### 5", r"\boxed{3} #### 5"], ["#### -5", "", "####", "no number"]),
    GSM8K: (["Half of 48 is 24.\n#### 72"], ["#### 24"]),  # not a number on the way
    "0.00001": (["0.00001"], ["#### 5"]),
    "1e-05": ([], ["#### 5"]),
    "43.0": (["#### 43"], []),
    # An answer is not taken for another number.
    "3,4": ([], ["3.4"]),
    "1,2,3": ([], ["1.2"]),
    "1 1/2": ([], ["1"]),
    "2024-01-05": ([], ["2024"]),
    "1 000": ([], ["0"]),
}


@pytest.mark.parametrize("answer", CASES)
def test_reward(answer):
    for score, completions in zip((1.0, 0.0), CASES[answer], strict=True):
        for completion in completions:
            found = grpo.reward("How many?", completion, answer)
            assert found == score and isinstance(found, float), completion


@pytest.mark.parametrize("form", ["#### {}", "The answer is {}.", "{}", r"\boxed{{{}}}"])
@pytest.mark.parametrize("answer", ["72", "-5", "1,000", "0.00001", "10^5", "$5", "12 hours"])
def test_an_answer_as_the_data_has_it_scores_1(form, answer):
    assert grpo.reward("", form.format(answer), answer) == 1.0


SIGNS = [r"\frac{1}{3}", r"3\sqrt{13}", r"(3,\pi/2)", "x+1", "x>3", "x/y"]


@pytest.mark.parametrize("answer", SIGNS)
def test_an_answer_of_signs_scores_1_in_latexs_marks(answer):
    for form in ("#### ${}$", r"\boxed{{{}}}", r"So $\boxed{{{}}}$."):
        assert grpo.reward("", form.format(answer), answer) == 1.0


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


NESTED = {"ground_truth": "34", "style": "rule"}
# (0.00001 is not to be 1e-05, which reads as 5)
ANSWERS = [(0.00001, "0.00001"), (43.0, "43.0"), (1e22, "1" + "0" * 22), (72, "72"), (GSM8K, GSM8K)]


@pytest.mark.parametrize("answer, text", [*ANSWERS, (NESTED, "34")])
def test_an_answer_is_text_that_scores_1(load, tokenizer, answer, text):
    flags = {"answer_field": "answer.ground_truth"} if answer is NESTED else {}
    (problem,) = load({"p": "1+1=?", "answer": answer}, **flags)
    ids = common.encode_prompt(tokenizer, "1+1=?")
    assert problem == {"prompt": "1+1=?", "ids": ids, "answer": text}
    assert grpo.reward("", "#### " + text.split("####")[-1].strip(), problem["answer"]) == 1.0


@pytest.mark.parametrize("field", ["answer", "answer.truth", "reward"])
def test_a_field_that_is_not_there_is_refused_with_the_fields_that_are(load, field):
    with pytest.raises(SystemExit, match=rf"^error: row 0 .*'answer\.ground_truth'.*: '{field}'$"):
        load({"p": "1+1=?", "answer": NESTED}, answer_field=field)


UNUSABLE = [(row, text) for row in (0, 8) for text in (r"\text{even}", "even", "", None)]
UNUSABLE += [(0, True), (0, ["34"]), (0, math.inf)]  # a column is of one type


@pytest.mark.parametrize("row, answer", UNUSABLE)
def test_an_answer_that_cannot_be_used_ends_the_run_with_its_row(load, row, answer):
    words = rf"^error: row {row} .*'answer'.*read_answer cannot use the --answer-field [^\n]*$"
    with pytest.raises(SystemExit, match=words):
        load(*[{"p": "1+1=?", "answer": "2"}] * row, {"p": "2?", "answer": answer})


# ------------------------------------- A reward of one's own -------------------------------------
PROBLEM = {"prompt": "1+1=?", "answer": "2"}


def test_score_hands_over_prompt_completion_and_answer_in_this_order(monkeypatch):
    monkeypatch.setattr(grpo, "reward", lambda *inputs: inputs == ("1+1=?", "x", "2"))
    found = grpo.score([PROBLEM] * 2, ["x", "y"])
    assert found == [1.0, 0.0] and type(found[0]) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.5e38])
def test_a_reward_that_float32_cannot_hold_ends_the_run_and_is_named(value, monkeypatch):
    monkeypatch.setattr(grpo, "reward", lambda *inputs: value if inputs[1] else 0.0)
    with pytest.raises(SystemExit, match=f"'12' for '1\\+1=.' is {value}".replace("e+", "e.")):
        grpo.score([PROBLEM] * 2, ["", "12"])
