"""The estimates about a draft with a target, kept from request to request."""

from __future__ import annotations

from dataclasses import dataclass, field

from offspec.backends.device_kinds import kind_of
from offspec.scheduler.drafting.estimates import RunningEstimates
from offspec.scheduler.guessing.recycling import TokenRecycling
from offspec.scheduler.pace.costs import Costs, Predict
from offspec.scheduler.pace.trials import OverlapSwitch, WindowTrials

from ..model.decoder import Decoder
from .recall import Recall


@dataclass
class DraftStats(RunningEstimates):
    """Calibration, costs, reliabilities, and recall.

    recall: the target's predictions at recent positions (`drafts.recall`); None without a draft model. windows: what a
    draft model brings that keeps all of a text, or a window.
    """

    recall: Recall | None = None
    windows: WindowTrials = field(default_factory=WindowTrials)

    @classmethod
    def of(
        cls,
        target: Decoder,
        draft: Decoder | None,
        predict_pass_s: Predict | None = None,
        predict_round_s: Predict | None = None,
    ) -> DraftStats:
        """Empty estimates. predict_pass_s, predict_round_s: first estimates of seconds, by number of rows."""
        return cls(
            TokenRecycling(target.config.vocab_size),
            costs=Costs(predict_pass_s, predict_round_s),
            overlap_switch=OverlapSwitch(shares_cores=not kind_of(target.device).has_own_memory),
            recall=None if draft is None or not (_is_linear(draft) and _is_linear(target)) else Recall(draft, target),
        )


def _is_linear(decoder: Decoder) -> bool:
    """Whether its logits are linear in its final states, as recall requires."""
    return decoder.config.has_linear_head
