"""Training a hybrid draft: its layers compute what they compute in a text, and have gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offspec.model.decoder import Decoder
from offspec.scheduler.trees.token_tree import ROOT
from offspec.training.lora import CausalTexts, TreeRows, hidden_states, weights_of

from ...fakes import FAMILIES, build
from ..model.test_decoder import chain_logits, random_tokens

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return build(FAMILIES["qwen3.5"], tmp_path_factory.mktemp("hybrid") / "model").decoder()


def test_whole_texts(decoder: Decoder) -> None:
    texts = [random_tokens(70), random_tokens(70, 1)]
    found = decoder.head(
        decoder.normed(hidden_states(decoder, torch.tensor(texts).flatten(), CausalTexts(decoder.device, 2, 70)))
    )
    expected = torch.cat([chain_logits(decoder, text) for text in texts])
    assert (found - expected).abs().max() < TOLERANCE


def test_a_tree(decoder: Decoder) -> None:
    tokens, parents = random_tokens(6), np.array([ROOT, 0, 0, 1, 2, 3])
    found = decoder.head(decoder.normed(hidden_states(decoder, torch.tensor(tokens), TreeRows(decoder, parents))))
    for path in ([0, 1, 3, 5], [0, 2, 4]):
        expected = chain_logits(decoder, [tokens[row] for row in path])
        assert (found[path] - expected).abs().max() < TOLERANCE


def test_gradients_are_those_of_differences(decoder: Decoder) -> None:
    """Of the queries' projection in the first delta net, in one direction."""
    weight = weights_of(decoder)["model.layers.0.linear_attn.in_proj_qkv.weight"]
    assert isinstance(weight, torch.Tensor)
    tokens, direction = (
        torch.tensor(random_tokens(9)),
        torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)),
    )

    def total() -> torch.Tensor:
        return hidden_states(decoder, tokens, CausalTexts(decoder.device, 1, 9))[-1].sum()

    weight.requires_grad_()
    (gradient,) = torch.autograd.grad(total(), weight)
    weight.requires_grad_(False)
    ends = []
    for step in (2e-4, -2e-4):
        weight.add_(direction, alpha=step)
        ends.append(total().item())
        weight.add_(direction, alpha=-step)
    assert (gradient * direction).sum().item() == pytest.approx((ends[0] - ends[1]) / 4e-4, rel=0.01)
