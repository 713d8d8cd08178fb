"""What the pretended CUDA device finds where the engine, or work that is recorded as a graph, is made to do wrong."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec.errors import OffspecError
from offspec.loaders.accelerators.accelerator import Accelerator, accelerator_of
from offspec.loaders.accelerators.cpu import InOrder
from offspec.loaders.files.readers import HostBuffer
from offspec.loaders.streaming import small_transfers
from offspec.loaders.streaming.link import CopyStream, DeviceFiller, DeviceSlot
from offspec.planning.plan import Plan

from ..pretend_cuda import in_own_process, pretended_cuda
from ..pretend_streams import Event, Machine, Stream
from .test_pretended_cuda import (
    Move,
    build,
    half_in_ram,
    in_ram,
    load,
    on_disk,
    races_in,
    says,
    slow_passes,
    streamed,
)

pytestmark = pytest.mark.nightly("tests the pretended device, on which the default run relies")
Patch = pytest.MonkeyPatch
CUDA = torch.device("cuda:0")


def with_all_entries_in_ram(plan: Plan) -> Plan:
    """More layers than there are slots for their entries."""
    layers = tuple(range(len(plan.layers)))
    return streamed(plan, in_ram=layers, entries_in_ram=layers)


def nothing(*args: Any, **options: Any) -> None: ...


class Deaf(Stream):
    """A stream that waits for no other one."""

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...


def nothing_waits_for_a_layer(patch: Patch) -> None:
    patch.setattr(DeviceSlot, "enter", nothing)


def a_layer_is_copied_before_its_slot_is_free(patch: Patch) -> None:
    make = DeviceFiller.__init__

    def deaf(self: DeviceFiller, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(torch.cuda, "Stream", lambda device: Deaf(machine=torch.cuda.current_stream().machine))
            make(self, *args)

    patch.setattr(DeviceFiller, "__init__", deaf)


def a_slot_is_free_at_once(patch: Patch) -> None:
    enter = DeviceSlot.enter

    def leave_at_once(self: DeviceSlot) -> None:
        enter(self)
        self.free.record(torch.cuda.current_stream())

    patch.setattr(DeviceSlot, "enter", leave_at_once)
    patch.setattr(DeviceSlot, "leave", lambda self: self.ready.synchronize())


def nothing_waits_for_kv_entries(patch: Patch) -> None:
    patch.setattr(CopyStream, "wait", nothing)


def kv_entries_are_copied_at_once(patch: Patch) -> None:
    make = CopyStream.__init__

    def deaf(self: CopyStream, device: torch.device) -> None:
        make(self, device)
        if device.type == "cuda":
            self._stream = Deaf(machine=torch.cuda.current_stream().machine)

    patch.setattr(CopyStream, "__init__", deaf)


def a_small_transfer_is_overwritten(patch: Patch) -> None:
    class Impatient(small_transfers.SlotTransfers):
        NUM_SLOTS = 1

        def __init__(self, accelerator: Accelerator) -> None:
            super().__init__(accelerator)
            self._read = [InOrder()]

    patch.setattr(small_transfers, "SlotTransfers", Impatient)
    patch.setattr(small_transfers, "_transfers", {})


def a_host_slot_is_read_into_at_once(patch: Patch) -> None:
    def bring(self: DeviceFiller, slot: DeviceSlot, unit: Any) -> None:
        slot.shift = self._records[unit].shift
        assert self._on_disk is not None
        with self._on_disk.lend(unit) as buffer:
            self._copy(slot, buffer[: self._records[unit].nbytes])

    patch.setattr(DeviceFiller, "_bring", bring)


# The places of layers in which each fault does harm.
FAULTS: dict[Callable[[Patch], None], Move] = {
    nothing_waits_for_a_layer: in_ram,
    a_layer_is_copied_before_its_slot_is_free: in_ram,
    a_slot_is_free_at_once: in_ram,
    nothing_waits_for_kv_entries: with_all_entries_in_ram,
    kv_entries_are_copied_at_once: with_all_entries_in_ram,
    a_small_transfer_is_overwritten: in_ram,
}
# What is copied too early, or is not there yet, can be read off the text.
SPOILT: dict[Callable[[Patch], None], Move] = {
    nothing_waits_for_a_layer: in_ram,
    nothing_waits_for_kv_entries: with_all_entries_in_ram,
    a_host_slot_is_read_into_at_once: on_disk,
}


def faulty_text(folder: Path, fault: Callable[[Patch], None], move: Move) -> list[int] | str:
    """The token ids, or the engine's error."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with load(folder, "plain", "cuda:0", move) as engine:
            try:
                return says(engine, "short")
            except OffspecError as exc:
                return type(exc).__name__


