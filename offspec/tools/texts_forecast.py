"""Predicts tokens/s of several texts that share the target's passes: together, and of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..drafts.base import OpenedDraft
from ..errors import MemoryLimitError
from ..planning.draft_forecast import Drafting, RatesOf, predict_drafting
from ..planning.plan import Plan

NUMBERS = (1, 2, 4, 8, 16)  # of texts under way


@dataclass(frozen=True)
class TextsProspect:
    """What passes that `num_texts` texts share are expected to bring, prompts excluded.

    plan: with KV entries for these texts; None if that does not fit in memory. greedy, sampled: the fastest drafting at
    temperature 0 and 1.
    """

    num_texts: int
    plan: Plan | None = None
    greedy: Drafting | None = None
    sampled: Drafting | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of all texts together, at temperature 0; 0 if they do not fit."""
        return self.greedy.tokens_per_s if self.greedy else 0.0

    @property
    def each_tokens_per_s(self) -> float:
        return self.tokens_per_s / self.num_texts

    @property
    def tokens_each(self) -> int:
        """Tokens that a text has KV entries for if all are equally long; longer ones make others wait."""
        return self.plan.reservation.num_tokens // self.num_texts if self.plan else 0

    def as_dict(self) -> dict[str, Any]:
        if self.plan is None or self.greedy is None or self.sampled is None:
            return {"num_texts": self.num_texts, "why_not": "the KV entries do not fit in memory"}
        return {
            "num_texts": self.num_texts,
            "tokens_per_s": self.tokens_per_s,
            "each_tokens_per_s": self.each_tokens_per_s,
            "tokens_each": self.tokens_each,
            "num_resident_layers": len(self.plan.placement.resident),
            "greedy": vars(self.greedy),
            "sampled": vars(self.sampled),
        }


def predict_texts(plan: Plan, draft: OpenedDraft, rates_of: RatesOf, numbers: Iterable[int]) -> list[TextsProspect]:
    """What each number of texts is expected to bring with this draft, in the memory of `plan`."""
    prospects = list[TextsProspect]()
    for number in numbers:
        try:
            with_texts = plan if number == plan.reservation.texts else plan.with_texts(number)
        except MemoryLimitError:
            prospects.append(TextsProspect(number))
            continue
        guessing = draft.guessing(with_texts.placement)
        draftings = [
            predict_drafting(with_texts, guessing, rates_of, greedy=greedy, num_texts=number)
            for greedy in (True, False)
        ]
        prospects.append(TextsProspect(number, with_texts, *draftings))
    return prospects
