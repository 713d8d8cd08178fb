"""All that is learnt about a target and its draft while running, kept from request to request."""

from __future__ import annotations

from dataclasses import dataclass, field

from .baselines.sequoia import MeasuredAcceptance
from .calibration import Calibration
from .costs import Costs, Predict
from .lookup import match_reliability
from .overlap import OverlapSwitch
from .recycling import TokenRecycling
from .reliability import Reliability


@dataclass
class RunningEstimates:
    """Of one target with one draft, or with none. Drafters and guessers write to its parts.

    recycling: the guesser itself, whose table outlives a request. calibration: how far the draft is right. costs:
    seconds of draft rounds and target passes. overlap_switch: whether drafting beside the pass pays; None: it does.
    acceptance: by rank, for Sequoia's shape. lookups, retrievals: how often guesses from the text itself, and from
    other texts, come true.
    """

    recycling: TokenRecycling
    calibration: Calibration = field(default_factory=Calibration)
    costs: Costs = field(default_factory=Costs)
    overlap_switch: OverlapSwitch | None = None
    acceptance: MeasuredAcceptance = field(default_factory=MeasuredAcceptance)
    lookups: Reliability = field(default_factory=match_reliability)
    retrievals: Reliability = field(default_factory=match_reliability)

    @classmethod
    def nothing(
        cls, vocab_size: int, predict: Predict | None = None, *, shares_cores: bool = False
    ) -> RunningEstimates:
        """Before the first request.

        vocab_size: the target's. predict: seconds of its passes by their rows. shares_cores: draft and target are
        computed by the same cores.
        """
        switch = OverlapSwitch(shares_cores=shares_cores)
        return cls(TokenRecycling(vocab_size), costs=Costs(predict), overlap_switch=switch)
