"""Which containers of checkpoints there are, and which of them a path is."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import Checkpoint, Container
from .gguf_file import GgufFile
from .registry import Registry
from .safetensors_folder import SafetensorsFolder

_LAST = SafetensorsFolder()  # says what is wrong with a path that is none
CONTAINERS = Registry[Container](GgufFile(), _LAST)


def open_checkpoint(path: Path | str, *, headers_only: bool = False) -> Checkpoint:
    """Opens whatever container it is (`Container.open`). Raises CheckpointError, MissingWeightsError for one."""
    return _container(Path(path)).open(Path(path), headers_only=headers_only)


def open_config(path: Path) -> Checkpoint:
    """What can be said of it without its weights; its tensors may be missing. Raises CheckpointError."""
    return _container(path).open_config(path)


def is_checkpoint(path: Path) -> bool:
    """Whether some container recognises the path."""
    return any(container.recognises(path) for container in CONTAINERS)


def largest_weight_file(path: Path) -> Path | None:
    """The largest file there that holds weights, to measure a disk with; None where there is none."""
    return max(_container(path).weight_files(path), key=lambda file: file.stat().st_size, default=None)


def _container(path: Path) -> Container:
    return next((container for container in CONTAINERS if container.recognises(path)), _LAST)