# ------------------------------------------------------------------------------------------------ recorded work


class Recorded:
    """Work on tensors of the device, which tests make unfit for a graph."""

    def __init__(self) -> None:
        self.source, self.out = torch.ones(4, device=CUDA), torch.zeros(4, device=CUDA)
        self.factor = 2.0

    def sound(self) -> None:
        self.out.copy_(self.source * self.factor + 1)

    def waits(self) -> None:
        self.out.mul_(self.source.sum().item())

    def counts(self) -> None:
        self.out[: len(torch.nonzero(self.source))].zero_()

    def synchronises(self) -> None:
        self.sound()
        torch.cuda.current_stream().synchronize()

    def sends(self) -> None:
        self.out.add_(small_transfers.to_device(torch.arange(4), CUDA))

    def copies(self) -> None:
        self.out.add_(torch.arange(4).to(CUDA))

    def takes_a_number_of_the_host(self) -> None:
        self.out.add_(torch.tensor(3.0))

    def brings_back(self) -> None:
        self.out.cpu()


def moved(work: Recorded) -> None:
    work.source = work.source.clone()


def another_number(work: Recorded) -> None:
    work.factor = 3.0


UNFIT = ("waits", "counts", "synchronises", "sends", "copies", "takes_a_number_of_the_host", "brings_back")
CHANGES: tuple[Callable[[Recorded], None], ...] = (moved, another_number)


def refusal(name: str, change: Callable[[Recorded], None] | None = None) -> str | None:
    """What the recorder says to this work, changed after it was recorded; None if it is content."""
    work = Recorded()
    try:
        replay = accelerator_of(CUDA).recorder()(lambda: getattr(work, name)())
        assert replay is not None
        replay()
        if change is not None:
            change(work)
        replay()
    except AssertionError as exc:
        return str(exc)
    return None


def records_beside() -> bool:
    """Whether anything is recorded on another stream than the default one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return accelerator_of(CUDA).recorder()(Recorded().sound) is not None


# ------------------------------------------------------------------------------------------------ memory


def races_of_freed_memory(*, waits: bool) -> bool:
    """A stream's memory is freed while another one reads it, and the first one allocates again."""
    main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    read: Tensor | None = torch.ones(4, device=CUDA)
    beside.wait_stream(main)
    with torch.cuda.stream(beside):
        torch.ones(4, device=CUDA).add_(read)
    if waits:
        main.wait_stream(beside)
    read = None
    torch.ones(4, device=CUDA)
    return bool(races_in(main.machine))  # type: ignore[attr-defined]


def unlocks_during_a_copy() -> str:
    buffer, runtime = HostBuffer(4096), torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostRegister(buffer.address, 4096, 0)
    torch.empty(4096, dtype=torch.uint8, device=CUDA).copy_(buffer.tensor, non_blocking=True)
    try:
        runtime.cudaHostUnregister(buffer.address)
    except AssertionError as exc:
        return str(exc)
    return ""


def unlocks_what_is_not_locked() -> str:
    """CUDA reports it after the next kernel."""
    torch.cuda.cudart().cudaHostUnregister(0)  # type: ignore[no-untyped-call]
    try:
        torch.ones(1, device=CUDA)
    except RuntimeError as exc:
        return str(exc)
    return ""


