"""A checkpoint: which tensors lie where, and what else is known of a model before a byte of its weights is read.

`Checkpoint` is what every container of weights looks like once it is opened, `Container` what opens one; the first is
`safetensors_folder`. Knows nothing of any container, of what the tensors mean, and does not load them.
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
class Change:
    """How a container's numbers differ from those that the architecture of its config means.

    num_heads: not 0 where the rows are those of so many heads, and in each head rows i and i + head_dim / 2, which RoPE
    turns together, lie side by side (llama.cpp's order for Llama's queries and keys).
    added: was added to every number (llama.cpp keeps Gemma's norms as 1 + w).
    """

    num_heads: int = 0
    added: float = 0.0


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes from byte `offset` (absolute) of file `path`.

    dtype: as safetensors spells it ("BF16"), or a container's own name, which a registered weight format understands.
    change: None where its numbers are those that the config means.
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
        """Of its first byte in memory, so that it can be used where it was read to; 1 where only its format knows."""
        return DTYPE_BYTES.get(self.dtype, 1)


class Checkpoint(Protocol):
    """A model's weights and what belongs to them: read, and found consistent; no weights are in memory."""

    @property
    def path(self) -> Path:
        """The folder or file, for messages; its last part is the model's name."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """What config.json says, or would."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """What generation_config.json says; {} where there is none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By full name."""
        ...

    @property
    def tokenizer_path(self) -> Path | None:
        """Where its tokenizer is read from (`Tokenizer.load`): a folder with tokenizer.json, a GGUF file, or None."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who loads it should be told, a sentence each."""
        ...

    def companions(self) -> Mapping[str, Path | bytes]:
        """Files that a copy of it needs beside weights and config.json, by their path in its folder; or their content.

        Raises CheckpointError for one that may not be copied.
        """
        ...

    def config_json(self) -> bytes:
        """The text of config.json, for a copy of it. Raises CheckpointError."""
        ...


@dataclass(frozen=True)
class CheckpointView:
    """Another checkpoint (a `Checkpoint`) with other tensors: fewer, or under other names.

    other_config: None where its config is the whole one's. added_notes: after the whole one's.
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
    """The text of a config.json that says this."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def without(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """All of it but the tensors of these names."""
    return CheckpointView(checkpoint, {name: info for name, info in checkpoint.tensors.items() if name not in names})


class Container(Protocol):
    """One way in which a checkpoint lies on disk. An instance is registered once, in `containers.CONTAINERS`."""

    def recognises(self, path: Path) -> bool:
        """Whether this folder or file, which is there, is one, sound or not."""
        ...

    def open(self, path: Path, *, headers_only: bool = False) -> Checkpoint:
        """Reads what is needed to know its tensors. Raises CheckpointError, MissingWeightsError for one.

        headers_only: files may end behind their headers, as when only these were fetched, to plan with.
        """
        ...

    def open_config(self, path: Path) -> Checkpoint:
        """What can be said without the weights, which may be missing: its tensors, too. Raises CheckpointError."""
        ...

    def weight_files(self, path: Path) -> list[Path]:
        """The files there that hold weights, whether or not all of them are there."""
        ...


def num_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors as they are stored."""
    return sum(info.nbytes for info in checkpoint.tensors.values())


def fault(where: Path, what: str, kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
    """A one-line CheckpointError, also where a path has line breaks in it."""
    return kind(" ".join(f"{where}: {what}".splitlines()))


def show(value: object) -> str:
    """A foreign value, safe to print: on one line, no longer than a line should be, however large or deep it is."""
    shortener = reprlib.Repr()
    shortener.maxstring, shortener.maxlist, shortener.maxlevel = 120, 8, 2
    return shortener.repr(value)[:150]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Says in one line which file cannot be read, and why. Raises CheckpointError."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or type(exc).__name__
        raise fault(path, f"cannot be read ({reason}); check that it is there and that you may read it") from exc
