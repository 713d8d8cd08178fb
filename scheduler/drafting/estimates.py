"""The scheduler's running estimates about a target and its draft, kept from request to request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..guessing.lookup import match_reliability
from ..guessing.recycling import TokenRecycling
from ..guessing.reliability import Reliability
from ..pace.calibration import Calibration
from ..pace.costs import Costs, Predict
from ..pace.trials import OverlapSwitch

T = TypeVar("T")


@dataclass
class RunningEstimates:
    """The estimates for one target with one draft or none. Drafters and guessers update the parts.

    recycling: the guesser with its table. calibration: of the draft's probabilities. costs: seconds of draft rounds and
    target passes. overlap_switch: whether drafting during the pass pays off; None: always on. lookups, retrievals:
    acceptance of proposals from the text itself, and from other texts. by_kind: see `of_kind`.
    """

    recycling: TokenRecycling
    calibration: Calibration = field(default_factory=Calibration)
    costs: Costs = field(default_factory=Costs)
    overlap_switch: OverlapSwitch | None = None
    lookups: Reliability = field(default_factory=match_reliability)
    retrievals: Reliability = field(default_factory=match_reliability)
    by_kind: dict[type, Any] = field(default_factory=dict)

    def of_kind(self, kind: type[T]) -> T:
        """The estimates of a method that the core does not know: nothing at first, then as the method left them."""
        estimates: T = self.by_kind.setdefault(kind, kind())
        return estimates

    @classmethod
    def nothing(
        cls, vocab_size: int, predict: Predict | None = None, *, shares_cores: bool = False
    ) -> RunningEstimates:
        """The estimates before the first request.

        vocab_size: the target's. predict: seconds of its passes by number of rows. shares_cores: the same cores compute
        draft and target.
        """
        switch = OverlapSwitch(shares_cores=shares_cores)
        return cls(TokenRecycling(vocab_size), costs=Costs(predict), overlap_switch=switch)
