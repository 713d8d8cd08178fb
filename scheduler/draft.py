"""Drafters: who guesses the tree. The best-first drafter on a small model (SpecExec, 2406.02532), and its scoring.

A child x of a node is scored by how likely the *target* is to choose it. The target will choose
argmax(log p + G) with noise G that is known beforehand, so the draft looks at v(x) = log q(x) + G(seed, position, x),
and believes log softmax(v / s): s, the sharpness, is how far the two models' log-probabilities typically lie apart. It is
fitted while running, from every verified node. With no noise and s = 1 this is SpecExec's cumulative probability.
Knows models only through the `TreeModel` protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offspec.errors import NumericalError

from .params import SpeculationParams
from .sampling import Sampler
from .tree import ROOT, BoolArray, FloatArray, IntArray, TokenTree
from .verify import Verdict


class TreeModel(Protocol):
    """What a drafter needs of a model: score tokens behind one text, and remember those that became part of it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of the text it holds."""

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """Commit chain; add R tree nodes, pending. Logits [(1 if chain) + R, V]. mask: bool [R, P + R]."""

    def keep(self, path: Sequence[int]) -> None:
        """Commit these pending nodes, in ascending order of their numbers; forget the others."""


class Drafter(Protocol):
    """Guesses trees for one request: propose and observe by turns; after an error in between, make a new one."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        """A tree of guesses for what follows `text` (all tokens so far), at most max_depth deep."""

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        """What the target made of the tree that was proposed last."""


class NoDrafter:
    """Guesses nothing: plain decoding."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        return TokenTree.empty()

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        pass


class Sharpness:
    """Online maximum likelihood of s over a grid, with exponential forgetting.

    The prior counts as `PRIOR_NODES` nodes that speak for `prior`, so that the first verified nodes already move it.
    """

    GRID = np.array([0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.3, 1.8])
    UNIT = 6  # where GRID is 1
    FORGETTING = 0.99
    PRIOR_NODES = 4.0

    def __init__(self, prior: float) -> None:
        self._prior = -self.PRIOR_NODES * np.log(self.GRID / prior) ** 2
        self._log_likelihood = np.zeros_like(self.GRID)

    @property
    def index(self) -> int:
        """Index of the likeliest s in GRID."""
        return int(np.argmax(self._prior + self._log_likelihood))

    @property
    def value(self) -> float:
        return float(self.GRID[self.index])

    def observe(self, log_probabilities: FloatArray) -> None:
        """log p_s(the token that the target chose) for each s of GRID, at one verified node."""
        self._log_likelihood = self.FORGETTING * self._log_likelihood + log_probabilities


class Calibration:
    """What has been learnt about a draft, kept from request to request: a sharpness for greedy, one for sampling."""

    def __init__(self) -> None:
        self._greedy, self._sampled = Sharpness(prior=0.5), Sharpness(prior=0.6)

    def sharpness(self, *, greedy: bool) -> Sharpness:
        return self._greedy if greedy else self._sampled


@dataclass(frozen=True)
class Guesses:
    """What the draft thinks of the children of R expanded nodes, best first.

    tokens, values [R, C]: candidates and their v = log q + G. normalisers [R, S]: logsumexp(v / s) over the whole
    vocabulary for each s of `Sharpness.GRID`, so that any s can be judged later.
    """

    tokens: IntArray
    values: FloatArray
    normalisers: FloatArray

    @classmethod
    def joined(cls, rounds: Sequence[Guesses]) -> Guesses:
        """The rows of several rounds as one."""
        return cls(*(np.concatenate([getattr(r, f.name) for r in rounds]) for f in fields(cls)))

    def log_probabilities(self, index: int) -> FloatArray:
        """[R, C]: log softmax(v / s) for s = GRID[index]; never above 0, so that scores fall along a path."""
        scores: FloatArray = self.values / Sharpness.GRID[index] - self.normalisers[:, index, None]
        return np.minimum(scores, 0.0)

    def likelihood(self, row: int, token: int) -> FloatArray:
        """[S]: log-probability of `token` at one row for each s; a token outside the candidates counts as the last."""
        possible = np.isfinite(self.values[row])
        found = np.flatnonzero((self.tokens[row] == token) & possible)
        value = float(self.values[row, found[0]] if len(found) else self.values[row, possible].min())
        log_probabilities: FloatArray = value / Sharpness.GRID - self.normalisers[row]
        return log_probabilities


