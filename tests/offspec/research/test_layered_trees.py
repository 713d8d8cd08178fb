"""Shapes and trees are the best of all, by brute force; drafting by layers leaves text and caches as they must be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.errors import NumericalError
from offspec.research.opt_tree import OptTreeDrafter
from offspec.research.sequoia import (
    MeasuredAcceptance,
    RankAcceptance,
    SequoiaDrafter,
    SizeForHardware,
    Topology,
    best_size,
    best_topology,
)
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, FloatArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict

from ...refusals import refused
from ...scheduler.fakes import (
    Rule,
    RuleModel,
    few,
    noise,
    paths,
    plain_text,
    processed,
    random_rule,
    sampling_params,
    softmax,
)

Path = tuple[int, ...]

VOCAB_SIZE, PROMPT, SEED = 4, [3, 0, 2], 11
DRAFT = random_rule(VOCAB_SIZE, seed=0)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
KINDS = ["sequoia", "opt-tree"]
each_kind = pytest.mark.parametrize("kind", KINDS)


# ------------------------------------------------------------------------------------------------ twins


@cache
def all_trees(num_branches: int, num_nodes: int, max_depth: int) -> list[frozenset[Path]]:
    """Every tree of up to num_nodes nodes, as the set of its nodes' paths; a path says which branch to take."""
    if num_nodes == 0:
        return [frozenset()]
    smaller = all_trees(num_branches, num_nodes - 1, max_depth)
    grown = {
        tree | {(*path, branch)}
        for tree in smaller
        for path in (*tree, ())
        if len(path) < max_depth
        for branch in range(num_branches)
    }
    return list({*smaller, *grown})


def rank_paths(shape: Topology) -> list[Path]:
    found: list[Path] = []
    for parent, rank in zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), rank))
    return found


# ------------------------------------------------------------------------------------------------ Sequoia's shape


@few
@given(
    acceptance=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    num_nodes=st.integers(0, 5),
    max_depth=st.integers(1, 4),
)
def test_no_tree_is_better(acceptance: list[float], num_nodes: int, max_depth: int) -> None:
    """Whatever the order of the ranks, for the walk takes any child."""
    shape = best_topology(np.array(acceptance), num_nodes, max_depth)
    chances = {
        path: math.prod(acceptance[rank] for rank in path)
        for depth in range(1, max_depth + 1)
        for path in itertools.product(range(len(acceptance)), repeat=depth)
    }
    best = max(sum(chances[path] for path in tree) for tree in all_trees(len(acceptance), num_nodes, max_depth))
    assert 1 + shape.probabilities.sum() == pytest.approx(1 + best)
    np.testing.assert_allclose(shape.probabilities, [chances[path] for path in rank_paths(shape)])


# ------------------------------------------------------------------------------------------------ the draft's own view


def draft_values(params: SamplingParams, path: Path, *, coupled: bool, columns: int = VOCAB_SIZE) -> FloatArray:
    """What the draft holds of each child of PROMPT + path, by one forward."""
    values = processed(DRAFT((*PROMPT, *path)), params, (*PROMPT, *path))
    if coupled and params.temperature > 0:
        values = values + noise(SEED, len(PROMPT) + len(path), columns)
    return values


def every_path(
    params: SamplingParams, max_depth: int, final: Collection[int], children: int, *, coupled: bool
) -> dict[Path, float]:
    """The probability that the draft gives to every path it may guess: the whole tree, by recursion."""
    found: dict[Path, float] = {(): 1.0}

    def grow(path: Path) -> None:
        values = draft_values(params, path, coupled=coupled)
        chances = softmax(values)
        for token in np.argsort(-values)[:children].tolist():
            if values[token] > -math.inf:
                found[(*path, token)] = found[path] * chances[token]
                if len(path) + 1 < max_depth and token not in final:
                    grow((*path, token))

    grow(())
    del found[()]
    return found


def drafter_of(
    kind: str,
    model: RuleModel,
    params: SamplingParams = SAMPLED,
    sampler: Sampler | None = None,
    final: Collection[int] = (),
    acceptance: MeasuredAcceptance | None = None,
    coupled: bool = False,
    threshold: float = 0.0,
    **speculation: Any,
) -> SequoiaDrafter | OptTreeDrafter:
    """A drafter whose sampler knows the prompt."""
    if sampler is None:
        sampler = Sampler(params, SEED, VOCAB_SIZE)
        sampler.extend(PROMPT)
    settings = SpeculationParams(**speculation)
    if kind == "sequoia":
        return SequoiaDrafter(model, sampler, settings, acceptance or MeasuredAcceptance(), final, coupled=coupled)
    return OptTreeDrafter(model, sampler, settings, final, threshold=threshold, coupled=coupled)


