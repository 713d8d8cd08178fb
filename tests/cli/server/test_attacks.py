"""`scripts/replay_attacks`: servers withstand, and the figures show it if one does not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from offspec import Engine
from offspec.cli.server.reply_tokens import ReplyTokens
from offspec.text.grammar import ConstraintCompiler

from ...refusals import tells
from . import attacks
from .attacks import Finding
from .serving import Client, served


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few short requests."""
    few = {"NUM_REPLIES": 4, "NUM_CONSTRAINTS": 3, "NUM_REFUSED": 3, "NUM_PROMPTS": 2}
    few |= {"NUM_ATTACKERS": 2, "NUM_PARAMETERS": 100, "NUM_DIGITS": 2, "BEFORE_S": 0}
    for name, value in few.items():
        monkeypatch.setattr(attacks, name, value)
    monkeypatch.setattr(attacks, "REGEX_BYTES", 5000)


def test_prompts_that_change_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load("builtin", draft="none", device="cpu") as engine, served(engine) as (client, _):
        assert attacks.changed_prompts(client).holds
        known, add = dict[str, list[int]](), ReplyTokens.add

        def shared(self: ReplyTokens, client: str, messages: Any, reply: str, token_ids: list[int]) -> None:
            known[reply] = [token for character in reply for token in engine.encode(character)]
            add(self, client, messages, reply, token_ids)

        def of_all(self: ReplyTokens, client: str, messages: Sequence[Any]) -> list[list[int]]:
            return [known.get(message["content"], []) for message in messages if message["role"] == "assistant"]

        monkeypatch.setattr(ReplyTokens, "add", shared)
        monkeypatch.setattr(ReplyTokens, "of", of_all)
        assert not attacks.changed_prompts(client).holds


def test_memory_that_refused_constraints_keep_is_noticed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attacks.refused_constraints(client, os.getpid()).holds
    kept, refuse = list[bytes](), ConstraintCompiler.refuse

    def keep(self: ConstraintCompiler, part: Any, message: str) -> None:
        kept.append(b"x" * attacks.MOST_GROWTH)
        refuse(self, part, message)

    monkeypatch.setattr(ConstraintCompiler, "refuse", keep)
    assert not attacks.refused_constraints(client, os.getpid()).holds


def test_delays_are_measured_while_others_ask(engine: Engine) -> None:
    """Whether they are long is for the script to say, on a machine that does nothing else."""
    with served(engine) as (client, _):
        delays = [attacks.hard_constraints(client), attacks.long_prompts(client)]
        findings = [*delays, *attacks.blocked_constraints(client)]
    assert [finding for finding in findings if not tells(finding.figure, "alone", "attack")] == []
    assert [attacks.is_late(0.1, seconds) for seconds in (1.3, 1.5)] == [False, True]


def test_the_port_leads_to_the_process(client: Client) -> None:
    assert attacks.pid_of(client.port) == os.getpid()
    with pytest.raises(LookupError, match="port 0"):
        attacks.pid_of(0)


def test_one_attack_that_succeeds_fails_the_script() -> None:
    lines, good, bad = list[str](), Finding("an attack", "0 prompts", True), Finding("another", "9 s", False)
    assert attacks.report(iter([good, good]), lines.append) == 0
    assert attacks.report(iter([bad, good]), lines.append) == 1
    assert lines[1:3] == ["an attack: 0 prompts: holds", "another: 9 s: FAILS"]
