"""The mask is the ancestor relation; a child and a path are found where a walk over the tokens would find them."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from offspec.scheduler.tree import ROOT, TokenTree

from .fakes import build_tree, many, paths, trees


@many
@given(tree=trees(vocab_size=3))
def test_mask_is_the_ancestor_relation(tree: TokenTree) -> None:
    tokens = paths(tree)
    expected = [[below[: len(above)] == above for above in tokens] for below in tokens]
    np.testing.assert_array_equal(tree.mask(), np.array(expected, dtype=bool).reshape(len(tree), len(tree)))


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


def test_mask_of_a_long_chain() -> None:
    np.testing.assert_array_equal(build_tree([range(300)]).mask(), np.tri(300, dtype=bool))


def test_empty_tree() -> None:
    tree = TokenTree.empty()
    assert len(tree) == 0
    assert tree.mask().shape == (0, 0)
    assert tree.mask().dtype == np.bool_
    assert tree.child(ROOT, 0) is None
    assert tree.path(ROOT) == []
