"""The link to a GPU brings every layer whole and in time, from pinned RAM and from disk; its limits are obeyed.

What needs no GPU to be seen is tested with a stand-in that writes down what CUDA was asked for, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec.loaders.files.readers import HostBuffer
from offspec.loaders.files.records import Record
from offspec.loaders.streaming import link
from offspec.loaders.streaming.link import (
    DeviceFiller,
    DeviceSlot,
    device_bytes,
    limit_memory,
    pin,
    release_memory,
    span,
    unpin,
)
from offspec.loaders.streaming.placement import Limits, Placement, Slots
from offspec.loaders.streaming.stream import Ring
from offspec.loaders.streaming.tiers import StoredModel, TieredWeights, TierOptions

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


class FakeCuda:
    """What is asked of CUDA, in order. refuses: whether memory cannot be registered, which leaves an error behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.asked: list[str] = []
        self.has_error, self._refuses = False, refuses
        main = self.stream("main")
        changes = {
            "Stream": lambda device: self.stream("copy"),
            "Event": lambda **_: self.event(),
            "current_stream": lambda device: main,
            "stream": self.nothing,
            "device": self.nothing,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister),
        }
        for name, change in changes.items():
            monkeypatch.setattr(torch.cuda, name, change)

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            synchronize=lambda: self.asked.append(f"{name} synchronize"),
            wait_event=lambda event: self.asked.append(f"{name} waits"),
        )

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: self.asked.append("event synchronize"))

    @contextmanager
    def nothing(self, _: object) -> Iterator[None]:
        yield

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.asked.append(f"register {nbytes} {flags}")
        self.has_error = self._refuses
        return int(self._refuses)

    def unregister(self, address: int) -> None:
        self.asked.append("unregister")

    def launch(self, *_: object, **__: object) -> None:
        """A kernel, after which torch asks for the thread's last error, and so takes it away."""
        failed, self.has_error = self.has_error, False
        if failed:
            raise RuntimeError("CUDA error: out of memory")


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, refuses=True)
    monkeypatch.setattr(torch, "ones", fake.launch)
    assert not pin(HostBuffer(4096), CUDA)
    assert not fake.has_error
    fake.launch()  # the next kernel is not blamed


def test_pinned_memory_is_every_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    assert pin(HostBuffer(4096), CUDA)
    assert pin(HostBuffer(0), CUDA)  # nothing to pin is no fault
    assert fake.asked == ["register 4096 1"]


