"""The field's prompts, from the files that `scripts/fetch_prompts` fetches or that the user has.

Knows nothing of models. A prompt is a chat of one user message, as EAGLE's and SpecExec's evaluations pose them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

GSM8K = "{}\nReason step by step, and end with the answer as a number."
HUMANEVAL = "Complete this Python function. Answer with the whole function.\n\n```python\n{}```"


@dataclass(frozen=True)
class RealPrompt:
    """name: the set's own name for it. text: the user's message."""

    name: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def read_set(name: str, folder: Path) -> list[RealPrompt]:
    """All prompts of a set: `mt_bench`, `humaneval`, `gsm8k`, or the path of a file in MT-Bench's format.

    Those of MT-Bench's format are taken from its categories in turns, so that any first N cover them.
    Raises FileNotFoundError, and ValueError for a file in another format.
    """
    if name == "humaneval":
        return [RealPrompt(each["task_id"], HUMANEVAL.format(each["prompt"])) for each in humaneval_lines(folder)]
    if name == "gsm8k":
        return [RealPrompt(each["id"], GSM8K.format(each["prompt"])) for each in gsm8k_lines(folder)]
    lines = list(_lines(folder / "mt_bench.jsonl" if name == "mt_bench" else Path(name)))
    try:
        categories: dict[str, list[RealPrompt]] = {}
        for each in lines:
            prompt = RealPrompt(str(each["question_id"]), each["turns"][0])
            categories.setdefault(each.get("category", ""), []).append(prompt)
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        raise ValueError(f"{name}: a line needs question_id and turns, as MT-Bench's have ({exc!r})") from exc
    turns = zip_longest(*categories.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def humaneval_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """task_id, prompt, entry_point, canonical_solution, test. Raises FileNotFoundError."""
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def gsm8k_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """id, prompt, expected (a number as text), upstream_answer (with the way there). Raises FileNotFoundError."""
    return _lines(folder / "gsm8k.jsonl")


def _lines(file: Path) -> Iterator[Any]:
    return map(json.loads, file.read_text(encoding="utf-8").splitlines())
