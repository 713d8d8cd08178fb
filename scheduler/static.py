"""Trees built a layer at a time: Sequoia's measured shape (2402.12374) and OPT-Tree (2406.17276).

Both stand beside best-first growth to be compared with it. Sequoia fixes the tree's shape before a token is known, from
how often each rank of the draft's choices turned out right; OPT-Tree takes the nodes that the draft itself holds
likeliest in this step. Either asks the draft once a layer, and judges by the draft's own probabilities as published;
`coupled` lets it see the target's noise as well (see `draft`), a stronger baseline than the papers'.
Knows models only through the `TreeModel` protocol.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from torch import Tensor

from offspec.errors import NumericalError

from .draft import Patient, TreeModel
from .params import SpeculationParams
from .sampling import Sampler
from .tree import ROOT, BoolArray, FloatArray, IntArray, TokenTree
from .verify import Logits, Verdict

DEFAULT_NODES = 64  # where the budget is not given: these shapes do not find their own
UNEXPANDED = -2  # as a node's row; ROOT (-1) is the root's

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

    acceptance [C], each in [0, 1]: how likely the child of a given rank is the one accepted, once its parent is. Sequoia
    assumes that this depends on the rank alone, so a node's probability is the product along its path, and a tree is
    expected to yield 1 + the sum over its nodes. The paper finds its maximum by a dynamic programme over size, depth and
    branches, in which a node's children are its first k. The exact walk needs no such order, and a product of numbers up
    to 1 never grows along a path: so the `num_nodes` likeliest of all paths are a tree, no tree sums to more, and a heap
    finds them in O(N log N). Where acceptance falls with the rank, the two agree; the tests hold this against the
    published recurrence, and both against every tree there is.
    The first n nodes are the best tree of n nodes. Paths that are never accepted are left out. Among equals the shallower
    comes first.
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

    pass_s [1 + N]: seconds of a target pass over 0 to N nodes. round_s: seconds of one draft forward; each layer takes one.
    (0, 0) where no tree is worth drafting.
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

    The prior counts as `PRIOR_NODES` nodes of which the first choice met half, and those behind it less by the square of
    their rank.
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
    """What has been learnt about a draft's ranks, kept from request to request; modes with other ranks are kept apart."""

    def __init__(self) -> None:
        self._modes = defaultdict[str, RankAcceptance](RankAcceptance)

    def ranks(self, *, greedy: bool, coupled: bool) -> RankAcceptance:
        """Of greedy requests, of sampled ones, or of sampled ones whose ranks are taken under the shared noise."""
        return self._modes["greedy" if greedy else "coupled" if coupled else "sampled"]


# ------------------------------------------------------------------------------------------------ a layer at a time


@dataclass(frozen=True)
class Candidates:
    """The draft's choices for the children of the R nodes of one layer, best first.

    tokens [R, C]: -1 where the parameters exclude what is left. log_probabilities [R, C]: -inf there, never above 0.
    first_row: the row of the layer's first node, ROOT (-1) for the root.
    """

    tokens: IntArray
    log_probabilities: FloatArray
    first_row: int


