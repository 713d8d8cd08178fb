"""Threads and places that clients take turns at. This module knows no engine and no HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from offspec.running.waiting_line import WaitingLine

T = TypeVar("T")


@dataclass(eq=False)
class QueuedCall:
    """A function that waits, and its result to come."""

    client: str
    function: Callable[[], Any]
    future: Future[Any]


class TurnsExecutor:
    """One thread. Clients take turns, so that one with many calls delays another's by one of them."""

    def __init__(self, name: str, nice: int = 0) -> None:
        """name: the thread's. nice: how far it leaves the processor to others, where a thread can (Linux)."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_be_nice, initargs=(nice,))
        self._lock = Lock()
        self._waiting = WaitingLine[QueuedCall]()

    def submit(self, client: str, function: Callable[[], T]) -> Future[T]:
        """The result of `function` to come. Raises RuntimeError after `shutdown`."""
        future = Future[T]()
        with self._lock:
            self._waiting.append(QueuedCall(client, function, future))
        self._pool.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Cancel what waits. Does not wait for a call that runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for call in self._waiting:
                call.future.cancel()
            self._waiting.clear()

    def _run_next(self) -> None:
        with self._lock:
            call = next(iter(self._waiting), None)
            if call is None:
                return
            self._waiting.take(call)
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            call.future.set_result(call.function())
        except BaseException as exc:  # noqa: BLE001 (who waits for it gets it)
            call.future.set_exception(exc)
            del call  # the error has this frame: a cycle, which would keep the call's arguments


def _be_nice(nice: int) -> None:
    if nice and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


@dataclass(eq=False)
class Waiting:
    """Who waits for a place."""

    client: str
    has_place: asyncio.Event


class Places:
    """A number of places, for one event loop. Clients take turns, as they do at a thread."""

    def __init__(self, number: int) -> None:
        self._num_free, self._line = number, WaitingLine[Waiting]()

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """A place during the body."""
        waiting = Waiting(client, asyncio.Event())
        self._line.append(waiting)
        try:
            self._give()
            await waiting.has_place.wait()
            yield
        finally:
            if not self._line.discard(waiting):
                self._num_free += 1
                self._give()

    def _give(self) -> None:
        while self._num_free and (first := next(iter(self._line), None)) is not None:
            self._line.take(first)
            self._num_free -= 1
            first.has_place.set()