def assert_well_formed(tree: TokenTree, budget: int, max_depth: int, final: Collection[int] = ()) -> None:
    assert len(tree) <= budget
    assert len(set(paths(tree))) == len(tree), "siblings hold the same token"
    assert (tree.parents < np.arange(len(tree))).all()
    assert tree.depths.tolist() == [len(path) for path in paths(tree)]
    assert max(tree.depths, default=0) <= max_depth
    assert (np.diff(tree.scores) <= 1e-6).all()
    assert (tree.scores <= 0).all()
    assert not {int(tree.tokens[parent]) for parent in tree.parents if parent != ROOT} & set(final)


# ------------------------------------------------------------------------------------------------ Sequoia's size


@few
@given(
    acceptance=st.lists(st.floats(0.01, 1), min_size=1, max_size=3),
    flat=st.integers(0, 5),
    slope=st.floats(0.01, 1),
    round_s=st.sampled_from([0.0, 0.05, 0.5, 5.0]),
)
def test_size_and_depth_are_the_fastest(acceptance: list[float], flat: int, slope: float, round_s: float) -> None:
    pass_s = 1 + slope * np.maximum(0, np.arange(6) - flat)
    size = best_size(np.array(acceptance), 4, pass_s, round_s)

    def rate(tree: Collection[Path]) -> float:
        tokens = 1 + sum(math.prod(acceptance[rank] for rank in path) for path in tree)
        return tokens / float(pass_s[len(tree)] + round_s * max(map(len, tree), default=0))

    chosen = best_topology(np.array(acceptance), size.nodes, size.depth) if size.depth else None
    best = rate(rank_paths(chosen)) if chosen is not None else rate([])
    assert best == pytest.approx(max(rate(tree) for tree in all_trees(len(acceptance), 5, 4)))


def proposed_nodes(pass_s: Callable[[int], float], round_s: float) -> list[int]:
    """Nodes of the trees of some passes, whose seconds a clock of the test's own shows."""
    now = [0.0]
    model, costs = RuleModel(DRAFT, VOCAB_SIZE), Costs()
    score = model.score

    def timed(*args: Any) -> Tensor:
        now[0] += round_s
        return score(*args)

    model.score = timed  # type: ignore[method-assign]
    sampler = Sampler(GREEDY, SEED, VOCAB_SIZE)
    sampler.extend(PROMPT)
    hardware = SizeForHardware(costs, 40, clock=lambda: now[0])
    text, sizes = list(PROMPT), list[int]()
    drafter = SequoiaDrafter(model, sampler, SpeculationParams(), MeasuredAcceptance(), hardware=hardware)
    for _ in range(SizeForHardware.PASSES + 2):
        tree = drafter.propose(text, 4)
        sizes.append(len(tree))
        now[0] += pass_s(1 + len(tree))
        tokens = [0]
        drafter.observe(TargetPass(text, tree, Verdict([], tokens), torch.empty(0, 0)))
        sampler.extend(tokens)
        text += tokens
    return sizes


def test_the_size_follows_measured_seconds() -> None:
    """Until then it is a tree of the default size, as far as the draft has tokens for it."""
    cheap, dear = proposed_nodes(lambda rows: 1.0, 1e-6), proposed_nodes(lambda rows: float(rows), 1e-6)
    assert cheap[0] == dear[0]
    assert dear[-1] < 4 < cheap[-1] <= 40
    assert proposed_nodes(lambda rows: 1.0, 100.0)[-1] == 0


# ------------------------------------------------------------------------------------------------ Sequoia's drafter


