"""Sums of two numbers from reasoning-gym, each once, as problems to train on.

pip install reasoning-gym
python benchmarks/sums.py FILE.jsonl
"""

import json
import sys

import reasoning_gym


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/sums.py FILE.jsonl")
    size = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    problems = reasoning_gym.create_dataset("chain_sum", seed=0, size=6000, **size)
    answers = {p["question"]: p["answer"] for p in problems if "+" in p["question"]}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for question, answer in answers.items():
            file.write(json.dumps({"prompt": question, "answer": answer}) + "\n")
    print(f"{len(answers):,} problems in {sys.argv[1]}")


if __name__ == "__main__":
    main()
