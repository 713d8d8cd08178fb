"""`/save` of a chat that is killed in the middle, by seeds: the old file stays whole, or the new one is."""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.session import Session, Turn

from ..pair import build_pair

if sys.platform == "win32":
    pytest.skip("processes and limits as POSIX has them", allow_module_level=True)

import resource

NUM_CASES = int(os.environ.get("FUZZ_CASES", "4"))
COUNTED = ("session.py", "prompt_cache.py", "atomic_files.py", "kv_files.py", "tempfile.py")
PLAIN, PARAMS = SpeculationParams(budget=0), SamplingParams(12, seed=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pair = build_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=512)
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu") as loaded:
        yield loaded


def say(session: Session, message: str) -> None:
    for _ in session.reply(message, PARAMS):
        pass


def save(session: Session, file: Path) -> None:
    """As `/save` does."""
    session.save(file, {"temperature": 0.7})
    session.save_entries(file)


class Lines:
    """Counts the lines that these modules execute; calls `act` at number `last`."""

    def __init__(self, last: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.number, self._last, self._act = 0, last, act

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            return self.trace if frame.f_code.co_filename.endswith(COUNTED) else None
        if event == "line":
            self.number += 1
            if self.number == self._last:
                self._act()
        return self.trace


def count_lines(act: Callable[[], None]) -> int:
    """Lines of COUNTED that `act` executes."""
    lines, before = Lines(), sys.gettrace()
    sys.settrace(lines.trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines.number


def in_a_process_that_is_killed(act: Callable[[], None], kill_at: Callable[[], None]) -> int:
    """The signal that ended a child process that runs `act`; 0 if it came to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs in one thread, and computes nothing
        child = os.fork()
    if child == 0:
        try:
            kill_at()
            act()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the save failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def at_a_line(number: int) -> None:
    sys.settrace(Lines(number, lambda: os.kill(os.getpid(), signal.SIGKILL)).trace)


def at_a_byte(number: int) -> None:
    """In the middle of the write that makes a file longer."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_a_whole_chat(engine: Engine, tmp_path: Path) -> None:
    file, entries = tmp_path / "talk.json", tmp_path / "talk.json.kv"
    session = Session(engine, "Be brief, and say nothing that nobody has asked for.")
    say(session, "def area(")
    save(session, file)
    old = {path: path.read_bytes() for path in (file, entries)}
    old_turns = list(session.turns)
    say(session, "and then?")
    num_lines = count_lines(lambda: save(session, file))
    new = {path: path.read_bytes() for path in (file, entries)}
    assert new[file] != old[file]
    assert len(new[entries]) > len(old[entries])
    found = {"old": 0, "new": 0}
    for seed in range(NUM_CASES):
        chance = random.Random(seed)
        for path, content in old.items():
            path.write_bytes(content)
        line, byte = chance.randint(1, num_lines), chance.randrange(len(new[chance.choice((file, entries))]))
        kill_at = (lambda: at_a_line(line)) if seed % 2 else (lambda: at_a_byte(byte))  # noqa: B023 (called at once)
        assert in_a_process_that_is_killed(lambda: save(session, file), kill_at) in (0, signal.SIGKILL, signal.SIGXFSZ)
        now = file.read_bytes()
        assert now in (old[file], new[file]), f"case {seed}: a chat that is neither"
        assert entries.read_bytes() in (old[entries], new[entries]), f"case {seed}: KV entries that are neither"
        found["old" if now == old[file] else "new"] += 1
        _check_that_it_goes_on(engine, file, old_turns if now == old[file] else session.turns)
        for path in tmp_path.glob(".talk.json.*"):
            if not path.name.startswith(".talk.json.kv."):
                path.unlink()  # the temporary file of a killed process; that of the KV entries is used again
    assert min(found.values()) > NUM_CASES / 10
    save(session, file)
    assert {path: path.read_bytes() for path in (file, entries)} == new


def _check_that_it_goes_on(engine: Engine, file: Path, turns: list[Turn]) -> None:
    """As the conversation would have."""
    session = Session(engine)
    session.load(file)
    assert [turn.token_ids for turn in session.turns] == [turn.token_ids for turn in turns]
    say(session, "go on")
    expected = engine.generate(session.encode(session.turns), PARAMS, PLAIN)
    ids = [token for step in expected for token in step.token_ids]
    assert session.turns[-1].token_ids == ids[: len(session.turns[-1].token_ids)]
