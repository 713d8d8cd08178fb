"""A recorded conversation is replayed: with reuse a turn scores its new tokens, without it all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks import agent_replay
from offspec import Engine

from ..cli.server.serving import served

MESSAGES = [
    {"role": role, "content": f"{role} says {'something ' * number}"}
    for number, role in enumerate(["user", "assistant", "user", "assistant", "user"], start=3)
]


@contextmanager
def server_here(model: str, flags: Sequence[str]) -> Iterator[tuple[int, psutil.Process]]:
    """The server of a command line, in this process."""
    is_without = "--cache-ram" in flags
    parallel, cache_ram = (1, 0) if is_without else (None, None)
    with (
        Engine.load(model, device="cpu", context=512, cache_ram=cache_ram) as engine,
        served(engine, parallel=parallel) as (client, _),
    ):
        yield client.port, psutil.Process()


@pytest.mark.nightly("starts a server and answers an agent's turns; the parts are tested apart")
def test_turns_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "agents.json"
    file.write_text(json.dumps({"cases": [{"id": "one", "messages": MESSAGES}]}))
    monkeypatch.setattr(agent_replay, "server", server_here)
    args = ("builtin", "--file", str(file), "--case", "one", "--max-tokens", "2", "--compare", "1,3")
    monkeypatch.setattr("sys.argv", ["agent_replay", *args])
    agent_replay.main()
    *_, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)
    reused, scored = results["reused"], results["scored"]
    assert [turn["tokens"] for turn in reused] == sorted(turn["tokens"] for turn in reused)
    assert sorted(scored) == ["1", "3"]
    assert scored["3"]["tokens"] == reused[2]["tokens"]
    assert reused[2]["scored"] <= reused[2]["tokens"] - reused[1]["tokens"] + 2
    assert scored["3"]["scored"] > 0.8 * scored["3"]["tokens"]
