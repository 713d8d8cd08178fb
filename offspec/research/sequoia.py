"""Sequoia (2402.12374): a tree shape that is fixed before drafting, optimal for the acceptance measured so far.

The draft runs once per layer. As published, it uses the draft's own probabilities. `coupled` also uses the target's
noise (see `child_scores`), which is a stronger baseline than the paper's.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

import numpy as np

from offspec.scheduler.drafting.drafter import SequentialDrafter, TreeModel
from offspec.scheduler.drafting.estimates import RunningEstimates
from offspec.scheduler.drafting.layered_draft import UNEXPANDED, LayerCandidates, LayeredDraft, subtree
from offspec.scheduler.drafting.pricing import Clock
from offspec.scheduler.pace.costs import WIDTHS, Costs
from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.scheduler.params import DEFAULT_NODES, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, FloatArray, IntArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass

from ..drafts.base import DraftTask, most_nodes

T = TypeVar("T")
MOST_LEVELS = 32  # of a tree whose size the hardware decides

# ------------------------------------------------------------------------------------------------ Sequoia's shape


@dataclass(frozen=True)
class Topology:
    """The shape of a tree of N nodes without tokens, likeliest node first, so parents precede children.

    parents [N]: index of the parent, ROOT (-1) for the root's children. ranks [N]: rank among the draft's choices after
    the parent, from 0. depths [N]: 1 for the root's children. probabilities [N]: acceptance probabilities.
    """

    parents: IntArray
    ranks: IntArray
    depths: IntArray
    probabilities: FloatArray

    def __len__(self) -> int:
        return len(self.parents)


def best_topology(acceptance: FloatArray, num_nodes: int, max_depth: int) -> Topology:
    """The tree of at most `num_nodes` nodes and depth `max_depth` with the most expected tokens (Sequoia, section 3.1).

    acceptance [C], each in [0, 1]: the probability that the child of a given rank is accepted if its parent is
    accepted. Sequoia assumes that it depends on the rank alone. So a node's probability is the product along its path,
    and the expected tokens of a tree are 1 + the sum over its nodes. The paper maximises this by a dynamic programme
    over size, depth and branches, in which a node's children are its first k. The exact walk does not need that order,
    and a product of numbers up to 1 never grows along a path. So the `num_nodes` likeliest of all paths form a tree, no
    tree has a greater sum, and a heap finds it in O(N log N). If acceptance falls with the rank, both methods agree;
    the tests compare this one with the published recurrence, and both with all possible trees. The first n nodes are
    the best tree of n nodes. Paths with probability 0 are omitted. Among equals, the shallower comes first.
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


@dataclass(frozen=True)
class TreeSize:
    """A limit of nodes and one of levels; 0 and 0 if no tree pays."""

    nodes: int
    depth: int


def best_size(acceptance: FloatArray, max_depth: int, pass_s: FloatArray, round_s: float) -> TreeSize:
    """The size with the most tokens per second; among equals, the smallest (Sequoia, section 3.3).

    pass_s [1 + N]: seconds of a target pass over 0 to N nodes. round_s: seconds of one draft forward, one per layer.
    """
    best_rate, best = 1 / float(pass_s[0]), TreeSize(0, 0)
    for limit in range(1, max_depth + 1):
        shape = best_topology(acceptance, len(pass_s) - 1, limit)
        if not len(shape) or shape.depths.max() < limit:
            break
        rates = (1 + shape.probabilities.cumsum()) / (pass_s[1 : len(shape) + 1] + limit * round_s)
        if (rate := float(rates.max())) > best_rate:
            best_rate, best = rate, TreeSize(int(rates.argmax()) + 1, limit)
    return best


class RankAcceptance:
    """The share of verified, expanded nodes at which the target's token had each rank among the draft's choices.

    The prior counts as `PRIOR_NODES` nodes with an acceptance of 0.5 / (rank + 1)².
    """

    PRIOR_NODES = 4.0

    def __init__(self) -> None:
        self.num_nodes = 0
        self._counts = Counter[int]()

    def observe(self, rank: int | None) -> None:
        """Record the rank of the target's token at one verified node; None if it was not a candidate."""
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
    """A draft's acceptance by rank, kept from request to request, separately for modes with different ranks."""

    def __init__(self) -> None:
        self._modes = defaultdict[str, RankAcceptance](RankAcceptance)

    def ranks(self, *, greedy: bool, coupled: bool) -> RankAcceptance:
        """The acceptance of greedy requests, of sampled ones, or of sampled ones ranked with the shared noise."""
        return self._modes["greedy" if greedy else "coupled" if coupled else "sampled"]


# ------------------------------------------------------------------------------------------------ the drafter


