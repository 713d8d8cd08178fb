"""Late copies and late layers: the device sleeps before each copy, or before what follows the wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec.loaders.streaming.link import CopyStream, DeviceFiller, DeviceSlot

from .late_work import late_copies, late_layers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What CUDA and the methods were called for, in order; a sleep with the stream that it is on."""
    made, on = list[tuple[str, Any]](), list[Any]()

    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        on.append(stream)
        yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.append(("sleep", on[-1])), raising=False)
    for owner, name in ((DeviceFiller, "_copy"), (CopyStream, "run"), (DeviceSlot, "enter"), (CopyStream, "wait")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: made.append((name, None)))
    return made


def test_copies_are_late(calls: list[tuple[str, Any]]) -> None:
    there: Any = SimpleNamespace(_stream="copies", _accelerator=SimpleNamespace(current_stream="compute"))
    with late_copies():
        DeviceFiller._copy(there, there, torch.empty(0))
        CopyStream.run(there, [])
    assert calls == [("sleep", "copies"), ("_copy", None), ("sleep", "copies"), ("run", None)]
    DeviceFiller._copy(there, there, torch.empty(0))
    assert calls[4:] == [("_copy", None)]


def test_layers_are_late(calls: list[tuple[str, Any]]) -> None:
    there: Any = SimpleNamespace(_stream="copies", _accelerator=SimpleNamespace(current_stream="compute"))
    with late_layers():
        DeviceSlot.enter(there)
        CopyStream.wait(there, there)
    assert calls == [("enter", None), ("sleep", "compute"), ("wait", None), ("sleep", "compute")]
