"""How far guesses made without a model can be trusted: learnt from those that came true, by kind of guess.

A guesser that has no probabilities has kinds of guesses ("eight tokens matched, and every match goes on like this").
Of each kind is learnt w, the probability that the target gives to such a token.

Greedy, a guess comes true where the target's first choice is it: with probability w, its share of all such guesses.
Sampled, the noise is known beforehand, and that says much more. The target chooses argmax_y(log p(y) + G(y)), which is
argmin_y(E(y) / p(y)) with E = exp(-G), standard exponentials: a race in which y arrives at time E(y) / p(y). The guess
x arrives at E(x) / w. Each of the others arrives at an exponential time of rate p(y), so the first of them at one of
rate 1 - w, however many share that mass. Hence P(x wins | E(x)) = exp(-(1 - w) / w · E(x)).
Knows nothing of texts, of who guessed, or of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .sampling import Sampler
from .tree import ROOT, BoolArray, FloatArray, IntArray, TokenTree
from .verify import Verdict


@dataclass(frozen=True)
class Candidates:
    """Everything a guesser considered, before the best are taken. kinds [N]. waits [N]: E = exp(-G); None if greedy."""

    tree: TokenTree
    kinds: IntArray
    waits: FloatArray | None


class Reliability:
    """w for each kind of guess: online Bayes over a grid, with exponential forgetting by kind; greedy and sampled apart.

    prior [K]: what w is taken for at first; it counts as PRIOR_GUESSES guesses, of which that share came true.
    """

    GRID = 1 / (1 + np.exp(-np.linspace(-5.5, 5.5, 23)))  # w from 0.004 to 0.996
    FORGETTING = 0.99
    PRIOR_GUESSES = 4.0

    def __init__(self, prior: FloatArray) -> None:
        share = prior[:, None]
        self._prior = self.PRIOR_GUESSES * (share * np.log(self.GRID) + (1 - share) * np.log1p(-self.GRID))
        self._log_likelihood = np.zeros((2, *self._prior.shape))

    def estimates(self, *, greedy: bool) -> FloatArray:
        """w [K]: the mean over the grid of what is believed of each kind."""
        belief = self._prior + self._log_likelihood[int(greedy)]
        weights = np.exp(belief - belief.max(-1, keepdims=True))
        means: FloatArray = weights @ self.GRID / weights.sum(-1)
        return means

    def log_probabilities(self, kinds: IntArray, waits: FloatArray | None) -> FloatArray:
        """[N]: log P(the target chooses the guess, where its text has come to the guess's parent); below 0."""
        return log_win(self.estimates(greedy=waits is None)[kinds], waits)

    def observe(self, candidates: Candidates, verdict: Verdict) -> None:
        """Learn from every guess whose parent the target's text came to, whether it came true or not."""
        judged, came_true = _judged(candidates.tree, verdict)
        kinds = candidates.kinds[judged]
        waits = None if candidates.waits is None else candidates.waits[judged, None]
        hits = log_win(self.GRID[None], waits)
        log_likelihood = np.where(came_true[:, None], hits, np.log(-np.expm1(hits)))
        learnt = self._log_likelihood[int(waits is None)]
        learnt *= self.FORGETTING ** np.bincount(kinds, minlength=len(learnt))[:, None]
        np.add.at(learnt, kinds, log_likelihood)


def log_win(w: FloatArray, waits: FloatArray | None) -> FloatArray:
    """log P(the target chooses a token of probability w), given its E = exp(-G); None is greedy. See the module."""
    log_probabilities: FloatArray = np.log(w) if waits is None else -(1 - w) / w * waits
    return log_probabilities


def waits_of(tokens: IntArray, depths: IntArray, sampler: Sampler, position: int) -> FloatArray | None:
    """E = exp(-G) of nodes [N] in order of their depths, `position` being that of depth 1; None if greedy."""
    if sampler.is_greedy:
        return None
    starts = np.flatnonzero(np.diff(depths, prepend=0))
    ids = np.split(tokens, starts[1:])
    noise = [
        sampler.noise(position + int(depth) - 1)[torch.as_tensor(part, device=sampler.device)]
        for depth, part in zip(depths[starts], ids, strict=False)
    ]
    waits: FloatArray = np.exp(-torch.cat(noise).cpu().numpy()) if noise else np.empty(0)
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
