"""Stand-ins for the disk: a reader over bytes in memory that can wait and fail, and small checkpoints."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from offspec.errors import CheckpointError
from offspec.loaders.files.checkpoint import Checkpoint
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.formats import StoredWeight, formats_in, stored_weights

Tensors = dict[str, torch.Tensor]
LAYER_PREFIX = "model.layers."


def toy_tensors(num_layers: int = 3) -> Tensors:
    """A table outside the layers; a matrix and a vector in each."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed.weight": torch.randn(7, 4, generator=generator)}
    for index in range(num_layers):
        tensors[f"model.layers.{index}.mix.weight"] = torch.randn(4, 4, generator=generator)
        tensors[f"model.layers.{index}.norm"] = torch.randn(4, generator=generator)
    return tensors


def open_with(folder: Path, tensors: Tensors) -> Checkpoint:
    """A checkpoint of one file."""
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def stored_with(folder: Path, tensors: Tensors, said: object) -> dict[str, StoredWeight]:
    """The weights of a checkpoint of one file with this quantization_config."""
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    return stored_weights(checkpoint.tensors, formats_in(checkpoint))


class FakeReader:
    """Reads `files`; counts bytes; `gate` (when given) holds every read until it is set; `fail_at` raises there."""

    def __init__(self, files: dict[Path, bytes], gate: threading.Event | None = None) -> None:
        self.files, self.gate = files, gate
        self.fail_at: int | None = None
        self.bytes_read = 0
        self.reads: list[tuple[Path, int, int]] = []
        self.closed = False
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        if self.gate is not None:
            assert self.gate.wait(300)
        if self.fail_at is not None and offset <= self.fail_at < offset + len(out):
            raise CheckpointError(f"{path}: cannot be read at byte {offset} (it was told to fail)")
        content = self.files[path][offset : offset + len(out)]
        assert len(content) >= least
        out[: len(content)] = content
        with self._lock:
            self.bytes_read += least
            self.reads.append((path, offset, len(out)))

    def close(self) -> None:
        self.closed = True
