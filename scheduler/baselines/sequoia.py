"""Sequoia's trees (2402.12374): a shape that is fixed before a token is known, for the acceptance measured so far.

The draft is asked once a layer. Judged by the draft's own probabilities as published; `coupled` lets it see the
target's noise as well (see `child_scores`), a stronger baseline than the paper's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ..drafter import SequentialDrafter, TreeModel
from ..layered_draft import UNEXPANDED, LayeredDraft, subtree
from ..params import DEFAULT_NODES, SpeculationParams
from ..sampling import Sampler
from ..tree import ROOT, FloatArray, IntArray, TokenTree
from ..verify import TargetPass

# ------------------------------------------------------------------------------------------------ Sequoia's shape


@dataclass(frozen=True)
class Topology:
    """The shape of a tree of N nodes whose tokens are still open, likeliest node first, so parents before children.

    parents [N]: index of the parent, ROOT (-1) for the root's children. ranks [N]: which of the draft's choices after
    the parent it is, 0 for the first. depths [N]: 1 for the root's children. probabilities [N]: that it is accepted.
    """

    parents: IntArray
    ranks: IntArray
    depths: IntArray
    probabilities: FloatArray

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def expected_tokens(self) -> float:
        """Tokens that a pass is expected to yield: one for each accepted node, and the target's own."""
        return 1 + float(self.probabilities.sum())


def best_topology(acceptance: FloatArray, num_nodes: int, max_depth: int) -> Topology:
    """The tree of at most `num_nodes` nodes and depth `max_depth` with the most expected tokens (Sequoia, section 3.1).

    acceptance [C], each in [0, 1]: how likely the child of a given rank is the one accepted, once its parent is.
    Sequoia assumes that this depends on the rank alone, so a node's probability is the product along its path, and a
    tree is expected to yield 1 + the sum over its nodes. The paper finds its maximum by a dynamic programme over size,
    depth and branches, in which a node's children are its first k. The exact walk needs no such order, and a product of
    numbers up to 1 never grows along a path: so the `num_nodes` likeliest of all paths are a tree, no tree sums to
    more, and a heap finds them in O(N log N). Where acceptance falls with the rank, the two agree; the tests hold this
    against the published recurrence, and both against every tree there is. The first n nodes are the best tree of n
    nodes. Paths that are never accepted are left out. Among equals the shallower comes first.
    """
    assert ((acceptance >= 0) & (acceptance <= 1)).all()
    order = np.argsort(-acceptance, kind="stable")
    chances = acceptance[order].tolist()
    nodes: list[tuple[int, int, int, float]] = []  # parent, rank, depth, probability
    waiting: list[tuple[float, int, int, int]] = []  # -probability, depth, parent, place in `order`

    def wait(parent: int, place: int, depth: int) -> None:
        above = 1.0 if parent == ROOT else nodes[parent][-1]
        if place < len(chances) and depth <= max_depth and (probability := above * chances[place]) > 0:
            heappush(waiting, (-probability, depth, parent, place))

    wait(ROOT, 0, depth=1)
    while waiting and len(nodes) < num_nodes:
        negative, depth, parent, place = heappop(waiting)
        nodes.append((parent, int(order[place]), depth, -negative))
        wait(parent, place + 1, depth)
        wait(len(nodes) - 1, 0, depth + 1)
    columns = np.array(nodes, dtype=np.float64).reshape(-1, 4).T
    parents, ranks, depths = columns[:3].astype(np.int64)
    return Topology(parents, ranks, depths, columns[3])


def best_size(acceptance: FloatArray, max_depth: int, pass_s: FloatArray, round_s: float) -> tuple[int, int]:
    """Nodes and depth that yield the most tokens per second, fewest first (Sequoia, section 3.3).

    pass_s [1 + N]: seconds of a target pass over 0 to N nodes. round_s: seconds of one draft forward; each layer takes
    one. (0, 0) where no tree is worth drafting.
    """
    best = (1 / float(pass_s[0]), 0, 0)
    for limit in range(1, max_depth + 1):
        shape = best_topology(acceptance, len(pass_s) - 1, limit)
        if not len(shape) or shape.depths.max() < limit:
            break
        rates = (1 + shape.probabilities.cumsum()) / (pass_s[1 : len(shape) + 1] + limit * round_s)
        if (rate := float(rates.max())) > best[0]:
            best = (rate, int(rates.argmax()) + 1, limit)
    return best[1:]


