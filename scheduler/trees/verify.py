"""Verification: from a scored tree to its accepted nodes and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from .sampling import Sampler
from .token_tree import ROOT, TokenTree


@dataclass(frozen=True)
class Verdict:
    """The result of one pass: the accepted nodes, root downwards, and the target's token at the root and at each node.

    tokens has one more entry than path: the target's last choice is not in the tree.
    """

    path: list[int]
    tokens: list[int]


class Logits(Protocol):
    """fp32 logits [rows, V]: a tensor, or computed on access to a row."""

    def __getitem__(self, row: int) -> Tensor: ...


class TargetStates(Protocol):
    """Hidden states of the target's pass, computed on access.

    num_before: rows before the root's, which are the text's scored tokens before the last one. layer_states:
    [num_before + 1 + N, hidden] after each requested layer, by layer number.
    """

    @property
    def num_before(self) -> int: ...

    @property
    def layer_states(self) -> Mapping[int, Tensor]: ...

    def states(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), hidden]: the final states of these rows, the input of the head."""

    def states_before(self, count: int) -> Tensor:
        """[count, hidden]: the final states of the last `count` rows before the root's."""

    def before(self, first: int, last: int) -> Tensor:
        """fp32 logits [last - first, V] of rows first to last - 1 of the num_before rows."""


class NoStates:
    """The empty states of a replayed or simulated pass."""

    num_before = 0
    layer_states: Mapping[int, Tensor] = {}

    def states(self, rows: Sequence[int]) -> Tensor:
        raise LookupError("this pass has no hidden states")

    def states_before(self, count: int) -> Tensor:
        raise LookupError("this pass has no hidden states")

    def before(self, first: int, last: int) -> Tensor:
        raise LookupError("this pass has no logits before the root's")


@dataclass(frozen=True)
class TargetPass:
    """One pass of the target, as every draft and guesser receives it.

    text: all tokens before the pass; it may grow afterwards. tree: the verified tree, from any drafter. logits:
    fp32 [1 + N, V], the root's row, then the nodes'.
    """

    text: Sequence[int]
    tree: TokenTree
    verdict: Verdict
    logits: Logits
    states: TargetStates = field(default_factory=NoStates)


def verify_exactly(tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
    """Walk down the tree by the target's own choices; the tokens equal those of plain decoding.

    logits: fp32 [1 + N, V], the target's after the root, then after each node. position: of the token after the root.
    Only nodes on the walk are sampled.
    """
    node, path, tokens = ROOT, list[int](), list[int]()
    while True:
        tokens.append(sampler.choose(logits[node + 1], position + len(path), tokens))
        child = tree.child(node, tokens[-1])
        if child is None:
            return Verdict(path, tokens)
        node = child
        path.append(node)
