"""The loss of distillation: 0 for equal distributions, and the gradient that its name promises."""

from __future__ import annotations

import torch
from torch import Tensor

from offspec.research.draft_losses import forward_kl, outcomes


def drawn(seed: int, size: int = 7) -> Tensor:
    return torch.randn(5, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_kl_has_its_definition() -> None:
    p, q = drawn(0).log_softmax(-1), drawn(1).log_softmax(-1)
    one, other = torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    torch.testing.assert_close(forward_kl(p, q), torch.distributions.kl_divergence(one, other))
    assert forward_kl(p, p).abs().max() < 1e-9


def test_tokens_that_are_not_kept_count_as_one() -> None:
    target, logits = drawn(0), drawn(1)
    kept, labels = target.log_softmax(-1).topk(3)
    p, q = outcomes(logits, labels, kept)
    assert p.shape == q.shape == (5, 4)
    torch.testing.assert_close(p.exp().sum(-1), torch.ones(5))
    torch.testing.assert_close(q.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    whole = forward_kl(target.log_softmax(-1), logits.log_softmax(-1))
    assert (forward_kl(p.double(), q) <= whole + 1e-6).all()
    everything = outcomes(logits, *reversed(target.log_softmax(-1).topk(7)))
    torch.testing.assert_close(forward_kl(*everything), whole, rtol=1e-5, atol=1e-6)