class LayeredDraft:
    """The draft's side of one tree: a forward a layer. A node that has been expanded has a row, its place in the draft's
    pending region; the root's is ROOT."""

    def __init__(self, model: TreeModel, sampler: Sampler, num_children: int, *, coupled: bool) -> None:
        self.model, self.sampler = model, sampler
        self.num_children = min(num_children, model.vocab_size, sampler.vocab_size)
        self._columns = min(model.vocab_size, sampler.vocab_size)
        self._has_noise = coupled and not sampler.is_greedy
        self.layers: list[Candidates] = []

    def room(self, text: Sequence[int], max_depth: int) -> int:
        """How deep a tree below `text` may be; positions beyond the draft's context would be guessed badly or not at all."""
        return min(max_depth, self.model.max_context - len(text))

    def forget(self) -> None:
        """There is no tree."""
        self.layers = []

    def begin(self, text: Sequence[int]) -> Candidates:
        """Candidates for the root's children."""
        self._position, self._num_rows = len(text), 0
        self._paths: list[list[int]] = [[]]
        self._mask: BoolArray = np.zeros((1, 0), dtype=np.bool_)  # of the last layer, over all rows so far
        self.layers = []
        chain = [min(token, self.model.vocab_size - 1) for token in text[self.model.length :]]
        assert chain, "propose without an observe since the last one"
        none = np.empty(0, dtype=np.int64)
        return self._add(self.model.score(chain, none, none, np.empty((0, 0), dtype=np.bool_)), ROOT)

    def expand(self, parent_rows: IntArray, tokens: IntArray) -> tuple[IntArray, Candidates]:
        """The next layer's nodes [W], each below a row of the last layer: their rows, and candidates for their children."""
        parents = parent_rows - self.layers[-1].first_row
        rows = np.arange(self._num_rows, self._num_rows + len(tokens))
        self._mask = np.hstack((self._mask[parents], np.eye(len(tokens), dtype=np.bool_)))
        if self.sampler.needs_history:
            self._paths = [[*self._paths[parent], int(token)] for parent, token in zip(parents, tokens, strict=True)]
        else:
            self._paths = [[]] * len(tokens)
        depths = np.full(len(tokens), len(self.layers))
        logits = self.model.score([], tokens, depths, self._mask)
        self._num_rows += len(tokens)
        return rows, self._add(logits, int(rows[0]))

    def _add(self, logits: Tensor, first_row: int) -> Candidates:
        """The candidates of a layer's logits [R, V]; its nodes' children all stand at one position."""
        values = self.sampler.process(logits[:, : self._columns], self._paths)
        if self._has_noise:
            noise = self.sampler.noise(self._position + len(self.layers))
            values = values + noise[: self._columns].float()
        best, tokens = values.topk(self.num_children, dim=-1)
        gains = (best - values.logsumexp(-1, keepdim=True)).double().cpu().numpy()
        if np.isnan(gains).any():
            raise NumericalError(
                "the draft's logits are not finite (NaN or infinity); try --dtype fp32 or another draft"
            )
        found = Candidates(np.where(np.isfinite(gains), tokens.cpu().numpy(), -1), np.minimum(gains, 0.0), first_row)
        self.layers.append(found)
        return found

    def ranks(self, rows: Sequence[int], tokens: Sequence[int]) -> list[int | None]:
        """For the root and then each of `rows`, the rank of the token that followed."""
        candidates = np.concatenate([layer.tokens for layer in self.layers])
        found = (
            np.flatnonzero(candidates[row + 1] == token) for row, token in zip((ROOT, *rows), tokens, strict=False)
        )
        return [int(rank[0]) if len(rank) else None for rank in found]


def _subtree(kept: IntArray, tokens: IntArray, parents: IntArray, depths: IntArray, scores: FloatArray) -> TokenTree:
    """The nodes `kept`, in that order, as a tree; their parents are among them and come first."""
    renumbered = np.full(len(tokens) + 1, ROOT)  # the last entry serves parent -1
    renumbered[kept] = np.arange(len(kept))
    return TokenTree(tokens[kept], renumbered[parents[kept]], depths[kept], scores[kept])


# ------------------------------------------------------------------------------------------------ drafters


