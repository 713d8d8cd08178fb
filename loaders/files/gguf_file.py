"""GGUF files: metadata and tensor locations. Reads headers only, and checks each before use.

One model is one file, or a set of `NAME-00001-of-0000N.gguf`. Files are untrusted: lengths, counts, types and offsets
are checked before use. Tensor names and metadata keys are llama.cpp's (`offspec.checkpoints.gguf` translates them);
shapes are in torch's order, outputs first.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from offspec.errors import CheckpointError, MissingWeightsError

from .checkpoint import TensorInfo, as_config_json, fault, reading, show
from .gguf_types import GGUF_TYPES
from .small_files import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_HEADER_BYTES = 2**27  # vocabularies of 260,000 tokens with as many merges have 12 MiB
MOST_KEYS = 2**16
MOST_TENSORS = 2**18
MOST_VALUES = 2**22  # in all arrays together
MOST_STRING_BYTES = 2**24  # a chat template has some thousand bytes
MOST_NAME_BYTES = 2**10
MOST_PARTS = 1000
MOST_DIMENSIONS = 4
MOST_ELEMENTS = 2**60
DEFAULT_ALIGNMENT = 32
MOST_ALIGNMENT = 2**20

BESIDE_MODELS = ("mmproj", "mtp-")  # beginnings of names: image encoders, MTP layers
_QUANTISATION = re.compile(r"[-.](UD-)?(I?Q\d\w*|B?F16|F32|MXFP4\w*)", re.IGNORECASE)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_AGAIN = "the file is damaged, download it again"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}

Metadata = Mapping[str, Any]
# Of the model that was read last, by path, size and time: its tokenizer takes the lists out, whose reading takes 1 s.
_LAST: dict[tuple[Path, int, int], Metadata] = {}


@dataclass(frozen=True)
class GgufModel:
    """A model's files (a `checkpoint.Checkpoint`): metadata of the first file, tensors of all by llama.cpp's names.

    config: the metadata without its lists; its keys differ from those of a config.json.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return {key: value for key, value in self.metadata.items() if not isinstance(value, list)}

    @property
    def generation_config(self) -> dict[str, Any]:
        return {}

    @property
    def tokenizer_path(self) -> Path:
        return part_paths(self.path)[0]

    def companions(self) -> dict[str, Path]:
        return {}

    def config_json(self) -> bytes:
        return as_config_json(self.config)


class GgufFile:
    """The container: a file, any part of a split set, or a folder with one GGUF model and no safetensors."""

    def recognises(self, path: Path) -> bool:
        if not path.is_dir():
            return is_gguf(path)
        return bool(_models(path)) and not any(path.glob("*.safetensors*"))

    def open(self, path: Path, *, headers_only: bool = False) -> GgufModel:
        return read_model(_file(path), headers_only=headers_only)

    def open_config(self, path: Path) -> GgufModel:
        """Read config and tensor list: the metadata alone do not tell whether a head or a norm exists. Raises
        MissingWeightsError for an incomplete split set, because its tensor list is incomplete.
        """
        return self.open(path, headers_only=True)

    def weight_files(self, path: Path) -> list[Path]:
        return part_paths(_file(path))


def _file(path: Path) -> Path:
    """`path` itself, or the first file of the model in a folder. Raises CheckpointError for several models."""
    if not path.is_dir():
        return path
    models = _models(path)
    if len(models) > 1:
        names = ", ".join(show(file.name) for file in models[:8])
        raise fault(path, f"contains {len(models)} GGUF models; name one file: {names}")
    return models[0]


