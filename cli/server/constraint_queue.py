"""Compiles the constraints of many clients: what is hard delays nobody else.

The library's compiler has no bound, and a thread cannot be ended. So each new constraint is tried in a process first,
which a deadline and a client's leave end. Places are of two kinds: at the first, a trial has a short turn, so that what
is quick waits for quick ones alone. What takes longer begins again at the other kind. A constraint that compiles is
compiled again here, by one of two threads for the same reason. Its client's leave ends that only while it waits: the
library has no call that ends a compilation, and its result cannot come from another process. It takes as long as the
trial did, so at most MOST_CPU_S of processor time, and one mask, which the library bounds. The next request finds it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from offspec import Constraint
from offspec.errors import OffspecError, UsageError
from offspec.text.grammar import ConstraintCompiler
from offspec.text.grammar_constraint import Part, Start
from offspec.text.grammar_library import NAMES
from offspec.text.grammar_trials import CAN_TRY, GrammarTrials, ended
from offspec.text.grammar_worker import LENGTH

from .fair_thread import Places, TurnsExecutor

SHORT_S, LONG_S = 0.1, 20.0  # a trial's turn at each kind of place
NUM_SHORT, NUM_LONG = 3, 2  # places
QUICK_S = 0.02  # what compiles in less is compiled by the first thread
NICE = 10  # of the other one
T = TypeVar("T")


class ConstraintQueue:
    """The constraints of one engine. For one event loop, but for `close`."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler
        self._short, self._long = Places(NUM_SHORT), Places(NUM_LONG)
        self.quick, self.slow = TurnsExecutor("offspec-compile"), TurnsExecutor("offspec-compile-slow", NICE)
        self._trials: GrammarTrials | None = None
        self._is_closed = False

    def close(self) -> None:
        """End the threads and processes. Does not wait for what a thread compiles."""
        self._is_closed = True
        self.quick.shutdown()
        self.slow.shutdown()
        if self._trials is not None:
            self._trials.close()

    async def compile(self, constraint: Constraint, prompt: Sequence[int], client: str) -> list[Start]:
        """Compile a constraint on answers to a prompt. As long as the result is kept, `compile` of the engine is quick.

        Raises UsageError for a constraint that cannot be compiled, or not in LONG_S, and TokenizerError.
        """
        starts = list[Start]()
        for part, start in self._compiler.parts(constraint, prompt).items():
            if start is None:
                seconds = await self._trial_s(part, client)
                lane = self.quick if seconds <= QUICK_S else self.slow
                start = await _on(lane, client, partial(self._compiler.compile_part, part))
            starts.append(start)
        return starts

    async def compiles_soon(self, constraint: Constraint, client: str) -> bool:
        """Whether a constraint compiles within a short turn."""
        try:
            for part, start in self._compiler.parts(constraint).items():
                if start is None:
                    await self._trial_s(part, client, may_be_long=False)
        except OffspecError:
            return False
        return True

    async def run(self, starts: Sequence[Start], client: str, work: Callable[[], T]) -> T:
        """The result of `work` with compiled constraints."""
        is_quick = all(start.compile_s <= QUICK_S for start in starts)
        return await _on(self.quick if is_quick else self.slow, client, work)

    async def _trial_s(self, part: Part, client: str, *, may_be_long: bool = True) -> float:
        """How long a part takes to compile. Raises UsageError."""
        if not CAN_TRY:
            await _on(self.slow, client, partial(self._compiler.compile_part, part))
            return 0.0
        try:
            async with self._short.place(client):
                return await self._tried(part, SHORT_S)
        except asyncio.TimeoutError:
            if not may_be_long:
                raise self._too_long(part, SHORT_S) from None
        try:
            async with self._long.place(client):
                return await self._tried(part, LONG_S)
        except asyncio.TimeoutError as exc:
            raise self._too_long(part, LONG_S) from exc

    def _too_long(self, part: Part, seconds: float) -> UsageError:
        return UsageError(f"the {NAMES[part[0].kind]} takes more than {seconds:g} s to compile; simplify it")

    async def _tried(self, part: Part, most_s: float) -> float:
        """A trial's seconds. Raises UsageError, and asyncio.TimeoutError after `most_s`."""
        if self._trials is None or not self._trials.is_running:
            await _on(self.quick, "", self._start_trials)
        assert self._trials is not None
        try:
            answer = await asyncio.wait_for(_answer(*self._trials.begin(part)), most_s)
        except asyncio.TimeoutError:  # from Python 3.11 on an OSError
            raise
        except (OSError, EOFError) as exc:
            raise ended(part) from exc
        if "error" in answer:
            self._compiler.refuse(part, answer["error"])
            raise UsageError(answer["error"])
        return float(answer["seconds"])

    def _start_trials(self) -> None:
        """Start the process for trials, unless it runs: with the first trial, and again if it has ended."""
        if self._trials is not None:
            if self._trials.is_running:
                return
            self._trials.close()
        self._trials = GrammarTrials(self._compiler.vocabulary_for_trials())
        if self._is_closed:
            self._trials.close()


async def _on(lane: TurnsExecutor, client: str, work: Callable[[], T]) -> T:
    return await asyncio.wrap_future(lane.submit(client, work))


async def _answer(sock: socket.socket, request: bytes) -> Any:
    """A trial's answer. The socket is closed at the end, which ends the trial. Raises EOFError if there is none."""
    loop, content = asyncio.get_running_loop(), bytearray()
    with sock:
        sock.setblocking(False)
        await loop.sock_sendall(sock, request)
        while part := await loop.sock_recv(sock, 1 << 16):
            content += part
    if len(content) <= LENGTH.size:
        raise EOFError
    return json.loads(content[LENGTH.size :])
