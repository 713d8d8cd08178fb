"""What is recalled: the draft's error at the places of the trees, in the draft's logits at places like them;
the text is unmoved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.recall import DOUBT, MOST_NODES, MOST_PROMPT, NEARNESS, SIZE, Recall, RecallingText, recall_bytes
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.row_logits import RowLogits
from offspec.scheduler.pace.costs import WIDTHS, Costs
from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.trees.token_tree import ROOT, IntArray, TokenTree
from offspec.scheduler.trees.verify import Logits, Verdict

from ...pair import Pair, narrow, variant
from ..model.test_decoder import NO_NODES

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


def test_at_the_very_place_the_target_is_believed_and_far_from_all_the_draft(models: tuple[Decoder, Decoder]) -> None:
    draft, target = models
    own, said = places(1, draft), places(1, target, seed=1)
    recall = Recall(draft, target)
    recall.add(own, said)
    here, there = (corrected(draft, target, recall, states).softmax(-1) for states in (own, -own))
    assert (here - target.head(said).softmax(-1)).abs().sum() < 0.2 * (
        (draft.head(own).softmax(-1) - target.head(said).softmax(-1)).abs().sum()
    )
    torch.testing.assert_close(there, draft.head(-own).softmax(-1))


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


class Watch:
    """What one engine's recall is told, held against what fresh decoders say of the same text and path."""

    def __init__(self, engine: Engine, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.text, self.num_places = engine, engine.encode(prompt), 0
        self.nodes: list[int] = []
        self.added: list[tuple[Tensor, Tensor]] = []
        add, observe = Recall.add, RecallingText.observe

        def note_places(recall: Recall, draft: Tensor, target: Tensor) -> None:
            self.added.append((draft.clone(), target.clone()))
            add(recall, draft, target)

        def note_nodes(text: RecallingText, rows: IntArray, nodes: IntArray, logits: Logits) -> None:
            self.nodes = nodes.tolist()
            observe(text, rows, nodes, logits)

        monkeypatch.setattr(Recall, "add", note_places)
        monkeypatch.setattr(RecallingText, "observe", note_nodes)

    def __call__(self, tree: TokenTree, verdict: Verdict) -> None:
        assert self.engine.draft.decoder is not None
        paths = [[int(tree.tokens[above]) for above in tree.path(node - 1)] if node else [] for node in self.nodes]
        texts = [self.text + path for path in paths]
        if not self.num_places:  # the prompt's other places come first
            texts = [*(self.text[:end] for end in range(1, len(self.text))), *texts]
        for model, parts in zip(
            (self.engine.draft.decoder, self.engine.target), zip(*self.added, strict=True), strict=False
        ):
            for text, state in zip(texts, torch.cat(parts), strict=True):
                fresh = CachedDecoder(model).states(text, *NO_NODES)
                torch.testing.assert_close(state[None], fresh, rtol=0, atol=2e-5)
        self.num_places += len(self.nodes)
        self.nodes, self.added = [], []  # a draft that is not asked for the next pass is told nothing
        self.text += verdict.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationParams(16, overlap=False),
        SpeculationParams(16, reuse=False),
        pytest.param(SpeculationParams(12, width=3), marks=pytest.mark.nightly),
        SpeculationParams(),
    ],
    ids=["reuse", "no-reuse", "narrow", "auto"],
)
def test_places_are_those_of_the_tree(
    pair: Pair, speculation: SpeculationParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="fp32") as engine:
        # A first tree is always drafted, and none is large.
        engine.learnt.costs = Costs(lambda rows: 1.0 + rows / 16, lambda rows: 1e-3)
        watch = Watch(engine, "def area(", monkeypatch)
        for _ in engine.generate("def area(", SAMPLED, speculation, observer=watch):
            pass
    assert watch.num_places > (16 if speculation.budget else 0)


