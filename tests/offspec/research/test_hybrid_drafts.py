"""Training a hybrid draft: its layers compute what they compute in a text, and have gradients; a head of a hybrid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.opening import open_model
from offspec.model.decoder import Decoder
from offspec.research.distill_params import HeadParams
from offspec.research.distillation import Teacher
from offspec.research.heads import distill_head
from offspec.research.lora import CausalTexts, TreeRows, hidden_states, weights_of
from offspec.scheduler.trees.token_tree import ROOT

from ...fakes import FAMILIES, build
from ..drafts.test_head_draft import HEADS
from ..model.heads.head_twins import write_folder
from ..model.test_decoder import chain_logits, random_tokens
from ..test_hybrid_models import build as build_hybrid

TOLERANCE = 1e-4
OTHERS = ("eagle3", "dflash")


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


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hybrid("qwen3_5_text", tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in OTHERS)])
def test_a_head_of_a_hybrid_trains_and_drafts(kind: str, hybrid: Path, tmp_path: Path) -> None:
    """It reads hidden states, which layers with a state have as others do. The text is that of plain decoding."""
    params = HeadParams(steps=3, num_texts=8, text_tokens=8, batch_texts=4, num_labels=16)
    with Engine.load(str(hybrid), draft="none", device="cpu", dtype="fp32") as engine:
        teacher = Teacher(engine.target, open_model(hybrid, "fp32", []), engine.tokenizer)
        head = distill_head(teacher, kind, params, out=tmp_path / "head")
    with Engine.load(str(hybrid), draft=str(head.path), device="cpu", dtype="fp32") as engine:
        sampling = SamplingParams(8, 1.0, seed=1, ignore_eos=True)
        found, expected = (
            "".join(step.text for step in engine.generate("x = [1, 2", sampling, SpeculationParams(budget)))
            for budget in (8, 0)
        )
        assert found == expected


@pytest.mark.slow
def test_a_published_head_drafts_for_a_hybrid(hybrid: Path, tmp_path: Path) -> None:
    """It reads states after three of the layers, two of which are recurrent."""
    config, tensors = HEADS["EAGLE-3"]
    head = write_folder(tmp_path, config, tensors())
    texts = []
    for draft, budget in (("none", 0), (str(head), 12)):
        with Engine.load(str(hybrid), draft=draft, device="cpu", dtype="fp32") as engine:
            params = SamplingParams(8, temperature=0.9, seed=1, ignore_eos=True)
            steps = list(engine.generate("def area(", params, SpeculationParams(budget, lookup=False)))
            texts.append([token for step in steps for token in step.token_ids])
            assert (steps[-1].stats.num_drafted_tokens > 0) == (budget > 0)
    assert texts[0] == texts[1]
