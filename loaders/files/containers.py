"""The list of checkpoint containers, and the functions that select one by path."""

from __future__ import annotations

from pathlib import Path

from ..registry import Registry
from .checkpoint import Checkpoint, Container

# The last one also reports the error for a path of no container.
CONTAINERS = Registry[Container](
    __package__, "gguf_file.GgufFile", "mistral_folder.MistralFolder", "safetensors_folder.SafetensorsFolder"
)


def open_checkpoint(path: Path | str, *, headers_only: bool = False) -> Checkpoint:
    """Open a path with its container (`Container.open`). Raises CheckpointError or MissingWeightsError."""
    return _container(Path(path)).open(Path(path), headers_only=headers_only)


def open_config(path: Path) -> Checkpoint:
    """Open a path without its weights (`Container.open_config`). Raises CheckpointError."""
    return _container(path).open_config(path)


def is_checkpoint(path: Path) -> bool:
    """Whether some container recognises the path."""
    return any(container.recognises(path) for container in CONTAINERS)


def largest_weight_file(path: Path) -> Path | None:
    """The largest file with weights, for measuring the disk; None if there is none."""
    return max(_container(path).weight_files(path), key=lambda file: file.stat().st_size, default=None)


def _container(path: Path) -> Container:
    *others, last = CONTAINERS
    return next((container for container in others if container.recognises(path)), last)
