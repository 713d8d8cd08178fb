"""A stand-in for `torch.cuda` that writes down what was called, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch


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

    def unregister(self, address: int) -> int:
        self.asked.append("unregister")
        self.has_error = address == 0  # CUDA: invalid argument
        return int(self.has_error)

    def launch(self, *_: object, **__: object) -> None:
        """A kernel, after which torch asks for the thread's last error, and so takes it away."""
        failed, self.has_error = self.has_error, False
        if failed:
            raise RuntimeError("CUDA error: out of memory")
