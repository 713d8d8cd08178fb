"""`offspec run --num-answers`: several answers to one prompt, as text or as a list of JSON objects."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from offspec import AUTO_TEXTS, SamplingParams, SpeculationParams

from .answers import interrupted
from .terminal import as_shown, first_pass_shown

if TYPE_CHECKING:
    from offspec import Engine, Prompt, Step


@dataclass(frozen=True)
class AnswerFlags:
    """number: of answers to the prompt. max_texts: of them under way; None is AUTO_TEXTS."""

    number: int
    max_texts: int | None = None

    @property
    def num_texts(self) -> int:
        """Answers under way at a time."""
        return min(self.number, self.max_texts or AUTO_TEXTS)

    def check(self, params: SamplingParams, *, is_file: bool) -> None:
        """Raises click.UsageError where several answers make no sense. is_file: of many prompts."""
        if self.number == 1:
            return
        if is_file:
            raise click.UsageError("--num-answers needs one prompt, not a .jsonl file; repeat its lines instead.")
        if params.temperature == 0:
            raise click.UsageError("At --temperature 0 all answers are equal; raise it, or omit --num-answers.")


class Printer:
    """Prints the steps of several answers, one answer after the other.

    The first one that has not ended appears as it is accepted, the others when their turn comes.
    """

    def __init__(self, number: int) -> None:
        self._held: list[deque[Step]] = [deque() for _ in range(number)]
        self._index, self._shown = 0, ""  # of the answer whose turn it is: the end of what was printed

    def __call__(self, index: int, step: Step) -> None:
        self._held[index].append(step)
        while self._index < len(self._held) and self._held[self._index]:
            self._print(self._held[self._index].popleft())
        sys.stdout.flush()

    def _print(self, step: Step) -> None:
        if not self._shown:
            above = "\n" if self._index else ""
            self._shown = f"=== answer {self._index + 1} of {len(self._held)}, seed {step.stats.seed} ===\n"
            sys.stdout.write(above + self._shown)
        sys.stdout.write(as_shown(step.text))
        self._shown = step.text or self._shown
        if step.finish_reason is not None:
            sys.stdout.write("" if self._shown.endswith("\n") else "\n")
            self._index, self._shown = self._index + 1, ""


def answer_several(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    speculation: SpeculationParams,
    flags: AnswerFlags,
    *,
    quiet: bool,
    seen: Callable[[int, Step], None] = lambda index, step: None,
) -> list[list[Step]]:
    """The steps of each answer that has begun. seen: gets each answer's index and step.

    If Ctrl-C stops them, each unfinished answer ends with an empty step, INTERRUPTED.
    """
    answers: list[list[Step]] = [[] for _ in range(flags.number)]

    def add(index: int, step: Step) -> None:
        answers[index].append(step)
        seen(index, step)

    pairs = engine.generate_answers(prompt, flags.number, params, speculation, max_texts=flags.num_texts)
    try:
        for index, step in first_pass_shown(engine, pairs, quiet=quiet):
            add(index, step)
    except KeyboardInterrupt:
        if not any(answers):
            raise
        for index, steps in enumerate(answers):
            if steps and steps[-1].finish_reason is None:
                add(index, interrupted(steps[-1]))
    return [steps for steps in answers if steps]


def describe_answers(answers: Sequence[Sequence[Step]], seconds: float) -> str:
    """The statistics of several answers as text. seconds: of all of them together."""
    ends = [steps[-1] for steps in answers]
    stats = [last.stats for last in ends]
    num_tokens, num_passes = sum(s.num_tokens for s in stats), sum(s.num_passes for s in stats)
    ended = ", ".join(f"{count} {reason}" for reason, count in Counter(last.finish_reason for last in ends).items())
    return (
        f"answers   {len(ends)} ({ended}), {num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s together, "
        f"{num_tokens / num_passes:.2f} tokens per pass of an answer\n"
        f"prompt    {stats[0].num_prompt_tokens} tokens, first text after {stats[0].ttft_s:.2f} s; tokens of it that "
        f"the answers scored: {sum(s.num_prefilled_tokens for s in stats)}"
    )
