"""The link to a GPU brings every layer whole and in time, from pinned RAM and from disk; its limits are obeyed.

What needs no GPU to be seen is tested with a stand-in that writes down what CUDA was asked for, and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from offspec.loaders.accelerators.cuda import Cuda
from offspec.loaders.files.readers import HostBuffer
from offspec.loaders.files.records import Record
from offspec.loaders.streaming.link import DeviceFiller, DeviceSlot, pin_whole
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of
from offspec.loaders.streaming.stored_model import StoredModel
from offspec.loaders.streaming.stream import Ring
from offspec.loaders.streaming.tiers import TieredWeights, TierOptions

from ..accelerators.fake_cuda import FakeCuda
from ..fakes import LAYER_PREFIX, Tensors, open_with

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
MIB = 2**20
EMBEDDING = "model.embed.weight"


def tensors(num_layers: int = 9) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    made = {EMBEDDING: torch.randn(50, 512, generator=generator)}
    for index in range(num_layers):
        made[f"model.layers.{index}.mix.weight"] = torch.randn(512, 512, generator=generator)
        made[f"model.layers.{index}.norm"] = torch.randn(512, generator=generator)
    return made


def records(layers: Mapping[int, torch.Tensor | HostBuffer]) -> dict[int, Record]:
    """Of layers that have to be shifted by 8 bytes."""
    return {i: Record(layer.nbytes, (), {"weight": (8, layer.nbytes)}) for i, layer in layers.items()}


# ------------------------------------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize(("allowed", "registered"), [(3 * 4096, [3]), (2 * 4096, [1, 1]), (4096, [1]), (0, [])])
def test_what_the_system_does_not_pin_at_once_is_pinned_in_parts(
    monkeypatch: pytest.MonkeyPatch, allowed: int, registered: list[int]
) -> None:
    left = allowed

    def pin_some(cuda: Cuda, buffer: HostBuffer) -> bool:
        nonlocal left
        fits = buffer.nbytes <= left
        left -= buffer.nbytes * fits
        return fits

    monkeypatch.setattr(Cuda, "pin", pin_some)
    whole, parts = HostBuffer.side_by_side([4096, 4096, 100])
    assert [-(-buffer.nbytes // 4096) for buffer in pin_whole(whole, parts, Cuda(CUDA))] == registered


def test_copies_are_through_before_the_link_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued still writes into slots, and reads memory that is unpinned next."""
    fake, device = FakeCuda(monkeypatch), Cuda(CPU)
    layers = {i: torch.full((64,), i, dtype=torch.uint8) for i in range(4)}
    ring = Ring(range(4), DeviceSlot.several(3, 64, device), DeviceFiller(layers, None, records(layers), device))
    for layer in (0, 1, 2, 3, 0, 1):
        with ring.lend(layer) as buffer:
            assert torch.equal(buffer, layers[layer])
    assert not any("synchronize" in asked for asked in fake.asked if asked != "event synchronize")
    assert fake.asked.count("event synchronize") == 6  # for each layer's arrival, when its work is in the queue
    assert fake.asked.count("main waits") == 6
    assert fake.asked.count("copy waits") >= 6
    ring.close()
    assert fake.asked[-1] == "copy synchronize"


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize(
    ("resident", "in_ram"), [((), range(9)), ((), ()), ((4,), range(0, 9, 2)), ((0, 8), (1, 2, 3)), (range(9), ())]
)
def test_every_pass_computes_with_the_right_layers(
    tmp_path: Path,
    resident: range | tuple[int, ...],
    in_ram: range | tuple[int, ...],
    num_slots: int,
    synchronous: bool,
) -> None:
    made, device = tensors(), torch.device("cuda")
    model = StoredModel.of(open_with(tmp_path, made), layer_prefix=LAYER_PREFIX)
    in_ram = tuple(i for i in in_ram if i not in resident)
    on_disk = tuple(i for i in range(9) if i not in resident and i not in in_ram)
    slot_bytes = max(layer.record.nbytes for layer in model.layers)
    placement = Placement(
        places_of(resident=resident, in_ram=in_ram, on_disk=on_disk),
        Slots(num_slots, num_slots, slot_bytes),
        (),
        Limits(2**30, 2**30),
        0,
        0,
    )
    weights = TieredWeights(
        model,
        placement,
        dtype=torch.float32,
        device=device,
        row_tables=(EMBEDDING,),
        options=TierOptions(synchronous=synchronous),
    )
    x = torch.randn(64, 512, device=device)
    # Many passes without a synchronisation between: a slot that is overwritten too early shows in the sums.
    passes = []
    for _ in range(20):
        hidden = x
        for index in range(9):
            with weights.layer(index) as layer:
                for _ in range(4):
                    mixed = hidden @ layer["mix.weight"]  # type: ignore[operator]
                    hidden = torch.nn.functional.rms_norm(mixed, (512,), layer["norm"])  # type: ignore[arg-type]
        passes.append(hidden)
    expected = x
    for index in range(9):
        for _ in range(4):
            mixed = expected @ made[f"model.layers.{index}.mix.weight"].to(device)
            expected = torch.nn.functional.rms_norm(mixed, (512,), made[f"model.layers.{index}.norm"].to(device))
    for found in passes:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    rows = weights.rows(EMBEDDING, torch.tensor([3, 49, 3]))
    torch.testing.assert_close(rows.cpu(), made[EMBEDDING][[3, 49, 3]])
    weights.close()


@pytest.mark.gpu
def test_parts_of_what_was_pinned_are_pinned() -> None:
    whole, parts = HostBuffer.side_by_side([MIB + 5, 3 * MIB, 4096])
    pinned = pin_whole(whole, parts, Cuda(CUDA))
    assert pinned == [whole]
    for value, part in enumerate(parts, 1):
        part.tensor.fill_(value)
        assert part.tensor.is_pinned()
    there = [part.tensor.to(CUDA, non_blocking=True) for part in parts]
    torch.cuda.synchronize()
    assert [tensor.unique().tolist() for tensor in there] == [[1], [2], [3]]
    Cuda(CUDA).unpin(whole)
    assert not any(part.tensor.is_pinned() for part in parts)


@pytest.mark.gpu
def test_a_link_may_be_closed_while_it_copies() -> None:
    """What was lent to the ring goes back to torch: nothing may be written there any more by then."""
    layers = {i: HostBuffer(64 * MIB) for i in range(3)}
    for i, buffer in layers.items():
        buffer.tensor.fill_(i + 1)
        assert Cuda(CUDA).pin(buffer)
    for _ in range(5):
        filler = DeviceFiller({i: buffer.tensor for i, buffer in layers.items()}, None, records(layers), Cuda(CUDA))
        ring = Ring(range(3), DeviceSlot.several(3, 64 * MIB, Cuda(CUDA)), filler)
        with ring.lend(0):
            pass
        ring.close()
        del ring, filler
        after = [torch.zeros(64 * MIB, dtype=torch.uint8, device=CUDA) for _ in range(3)]
        assert not any(tensor.any() for tensor in after)
        del after
    for buffer in layers.values():
        Cuda(CUDA).unpin(buffer)
