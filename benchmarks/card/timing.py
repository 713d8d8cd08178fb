"""Measures seconds of work on a device, with synchronisation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_s(
    work: Callable[[], object],
    wait: Callable[[], object],
    repeats: int = 20,
    *,
    warm_ups: int = 3,
    after: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds of `work` up to the end of `wait`, without `after` and without the first runs."""
    seconds = []
    for _ in range(warm_ups + repeats):
        wait()
        began = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - began)
        after()
    return statistics.median(seconds[warm_ups:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait for the current stream only."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