def _models(folder: Path) -> list[Path]:
    """The first files of the models in a folder."""
    with reading(folder):
        files = sorted(file for file in folder.glob("*.gguf") if file.is_file())
    firsts = {_PART.sub(r"\1-of-\3", file.name): file for file in reversed(files)}
    return [file for file in files if file in firsts.values() and not file.name.startswith(BESIDE_MODELS)]


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF by its name or its first bytes, valid or not."""
    if path.suffix.lower() == ".gguf":
        return path.is_file()
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_model(path: Path, *, headers_only: bool = False) -> GgufModel:
    """The model of this file, with all parts of a split set; `path` may be any part.

    headers_only: files may end after their headers. Raises CheckpointError; MissingWeightsError for a missing part.
    """
    parts = part_paths(path)
    headers = [_read_header(part, headers_only=headers_only) for part in parts]
    for index, (part, header) in enumerate(zip(parts, headers, strict=True)):
        number, total = header.metadata.get("split.no", 0), header.metadata.get("split.count", 0)
        if (number, total) != (index, len(parts)) and not (len(parts) == 1 and total in (0, 1)):
            named = f"part {index + 1} of {len(parts)} by its name" if len(parts) > 1 else "a single file by its name"
            description = f"is {named}, but its metadata say part {show(number)} (from 0) of {show(total)}"
            raise fault(part, f"{description}; restore its original name, or download the whole set again")
    tensors: dict[str, TensorInfo] = {}
    for part, header in zip(parts, headers, strict=True):
        if twice := tensors.keys() & header.tensors.keys():
            raise fault(part, f"tensor {show(min(twice))} is also in another part; {_AGAIN}")
        tensors |= header.tensors
    promised = headers[0].metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and promised != len(tensors):
        raise fault(parts[0], f"declares {show(promised)} tensors, but its parts have {len(tensors)}; {_AGAIN}")
    if not headers_only:
        _LAST.clear()
        _LAST[_version(parts[0])] = headers[0].metadata
    return GgufModel(path, headers[0].metadata, tensors)


def read_metadata(path: Path) -> Metadata:
    """The metadata of the first part. Strings are decoded as UTF-8 with `surrogateescape`. Raises CheckpointError."""
    first = part_paths(path)[0]
    metadata = _LAST.pop(_version(first), None)
    return _read_header(first, headers_only=True).metadata if metadata is None else metadata


def _version(path: Path) -> tuple[Path, int, int]:
    with reading(path):
        status = path.stat()
        return path, status.st_size, status.st_mtime_ns


def has_header(path: Path) -> bool:
    """Whether this one file is there and its header can be read."""
    try:
        _read_header(path, headers_only=True)
    except CheckpointError:
        return False
    return True


def part_paths(path: Path) -> list[Path]:
    """All files of the model to which `path` belongs, in order. Raises CheckpointError."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count <= MOST_PARTS:
        raise fault(path, f"its name says part {number} of {count}, but the limit is {MOST_PARTS} parts; rename it")
    paths = [path.with_name(f"{stem}-{part:05d}-of-{match[3]}.gguf") for part in range(1, count + 1)]
    if missing := [part for part in paths if not part.is_file()]:
        description = f"{len(missing)} of {count} parts are missing, first {missing[0].name}; download the whole set"
        raise fault(path, description, MissingWeightsError)
    return paths


def companion(path: Path, prefix: str) -> Path | None:
    """The largest file beside a model's file whose name is `prefix` and the model's, in any quantisation.

    So llama.cpp names them: mtp-NAME-Q8_0.gguf belongs to NAME-Q4_K_M.gguf.
    """
    with reading(path):
        named = [file for file in path.parent.glob(f"{prefix}*.gguf") if file.is_file()]
        files = [file for file in named if _model_name(file.name.removeprefix(prefix)) == _model_name(path.name)]
        return max(files, key=lambda file: file.stat().st_size, default=None)


def _model_name(file_name: str) -> str:
    """A file's name without its part, its quantisation and .gguf, in small letters."""
    name = _PART.sub(r"\1", file_name).removesuffix(".gguf")
    last = max((match.start() for match in _QUANTISATION.finditer(name) if match.end() == len(name)), default=None)
    return name[:last].lower()


# ------------------------------------------------------------------------------------------------------------ a header


