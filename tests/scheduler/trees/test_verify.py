"""The walk says what plain decoding says, whatever tree it walks and whoever guessed it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.errors import NumericalError
from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.pace.trials import OverlapSwitch
from offspec.scheduler.params import MAX_NODES, SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.verify import verify_exactly

from ...refusals import refused
from ..fakes import (
    RuleModel,
    TimedModel,
    VirtualClock,
    assert_well_formed,
    build_tree,
    estimates_of,
    generate,
    many,
    paths,
    plain_text,
    random_rule,
    sampling_params,
    trees,
)
from ..fakes import resembling as draft_of

VOCAB_SIZE, PROMPT = 5, [3, 1, 4, 1]
TARGET = random_rule(VOCAB_SIZE, seed=0)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


def scored(tree: TokenTree) -> Tensor:
    return RuleModel(TARGET, VOCAB_SIZE).score(PROMPT, tree.tokens, tree.depths, tree.parents)


def sampler_at_prompt(params: SamplingParams, seed: int = 0) -> Sampler:
    sampler = Sampler(params, seed, VOCAB_SIZE)
    sampler.extend(PROMPT)
    return sampler


@many
@given(guesses=trees(VOCAB_SIZE), num_right=st.integers(0, 5), params=sampling_params(), seed=st.integers(0, 2**64 - 1))
def test_walk_is_plain_decoding(guesses: TokenTree, num_right: int, params: SamplingParams, seed: int) -> None:
    right = plain_text(TARGET, params, seed, PROMPT, num_right)
    tree = build_tree([*paths(guesses), right])
    verdict = verify_exactly(tree, scored(tree), sampler_at_prompt(params, seed), len(PROMPT))
    assert verdict.tokens == plain_text(TARGET, params, seed, PROMPT, len(verdict.tokens))
    assert tree.tokens[verdict.path].tolist() == verdict.tokens[:-1]
    assert len(verdict.path) >= num_right
    end = verdict.path[-1] if verdict.path else ROOT
    assert tree.path(end) == verdict.path
    assert tree.child(end, verdict.tokens[-1]) is None


def test_only_logits_on_the_walk_are_looked_at() -> None:
    right = plain_text(TARGET, SAMPLED, 0, PROMPT, 3)
    tree = build_tree([right[:2], [(right[0] + 1) % VOCAB_SIZE, 0]])
    logits = scored(tree)
    logits[1 + 2 :] = math.nan  # nodes 2 and 3 are the wrong branch
    assert verify_exactly(tree, logits, sampler_at_prompt(SAMPLED), len(PROMPT)).tokens == right
    logits[1 + 1] = math.nan
    with refused(NumericalError, f"position {len(PROMPT) + 2}"):
        verify_exactly(tree, logits, sampler_at_prompt(SAMPLED), len(PROMPT))


def speculations() -> st.SearchStrategy[SpeculationParams]:
    return st.builds(
        SpeculationParams,
        budget=st.sampled_from([0, 1, 4, 16, 40, None, None]),
        scoring=st.sampled_from(["coupled", "specexec"]),
        width=st.integers(1, 16),
        children=st.integers(1, 8),
        max_depth=st.integers(1, 8),
        stopping=st.sampled_from(["default", "default", "thompson", "thompson-calibrated"]),
        reuse=st.sampled_from([True, True, False]),
        overlap=st.booleans(),
    )


class StrictDrafter(ModelDrafter):
    """Insists that every tree is one, and within what was allowed."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        tree = super().propose(text, max_depth)
        assert len(tree) <= (MAX_NODES if self._params.budget is None else self._params.budget)
        assert tree.depths.max(initial=0) <= max(0, min(max_depth, self._params.max_depth))
        assert_well_formed(tree)
        return tree


@pytest.mark.slow
@many
@given(
    params=sampling_params(),
    speculation=speculations(),
    seed=st.integers(0, 1000),
    error=st.sampled_from([0.0, 0.5, 5.0]),
    final=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
    rounds_ahead=st.sampled_from([0, 1, 3, 30]),
    drafting_s=st.sampled_from([0.0, 0.02, 1.0]),
)
def test_text_is_independent_of_the_drafting(
    params: SamplingParams,
    speculation: SpeculationParams,
    seed: int,
    error: float,
    final: set[int],
    rounds_ahead: int,
    drafting_s: float,
) -> None:
    """However long it was drafted, before or beside the pass, and whatever lives on from tree to tree."""
    clock, sampler = VirtualClock(), Sampler(params, seed, VOCAB_SIZE)
    target = TimedModel(TARGET, VOCAB_SIZE, clock, lambda rows: 1 + 0.05 * rows)
    draft = TimedModel(draft_of(TARGET, seed=1, error=error), VOCAB_SIZE, clock, lambda _: drafting_s)
    estimates = estimates_of(switch=OverlapSwitch())
    drafter = StrictDrafter(draft, DraftRequest(sampler, final), speculation, estimates, clock=clock)
    text = generate(target, drafter, sampler, PROMPT, 20, rounds_ahead)
    assert text == plain_text(TARGET, params, seed, PROMPT, 20)
