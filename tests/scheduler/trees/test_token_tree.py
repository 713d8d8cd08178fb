"""The mask is the ancestor relation; children and paths are those of a walk; what is trimmed is a tree."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offspec.scheduler.trees.token_tree import ROOT, TokenTree, ancestor_mask, node_paths, trimmed

from ..fakes import many, paths, trees


@many
@given(tree=trees(vocab_size=3))
def test_mask_is_the_ancestor_relation(tree: TokenTree) -> None:
    tokens = paths(tree)
    expected = [[below[: len(above)] == above for above in tokens] for below in tokens]
    assert ancestor_mask(tree.parents).tolist() == expected


@many
@given(tree=trees(vocab_size=3), first=st.integers(0, 9))
def test_node_paths_are_those_of_the_nodes(tree: TokenTree, first: int) -> None:
    first = min(first, len(tree))
    nodes, lengths = node_paths(tree.parents, first)
    assert nodes.tolist() == [above for node in range(first, len(tree)) for above in tree.path(node)]
    assert lengths.tolist() == tree.depths[first:].tolist()
    np.testing.assert_array_equal(ancestor_mask(tree.parents, first), ancestor_mask(tree.parents)[first:])


@many
@given(tree=trees(vocab_size=3))
def test_child_is_found_by_its_token(tree: TokenTree) -> None:
    places = {path: node for node, path in enumerate(paths(tree))}
    for node, path in [(ROOT, ()), *enumerate(paths(tree))]:
        assert [tree.child(node, token) for token in range(4)] == [places.get((*path, token)) for token in range(4)]


@many
@given(tree=trees(vocab_size=3))
def test_path_leads_from_the_root_to_the_node(tree: TokenTree) -> None:
    assert [tuple(tree.tokens[tree.path(node)]) for node in range(len(tree))] == paths(tree)
    assert [len(tree.path(node)) for node in range(len(tree))] == tree.depths.tolist()


def test_empty_tree() -> None:
    tree = TokenTree.empty()
    assert len(tree) == 0
    assert ancestor_mask(tree.parents).shape == (0, 0)
    assert ancestor_mask(tree.parents).dtype == np.bool_
    assert tree.child(ROOT, 0) is None
    assert tree.path(ROOT) == []


@st.composite
def scored_trees(draw: st.DrawFn) -> TokenTree:
    """Trees whose scores fall, or stay, along each path."""
    tree = draw(trees(vocab_size=3))
    gains = draw(st.lists(st.sampled_from([0.0, -0.5, -1.0]), min_size=len(tree), max_size=len(tree)))
    scores = [sum((gains[above] for above in tree.path(node)), 0.0) for node in range(len(tree))]
    return TokenTree(tree.tokens, tree.parents, tree.depths, np.array(scores))


def scores_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return dict(zip(paths(tree), tree.scores.tolist(), strict=True))


def assert_best_of(tree: TokenTree, everything: dict[tuple[int, ...], float], budget: int) -> None:
    """A tree, parents first, of `budget` nodes of `everything`, and no other is better than one of them."""
    assert len(set(paths(tree))) == len(tree) == min(budget, len(everything))
    assert (tree.parents < np.arange(len(tree))).all()
    assert tree.depths.tolist() == [len(path) for path in paths(tree)]
    assert tree.scores.tolist() == sorted(everything.values(), reverse=True)[:budget]
    assert scores_of(tree).items() <= everything.items()


@many
@given(tree=scored_trees(), budget=st.integers(0, 12))
def test_trimmed_keeps_the_best_and_keeps_a_tree(tree: TokenTree, budget: int) -> None:
    assert_best_of(trimmed(tree, budget), scores_of(tree), budget)