class SizeForHardware:
    """The best size by the measured seconds of passes and draft rounds.

    It is found again after 1, 2, 4, … passes, at least every `PASSES`. Before both are known, it is a tree of
    DEFAULT_NODES. One per request; `costs` are kept from request to request.
    """

    PASSES = 32  # because a search takes as long as some draft rounds

    def __init__(
        self, costs: Costs, max_nodes: int, shared: SharedPass | None = None, clock: Clock = time.perf_counter
    ) -> None:
        """shared: the passes that the request shares with others, whose seconds are not its own."""
        self._costs = costs
        self._shared = shared
        self._max_nodes = max_nodes
        self._clock = clock
        self._num_passes = 0
        self._size = TreeSize(DEFAULT_NODES, MOST_LEVELS)
        self._sent_at = 0.0

    def size(self, acceptance: FloatArray) -> TreeSize:
        """The next tree's. acceptance [C]: see `best_topology`."""
        target, draft, done = self._costs.target, self._costs.draft, self._num_passes
        is_due = done % self.PASSES == 0 or done & (done - 1) == 0
        if is_due and target.is_known and draft.is_known:
            pass_s = target.seconds(np.arange(1, self._max_nodes + 2))
            self._size = best_size(acceptance, MOST_LEVELS, pass_s, float(draft.seconds(WIDTHS).max()))
        return self._size

    def round(self, num_rows: int, draft: Callable[[], T]) -> T:
        """The result of a draft round over `num_rows` rows, whose seconds are recorded."""
        began = self._clock()
        result = draft()
        if self._is_alone:
            self._costs.draft.observe(num_rows, self._clock() - began)
        return result

    def send(self) -> None:
        """Record that the tree is sent."""
        self._sent_at = self._clock()

    def judged(self, num_nodes: int) -> None:
        """Record the seconds of the target's pass; not of a text's first one, which has the prompt's rows, too."""
        if self._num_passes and self._is_alone:
            self._costs.target.observe(1 + num_nodes, self._clock() - self._sent_at)
        self._num_passes += 1

    @property
    def _is_alone(self) -> bool:
        return self._shared is None or not self._shared.is_shared


def sequoia_drafter(text: TreeModel, task: DraftTask, stats: RunningEstimates) -> SequoiaDrafter:
    """The drafter of one request with a draft model (`drafts.base.MakeDrafter`)."""
    params = task.speculation
    size = SizeForHardware(stats.costs, most_nodes(task), task.shared) if params.budget is None else None
    acceptance, is_coupled = stats.of_kind(MeasuredAcceptance), params.scoring == "coupled"
    return SequoiaDrafter(text, task.sampler, params, acceptance, task.final, coupled=is_coupled, hardware=size)


class SequoiaDrafter(SequentialDrafter):
    """Proposes trees of the best shape for the acceptance measured so far (Sequoia, section 3.1); one per request.

    A node of rank r has the draft's (r+1)-th likeliest token: by logits if greedy, by processed probability if
    sampling. Sequoia draws children from the draft without replacement, because its acceptance test needs draws. Here
    the target chooses by its own noise, so the best children are the likeliest. With `coupled` they are the first of
    log q + G, which is a draw without replacement (Gumbel top-k) under the target's noise. The shape is independent of
    the text, so a node that cannot exist (no token has its rank, or its parent is a `final` token) stays empty.
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
        hardware: SizeForHardware | None = None,
    ) -> None:
        """hardware: chooses the size of trees, as the paper does; None: it is the budget of `params`."""
        self._draft = LayeredDraft(model, sampler, params.children, coupled=coupled)
        self._params, self._final = params, sorted(final)
        self._budget = DEFAULT_NODES if params.budget is None else params.budget
        self._acceptance = acceptance.ranks(greedy=sampler.is_greedy, coupled=coupled)
        self._hardware = hardware
        self._rows: IntArray = np.empty(0, dtype=np.int64)

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        draft = self._draft
        max_depth = min(draft.room(text, max_depth), self._params.max_depth)
        draft.forget()
        acceptance = self._acceptance.probabilities(draft.num_children)
        size = TreeSize(self._budget, max_depth) if self._hardware is None else self._hardware.size(acceptance)
        if max_depth < 1 or size.nodes < 1:
            tree = TokenTree.empty()
        else:
            tree = self._tree(text, best_topology(acceptance, size.nodes, min(max_depth, size.depth)))
        if self._hardware is not None:
            self._hardware.send()
        return tree

    def _tree(self, text: Sequence[int], shape: Topology) -> TokenTree:
        """The draft's tokens in a shape of at least one node."""
        draft = self._draft
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
            rows[inner], candidates = self._expand(parent_rows[is_open], tokens[inner])
        kept = np.flatnonzero(tokens >= 0)
        self._rows = rows[kept]
        return subtree(kept, tokens, shape.parents, shape.depths, np.log(shape.probabilities))

    def _expand(self, parent_rows: IntArray, tokens: IntArray) -> tuple[IntArray, LayerCandidates]:
        if self._hardware is None:
            return self._draft.expand(parent_rows, tokens)
        return self._hardware.round(len(tokens), lambda: self._draft.expand(parent_rows, tokens))

    def observe(self, done: TargetPass) -> None:
        if self._hardware is not None:
            self._hardware.judged(len(done.tree))
        if not self._draft.layers:
            return
        rows = [int(row) for row in self._rows[done.verdict.path] if row >= 0]
        for rank in self._draft.ranks(rows, done.verdict.tokens):
            self._acceptance.observe(rank)
        self._draft.model.keep(rows)
