"""What a constraint does to trees: no forbidden nodes, and forced ones without a guess (DOMINO, 2403.06988)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..trees.constraint import MaskBits, TokenConstraint, allows
from ..trees.token_tree import CONSTRAINT, ROOT, TokenTree
from ..trees.verify import TargetPass
from .drafter import SequentialDrafter


def allowed_part(tree: TokenTree, constraint: TokenConstraint) -> TokenTree:
    """The nodes of `tree` whose whole path the constraint allows."""
    if constraint.is_idle(tree.tokens):
        return tree
    paths: dict[int, list[int]] = {ROOT: []}
    masks: dict[int, MaskBits | None] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if parent not in paths:
            continue
        if parent not in masks:
            masks[parent] = constraint.mask(paths[parent])
        if allows(masks[parent], token):
            paths[node] = [*paths[parent], token]
    kept = np.array(list(paths)[1:], dtype=np.int64)
    if len(kept) == len(tree):
        return tree
    return tree.picked(kept)


def prepare_masks(constraint: TokenConstraint, tree: TokenTree, is_over: Callable[[], bool]) -> None:
    """Compute the masks at the root and at a tree's nodes, in their order, until `is_over`: during the target's pass.

    A walk then finds them computed.
    """
    if constraint.is_idle(tree.tokens):
        return
    paths: dict[int, list[int]] = {ROOT: []}
    constraint.mask([])
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if is_over():
            return
        paths[node] = [*paths[parent], token]
        constraint.mask(paths[node])


class ForcedDrafter(SequentialDrafter):
    """Proposes the tokens that the constraint forces, and no others: for engines without a draft."""

    def __init__(self, constraint: TokenConstraint, max_nodes: int) -> None:
        self._constraint, self._max_nodes = constraint, max_nodes

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        return TokenTree.chain(self._constraint.forced([], min(max_depth, self._max_nodes))).from_source(CONSTRAINT)

    def observe(self, done: TargetPass) -> None:
        pass
