"""Conversations that are stored for `previous_response_id`: how many, and how long."""

from __future__ import annotations

from offspec.cli.server.openai_responses import KEPT_S, StoredResponses
from offspec.errors import UsageError

from ...refusals import refused

MESSAGES = [{"role": "user", "content": "x" * 100}]


def test_the_oldest_are_dropped() -> None:
    stored = StoredResponses(most_bytes=300)
    for name in "abc":
        stored.add(name, MESSAGES)
    with refused(UsageError, "previous_response_id", "input"):
        stored.messages("a")
    assert [stored.messages(name) for name in "bc"] == [MESSAGES] * 2
    stored.add("d", MESSAGES * 9)  # larger than all that may be kept
    with refused(UsageError, "previous_response_id"):
        stored.messages("d")


def test_none_is_kept_for_long() -> None:
    now_s = 0.0
    stored = StoredResponses(clock=lambda: now_s)
    stored.add("a", MESSAGES)
    now_s = KEPT_S - 1
    stored.add("b", MESSAGES)
    assert stored.messages("a") == MESSAGES
    now_s = KEPT_S
    with refused(UsageError, "previous_response_id", "hour"):
        stored.messages("a")
    stored.add("c", MESSAGES)
    assert stored.messages("b") == MESSAGES
