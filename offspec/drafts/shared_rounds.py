"""A round of the draft for several texts as one forward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from offspec.scheduler.drafting.drafter import ScoreCall
from offspec.scheduler.pace.shared_pass import SharedPass

from ..model.decoder import SharedForward, pass_together
from ..model.memory.layer_memory import CHUNK_ROWS
from ..model.memory.request_caches import RoundText
from ..model.pass_rows import TextRows


class SharedRounds:
    """Scores rounds of several texts, and records their seconds."""

    def __init__(self, shared: SharedPass) -> None:
        self._shared = shared

    def score(self, calls: Sequence[ScoreCall]) -> list[Tensor]:
        """`TreeModel.score` of each call. Texts of one decoder share a forward, unless they replay captured rounds."""
        self._shared.num_drafting = len(calls)
        began = time.perf_counter()
        results = [calls[0].score()] if len(calls) == 1 else _score_all(calls)
        self._shared.observe_round(sum(call.num_rows for call in calls), time.perf_counter() - began)
        return results


def _score_all(calls: Sequence[ScoreCall]) -> list[Tensor]:
    joining = [_joining(call) for call in calls]
    together = [(call, shared) for call, shared in zip(calls, joining, strict=True) if shared is not None]
    logits = iter(_score_together(together))
    return [call.score() if shared is None else next(logits) for call, shared in zip(calls, joining, strict=True)]


def _joining(call: ScoreCall) -> SharedForward | None:
    """How a call joins others; None for long chains, and texts with another way to score."""
    if len(call.chain) > CHUNK_ROWS:  # it is arithmetic that takes its time, and hidden states of many rows take memory
        return None
    return cast(RoundText, call.model).joining(call.chain)


@torch.inference_mode()
def _score_together(calls: Sequence[tuple[ScoreCall, SharedForward]]) -> list[Tensor]:
    """The logits of each call. All texts have the same decoder: a draft's."""
    if not calls:
        return []
    rows = [TextRows(call.chain, call.tokens, call.depths, call.parents) for call, _ in calls]
    hidden = pass_together([(shared.text, text_rows) for (_, shared), text_rows in zip(calls, rows, strict=True)])
    logits, ends = list[Tensor](), list(accumulate(map(len, rows)))
    for (call, shared), begin, end in zip(calls, (0, *ends), ends, strict=False):
        states = shared.text.decoder.normed(hidden[max(begin + len(call.chain) - 1 - shared.num_before, begin) : end])
        logits.append(shared.logits(states, bool(call.chain), len(call.tokens)))
    return logits
