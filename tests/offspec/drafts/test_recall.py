"""What is recalled: the draft's error at the places of the trees, in the draft's logits at places like them;
the text is unmoved.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.recall import DOUBT, MOST_PROMPT, NEARNESS, SIZE, Recall, recall_bytes
from offspec.model.decoder import Decoder
from offspec.scheduler.pace.costs import WIDTHS
from offspec.scheduler.params import MAX_ROWS

from ...pair import Pair, narrow, variant

SAMPLED = SamplingParams(8, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="fp32") as engine:
        yield engine


@pytest.fixture(scope="module")
def models(engine: Engine) -> tuple[Decoder, Decoder]:
    """A draft and a target of other widths and vocabularies."""
    assert engine.draft.decoder is not None
    return engine.draft.decoder, engine.target


def places(count: int, model: Decoder, seed: int = 0) -> Tensor:
    return torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(seed))


def corrected(draft: Decoder, target: Decoder, recall: Recall, states: Tensor) -> Tensor:
    correction = recall.correct(states)
    return draft.head(correction.draft) + target.head(correction.target)


def test_logits_move_by_the_mean_error_at_near_places(models: tuple[Decoder, Decoder]) -> None:
    """The formula as it stands in the module, in logits of the whole vocabulary."""
    draft, target = models
    own, said = places(7, draft), places(7, target, seed=1)
    here = 0.7 * own[:3] + 0.2 * places(3, draft, seed=2)
    recall = Recall(draft, target)
    recall.add(own, said)
    nearness = torch.exp(NEARNESS * (torch.cosine_similarity(here[:, None], own[None], dim=-1) - 1))
    errors = target.head(said).log_softmax(-1) - draft.head(own).log_softmax(-1)
    expected = draft.head(here) + (nearness / (DOUBT + nearness.sum(-1, keepdim=True))) @ errors
    found = corrected(draft, target, recall, here)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)


def test_the_oldest_places_give_way(models: tuple[Decoder, Decoder]) -> None:
    draft, target = models
    recall, recent = Recall(draft, target, size=10), Recall(draft, target, size=10)
    own, said = places(33, draft), places(33, target, seed=1)
    for first, last in ((0, 4), (4, 9), (9, 17), (17, 18), (18, 33)):
        recall.add(own[first:last], said[first:last])
    recent.add(own[-10:], said[-10:])
    assert len(recall) == len(recent) == 10
    here = places(4, draft, seed=3)
    for found, expected in zip(recall.correct(here), recent.correct(here), strict=True):
        torch.testing.assert_close(found, expected)


def test_it_takes_what_was_planned(models: tuple[Decoder, Decoder]) -> None:
    draft, target = models
    recall = Recall(draft, target)
    held = sum(part.nbytes for part in vars(recall).values() if isinstance(part, Tensor))
    waiting = 2 * (MAX_ROWS + MOST_PROMPT) * draft.config.hidden_size * draft.dtype.itemsize
    round_bytes = 4 * int(WIDTHS[-1]) * (3 * SIZE + target.config.vocab_size)
    assert recall_bytes(draft.config, target.config, target.dtype.itemsize) == held + waiting + round_bytes


# ------------------------------------------------------------------------------------------------ in a request


def said(engine: Engine, params: SamplingParams, speculation: SpeculationParams) -> tuple[list[int], int]:
    """Tokens of a text, and in how many passes."""
    *steps, last = engine.with_draft(engine.draft).generate("def area(", params, speculation)
    return [token for step in (*steps, last) for token in step.token_ids], last.stats.num_passes


def test_the_text_is_the_same(engine: Engine) -> None:
    plain, _ = said(engine, SAMPLED, SpeculationParams(0))
    found = [said(engine, SAMPLED, SpeculationParams(24, recall=recall)) for recall in (True, False)]
    assert [tokens for tokens, _ in found] == [plain, plain]


def test_a_draft_of_fewer_tokens_is_corrected_as_far_as_it_knows(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("narrow") / "draft"
    draft = narrow(variant(pair.draft, folder), 300)
    with Engine.load(str(pair.target), draft=str(draft), device="cpu", dtype="fp32") as engine:
        tokens, _ = said(engine, SAMPLED, SpeculationParams(24))
        assert tokens == said(engine, SAMPLED, SpeculationParams(0))[0]


@pytest.mark.slow
def test_fewer_passes_with_the_builtin_pair() -> None:
    """Trees of 64 nodes on held-out prompts; the arithmetic is the same on every run."""
    passes = dict.fromkeys((True, False), 0)
    with Engine.load("builtin", dtype="fp32") as engine:
        for recall in passes:
            fresh = engine.with_draft(engine.draft)
            params = SamplingParams(16, temperature=1.0, seed=0, ignore_eos=True)
            prompt = builtin.prompts()[0]
            *_, last = fresh.generate(prompt, params, SpeculationParams(64, recall=recall, overlap=False))
            passes[recall] = last.stats.num_passes
    assert passes[True] < passes[False]
