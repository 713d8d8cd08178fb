"""Work beside a pass: it is told when the pass is over, waited for, and its error is not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import Event

import pytest
import torch

from offspec.background import in_background
from offspec.loaders.accelerators.cuda import Cuda

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda:0"), marks=pytest.mark.gpu)]
LONG_S = 300.0  # what is waited for at most, where a test would else hang


def work_until_over(is_over: Callable[[], bool]) -> None:
    """Fails, rather than work for ever, where the end is never told."""
    deadline = time.monotonic() + LONG_S
    while not is_over():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("device", DEVICES)
def test_work_runs_while_the_body_runs_and_ends_with_it(device: torch.device) -> None:
    begun, body_seen, seen, threads = Event(), Event(), [], []

    def work(is_over: Callable[[], bool]) -> None:
        threads.append(threading.current_thread())
        seen.append(is_over())
        begun.set()
        assert body_seen.wait(LONG_S)  # only the body can end this
        work_until_over(is_over)
        seen.append(is_over())

    with in_background(work, device):
        assert begun.wait(LONG_S)
        assert seen == [False]
        assert threads != [threading.current_thread()]
        body_seen.set()
    assert seen == [False, True]
    assert not threads[0].is_alive()


def test_what_is_under_way_is_waited_for() -> None:
    """A round that sees the end only when it is through ends before the block does; none begins after it."""
    rounds, begun = [], Event()

    def work(is_over: Callable[[], bool]) -> None:
        while not is_over():
            begun.set()
            work_until_over(is_over)
            rounds.append("done")

    with in_background(work, CPU):
        assert begun.wait(LONG_S)
    assert rounds == ["done"]


def test_work_that_has_ended_before_the_body() -> None:
    ended = Event()
    with in_background(lambda _: ended.set(), CPU):
        assert ended.wait(LONG_S)


@pytest.mark.parametrize("error", [ValueError("bad draft"), KeyboardInterrupt()])
def test_an_error_of_the_work_is_raised_at_the_end(error: BaseException) -> None:
    raised, after = Event(), []

    def work(is_over: Callable[[], bool]) -> None:
        raised.set()
        raise error

    with pytest.raises(type(error)) as caught:  # noqa: PT012 - when it is raised is what is tested
        with in_background(work, CPU):
            assert raised.wait(LONG_S)
            after.append("the body goes on")
        after.append("not reached")
    assert caught.value is error
    assert after == ["the body goes on"]


@pytest.mark.parametrize("has_failing_work", [True, False])
@pytest.mark.parametrize("error", [ValueError("bad target"), KeyboardInterrupt()])
def test_the_bodys_own_error_wins(error: BaseException, has_failing_work: bool) -> None:
    ended = Event()

    def work(is_over: Callable[[], bool]) -> None:
        work_until_over(is_over)
        ended.set()
        if has_failing_work:
            raise RuntimeError("bad draft")

    with pytest.raises(type(error)) as caught, in_background(work, CPU):
        raise error
    assert caught.value is error
    assert ended.is_set(), "the work was not waited for"


@pytest.mark.gpu
def test_work_has_a_stream_of_its_own_and_sees_what_came_before() -> None:
    """What the body's stream was given before the block is there for the work, and the work's results after it."""
    device = torch.device("cuda:0")
    before = torch.zeros(1 << 20, device=device)
    streams, made = [], []
    for _ in range(100):
        before += 1  # queued, perhaps not done, when the work begins

    def work(is_over: Callable[[], bool]) -> None:
        streams.append(torch.cuda.current_stream(device))
        made.append(before * 2)

    with in_background(work, device):
        torch.cuda.current_stream(device).synchronize()
    assert streams[0] != torch.cuda.current_stream(device)
    assert (made[0] == 200).all()


def test_on_a_gpu_its_kernels_come_before_those_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, int]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, **options: made.append(options))
    accelerator = Cuda(torch.device("cuda:0"))
    assert accelerator.urgent_stream is accelerator.urgent_stream
    assert made == [{"priority": -1}]