class RankAcceptance:
    """How often the target's token was the draft's choice of each rank, over the verified nodes that were expanded.

    The prior counts as `PRIOR_NODES` nodes of which the first choice met half, and those behind it less by the square
    of their rank.
    """

    PRIOR_NODES = 4.0

    def __init__(self) -> None:
        self.num_nodes = 0
        self._counts = Counter[int]()

    def observe(self, rank: int | None) -> None:
        """The rank of the target's token at one verified node; None where it was not among the candidates."""
        self.num_nodes += 1
        if rank is not None:
            self._counts[rank] += 1

    def probabilities(self, num_ranks: int) -> FloatArray:
        """[num_ranks], for `best_topology`."""
        prior: FloatArray = 0.5 / np.arange(1.0, num_ranks + 1) ** 2
        counts = np.array([self._counts[rank] for rank in range(num_ranks)])
        mean: FloatArray = (self.PRIOR_NODES * prior + counts) / (self.PRIOR_NODES + self.num_nodes)
        return mean


class MeasuredAcceptance:
    """How often a draft's ranks were right, kept from request to request; modes with other ranks are kept apart."""

    def __init__(self) -> None:
        self._modes = defaultdict[str, RankAcceptance](RankAcceptance)

    def ranks(self, *, greedy: bool, coupled: bool) -> RankAcceptance:
        """Of greedy requests, of sampled ones, or of sampled ones whose ranks are taken under the shared noise."""
        return self._modes["greedy" if greedy else "coupled" if coupled else "sampled"]


# ------------------------------------------------------------------------------------------------ the drafter


class SequoiaDrafter(SequentialDrafter):
    """A tree of the shape that is best for the acceptance measured so far (Sequoia, section 3.1), one per request.

    A node of rank r holds the draft's (r+1)-th likeliest token: by logits when greedy, by processed probability when
    sampling. Sequoia draws its children from the draft without replacement, for an acceptance test that wants draws;
    here the target chooses by its own noise, whatever was guessed, so the children to have are the likeliest. With
    `coupled` they are the first of log q + G, which is a draw without replacement (Gumbel top-k) under the target's own
    noise. A node that cannot be (nothing is left at its rank, or its parent is a `final` token) leaves its place empty,
    for the shape does not know the text.
    """

    def __init__(
        self,
        model: TreeModel,
        sampler: Sampler,
        params: SpeculationParams,
        acceptance: MeasuredAcceptance,
        final: Collection[int] = (),
        *,
        coupled: bool = False,
    ) -> None:
        self._draft = LayeredDraft(model, sampler, params.children, coupled=coupled)
        self._params, self._final = params, sorted(final)
        self._budget = DEFAULT_NODES if params.budget is None else params.budget
        self._acceptance = acceptance.ranks(greedy=sampler.is_greedy, coupled=coupled)
        self._rows: IntArray = np.empty(0, dtype=np.int64)

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        draft = self._draft
        max_depth = min(draft.room(text, max_depth), self._params.max_depth)
        draft.forget()
        if max_depth < 1 or self._budget < 1:
            return TokenTree.empty()
        shape = best_topology(self._acceptance.probabilities(draft.num_children), self._budget, max_depth)
        tokens, rows = np.full(len(shape), -1), np.full(len(shape), UNEXPANDED)
        has_children = np.isin(np.arange(len(shape)), shape.parents)
        candidates = draft.begin(text)
        for depth in range(1, int(shape.depths.max()) + 1):
            layer = np.flatnonzero(shape.depths == depth)
            parent_rows = np.where(shape.parents[layer] == ROOT, ROOT, rows[shape.parents[layer]])
            layer, parent_rows = layer[parent_rows != UNEXPANDED], parent_rows[parent_rows != UNEXPANDED]
            tokens[layer] = candidates.tokens[parent_rows - candidates.first_row, shape.ranks[layer]]
            is_open = has_children[layer] & (tokens[layer] >= 0) & ~np.isin(tokens[layer], self._final)
            if not is_open.any():
                break
            inner = layer[is_open]
            rows[inner], candidates = draft.expand(parent_rows[is_open], tokens[inner])
        kept = np.flatnonzero(tokens >= 0)
        self._rows = rows[kept]
        return subtree(kept, tokens, shape.parents, shape.depths, np.log(shape.probabilities))

    def observe(self, done: TargetPass) -> None:
        if not self._draft.layers:
            return
        rows = [int(row) for row in self._rows[done.verdict.path] if row >= 0]
        for rank in self._draft.ranks(rows, done.verdict.tokens):
            self._acceptance.observe(rank)
        self._draft.model.keep(rows)