class Growth:
    """A tree while it grows: every candidate seen, which of them have been expanded, and the best `budget` of them.

    An expanded node has a row: its place in the draft's pending region.
    """

    def __init__(self, budget: int, max_depth: int, final: Collection[int]) -> None:
        self._budget, self._max_depth, self._final = budget, max_depth, np.array(sorted(final), dtype=np.int64)
        none = np.empty(0, dtype=np.int64)
        self.tokens, self.parents, self.depths, self.scores = none, none, none, np.empty(0)
        self.rows = none
        self.num_expanded = 0
        size = 2 * min(budget, 256)  # to start with
        self._ancestors = np.zeros((size, size), dtype=np.bool_)  # [row, row]: who sees whom

    def add(self, parents: IntArray, tokens: IntArray, log_probabilities: FloatArray) -> None:
        """Children [W, C] of the nodes `parents` [W] (or [ROOT]); those that cannot be among the best are dropped."""
        at_root = parents[0] == ROOT
        scores = log_probabilities + (0.0 if at_root else self.scores[parents, None])
        row, column = np.nonzero(scores > self._bar())
        self.tokens = np.concatenate((self.tokens, tokens[row, column]))
        self.parents = np.concatenate((self.parents, parents[row]))
        depths = np.ones(len(row), dtype=np.int64) if at_root else self.depths[parents[row]] + 1
        self.depths = np.concatenate((self.depths, depths))
        self.scores = np.concatenate((self.scores, scores[row, column]))
        self.rows = np.concatenate((self.rows, np.full(len(row), -1)))

    def _bar(self) -> float:
        """The score that a newcomer must exceed: that of the budget-th best candidate."""
        if len(self.scores) < self._budget:
            return -np.inf
        return float(np.partition(self.scores, -self._budget)[-self._budget])

    def best(self) -> IntArray:
        """The best `budget` candidates, best first. Scores fall along a path, so they form a tree, parents first."""
        return np.argsort(-self.scores, kind="stable")[: self._budget]

    def next_batch(self, width: int) -> IntArray:
        """The best candidates that could still gain from being expanded, at most `width`, as node numbers."""
        best = self.best()
        is_open = (
            (self.rows[best] < 0) & (self.depths[best] < self._max_depth) & ~np.isin(self.tokens[best], self._final)
        )
        return best[is_open][:width]

    def expand(self, nodes: IntArray) -> BoolArray:
        """Give these nodes their rows; returns their mask over the pending region, bool [W, P + W]."""
        first, last = self.num_expanded, self.num_expanded + len(nodes)
        if last > len(self._ancestors):
            self._ancestors = np.pad(self._ancestors, (0, max(last, len(self._ancestors))))
        parents = self.parents[nodes]
        inner = parents != ROOT
        rows = np.arange(first, last)
        self._ancestors[rows[inner]] = self._ancestors[self.rows[parents[inner]]]
        self._ancestors[rows, rows] = True
        self.rows[nodes] = rows
        self.num_expanded = last
        return self._ancestors[first:last, :last]

    def path_tokens(self, nodes: IntArray) -> list[list[int]]:
        """For each node the tokens from the root's child down to it."""
        return [self._path(int(node)) for node in nodes]

    def _path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]

    def tree(self) -> tuple[TokenTree, IntArray]:
        """The best candidates as a tree, and each one's row (-1 where it was not expanded)."""
        best = self.best()
        renumbered = np.full(len(self.tokens) + 1, ROOT)  # the last entry serves parent -1
        renumbered[best] = np.arange(len(best))
        tree = TokenTree(self.tokens[best], renumbered[self.parents[best]], self.depths[best], self.scores[best])
        return tree, self.rows[best]


