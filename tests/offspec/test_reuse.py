"""Through a whole request with reuse and drafting ahead, both KV caches hold what a fresh prefill would leave there.

Real decoders, driven as the engine drives them, looked at after every verdict; the verdict is the target's, or any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.drafts.recall import Recall, RecallingText
from offspec.loaders.accelerators.capture import as_it_is
from offspec.model.cuda_graphs import TreeGraphs
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.row_logits import RowLogits
from offspec.scheduler.drafting.child_scores import ChildScorer
from offspec.scheduler.drafting.drafter import DraftRequest, NoDrafter
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import Guesser, PromptLookup
from offspec.scheduler.pace.controllers import controller_for
from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, IntArray, TokenTree, trimmed
from offspec.scheduler.trees.verify import TargetPass, Verdict
from offspec.text.tokenizer import Tokenizer

from ..examples import examples
from ..pair import CONTEXT, VOCAB_SIZE, Pair, narrow, variant
from ..scheduler.fakes import (
    VirtualClock,
    assert_well_formed,
    build_tree,
    count_down,
    estimates_of,
    generate,
    paths,
    sampling_params,
)

TOLERANCE = 5e-5  # fp32, of numbers up to 4 or so
PROMPT, SEED, NUM_TOKENS = "def area(def area(", 3, 20
PADDING = VOCAB_SIZE - 1
MOST_NODES = 48  # where the budget is found
SHORT = 26  # tokens, a draft's context
GetModels = Callable[[bool, str], tuple[Decoder, Decoder]]


@pytest.fixture(scope="module")
def get_models(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> GetModels:
    """The target, with a sliding window if asked, and a draft: its own, itself, or one of fewer tokens
    and a short context.
    """

    @cache
    def load(has_window: bool, is_narrow: bool) -> Engine:
        folder = tmp_path_factory.mktemp("models")
        config: dict[str, Any] = {"model_type": "mistral", "sliding_window": 6} if has_window else {}
        target, draft = (variant(source, folder / source.name, **config) for source in (pair.target, pair.draft))
        if is_narrow:
            said = json.loads((narrow(draft, 305) / "config.json").read_text())
            (draft / "config.json").write_text(json.dumps(said | config | {"max_position_embeddings": SHORT}))
        return Engine.load(str(target), draft=str(draft), device="cpu", dtype="fp32")

    def get(has_window: bool, draft: str) -> tuple[Decoder, Decoder]:
        engine = load(has_window, draft == "narrow")
        assert engine.draft.decoder is not None
        return engine.target, engine.target if draft == "itself" else engine.draft.decoder

    return get


@pytest.fixture(scope="module")
def prompt(pair: Pair) -> list[int]:
    """One token of it is padding that a narrow draft does not have."""
    return [PADDING, *Tokenizer.load(pair.target).encode(PROMPT)]


class Target(CachedDecoder):
    """Scores as the engine has it: each row's logits when they are asked for,
    which is what recall takes its states from.
    """

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Any:
        return self.score_rows(chain, tokens, depths, parents)


class Clock(VirtualClock):
    """A little later whenever it is looked at, so that all rounds and passes take some time,
    and the same every time.
    """

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Anything:
    """A guesser that names arbitrary tokens, some that a narrow draft does not know or that end the text;
    and the truth.
    """

    TOKENS = (38, 40, 304, 305, PADDING)

    def __init__(self, truth: Sequence[int], clock: Clock, seconds: float) -> None:
        """truth: the text as it will be, as far as anybody knows. seconds: that guessing takes."""
        self._truth, self._random = truth, np.random.default_rng(SEED)
        self._clock, self._seconds = clock, seconds

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        self._clock.now += self._seconds
        depth = min(max_depth, 3)
        named = self._random.choice(self.TOKENS, (self._random.integers(9), depth)).tolist()
        return trimmed(build_tree([self._truth[len(text) :][:depth], *named]), max_nodes)

    def observe(self, done: TargetPass) -> None:
        pass


def guessers_of(kinds: Collection[str], truth: Sequence[int], clock: Clock) -> list[Guesser]:
    """slow: one that is not worth its time, and so is asked in some passes only."""
    made: dict[str, Guesser] = {
        "lookup": PromptLookup(),
        "anything": Anything(truth, clock, 0.0),
        "slow": Anything(truth, clock, 9.0),
    }
    return [made[kind] for kind in kinds]


def text_of(draft: Decoder, *, is_static: bool) -> CachedDecoder:
    """Empty; as on a GPU where its rounds are static."""
    return TreeGraphs(draft, CONTEXT + MAX_ROWS, as_it_is).text(0) if is_static else CachedDecoder(draft)


def assert_same_caches(found: CachedDecoder, fresh: CachedDecoder) -> None:
    """Keys, values and positions of every entry, committed and pending."""
    assert (found.length, found.cache.pending) == (fresh.length, fresh.cache.pending)
    end = fresh.cache.size
    torch.testing.assert_close(found.cache.positions[:end], fresh.cache.positions[:end])
    for layer in range(fresh.decoder.config.num_layers):
        for ours, theirs in zip(found.cache.read(layer, end), fresh.cache.read(layer, end), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


class CheckedDrafter(ModelDrafter):
    """Checks every tree, and compares both caches with fresh ones after every verdict.

    `num_pending`: draft entries that lived on, each time."""

    def __init__(
        self,
        target: CachedDecoder,
        draft: CachedDecoder,
        sampler: Sampler,
        params: SpeculationParams,
        final: Collection[int] = (),
        *,
        guessers: Sequence[Guesser] = (),
        recalls: bool = False,
        clock: Clock | None = None,
    ) -> None:
        recalling = RecallingText(draft, target.decoder, Recall(draft.decoder, target.decoder)) if recalls else None
        estimates = estimates_of()
        super().__init__(
            recalling or draft,
            DraftRequest(sampler, final),
            params,
            estimates,
            guessers=guessers,
            corrector=recalling,
            controller=controller_for(params, estimates.costs, MOST_NODES),
            clock=clock or Clock(),
        )
        self.target, self.draft, self.sampler, self.recalling = target, draft, sampler, recalling
        self.params, self.final = params, final
        self.text = list[int]()
        self.num_pending: list[int] = []

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        self.text = list(text)
        tree = super().propose(text, max_depth)
        assert_well_formed(tree)
        assert len(tree) <= (self.params.budget or MOST_NODES)
        assert tree.depths.max(initial=0) <= max_depth
        assert not set(tree.tokens[tree.parents[tree.parents != ROOT]].tolist()) & set(self.final)
        places = {path: node for node, path in [(ROOT, ()), *enumerate(paths(tree))]}
        assert tree.parents.tolist() == [places[path[:-1]] for path in paths(tree)]
        return tree

    def observe(self, done: TargetPass) -> None:
        assert isinstance(done.logits, RowLogits)
        super().observe(replace(done, states=done.logits))  # as the engine has it: `Target` gives logits with states
        text = self.text + done.verdict.tokens
        nothing = TokenTree.empty()
        fresh = CachedDecoder(self.target.decoder)
        fresh.score(text[:-1], nothing.tokens, nothing.depths, nothing.parents)
        assert_same_caches(self.target, fresh)
        self._check_draft(text)

    def candidates_below(self, path: Sequence[int]) -> list[int]:
        """The tokens that are known there, of the tree that was sent last, whether they were sent or not."""
        node = int(self.sent[path[-1]]) if path else ROOT
        found: list[int] = self.candidates.nodes["token"][self.candidates.nodes["parent"] == node].tolist()
        return found

    def _check_draft(self, text: list[int]) -> None:
        candidates, length, known = self.candidates, self.draft.length, self.draft.vocabulary
        waiting = np.flatnonzero(candidates.nodes["row"] >= 0) if candidates.is_rooted else np.empty(0, dtype=np.int64)
        waiting = waiting[np.argsort(candidates.nodes["row"][waiting])]
        tree = build_tree(candidates.path_tokens(waiting))
        assert len(tree) == len(waiting), "an ancestor of what waits has no entry"
        fresh = CachedDecoder(self.draft.decoder)
        states = fresh.states(known.text(text[:length]), known.inputs(tree.tokens), tree.depths, tree.parents)
        assert_same_caches(self.draft, fresh)
        assert int(fresh.cache.positions.max()) < self.draft.max_context
        self.num_pending.append(len(waiting))
        if candidates.is_rooted:
            assert length == len(text)
            self._check_guesses(text, candidates.path_tokens(waiting), states)

    def _check_guesses(self, text: list[int], paths: list[list[int]], states: torch.Tensor) -> None:
        """What is remembered of the root and of every entry that waits is what the fresh states [1 + R, hidden] say."""
        if self.recalling is not None:  # what was guessed is corrected by what was recalled then
            places = np.arange(ROOT, len(paths))
            torch.testing.assert_close(self.recalling.states_at(places), states, rtol=0, atol=TOLERANCE)
            return
        sampler = Sampler(self.sampler.params, SEED, self.sampler.vocab_size)
        sampler.extend(text)
        scorer = ChildScorer(self.draft.vocabulary, sampler, VOCAB_SIZE, coupled=self.params.scoring == "coupled")
        positions = np.array([len(text) + len(path) for path in [[], *paths]])
        found = self.candidates.child_scores
        expected = scorer.score(self.draft.decoder.head(states), [[], *paths], positions)
        of_tokens = np.empty_like(expected.values)  # two that are as good may come in any order
        np.put_along_axis(of_tokens, expected.tokens, expected.values, axis=1)
        for values in (
            expected.values[:, : self.params.children],
            np.take_along_axis(of_tokens, found.tokens, axis=1),
        ):
            np.testing.assert_allclose(found.values, values, atol=TOLERANCE * 20)


# What is drawn for either kind of verdict.
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "params": sampling_params(),
    "has_window": st.booleans(),
    "kind": st.sampled_from(["own", "itself", "narrow"]),
    "budget": st.sampled_from([4, 12, 40, 1, None, None]),
    "width": st.sampled_from([16, 3]),
    "children": st.sampled_from([16, 2]),
    "guessers": st.sampled_from(
        [(), ("lookup",), ("anything",), ("slow",), ("lookup", "anything"), ("slow", "lookup")]
    ),
    "recalls": st.booleans(),
    "is_static": st.booleans(),
    "final": st.sampled_from([(), (40, 41)]),
}


@pytest.fixture(scope="module")
def make(get_models: GetModels) -> Callable[..., CheckedDrafter]:
    """A drafter of what was drawn."""

    def made(
        params: SamplingParams,
        has_window: bool = False,
        kind: str = "own",
        guessers: Collection[str] = (),
        recalls: bool = False,
        is_static: bool = False,
        final: Collection[int] = (),
        truth: Sequence[int] = (),
        **speculation: Any,
    ) -> CheckedDrafter:
        (target, draft), clock = get_models(has_window, kind), Clock()
        return CheckedDrafter(
            Target(target),
            text_of(draft, is_static=is_static),
            Sampler(params, SEED, target.config.vocab_size),
            SpeculationParams(**speculation),
            final,
            guessers=guessers_of(guessers, truth, clock),
            recalls=recalls,
            clock=clock,
        )

    return made


@pytest.mark.slow
@examples(5)
@given(rounds_ahead=st.sampled_from([0, 1, 4]), **SETTINGS)
def test_caches_are_those_of_a_fresh_prefill(
    make: Callable[..., CheckedDrafter], prompt: list[int], rounds_ahead: int, **drawn: Any
) -> None:
    plain = make(**drawn)
    truth = [*prompt, *generate(plain.target, NoDrafter(), plain.sampler, prompt, NUM_TOKENS)]
    drafter = make(**drawn, truth=truth)
    said = generate(drafter.target, drafter, drafter.sampler, prompt, NUM_TOKENS, rounds_ahead)
    assert [*prompt, *said][: len(truth)] == truth


@pytest.mark.slow
@examples(14)
@given(seed=st.integers(0, 2**32), **SETTINGS)
def test_caches_are_those_of_a_fresh_prefill_whatever_the_verdict(
    make: Callable[..., CheckedDrafter], prompt: list[int], seed: int, **drawn: Any
) -> None:
    """The walk ends at any node, and any token comes after it: often one that is known there,
    so that something lives on.
    """
    drafter, text, random = make(**drawn), list(prompt), np.random.default_rng(seed)
    target = drafter.target
    drafter.sampler.extend(text)
    for _ in range(7):
        tree = drafter.propose(text, max_depth=6)
        if drafter.wants_overlap:
            drafter.extend(count_down(int(random.integers(4))))
        logits = target.score(text[target.length :], tree.tokens, tree.depths, tree.parents)
        path = tree.path(int(random.integers(ROOT, len(tree))))
        known = drafter.candidates_below(path)
        bonus = random.choice(known) if known and random.random() < 0.8 else random.integers(drafter.sampler.vocab_size)
        verdict = Verdict(path, [*tree.tokens[path].tolist(), int(bonus)])
        target.keep(path)
        drafter.observe(TargetPass(text, tree, verdict, logits))
        text += verdict.tokens
        drafter.sampler.extend(verdict.tokens)
