"""What a CUDA graph would replay, checked on the pretended device in place of capturing.

A graph repeats its kernels with the same numbers on the same memory, whatever the function that was captured would do
now. So here the function runs again at each replay, and must do the same operations, with the same arguments, on the
same memory. Nothing in it may wait for the device, or take data from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .happens_before import Extent, HappensBefore, Place, place_here
from .pretend_streams import Machine

Work = Callable[[], None]


@dataclass
class Trace:
    """The operations of one run, described so that equal ones are equal."""

    order: HappensBefore
    steps: list[tuple[Any, Place]] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)  # number of memory that the work allocated → in which order

    def __post_init__(self) -> None:
        self._num_before = self.order.num_memories

    def note(self, name: str, args: Any, kwargs: dict[str, Any], results: list[Tensor]) -> None:
        described = name, self._described(args), tuple((key, self._described(kwargs[key])) for key in sorted(kwargs))
        for result in results:
            number = self.order.memory(getattr(result, "held", result)).number
            if number > self._num_before:
                self.made.setdefault(number, len(self.made))
        self.steps.append((described, place_here()))

    def _described(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(self._described(each) for each in value)
        if not isinstance(value, Tensor):
            return repr(value)
        tensor = getattr(value, "held", value)
        memory = self.order.memory(tensor).number
        where = ("made", self.made[memory]) if memory in self.made else ("outside", memory)
        return where, Extent.of(tensor), tuple(tensor.shape), str(tensor.dtype)


class CheckingRecorder:
    """In place of `CudaRecorder`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __call__(self, work: Work) -> Work | None:
        if self._machine.current is not self._machine.default:
            return None
        work()  # to warm up, as libraries need it
        recorded = self._traced(work)

        def replay() -> None:
            self._compare(recorded, self._traced(work))

        return replay

    def _traced(self, work: Work) -> Trace:
        trace = Trace(self._machine.order)
        with self._recording(trace):
            work()
        return trace

    @contextmanager
    def _recording(self, trace: Trace) -> Iterator[None]:
        recording = self._machine.recording
        recording.forbid, recording.note = forbid, trace.note
        try:
            yield
        finally:
            recording.forbid = recording.note = None

    def _compare(self, recorded: Trace, now: Trace) -> None:
        for (before, _), (after, place) in zip(recorded.steps, now.steps, strict=False):
            assert before == after, f"a graph would not do this at {place}: {after}; it would repeat {before}"
        assert len(recorded.steps) == len(now.steps), "a graph would repeat as many operations as were recorded"


def forbid(done: str) -> None:
    raise AssertionError(f"in work that is recorded as a graph, {done} at {place_here()}")
