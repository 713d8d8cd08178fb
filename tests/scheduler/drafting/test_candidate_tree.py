"""A growing tree against a slow twin that keeps paths in dictionaries: equal candidates, scores, rows and parents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.scheduler.drafting.candidate_tree import CandidateTree, ChildScores
from offspec.scheduler.pace.calibration import GRID, UNIT
from offspec.scheduler.trees.token_tree import (
    CONSTRAINT,
    LOOKUP,
    RECYCLING,
    ROOT,
    SOURCES,
    FloatArray,
    TokenTree,
    trimmed,
)

from ..fakes import PlainCandidates, TokenPath, few, guesses_of, many, paths, random_rule, trees

VOCAB_SIZE, FAR = 4, 999


def values_after(path: TokenPath, version: int = 0) -> FloatArray:
    """Some tokens are excluded, now and then all but one, whose probability is then 1."""
    values = random_rule(VOCAB_SIZE, seed=7 + version)(path)
    return np.where(values < min(1.0, values.max()), -math.inf, values) if sum(path) % 3 == 0 else values


class Pair:
    """A candidate tree and its twin, driven alike and compared after every step."""

    def __init__(self, num_children: int, final: Collection[int]) -> None:
        self.versions: Counter[TokenPath] = Counter()  # how often the guesses after a path have been revised
        self.candidates, self.twin = CandidateTree(final), PlainCandidates(self.values, num_children, final)
        self.num_children, self.index = num_children, 0

    def values(self, path: TokenPath) -> FloatArray:
        return values_after(path, self.versions[path])

    def scores_of(self, relative: list[list[int]]) -> ChildScores:
        """As a drafter makes them of the logits after these nodes."""
        return ChildScores.joined(
            [guesses_of(self.values((*self.twin.root, *path)), self.num_children) for path in relative]
        )

    def add_root(self) -> None:
        self.candidates.add(np.array([ROOT]), self.scores_of([[]]), self.index)
        self.twin.is_rooted = True
        self.check()

    def expand(self, nodes: list[int]) -> None:
        found = self.candidates.path_tokens(np.array(nodes))
        self.twin.expanded += [tuple(path) for path in found]
        assert self.candidates.expand(np.array(nodes)).tolist() == self.twin.parents()
        self.candidates.add(np.array(nodes), self.scores_of(found), self.index)
        self.check()

    def add_guesses(self, tree: TokenTree) -> None:
        self.candidates.add_guesses(tree, self.index)
        self.twin.add_guesses(tree)
        self.check()

    def revise(self, nodes: list[int], index: int) -> None:
        relative = [list(self.path(node)) if node != ROOT else [] for node in nodes]
        self.versions.update((*self.twin.root, *path) for path in relative)
        self.index = index
        self.candidates.revise(np.array(nodes), self.scores_of(relative), index)
        self.check()

    def rescore(self, index: int) -> None:
        self.index = index
        self.candidates.rescore(index)
        self.check()

    def reroot(self, node: int) -> None:
        path = self.path(node)
        rows = self.candidates.reroot(node)
        assert rows.tolist() == self.twin.reroot(path, GRID[self.index])
        self.check()

    def path(self, node: int) -> TokenPath:
        return tuple(self.candidates.path_tokens(np.array([node]))[0])

    def expandable(self) -> list[int]:
        """Open candidates whose parents have been expanded, in the order of `best`."""
        candidates = self.candidates
        return [
            node
            for node in candidates.open_among(candidates.best(len(candidates.nodes), FAR), FAR).tolist()
            if (parent := candidates.nodes["parent"][node]) == ROOT or candidates.nodes["row"][parent] >= 0
        ]

    def check(self) -> None:
        candidates, twin = self.candidates, self.twin
        nodes, found = candidates.nodes, candidates.path_tokens(np.arange(len(candidates.nodes)))
        places = {tuple(path): node for node, path in enumerate(found)}
        scores = twin.scores(GRID[self.index])
        assert len(places) == len(nodes), "a node is there twice"
        assert {path for path, node in places.items() if nodes["score"][node] > -np.inf} == scores.keys()
        expected = [scores.get(path, -np.inf) for path in places]  # what was guessed once may be no candidate any more
        np.testing.assert_allclose(nodes["score"], expected, atol=1e-9)
        assert nodes["depth"].tolist() == [len(path) for path in places]
        assert nodes["row"].tolist() == [twin.row(path) for path in places]
        assert (nodes["parent"] < np.arange(len(nodes))).all()
        inner = nodes["parent"] != ROOT
        assert (nodes["score"][inner] <= nodes["score"][nodes["parent"][inner]]).all()
        assert (nodes["score"] <= 0).all()
        assert candidates.num_expanded == len(twin.expanded)
        for path, node in list(places.items())[-8:]:
            assert set(path) <= set(candidates.tokens_above(np.array([node])).tolist())
        if twin.is_rooted:
            wanted = self.scores_of([[], *map(list, twin.expanded)])
            np.testing.assert_array_equal(candidates.child_scores.tokens, wanted.tokens)
            np.testing.assert_array_equal(candidates.child_scores.values, wanted.values)
            np.testing.assert_array_equal(candidates.child_scores.normalisers, wanted.normalisers)
            self.check_disputed()

    def check_disputed(self) -> None:
        candidates = self.candidates
        disputed, claims = candidates.disputed(np.arange(-1, len(candidates.nodes)), self.index)
        found = dict(zip([self.path(node) for node in disputed], claims, strict=True))
        wanted = self.twin.disputed(GRID[self.index])
        near = [path for path in wanted if math.isfinite(wanted[path])]
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose([found[path] for path in near], [wanted[path] for path in near], atol=1e-9)

    def check_best(self, count: int, max_depth: int) -> None:
        candidates, scores = self.candidates, self.twin.scores(GRID[self.index])
        nodes = candidates.best(count, max_depth)
        tree = candidates.tree(nodes)
        allowed = sorted((score for path, score in scores.items() if len(path) <= max_depth), reverse=True)
        np.testing.assert_allclose(tree.scores, allowed[:count], atol=1e-9)
        assert len(set(paths(tree))) == len(tree)
        assert paths(tree) == [self.path(node) for node in nodes]
        assert tree.depths.tolist() == [len(path) for path in paths(tree)]
        assert (tree.parents < np.arange(len(tree))).all()
        is_open = [self.twin.is_open(path) and len(path) < max_depth for path in paths(tree)]
        assert candidates.open_among(nodes, max_depth).tolist() == nodes[is_open].tolist()


@many
@given(
    data=st.data(),
    num_children=st.integers(1, VOCAB_SIZE),
    final=st.sampled_from([(), (), (1,), (0, 3)]),
    has_guesses=st.booleans(),
)
def test_a_candidate_tree_is_that_of_its_twin(
    data: st.DataObject, num_children: int, final: tuple[int, ...], has_guesses: bool
) -> None:
    """Whatever is expanded, guessed by others, judged anew, and kept."""
    pair = Pair(num_children, final)
    steps = ["expand", "expand", "expand", "reroot", "rescore", "revise", *(["guesses"] if has_guesses else [])]
    if has_guesses and data.draw(st.booleans(), label="guesses first"):
        pair.add_guesses(data.draw(guesser_trees()))
    pair.add_root()
    for _ in range(data.draw(st.integers(1, 9), label="steps")):
        candidates = pair.candidates
        match data.draw(st.sampled_from(steps), label="step"):
            case "expand" if pair.expandable():
                chosen = data.draw(st.sets(st.sampled_from(pair.expandable()), min_size=1, max_size=6), label="nodes")
                pair.expand([node for node in pair.expandable() if node in chosen])
            case "reroot" if len(expanded := candidates.expanded(FAR)):
                pair.reroot(data.draw(st.sampled_from(expanded.tolist()), label="node"))
            case "rescore":
                pair.rescore(data.draw(st.integers(0, len(GRID) - 1), label="index"))
            case "revise":
                asked = [ROOT, *np.flatnonzero(candidates.nodes["row"] >= 0).tolist()]
                chosen = data.draw(st.lists(st.sampled_from(asked), min_size=1, unique=True), label="nodes")
                pair.revise(chosen, data.draw(st.integers(0, len(GRID) - 1), label="index"))
            case "guesses":
                pair.add_guesses(data.draw(guesser_trees()))
        pair.check_best(data.draw(st.integers(0, 30), label="count"), data.draw(st.integers(1, 4), label="depth"))


def guesser_trees() -> st.SearchStrategy[TokenTree]:
    """From far better than the model's guesses to far worse."""
    return st.builds(
        lambda tree, steepness: replace(tree, scores=tree.scores * steepness),
        trees(VOCAB_SIZE, max_depth=3, max_paths=4),
        st.sampled_from([0.1, 1.0, 5.0]),
    )


