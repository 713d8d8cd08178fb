"""How far guesses made without a model can be trusted: learnt from those that came true, by kind of guess.

A guesser that has no probabilities has kinds of guesses ("eight tokens matched, and every match goes on like this").
Of each kind is learnt how w, the probability that the target gives to the guessed token, is spread among such guesses.

Greedy, a guess comes true or not, and its kind's share of those that did is all there is to know. Sampled, the noise is
known beforehand, and that says much more. The target chooses argmax_y(log p(y) + G(y)), which is argmin_y(E(y) / p(y))
with E = exp(-G), standard exponentials: a race in which y arrives at time E(y) / p(y). The guess x arrives at E(x) / w.
Each of the others arrives at an exponential time of rate p(y), so the first of them at one of rate 1 - w, however many
share that mass. Hence P(x wins | E(x)) = exp(-(1 - w) / w · E(x)).
Knows nothing of texts, of who guessed, or of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .sampling import Sampler, gumbel_of
from .tree import ROOT, BoolArray, FloatArray, IntArray, TokenTree
from .verify import Verdict

_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class ConsideredGuesses:
    """Everything a guesser considered, before the best are taken. kinds [N]. waits [N]: E = exp(-G); None if greedy."""

    tree: TokenTree
    kinds: IntArray
    waits: FloatArray | None


class Reliability:
    """How w is spread among the guesses of each kind: weights over a grid, learnt online; greedy and sampled apart.

    One w for a kind would be too sure of itself: matches that go on as before and matches that have come to their end
    look alike. So each kind is a mixture over GRID, fitted by expectation-maximisation, one guess at a time: each
    divides one count among the w's by how well they explain it (quasi-Bayes, Smith and Makov 1978); older
    counts fade exponentially.

    prior [K]: what w is taken for at first, on average; it counts as PRIOR_GUESSES guesses.
    """

    GRID = 1 / (1 + np.exp(-np.linspace(-5.5, 5.5, 12)))  # w from 0.004 to 0.996
    FORGETTING = 0.99
    PRIOR_GUESSES = 2.0

    def __init__(self, prior: FloatArray) -> None:
        # Even in log-odds for w = 0.5 on average, and for other averages tilted.
        tilts, log_odds = np.linspace(-3, 3, 121), np.log(self.GRID / (1 - self.GRID))
        spreads = np.exp(tilts[:, None] * log_odds)
        spreads /= spreads.sum(-1, keepdims=True)
        tilt = np.interp(prior, spreads @ self.GRID, tilts)
        spread = np.exp(tilt[:, None] * log_odds)
        self._prior = self.PRIOR_GUESSES * spread / spread.sum(-1, keepdims=True)
        self._counts = np.zeros((2, *self._prior.shape))

    def weights(self, *, greedy: bool) -> FloatArray:
        """How likely each w of GRID is for a guess of each kind, [K, W]."""
        counts = self._prior + self._counts[int(greedy)]
        weights: FloatArray = counts / counts.sum(-1, keepdims=True)
        return weights

    def log_probabilities(self, kinds: IntArray, waits: FloatArray | None) -> FloatArray:
        """[N]: log P(the target chooses the guess, where its text has come to the guess's parent); below 0."""
        weights = self.weights(greedy=waits is None)
        if waits is None:
            shares: FloatArray = np.log(weights @ self.GRID)
            return shares[kinds]
        wins = np.einsum("nw,nw->n", weights[kinds], np.exp(log_win(self.GRID, waits[:, None])))
        log_probabilities: FloatArray = np.log(np.maximum(wins, _TINY))
        return log_probabilities

    def observe(self, candidates: ConsideredGuesses, verdict: Verdict) -> None:
        """Learn from every guess whose parent the target's text came to, whether it came true or not."""
        judged, came_true = _judged(candidates.tree, verdict)
        kinds = candidates.kinds[judged]
        if candidates.waits is None:  # what the target prefers it always chooses: w has turned out to be 1, or 0
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
    """log P(a token of probability w wins the race), given its E = exp(-G); see the module."""
    return -(1 - w) / w * waits


def waits_of(tokens: IntArray, depths: IntArray, sampler: Sampler, position: int) -> FloatArray | None:
    """E = exp(-G) of nodes [N], `position` being that of depth 1; None if greedy."""
    if sampler.is_greedy:
        return None
    # On the host, wherever the sampler's lies: these are few, and a GPU would be waited for.
    noise = gumbel_of(sampler.seed, (position - 1 + depths).tolist(), torch.from_numpy(tokens))
    waits: FloatArray = np.exp(-noise.numpy())
    return waits


def _judged(tree: TokenTree, verdict: Verdict) -> tuple[IntArray, BoolArray]:
    """The nodes whose parents lie on the target's text, and which of them lie on it too."""
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
