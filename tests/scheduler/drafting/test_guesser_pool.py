"""Guessers are asked while they are worth it, and believed as far as they were right where the draft said otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from offspec.scheduler.drafting.candidate_tree import CandidateTree
from offspec.scheduler.drafting.guesser_pool import MAX_GUESSES, GuesserPool, GuesserWorth
from offspec.scheduler.pace.calibration import UNIT, Calibration, DraftCalibration
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict

from ..fakes import VirtualClock, guesses_of

SAMPLER, TEXT = Sampler(SamplingParams(), 0, 4), [1, 2]


@dataclass
class Guess:
    """Guesses one token, at a score and after some seconds; remembers what it was asked and told."""

    token: int
    score: float
    clock: VirtualClock
    seconds: float = 0.0
    asked: list[tuple[int, int]] = field(default_factory=list)
    told: list[Verdict] = field(default_factory=list)

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        self.clock.now += self.seconds
        self.asked.append((max_nodes, max_depth))
        return replace(TokenTree.chain([self.token]), scores=np.array([self.score]))

    def observe(self, done: TargetPass) -> None:
        self.told.append(done.verdict)


def pool_of(*guesses: Guess, calibration: DraftCalibration | None = None) -> GuesserPool:
    calibration = calibration or Calibration().of(greedy=True, coupled=False)
    return GuesserPool(guesses, SAMPLER, calibration, guesses[0].clock)


def test_all_are_asked_into_one_tree_and_told_of_every_verdict() -> None:
    clock, tree = VirtualClock(), CandidateTree()
    guesses = [Guess(2, -0.5, clock), Guess(0, -1.0, clock), Guess(2, -0.1, clock)]
    pool = pool_of(*guesses)
    pool.ask(tree, TEXT, 1000, 5, None)
    assert tree.tree(tree.best(9, 9)).tokens.tolist() == [2, 0]
    assert tree.nodes["score"].tolist() == [-0.1, -1.0], "the best score of a node counts"
    assert [guess.asked for guess in guesses] == [[(MAX_GUESSES, 5)]] * 3
    pool.observe(TargetPass(TEXT, TokenTree.empty(), verdict := Verdict([], [2]), torch.empty(0, 0)))
    assert [guess.told for guess in guesses] == [[verdict]] * 3


@pytest.mark.parametrize("tokens_per_s", [None, 1.0])
def test_who_is_not_worth_its_seconds_is_asked_seldom_unless_all_are_wanted(tokens_per_s: float | None) -> None:
    clock = VirtualClock()
    slow, quick = Guess(0, -1.0, clock, seconds=3.0), Guess(1, -1.0, clock, seconds=0.1)
    pool = pool_of(slow, quick)
    for _ in range(100):
        pool.ask(CandidateTree(), TEXT, 8, 5, tokens_per_s)
        if pool.was_asked:
            pool.learn_worth(0.5)
    assert len(quick.asked) == 100
    assert len(slow.asked) == (100 if tokens_per_s is None else 4), "after 8 passes, 16, 32, …"


def test_worth_is_tokens_against_seconds_and_little_is_never_ruled_out() -> None:
    worth = GuesserWorth()
    assert worth.is_due(1e9), "nothing is known yet"
    worth.observe(0.5, 1.0)
    assert worth.is_due(0.5 + GuesserWorth.HOPE)
    assert not worth.is_due(0.53)
    for _ in range(100):
        worth.observe(0.0, 1.0)
    assert worth.is_due(GuesserWorth.HOPE)


def drafted(tokens: Sequence[int]) -> CandidateTree:
    """The draft was asked at the root, where it gives these tokens a half each; it thinks nothing of the others."""
    tree = CandidateTree()
    values = np.full(4, -20.0)
    values[list(tokens)] = math.log(0.5)
    tree.add(np.array([ROOT]), guesses_of(values, 4), UNIT)
    return tree


@pytest.mark.parametrize(("chosen", "rises"), [(3, True), (0, False)])
def test_trust_follows_what_came_true_against_the_drafts_word(chosen: int, rises: bool) -> None:
    calibration = Calibration().of(greedy=True, coupled=False)
    calibration.guesser_trust.observe(4.0, 1)
    before, guess = calibration.guesser_trust.value, Guess(3, math.log(0.9), VirtualClock())
    pool = pool_of(guess, calibration=calibration)
    tree = drafted([0, 1])
    pool.ask(tree, TEXT, 8, 5, None)
    claimed = float(np.exp(tree.nodes["claim"].max()))
    assert claimed == pytest.approx(0.9 * before), "it counts as far as it is trusted"
    pool.learn_trust(tree, np.array([ROOT]), [chosen])
    assert (calibration.guesser_trust.value > before) == rises


def test_where_the_draft_agrees_or_was_not_asked_nothing_is_learnt_of_trust() -> None:
    for tree, score in ((drafted([3]), -5.0), (CandidateTree(), -0.1)):
        calibration = Calibration().of(greedy=True, coupled=False)
        pool = pool_of(Guess(3, score, VirtualClock()), calibration=calibration)
        pool.ask(tree, TEXT, 8, 5, None)
        pool.learn_trust(tree, np.array([ROOT]), [0])
        assert calibration.guesser_trust.value == 1.0
