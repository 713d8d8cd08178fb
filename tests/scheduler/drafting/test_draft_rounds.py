"""Rounds ask the model for what is wanted and no more; after a verdict tree and model hold the same nodes."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch

from offspec.scheduler.drafting.child_scores import ChildScorer
from offspec.scheduler.drafting.draft_rounds import MAX_CORRECTED, DraftRounds
from offspec.scheduler.drafting.drafter import DraftRequest, LogitCorrector
from offspec.scheduler.drafting.score_calls import run_alone
from offspec.scheduler.pace.calibration import Calibration
from offspec.scheduler.params import MAX_ROWS, SamplingParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, IntArray
from offspec.scheduler.trees.verify import NoStates, TargetStates

from ..fakes import LearningModel, RuleModel, count_down, random_rule, resembling

VOCAB_SIZE, TEXT = 4, [3, 0, 2]
RULE = random_rule(VOCAB_SIZE, seed=0)


def rounds_of(
    model: RuleModel, max_depth: int = 9, corrector: LogitCorrector | None = None, final: Collection[int] = ()
) -> DraftRounds:
    """At the text, with nothing drafted yet."""
    sampler, calibration = Sampler(SamplingParams(), 0, VOCAB_SIZE), Calibration().of(greedy=True)
    scorer = ChildScorer(model.vocabulary, sampler, VOCAB_SIZE, coupled=True)
    rounds = DraftRounds(model, DraftRequest(sampler, final), scorer, calibration, corrector)
    rounds.begin(TEXT, max_depth)
    return rounds


def test_the_root_takes_what_the_model_has_not_read_and_a_round_takes_its_nodes() -> None:
    model = RuleModel(RULE, VOCAB_SIZE)
    rounds = rounds_of(model)
    assert (rounds.num_unscored, rounds.room) == (3, MAX_ROWS)
    assert run_alone(rounds.expand_root()) == 3
    assert (model.chains, rounds.num_unscored, rounds.tree.is_rooted) == ([TEXT], 0, True)
    assert run_alone(rounds.expand(rounds.open_among(rounds.best(9))[:2])) == 2
    assert (model.batches, rounds.room, len(rounds.tree.nodes)) == ([0, 2], MAX_ROWS - 2, 3 * VOCAB_SIZE)


@pytest.mark.parametrize(("max_depth", "max_context", "deepest"), [(9, len(TEXT) + 2, 2), (1, 99, 1)])
def test_no_node_is_open_where_depth_or_context_end(max_depth: int, max_context: int, deepest: int) -> None:
    rounds = rounds_of(RuleModel(RULE, VOCAB_SIZE, max_context), max_depth)
    assert rounds.model_depth == deepest
    run_alone(rounds.expand_root())
    run_alone(rounds.extend(4, lambda: False))
    assert rounds.tree.nodes["depth"].max() == deepest


@pytest.mark.parametrize("num_rounds", [0, 1, 3])
def test_extending_goes_on_until_it_is_told_to_stop(num_rounds: int) -> None:
    model = RuleModel(RULE, VOCAB_SIZE)
    rounds = rounds_of(model)
    run_alone(rounds.extend(2, count_down(5)))
    assert model.batches == [], "without a root there is nothing to go on with"
    run_alone(rounds.expand_root())
    run_alone(rounds.extend(2, count_down(num_rounds)))
    assert model.batches == [0] + [2] * num_rounds


@pytest.mark.parametrize("reuse", [True, False])
def test_what_is_below_the_new_root_stays_with_reuse_alone(reuse: bool) -> None:
    model = RuleModel(RULE, VOCAB_SIZE)
    rounds = rounds_of(model)
    run_alone(rounds.expand_root())
    first = rounds.best(1)
    run_alone(rounds.expand(first))
    below = np.flatnonzero(rounds.tree.nodes["parent"] == first[0])[:2]
    run_alone(rounds.expand(below))
    token = int(rounds.tree.nodes["token"][first[0]])
    rounds.keep(np.empty(0, dtype=np.int64), [token], reuse=reuse)
    assert rounds.tree.is_rooted == reuse
    assert rounds.tree.num_expanded == (2 if reuse else 0)
    assert model.text == ([*TEXT, token] if reuse else TEXT)
    rounds.begin([*TEXT, token], 9)
    assert rounds.num_unscored == (0 if reuse else 1)


def test_a_corrector_hears_of_nodes_that_both_scored_and_has_the_last_word() -> None:
    """The rule changes with the verdict; what stayed is judged by the new one, the likeliest places at least."""
    model = LearningModel(lambda count: resembling(RULE, seed=count), VOCAB_SIZE)
    told: list[tuple[list[int], list[int]]] = []

    class Noted:
        def observe(self, rows: IntArray, nodes: IntArray, states: TargetStates) -> None:
            told.append((rows.tolist(), nodes.tolist()))
            model.observe(rows, nodes, states)

        def corrected(self, rows: IntArray) -> torch.Tensor:
            assert len(rows) <= MAX_CORRECTED
            return model.corrected(rows)

    rounds = rounds_of(model, corrector=Noted())
    rounds.correct(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), NoStates())
    assert told == [], "the draft was not asked"
    run_alone(rounds.expand_root())
    sent = rounds.best(3)
    run_alone(rounds.expand(sent[1:2]))
    rounds.correct(sent, np.arange(len(sent)) + 1, NoStates())
    assert told == [([ROOT, 0], [0, 2])]
    rounds.rejudge()
    fresh = rounds_of(RuleModel(resembling(RULE, seed=1), VOCAB_SIZE))
    run_alone(fresh.expand_root())
    scores = dict(zip(fresh.tree.nodes["token"].tolist(), fresh.tree.nodes["score"].tolist(), strict=True))
    children = rounds.tree.nodes[rounds.tree.nodes["depth"] == 1]
    np.testing.assert_allclose(children["score"], [scores[token] for token in children["token"].tolist()])
