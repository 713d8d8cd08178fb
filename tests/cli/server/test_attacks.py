"""A small run of `scripts/replay_attacks`."""

from __future__ import annotations

import os

import pytest

from . import attacks
from .attacks import Finding
from .serving import Client


def test_each_attack_is_measured(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether delays are long is for the script to say, on a machine that does nothing else."""
    few = {"NUM_REPLIES": 2, "NUM_CONSTRAINTS": 1, "NUM_REFUSED": 2, "NUM_PROMPTS": 1, "REGEX_BYTES": 2000}
    few |= {"NUM_ATTACKERS": 1, "NUM_PARAMETERS": 2, "NUM_DIGITS": 1, "BEFORE_S": 0}
    for name, value in few.items():
        monkeypatch.setattr(attacks, name, value)
    prompts, memory, *delays = attacks.replay(client, attacks.pid_of(client.port))
    assert (prompts.holds, memory.holds) == (True, True), (prompts, memory)
    assert [" alone, " in found.figure and " under attack" in found.figure for found in delays] == [True] * 5


def test_what_fails_the_script() -> None:
    lines, good, bad = list[str](), Finding("an attack", "0 prompts", True), Finding("another", "9 s", False)
    assert attacks.report(iter([good, good]), lines.append) == 0
    assert attacks.report(iter([bad, good]), lines.append) == 1
    assert lines[1:3] == ["an attack: 0 prompts: holds", "another: 9 s: FAILS"]
    assert [attacks.is_late(0.1, seconds) for seconds in (1.3, 1.5)] == [False, True]


def test_the_port_leads_to_the_process(client: Client) -> None:
    assert attacks.pid_of(client.port) == os.getpid()
    with pytest.raises(LookupError, match="port 0"):
        attacks.pid_of(0)
