"""Trust follows the draft's own nodes; sharpness and profile follow what stood at the accepted ones."""

from __future__ import annotations

import numpy as np
import pytest

from offspec.scheduler.drafting.candidate_tree import CandidateTree
from offspec.scheduler.drafting.verdict_learning import learn_children, learn_trust, learn_trust_unsent
from offspec.scheduler.pace.calibration import GRID, UNIT, Calibration, Trust
from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.verify import Verdict

from ..fakes import guesses_of, log_softmax

VALUES = np.array([2.0, 1.0, 0.0, -1.0])
NOTHING_SENT = np.empty(0, dtype=np.int64)


def drafted() -> CandidateTree:
    """The root's children, of which the best was expanded; a guesser claims the last to be better than all."""
    tree = CandidateTree()
    tree.add(np.array([ROOT]), guesses_of(VALUES, 4), UNIT)
    first = tree.best(1, 9)
    tree.expand(first)
    tree.add(first, guesses_of(VALUES[::-1].copy(), 4), UNIT)
    return tree


def trust_after(predicted: float, accepted: int) -> float:
    trust = Trust()
    trust.observe(predicted, accepted)
    return trust.value


def test_trust_is_learnt_from_the_drafts_own_nodes() -> None:
    candidates, trust = drafted(), Trust()
    claim = TokenTree(np.array([3]), np.array([ROOT]), np.array([1]), np.array([-0.1]))
    candidates.add_guesses(claim, UNIT)
    sent = candidates.best(3, 9)
    tree = candidates.tree(sent)
    own = tree.tokens[tree.depths == 1] != 3
    assert candidates.is_claimed(sent).sum() == 1
    learn_trust(trust, candidates, sent, tree, Verdict([int(np.flatnonzero(tree.tokens == 3)[0])], [3, 0]))
    assert own.any()
    predicted = float(np.exp(tree.scores[~candidates.is_claimed(sent)]).sum())
    assert trust.value == pytest.approx(trust_after(predicted, 0)), "the claimed node was accepted, none of its own"


@pytest.mark.parametrize("chosen", [0, 1])
def test_where_nothing_was_sent_the_best_candidate_is_judged(chosen: int) -> None:
    candidates, trust = drafted(), Trust()
    learn_trust_unsent(trust, candidates, candidates.best(1, 9), Verdict([], [chosen]))
    assert trust.value == pytest.approx(trust_after(float(np.exp(log_softmax(VALUES)[0])), int(chosen == 0)))
    before = trust.value
    learn_trust_unsent(trust, candidates, NOTHING_SENT, Verdict([], [chosen]))
    assert trust.value == before


@pytest.mark.parametrize("coupled", [True, False])
def test_children_that_were_never_chosen_first_make_the_draft_less_sharp(coupled: bool) -> None:
    calibration = Calibration().of(greedy=True, coupled=coupled)
    learn_children(calibration, CandidateTree(), NOTHING_SENT, [0])
    assert calibration.sharpness.value == 0.5, "the draft was not asked"
    candidates = drafted()
    for _ in range(200):
        learn_children(calibration, candidates, candidates.best(1, 9), [3, 0])
    assert calibration.sharpness.value == (GRID[-1] if coupled else 0.5)
    expected = np.exp(log_softmax(VALUES / GRID[calibration.index]))
    np.testing.assert_allclose(calibration.profile.values[:4], expected, atol=0.01)
