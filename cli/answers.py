"""Answers to prompts as JSON objects: to one prompt, or to many that share the target's passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from offspec import SpeculationParams
from offspec.errors import OffspecError

from .batch import Answer, Asked, TokenIds, Turns
from .reasoning import reader_of, thinking_first

if TYPE_CHECKING:
    from offspec import Engine, Prompt, SamplingParams, Step, Ticket
    from offspec.text.tokenizer import Tokenizer

INTERRUPTED = "interrupted"  # the finish_reason of a text that Ctrl-C stopped
ToPrompt = Callable[["Tokenizer", str | Turns | TokenIds], "Prompt"]


def answer_of(engine: Engine, prompt_ids: Sequence[int], steps: Sequence[Step], params: SamplingParams) -> Answer:
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


def _looked_up(steps: Sequence[Step]) -> list[dict[str, object]]:
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
    """Answers of one engine to many prompts, whose texts share passes.

    ends: the last step of each text. seconds: spent on all of them.
    """

    def __init__(self, engine: Engine, to_prompt: ToPrompt, speculation: SpeculationParams, max_texts: int) -> None:
        """max_texts: the maximum number of texts under way."""
        self._engine, self._to_prompt, self._speculation = engine, to_prompt, speculation
        self._max_texts = max_texts
        self.ends: list[Step] = []
        self.seconds = 0.0
        self._num_running = 0

    def answers(self, prompts: Sequence[Asked]) -> Generator[tuple[int, Answer | OffspecError], None, None]:
        """Yields the place of each prompt in the list, and its answer or error, in the order in which texts end."""
        from offspec import Batch

        engine, began = self._engine, time.perf_counter()
        with closing(Batch(engine.models, self._max_texts)) as batch:
            places: dict[Ticket, tuple[int, SamplingParams]] = {}
            steps: dict[Ticket, list[Step]] = {}
            for place, (prompt, params) in enumerate(prompts):
                try:
                    prompt_tokens = self._to_prompt(engine.tokenizer, prompt)
                    params = thinking_first(params, prompt_tokens)
                    ticket = batch.add(engine.check_request(prompt_tokens, params, self._speculation))
                except OffspecError as exc:
                    yield place, exc
                else:
                    places[ticket], steps[ticket] = (place, params), []
            while not batch.is_idle:
                for ticket, outcome in batch.step():
                    self._num_running, self.seconds = batch.num_running, time.perf_counter() - began
                    if isinstance(outcome, OffspecError):
                        yield places[ticket][0], outcome
                        continue
                    steps[ticket].append(outcome)
                    if outcome.finish_reason is not None:
                        self.ends.append(outcome)
                        place, params = places[ticket]
                        yield place, answer_of(engine, ticket.checked.prompt, steps.pop(ticket), params)

    def progress(self) -> str:
        """How many texts are under way, for a progress line."""
        return f", {self._num_running} at a time" if self._num_running > 1 else ""
