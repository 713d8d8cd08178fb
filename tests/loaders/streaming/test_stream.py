from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.errors import CheckpointError
from offspec.loaders.files.checkpoint import TensorInfo
from offspec.loaders.files.readers import READ_BYTES, HostBuffer
from offspec.loaders.files.records import Record
from offspec.loaders.streaming.stream import DiskFiller, HostSlot, Ring

from ...examples import examples
from ...refusals import refused
from ..fakes import FakeReader

PATH = Path("weights")
LAYER_BYTES = 9000


def records(num_layers: int, nbytes: int = LAYER_BYTES) -> dict[int, Record]:
    return {
        i: Record.of([TensorInfo(f"layer{i}", "U8", (nbytes,), PATH, 100 + i * nbytes, nbytes)])
        for i in range(num_layers)
    }


class Setup:
    """A ring over a fake file."""

    def __init__(
        self, num_layers: int = 5, num_slots: int = 3, gate: threading.Event | None = None, nbytes: int = LAYER_BYTES
    ) -> None:
        content = random.Random(1).randbytes(100 + num_layers * nbytes) if gate is None else bytes(200 * 2**20)
        self.content, self.nbytes = content, nbytes
        self.records = records(num_layers, nbytes)
        self.reader = FakeReader({PATH: self.content}, gate)
        self.slots = [HostSlot(HostBuffer(max(r.nbytes for r in self.records.values()))) for _ in range(num_slots)]
        before = set(threading.enumerate())
        self.ring = Ring(range(num_layers), self.slots, DiskFiller(self.records, self.reader))
        self.threads = set(threading.enumerate()) - before

    def take(self, layer: int) -> bytes:
        with self.ring.lend(layer) as buffer:
            return self.records[layer].parts(buffer)[f"layer{layer}"].numpy().tobytes()

    def expected(self, layer: int) -> bytes:
        return self.content[100 + layer * self.nbytes :][: self.nbytes]


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.ring.close()


def test_layers_come_in_order_pass_after_pass(setup: Setup) -> None:
    for layer in [0, 1, 2, 3, 4] * 4:
        assert setup.take(layer) == setup.expected(layer)
    setup.ring.close()
    ahead = len(setup.slots)  # what the ring read of the fifth pass meanwhile
    assert 20 <= len(setup.reader.reads) <= 20 + ahead


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(2, 7))
@examples(30)
def test_any_order_of_asking_gives_the_right_bytes(asked: list[int], num_slots: int) -> None:
    setup = Setup(num_slots=num_slots)
    assert [setup.take(layer) for layer in asked] == [setup.expected(layer) for layer in asked]
    setup.ring.close()


def test_the_next_pass_is_read_while_nobody_asks(setup: Setup) -> None:
    for layer in range(5):
        setup.take(layer)
    for loan in setup.ring.ahead:
        loan.fill.settle()
    assert [loan.unit for loan in setup.ring.ahead] == [0, 1, 2]


def test_a_lent_slot_is_not_written_to() -> None:
    setup = Setup(num_layers=9, num_slots=2)
    with setup.ring.lend(0) as buffer:
        for ahead in setup.ring.ahead:
            ahead.fill.settle()
        assert setup.records[0].parts(buffer)["layer0"].numpy().tobytes() == setup.expected(0)
    setup.ring.close()


def test_an_error_in_a_read_thread_surfaces_and_the_ring_can_be_asked_again(setup: Setup) -> None:
    setup.take(0)
    setup.reader.fail_at = 100 + 5 * LAYER_BYTES - 1  # within no other layer's aligned read
    for layer in (1, 2, 3):
        setup.take(layer)
    with refused(CheckpointError, "told to fail"):
        setup.take(4)
    setup.reader.fail_at = None
    assert setup.take(4) == setup.expected(4)
    assert setup.take(0) == setup.expected(0)


def test_cancelling_skips_what_is_not_begun() -> None:
    gate = threading.Event()
    setup = Setup(num_layers=3, num_slots=3, gate=gate, nbytes=8 * READ_BYTES)
    closing = threading.Thread(target=setup.ring.close)
    closing.start()
    while not all(loan.fill.cancelled for loan in setup.ring.ahead):
        pass
    gate.set()
    closing.join(300)
    assert not closing.is_alive()
    assert len(setup.reader.reads) <= 4  # one in flight for each thread


@pytest.mark.parametrize("gone", [(1,), (0, 4), (2, 3), (0, 1, 2, 4)])
def test_units_that_are_no_longer_asked_for_are_not_read_and_can_come_back(gone: tuple[int, ...]) -> None:
    setup = Setup()
    kept = [layer for layer in range(5) if layer not in gone]
    for layer in range(5):
        assert setup.take(layer) == setup.expected(layer)
    setup.ring.set_order(kept)
    for layer in kept * 3:
        assert setup.take(layer) == setup.expected(layer)
    assert not {loan.unit for loan in setup.ring.ahead} & set(gone)
    setup.ring.set_order(range(5))
    for layer in [*range(5)] * 2:
        assert setup.take(layer) == setup.expected(layer)
    setup.ring.close()


def test_a_unit_that_leaves_while_it_is_lent_costs_nothing_that_was_read_ahead(setup: Setup) -> None:
    """One read for each unit of each pass, though the order changes in the middle of the first one."""
    for layer in range(5):
        with setup.ring.lend(layer):
            if layer == 1:
                setup.ring.set_order([0, 2, 3, 4])
    for layer in (0, 2, 3, 4):
        assert setup.take(layer) == setup.expected(layer)
    for loan in setup.ring.ahead:
        loan.fill.settle()
    asked = [*range(5), 0, 2, 3, 4, *(loan.unit for loan in setup.ring.ahead)]
    assert len(setup.reader.reads) == sum(len(setup.records[layer].reads) for layer in asked)


def test_what_a_slot_gave_away_is_not_written_to(setup: Setup) -> None:
    with setup.ring.lend(0) as buffer:
        assert setup.ring.lent is not None
        setup.ring.lent.give_away()
    for layer in (*range(1, 5), *range(5)):
        assert setup.take(layer) == setup.expected(layer)
    assert setup.records[0].parts(buffer)["layer0"].numpy().tobytes() == setup.expected(0)


def test_close_joins_the_threads(setup: Setup) -> None:
    """Its own: other tests' rings may not be closed yet."""
    assert "offspec-read-0" in {thread.name for thread in setup.threads}
    setup.ring.close()
    assert not setup.threads & set(threading.enumerate())


def test_a_filler_that_nobody_refers_to_ends_its_threads() -> None:
    """Its threads do not refer to it, so a target that was dropped without `close` does not keep its memory."""
    filler = DiskFiller({}, FakeReader({}), num_threads=2)
    threads = filler._threads
    assert all(thread.is_alive() for thread in threads)
    del filler
    gc.collect()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
