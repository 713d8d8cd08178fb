"""Weights are the checkpoint's, converted, by layer and short name, wherever a placement puts them."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offspec.errors import CheckpointError
from offspec.loaders.accelerators.cuda import Cuda
from offspec.loaders.files.checkpoint import Checkpoint
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.readers import HostBuffer
from offspec.loaders.files.records import Record
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of, scattered
from offspec.loaders.streaming.stored_model import StoredModel
from offspec.loaders.streaming.stream import Fill, HostSlot, Ring
from offspec.loaders.streaming.tiers import LEAST_STREAMED, TieredWeights, TierOptions
from offspec.loaders.streaming.weights import WeightSource

from ...refusals import refused
from ..fakes import LAYER_PREFIX, FakeReader, Tensors, open_with, toy_tensors

CPU = torch.device("cpu")
EMBEDDING = "model.embed.weight"
ALL, NONE, SOME = (0, 1, 2), (), (1,)


def placed(model: StoredModel, resident: tuple[int, ...], num_slots: int = 3) -> Placement:
    slot_bytes = max(layer.record.nbytes for layer in model.layers)
    on_disk = tuple(i for i in range(len(model.layers)) if i not in resident)
    return Placement(
        places_of(resident=resident, on_disk=on_disk), Slots(num_slots, 0, slot_bytes), (), Limits(None, 0), 0, 0
    )


def tiered(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, resident: tuple[int, ...] = ALL, **options: Any
) -> TieredWeights:
    model = StoredModel.of(checkpoint, ignore=options.pop("ignore", ()), layer_prefix=LAYER_PREFIX)
    return TieredWeights(model, placed(model, resident), dtype=dtype, device=CPU, **options)


def by_full_name(weights: WeightSource, names: Tensors, dtype: torch.dtype = torch.float32) -> Tensors:
    """What the source holds, put back under the names of the checkpoint."""
    found = {name: weights.shared(name) for name in names if not name.startswith("model.layers.")}
    for index in range(weights.num_layers):
        with weights.layer(index) as layer:
            found |= {f"model.layers.{index}.{short}": tensor.to(dtype, copy=True) for short, tensor in layer.items()}
    return found


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("resident", [ALL, NONE, SOME])
def test_every_pass_sees_what_was_saved(tmp_path: Path, resident: tuple[int, ...], synchronous: bool) -> None:
    tensors, before = toy_tensors(), set(threading.enumerate())
    weights = tiered(open_with(tmp_path, tensors), resident=resident, options=TierOptions(synchronous=synchronous))
    readers = set(threading.enumerate()) - before
    assert bool(readers) == (resident != ALL and not synchronous)
    assert weights.num_layers == 3
    for _ in range(4):
        torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)
    weights.close()
    assert not any(thread.is_alive() for thread in readers)


@pytest.mark.each_value(together=2)
@pytest.mark.parametrize("resident", [ALL, NONE])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_floating_dtypes_are_converted(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, resident: tuple[int, ...]
) -> None:
    """What stays is converted once; of what is streamed vectors at once, matrices in the place where they are used."""
    tensors = {name: tensor.to(stored) for name, tensor in toy_tensors().items()}
    weights = tiered(open_with(tmp_path, tensors), wanted, resident)
    expected = {name: tensor.to(wanted) for name, tensor in tensors.items()}
    with weights.layer(0) as layer:
        assert layer["norm"].dtype == wanted
        assert layer["mix.weight"].dtype == (wanted if resident else stored)
    torch.testing.assert_close(by_full_name(weights, tensors, wanted), expected, rtol=0, atol=0)
    assert (weights.scratch is None) == (resident == ALL or stored == wanted)
    weights.close()


def test_ignored_tensors_are_not_read(tmp_path: Path) -> None:
    tensors = toy_tensors() | {"tied.head": torch.zeros(1000, dtype=torch.int8)}
    weights = tiered(open_with(tmp_path, tensors), ignore={"tied.head", "not.there"})
    with refused(CheckpointError, "'tied.head'", "missing"):
        weights.shared("tied.head")


@pytest.mark.parametrize("resident", [ALL, SOME])
@pytest.mark.parametrize("row_tables", [(), (EMBEDDING,)])
def test_progress_ends_at_the_total(tmp_path: Path, row_tables: tuple[str, ...], resident: tuple[int, ...]) -> None:
    """Also where two tensors that are loaded lie around a third that is not, and where a table stays on disk."""
    seen: list[tuple[int, int]] = []
    tensors = toy_tensors() | {name: torch.ones(3000) for name in ("model.a", "model.b", "model.c")}
    weights = tiered(
        open_with(tmp_path, tensors),
        resident=resident,
        ignore={"model.b"},
        row_tables=row_tables,
        progress=lambda done, total: seen.append((done, total)),
    )
    weights.close()
    done = [entry[0] for entry in seen]
    assert done == sorted(done)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("fails", ["reading", "pinning"])
def test_what_was_opened_is_closed_where_the_rest_fails(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link to a GPU without a GPU: the ring over the disk is open by the time that memory cannot be pinned."""
    model = StoredModel.of(open_with(tmp_path, toy_tensors()), layer_prefix=LAYER_PREFIX)
    path, opened = tmp_path / "model.safetensors", list[threading.Thread]()
    reader, before = FakeReader({path: path.read_bytes()}), set(threading.enumerate())
    if fails == "reading":
        reader.fail_at = model.layers[1].weights["norm"].streamed[0].offset

    def refuse(cuda: Cuda, buffer: HostBuffer) -> bool:
        opened.extend(set(threading.enumerate()) - before)
        raise CheckpointError("told to fail")

    monkeypatch.setattr(
        "offspec.loaders.streaming.tiers.DeviceSlot.several",
        lambda num, nbytes, device: [HostSlot(HostBuffer(nbytes)) for _ in range(num)],
    )
    monkeypatch.setattr(Cuda, "pin", refuse)
    placement = placed(model, NONE)
    placement = replace(
        placement, places=places_of(in_ram=(1,), on_disk=(0, 2)), slots=replace(placement.slots, num_host=2)
    )
    cuda = torch.device("cuda")
    with refused(CheckpointError, "told to fail"):
        TieredWeights(
            model,
            placement,
            dtype=torch.float32,
            device=cuda,
            row_tables=(EMBEDDING,),
            options=TierOptions(reader=reader),
        )
    assert bool(opened) == (fails == "pinning")
    assert reader.closed
    assert not any(thread.is_alive() for thread in opened)


