"""Guessers beside the draft, or in its stead: which to ask, how far to believe them, and what asking them is worth.

Knows nothing of how they guess, or of models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .averages import MovingAverage, Retry
from .calibration import DraftCalibration
from .candidate_tree import CandidateTree
from .lookup import Guesser
from .pricing import Clock
from .sampling import Sampler
from .tree import IntArray
from .verify import TargetPass

MAX_GUESSES = 64  # nodes that one guesser may add
LEAST_TRUST = 1e-6  # in guessers


class GuesserWorth:
    """Whether what a guesser promises is worth its seconds; where it is not, it is asked again now and then."""

    RATE = 0.1  # of each time it is asked
    HOPE = 0.02  # tokens that are never ruled out: beside a pass that takes long, asking costs less than that

    def __init__(self) -> None:
        self._tokens, self._seconds, self._retry = MovingAverage(self.RATE), MovingAverage(self.RATE), Retry()

    def is_due(self, tokens_per_s: float) -> bool:
        """Whether to ask it now, where seconds are otherwise worth so much."""
        pays = self._tokens.value + self.HOPE >= tokens_per_s * self._seconds.value
        return self._retry.is_worth_trying(pays=pays)

    def observe(self, num_tokens: float, seconds: float) -> None:
        """That it promised, and took, once."""
        self._tokens.observe(num_tokens)
        self._seconds.observe(seconds)


class GuesserPool:
    """The guessers of one request. Their trees join the candidates; the better score of a node counts."""

    def __init__(
        self, guessers: Sequence[Guesser], sampler: Sampler, calibration: DraftCalibration, clock: Clock
    ) -> None:
        self._guessers = [(guesser, GuesserWorth()) for guesser in guessers]
        self._sampler, self._calibration, self._clock = sampler, calibration, clock
        self._asked: list[tuple[GuesserWorth, float]] = []  # for the tree at hand, with the seconds they took

    def ask(
        self, tree: CandidateTree, text: Sequence[int], max_nodes: int, max_depth: int, tokens_per_s: float | None
    ) -> None:
        """Add to `tree` what those guess who are worth asking.

        tokens_per_s: what seconds are worth otherwise; None asks all of them.
        """
        self._asked = []
        for guesser, worth in self._guessers:
            if tokens_per_s is not None and not worth.is_due(tokens_per_s):
                continue
            began = self._clock()
            guesses = guesser.guess(text, self._sampler, min(max_nodes, MAX_GUESSES), max_depth)
            guesses = replace(guesses, scores=guesses.scores + self._log_trust)
            tree.add_guesses(guesses, self._calibration.index)
            self._asked.append((worth, self._clock() - began))

    @property
    def was_asked(self) -> bool:
        """Whether any was, for the tree at hand."""
        return bool(self._asked)

    @property
    def _log_trust(self) -> float:
        """What guessers' log-probabilities lose, since the draft often knows better."""
        return math.log(max(self._calibration.guesser_trust.value, LEAST_TRUST))

    def learn_worth(self, num_tokens: float) -> None:
        """num_tokens: that the guessers' nodes of the tree at hand promise, less what their rows cost."""
        for worth, seconds in self._asked:
            worth.observe(num_tokens, seconds)

    def learn_trust(self, tree: CandidateTree, places: IntArray, tokens: Sequence[int]) -> None:
        """From what they named, sent or not, where the target went on and the draft had said otherwise.

        places: the root, then the accepted nodes. tokens: the target's choice at each of them.
        """
        if not tree.is_rooted:
            return
        disputed, claims = tree.disputed(places, self._calibration.index)
        if len(disputed):
            chosen = dict(zip(places.tolist(), tokens, strict=True))
            nodes = tree.nodes[disputed]
            right = [chosen[place] == token for place, token in zip(nodes["parent"], nodes["token"], strict=True)]
            predicted = float(np.exp(np.minimum(claims - self._log_trust, 0.0)).sum())
            self._calibration.guesser_trust.observe(predicted, sum(right))

    def observe(self, done: TargetPass) -> None:
        """As `Guesser.observe`, to all of them."""
        for guesser, _ in self._guessers:
            guesser.observe(done)
