"""Judging answers: HumanEval's by its tests, GSM8K's by its number."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="answers run within the limits of POSIX")

from benchmarks.real.tasks import TASKS, CodeTask, code_of, last_number

START = 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """ The area of a circle. """\n'
TEST = "def check(candidate):\n    assert round(candidate(2), 3) == 12.566\n    assert candidate(0) == 0\n"
PROBLEM = {
    "task_id": "HumanEval/0",
    "prompt": START,
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r ** 2\n",
    "test": TEST,
}
QUESTION = {"id": "g0", "prompt": "1,200 + 30?", "expected": "1,230", "upstream_answer": "It is <<1200+30=1230>>1230."}


def prompt_folder(folder: Path) -> Path:
    """One problem of each set."""
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as out:
        out.write(json.dumps(PROBLEM) + "\n")
    (folder / "gsm8k.jsonl").write_text(json.dumps(QUESTION) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def code_task(tmp_path: Path) -> CodeTask:
    (task,) = TASKS["humaneval"](prompt_folder(tmp_path))
    assert isinstance(task, CodeTask)
    return task


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("    return 1\n", "    return 1\n"),
        ("Here:\n```python\ndef area(r):\n    return 1\n```\nDone.", "def area(r):\n    return 1\n"),
        ("```\nx = 1\n```\n```py\ndef area(r): return 1\n```", "def area(r): return 1\n"),
        ("```python\nx = 1\n```\n```python\nprint(area(1))\n```", "x = 1\n"),
        ("```python\ndef area(r):\n    return 1", "def area(r):\n    return 1"),
        ("```python\ndef area_2(r): ...\n```\n```python\ndef area(r): ...\n```", "def area(r): ...\n"),
        ("1. So:\n   ```python\n    return 1\n   ```", "    return 1\n"),
        ("Use `area` and ```x```.", "Use `area` and ```x```."),
    ],
)
def test_code_is_taken_from_a_reply(text: str, code: str) -> None:
    assert code_of(text, "area") == code


@pytest.mark.parametrize(
    "text",
    [
        PROBLEM["canonical_solution"],
        "```python\ndef area(r):\n    return math.pi * r * r\n```",
        "```python\ndef area(r):\n    return math.pi * half(2 * r * r)\n\nif __name__ == '__main__':\n    1 / 0\n```",
    ],
    ids=["body", "function", "helper of the prompt"],
)
def test_a_right_answer_passes(code_task: CodeTask, text: str) -> None:
    assert code_task.failure_of(text) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```python\ndef area(r):\n    return r\n```", "AssertionError"),
        (
            "```python\ndef other(r):\n    return math.pi * r * r\n```",
            "TypeError",
        ),  # the prompt's function returns None
        ("    return math.pi * r * r\n\n\nimport os\nos._exit(0)", "exited before its end"),
        ("I cannot do that.", "SyntaxError"),
        ("", "TypeError"),
    ],
)
def test_a_wrong_answer_fails(code_task: CodeTask, text: str, reason: str) -> None:
    assert code_task.failure_of(text).startswith(reason)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 18.", "18"),
        ("3 apples and 4 pears", "4"),
        ("= $1,234,567.50.", "1234567.5"),
        ("costs $.50", "0.5"),
        ("1,200 and 3, 45", "45"),
        ("**-7** degrees", "-7"),
        ("a loss of -$20", "-20"),
        ("12-5", "5"),
        ("x = \N{MINUS SIGN}3", "-3"),
        (r"\boxed{18.00}", "18"),
        ("12,34", "34"),
        ("#### 1230", "1230"),
    ],
)
def test_the_last_number_counts(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_a_question_is_judged_by_its_number(tmp_path: Path) -> None:
    (task,) = TASKS["gsm8k"](prompt_folder(tmp_path))
    assert task.reference == "It is 1230."
    assert task.failure_of("1200 + 30 = $1,230.00, the sum") == ""
    assert task.failure_of("1200 + 30 = 1,231") == "1231 is not 1230"
    assert task.failure_of("no idea") == "None is not 1230"


def test_a_reference_without_a_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(QUESTION | {"expected": "many"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="'many' is no number"):
        TASKS["gsm8k"](tmp_path)
