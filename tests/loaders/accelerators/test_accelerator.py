"""Both accelerators: what CUDA is asked for, and that nothing is asked of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offspec.backends.device_kinds import kind_of
from offspec.loaders.accelerators.accelerator import Accelerator, accelerator_of
from offspec.loaders.accelerators.cpu import Cpu
from offspec.loaders.accelerators.cuda import Cuda, span
from offspec.loaders.files.readers import HostBuffer

from .fake_cuda import FakeCuda

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
MIB = 2**20


def test_each_device_has_one_accelerator() -> None:
    assert isinstance(accelerator_of(CPU), Cpu)
    assert isinstance(accelerator_of(CUDA), Cuda)
    assert accelerator_of(torch.device("cuda:0")) is accelerator_of(CUDA)
    assert accelerator_of(torch.device("cuda:1")) is not accelerator_of(CUDA)


def test_both_answer_everything() -> None:
    names = {name for name in (*vars(Accelerator), *Accelerator.__annotations__) if not name.startswith("_")}
    assert len(names) > 20
    for accelerator in (Cpu(CPU), Cuda):
        assert names - set(dir(accelerator)) <= {"device"}, "an instance has its device"


def test_on_a_cpu_work_is_done_when_it_was_called() -> None:
    accelerator, done = Cpu(CPU), list[str]()
    start, end = accelerator.new_event(timing=True), accelerator.new_event(timing=True)
    start.record(accelerator.current_stream)
    with accelerator.on(accelerator.new_stream()):
        done.append("work")
    end.record(accelerator.current_stream)
    end.synchronize()
    assert done == ["work"]
    assert 0 <= start.elapsed_time(end) < 60_000
    replay = accelerator.recorder()(lambda: done.append("replay"))
    assert replay is not None
    replay()
    assert done == ["work", "replay"]


def test_kernels_of_a_cpu_read_the_hosts_memory() -> None:
    host = Cpu(CPU).page_locked(16)
    host[3] = 7
    view = Cpu(CPU).view_of(host)
    assert view is not None
    assert view.tolist() == [0, 0, 0, 7] + 12 * [0]


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, refuses=True)
    monkeypatch.setattr(torch, "ones", fake.launch)
    assert not Cuda(CUDA).pin(HostBuffer(4096))
    assert not fake.has_error
    fake.launch()  # the next kernel is not blamed


def test_pinned_memory_is_every_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    assert Cuda(CUDA).pin(HostBuffer(4096))
    assert Cuda(CUDA).pin(HostBuffer(0))  # nothing to pin is no fault
    assert fake.asked == ["register 4096 1"]


def test_memory_of_no_bytes_is_not_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was never registered: CUDA would keep an error for the next kernel."""
    fake = FakeCuda(monkeypatch)
    Cuda(CUDA).unpin(HostBuffer(0))
    assert fake.asked == []
    Cuda(CUDA).unpin(HostBuffer(4096))
    assert fake.asked == ["unregister"]
    assert not fake.has_error


@pytest.mark.parametrize(("nbytes", "fraction"), [(None, 1.0), (6 * MIB, 0.5), (1000 * MIB, 1.0)])
def test_the_limit_is_a_fraction_beyond_what_is_held(
    monkeypatch: pytest.MonkeyPatch, nbytes: int | None, fraction: float
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * MIB, 16 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: asked.append(given))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    Cuda(CUDA).limit_memory(nbytes)
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
        with span(f"in use: {is_initialized}"):
            pass
    assert ranges == ["in use: True"]


def test_a_cpu_has_no_device_memory() -> None:
    accelerator = accelerator_of(CPU)
    accelerator.release_memory()
    accelerator.limit_memory(0)
    assert accelerator.held_bytes() == accelerator.free_and_total_bytes() == (0, 0)
    assert not kind_of(CPU).has_own_memory


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_memory_is_pinned_where_it_lies() -> None:
    buffer = HostBuffer(3 * MIB + 5)
    assert Cuda(CUDA).pin(buffer)
    assert buffer.tensor.is_pinned()
    assert not Cuda(CUDA).pin(buffer)  # twice is refused
    assert torch.ones(3, device=CUDA).sum().item() == 3  # and the next kernel is not blamed for it
    Cuda(CUDA).unpin(buffer)
    assert not buffer.tensor.is_pinned()


@pytest.mark.gpu
def test_what_is_allowed_is_all_there_is() -> None:
    Cuda(CUDA).release_memory()
    Cuda(CUDA).limit_memory(256 * MIB)
    try:
        held, _ = Cuda(CUDA).held_bytes()
        within = torch.empty(200 * MIB, dtype=torch.uint8, device=CUDA)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA)
        assert within.nbytes <= Cuda(CUDA).held_bytes()[1] - held <= 256 * MIB
    finally:
        Cuda(CUDA).limit_memory(None)
    assert torch.empty(300 * MIB, dtype=torch.uint8, device=CUDA).is_cuda


@pytest.mark.gpu
def test_spans_may_be_nested() -> None:
    torch.ones(1, device=CUDA)
    with span("pass"), span("layer"):
        assert torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@pytest.mark.gpu
def test_memory_is_given_back() -> None:
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
    held, _ = Cuda(CUDA).held_bytes()
    del kept
    Cuda(CUDA).release_memory()
    assert Cuda(CUDA).held_bytes()[0] <= held - 64 * MIB
