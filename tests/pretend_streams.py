"""Streams and events of the pretended device: what is ordered, what the host waits for, and copies that come late.

Kernels compute at once. A copy between page-locked memory and the device does not: its destination is garbage until
something that orders the copy demands it, an event's wait, the host's, or a later operation of the same stream on that
memory. So whoever forgets to wait reads garbage, and memory that is overwritten too early is copied with its new bytes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .happens_before import Clock, HappensBefore, place_here, share_bytes


@dataclass
class LateCopy:
    """A copy that is not carried out yet: from `source` to `target`, both in memory of the host."""

    target: Tensor
    source: Tensor

    def touches(self, views: Iterable[Tensor]) -> bool:
        """By bytes: the slots of layers are one storage."""
        return any(share_bytes(view, own) for view in views for own in (self.target, self.source))

    def spoil(self) -> None:
        dtype = self.target.dtype
        garbage = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
        with _disable_current_modes(), torch.inference_mode():
            self.target.fill_(garbage)

    def carry_out(self) -> None:
        with _disable_current_modes(), torch.inference_mode():
            self.target.copy_(self.source)


@dataclass
class Counts:
    """What costs time on a real card, by the project's function that does it."""

    waits: Counter[tuple[str, int]] = field(default_factory=Counter)  # of the host: function, current stream
    copies: Counter[str] = field(default_factory=Counter)  # from the host, by the copy engine: function


class Recording(threading.local):
    """Whether this thread records work; then whatever waits, or brings data of the host, is forbidden."""

    forbid: Callable[[str], None] | None = None  # is told what was done
    note: Callable[[str, Any, dict[str, Any], list[Tensor]], None] | None = None  # is told every operation


class Machine:
    """What all streams of the pretended device have in common. late: whether copies come late."""

    def __init__(self, *, late: bool = True) -> None:
        self.order, self.counts, self.recording = HappensBefore(), Counts(), Recording()
        self.is_late = late
        self.misaligned = set[str]()  # functions that multiplied with operands where fast products cannot read them
        self.lock = threading.RLock()
        self.locked = dict[int, int]()  # page-locked memory: address → bytes
        self.streams = list[Stream]()
        self.default = Stream(machine=self)
        self._local = threading.local()

    # ---------------------------------------------------------------------------------------- streams

    @property
    def current(self) -> Stream:
        stream: Stream = getattr(self._local, "stream", self.default)
        return stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def host_waits(self, kind: str, clock: Clock) -> None:
        """The host waits for the device here, until these operations are over."""
        if self.recording.forbid is not None:
            self.recording.forbid(f"the host waits ({kind})")
        self.counts.waits[place_here(1).function, self.current.number] += 1
        self.order.host_waits(clock)

    def synchronize(self) -> None:
        for stream in list(self.streams):
            stream.finish_copies()
            self.host_waits("synchronize", self.order.clock(stream.number))

    # ---------------------------------------------------------------------------------------- copies

    def is_locked(self, tensor: Tensor) -> bool:
        begin = tensor.data_ptr()
        return any(first <= begin < first + nbytes for first, nbytes in list(self.locked.items()))

    def lock_memory(self, address: int, nbytes: int, flags: int = 0) -> int:
        if nbytes == 0 or address in self.locked:
            return self.fails(1)
        self.locked[address] = nbytes
        return 0

    def fails(self, status: int) -> int:
        """A call of the runtime fails: it says so, and so does the thread's next operation if nobody asks before."""
        self._local.last_error = status
        return status

    def last_error(self) -> int:
        """Of this thread's calls, and forget it."""
        status = getattr(self._local, "last_error", 0)
        self._local.last_error = 0
        return int(status)

    def unlock_memory(self, address: int) -> int:
        if (nbytes := self.locked.pop(address, None)) is None:
            return self.fails(1)
        for stream in list(self.streams):
            for copy in list(stream.late):
                inside = [t for t in (copy.target, copy.source) if address <= t.data_ptr() < address + nbytes]
                assert not inside, f"memory is unlocked before a copy is over, at {place_here()}"
        return 0

    def before(self, views: Sequence[Tensor]) -> None:
        """An operation of the current stream touches these views: earlier copies of the stream come first."""
        late = self.current.late
        with self.lock:
            last = max((i for i, copy in enumerate(late) if copy.touches(views)), default=-1)
            for _ in range(last + 1):
                late.popleft().carry_out()
                self.current.num_over += 1

    def count_copy(self) -> None:
        self.counts.copies[place_here(1).function] += 1

    def copy_later(self, target: Tensor, source: Tensor) -> None:
        stream = self.current
        with self.lock:
            if not self.is_late:
                LateCopy(target, source).carry_out()
                return
            copy = LateCopy(target, source)
            copy.spoil()
            stream.late.append(copy)
            stream.num_copies += 1


class Stream:
    def __init__(self, device: Any = None, *, machine: Machine, **options: Any) -> None:
        self.machine, self.number = machine, len(machine.streams)
        self.late = deque[LateCopy]()
        self.num_copies = self.num_over = 0  # of the copies so far: begun, carried out
        machine.streams.append(self)

    @property
    def clock(self) -> Clock:
        return self.machine.order.clock(self.number)

    def finish_copies(self, count: int | None = None) -> None:
        """Carry out the first `count` copies of the stream; None: all."""
        with self.machine.lock:
            while self.late and (count is None or self.num_over < count):
                self.late.popleft().carry_out()
                self.num_over += 1

    def wait_stream(self, other: Stream) -> None:
        self._refuse_while_recording()
        other.finish_copies()
        self.machine.order.wait(self.number, other.clock)

    def wait_event(self, event: Event) -> None:
        self._refuse_while_recording()
        event.finish_copies()
        self.machine.order.wait(self.number, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(machine=self.machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.finish_copies()
        self.machine.host_waits("stream", self.clock)

    def query(self) -> bool:
        return not self.late

    def _refuse_while_recording(self) -> None:
        if self.machine.recording.forbid is not None:
            self.machine.recording.forbid("a stream waits for another one")


class Event:
    """The end of what a stream had when the event was recorded; of nothing before that."""

    def __init__(self, *, machine: Machine, **options: Any) -> None:
        self._machine, self.clock = machine, Clock()
        self._stream: Stream | None = None
        self._num_copies = 0
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._machine.current
        with self._machine.lock:
            self.at = time.perf_counter()
            self.clock, self._stream, self._num_copies = stream.clock, stream, stream.num_copies

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._machine.current).wait_event(self)

    def finish_copies(self) -> None:
        if self._stream is not None:
            self._stream.finish_copies(self._num_copies)

    def synchronize(self) -> None:
        self.finish_copies()
        self._machine.host_waits("event", self.clock)

    def query(self) -> bool:
        return self._stream is None or self._stream.num_over >= self._num_copies

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)
