"""From a scored tree to the tokens it yields. Knows nothing of models, caches or how the tree was drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from .sampling import Sampler
from .tree import ROOT, TokenTree


@dataclass(frozen=True)
class Verdict:
    """What one pass yields: the accepted nodes, root downwards, and the tokens chosen at the root and at each of them.

    One token more than nodes: the last one was chosen by the target where the tree had no such child.
    """

    path: list[int]
    tokens: list[int]


class Logits(Protocol):
    """fp32 logits [rows, V], a tensor or computed when a row is asked for."""

    def __getitem__(self, row: int) -> Tensor: ...


class TargetStates(Protocol):
    """Hidden states of the target behind the rows of a pass, computed when they are asked for.

    num_before: rows of the pass before the root's: the text's tokens that it scored beside the last one. layer_states:
    [num_before + 1 + N, hidden] after the layers that the pass was asked for, by their numbers.
    """

    @property
    def num_before(self) -> int: ...

    @property
    def layer_states(self) -> Mapping[int, Tensor]: ...

    def states(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), hidden]: what the head made the logits of these rows from."""

    def states_before(self, count: int) -> Tensor:
        """[count, hidden]: the same of the last `count` rows before the root's."""

    def before(self, first: int, last: int) -> Tensor:
        """fp32 logits [last - first, V] of rows first .. last of the num_before."""


class NoStates:
    """Of a pass that is played back or made up: there are none."""

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
    """What one pass of the target brought: every kind of draft and every guesser is told this one value.

    text: all tokens before the pass; it may grow afterwards. tree: what the pass judged, whoever guessed it. logits:
    fp32 [1 + N, V], the root's row, then the nodes'.
    """

    text: Sequence[int]
    tree: TokenTree
    verdict: Verdict
    logits: Logits
    states: TargetStates = field(default_factory=NoStates)


def exact_walk(tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
    """Walk down the tree with the target's own choices; what is returned is what plain decoding would have said.

    logits: fp32 [1 + N, V], the target's after the root, then after each node. position: that of the token after the
    root. Only nodes on the walk are sampled.
    """
    node, path, tokens = ROOT, list[int](), list[int]()
    while True:
        tokens.append(sampler.choose(logits[node + 1], position + len(path), tokens))
        child = tree.child(node, tokens[-1])
        if child is None:
            return Verdict(path, tokens)
        node = child
        path.append(node)