def pad_header(file: Path, number: int) -> None:
    """Lengthen a safetensors file's header by spaces."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    file.write_bytes(struct.pack("<Q", size + number) + content[8 : 8 + size] + b" " * number + content[8 + size :])


def misaligned(folder: Path, machine: Machine) -> list[str]:
    """Of layers in slots and resident ones, after headers of other lengths; the text is always the same."""
    functions, texts = set[str](), set[tuple[int, ...]]()
    for number in (4, 8):
        pad_header(folder / "plain" / "model.safetensors", number)
        with load(folder, "plain", "cuda:0", half_in_ram) as engine:
            texts.add(tuple(says(engine, "short")))
        functions |= machine.misaligned
    assert len(texts) == 1
    return sorted(functions)


def main(folder: Path) -> None:
    """What every fault leads to, as JSON."""
    build(folder, ["plain"], num_layers=3)
    guard, found = folder / "guard.so", dict[str, Any]()
    expected = says(load(folder, "plain", "cpu"), "short")
    with slow_passes():
        with pretended_cuda(guard, late=False) as machine:
            for fault, move in FAULTS.items():
                faulty_text(folder, fault, move)
                found[fault.__name__] = races_in(machine)
        with pretended_cuda(guard) as machine:
            for fault, move in SPOILT.items():
                found[f"text, {fault.__name__}"] = faulty_text(folder, fault, move) != expected
            with load(folder, "plain", "cuda:0", in_ram, is_measured=True) as engine:
                found["text, sound"] = says(engine, "short") == expected
            races_in(machine)
            found |= {name: refusal(name) for name in ("sound", *UNFIT)}
            found |= {change.__name__: refusal("sound", change) for change in CHANGES}
            found["beside"] = records_beside()
            found["freed"], found["freed after a wait"] = (
                races_of_freed_memory(waits=waits) for waits in (False, True)
            )
            machine.misaligned.clear()
            torch.ones(9, device=CUDA)[1:].view(2, 4) @ torch.ones(4, 1, device=CUDA)
            found["misaligned operand"] = sorted(machine.misaligned)
            machine.misaligned.clear()
            found["misaligned"] = misaligned(folder, machine)
            found["unlocked"] = unlocks_during_a_copy()
            found["not locked"] = unlocks_what_is_not_locked()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `main` prints."""
    results: dict[str, Any] = in_own_process("tests.offspec.test_pretended_faults", tmp_path_factory.mktemp("faults"))
    return results


@pytest.mark.slow
def test_every_missing_wait_is_a_race(found: dict[str, Any]) -> None:
    assert [fault.__name__ for fault in FAULTS if not found[fault.__name__]] == []


@pytest.mark.slow
def test_what_is_read_too_early_is_garbage(found: dict[str, Any]) -> None:
    assert [fault.__name__ for fault in SPOILT if not found[f"text, {fault.__name__}"]] == []
    assert found["text, sound"]


@pytest.mark.slow
def test_a_graph_takes_nothing_from_the_host(found: dict[str, Any]) -> None:
    assert found["sound"] is None
    assert [name for name in UNFIT if not found[name]] == []
    assert all("test_pretended_faults.py" in found[name] for name in UNFIT)


@pytest.mark.slow
def test_a_graph_repeats_what_was_recorded(found: dict[str, Any]) -> None:
    assert [change.__name__ for change in CHANGES if not found[change.__name__]] == []
    assert not found["beside"], "recording would block the other streams"


@pytest.mark.slow
def test_memory_outlives_its_use(found: dict[str, Any]) -> None:
    assert (found["freed"], found["freed after a wait"]) == (True, False)
    assert "unlocked before a copy is over" in found["unlocked"]
    assert "of an earlier call" in found["not locked"]


@pytest.mark.slow
def test_matrices_lie_where_fast_products_need_them(found: dict[str, Any]) -> None:
    assert found["misaligned operand"] == ["tests/offspec/test_pretended_faults.py main"]
    assert found["misaligned"] == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
