"""The README's guided tour, the diffs of neighbours: `python tests/tour.py` writes it there.

A test compares what stands in the README with the files.
"""

import ast
import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STOPS = [
    (
        "reinforce",
        "rloo",
        "The baseline: from a number for all to the other samples of the prompt.",
    ),
    (
        "rloo",
        "grpo",
        "The std, the old policy with its ratio and clip, the KL from reward to loss.",
    ),
    ("grpo", "gspo", "One ratio for the whole completion."),
    ("grpo", "cispo", "The ratio is a capped weight, and no token loses its gradient."),
    ("grpo", "ppo", "The baseline is learned: a critic, per-token rewards, GAE."),
]
BEGIN, END = "<!-- tour: made by tests/tour.py -->\n", "<!-- end of tour -->"


def code(name):
    """The lines of a script without its module docstring."""
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def tour():
    """The Markdown text of all stops."""
    text = ""
    for first, second, what in STOPS:
        lines = difflib.unified_diff(code(first), code(second), n=0, lineterm="")
        lines = [line for line in lines if line[:3] not in ("---", "+++")]
        lines = ["@@" if line.startswith("@@") else line for line in lines]
        count = sum(line[0] in "+-" for line in lines)
        text += f"\n<details><summary><b>{first} → {second}</b>: {what} ({count} lines)</summary>\n"
        text += "\n```diff\n" + "\n".join(lines) + "\n```\n\n</details>\n"
    return text + "\n"


def replace(readme):
    """The README's text with the tour of the files as they are."""
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + tour() + END + rest.partition(END)[2]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(replace(path.read_text(encoding="utf-8")), encoding="utf-8")
