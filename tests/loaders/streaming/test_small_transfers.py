"""Small tensors arrive as they are, whatever their type and size, and however many are on their way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offspec.loaders.accelerators.accelerator import Accelerator
from offspec.loaders.accelerators.cpu import Cpu
from offspec.loaders.accelerators.cuda import Cuda
from offspec.loaders.streaming.small_transfers import SlotTransfers, read_words, to_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SIZES = [1, 3, 8, 1000, SlotTransfers.SLOT_BYTES, SlotTransfers.SLOT_BYTES + 1, 3 * SlotTransfers.SLOT_BYTES + 5]


def numbers(count: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (count,), generator=generator).to(dtype)


def assert_many_arrive(accelerator: Accelerator) -> None:
    """More than there are slots for, none of which is waited for, from tensors that are overwritten at once."""
    found, carrier, values = list[Tensor](), SlotTransfers(accelerator), torch.empty(5000, dtype=torch.int64)
    for seed in range(3 * SlotTransfers.NUM_SLOTS):
        values.copy_(numbers(5000, torch.int64, seed))
        found.append(carrier.to_device(values))
    for seed, each in enumerate(found):
        assert torch.equal(each.cpu(), numbers(5000, torch.int64, seed))


@pytest.mark.parametrize("size", SIZES)
def test_bytes_arrive(size: int) -> None:
    assert torch.equal(SlotTransfers(Cpu(CPU)).to_device(numbers(size)), numbers(size))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
def test_types_and_shapes_stay(dtype: torch.dtype) -> None:
    values = numbers(7 * 5 * 3, dtype).view(7, 5, 3)[:, 1:4].transpose(0, 1)
    found = SlotTransfers(Cpu(CPU)).to_device(values)
    assert found.dtype == dtype
    assert torch.equal(found, values)


def test_nothing_is_nothing() -> None:
    assert SlotTransfers(Cpu(CPU)).to_device(torch.empty(0, 4)).shape == (0, 4)
    assert SlotTransfers(Cpu(CPU)).to_device(torch.tensor(7)).item() == 7


def test_many_arrive() -> None:
    assert_many_arrive(Cpu(CPU))


def test_in_any_mode() -> None:
    """What is kept between calls may be written to in inference mode and outside it."""
    with torch.inference_mode():
        carrier = SlotTransfers(Cpu(CPU))
        assert carrier.to_device(torch.arange(4)).tolist() == [0, 1, 2, 3]
    assert carrier.to_device(torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_where_memory_cannot_be_shared_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "view_of", lambda cpu, host: None)
    assert torch.equal(SlotTransfers(Cpu(CPU)).to_device(numbers(100)), numbers(100))


def test_on_a_cpu_nothing_is_done() -> None:
    values = numbers(9)
    assert to_device(values, CPU) is values


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_a_kernel_reads_the_hosts_memory() -> None:
    host = Cuda(CUDA).page_locked(4096)
    seen = Cuda(CUDA).view_of(host)
    assert seen is not None
    assert seen.data_ptr() == host.data_ptr()
    out = torch.zeros(4096, dtype=torch.uint8, device=CUDA)
    for seed in range(3):  # what is there when the kernel runs, not what was there first
        host.copy_(numbers(4096, seed=seed))
        read_words(seen, out)
        assert torch.equal(out.cpu(), host)


@pytest.mark.gpu
def test_all_arrives_on_the_device() -> None:
    for size in SIZES:
        assert torch.equal(to_device(numbers(size), CUDA).cpu(), numbers(size))
    assert_many_arrive(Cuda(CUDA))


@pytest.mark.gpu
def test_it_does_not_wait_for_large_copies() -> None:
    large = [torch.zeros(2**28, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    out, stream, all_copied = (
        torch.empty(2**28, dtype=torch.uint8, device=CUDA),
        torch.cuda.Stream(CUDA),
        torch.cuda.Event(),
    )
    to_device(numbers(8), CUDA)
    torch.cuda.synchronize(CUDA)
    with torch.cuda.stream(stream):
        for source in large:
            out.copy_(source, non_blocking=True)
        all_copied.record(stream)
    found = to_device(numbers(1000), CUDA)
    torch.cuda.current_stream(CUDA).synchronize()
    assert not all_copied.query(), "a gigabyte was copied before a kilobyte arrived"
    assert torch.equal(found.cpu(), numbers(1000))
    torch.cuda.synchronize(CUDA)
