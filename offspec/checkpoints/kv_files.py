"""Files of a text's first KV entries: its tokens and what the caches of target and draft store of them.

A file is safetensors: the tokens, each cache's `SequenceCache.stored`, checksums of the header and of each tensor. Its
metadata say for which model, dtype and KV format the entries are. Files are untrusted: headers are checked before use,
only tensors of the expected sizes are read, and entries count only when all checksums are right. This module does not
know engines.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offspec.loaders.files.checkpoint import TensorInfo, show, without_remedy
from offspec.loaders.files.os_errors import cannot_write
from offspec.loaders.files.records import FLOAT_DTYPES
from offspec.loaders.files.safetensors_folder import read_header
from offspec.loaders.files.shards import ShardPiece, header
from offspec.loaders.files.small_files import open_regular
from offspec.loaders.units import format_size

from ..errors import CheckpointError, StorageError, UsageError
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.exactness import arithmetic_of
from ..model.memory.sequence_cache import SequenceCache
from .atomic_files import OTHER_FILE, writing_whole
from .model_files import ModelFiles

FORMAT = "offspec KV entries 3"
SIGNATURE = b'{"__metadata__":{"format":"offspec KV entries '  # of all versions, behind the header's length
TOKENS, CHECKSUMS = "tokens", "checksums"
DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
DTYPE_NAMES |= {torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32"}
SAMPLED_BYTES = 4096  # of each stored tensor of a model
DISK_SHARE = 2  # a file may take 1/DISK_SHARE of the free disk space
Ids = NDArray[np.int64]


def model_identity(model: ModelFiles, config: ModelConfig) -> str:
    """32 hex digits for a model whose KV entries are interchangeable: config, and a sample of every weight.

    config: as the decoder uses it; LongRoPE's depends on the context. The files' sizes and times count as well, so that
    a change between the samples is noticed, and a copy with another time is another model. Raises CheckpointError.
    """
    digest = sha256(json.dumps(asdict(config), sort_keys=True, default=str).encode())
    by_file: dict[Path, list[TensorInfo]] = {}
    for _, weight in sorted(model.stored.by_name.items()):
        for info in weight.streamed:
            by_file.setdefault(info.path, []).append(info)
    for path, infos in by_file.items():
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
                for info in infos:
                    file.seek(info.offset)
                    sample = file.read(min(SAMPLED_BYTES, info.nbytes))
                    digest.update(f"{info.name} {info.dtype} {info.shape} {info.change}".encode() + sample)
        except OSError as exc:
            raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from exc
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Owner:
    """What a cache's entries depend on, beside the tokens: files with entries of others are not read.

    model: `model_identity`. dtype, arithmetic: `exactness.arithmetic_of`. form: `SequenceCache.format`.
    """

    model: str
    dtype: str
    arithmetic: str
    form: str

    @classmethod
    def of(cls, model: str, decoder: Decoder, cache: SequenceCache) -> Owner:
        return cls(model, str(decoder.dtype).removeprefix("torch."), arithmetic_of(decoder), cache.format)

    def check(self, other: Owner, path: Path) -> None:
        """Raises CheckpointError, which says what differs, unless `other`, of the file, is the same."""
        for property_name, mine, theirs in (
            ("model", self.model, other.model),
            ("dtype", self.dtype, other.dtype),
            ("arithmetic", self.arithmetic, other.arithmetic),
            ("KV format", self.form, other.form),
        ):
            if mine != theirs:
                difference = "" if property_name == "model" else f" ({show(theirs)}, and this one has {mine})"
                raise CheckpointError(f"{path} has KV entries of another {property_name}{difference}")


@dataclass(frozen=True)
class CachePart:
    """One cache's entries to write: the first `length` ones."""

    owner: Owner
    cache: SequenceCache
    length: int

    def pieces(self, name: str) -> list[ShardPiece]:
        return [
            ShardPiece(f"{name}.{index}", DTYPE_NAMES[view.dtype], tuple(view.shape), partial(_chunks, view))
            for index, view in enumerate(self.cache.stored(self.length))
        ]