@pytest.mark.parametrize(("allowed", "registered"), [(3 * 4096, [3]), (2 * 4096, [1, 1]), (4096, [1]), (0, [])])
def test_what_the_system_does_not_pin_at_once_is_pinned_in_parts(
    monkeypatch: pytest.MonkeyPatch, allowed: int, registered: list[int]
) -> None:
    left = allowed

    def pin_some(buffer: HostBuffer, device: torch.device) -> bool:
        nonlocal left
        fits = buffer.nbytes <= left
        left -= buffer.nbytes * fits
        return fits

    monkeypatch.setattr(link, "pin", pin_some)
    whole, parts = HostBuffer.side_by_side([4096, 4096, 100])
    assert [-(-buffer.nbytes // 4096) for buffer in link.pin_whole(whole, parts, CUDA)] == registered


def test_copies_are_through_before_the_link_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued still writes into slots, and reads memory that is unpinned next."""
    fake = FakeCuda(monkeypatch)
    layers = {i: torch.full((64,), i, dtype=torch.uint8) for i in range(4)}
    ring = Ring(range(4), [DeviceSlot(64, CPU) for _ in range(3)], DeviceFiller(layers, None, records(layers), CPU))
    for layer in (0, 1, 2, 3, 0, 1):
        with ring.lend(layer) as buffer:
            assert torch.equal(buffer, layers[layer])
    assert not any("synchronize" in asked for asked in fake.asked if asked != "event synchronize")
    assert fake.asked.count("event synchronize") == 6  # for each layer's arrival, when its work is in the queue
    assert fake.asked.count("main waits") == 6
    assert fake.asked.count("copy waits") >= 6
    ring.close()
    assert fake.asked[-1] == "copy synchronize"


@pytest.mark.parametrize(("nbytes", "fraction"), [(None, 1.0), (6 * MIB, 0.5), (1000 * MIB, 1.0)])
def test_the_limit_is_a_fraction_beyond_what_is_held(
    monkeypatch: pytest.MonkeyPatch, nbytes: int | None, fraction: float
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * MIB, 16 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: asked.append(given))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    limit_memory(nbytes, CUDA)
    assert asked == [(fraction, CUDA), CUDA]


def test_spans_are_for_devices_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        ranges.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", marked)
    for is_initialized in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_initialized=is_initialized: is_initialized)
        with link.span(f"in use: {is_initialized}"):
            pass
    assert ranges == ["in use: True"]


def test_a_cpu_has_no_device_memory() -> None:
    release_memory(CPU)
    assert device_bytes(CPU) == (0, 0)


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
        tuple(resident), in_ram, on_disk, Slots(num_slots, num_slots, slot_bytes), (), Limits(2**30, 2**30), 0, 0
    )
    weights = TieredWeights(
        model,
        placement,
        dtype=torch.float32,
        device=device,
        embedding=EMBEDDING,
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
def test_memory_is_pinned_where_it_lies() -> None:
    buffer = HostBuffer(3 * MIB + 5)
    assert pin(buffer, CUDA)
    assert buffer.tensor.is_pinned()
    assert not pin(buffer, CUDA)  # twice is refused
    assert torch.ones(3, device=CUDA).sum().item() == 3  # and the next kernel is not blamed for it
    unpin(buffer, CUDA)
    assert not buffer.tensor.is_pinned()


@pytest.mark.gpu
def test_parts_of_what_was_pinned_are_pinned() -> None:
    whole, parts = HostBuffer.side_by_side([MIB + 5, 3 * MIB, 4096])
    pinned = link.pin_whole(whole, parts, CUDA)
    assert pinned == [whole]
    for value, part in enumerate(parts, 1):
        part.tensor.fill_(value)
        assert part.tensor.is_pinned()
    there = [part.tensor.to(CUDA, non_blocking=True) for part in parts]
    torch.cuda.synchronize()
    assert [tensor.unique().tolist() for tensor in there] == [[1], [2], [3]]
    unpin(whole, CUDA)
    assert not any(part.tensor.is_pinned() for part in parts)


@pytest.mark.gpu
def test_a_link_may_be_closed_while_it_copies() -> None:
    """What was lent to the ring goes back to torch: nothing may be written there any more by then."""
    layers = {i: HostBuffer(64 * MIB) for i in range(3)}
    for i, buffer in layers.items():
        buffer.tensor.fill_(i + 1)
        assert pin(buffer, CUDA)
    for _ in range(5):
        filler = DeviceFiller({i: buffer.tensor for i, buffer in layers.items()}, None, records(layers), CUDA)
        ring = Ring(range(3), [DeviceSlot(64 * MIB, CUDA) for _ in range(3)], filler)
        with ring.lend(0):
            pass
        ring.close()
        del ring, filler
        after = [torch.zeros(64 * MIB, dtype=torch.uint8, device=CUDA) for _ in range(3)]
        assert not any(tensor.any() for tensor in after)
        del after
    for buffer in layers.values():
        unpin(buffer, CUDA)


@pytest.mark.gpu
def test_what_is_allowed_is_all_there_is() -> None:
    release_memory(CUDA)
    limit_memory(256 * MIB, CUDA)
    try:
        held, _ = device_bytes(CUDA)
        within = torch.empty(200 * MIB, dtype=torch.uint8, device=CUDA)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA)
        assert within.nbytes <= device_bytes(CUDA)[1] - held <= 256 * MIB
    finally:
        limit_memory(None, CUDA)
    assert torch.empty(300 * MIB, dtype=torch.uint8, device=CUDA).is_cuda


@pytest.mark.gpu
def test_spans_may_be_nested() -> None:
    torch.ones(1, device=CUDA)
    with span("pass"), span("layer"):
        assert torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@pytest.mark.gpu
def test_memory_is_given_back() -> None:
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
    held, _ = device_bytes(CUDA)
    del kept
    release_memory(CUDA)
    assert device_bytes(CUDA)[0] <= held - 64 * MIB
