"""Experts in slots, beside the plain twin that has all of them in memory."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch

from offspec.errors import CheckpointError
from offspec.loaders.files.readers import FileReader, Reader
from offspec.loaders.streaming.experts import CachedExperts, ExpertSource, ResidentExperts
from offspec.loaders.streaming.stored_model import StoredModel
from offspec.loaders.streaming.stream import NUM_READERS

from ..fakes import LAYER_PREFIX, FakeReader, open_with

LAYERS, EXPERTS = 3, 8
Tensors = dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    tensors = {
        f"{LAYER_PREFIX}{layer}.mlp.experts.{number}.up_proj.weight": torch.full((6000,), 100.0 * layer + number)
        for layer in range(LAYERS)
        for number in range(EXPERTS)
    }
    tensors |= {f"{LAYER_PREFIX}{layer}.norm": torch.ones(2) for layer in range(LAYERS)}
    checkpoint = open_with(tmp_path_factory.mktemp("experts"), tensors | {"table": torch.ones(2)})
    return StoredModel.of(checkpoint, layer_prefix=LAYER_PREFIX, by_expert=True)


def path_of(model: StoredModel) -> Path:
    return model.experts[0][0].record.extents[0].path


def fake_reader(model: StoredModel, gate: threading.Event | None = None) -> FakeReader:
    return FakeReader({path_of(model): path_of(model).read_bytes()}, gate)


def cached(model: StoredModel, num_slots: int, reader: Reader) -> CachedExperts:
    nbytes = max(unit.record.nbytes for units in model.experts.values() for unit in units)
    return CachedExperts(model.experts, num_slots, nbytes, torch.float32, reader)


def ones(*numbers: int) -> Mapping[int, int]:
    return dict.fromkeys(numbers, 1)


def take(source: ExpertSource, layer: int, rows: Mapping[int, int]) -> dict[int, float]:
    """The first number of each expert, copied while it is lent; each is lent once, and is the same everywhere."""
    taken = dict[int, float]()
    for group in source.lend(layer, rows):
        assert not taken.keys() & group.keys()
        for number, weights in group.items():
            values = weights["up_proj.weight"]
            assert isinstance(values, torch.Tensor)
            assert values.min() == values.max()
            taken[number] = values[0].item()
    return taken


def test_experts_need_a_slot(model: StoredModel) -> None:
    with pytest.raises(ValueError, match="a slot in memory"):
        cached(model, 0, fake_reader(model))


class SlowReader:
    """A `FileReader` whose reads take their time, each another one."""

    def __init__(self) -> None:
        self._reader, self._luck, self.bytes_read, self._lock = FileReader(), random.Random(0), 0, threading.Lock()

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        out[:] = bytes(len(out))  # whoever uses the slot now sees it
        time.sleep(self._luck.random() * 2e-3)
        self._reader.read(path, offset, out, least)
        with self._lock:
            self.bytes_read += least

    def close(self) -> None:
        self._reader.close()


@pytest.mark.parametrize("num_slots", [1, 2, 5, 12, 24])
def test_slots_lend_what_all_in_memory_would(model: StoredModel, num_slots: int) -> None:
    """Also if wrong experts are announced, passes are aborted, and slots come and go."""
    twin = ResidentExperts(
        {
            layer: [{"up_proj.weight": torch.full((6000,), 100.0 * layer + n)} for n in range(EXPERTS)]
            for layer in range(LAYERS)
        },
        torch.float32,
        torch.device("cpu"),
    )
    luck, reader = random.Random(num_slots), SlowReader()
    with closing(cached(model, num_slots, reader)) as source:
        for _ in range(12):
            source.spare(luck.choice([0, 0, 100_000]))
            for layer in range(luck.choice([1, LAYERS, LAYERS])):
                rows = {n: luck.randint(1, 9) for n in luck.sample(range(EXPERTS), luck.randint(1, EXPERTS))}
                if layer + 1 < LAYERS:
                    source.expect(layer + 1, ones(*luck.sample(range(EXPERTS), 3)))
                if luck.random() < 0.1:
                    next(source.lend(layer, rows))
                    break
                assert take(source, layer, rows) == take(twin, layer, rows)
    assert source.bytes_streamed == reader.bytes_read


def test_bytes_are_those_of_experts_that_were_not_there(model: StoredModel) -> None:
    reader = fake_reader(model)
    with closing(cached(model, 6, reader)) as source:
        take(source, 0, ones(1, 2))
        take(source, 1, ones(3))
        read = [model.experts[0][1], model.experts[0][2], model.experts[1][3]]
        take(source, 0, ones(2, 1))
        assert source.bytes_streamed == reader.bytes_read == sum(unit.record.read_bytes for unit in read)


def wait_until(is_so: object) -> None:
    for _ in range(2000):
        if is_so():  # type: ignore[operator]
            return
        time.sleep(0.001)
    raise AssertionError("it did not happen")


class CountingGate(threading.Event):
    """Holds reads, and counts those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting = 0
        self._count = threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        with self._count:
            self.num_waiting += 1
        return super().wait(timeout)


