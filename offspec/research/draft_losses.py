"""The loss that brings a draft's distribution q to the target's p.

p is known by its likeliest tokens; the others count as one token, whose probability is what is left. The loss of these
K + 1 probabilities is at most that of the whole distributions, and equal to it if the draft's shares among the other
tokens are the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-6  # of the probability of all other tokens


def outcomes(logits: Tensor, labels: Tensor, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities p, q [R, K + 1] of the labels and of any other token.

    logits: the draft's [R, V]. labels, log_probabilities [R, K]: the target's likeliest tokens. If these are all of the
    draft's tokens, the result is [R, K].
    """
    q = logits.log_softmax(-1).gather(-1, labels.long())
    p = log_probabilities.float()
    if labels.shape[-1] == logits.shape[-1]:
        return p, q
    p, q = (
        torch.cat((probabilities, (1 - probabilities.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()), dim=-1)
        for probabilities in (p, q)
    )
    return p, q


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) [R] of log-probabilities: the draft covers all that the target may say."""
    return (p.exp() * (p - q)).sum(-1)
