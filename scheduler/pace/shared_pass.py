"""What the texts of one pass share: its rows, its seconds, and one budget for all their trees.

A streamed pass takes about as long for many rows as for few, and a tree's later nodes bring less than its first ones.
So the best nodes of all trees compete for the rows of one pass (SmartSpec, 2406.14066; 2310.18813): by their calibrated
probability, against what a further row costs at the rate of all texts together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from sys import maxsize

import numpy as np

from ..trees.token_tree import FloatArray
from .averages import DecayingRatio
from .controllers import RATE_FORGETTING
from .costs import MOST_ROWS, Costs
from .trials import OverlapSwitch

CHEAP_ROWS = 512  # of a pass, on most GPUs; where nothing was measured


class SharedPass:
    """The passes of a group of texts, which may change from pass to pass.

    Order of calls per pass: begin; then for each text, in the order of `begin`, `next_text` and its drafting; sizes;
    end.
    """

    def __init__(self, costs: Costs, max_nodes: int, overlap_switch: OverlapSwitch | None = None) -> None:
        """costs: of the target and its draft. max_nodes: limit of all trees of a pass together.

        overlap_switch: learns whether to draft during a pass; None: always.
        """
        self._costs, self._max_nodes, self._switch = costs, max_nodes, overlap_switch
        self.most_per_text = max_nodes  # for which each text has KV entries
        self._sent = 0.0  # when the last trees were sent
        self.overlaps = True  # whether to draft during the pass
        self._is_slowed = False  # the pass, by a trial of that
        self.num_drafting = 1  # texts whose draft rounds are one forward
        self._rate = DecayingRatio(RATE_FORGETTING)  # tokens of one text per second: texts join and leave
        self._chains = [1]
        self._num_nodes = 0.0  # nodes of a text in the last pass, as an estimate for those that have not drafted yet
        self._text = 0

    @property
    def num_texts(self) -> int:
        return len(self._chains)

    @property
    def is_shared(self) -> bool:
        """Whether the pass has several texts; with one, its own drafter decides everything."""
        return self.num_texts > 1

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of all texts together in the last passes; 0 before the first, and of a text alone."""
        return self._rate.value * self.num_texts if self.is_shared else 0.0

    @property
    def limit(self) -> int:
        """The maximum number of nodes of one text; of a text alone, its drafter decides."""
        return min(self.most_per_text, self.limit_of(self.num_texts)) if self.is_shared else maxsize

    def limit_of(self, num_texts: int) -> int:
        """`limit` in a pass of so many texts."""
        return max(1, self._max_nodes // max(1, num_texts))

    @property
    def rows_beside(self) -> int:
        """Rows of the pass in addition to those of the text that drafts now: all chains, and the expected nodes."""
        return sum(self._chains) - self._chains[self._text] + round(self._num_nodes * (self.num_texts - 1))

    def is_worth_a_pass(self, num_rows: int) -> bool:
        """Whether scoring so many rows of a prompt takes longer than a pass without them."""
        if num_rows < 1 or not self._costs.target.is_known:
            return num_rows >= CHEAP_ROWS
        one, many = self._costs.target.seconds(np.array([1, num_rows]))
        return bool(many > 2 * one)

    def begin(self, chains: Sequence[int]) -> None:
        """Start a pass. chains: each text's rows in addition to its tree's nodes.

        All texts are expected to take part in the first round of the draft. If each counted on those alone that took
        part in the last round before, a round would be worth its cost to none of them, and none would draft again.
        """
        self._chains, self._text, self.num_drafting = list(chains), -1, max(1, len(chains))

    def next_text(self) -> None:
        """The next text drafts."""
        self._text += 1

    def observe_round(self, num_rows: int, seconds: float) -> None:
        """Record one forward of the draft in a pass of several texts; a text alone records its own."""
        if self.is_shared and num_rows <= MOST_ROWS:
            self._costs.draft.observe(num_rows, seconds)

    def sizes(self, candidates: Sequence[FloatArray], spent_s: float = 0.0) -> list[int] | list[None]:
        """The number of nodes that each text sends; None for a text alone. Call it when all have drafted.

        candidates: for each text, the probabilities of its best candidates, descending. spent_s: seconds of drafting.
        The result has the largest expected gain: with R tokens/s, that is tokens - R * seconds, as in
        `controllers.MarginalRate`.
        """
        if not self.is_shared:
            return [None] * len(candidates)
        joined = np.concatenate([np.empty(0), *candidates])
        owners = np.repeat(np.arange(len(candidates)), [len(each) for each in candidates])
        best = np.argsort(-joined, kind="stable")[: self._max_nodes]
        tokens = self.num_texts + np.concatenate(([0.0], joined[best].cumsum()))
        seconds = self._costs.target.seconds(np.minimum(np.arange(len(tokens)) + sum(self._chains), MOST_ROWS))
        rate = self.tokens_per_s or float((tokens / (spent_s + seconds)).max())
        size = int((tokens - rate * seconds).argmax())
        last, self._sent = self._sent, time.perf_counter()
        if self._switch is not None and last:  # once for all texts: whether to draft during the pass
            if max(self._chains) == 1:
                self._switch.observe(self.overlaps, float(tokens[size]), self._sent - last)
            self.overlaps, self._is_slowed = self._switch.is_on(), self._switch.is_slowing
        return [int((owners[best[:size]] == owner).sum()) for owner in range(len(candidates))]

    def end(self, num_nodes: int, num_tokens: int, pass_s: float, total_s: float) -> None:
        """Record a pass of several texts; a text alone records its own.

        num_tokens: of all texts. total_s: with drafting and verdicts.
        """
        if not self.is_shared:
            return
        rows = sum(self._chains) + num_nodes
        self._num_nodes = num_nodes / self.num_texts
        if rows <= MOST_ROWS and not self._is_slowed:
            self._costs.target.observe(rows, pass_s)
        if max(self._chains) == 1:  # a pass with a prompt takes longer than those to come
            self._rate.observe(num_tokens / self.num_texts, total_s)