def test_all_that_a_request_lacks_is_read_at_once(model: StoredModel) -> None:
    gate = CountingGate()
    reader = fake_reader(model, gate)
    with closing(cached(model, EXPERTS, reader)) as source:
        groups = source.lend(0, ones(*range(EXPERTS)))
        wait_until(lambda: gate.num_waiting == NUM_READERS)
        gate.set()
        assert sum(len(group) for group in groups) == EXPERTS


def test_what_is_here_comes_before_what_is_read(model: StoredModel) -> None:
    gate = CountingGate()
    gate.set()
    with closing(cached(model, 4, fake_reader(model, gate))) as source:
        take(source, 0, ones(5))
        gate.clear()
        groups = source.lend(0, ones(1, 5))
        assert next(groups).keys() == {5}
        gate.set()
        assert [*map(list, groups)] == [[1]]


def test_a_failed_read_is_an_error_and_is_tried_again(model: StoredModel) -> None:
    reader = fake_reader(model)
    with closing(cached(model, 3, reader)) as source:
        reader.fail_at = model.experts[0][2].record.extents[0].offset + 5000
        with pytest.raises(CheckpointError, match="told to fail"):
            take(source, 0, ones(1, 2, 3))
        reader.fail_at = None
        assert take(source, 0, ones(1, 2, 3)) == {1: 1.0, 2: 2.0, 3: 3.0}
        assert source.bytes_streamed == reader.bytes_read


def test_experts_that_are_announced_are_read_ahead_and_used(model: StoredModel) -> None:
    reader = fake_reader(model)
    with closing(cached(model, 6, reader)) as source:
        source.expect(1, ones(4, 5))
        take(source, 0, ones(0))
        wait_until(lambda: len(reader.reads) == 3)
        assert take(source, 1, ones(4, 5)) == {4: 104.0, 5: 105.0}
        assert len(reader.reads) == 3


class OrderedReader(FakeReader):
    """Notes the offsets of reads in the order in which they begin."""

    begun: list[int]

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        with self._lock:
            self.begun.append(offset)
        super().read(path, offset, out, least)


def test_reads_on_demand_go_before_reads_ahead(model: StoredModel) -> None:
    gate = CountingGate()
    reader = OrderedReader({path_of(model): path_of(model).read_bytes()}, gate)
    reader.begun = []
    with closing(cached(model, 16, reader)) as source:
        source.expect(1, ones(0, 1, 2, 3))
        first = source.lend(0, ones(0, 1, 2, 3, 4, 5))
        wait_until(lambda: gate.num_waiting == NUM_READERS)
        gate.set()
        assert sum(len(group) for group in first) == 6
        wait_until(lambda: len(reader.reads) == 10)
        ahead = {model.experts[1][n].record.extents[0].offset for n in range(4)}
        assert not ahead & set(reader.begun[:6])


