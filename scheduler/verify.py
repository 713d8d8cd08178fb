"""From a scored tree to the tokens it yields. Knows nothing of models, caches or how the tree was drafted."""

from __future__ import annotations

from dataclasses import dataclass
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
