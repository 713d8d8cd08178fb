"""Clients take turns, and each has its share of the time."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import CancelledError
from functools import partial
from threading import Event

import pytest

from offspec.cli.server.fair_thread import TurnsExecutor


def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    executor = TurnsExecutor("test")
    with pytest.raises(ZeroDivisionError):
        executor.submit("A", lambda: 1 // 0).result()
    assert executor.submit("A", lambda: 5).result() == 5
    executor.shutdown()


def test_an_error_does_not_keep_what_was_called() -> None:
    """Not even until cycles are collected: a refused request may be large."""
    executor, argument = TurnsExecutor("test"), Event()
    ref = weakref.ref(argument)
    gc.disable()
    try:
        future = executor.submit("A", partial(int, argument))  # type: ignore[arg-type]
        assert isinstance(future.exception(), TypeError)
        del future, argument
        executor.submit("A", int).result()  # the thread has left the call
        assert ref() is None
    finally:
        gc.enable()
    executor.shutdown()


def test_what_waits_is_cancelled_at_the_end() -> None:
    executor, begin = TurnsExecutor("test"), Event()
    running, waiting = executor.submit("A", begin.wait), executor.submit("A", list)
    executor.shutdown()
    with pytest.raises(CancelledError):
        waiting.result()
    begin.set()
    assert running.result()
