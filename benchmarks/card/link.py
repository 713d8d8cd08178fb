"""The link to the card: the rate of copies, and the latency of 64 KB during copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.files.readers import HostBuffer
from offspec.loaders.streaming.small_transfers import to_device

from .results import Figures
from .timing import median_s, synchronize, synchronize_stream

if TYPE_CHECKING:
    from .bench import Bench


def link_bytes_per_s(device: torch.device, nbytes: int, seconds: float = 1.0, shift: int = 0) -> float:
    """The maximum rate: consecutive copies of `nbytes`, a layer's size, from memory registered like a target's.

    shift: bytes between the beginning of the device's memory, which is aligned, and the destination.
    """
    sources = [HostBuffer(nbytes) for _ in range(2)]
    for source in sources:
        source.tensor.fill_(1)
    target = torch.empty(nbytes + shift, dtype=torch.uint8, device=device)[shift:]
    pinned = [source for source in sources if accelerator_of(device).pin(source)]

    def copied(count: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for i in range(count):
            target.copy_(sources[i % 2].tensor, non_blocking=True)
        synchronize(device)
        return time.perf_counter() - began

    count = max(4, min(1000, int(seconds / max(copied(4) / 4, 1e-6) / 3)))
    rate = count * nbytes / statistics.median(copied(count) for _ in range(3))
    for source in pinned:
        accelerator_of(device).unpin(source)
    return rate


def small_copies(bench: Bench) -> Iterator[Figures]:
    """Seconds for 64 KB to the device, alone and during copies of layers, by small_transfers and by a copy."""
    values = torch.zeros(2**16, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    out, wait = torch.empty_like(values, device=bench.device), partial(synchronize_stream, bench.device)
    ways = {
        "small_transfers": lambda: to_device(values, bench.device),
        "copy": lambda: out.copy_(values, non_blocking=True),
    }
    found = {f"{way}_s": median_s(send, wait) for way, send in ways.items()}
    for way, send in ways.items():
        with copying(bench.device):
            found[f"{way}_beside_layers_s"] = median_s(send, wait, 1, warm_ups=0)
    yield found


def copies_back(bench: Bench) -> Iterator[Figures]:
    """Seconds for copies from the device, alone and during copies of layers to it, which another engine does."""
    found, wait = Figures(), partial(synchronize_stream, bench.device)
    is_card = bench.device.type == "cuda"
    for num_bytes in (2**16, 2**24):
        values = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
        out = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_card)
        back = partial(out.copy_, values, non_blocking=True)
        found[f"{num_bytes}_bytes_s"] = median_s(back, wait)
        with copying(bench.device):
            found[f"{num_bytes}_bytes_beside_layers_s"] = median_s(back, wait, 5, warm_ups=0)
        yield found


def shifted_copies(bench: Bench) -> Iterator[Figures]:
    """The link's rate by the shift of the destination: layers are shifted in their slots (`Record.shift`)."""
    num_bytes = 2**28 if bench.device.type == "cuda" else 2**22
    rates = {shift: link_bytes_per_s(bench.device, num_bytes, 0.5, shift) for shift in (0, 8, 64)}
    yield {"bytes_per_s_by_shift": rates, "least_over_aligned": min(rates.values()) / rates[0]}


@contextmanager
def copying(device: torch.device, num_copies: int = 40) -> Iterator[None]:
    """Run the body during queued copies of 256 MiB to the device; wait for them at the end."""
    if device.type != "cuda":
        yield
        return
    source = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True)
    out, stream = torch.empty_like(source, device=device), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(num_copies):
            out.copy_(source, non_blocking=True)
    try:
        yield
    finally:
        stream.synchronize()
