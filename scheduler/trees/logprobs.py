"""Log-probabilities of a text's tokens under the target's own distribution, for those who ask for them.

The distribution is the softmax of the logits as the model computes them: before constraint, bias, penalties,
temperature and filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import not_finite

SLICE_ROWS = 16  # rows whose normalised logits are in memory at a time


@dataclass(frozen=True)
class TokenLogprob:
    """A token of a text and its log-probability; the likeliest tokens at its place and theirs, descending."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_likeliest: int, position: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` [R], which follow the rows of logits [R, V].

    num_likeliest: alternatives per token. position: of the first token. Raises NumericalError if logits are not finite.
    """
    logprobs = list[TokenLogprob]()
    for first in range(0, len(tokens), SLICE_ROWS):
        rows = logits[first : first + SLICE_ROWS].float().log_softmax(-1)
        slice_tokens = tokens[first : first + SLICE_ROWS]
        best, ids = rows.topk(min(max(num_likeliest, 1), rows.shape[-1]), dim=-1)
        # Views by numbers: ids in a tensor would be copied to a GPU.
        of_tokens = torch.stack([row[token] for row, token in zip(rows, slice_tokens, strict=True)])
        values, likeliest = torch.cat((of_tokens[:, None], best), dim=-1).tolist(), ids.tolist()
        for row, token in enumerate(slice_tokens):
            chosen, *others = values[row]
            if not math.isfinite(others[0]):
                raise not_finite(position + first + row)
            pairs = zip(likeliest[row], others, strict=True)
            logprobs.append(TokenLogprob(token, chosen, tuple(pairs)[:num_likeliest]))
    return logprobs
