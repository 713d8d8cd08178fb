"""Losses that bring a draft's distribution q to the target's p: forward KL, reverse KL, JSD and TVD++.

p is known by its likeliest tokens; the others count as one token, whose probability is what is left. Each loss of these
K + 1 probabilities is at most the loss of the whole distributions, and equal to it if the draft's shares among the
other tokens are the target's. DistillSpec (2310.08461, section 3) compares the first three.
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
    return tuple(torch.cat((known, _rest(known)), dim=-1) for known in (p, q))  # type: ignore[return-value]


def _rest(known: Tensor) -> Tensor:
    """The logarithm [R, 1] of what is left of 1."""
    return (1 - known.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) [R] of log-probabilities: the draft covers all that the target may say."""
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(q ‖ p) [R]: the draft says only what the target may say."""
    return (q.exp() * (q - p)).sum(-1)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence [R], with equal shares: the mean of both KL from the mixture (p + q) / 2."""
    mixed = ((p.exp() + q.exp()) / 2).clamp(min=1e-30).log()
    return (forward_kl(p, mixed) + forward_kl(q, mixed)) / 2


def tvd_plus_plus(p: Tensor, q: Tensor) -> Tensor:
    """A loss [R] with the gradient of TVD++ (2403.00858, section 2.3), a policy gradient of the total variation.

    A draft's token has the reward 1 where q < p. Rewards are reduced by their mean and divided by their standard
    deviation over the batch. The paper samples; here the expectation over q is exact, so the mean has no effect, and
    the gradient is that of the total variation distance divided by the standard deviation.
    """
    with torch.no_grad():
        weights, rewards = q.exp(), (q < p).to(q.dtype)
        mean = (weights * rewards).sum(-1).mean()
        deviation = (weights * (rewards - mean).square()).sum(-1).mean().sqrt()
        advantages = (rewards - mean) / (deviation + LEAST)
    return -(weights * advantages * q).sum(-1)


LOSSES = {"fkl": forward_kl, "rkl": reverse_kl, "jsd": jensen_shannon, "tvd++": tvd_plus_plus}
