"""Answers to prompts: as JSON objects, as texts one after the other, and in figures; of many that share passes."""

from __future__ import annotations

import sys
import time
from collections import Counter, abc, deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from offspec import SpeculationParams
from offspec.errors import OffspecError

from .batch import Answer, Asked, TokenIds, Turns
from .reasoning import reader_of, thinking_first
from .terminal import as_shown

if TYPE_CHECKING:
    from offspec import Engine, Prompt, SamplingParams, Sequence, Step
    from offspec.text.tokenizer import Tokenizer

INTERRUPTED = "interrupted"  # the finish_reason of a text that Ctrl-C stopped
ToPrompt = Callable[["Tokenizer", str | Turns | TokenIds], "Prompt"]


def answer_of(
    engine: Engine, prompt_ids: abc.Sequence[int], steps: abc.Sequence[Step], params: SamplingParams
) -> Answer:
    """The answer of a request that has ended. Under a constraint, the thinking before it is apart."""
    last, looked_up, text = steps[-1], _looked_up(steps), "".join(step.text for step in steps)
    thought, reader = "", reader_of(engine, prompt_ids, params)
    if reader is not None:
        thought, text = reader.push(text, is_end=True)
    return {
        "model": engine.name,
        "draft": engine.draft_name,
        "prompt_token_ids": list(prompt_ids),
        "token_ids": [token for step in steps for token in step.token_ids],
        "text": text,
        **({"reasoning_content": thought} if thought else {}),
        "finish_reason": last.finish_reason,
        "seed": last.stats.seed,
        "stats": last.stats.as_dict(),
        **({"looked_up": looked_up} if engine.lookup_index is not None else {}),
    }


def _looked_up(steps: abc.Sequence[Step]) -> list[dict[str, object]]:
    """Accepted tokens that files for lookup have: the place of the first in the answer, their number, file, offset."""
    lookups, first = list[dict[str, object]](), 0
    for step in steps:
        if step.looked_up is not None:
            lookups.append({"first_token": first, **asdict(step.looked_up)})
        first += len(step.token_ids)
    return lookups


def interrupted(last: Step) -> Step:
    """An empty step behind `last`, which ends its text with INTERRUPTED."""
    step = replace(last, token_ids=[], text="", finish_reason=INTERRUPTED, num_accepted=0, texts=(), looked_up=None)
    return replace(step, logprobs=(), prompt_logprobs=())


class SharedAnswers:
    """Answers of one engine to many prompts, whose texts share passes."""

    def __init__(
        self, load: Callable[[], Engine], to_prompt: ToPrompt, speculation: SpeculationParams, max_texts: int
    ) -> None:
        """load: called when there are prompts. max_texts: the maximum number of texts under way."""
        self._load, self._to_prompt, self._speculation = load, to_prompt, speculation
        self._max_texts = max_texts
        self._ends: list[Step] = []
        self._seconds = 0.0
        self._num_running = 0

    def answers(self, prompts: abc.Sequence[Asked]) -> Generator[tuple[int, Answer | OffspecError], None, None]:
        """Yields the place of each prompt in the list, and its answer or error, in the order in which texts end."""
        return self._answers(self._load(), prompts)

    def _answers(
        self, engine: Engine, prompts: abc.Sequence[Asked]
    ) -> Generator[tuple[int, Answer | OffspecError], None, None]:
        from offspec import Batch

        began = time.perf_counter()
        with closing(Batch(engine.models, self._max_texts)) as batch:
            places: dict[Sequence, tuple[int, SamplingParams]] = {}
            steps: dict[Sequence, list[Step]] = {}
            for place, (prompt, params) in enumerate(prompts):
                try:
                    prompt_tokens = self._to_prompt(engine.tokenizer, prompt)
                    params = thinking_first(params, prompt_tokens)
                    sequence = batch.add(engine.check_request(prompt_tokens, params, self._speculation))
                except OffspecError as exc:
                    yield place, exc
                else:
                    places[sequence], steps[sequence] = (place, params), []
            while not batch.is_idle:
                for sequence, outcome in batch.step():
                    self._num_running, self._seconds = batch.num_running, time.perf_counter() - began
                    if isinstance(outcome, OffspecError):
                        yield places[sequence][0], outcome
                        continue
                    steps[sequence].append(outcome)
                    if outcome.finish_reason is not None:
                        self._ends.append(outcome)
                        place, params = places[sequence]
                        yield place, answer_of(engine, sequence.prompt, steps.pop(sequence), params)

    def progress(self) -> str:
        """How many texts are under way, for a progress line."""
        return f", {self._num_running} at a time" if self._num_running > 1 else ""

    def describe(self) -> str:
        """The statistics of all answers as text."""
        if not self._ends:
            return "batch     0 prompts"
        return totals("batch     {} prompts", self._ends, self._seconds, "including first passes", "a text")


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


def describe_answers(ends: abc.Sequence[Step], seconds: float) -> str:
    """The statistics of several answers to one prompt as text. ends: their last steps. seconds: of all together."""
    stats = [last.stats for last in ends]
    return (
        f"{totals('answers   {}', ends, seconds, 'together', 'an answer')}\n"
        f"prompt    {stats[0].num_prompt_tokens} tokens, first text after {stats[0].ttft_s:.2f} s; tokens of it that "
        f"the answers scored: {sum(s.num_prefilled_tokens for s in stats)}"
    )


def totals(head: str, ends: abc.Sequence[Step], seconds: float, rate_is: str, each: str) -> str:
    """The tokens and passes of several texts. ends: their last steps. rate_is, each: what the figures are of."""
    stats = [last.stats for last in ends]
    num_tokens, num_passes = sum(s.num_tokens for s in stats), sum(s.num_passes for s in stats)
    ended = ", ".join(f"{count} {reason}" for reason, count in Counter(last.finish_reason for last in ends).items())
    return (
        f"{head.format(len(ends))} ({ended}), {num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s {rate_is}, "
        f"{num_tokens / num_passes:.2f} tokens per pass of {each}"
    )
