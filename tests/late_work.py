"""Late copies and late layers on a CUDA device, so that a missing wait shows every time, not only by bad luck."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offspec.loaders.accelerators.accelerator import DeviceEvent
from offspec.loaders.streaming.link import CopyStream, DeviceFiller, DeviceSlot

NUM_CYCLES = 2_000_000  # about a millisecond: longer than a copy or a layer of these tests


@contextmanager
def late_copies() -> Iterator[None]:
    """Copies to the device begin late: a layer that does not wait computes with what was in its slot before."""
    copy, run = DeviceFiller._copy, CopyStream.run

    def late_copy(self: DeviceFiller, slot: DeviceSlot, source: torch.Tensor) -> None:
        _sleep(self._stream)
        copy(self, slot, source)

    def late_run(self: CopyStream, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        _sleep(self._stream)
        return run(self, copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceFiller, "_copy", late_copy)
        patch.setattr(CopyStream, "run", late_run)
        yield


@contextmanager
def late_layers() -> Iterator[None]:
    """Layers compute late: a copy that does not wait for them overwrites what they are about to read."""
    enter, wait = DeviceSlot.enter, CopyStream.wait

    def late_enter(self: DeviceSlot) -> None:
        enter(self)
        _sleep(self._accelerator.current_stream)

    def late_wait(self: CopyStream, arrival: DeviceEvent) -> None:
        wait(self, arrival)
        _sleep(self._accelerator.current_stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceSlot, "enter", late_enter)
        patch.setattr(CopyStream, "wait", late_wait)
        yield


def _sleep(stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(NUM_CYCLES)
