"""The ring reads the next layers of a pass while the current one computes.

Every pass requests the streamed layers in the same order, so the ring knows the next layer, even across passes: it
reads the first layers of the next pass while the draft runs. `Ring` keeps the order and the slots, a `Filler` fills
slots in the background, and `PlainStream` is the synchronous twin.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch

from ..files.readers import HostBuffer, Reader
from ..files.records import Extent, Record

NUM_READERS = 4  # reads in flight
Unit: TypeAlias = int  # the number of weights that are lent together, in the order of a pass: a layer's


class Slot(Protocol):
    """Memory for one record on the compute device."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [at least the record's bytes]."""

    def enter(self) -> None:
        """Called once the slot is filled, before its content is used."""

    def leave(self) -> None:
        """Called when no later work will use its content."""


S = TypeVar("S", bound=Slot)
S_in = TypeVar("S_in", bound=Slot, contravariant=True)


class HostSlot:
    """A slot in host memory. The CPU computes in order, so enter and leave do nothing."""

    def __init__(self, buffer: HostBuffer) -> None:
        self.buffer = buffer

    @property
    def tensor(self) -> torch.Tensor:
        return self.buffer.tensor

    def give_away(self) -> None:
        """Leave the current memory to its users; the slot gets new memory."""
        self.buffer = HostBuffer(self.buffer.nbytes)

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class Fill:
    """The filling of one slot in `num_parts` parts; done when each part is read, failed, or skipped after `cancel`."""

    def __init__(self, num_parts: int) -> None:
        self.cancelled = False
        self._left = num_parts
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        if num_parts == 0:
            self._done.set()

    def part_done(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._left -= 1
            if error is not None and self._error is None:
                self._error, self.cancelled = error, True  # skip the other parts
            if self._left == 0:
                self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether no thread writes to the slot any more."""
        return self._done.is_set()

    def cancel(self) -> None:
        self.cancelled = True

    def settle(self) -> None:
        """Wait until no thread writes to the slot."""
        self._done.wait()

    def wait(self) -> None:
        """Wait until the slot is full. Raises the error of a failed read."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Filler(Protocol[S_in]):
    """Fills slots in the background."""

    def fill(self, slot: S_in, unit: Unit) -> Fill:
        """Start to fill `slot` with a unit; does not block."""

    def close(self) -> None:
        """Join the threads. No fill may be running."""


class Stream(Protocol):
    """Lends units one at a time, in any order; implementations may be fast in one order only."""

    def lend(self, unit: Unit) -> AbstractContextManager[torch.Tensor]:
        """Wait for a unit: a buffer (uint8) that begins with its record, valid inside the `with` block.

        Raises the error of a failed read; later calls try again.
        """

    def close(self) -> None:
        """Join the threads; no unit may be lent."""


@dataclass(frozen=True)
class Loan(Generic[S]):
    """A slot with its unit, filled or being filled."""

    unit: Unit
    slot: S
    fill: Fill


class Ring(Generic[S]):
    """Fills slots ahead of their use, in the cyclic `order` in which passes request units.

    It lends one slot at a time and fills the others. A request out of order, such as a new pass after an aborted one,
    restarts the ring from that unit. Not thread-safe.
    """

    def __init__(self, order: Sequence[Unit], slots: Sequence[S], filler: Filler[S]) -> None:
        assert order
        assert len(slots) >= 2, "one slot is lent while another is filled"
        self.slots = slots
        self._order, self._filler = list(order), filler
        self._free = deque(slots)
        self._ahead = deque[Loan[S]]()
        self.lent: S | None = None  # the slot in use
        self._next = 0
        self._schedule()

    @property
    def ahead(self) -> tuple[Loan[S], ...]:
        """The slots read ahead or being read, in the expected order of requests."""
        return tuple(self._ahead)

    def set_order(self, order: Sequence[Unit]) -> None:
        """Change the units of later requests.

        If all slots read ahead are still in the order, they stay, even while a unit is lent.
        """
        assert order
        if all(loan.unit in order for loan in self._ahead):
            left = (self._order[(self._next + i) % len(self._order)] for i in range(len(self._order)))
            self._next = next((order.index(unit) for unit in left if unit in order), 0)
        else:
            self._drop_ahead()
            self._next = 0
        self._order = list(order)

    @contextmanager
    def lend(self, unit: Unit) -> Iterator[torch.Tensor]:
        if not self._ahead or self._ahead[0].unit != unit:
            self._drop_ahead()
            self._next = self._order.index(unit)
            self._schedule()
        loan = self._ahead[0]
        try:
            loan.fill.wait()
        except Exception:  # a failed fill would raise on every request; the next request reads again
            self._drop_ahead()
            raise
        loan.slot.enter()
        self._ahead.popleft()
        self.lent = loan.slot
        try:
            yield loan.slot.tensor
        finally:
            self.lent = None
            loan.slot.leave()
            self._free.append(loan.slot)
            self._schedule()

    def close(self) -> None:
        """Stop within one read and join the threads."""
        self._drop_ahead()
        self._filler.close()

    def _schedule(self) -> None:
        while self._free:
            unit, slot = self._order[self._next], self._free.popleft()
            self._next = (self._next + 1) % len(self._order)
            self._ahead.append(Loan(unit, slot, self._filler.fill(slot, unit)))

    def _drop_ahead(self) -> None:
        for loan in self._ahead:
            loan.fill.cancel()
        for loan in self._ahead:
            loan.fill.settle()
        self._free.extend(loan.slot for loan in self._ahead)
        self._ahead.clear()


class PlainStream:
    """The plain twin of every ring: reads a unit on request, in the caller's thread, to `device`."""

    def __init__(self, records: Mapping[Unit, Record], reader: Reader, device: torch.device) -> None:
        self._records, self._reader, self._device = records, reader, device
        self._slot = HostSlot(HostBuffer(max(record.nbytes for record in records.values())))

    @contextmanager
    def lend(self, unit: Unit) -> Iterator[torch.Tensor]:
        for piece in self._records[unit].reads:
            read_piece(self._reader, piece, self._slot.buffer)
        record = self._records[unit]
        yield record.on(self._device, self._slot.tensor[: record.nbytes])

    def close(self) -> None: ...


@dataclass(frozen=True)
class ReadTask:
    """One piece of a record to read into a buffer."""

    fill: Fill
    piece: Extent
    buffer: HostBuffer


class ReadQueue:
    """Reads to do, in their order; those ahead of their use wait until no others are left. Thread-safe."""

    def __init__(self) -> None:
        self._on_demand, self._ahead = deque[ReadTask](), deque[ReadTask]()
        self._changed = threading.Condition()
        self._has_ended = False
        self.bytes_read = 0

    def put(self, tasks: Sequence[ReadTask], *, is_ahead: bool) -> None:
        with self._changed:
            (self._ahead if is_ahead else self._on_demand).extend(tasks)
            self._changed.notify(len(tasks))

    def get(self) -> ReadTask | None:
        """Wait for the next read; None after `end`, once all are done."""
        with self._changed:
            while not (self._on_demand or self._ahead):
                if self._has_ended:
                    return None
                self._changed.wait()
            return (self._on_demand or self._ahead).popleft()

    def take_ahead(self, fill: Fill) -> list[ReadTask]:
        """Remove the reads ahead of a fill that have not begun, and return them."""
        with self._changed:
            tasks = [task for task in self._ahead if task.fill is fill]
            if tasks:
                self._ahead = deque(task for task in self._ahead if task.fill is not fill)
            return tasks

    def count(self, nbytes: int) -> None:
        with self._changed:
            self.bytes_read += nbytes

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class DiskFiller:
    """Reads records into host slots, with several reads in flight.

    Its threads end on `close`, or when nothing refers to it any more.
    """

    def __init__(self, records: Mapping[Unit, Record], reader: Reader, num_threads: int = NUM_READERS) -> None:
        self._records = records
        self._queue = ReadQueue()
        self._threads = [
            threading.Thread(target=_read_all, args=(self._queue, reader), name=f"offspec-read-{i}", daemon=True)
            for i in range(num_threads)
        ]
        self._end = weakref.finalize(self, self._queue.end)
        self._end.atexit = False
        for thread in self._threads:
            thread.start()

    @property
    def bytes_read(self) -> int:
        return self._queue.bytes_read

    def fill(self, slot: HostSlot, unit: Unit, *, is_ahead: bool = False) -> Fill:
        """is_ahead: only while there is nothing else to read."""
        reads = self._records[unit].reads
        fill = Fill(len(reads))
        self._queue.put([ReadTask(fill, piece, slot.buffer) for piece in reads], is_ahead=is_ahead)
        return fill

    def hurry(self, fill: Fill) -> None:
        """What was read ahead is needed now."""
        if not fill.is_done and (tasks := self._queue.take_ahead(fill)):
            self._queue.put(tasks, is_ahead=False)

    def withdraw(self, fill: Fill) -> None:
        """Skip what has not begun of a fill ahead; it then counts as cancelled, and is settled soon."""
        tasks = self._queue.take_ahead(fill)
        if tasks:
            fill.cancel()
        for _ in tasks:
            fill.part_done()

    def close(self) -> None:
        self._end()
        for thread in self._threads:
            thread.join()


def _read_all(reads: ReadQueue, reader: Reader) -> None:
    """What each thread of a `DiskFiller` runs; it does not refer to the filler."""
    while (task := reads.get()) is not None:
        error: BaseException | None = None
        if not task.fill.cancelled:
            try:
                read_piece(reader, task.piece, task.buffer)
                reads.count(task.piece.least)
            except BaseException as exc:  # noqa: BLE001 (raised again in the thread that waits for the layer)
                error = exc
        task.fill.part_done(error)
        del task, error  # an idle thread keeps no memory


def read_piece(reader: Reader, piece: Extent, buffer: HostBuffer) -> None:
    """Read one piece of a record into its place in `buffer`."""
    reader.read(piece.path, piece.offset, buffer.view[piece.start : piece.start + piece.nbytes], piece.least)


def read_record(reader: Reader, record: Record, *, into: HostBuffer | None = None) -> HostBuffer:
    """Read a record into new memory, or into `into`."""
    slot = HostSlot(into or HostBuffer(record.nbytes))
    filler = DiskFiller({0: record}, reader)
    try:
        filler.fill(slot, 0).wait()
    finally:
        filler.close()
    return slot.buffer
