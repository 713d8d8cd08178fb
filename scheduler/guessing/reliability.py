"""Acceptance probabilities of guessers' proposals, learnt from verdicts by kind of proposal.

A guesser without probabilities has kinds of proposals, for example "eight tokens matched, and all matches agree". For
each kind, `Reliability` learns the distribution of w, the target's probability of the proposed token.

In greedy decoding, the share of accepted proposals of a kind is sufficient. In sampling, the noise is known in advance,
which gives much more information. The target chooses argmax_y(log p(y) + G(y)), which is argmin_y(E(y) / p(y)) with
E = exp(-G), standard exponentials: a race in which y arrives at time E(y) / p(y). The proposal x arrives at E(x) / w.
Each other token arrives at an exponential time of rate p(y), so the first of them arrives at a time of rate 1 - w,
however many tokens share that mass. Hence P(x wins | E(x)) = exp(-(1 - w) / w · E(x)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..trees.sampling import Sampler, gumbel_of
from ..trees.token_tree import ROOT, BoolArray, FloatArray, IntArray, TokenTree
from ..trees.verify import Verdict

_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class ConsideredGuesses:
    """All N proposals of a guesser before trimming. kinds [N]. waits [N]: E = exp(-G); None if greedy."""

    tree: TokenTree
    kinds: IntArray
    waits: FloatArray | None


class Reliability:
    """The distribution of w for each kind: weights over a grid, learnt online, separately for greedy and sampled.

    A single w per kind would be overconfident, because matches that continue and matches that end look alike. So each
    kind is a mixture over GRID, fitted by expectation-maximisation, one proposal at a time. Each proposal divides one
    count among the values of w in proportion to their posterior (quasi-Bayes, Smith and Makov 1978). Older counts decay
    exponentially.

    prior [K]: the initial mean of w; it counts as PRIOR_GUESSES proposals.
    """

    GRID = 1 / (1 + np.exp(-np.linspace(-5.5, 5.5, 12)))  # w from 0.004 to 0.996
    FORGETTING = 0.99
    PRIOR_GUESSES = 2.0

    def __init__(self, prior: FloatArray) -> None:
        # Uniform in log-odds for a mean of 0.5; tilted for other means.
        tilts, log_odds = np.linspace(-3, 3, 121), np.log(self.GRID / (1 - self.GRID))
        spreads = np.exp(tilts[:, None] * log_odds)
        spreads /= spreads.sum(-1, keepdims=True)
        tilt = np.interp(prior, spreads @ self.GRID, tilts)
        spread = np.exp(tilt[:, None] * log_odds)
        self._prior = self.PRIOR_GUESSES * spread / spread.sum(-1, keepdims=True)
        self._counts = np.zeros((2, *self._prior.shape))

    def weights(self, *, greedy: bool) -> FloatArray:
        """[K, W]: the probability of each w of GRID for a proposal of each kind."""
        counts = self._prior + self._counts[int(greedy)]
        weights: FloatArray = counts / counts.sum(-1, keepdims=True)
        return weights

    def log_probabilities(self, kinds: IntArray, waits: FloatArray | None) -> FloatArray:
        """[N]: log P(the target chooses the proposal | its text reaches the proposal's parent); below 0."""
        weights = self.weights(greedy=waits is None)
        if waits is None:
            shares: FloatArray = np.log(weights @ self.GRID)
            return shares[kinds]
        wins = np.einsum("nw,nw->n", weights[kinds], np.exp(log_win(self.GRID, waits[:, None])))
        log_probabilities: FloatArray = np.log(np.maximum(wins, _TINY))
        return log_probabilities

    def observe(self, candidates: ConsideredGuesses, verdict: Verdict) -> None:
        """Learn from every proposal whose parent is on the target's text, accepted or not."""
        judged, came_true = _judged(candidates.tree, verdict)
        kinds = candidates.kinds[judged]
        if candidates.waits is None:  # greedy: w is 1 or 0
            shares = np.zeros((len(kinds), len(self.GRID)))
            shares[came_true, -1] = shares[~came_true, 0] = 1.0
        else:
            wins = np.exp(log_win(self.GRID, candidates.waits[judged, None]))
            shares = self.weights(greedy=False)[kinds] * np.where(came_true[:, None], wins, 1 - wins)
            shares /= np.maximum(shares.sum(-1, keepdims=True), _TINY)
        counts = self._counts[int(candidates.waits is None)]
        counts *= self.FORGETTING ** np.bincount(kinds, minlength=len(counts))[:, None]
        np.add.at(counts, kinds, shares)


def log_win(w: FloatArray, waits: FloatArray) -> FloatArray:
    """log P(a token of probability w wins the race), given its E = exp(-G); see the module's docstring."""
    return -(1 - w) / w * waits


def waits_of(tokens: IntArray, depths: IntArray, sampler: Sampler, position: int) -> FloatArray | None:
    """E = exp(-G) of nodes [N]; None if greedy. position: of the nodes at depth 1."""
    if sampler.is_greedy:
        return None
    # Computed on the host: these are few, and a GPU would have to be synchronised.
    noise = gumbel_of(sampler.seed, (position - 1 + depths).tolist(), torch.from_numpy(tokens))
    waits: FloatArray = np.exp(-noise.numpy())
    return waits


def _judged(tree: TokenTree, verdict: Verdict) -> tuple[IntArray, BoolArray]:
    """The nodes whose parents are on the target's text, and which of them are on it."""
    node, judged, came_true = ROOT, [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.bool_)]
    for token in verdict.tokens:
        children = np.flatnonzero(tree.parents == node)
        hits = tree.tokens[children] == token
        judged.append(children)
        came_true.append(hits)
        if not hits.any():
            break
        node = int(children[hits][0])
    return np.concatenate(judged), np.concatenate(came_true)
