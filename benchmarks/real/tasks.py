"""Prompts whose answers can be judged: HumanEval by the set's own tests, GSM8K by its number.

Knows nothing of models. An answer is the whole text of a chat's reply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Protocol

from .prompts import GSM8K, HUMANEVAL, RealPrompt, gsm8k_lines, humaneval_lines
from .sandbox import failure_of

FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)  # the last may be cut off
NUMBER = re.compile(r"(?:(?<![\w)])[-\N{MINUS SIGN}])?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
CALCULATION = re.compile(r"<<.*?>>")  # GSM8K's notes for a calculator


class Task(Protocol):
    """A prompt with a reference answer."""

    @property
    def prompt(self) -> RealPrompt: ...

    @property
    def reference(self) -> str:
        """The set's own answer, for ROUGE-L."""

    def answer_of(self, text: str) -> str:
        """The part of a text that is compared with the reference."""

    def failure_of(self, text: str) -> str:
        """Why a text does not solve the task; "" if it does."""


@dataclass(frozen=True)
class CodeTask:
    """A function to complete. start: its imports, head and docstring. test: defines `check(candidate)`."""

    prompt: RealPrompt
    start: str
    entry_point: str
    reference: str
    test: str

    def answer_of(self, text: str) -> str:
        return code_of(text, self.entry_point)

    def failure_of(self, text: str) -> str:
        """The program is put together as human-eval does: start, answer, test, `check(entry_point)`.

        An answer with the whole function replaces the one of the start, whose imports and helpers remain.
        """
        answer = self.answer_of(text)
        return failure_of(f"{self.start}{answer}\n{self.test}\ncheck({self.entry_point})\n")


@dataclass(frozen=True)
class NumberTask:
    """A text with a question for a number."""

    prompt: RealPrompt
    number: Decimal
    reference: str

    def answer_of(self, text: str) -> str:
        return text

    def failure_of(self, text: str) -> str:
        number = last_number(text)
        return "" if number == self.number else f"{number} is not {self.number}"


def code_of(text: str, entry_point: str) -> str:
    """The fenced block that defines `entry_point`, otherwise the first block, otherwise the whole text."""
    blocks = FENCE.findall(text)
    defining = [block for block in blocks if re.search(rf"^def {re.escape(entry_point)}\b", block, re.MULTILINE)]
    return next(iter((*defining, *blocks)), text)


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without thousands' commas and dollar signs; None if it has none."""
    numbers = NUMBER.findall(text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1]).replace("\N{MINUS SIGN}", "-")) if numbers else None


def humaneval(folder: Path) -> list[Task]:
    """Raises FileNotFoundError."""
    return [
        CodeTask(
            RealPrompt(each["task_id"], HUMANEVAL.format(each["prompt"])),
            each["prompt"],
            each["entry_point"],
            each["canonical_solution"],
            each["test"],
        )
        for each in humaneval_lines(folder)
    ]


def gsm8k(folder: Path) -> list[Task]:
    """Raises FileNotFoundError, and ValueError for a reference without a number."""
    return [
        NumberTask(
            RealPrompt(each["id"], GSM8K.format(each["prompt"])),
            _number(each["expected"]),
            CALCULATION.sub("", each["upstream_answer"]),
        )
        for each in gsm8k_lines(folder)
    ]


def _number(expected: str) -> Decimal:
    if (number := last_number(expected)) is None:
        raise ValueError(f"gsm8k.jsonl: expected {expected!r} is no number")
    return number


TASKS: Mapping[str, Callable[[Path], list[Task]]] = {"humaneval": humaneval, "gsm8k": gsm8k}
