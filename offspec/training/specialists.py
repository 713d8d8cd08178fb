"""Several trainings of one draft, and the one that fits a prompt (specialised drafters, 2406.16758).

Each file has low-rank additions for the same draft, as `--learn` and `offspec distill --lora` write them. A request
uses those with which the draft predicts the prompt best; or none, where the draft as it came does. The choice costs a
pass of the draft over the end of the prompt for each file. The text does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.decoder import Decoder
from ..model.row_logits import HEAD_ROWS
from .lora import Adapter, CausalTexts, hidden_states

MOST_TOKENS = 256  # of a prompt's end that decide
LEAST_TOKENS = 8  # a shorter prompt changes nothing


@dataclass(frozen=True)
class _Candidate:
    """A file's additions by the names of their matrices, and the draft with them; None is the draft as it came."""

    file: Path | None
    pairs: dict[str, tuple[Tensor, Tensor]]
    trainee: Decoder


class Specialists:
    """The trainings of one draft. file: the one in use; None is the draft as it came."""

    def __init__(self, draft: Decoder, files: Sequence[Path]) -> None:
        """Raises UsageError for a draft with unchangeable weights, and for another draft's file or any other file."""
        self._adapter = Adapter(draft, 1)
        self._candidates = [_Candidate(None, self._adapter.pairs, self._adapter.trainee())]
        for file in files:
            self._adapter.pairs = {}
            self._adapter.load(file)
            self._candidates.append(_Candidate(file, self._adapter.pairs, self._adapter.trainee()))
        self.file: Path | None = None
        self._use(self._candidates[0])

    def choose(self, prompt: Sequence[int]) -> None:
        """Use the training with the lowest loss on the prompt's last tokens. Equal losses: the first one."""
        if len(prompt) < LEAST_TOKENS:
            return
        tokens = torch.tensor(prompt[-MOST_TOKENS:], device=self._adapter.draft.device)
        best = min(self._candidates, key=lambda candidate: self.loss(candidate.trainee, tokens))
        if best.file != self.file:
            self._use(best)

    @staticmethod
    @torch.inference_mode()
    def loss(draft: Decoder, tokens: Tensor) -> float:
        """Mean next-token loss in nats on tokens [T]."""
        token_ids = tokens.clamp(max=draft.config.vocab_size - 1)
        states = draft.normed(hidden_states(draft, token_ids, CausalTexts(draft.device, 1, len(token_ids))))[:-1]
        total = 0.0
        for first in range(0, len(states), HEAD_ROWS):
            rows = slice(first, first + HEAD_ROWS)
            total += float(F.cross_entropy(draft.head(states[rows]), token_ids[1:][rows], reduction="sum"))
        return total / len(states)

    def _use(self, candidate: _Candidate) -> None:
        self._adapter.pairs, self.file = candidate.pairs, candidate.file
        self._adapter.merge()
