"""What texts of one pass expect of each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offspec.scheduler.pace.controllers import DraftingState, MarginalRate
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.pace.shared_pass import SharedPass

NUM_TEXTS = 8


def test_texts_that_all_gain_from_a_round_do_not_wait_for_each_other() -> None:
    """On a card's clock: one forward of 12 ms for all of them, 90 tokens/s together, 0.9 tokens of a first round each.

    The last round of the pass before had one text, for which alone a round would not pay off.
    """
    costs = Costs(target=lambda rows: 0.9, draft=lambda rows: 0.012)
    shared, controller = SharedPass(costs, 1024), MarginalRate(costs, 128)
    shared.begin([1] * NUM_TEXTS)
    shared.num_drafting = 1
    shared.begin([1] * NUM_TEXTS)
    none, root, profile = np.empty(0), np.array([0.9]), np.array([0.7, 0.2, 0.1])
    first = DraftingState(none, root, profile, NUM_TEXTS, 0.0, tokens_per_s=90.0, num_drafting=shared.num_drafting)
    assert controller.width(first) > 0
    assert controller.width(replace(first, num_drafting=1)) == 0
