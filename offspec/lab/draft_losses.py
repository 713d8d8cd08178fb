"""Losses of a draft besides forward KL, which DistillSpec (2310.08461, section 3) and TVD++ (2403.00858) compare.

p and q are the target's and the draft's log-probabilities [R, K + 1], see `training.draft_losses.outcomes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..training.draft_losses import LEAST, forward_kl


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