def _chunks(view: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor [..., end, width], slot by slot for each of the other dimensions."""
    for place in np.ndindex(*view.shape[:-2]):
        yield _bytes(view[place])


def _bytes(block: Tensor) -> memoryview:
    return block.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


def write_kv_file(path: Path, tokens: Sequence[int], parts: Mapping[str, CachePart]) -> int:
    """Write tokens and entries to `path`, whole or not at all; returns the file's bytes.

    parts: by name, "target" among them. Raises StorageError, also if the file would take more than 1/DISK_SHARE of the
    free disk space; UsageError while another process writes it.
    """
    ids = torch.tensor([list(tokens)])
    pieces = [ShardPiece(TOKENS, "I64", (len(tokens),), lambda: [_bytes(ids)])]
    metadata = {"format": FORMAT}
    for name, part in parts.items():
        pieces += part.pieces(name)
        metadata |= {f"{name}.{key}": value for key, value in asdict(part.owner).items()}
        metadata[f"{name}.length"] = str(part.length)
    ends = ShardPiece(CHECKSUMS, "U8", (4 * (1 + len(pieces)),), tuple)
    head = header([*pieces, ends], metadata)
    nbytes = len(head) + sum(piece.nbytes for piece in (*pieces, ends))
    if nbytes * DISK_SHARE > (free := free_disk_bytes(path)):
        raise StorageError(
            f"{path} would take {format_size(nbytes)}, and its disk has {format_size(free)} free; free some space, or "
            "choose a file on another disk"
        )
    with writing_whole(path, f"another process writes {path}; wait until it ends, or choose another file") as file:
        checksums = [zlib.crc32(head)]
        file.write(head)
        for piece in pieces:
            checksums.append(0)
            for chunk in piece.chunks():
                file.write(chunk)
                checksums[-1] = zlib.crc32(chunk, checksums[-1])
        file.write(np.array(checksums, dtype="<u4").tobytes())
    return nbytes


def free_disk_bytes(path: Path) -> int:
    """Free bytes of the disk that `path` is on. Raises StorageError if its folder does not exist."""
    try:
        return shutil.disk_usage(path.absolute().parent).free
    except OSError as exc:
        raise cannot_write(path, exc, OTHER_FILE) from exc


def check_replaceable(path: Path) -> None:
    """Raises UsageError if `path` is a file of something else, which must not be overwritten."""
    if not os.path.lexists(path):
        return
    try:
        with open_regular(path) as file:
            start = file.read(8 + len(SIGNATURE))
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}; choose another file") from exc
    if start and not start[8:] == SIGNATURE:
        raise UsageError(f"{path} has no KV entries, and is not overwritten; choose another file, or delete it")


@dataclass(frozen=True)
class KVFile:
    """A file whose header is that of KV entries, and its tokens.

    owners, lengths: of each part, by name. infos, checksums: of each tensor, by name.
    """

    path: Path
    tokens: Ids
    owners: Mapping[str, Owner]
    lengths: Mapping[str, int]
    infos: Mapping[str, TensorInfo]
    checksums: Mapping[str, int]

    @classmethod
    def open(cls, path: Path, most_tokens: int, vocab_size: int) -> KVFile:
        """Read header and tokens. most_tokens: refuse longer texts. Raises CheckpointError."""
        try:
            infos = read_header(path)  # refuses files for which safe_open would block or use much memory
        except CheckpointError as exc:
            raise CheckpointError(without_remedy(exc)) from exc  # nobody can download it again
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            with open_regular(path) as file:
                if metadata.get("format") != FORMAT:
                    raise CheckpointError(
                        f"{path} is not of this format of KV entries ({show(metadata.get('format'))})"
                    )
                checksums = _checksums(path, file, infos)
                info = infos.get(TOKENS)
                if info is None or info.dtype != "I64" or len(info.shape) != 1 or not 0 < info.shape[0] <= most_tokens:
                    raise CheckpointError(f"{path} has no tokens, or more than the context of {most_tokens}")
                file.seek(info.offset)
                content = _exactly(file, info.nbytes, info.path)
                if zlib.crc32(content) != checksums[info.name]:
                    raise CheckpointError(f"{info.path} is damaged: the checksum of its tokens is wrong")
                tokens = np.frombuffer(content, dtype="<i8").astype(np.int64)
                if tokens.min() < 0 or tokens.max() >= vocab_size:
                    raise CheckpointError(f"{path} has tokens that the model does not have")
                names = [key.removesuffix(".length") for key in metadata if key.endswith(".length")]
                owners = {
                    name: Owner(*(metadata.get(f"{name}.{key}", "") for key in Owner.__annotations__)) for name in names
                }
                lengths = {name: _length(metadata[f"{name}.length"], len(tokens), path) for name in names}
                return cls(path, tokens, owners, lengths, infos, checksums)
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"{path} cannot be read: {exc}") from exc

    def load(self, caches: Mapping[str, SequenceCache], length: int) -> None:
        """Put the first entries, at most `length`, into these empty caches, by their parts' names.

        Raises CheckpointError for a damaged file; the caches stay empty then.
        """
        views, numbers = dict[str, Tensor](), dict[str, int]()
        for name, cache in caches.items():
            is_whole = cache.least_cut(self.lengths[name]) > 0
            numbers[name] = number = self.lengths[name] if is_whole else min(length, self.lengths[name])
            cache.reserve(number)
            stored = cache.stored(number)
            for index, view in enumerate(stored):
                # A whole view is of all tokens; another one of as many slots as are read, of those in the file.
                slots = (*view.shape[:-2], self.lengths[name], view.shape[-1])
                info = self.infos.get(f"{name}.{index}")
                shape = tuple(view.shape) if is_whole else slots
                if info is None or (info.dtype, info.shape) != (DTYPE_NAMES[view.dtype], shape):
                    raise CheckpointError(f"{self.path} is damaged: the shapes of its entries are not the model's")
                views[info.name] = view
        try:
            with open_regular(self.path) as file:
                for name, view in views.items():
                    self._read_entries(file, self.infos[name], view)
        except OSError as exc:
            raise CheckpointError(f"{self.path} cannot be read: {exc.strerror}") from exc
        for name, cache in caches.items():
            cache.begin(numbers[name])
            cache.truncate(min(length, numbers[name]))

    @torch.inference_mode()
    def _read_entries(self, file: BinaryIO, info: TensorInfo, view: Tensor) -> None:
        """Fill a tensor [..., end, width] with the first slots of a tensor of the file."""
        file.seek(info.offset)
        slots, width = info.shape[-2:]
        size, checksum = slots * width * view.element_size(), 0
        for place in np.ndindex(*info.shape[:-2]):
            block = _exactly(file, size, self.path)
            checksum = zlib.crc32(block, checksum)
            numbers = torch.frombuffer(block, dtype=view.dtype).view(slots, width)
            if view.dtype.is_floating_point and not numbers.isfinite().all():
                raise CheckpointError(f"{self.path} is damaged: it has entries that are not numbers")
            view[place].copy_(numbers[: view.shape[-2]])
        if checksum != self.checksums[info.name]:
            raise CheckpointError(f"{self.path} is damaged: the checksum of its entries is wrong")


def _checksums(path: Path, file: BinaryIO, infos: Mapping[str, TensorInfo]) -> dict[str, int]:
    """The checksum of each tensor, by name, from a file whose header has the right one. Raises CheckpointError."""
    *parts, ends = sorted(infos.values(), key=lambda info: info.offset)
    if ends.name != CHECKSUMS or (ends.dtype, ends.shape) != ("U8", (4 * (1 + len(parts)),)):
        raise CheckpointError(f"{path} is damaged: it has no checksums")
    file.seek(ends.offset)
    checksums = np.frombuffer(_exactly(file, ends.nbytes, path), dtype="<u4").tolist()
    file.seek(0)
    if zlib.crc32(_exactly(file, parts[0].offset if parts else ends.offset, path)) != checksums[0]:
        raise CheckpointError(f"{path} is damaged: the checksum of its header is wrong")
    return {info.name: checksum for info, checksum in zip(parts, checksums[1:], strict=True)}


def _exactly(file: BinaryIO, count: int, path: Path) -> bytearray:
    content = bytearray(count)
    if file.readinto(content) != count:  # type: ignore[attr-defined]
        raise CheckpointError(f"{path} is truncated")
    return content


def _length(text: str, most: int, path: Path) -> int:
    if not (text.isdecimal() and len(text) < 10 and 0 < int(text) <= most):
        raise CheckpointError(f"{path} is damaged: it has {show(text)} entries for {most} tokens")
    return int(text)