def _read_header(path: Path, *, headers_only: bool) -> GgufModel:
    """The model in one file, which may be a part of a split set."""
    with reading(path), open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        cursor = _Cursor(path, file, min(file_bytes, MOST_HEADER_BYTES))
        num_tensors, num_keys = _read_start(cursor, file_bytes)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string(MOST_NAME_BYTES)
            if key in metadata:
                cursor.refuse(f"has the key {show(key)} twice")
            metadata[key] = _read_value(cursor, cursor.number("I"), key)
        described = [_read_description(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not is_number or not 1 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        cursor.refuse(f"has general.alignment {show(alignment)}, which is not a power of two up to {MOST_ALIGNMENT}")
    alignment = int(alignment)
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for tensor in described:
        if tensor.name in tensors:
            cursor.refuse(f"has the tensor {show(tensor.name)} twice")
        if tensor.offset % alignment:
            cursor.refuse(f"tensor {show(tensor.name)} begins at {tensor.offset}, not a multiple of {alignment}")
        tensors[tensor.name] = replace(tensor, offset=start + tensor.offset)
    _check_layout(cursor, tensors.values(), None if headers_only else file_bytes)
    return GgufModel(path, metadata, tensors)


class _Cursor:
    """A read position in a header. It reads and allocates nothing beyond `end`."""

    def __init__(self, path: Path, file: BinaryIO, end: int) -> None:
        self.path, self.at, self._file, self._end = path, 0, file, end
        self._values_left = MOST_VALUES

    def refuse(self, problem: str) -> NoReturn:
        raise fault(self.path, f"{problem}; {_AGAIN}")

    def bytes(self, count: int) -> bytes:
        if count > self._end - self.at:
            self.refuse(f"needs {count} bytes at {self.at}, but its header ends at {self._end} at the latest")
        content = self._file.read(count)
        if len(content) < count:
            self.refuse(f"ends at {self.at + len(content)}, inside its header")
        self.at += count
        return content

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.bytes(struct.calcsize("<" + kind)))[0]

    def numbers(self, kind: str, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}{kind}", self.bytes(count * struct.calcsize("<" + kind))))

    def count_values(self, count: int) -> None:
        """Count the values of an array before it is read; raises CheckpointError beyond the limit."""
        self._values_left -= count
        if self._values_left < 0:
            self.refuse(f"has arrays with more than {MOST_VALUES} values, more than any model needs")

    def string(self, most: int = MOST_STRING_BYTES) -> str:
        length = self.number("Q")
        if length > most:
            self.refuse(f"has a string of {length} bytes at {self.at}, but the limit is {most}")
        return self.bytes(length).decode("utf-8", "surrogateescape")


def _read_start(cursor: _Cursor, file_bytes: int) -> tuple[int, int]:
    """The numbers of tensors and of keys."""
    if (magic := cursor.bytes(min(len(MAGIC), file_bytes))) != MAGIC:
        if magic == b"vers":
            description = "is a git-lfs pointer, not the weights; run `git lfs pull` in its folder"
            raise fault(cursor.path, description, MissingWeightsError)
        raise fault(cursor.path, f"is not a GGUF file: it begins with {show(magic)}; download it again")
    version = cursor.number("I")
    if version not in VERSIONS:
        description = f"has GGUF version {version}, but only {VERSIONS} are supported"
        if version and version % 2**16 == 0:
            description = "is big-endian"
        remedy = "convert the model again with a current llama.cpp on a little-endian machine"
        raise fault(cursor.path, f"{description}; {remedy}")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    if num_tensors > MOST_TENSORS or num_keys > MOST_KEYS:
        cursor.refuse(f"declares {num_tensors} tensors and {num_keys} keys, more than any model has")
    return num_tensors, num_keys


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind])
    if kind != _ARRAY:
        cursor.refuse(f"key {show(key)} has a value of type {kind}, which GGUF does not define")
    item_kind, count = cursor.number("I"), cursor.number("Q")
    cursor.count_values(count)
    if item_kind == _STRING:
        return [cursor.string() for _ in range(count)]
    if item_kind in _NUMBERS:
        return cursor.numbers(_NUMBERS[item_kind], count)
    return cursor.refuse(f"key {show(key)} is an array of type {item_kind}, which is not supported")


def _read_description(cursor: _Cursor) -> TensorInfo:
    """A tensor, with its offset from the end of the header."""
    name = cursor.string(MOST_NAME_BYTES)

    def refuse(problem: str) -> NoReturn:
        cursor.refuse(f"tensor {show(name)} {problem}")

    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= MOST_DIMENSIONS:
        refuse(f"has {num_dimensions} dimensions")
    sizes = cursor.numbers("Q", num_dimensions)
    if not all(sizes) or math.prod(sizes) > MOST_ELEMENTS:
        refuse(f"has the sizes {sizes}")
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in GGUF_TYPES:
        supported = ", ".join(ggml_type.name for ggml_type in GGUF_TYPES.values())
        description = f"tensor {show(name)} has ggml type {number}, which is not supported; supported: {supported}"
        raise fault(cursor.path, description)
    kind = GGUF_TYPES[number]
    if sizes[0] % kind.num_weights:
        refuse(f"has rows of {sizes[0]} weights, but {kind.name} needs multiples of {kind.num_weights}")
    nbytes = math.prod(sizes) // kind.num_weights * kind.num_bytes
    return TensorInfo(name, kind.name, tuple(reversed(sizes)), cursor.path, offset, nbytes)


def _check_layout(cursor: _Cursor, tensors: Iterable[TensorInfo], file_bytes: int | None) -> None:
    """Raises CheckpointError if tensors overlap, or end after `file_bytes` (unless None)."""
    end = 0
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset < end:
            cursor.refuse(f"tensor {show(info.name)} overlaps the previous one")
        end = info.offset + info.nbytes
    if file_bytes is not None and end > file_bytes:
        description = f"truncated: its tensors end at byte {end}, but the file has {file_bytes}"
        raise fault(cursor.path, f"{description}; download it again")