class ModelDrafter:
    """Best-first growth in batches on a small model (SpecExec, section 4), one per request.

    Each round expands the best `width` open candidates with one forward of the draft; the tree is the best `budget`
    candidates seen, and growth ends when none of these is open. `final` tokens (end of text) are never expanded.
    """

    def __init__(
        self,
        model: TreeModel,
        sampler: Sampler,
        params: SpeculationParams,
        calibration: Calibration,
        final: Collection[int] = (),
    ) -> None:
        self._model, self._sampler, self._params, self._final = model, sampler, params, final
        self._is_coupled = params.scoring == "coupled"
        self._sharpness = calibration.sharpness(greedy=sampler.is_greedy)
        self._columns = min(model.vocab_size, sampler.vocab_size)
        self._rounds: list[Guesses] = []
        self._rows: IntArray = np.empty(0, dtype=np.int64)

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        # Positions beyond the draft's context would be guessed badly or not at all.
        max_depth = min(max_depth, self._params.max_depth, self._model.max_context - len(text))
        self._rounds = []
        if max_depth < 1 or self._params.budget < 1:
            return TokenTree.empty()
        growth = Growth(self._params.budget, max_depth, self._final)
        nodes, none = np.array([ROOT]), np.empty(0, dtype=np.int64)
        chain = [min(token, self._model.vocab_size - 1) for token in text[self._model.length :]]
        assert chain, "propose without an observe since the last one"
        logits = self._model.score(chain, none, none, np.empty((0, 0), dtype=np.bool_))
        while True:
            self._add_children(growth, nodes, logits, len(text))
            nodes = growth.next_batch(self._params.width)
            if not len(nodes):
                break
            mask = growth.expand(nodes)
            logits = self._model.score([], growth.tokens[nodes], growth.depths[nodes], mask)
        tree, self._rows = growth.tree()
        return tree

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        if not self._rounds:
            return
        rows = [int(row) for row in self._rows[verdict.path] if row >= 0]
        if self._is_coupled:  # values without the noise would say nothing about values with it
            self._calibrate(rows, verdict.tokens)
        self._model.keep(rows)

    def _calibrate(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Tell the sharpness which token the target chose at each expanded node of the walk."""
        guesses = Guesses.joined(self._rounds)
        # The root was expanded first, so the node in row r of the pending region has guesses[r + 1].
        for index, token in zip([0, *(row + 1 for row in rows)], tokens, strict=False):
            self._sharpness.observe(guesses.likelihood(index, token))

    def _add_children(self, growth: Growth, nodes: IntArray, logits: Tensor, position: int) -> None:
        """Score the children of the nodes just expanded; `position` is that of the root's children."""
        depths = np.zeros(1, dtype=np.int64) if nodes[0] == ROOT else growth.depths[nodes]
        paths = growth.path_tokens(nodes) if self._sampler.needs_history else [[]] * len(nodes)
        guesses = self._guess(logits[:, : self._columns], paths, position + depths)
        self._rounds.append(guesses)
        index = self._sharpness.index if self._is_coupled else Sharpness.UNIT
        growth.add(nodes, guesses.tokens, guesses.log_probabilities(index))

    def _guess(self, logits: Tensor, paths: Sequence[Sequence[int]], positions: IntArray) -> Guesses:
        """Candidates of R rows of draft logits [R, V], the children of each at positions [R]."""
        values = self._sampler.process(logits, paths)
        if self._is_coupled and not self._sampler.is_greedy:
            unique, inverse = np.unique(positions, return_inverse=True)
            noise = torch.stack([self._sampler.noise(int(p))[: self._columns].float() for p in unique])
            values = values + noise[torch.as_tensor(inverse, device=noise.device)]
        grid = torch.as_tensor(Sharpness.GRID, dtype=torch.float32, device=values.device)
        normalisers = torch.stack([(values / s).logsumexp(-1) for s in grid], dim=-1).double().cpu().numpy()
        if not np.isfinite(normalisers).all():
            raise NumericalError(
                "the draft's logits are not finite (NaN or infinity); try --dtype fp32 or another draft"
            )
        best, tokens = values.topk(min(self._params.children, self._columns), dim=-1)
        return Guesses(tokens.cpu().numpy(), best.double().cpu().numpy(), normalisers)
