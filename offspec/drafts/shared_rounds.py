"""A round of the draft for several texts as one forward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from offspec.scheduler.drafting.drafter import ScoreCall
from offspec.scheduler.pace.shared_pass import SharedPass

from ..model.decoder import CachedDecoder, pass_together
from ..model.memory.draft_window import WindowedText
from ..model.memory.layer_memory import CHUNK_ROWS
from ..model.pass_rows import TextRows
from .recall import RecallingText


class SharedRounds:
    """Scores rounds of several texts, and records their seconds."""

    def __init__(self, shared: SharedPass) -> None:
        self._shared = shared

    def score(self, calls: Sequence[ScoreCall]) -> list[Tensor]:
        """`TreeModel.score` of each call. Texts of one decoder share a forward, unless they replay captured rounds."""
        self._shared.num_drafting = len(calls)
        if len(calls) == 1 and not self._shared.is_shared:
            return [calls[0].score()]
        began = time.perf_counter()
        texts = [_joining(call) for call in calls]
        together = [(call, text) for call, text in zip(calls, texts, strict=True) if text is not None]
        logits = iter(_score_together(together))
        results = [call.score() if text is None else next(logits) for call, text in zip(calls, texts, strict=True)]
        if self._shared.is_shared:
            self._shared.observe_round(sum(call.num_rows for call in calls), time.perf_counter() - began)
        return results


def _joining(call: ScoreCall) -> CachedDecoder | None:
    """The text of a call, if its forward may be shared; None for long chains, and texts with another way to score."""
    if len(call.chain) > CHUNK_ROWS:  # it is arithmetic that takes its time, and hidden states of many rows take memory
        return None
    text: object = call.model.text if isinstance(call.model, RecallingText) else call.model
    if isinstance(text, WindowedText):
        text = text.whole(call.chain)
    is_plain = isinstance(text, CachedDecoder) and type(text).states is CachedDecoder.states
    return text if is_plain and isinstance(text, CachedDecoder) else None


@torch.inference_mode()
def _score_together(calls: Sequence[tuple[ScoreCall, CachedDecoder]]) -> list[Tensor]:
    """The logits of each call. All texts have the same decoder: a draft's."""
    if not calls:
        return []
    rows = [TextRows(call.chain, call.tokens, call.depths, call.parents) for call, _ in calls]
    hidden = pass_together([(text, text_rows) for (_, text), text_rows in zip(calls, rows, strict=True)])
    logits, ends = list[Tensor](), list(accumulate(map(len, rows)))
    for (call, text), begin, end in zip(calls, (0, *ends), ends, strict=False):
        num_before = call.model.num_before if isinstance(call.model, RecallingText) else 0
        states = text.decoder.normed(hidden[max(begin + len(call.chain) - 1 - num_before, begin) : end])
        if isinstance(call.model, RecallingText):
            logits.append(call.model.logits_of(states, is_after_chain=bool(call.chain), num_nodes=len(call.tokens)))
        else:
            logits.append(text.decoder.head(states))
    return logits