@many
@given(data=st.data(), num_children=st.integers(1, VOCAB_SIZE))
def test_a_guess_and_its_parent_in_one_batch(data: st.DataObject, num_children: int) -> None:
    """A guess may be better than all the model knows, before the model has seen its parent."""
    pair = Pair(num_children, ())
    pair.add_root()
    pair.add_guesses(data.draw(guesser_trees(), label="guesses"))
    for _ in range(3):
        candidates = pair.candidates
        batch = candidates.open_among(candidates.best(data.draw(st.integers(1, 12), label="count"), FAR), FAR)
        if len(batch):
            pair.expand(batch.tolist())


def test_parents_behind_a_new_root() -> None:
    """A chain of 200: every row is below the one before it."""
    candidates, sure = CandidateTree(), guesses_of(np.zeros(1), 1)
    candidates.add(np.array([ROOT]), sure, UNIT)
    for _ in range(200):
        candidates.expand(nodes := candidates.open_among(candidates.best(FAR, FAR), FAR))
        candidates.add(nodes, sure, UNIT)
    node = int(np.flatnonzero(candidates.nodes["row"] == 120)[0])
    assert candidates.reroot(node).tolist() == list(range(121, 200))
    last = candidates.open_among(candidates.best(FAR, FAR), FAR)
    assert candidates.expand(last).tolist() == list(range(-1, 79))


