"""Constraints are tried in processes that end when they take too long, or when nobody waits for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from offspec.errors import OffspecError
from offspec.scheduler.params import Constraint
from offspec.text import grammar_trials
from offspec.text.grammar_constraint import Part
from offspec.text.grammar_library import STACK_BYTES
from offspec.text.grammar_trials import CAN_TRY, GrammarTrials
from offspec.text.grammar_worker import receive

from ...refusals import refused
from .hard_constraints import ENDLESS

pytestmark = pytest.mark.skipif(not CAN_TRY, reason="this system has no fork")
VOCABULARY = {"tokens": ["", *map(chr, range(256))], "special": [0], "eos": 0, "final": [0]}
DIGITS: Part = (Constraint.regex("[0-9]+"), "")


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(VOCABULARY)
    yield made
    made.close()


def answer(trials: GrammarTrials, part: Part) -> Any:
    sock, request = trials.begin(part)
    with sock:
        sock.sendall(request)
        return receive(sock)


def test_a_trial_says_how_long_it_takes_or_what_is_wrong(trials: GrammarTrials) -> None:
    assert 0 < answer(trials, DIGITS)["seconds"] < 10
    assert 0 < answer(trials, (DIGITS[0], "start: @answer"))["seconds"] < 10
    assert "regex cannot be used" in answer(trials, (Constraint.regex("("), ""))["error"]
    assert "allows no token" in answer(trials, (Constraint.regex(r"[^\s\S]"), ""))["error"]
    assert "JSON schema" in answer(trials, (Constraint.json_schema("{"), ""))["error"]


def test_a_trial_ends_when_nobody_waits_for_it(trials: GrammarTrials) -> None:
    """Its process alone has the other end of the socket, so that its end shows there."""
    sock, request = trials.begin((ENDLESS, ""))
    sock.sendall(request)
    sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    sock.settimeout(None)
    sock.shutdown(1)  # as the other side sees a close
    assert sock.recv(1) == b""
    sock.close()
    assert "seconds" in answer(trials, DIGITS)


@pytest.mark.parametrize(("limit", "value"), [("MOST_CPU_S", 0.1), ("MOST_TRIAL_BYTES", STACK_BYTES)])
def test_a_trial_ends_at_a_limit(limit: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, limit, value)
    trials = GrammarTrials(VOCABULARY)
    with pytest.raises(EOFError):
        answer(trials, (ENDLESS, ""))
    assert trials.is_running
    trials.close()
    assert not trials.is_running


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with refused(OffspecError, "process", "started"):
        GrammarTrials(VOCABULARY)