@few
@given(
    params=sampling_params(),
    coupled=st.booleans(),
    budget=st.sampled_from([1, 7, 30, 200]),
    children=st.sampled_from([1, 3, 16]),
    max_depth=st.sampled_from([1, 3, 4]),
    final=st.sampled_from([(), (1,), (0, 2)]),
)
def test_the_shape_is_filled_with_the_drafts_choices(
    params: SamplingParams, coupled: bool, budget: int, children: int, max_depth: int, final: tuple[int, ...]
) -> None:
    model = RuleModel(DRAFT, VOCAB_SIZE)
    drafter = drafter_of(
        "sequoia", model, params, final=final, coupled=coupled, budget=budget, children=children, max_depth=max_depth
    )
    tree = drafter.propose(PROMPT, max_depth=9)
    assert_well_formed(tree, budget, max_depth, final)
    shape = best_topology(RankAcceptance().probabilities(min(children, VOCAB_SIZE)), budget, max_depth)
    expected: dict[Path, float] = {}
    tokens: dict[Path, Path | None] = {(): ()}  # ranks → tokens, None where there is nothing
    for ranks, chance in zip(rank_paths(shape), shape.probabilities, strict=True):
        above = tokens[ranks[:-1]]
        tokens[ranks] = None
        if above is None or (above and above[-1] in final):
            continue
        values = draft_values(params, above, coupled=coupled)
        token = int(np.argsort(-values, kind="stable")[ranks[-1]])
        if values[token] > -math.inf:
            tokens[ranks] = (*above, token)
            expected[(*above, token)] = chance
    assert dict(zip(paths(tree), np.exp(tree.scores), strict=True)) == pytest.approx(expected)
    assert len(model.batches) <= max_depth
    inner = {int(parent) for parent in tree.parents} - {ROOT}
    assert sum(model.batches) >= len(inner)


def test_ranks_are_counted_on_the_walk() -> None:
    """A draft that is the target is right at the first rank, at every node that was expanded, and at no other."""
    acceptance = MeasuredAcceptance()
    model, sampler = RuleModel(DRAFT, VOCAB_SIZE), Sampler(GREEDY, SEED, VOCAB_SIZE)
    drafter = drafter_of("sequoia", model, sampler=sampler, acceptance=acceptance, budget=12)
    tree = drafter.propose(PROMPT, 9)
    words = plain_text(DRAFT, GREEDY, SEED, PROMPT, 3)
    path = [paths(tree).index(tuple(words[:length])) for length in (1, 2)]
    drafter.observe(TargetPass(PROMPT, tree, Verdict(path, words), torch.empty(0, 0)))
    ranks = acceptance.ranks(greedy=True, coupled=False)
    assert ranks.num_nodes == 3
    prior = RankAcceptance().probabilities(1)[0] * RankAcceptance.PRIOR_NODES
    assert ranks.probabilities(1)[0] == pytest.approx((prior + 3) / (RankAcceptance.PRIOR_NODES + 3))
    assert acceptance.ranks(greedy=False, coupled=False).num_nodes == 0


# ------------------------------------------------------------------------------------------------ OPT-Tree's drafter


@few
@given(
    params=sampling_params(),
    coupled=st.booleans(),
    budget=st.integers(1, 5),
    children=st.sampled_from([1, 3, 16]),
    max_depth=st.integers(1, 3),
    final=st.sampled_from([(), (1,), (0, 2)]),
)
def test_no_tree_has_more_of_the_drafts_probability(
    params: SamplingParams, coupled: bool, budget: int, children: int, max_depth: int, final: tuple[int, ...]
) -> None:
    """With a threshold of 0, against all trees."""
    model = RuleModel(DRAFT, VOCAB_SIZE)
    drafter = drafter_of(
        "opt-tree", model, params, final=final, coupled=coupled, budget=budget, children=children, max_depth=max_depth
    )
    tree = drafter.propose(PROMPT, max_depth=9)
    assert_well_formed(tree, budget, max_depth, final)
    chances = every_path(params, max_depth, final, children, coupled=coupled)
    np.testing.assert_allclose(np.exp(tree.scores), [chances[path] for path in paths(tree)], atol=1e-5)
    best = max(
        sum(chances.get(path, -math.inf) for path in nodes) for nodes in all_trees(VOCAB_SIZE, budget, max_depth)
    )
    assert np.exp(tree.scores).sum() == pytest.approx(best, abs=1e-4)


# ------------------------------------------------------------------------------------------------ both


@each_kind
@pytest.mark.parametrize("bad", [[0, math.nan, 0, 0], [-math.inf] * 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_draft_logits_that_are_not_numbers_are_refused_in_one_line(
    kind: str, params: SamplingParams, bad: list[float]
) -> None:
    rule: Rule = lambda _: np.array(bad)  # noqa: E731
    with refused(NumericalError, "draft", "logits", "finite"):
        drafter_of(kind, RuleModel(rule, VOCAB_SIZE), params).propose(PROMPT, 3)