class SequoiaDrafter(Patient):
    """A tree of the shape that is best for the acceptance measured so far (Sequoia, section 3.1), one per request.

    A node of rank r holds the draft's (r+1)-th likeliest token: by logits when greedy, by processed probability when
    sampling. Sequoia draws its children from the draft without replacement, for an acceptance test that wants draws; here
    the target chooses by its own noise, whatever was guessed, so the children to have are the likeliest. With `coupled`
    they are the first of log q + G, which is a draw without replacement (Gumbel top-k) under the target's own noise.
    A node that cannot be (nothing is left at its rank, or its parent is a `final` token) leaves its place empty, for the
    shape does not know the text.
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
        self._params, self._final, self._budget = (
            params,
            sorted(final),
            DEFAULT_NODES if params.budget is None else params.budget,
        )
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
        return _subtree(kept, tokens, shape.parents, shape.depths, np.log(shape.probabilities))

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Logits) -> None:
        if not self._draft.layers:
            return
        rows = [int(row) for row in self._rows[verdict.path] if row >= 0]
        for rank in self._draft.ranks(rows, verdict.tokens):
            self._acceptance.observe(rank)
        self._draft.model.keep(rows)


class OptTreeDrafter(Patient):
    """The nodes that the draft holds likeliest in this step, as many as the budget allows (OPT-Tree, 2406.17276, section
    3), one per request.

    Each layer adds its best `budget` candidates to the pool; the tree is the best `budget` of the pool by path probability,
    whose sum is the expected number of accepted tokens. Growth ends when a layer adds no more than `threshold` tokens to
    that. A layer is worth its time while it adds more tokens than the loop yields meanwhile: the authors run 0.5 on a
    resident 7B, beside a streamed target it is some hundredths. The paper gives every node `budget` candidates, here it is
    `children` of them.
    """

    def __init__(
        self,
        model: TreeModel,
        sampler: Sampler,
        params: SpeculationParams,
        final: Collection[int] = (),
        *,
        threshold: float = 0.02,
        coupled: bool = False,
    ) -> None:
        self._draft = LayeredDraft(model, sampler, params.children, coupled=coupled)
        self._params, self._final, self._budget = (
            params,
            sorted(final),
            DEFAULT_NODES if params.budget is None else params.budget,
        )
        self._threshold = threshold
        self._rows: IntArray = np.empty(0, dtype=np.int64)

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        draft, budget = self._draft, self._budget
        max_depth = min(draft.room(text, max_depth), self._params.max_depth)
        draft.forget()
        if max_depth < 1 or budget < 1:
            return TokenTree.empty()
        none = np.empty(0, dtype=np.int64)
        tokens, parents, depths, scores, rows = none, none, none, np.empty(0), none
        nodes, expected = np.array([ROOT]), 0.0
        candidates = draft.begin(text)
        for depth in range(1, max_depth + 1):
            above = scores[nodes] if depth > 1 else np.zeros(1)
            values = candidates.log_probabilities + above[:, None]
            chosen = np.argsort(-values, axis=None, kind="stable")[:budget]
            row, column = np.unravel_index(chosen[np.isfinite(values.ravel()[chosen])], values.shape)
            first = len(tokens)
            tokens = np.concatenate((tokens, candidates.tokens[row, column]))
            parents = np.concatenate((parents, nodes[row]))
            depths = np.concatenate((depths, np.full(len(row), depth)))
            scores = np.concatenate((scores, values[row, column]))
            rows = np.concatenate((rows, np.full(len(row), UNEXPANDED)))
            # Scores fall along a path and the sort is stable, so these form a tree, parents first.
            best = np.argsort(-scores, kind="stable")[:budget]
            before, expected = expected, float(np.exp(scores[best]).sum())
            # What is not among the best by now has no child that could be.
            nodes = best[(best >= first) & ~np.isin(tokens[best], self._final)]
            if depth == max_depth or expected - before <= self._threshold or not len(nodes):
                break
            parent_rows = np.where(parents[nodes] == ROOT, ROOT, rows[parents[nodes]])
            rows[nodes], candidates = draft.expand(parent_rows, tokens[nodes])
        self._rows = rows[best]
        return _subtree(best, tokens, parents, depths, scores)

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Logits) -> None:
        if self._draft.layers:
            self._draft.model.keep([int(row) for row in self._rows[verdict.path] if row >= 0])
