"""A thread that works for clients in turns, and how long each may keep it busy. It knows no engine and no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from offspec.running.waiting_line import WaitingLine

T = TypeVar("T")


@dataclass(eq=False)
class Call:
    """A function that waits, and its result to come."""

    client: str
    function: Callable[[], Any]
    future: Future[Any]


class TurnsExecutor:
    """One thread. Clients take turns, so that one with many calls delays another's by one of them."""

    def __init__(self, name: str) -> None:
        """name: the thread's."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = Lock()
        self._waiting = WaitingLine[Call]()

    def submit(self, client: str, function: Callable[[], T]) -> Future[T]:
        """The result of `function` to come. Raises RuntimeError after `shutdown`."""
        future = Future[T]()
        with self._lock:
            self._waiting.append(Call(client, function, future))
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


class TimeBudget:
    """Seconds that each client may take: at most `most_s` at once, and `share` of the time after that."""

    def __init__(self, most_s: float, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_s, self._share, self._clock = most_s, share, clock
        self._spent = dict[str, tuple[float, float]]()  # seconds, and when they were those

    def wait_s(self, client: str) -> float:
        """Seconds until the client may take more; 0 if it may now."""
        return max(0.0, self._now(client) - self.most_s) / self._share

    def spend(self, client: str, seconds: float) -> None:
        """Charge seconds to a client. Forgets those whose time is over."""
        spent = self._now(client) + seconds
        self._spent = {each: self._spent[each] for each in self._spent if self._now(each) > 0}
        self._spent[client] = spent, self._clock()

    def _now(self, client: str) -> float:
        spent, then = self._spent.get(client, (0.0, 0.0))
        return max(0.0, spent - self._share * (self._clock() - then))