def test_what_waits_for_a_gpu_is_pinned_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in RAM and slots for those on disk, in memory that is neither doubled nor rounded up layer by layer."""
    tensors, pinned, filled = toy_tensors(), list[tuple[int, int]](), dict[int, torch.Tensor]()
    model = StoredModel.of(open_with(tmp_path, tensors), layer_prefix=LAYER_PREFIX)

    def pin(cuda: Cuda, buffer: HostBuffer) -> bool:
        pinned.append((buffer.address, buffer.nbytes))
        return True

    class Filler:
        def __init__(
            self, in_ram: dict[int, torch.Tensor], disk: Ring[HostSlot], records: object, device: object
        ) -> None:
            filled.update(in_ram)
            self.disk = disk

        def fill(self, slot: HostSlot, layer: int) -> Fill:
            return Fill(0)

        def close(self) -> None:
            self.disk.close()

    monkeypatch.setattr(
        "offspec.loaders.streaming.tiers.DeviceSlot.several",
        lambda num, nbytes, device: [HostSlot(HostBuffer(nbytes)) for _ in range(num)],
    )
    monkeypatch.setattr("offspec.loaders.streaming.tiers.DeviceFiller", Filler)
    monkeypatch.setattr(Cuda, "pin", pin)
    monkeypatch.setattr(Cuda, "unpin", lambda cuda, buffer: pinned.remove((buffer.address, buffer.nbytes)))
    monkeypatch.setattr(Record, "on", lambda record, device, raw: raw)  # there is no device to move residents to
    placement = placed(model, NONE)
    placement = replace(
        placement, places=places_of(in_ram=(1,), on_disk=(0, 2)), slots=replace(placement.slots, num_host=2)
    )
    cuda = torch.device("cuda")
    weights = TieredWeights(model, placement, dtype=torch.float32, device=cuda, row_tables=(EMBEDDING,))
    ((begin, size),) = pinned
    record = model.layers[1].record
    assert size == record.nbytes + 2 * placement.slots.nbytes
    assert begin <= filled[1].data_ptr() < begin + size
    for name, found in record.parts(filled[1]).items():
        assert torch.equal(found.view(tensors[name].dtype).view(tensors[name].shape), tensors[name])
    weights.close()
    assert not pinned


def test_residents_do_not_change_with_the_file(tmp_path: Path) -> None:
    tensors = toy_tensors()
    weights = tiered(open_with(tmp_path, tensors))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)


@pytest.mark.parametrize("resident", [ALL, NONE])
def test_a_layer_scattered_over_shards(tmp_path: Path, resident: tuple[int, ...]) -> None:
    tensors = toy_tensors()
    (tmp_path / "config.json").write_text("{}")
    index = {name: f"part{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == shard}, tmp_path / shard)
    quoted = ", ".join(f'"{name}": "{shard}"' for name, shard in index.items())
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{quoted}}}}}')
    weights = tiered(open_checkpoint(tmp_path), resident=resident)
    torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)
    weights.close()


@pytest.mark.parametrize("resident", [ALL, NONE])
def test_rows_of_the_embedding(tmp_path: Path, resident: tuple[int, ...]) -> None:
    """Where layers come from disk, so do the embedding's rows, and the table is in no memory."""
    tensors = toy_tensors() | {EMBEDDING: torch.randn(2000, 300).to(torch.bfloat16)}
    weights = tiered(open_with(tmp_path, tensors), resident=resident, row_tables=(EMBEDDING,))
    indices = torch.tensor([5, 1999, 0, 5])
    torch.testing.assert_close(weights.rows(EMBEDDING, indices), tensors[EMBEDDING][indices].float(), rtol=0, atol=0)
    if resident == NONE:
        with refused(CheckpointError, repr(EMBEDDING), "missing"):
            weights.shared(EMBEDDING)
    weights.close()


