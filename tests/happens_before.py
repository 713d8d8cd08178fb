"""Which accesses to memory happen before which, by vector clocks (FastTrack, Flanagan and Freund, PLDI 2009).

A stream runs its operations in order; events and waits order streams. Two accesses to the same bytes of which one
writes, without such an order, are a *race*: which is first depends on luck. So is the use of freed memory: torch lends
what one stream allocated to the same stream again, at once, whatever other streams still do with it.

All threads of the host count as one: what one of them has waited for is over for all later operations. This module
knows nothing of torch's operations, or of how streams are made.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from weakref import finalize

import numpy as np
from torch import Tensor

Clock = dict[int, int]  # stream → operations of it that are over; never changed in place
MOST_ACCESSES = 32  # of a storage, from which on those are dropped that nothing can race with any more
ROOT = str(Path(__file__).parents[1])
OWN_FILES = ("happens_before.py", "pretend_cuda.py", "pretend_streams.py", "pretend_capture.py")


def joined(one: Clock, other: Clock) -> Clock:
    """What is over if both are."""
    if all(one.get(stream, 0) >= count for stream, count in other.items()):
        return one
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in one.keys() | other.keys()}


# ------------------------------------------------------------------------------------------------ places


@dataclass(frozen=True)
class Place:
    """Where in the project something was called from, the innermost call first."""

    calls: tuple[tuple[CodeType, int], ...]

    def __str__(self) -> str:
        return " < ".join(self.lines)

    @property
    def function(self) -> str:
        """The innermost one."""
        return f"{name_of(self.calls[0][0])} {self.calls[0][0].co_name}" if self.calls else "outside of the project"

    @property
    def lines(self) -> list[str]:
        return [f"{name_of(code)}:{line} {code.co_name}" for code, line in self.calls]


def name_of(code: CodeType) -> str:
    return code.co_filename.removeprefix(ROOT).lstrip("/")


@cache
def is_of_project(filename: str) -> bool:
    return filename.startswith(ROOT) and "site-packages" not in filename and not filename.endswith(OWN_FILES)


def place_here(depth: int = 4) -> Place:
    calls, frame = list[tuple[CodeType, int]](), sys._getframe(1)
    while frame.f_back is not None and len(calls) < depth:
        if is_of_project(frame.f_code.co_filename):
            calls.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return Place(tuple(calls))


# ------------------------------------------------------------------------------------------------ bytes


@dataclass(frozen=True)
class Extent:
    """The bytes of a storage that a view consists of. dims: sizes and strides in bytes, those of one element left out.

    Exact: two views with interleaved rows do not overlap.
    """

    offset: int
    itemsize: int
    dims: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, view: Tensor) -> Extent:
        return extent_of(tuple(view.shape), view.stride(), view.storage_offset(), view.element_size())

    @property
    def end(self) -> int:
        return self.offset + sum((size - 1) * stride for size, stride in self.dims) + self.itemsize

    @property
    def is_dense(self) -> bool:
        count = int(np.prod([size for size, _ in self.dims], initial=1))
        return count * self.itemsize == self.end - self.offset

    def covers(self, other: Extent) -> bool:
        return self.is_dense and self.offset <= other.offset and other.end <= self.end

    def every_byte(self) -> set[int]:
        places = np.array([self.offset])
        for size, stride in (*self.dims, (self.itemsize, 1)):
            places = (places[:, None] + np.arange(size) * stride).ravel()
        return set(places.tolist())


@lru_cache(maxsize=1 << 16)
def extent_of(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int) -> Extent:
    """offset, strides: in elements."""
    pairs = zip(shape, strides, strict=True)
    dims = tuple(sorted((size, stride * itemsize) for size, stride in pairs if size != 1 and stride))
    return Extent(offset * itemsize, itemsize, dims)


@lru_cache(maxsize=1 << 16)
def overlap(one: Extent, other: Extent) -> bool:
    if one.end <= other.offset or other.end <= one.offset:
        return False
    if one.is_dense and other.is_dense:
        return True
    return not one.every_byte().isdisjoint(other.every_byte())


def share_bytes(one: Tensor, other: Tensor) -> bool:
    is_one_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_one_storage and overlap(Extent.of(one), Extent.of(other))


# ------------------------------------------------------------------------------------------------ accesses


@dataclass(frozen=True)
class Access:
    """number: of the operation in its stream. is_write: it may read, too."""

    stream: int
    number: int
    is_write: bool
    extent: Extent
    operation: str
    place: Place

    def __str__(self) -> str:
        return f"{self.operation} {'writes' if self.is_write else 'reads'} on stream {self.stream} at {self.place}"


@dataclass(frozen=True)
class Race:
    """Two accesses without an order, or one that is not over when its memory is freed."""

    earlier: Access
    later: Access | str

    def __str__(self) -> str:
        return f"no order between\n  {self.earlier}\n  {self.later}"


class Memory:
    """The accesses to one storage, of which only those matter that something may still race with."""

    def __init__(self, number: int, home: int | None) -> None:
        """home: the stream that allocated it; None for memory of the host."""
        self.number, self.home = number, home
        self._accesses = dict[tuple[int, bool, Extent], Access]()

    def __len__(self) -> int:
        return len(self._accesses)

    def unordered(self, clock: Clock, extent: Extent | None = None, *, is_write: bool = True) -> Iterable[Access]:
        """Accesses to these bytes that are not over by this clock, if they or the new one write."""
        for access in self._accesses.values():
            is_over = access.number <= clock.get(access.stream, 0)
            if not is_over and (access.is_write or is_write) and (extent is None or overlap(access.extent, extent)):
                yield access

    def add(self, access: Access, over_for_all: Clock) -> None:
        """over_for_all: what is over for every later operation."""
        if len(self._accesses) >= MOST_ACCESSES:
            over = [key for key, each in self._accesses.items() if each.number <= over_for_all.get(each.stream, 0)]
            for key in over:
                del self._accesses[key]
        self._accesses[access.stream, access.is_write, access.extent] = access  # it replaces an earlier, equal one

    def drop_covered(self, by: Access, clock: Clock) -> None:
        """What races with a dropped access also races with the write that came after it, and covers it."""
        accesses = self._accesses.items()
        over = [k for k, a in accesses if a.number <= clock.get(a.stream, 0) and by.extent.covers(a.extent)]
        for key in over:
            del self._accesses[key]


class HappensBefore:
    """Clocks of streams and of the host, and the races that were found. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}
        self._memories: dict[int, Memory] = {}  # by torch's address of the storage
        self.num_memories = 0
        self._freed = deque[tuple[Memory, Place]]()  # and not lent again yet
        self._races: dict[tuple[str, ...], Race] = {}
        self.num_operations = 0

    @property
    def races(self) -> list[Race]:
        """One of each kind: equal operations at equal places are one."""
        with self._lock:
            return list(self._races.values())

    def forget_races(self) -> None:
        self._races = {}

    # ---------------------------------------------------------------------------------------- order

    def clock(self, stream: int) -> Clock:
        """What is over when the stream has finished everything that it has."""
        with self._lock:
            return joined(self._clocks.get(stream, {}), self._host)

    def wait(self, stream: int, clock: Clock) -> None:
        """Later operations of the stream begin when these are over."""
        with self._lock:
            self._clocks[stream] = joined(self._clocks.get(stream, {}), clock)

    def host_waits(self, clock: Clock) -> None:
        with self._lock:
            self._host = joined(self._host, clock)

    # ---------------------------------------------------------------------------------------- memory

    def memory(self, tensor: Tensor, home: int | None = None) -> Memory:
        """Of a tensor's storage. home: see `Memory`, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            memory = self._memories.get(key)
            if memory is None:
                self._lend_again(home)
                self.num_memories += 1
                memory = self._memories[key] = Memory(self.num_memories, home)
                finalize(storage, self._free, key, memory).atexit = False
            return memory

    def _free(self, key: int, memory: Memory) -> None:
        """Called by the garbage collector, perhaps inside of this class: so it only takes note."""
        if self._memories.get(key) is memory:
            del self._memories[key]
        if len(memory):
            self._freed.append((memory, place_here()))

    def _lend_again(self, home: int | None) -> None:
        """A stream, or the host, allocates memory, which may be what was freed."""
        clock = self._host if home is None else self.clock(home)
        for _ in range(len(self._freed)):
            memory, place = self._freed.popleft()
            if memory.home != home:
                self._freed.append((memory, place))
                continue
            for access in memory.unordered(clock):
                if access.stream != home:
                    self._add_race(access, "free", f"its memory is freed at {place}, and used again", place)

    # ---------------------------------------------------------------------------------------- accesses

    def access(self, stream: int, operation: str, views: Sequence[tuple[Tensor, bool]]) -> None:
        """An operation of a stream touches these views. The flag: whether it writes."""
        place = place_here()
        with self._lock:
            self.num_operations += 1
            clock = self.clock(stream)
            number = clock.get(stream, 0) + 1
            clock = self._clocks[stream] = {**clock, stream: number}
            merged = dict[tuple[int, Extent], tuple[Memory, bool]]()
            for view, is_write in views:
                memory, extent = self.memory(view, stream), Extent.of(view)
                wrote = merged.get((memory.number, extent), (memory, False))[1]
                merged[memory.number, extent] = memory, wrote or is_write
            for (_, extent), (memory, is_write) in merged.items():
                access = Access(stream, number, is_write, extent, operation, place)
                for earlier in memory.unordered(clock, extent, is_write=is_write):
                    if earlier.stream != stream:
                        self._add_race(earlier, operation, access, place)
                if is_write:
                    memory.drop_covered(access, clock)
                memory.add(access, self._host)

    def host_access(self, operation: str, view: Tensor, *, is_write: bool) -> None:
        """The host touches memory that it shares with the device."""
        with self._lock:
            memory = self._memories.get(view.untyped_storage()._cdata)
            if memory is None:
                return
            place = place_here()
            for earlier in list(memory.unordered(self._host, Extent.of(view), is_write=is_write)):
                verb = "writes" if is_write else "reads"
                self._add_race(earlier, operation, f"{operation} {verb} on the host at {place}", place)

    def _add_race(self, earlier: Access, operation: str, later: Access | str, place: Place) -> None:
        key = (earlier.operation, *earlier.place.lines[:1], operation, *place.lines[:1])
        self._races.setdefault(key, Race(earlier, later))