def test_no_more_of_one_tree_than_leaves_room_for_others(models: tuple[Decoder, Decoder]) -> None:
    draft, target = models
    recall = Recall(draft, target)
    text = RecallingText(CachedDecoder(draft), target, recall)
    text.score([5, 6], *NO_NODES)
    count = MOST_NODES + 40
    nodes = np.full(count, 7), np.ones(count, dtype=np.int64), np.eye(count, dtype=np.bool_)
    text.score([], *nodes)
    logits = CachedDecoder(target).score_rows([5, 6], *nodes)
    assert isinstance(logits, RowLogits)
    text.observe(np.arange(ROOT, count), np.arange(1 + count), logits)
    assert len(recall) == 1 + 1 + MOST_NODES  # the prompt's first token, too


def test_logits_are_capped_behind_the_correction(models: tuple[Decoder, Decoder]) -> None:
    """Only before they are capped are they linear in the states."""
    draft, target = (copy.copy(model) for model in models)
    draft.config = replace(draft.config, logit_cap=1.5, logit_scale=0.5)
    target.config = replace(target.config, logit_cap=3.0)
    recall = Recall(draft, target)
    recall.add(places(7, draft), places(7, target, seed=1))
    text = RecallingText(CachedDecoder(draft), target, recall)
    found = text.score([5, 6], *NO_NODES)
    correction = recall.correct(CachedDecoder(draft).states([5, 6], *NO_NODES))
    heads = (model.weights.shared("lm_head.weight") for model in (draft, target))
    own, said = (states @ head.T for states, head in zip(correction, heads, strict=True))  # type: ignore[union-attr]
    torch.testing.assert_close(found, 1.5 * torch.tanh((0.5 * own + said) / 1.5))


def test_what_is_pending_is_corrected_by_all_that_is_recalled_by_now(models: tuple[Decoder, Decoder]) -> None:
    """As it would be, were it asked again."""
    draft, target = models
    recall = Recall(draft, target)
    nodes = np.array([7, 8, 9]), np.array([1, 1, 2]), np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=np.bool_)
    text, again = (RecallingText(CachedDecoder(draft), target, recall) for _ in range(2))
    before = torch.cat((text.score([5, 6], *NO_NODES), text.score([], *nodes)))
    recall.add(CachedDecoder(draft).states([5, 6], *NO_NODES), places(1, target))
    after = torch.cat((again.score([5, 6], *NO_NODES), again.score([], *nodes)))
    assert (after - before).abs().max() > 0.1
    rows = np.array([ROOT, 2, 0])
    torch.testing.assert_close(text.corrected(rows), after[rows + 1], rtol=0, atol=1e-4)


def said(engine: Engine, params: SamplingParams, speculation: SpeculationParams) -> tuple[list[int], int]:
    """Tokens of a text, and in how many passes."""
    *steps, last = engine.with_draft(engine.draft).generate("def area(", params, speculation)
    return [token for step in (*steps, last) for token in step.token_ids], last.stats.num_passes


@pytest.mark.parametrize("params", [SamplingParams(14, ignore_eos=True), SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_same(engine: Engine, params: SamplingParams) -> None:
    plain, _ = said(engine, params, SpeculationParams(0))
    found = [said(engine, params, SpeculationParams(24, recall=recall)) for recall in (True, False)]
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
@pytest.mark.parametrize("num_prompts", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_fewer_passes_with_the_builtin_pair(num_prompts: int) -> None:
    """Trees of 64 nodes on held-out prompts; the arithmetic is the same on every run."""
    passes = dict.fromkeys((True, False), 0)
    with Engine.load("builtin", dtype="fp32") as engine:
        for recall in passes:
            fresh = engine.with_draft(engine.draft)
            for index, prompt in enumerate(builtin.prompts()[:num_prompts]):
                params = SamplingParams(24, temperature=1.0, seed=index, ignore_eos=True)
                *_, last = fresh.generate(prompt, params, SpeculationParams(64, recall=recall, overlap=False))
                passes[recall] += last.stats.num_passes
    assert passes[True] < passes[False]