def test_what_was_announced_and_not_chosen_is_not_read(model: StoredModel) -> None:
    gate = CountingGate()
    reader = fake_reader(model, gate)
    with closing(cached(model, 16, reader)) as source:
        source.expect(1, ones(*range(7)))
        groups = source.lend(0, ones(0))
        wait_until(lambda: gate.num_waiting == NUM_READERS)  # expert 0, and three of those ahead
        second = source.lend(1, ones(6, 7))
        gate.set()
        assert sum(len(group) for group in second) == 2
        assert next(groups).keys() == {0}
        assert len(reader.reads) <= NUM_READERS + 2


def test_wrong_predictions_end_reads_ahead(model: StoredModel) -> None:
    reader = fake_reader(model)
    with closing(cached(model, 4, reader)) as source:
        for step in range(80):
            source.expect(1, ones(step % 4))
            take(source, 0, ones(0))
            take(source, 1, ones(4 + step % 4))
        before = len(reader.reads)
        source.expect(1, ones(0, 1))
        take(source, 0, ones(0))
        time.sleep(0.01)
        assert len(reader.reads) <= before + 1


def test_a_changed_file_is_found_at_the_end_of_a_pass(model: StoredModel, tmp_path: Path) -> None:
    path = path_of(model)
    shutil.copy2(path, kept := tmp_path / "kept")
    with closing(cached(model, 4, FileReader())) as source:
        take(source, 0, ones(0))
        os.replace(kept, path)  # another file, whatever it has
        take(source, 1, ones(0))
        with pytest.raises(CheckpointError, match="was changed while in use"):
            take(source, LAYERS - 1, ones(0))


def test_closing_in_the_middle_reads_no_more(model: StoredModel) -> None:
    gate = CountingGate()
    reader = fake_reader(model, gate)
    source = cached(model, EXPERTS, reader)
    source.lend(0, ones(*range(EXPERTS)))
    wait_until(lambda: gate.num_waiting == NUM_READERS)
    threading.Timer(0.01, gate.set).start()
    source.close()
    assert len(reader.reads) <= NUM_READERS


def test_spare_memory_holds_more_and_is_given_back(model: StoredModel) -> None:
    reader = fake_reader(model)
    nbytes = model.experts[0][0].record.nbytes
    with closing(cached(model, 2, reader)) as source:
        for _ in range(3):
            source.spare(4 * nbytes + 4096)
            take(source, 0, ones(0, 1, 2, 3, 4, 5))
        assert len(reader.reads) == 6
        source.spare(0)
        for _ in range(2):
            assert len(take(source, 0, ones(0, 1, 2, 3, 4, 5))) == 6
        assert len(reader.reads) >= 6 + 4 + 4
        source.spare(10**9)
        assert len(take(source, 1, ones(*range(8)))) == 8


def hits_of_decoding(source: CachedExperts, reader: FakeReader) -> Iterator[int]:
    """Reads of a pass of one row that uses the same expert of each layer; passes of many rows over all come between."""
    for _ in range(4):
        for _ in range(6):
            before = len(reader.reads)
            for layer in range(LAYERS):
                take(source, layer, ones(7))
            yield len(reader.reads) - before
        for layer in range(LAYERS):
            take(source, layer, dict.fromkeys(range(EXPERTS), 20))


def test_a_long_prompt_does_not_drop_what_decoding_uses(model: StoredModel) -> None:
    reader = fake_reader(model)
    with closing(cached(model, LAYERS + NUM_READERS + 1, reader)) as source:
        num_reads = [*hits_of_decoding(source, reader)]
    assert sum(num_reads) == LAYERS


def test_chunks_of_rows_find_the_layer_still_there(model: StoredModel) -> None:
    """A layer that is requested several times is read once, from the second layer on."""
    reader = fake_reader(model)
    with closing(cached(model, EXPERTS, reader)) as source:
        for layer in range(LAYERS):
            for _ in range(3):
                take(source, layer, {n: 1 + 5 * (n == layer) for n in range(EXPERTS)})
    assert len(reader.reads) <= LAYERS * EXPERTS
