"""Through a whole request with re-use and drafting ahead, both KV caches hold what a fresh prefill would leave there.

Real decoders, driven as the engine drives them, looked at after every verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.model import CachedDecoder
from offspec.scheduler.calibration import Calibration
from offspec.scheduler.draft import ModelDrafter
from offspec.scheduler.sampling import Sampler
from offspec.scheduler.tree import TokenTree
from offspec.scheduler.verify import Logits, Verdict

from ..pair import Pair, build_pair, variant
from ..scheduler.fakes import EXAMPLES, build_tree, generate, sampling_params

TOLERANCE = 1e-5  # fp32
PROMPT, SEED, NUM_TOKENS = "def area(", 3, 20
GetEngine = Callable[[bool], Engine]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def get_engine(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> GetEngine:
    """The pair; with a sliding window, if asked."""

    @cache
    def get(has_window: bool) -> Engine:
        folder = tmp_path_factory.mktemp("window")
        config: dict[str, Any] = {"model_type": "mistral", "sliding_window": 6} if has_window else {}
        target, draft = (variant(source, folder / source.name, **config) for source in (pair.target, pair.draft))
        return Engine.load(str(target), draft=str(draft), device="cpu", dtype="fp32")

    return get


def assert_same_caches(found: CachedDecoder, fresh: CachedDecoder) -> None:
    """Keys, values and positions of every entry, committed and pending."""
    assert (found.length, found.cache.pending) == (fresh.length, fresh.cache.pending)
    end = fresh.cache.size
    torch.testing.assert_close(found.cache.positions[:end], fresh.cache.positions[:end])
    for layer in range(fresh.decoder.config.num_layers):
        for ours, theirs in zip(found.cache.read(layer, end), fresh.cache.read(layer, end), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


class CheckedDrafter(ModelDrafter):
    """Compares both caches with fresh ones after every verdict. `num_pending`: draft entries that lived on, each time."""

    def __init__(
        self,
        target: CachedDecoder,
        draft: CachedDecoder,
        sampler: Sampler,
        params: SpeculationParams,
        final: Collection[int],
    ) -> None:
        super().__init__(draft, sampler, params, Calibration(), final)
        self.target, self.draft, self.text = target, draft, list[int]()
        self.num_pending: list[int] = []

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        self.text = list(text)
        return super().propose(text, max_depth)

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Logits) -> None:
        super().observe(tree, verdict, logits)
        text = self.text + verdict.tokens
        nothing = TokenTree.empty()
        fresh = CachedDecoder(self.target.decoder)
        fresh.score(text[:-1], nothing.tokens, nothing.depths, nothing.mask())
        assert_same_caches(self.target, fresh)
        self._check_draft(text)

    def _check_draft(self, text: list[int]) -> None:
        growth, length = self._growth, self.draft.length
        waiting = np.flatnonzero(growth.nodes["row"] >= 0) if growth.is_rooted else np.empty(0, dtype=np.int64)
        waiting = waiting[np.argsort(growth.nodes["row"][waiting])]
        tree = build_tree(growth.path_tokens(waiting))
        assert len(tree) == len(waiting), "an ancestor of what waits has no entry"
        fresh = CachedDecoder(self.draft.decoder)
        scored = fresh.score(text[:length], tree.tokens, tree.depths, tree.mask())
        assert_same_caches(self.draft, fresh)
        self.num_pending.append(len(waiting))
        if growth.is_rooted:
            self._check_guesses(text, growth.path_tokens(waiting), scored)

    def _check_guesses(self, text: list[int], paths: list[list[int]], logits: torch.Tensor) -> None:
        """What is remembered of the root and of every entry that waits is what the fresh logits [1 + R, V] say."""
        assert self.draft.length == len(text)
        sampler = Sampler(self._sampler.params, SEED, self._sampler.vocab_size)
        sampler.extend(text)
        drafter = ModelDrafter(self.draft, sampler, self._params, Calibration())
        positions = np.array([len(text) + len(path) for path in [[], *paths]])
        expected = drafter._guess(logits, [[], *paths], positions)
        np.testing.assert_array_equal(self._growth.guesses.tokens, expected.tokens)
        np.testing.assert_allclose(self._growth.guesses.values, expected.values, atol=TOLERANCE * 100)


@settings(max_examples=16, **EXAMPLES)
@given(
    params=sampling_params(),
    has_window=st.booleans(),
    budget=st.sampled_from([4, 12, 40, 1]),
    width=st.sampled_from([16, 3]),
    rounds_ahead=st.sampled_from([0, 1, 4]),
    draft_is_target=st.booleans(),
    final=st.sampled_from([(), (40, 41)]),
)
def test_caches_are_those_of_a_fresh_prefill(
    get_engine: GetEngine,
    params: SamplingParams,
    has_window: bool,
    budget: int,
    width: int,
    rounds_ahead: int,
    draft_is_target: bool,
    final: tuple[int, ...],
) -> None:
    engine = get_engine(has_window)
    assert engine.draft is not None
    target, draft = (
        CachedDecoder(decoder) for decoder in (engine.target, engine.target if draft_is_target else engine.draft)
    )
    sampler = Sampler(params, SEED, target.vocab_size)
    drafter = CheckedDrafter(target, draft, sampler, SpeculationParams(budget=budget, width=width), final)
    generate(target, drafter, sampler, engine.encode(PROMPT), NUM_TOKENS, rounds_ahead)


@pytest.mark.parametrize("reuse", [True, False])
def test_something_lives_on_only_with_reuse(get_engine: GetEngine, reuse: bool) -> None:
    """Else the test above would compare nothing."""
    engine = get_engine(False)
    assert engine.draft is not None
    target, draft = CachedDecoder(engine.target), CachedDecoder(engine.draft)
    sampler = Sampler(SamplingParams(temperature=1.0), SEED, target.vocab_size)
    drafter = CheckedDrafter(target, draft, sampler, SpeculationParams(budget=4, reuse=reuse), ())
    generate(target, drafter, sampler, engine.encode(PROMPT), NUM_TOKENS, rounds_ahead=3)
    assert any(drafter.num_pending) == reuse