# ------------------------------------------------------------------------------------------------ guesses


def test_likelihood_is_that_of_the_scores() -> None:
    guesses = guesses_of(np.array([1.0, -0.5, 2.0, 0.3]), 3)
    for index, (column, token) in enumerate([(0, 2), (1, 0), (2, 3)] * 3):
        assert guesses.likelihood(0, token)[index] == pytest.approx(guesses.log_probabilities(index)[0, column])


@pytest.mark.parametrize("token", [1, 3, 4, 77])
def test_likelihood_of_a_token_that_was_not_guessed_is_that_of_the_last(token: int) -> None:
    """Beyond the candidates (1), excluded (3, 4), or unknown to the draft (77)."""
    guesses = guesses_of(np.array([2.0, -1.0, 0.5, -math.inf, -math.inf]), 2)
    assert np.isfinite(guesses.likelihood(0, token)).all()
    np.testing.assert_array_equal(guesses.likelihood(0, token), guesses.likelihood(0, 2))
    with_excluded = guesses_of(np.array([2.0, 0.5, 0.5, -math.inf, -math.inf]), 5)
    np.testing.assert_array_equal(with_excluded.likelihood(0, 3), with_excluded.likelihood(0, 2))


@few
@given(values=st.lists(st.floats(-30, 30), min_size=1, max_size=8), rounding=st.floats(-1e-6, 1e-6))
def test_log_probabilities_are_never_above_zero(values: list[float], rounding: float) -> None:
    exact = guesses_of(np.array(values), len(values))
    guesses = ChildScores(exact.tokens, exact.values, exact.normalisers + rounding)
    for index in range(len(GRID)):
        assert (guesses.log_probabilities(index) <= 0).all()
        assert np.exp(guesses.log_probabilities(index)).sum() == pytest.approx(1, abs=1e-5)


def test_a_trees_nodes_say_what_proposed_them() -> None:
    """The better score counts: a lookup's of certainty before the model's, the model's before a weak claim."""
    candidates = CandidateTree()
    candidates.add(np.array([ROOT]), guesses_of(np.log([0.6, 0.3, 0.1]), 3), UNIT)
    certain = replace(TokenTree.chain([1, 2]), scores=np.array([-0.01, -0.02])).from_source(LOOKUP)
    weak = replace(TokenTree.chain([0]), scores=np.array([-9.0])).from_source(RECYCLING)
    for guess in (certain, weak):
        candidates.add_guesses(guess, UNIT)
    found = candidates.tree(candidates.best(4, 4))
    sources = dict(zip(paths(found), [SOURCES[each] for each in found.sources], strict=True))
    assert sources == {(1,): "lookup", (1, 2): "lookup", (0,): "draft", (2,): "draft"}
    kept = trimmed(found, 2)
    assert [SOURCES[each] for each in kept.sources] == ["lookup", "lookup"]
    (forced,) = candidates.add_forced(ROOT, [3], UNIT)
    best = candidates.best(9, 1)
    assert candidates.tree(best).sources[best.tolist().index(forced)] == CONSTRAINT
