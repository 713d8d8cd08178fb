"""Drafting as a sequence of the draft's forwards, so that one forward can serve several texts.

`run_alone` serves one text, `run_together` several: each round of theirs is one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from .drafter import Drafting, ScoreCall

T = TypeVar("T")
ScoreTogether = Callable[[Sequence[ScoreCall]], Sequence[Tensor]]


def run_alone(drafting: Drafting[T]) -> T:
    """Serve one text, and return the generator's result."""
    try:
        call = next(drafting)
        while True:
            call = drafting.send(call.score())
    except StopIteration as end:
        result: T = end.value
        return result


def run_together(draftings: Sequence[Drafting[T]], score: ScoreTogether) -> list[T]:
    """Serve several texts, and return their results. Generators start in order; rounds of all of them are one call."""
    results: dict[int, T] = {}
    calls: dict[int, ScoreCall] = {}
    logits: dict[int, Tensor] = {}

    def advance(text: int) -> None:
        try:
            calls[text] = draftings[text].send(logits[text]) if text in logits else next(draftings[text])
        except StopIteration as end:
            results[text] = end.value

    for text in range(len(draftings)):
        advance(text)
    while calls:
        texts, requests = list(calls), list(calls.values())
        calls.clear()
        logits = dict(zip(texts, score(requests), strict=True))
        for text in texts:
            advance(text)
    return [results[text] for text in range(len(draftings))]