def test_layers_stay_where_memory_is_spared_and_leave_when_it_is_wanted_back(tmp_path: Path) -> None:
    tensors = toy_tensors(9)
    weights = tiered(open_with(tmp_path, tensors), resident=SOME)
    records = records_of(tmp_path)
    slot = max(record.nbytes for record in records)
    on_disk = [i for i in range(9) if i not in SOME]

    def streamed() -> int:
        before = weights.bytes_streamed
        torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)
        return weights.bytes_streamed - before

    for num_spared, num_kept in ((0, 0), (2, 2), (100, 8 - LEAST_STREAMED), (1, 1), (-2, 0), (3, 3)):
        weights.spare(num_spared * slot + slot - 1)
        kept = [on_disk[i] for i in scattered(7)[:num_kept]]
        expected = sum(records[i].read_bytes for i in on_disk if i not in kept)
        assert streamed() >= expected  # what is to stay comes once more
        assert [streamed() for _ in range(3)] == [expected] * 3
    weights.close()


@pytest.mark.parametrize("synchronous", [False, True])
def test_nothing_to_spare_for_is_no_error(tmp_path: Path, synchronous: bool) -> None:
    """All layers stay, or so few come from disk that all of them go on coming, or there is no ring."""
    tensors = toy_tensors()
    for resident in (ALL, NONE):
        weights = tiered(open_with(tmp_path, tensors), resident=resident, options=TierOptions(synchronous=synchronous))
        weights.spare(2**30)
        for _ in range(2):
            torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)
        assert weights.bytes_streamed == (0 if resident == ALL else 2 * sum(r.read_bytes for r in records_of(tmp_path)))
        weights.close()


def records_of(folder: Path) -> list[Record]:
    return [layer.record for layer in StoredModel.of(open_checkpoint(folder), layer_prefix=LAYER_PREFIX).layers]


def test_a_pass_that_was_left_is_begun_anew(tmp_path: Path) -> None:
    tensors = toy_tensors()
    weights = tiered(open_with(tmp_path, tensors), resident=NONE)
    with pytest.raises(KeyboardInterrupt), weights.layer(0):
        raise KeyboardInterrupt
    torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)
    weights.close()


def test_a_file_that_changed_after_it_was_opened(tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, toy_tensors())
    path = tmp_path / "model.safetensors"
    os.truncate(path, 100)
    with refused(CheckpointError, path, "byte 100"):
        tiered(checkpoint)
    path.unlink()
    with refused(CheckpointError, path, "byte 0", "No such file"):
        tiered(checkpoint)


def test_a_file_cut_off_while_running_is_an_error_and_no_hang(tmp_path: Path) -> None:
    weights = tiered(open_with(tmp_path, toy_tensors()), resident=NONE)
    os.truncate(tmp_path / "model.safetensors", 500)
    # What was read before the file changed may still be served, so one pass may succeed; three cannot.
    with refused(CheckpointError, tmp_path / "model.safetensors"):
        [by_full_name(weights, toy_tensors()) for _ in range(3)]
    weights.close()


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("how", ["rewritten", "replaced"])
def test_a_file_that_another_model_took_the_place_of_is_said(tmp_path: Path, synchronous: bool, how: str) -> None:
    """In the very pass that would be of two models, before anything of it is used."""
    tensors, path = toy_tensors(), tmp_path / "model.safetensors"
    checkpoint = open_with(tmp_path, tensors)
    os.utime(path, (0, 0))  # a clock that is coarser than this test is fast would tell no difference
    weights = tiered(checkpoint, resident=SOME, options=TierOptions(synchronous=synchronous))
    by_full_name(weights, tensors)
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    if how == "rewritten":
        (elsewhere := tmp_path / "elsewhere").mkdir()
        open_with(elsewhere, other)
        with path.open("r+b") as file:
            file.write((elsewhere / path.name).read_bytes())
    else:
        path.unlink()
        save_file(other, path)
    for _ in range(2):
        with refused(CheckpointError, path, "changed"):
            by_full_name(weights, tensors)
    weights.close()


def test_costs_tell_what_memory_will_be_taken(tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in toy_tensors().items()}
    layer = StoredModel.of(open_with(tmp_path, tensors), layer_prefix=LAYER_PREFIX).layers[0]
    same, wider = layer.cost(torch.bfloat16), layer.cost(torch.float32)
    assert same.resident_bytes == same.slot_bytes == layer.record.nbytes
    assert wider.resident_bytes == 4 * (16 + 4)
    assert same.read_bytes <= same.slot_bytes
