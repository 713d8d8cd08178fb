"""The token tree: proposed continuations of a text, one token per node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

ROOT = -1  # parent index that stands for the root, the text's last token
# What proposes nodes: a model, earlier texts, the target's earlier predictions, a constraint that allows nothing else.
SOURCES = ("draft", "lookup", "recycling", "constraint")
DRAFT, LOOKUP, RECYCLING, CONSTRAINT = range(len(SOURCES))


@dataclass(frozen=True)
class TokenTree:
    """N proposed tokens below a root, parents before children.

    tokens [N]: token ids. parents [N]: index of the parent, ROOT (-1) for the root's children. depths [N]: 1 for the
    root's children. scores [N]: the drafter's estimate of the log-probability of the path down to the node. sources
    [N]: which of SOURCES gave each node its score; None: all are the draft's.
    The root, which is the text's last token, is not a node.
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    scores: FloatArray
    sources: IntArray | None = None

    @classmethod
    def empty(cls) -> TokenTree:
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none, np.empty(0))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """A single path with scores of 0."""
        num_tokens = len(tokens)
        places = np.arange(num_tokens)
        return cls(np.array(tokens, dtype=np.int64), places - 1, places + 1, np.zeros(num_tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def from_source(self, source: int) -> TokenTree:
        """The same tree, all of whose nodes one of SOURCES proposed."""
        return replace(self, sources=np.full(len(self), source))

    def source(self, node: int) -> str:
        """Which of SOURCES gave the node its score."""
        return SOURCES[DRAFT if self.sources is None else self.sources[node]]

    def picked(self, nodes: IntArray) -> TokenTree:
        """These nodes, in that order, as a tree. They contain the parent of each node before the node."""
        renumbered = np.full(len(self) + 1, ROOT)  # the last entry is for parent -1
        renumbered[nodes] = np.arange(len(nodes))
        sources = None if self.sources is None else self.sources[nodes]
        parents = renumbered[self.parents[nodes]]
        return TokenTree(self.tokens[nodes], parents, self.depths[nodes], self.scores[nodes], sources)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (ROOT for the root) with `token`, or None."""
        matches = np.flatnonzero((self.parents == node) & (self.tokens == token))
        return int(matches[0]) if len(matches) else None

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]


def node_paths(parents: IntArray, first: int = 0) -> tuple[IntArray, IntArray]:
    """The paths from the root's child down to each node from `first` on: nodes, path after path, and lengths [R].

    parents [N]: of all nodes, as in `TokenTree`.
    """
    assert (parents < np.arange(len(parents))).all(), "a node before its parent"
    above, levels = np.append(parents, ROOT), [np.arange(first, len(parents))]  # the last entry is for ROOT
    while (level := above[levels[-1]]).max(initial=ROOT) != ROOT:
        levels.append(level)
    nodes = np.stack(levels[::-1], axis=1)
    is_node = nodes != ROOT
    return nodes[is_node], is_node.sum(axis=1)


def ancestor_mask(parents: IntArray, first: int = 0) -> BoolArray:
    """Bool [R, N]: the nodes on the path to each node from `first` on, see `node_paths`."""
    nodes, lengths = node_paths(parents, first)
    mask = np.zeros((len(lengths), len(parents)), dtype=np.bool_)
    mask[np.repeat(np.arange(len(lengths)), lengths), nodes] = True
    return mask


def trimmed(tree: TokenTree, budget: int) -> TokenTree:
    """The best `budget` nodes, best first. Scores must not rise along a path, so that these nodes form a tree."""
    best = np.argsort(-tree.scores, kind="stable")[:budget]  # stable: a parent precedes a child with an equal score
    return tree.picked(best)
