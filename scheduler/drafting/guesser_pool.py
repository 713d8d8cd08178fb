"""A request's guessers, beside the draft or instead of it: which to call, their trust, and the worth of their calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..guessing.lookup import Guesser
from ..pace.averages import MovingAverage, Retry
from ..pace.calibration import DraftCalibration
from ..trees.sampling import Sampler
from ..trees.token_tree import IntArray
from ..trees.verify import TargetPass
from .candidate_tree import CandidateTree
from .forced import allowed_part
from .pricing import Clock

MAX_GUESSES = 64  # nodes per guesser
LEAST_TRUST = 1e-6  # lower bound of the trust in guessers


class GuesserWorth:
    """Whether a guesser's expected tokens are worth its seconds; if not, it is retried at growing intervals."""

    RATE = 0.1  # weight of each call
    HOPE = 0.02  # tokens added to the estimate: if passes are slow, a call costs less than this

    def __init__(self) -> None:
        self._tokens, self._seconds, self._retry = MovingAverage(self.RATE), MovingAverage(self.RATE), Retry()

    def is_due(self, tokens_per_s: float) -> bool:
        """Whether to call the guesser now. tokens_per_s: the recent rate, which prices the call's seconds."""
        pays = self._tokens.value + self.HOPE >= tokens_per_s * self._seconds.value
        return self._retry.is_worth_trying(pays=pays)

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Record one call: its expected tokens and its seconds."""
        self._tokens.observe(num_tokens)
        self._seconds.observe(seconds)


class GuesserPool:
    """The guessers of one request. Their trees are added to the candidates; a node keeps its better score."""

    def __init__(
        self,
        guessers: Sequence[Guesser],
        sampler: Sampler,
        calibration: DraftCalibration,
        clock: Clock,
    ) -> None:
        self._guessers = [(guesser, GuesserWorth()) for guesser in guessers]
        self._sampler, self._calibration, self._clock = sampler, calibration, clock
        self._asked: list[tuple[GuesserWorth, float]] = []  # guessers called for the current tree, and their seconds

    def ask(
        self, tree: CandidateTree, text: Sequence[int], max_nodes: int, max_depth: int, tokens_per_s: float | None
    ) -> None:
        """Add the trees of the guessers that are worth their time to `tree`.

        tokens_per_s: the recent rate, which prices their seconds; None calls all of them.
        """
        self._asked = []
        for guesser, worth in self._guessers:
            if tokens_per_s is not None and not worth.is_due(tokens_per_s):
                continue
            began = self._clock()
            guesses = guesser.guess(text, self._sampler, min(max_nodes, MAX_GUESSES), max_depth)
            if self._sampler.constraint is not None:
                guesses = allowed_part(guesses, self._sampler.constraint)
            if len(guesses):
                guesses = replace(guesses, scores=guesses.scores + self._log_trust)
                tree.add_guesses(guesses, self._calibration.index)
            self._asked.append((worth, self._clock() - began))

    @property
    def was_asked(self) -> bool:
        """Whether any guesser was called for the current tree."""
        return bool(self._asked)

    @property
    def _log_trust(self) -> float:
        """The log of the trust in guessers, added to their log-probabilities."""
        return math.log(max(self._calibration.guesser_trust.value, LEAST_TRUST))

    def learn_worth(self, num_tokens: float) -> None:
        """num_tokens: expected of the guessers' nodes in the current tree, minus the cost of their rows."""
        for worth, seconds in self._asked:
            worth.observe(num_tokens, seconds)

    def learn_trust(self, tree: CandidateTree, places: IntArray, tokens: Sequence[int]) -> None:
        """Update the trust from disputed proposals, sent or not, at places that the target's text reached.

        places: the root, then the accepted nodes. tokens: the target's choice at each of them.
        """
        if not tree.is_rooted:
            return
        disputed, claims = tree.disputed(places, self._calibration.index)
        chosen = dict(zip(places.tolist(), tokens, strict=True))
        nodes = tree.nodes[disputed]
        right = np.array([chosen[place] for place in nodes["parent"].tolist()], dtype=np.int64) == nodes["token"]
        if len(nodes):
            predicted = float(np.exp(np.minimum(claims - self._log_trust, 0.0)).sum())
            self._calibration.guesser_trust.observe(predicted, int(right.sum()))

    def observe(self, done: TargetPass) -> None:
        """Call `Guesser.observe` of all guessers."""
        for guesser, _ in self._guessers:
            guesser.observe(done)
