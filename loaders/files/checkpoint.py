"""A checkpoint: where its tensors lie, and a model's other metadata, before any weights are read.

`Checkpoint` is the interface of every opened container, and `Container` opens one; `safetensors_folder` is the first.
This module knows no specific container, and loads no tensors.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offspec.errors import CheckpointError

from .os_errors import reason, remedy

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
}


@dataclass(frozen=True)
class Order:
    """A container's order of the numbers along a dimension, if it exchanges two levels of them.

    Behind the first `kept` numbers, the architecture has [groups, count, others, run], the last one the fastest, and
    the container [groups, others, count, run]; `others` follows from the length.
    """

    count: int
    groups: int = 1
    run: int = 1
    kept: int = 0

    def fits(self, length: int) -> bool:
        """Whether a dimension of `length` numbers can have this order."""
        return length > self.kept and (length - self.kept) % (self.groups * self.count * self.run) == 0


@dataclass(frozen=True)
class Change:
    """The difference between a container's numbers and those that the architecture of its config expects.

    rows, columns: their order, if it is another one. added: the value added to every number (llama.cpp stores Gemma's
    norms as 1 + w). is_negative_exp: numbers x are stored as -exp(x) (llama.cpp's A of state spaces). is_transposed: a
    plain matrix is stored as [inputs, outputs].
    """

    rows: Order | None = None
    columns: Order | None = None
    added: float = 0.0
    is_negative_exp: bool = False
    is_transposed: bool = False


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor: `nbytes` bytes from byte `offset` (absolute) of file `path`.

    dtype: safetensors' name ("BF16"), or a container's own name, which a registered weight format reads.
    change: None if the numbers are those that the config expects.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    change: Change | None = None

    @property
    def alignment(self) -> int:
        """The alignment that its first byte needs in memory to be used without a copy; 1 if only its format knows."""
        return DTYPE_BYTES.get(self.dtype, 1)


class Checkpoint(Protocol):
    """A model's metadata and tensor locations, read and checked for consistency; no weights are in memory."""

    @property
    def path(self) -> Path:
        """The folder or file, for messages; its last component is the model's name."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json, or its equivalent."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The content of generation_config.json; {} if there is none."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by full name."""

    @property
    def tokenizer_path(self) -> Path | None:
        """The argument of `Tokenizer.load`: a folder with tokenizer.json, a GGUF file, or None."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user who loads it, one sentence each."""

    def companions(self) -> Mapping[str, Path | bytes]:
        """Files that a copy needs besides weights and config.json: path in the folder → source path or content.

        Raises CheckpointError for a file that may not be copied.
        """

    def config_json(self) -> bytes:
        """The text of config.json, for a copy of it. Raises CheckpointError."""


@dataclass(frozen=True)
class CheckpointView:
    """A `Checkpoint` with the files of `whole`, but fewer or renamed tensors.

    other_config: None for the config of `whole`. added_notes: appended to the notes of `whole`.
    """

    whole: Checkpoint
    tensors: Mapping[str, TensorInfo]
    other_config: Mapping[str, Any] | None = None
    added_notes: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.whole.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.whole.config if self.other_config is None else self.other_config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self.whole.generation_config

    @property
    def tokenizer_path(self) -> Path | None:
        return self.whole.tokenizer_path

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.whole.notes, *self.added_notes)

    def companions(self) -> Mapping[str, Path | bytes]:
        return self.whole.companions()

    def config_json(self) -> bytes:
        return self.whole.config_json() if self.other_config is None else as_config_json(self.other_config)


def as_config_json(config: Mapping[str, Any]) -> bytes:
    """A config as the text of a config.json."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def without(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """The checkpoint without the tensors of these names."""
    return CheckpointView(checkpoint, {name: info for name, info in checkpoint.tensors.items() if name not in names})


class Container(Protocol):
    """One way to store a checkpoint on disk. Each is registered once, in `containers.CONTAINERS`."""

    def recognises(self, path: Path) -> bool:
        """Whether this existing folder or file is of this container, valid or not."""

    def open(self, path: Path, *, headers_only: bool = False) -> Checkpoint:
        """Read and check the headers. Raises CheckpointError, or its subclass MissingWeightsError.

        headers_only: files may end after their headers, for example if only these were downloaded for a plan.
        """

    def open_config(self, path: Path) -> Checkpoint:
        """Read only the config; weights, and the list of tensors, may be missing. Raises CheckpointError."""

    def weight_files(self, path: Path) -> list[Path]:
        """The existing files with weights; the set may be incomplete."""


def num_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors as stored."""
    return sum(info.nbytes for info in checkpoint.tensors.values())


def fault(where: Path, problem: str, kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
    """A one-line CheckpointError, even if the path contains line breaks."""
    return kind(" ".join(f"{where}: {problem}".splitlines()))


def without_remedy(exc: Exception) -> str:
    """What is wrong, by a one-line error, where another remedy than the error's applies."""
    return str(exc).rpartition(";")[0] or str(exc)


def show(value: object) -> str:
    """An untrusted value as one short line, for any size or depth of the value."""
    shortener = reprlib.Repr()
    shortener.maxstring, shortener.maxlist, shortener.maxlevel = 120, 8, 2
    return shortener.repr(value)[:150]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError in the body into a one-line CheckpointError with file and reason."""
    try:
        yield
    except OSError as exc:
        advice = remedy(exc, "check that it exists and that you may read it")
        raise fault(path, f"cannot be read ({reason(exc)}); {advice}") from exc
