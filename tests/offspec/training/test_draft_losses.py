"""The losses of distillation: 0 for equal distributions, and the gradients that their names promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offspec.lab.draft_losses import tvd_plus_plus
from offspec.training.distill_params import LOSSES
from offspec.training.draft_losses import loss_of, outcomes


def drawn(seed: int, size: int = 7) -> Tensor:
    return torch.randn(5, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(name: str, logits: Tensor, p: Tensor) -> Tensor:
    free = logits.clone().requires_grad_()
    loss_of(name)(p, free.log_softmax(-1)).sum().backward()  # type: ignore[no-untyped-call]
    assert free.grad is not None
    return free.grad


@pytest.mark.parametrize("name", ["fkl", "rkl", "jsd"])
def test_equal_distributions_have_no_loss_and_different_ones_have_some(name: str) -> None:
    p = drawn(0).log_softmax(-1)
    assert loss_of(name)(p, p).abs().max() < 1e-9
    assert (loss_of(name)(p, drawn(1).log_softmax(-1)) > 0.01).all()


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_no_gradient_where_the_draft_is_the_target(name: str) -> None:
    logits = drawn(0)
    assert gradient(name, logits, logits.log_softmax(-1)).abs().max() < 1e-6


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_brings_the_draft_to_the_target(name: str) -> None:
    wanted, logits = drawn(0).softmax(-1), drawn(1)
    for _ in range(1000):
        logits = logits - 0.15 * gradient(name, logits, wanted.log())
    assert (logits.softmax(-1) - wanted).abs().sum(-1).max() < 0.06


def test_kl_has_its_definition() -> None:
    p, q = drawn(0).log_softmax(-1), drawn(1).log_softmax(-1)
    kl = torch.distributions.kl_divergence
    one, other = torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    torch.testing.assert_close(loss_of("fkl")(p, q), kl(one, other))
    torch.testing.assert_close(loss_of("rkl")(p, q), kl(other, one))


def test_tvd_plus_plus_is_the_total_variation_in_units_of_the_rewards_deviation() -> None:
    logits, p = drawn(1), drawn(0).log_softmax(-1)
    free = logits.clone().requires_grad_()
    (free.softmax(-1) - p.exp()).abs().sum().div(2).backward()  # type: ignore[no-untyped-call]
    assert free.grad is not None
    ratio = gradient("tvd++", logits, p) / free.grad
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-4, atol=1e-4)
    assert ratio[0, 0] > 1  # rewards are 0 or 1, so that their deviation is 1/2 at most


def test_tokens_that_are_not_kept_count_as_one() -> None:
    target, logits = drawn(0), drawn(1)
    kept, labels = target.log_softmax(-1).topk(3)
    p, q = outcomes(logits, labels, kept)
    assert p.shape == q.shape == (5, 4)
    torch.testing.assert_close(p.exp().sum(-1), torch.ones(5))
    torch.testing.assert_close(q.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    whole = loss_of("fkl")(target.log_softmax(-1), logits.log_softmax(-1))
    assert (loss_of("fkl")(p.double(), q) <= whole + 1e-6).all()
    everything = outcomes(logits, *reversed(target.log_softmax(-1).topk(7)))
    torch.testing.assert_close(loss_of("fkl")(*everything), whole, rtol=1e-5, atol=1e-6)


def test_rewards_are_divided_by_their_deviation_over_the_batch() -> None:
    """A row alone has another deviation than among others, so another gradient."""
    p, q = drawn(0).log_softmax(-1), drawn(1).log_softmax(-1)
    assert not torch.allclose(tvd_plus_plus(p, q)[:1], tvd_plus_plus(p[:1], q[:1]))
