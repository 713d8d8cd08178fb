"""The index of text files for n-gram lookup (`--lookup-files`): tokenised and sorted once, then mapped from a cache.

The cache has one file for the same paths and tokenizer. The file's name has a hash of the texts, and the file has a
checksum, so the index is built again if a text changes or the file is damaged.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from offspec.loaders.files.small_files import open_regular
from offspec.loaders.units import format_size
from offspec.scheduler.guessing.lookup import NO_TOKEN
from offspec.scheduler.guessing.retrieval import SHARD_TOKENS, Retrieval, SuffixIndex, sorted_places

from ..errors import MemoryLimitError, StorageError, UsageError
from ..user_folders import home_folder
from .tokenizer import Tokenizer

LEAST_COMMON = 4  # tokens that a text has in common with a file, accepted ones and those before them, to name the file
PIECE_CHARACTERS = 1 << 17  # characters tokenised at once
_MAX_TOKENS = 1 << 31  # places are int32
_BLOCK_BYTES = 1 << 20  # bytes read at once
_TOKEN_BYTES = 4
# The cached file: magic, number of tokens N, CRC-32 of what follows; then int32 [2, N], tokens and order.
_MAGIC = b"offspec lookup 2"
_HEADER = struct.Struct("<16sqI36x")
_SORTING_BYTES = 41 + _TOKEN_BYTES  # memory of `sorted_places` per token, and the token
Tokens = npt.NDArray[np.int32]
_ENCODING_BYTES = 256 * PIECE_CHARACTERS  # memory of encoding, which the allocator keeps while shards are sorted


@dataclass(frozen=True)
class LookedUp:
    """Where accepted guesses were looked up (NEST, 2405.19325): the first num_tokens of a pass's accepted tokens.

    offset: bytes before the first of them in the file.
    """

    file: str
    offset: int
    num_tokens: int


class FileIndex(SuffixIndex):
    """An index that knows its files."""

    def __init__(
        self, tokens: Tokens, order: Tokens, files: Sequence[Path] = (), token_bytes: Mapping[int, bytes] | None = None
    ) -> None:
        """token_bytes: of the tokenizer; None if its tokens have no bytes of their own."""
        super().__init__(tokens, order)
        self._files, self._token_bytes = list(files), token_bytes
        self._ends_of_files: npt.NDArray[np.int64] | None = None

    def source(self, text: Sequence[int], accepted: Sequence[int]) -> LookedUp | None:
        """Where guesses that were accepted after `text` stand in the files; None if they have little in common.

        text: its last tokens are enough.
        """
        if not accepted or self._token_bytes is None:
            return None
        place, num_tokens, num_before = self.run_of(text, accepted, Retrieval.MAX_MATCHES)
        if not num_tokens or num_before + num_tokens < LEAST_COMMON:
            return None
        if self._ends_of_files is None:
            self._ends_of_files = np.flatnonzero(self.tokens == NO_TOKEN)
        number = int(np.searchsorted(self._ends_of_files, place))
        first = int(self._ends_of_files[number - 1]) + 1 if number else 0
        offset = sum(len(self._token_bytes.get(token, b"")) for token in self.tokens[first:place].tolist())
        return LookedUp(str(self._files[number]), offset, num_tokens)


def lookup_memory_bytes(files: Sequence[str | PathLike[str]]) -> tuple[int, int]:
    """Bytes of the mapped index of these files, and of the additional memory for building it.

    It counts a token per two bytes of text; most texts have fewer. The system can free pages of the mapped index.
    Missing files count as 0 bytes; `open_index` refuses them.
    """
    num_bytes = 0
    for file in files:
        with suppress(OSError):
            num_bytes += os.path.getsize(file)
    num_tokens = num_bytes // 2 + len(files)
    return 2 * _TOKEN_BYTES * num_tokens, _ENCODING_BYTES + _SORTING_BYTES * min(num_tokens, SHARD_TOKENS)


def open_index(
    files: Sequence[str | PathLike[str]],
    tokenizer: Tokenizer,
    folder: Path | None = None,
    free_bytes: int | None = None,
) -> FileIndex:
    """The index of these text files, mapped from `folder`. It is built first if files or tokenizer are new or changed.

    free_bytes: memory for building; None is unlimited (`lookup_memory_bytes`). Raises UsageError for a file that is
    missing, unreadable, empty or not UTF-8 text, MemoryLimitError if memory is insufficient to build it, StorageError
    if it cannot be written.
    """
    if not files:
        raise UsageError("no files for n-gram lookup; give at least one text file (`lookup_files`)")
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "offspec" / "lookup"
    paths = [Path(file) for file in files]
    owner = hashlib.blake2b(_MAGIC + tokenizer.fingerprint, digest_size=8)
    content = hashlib.blake2b(digest_size=16)
    for path in paths:
        owner.update(os.fsencode(os.path.realpath(path)) + b"\0")
        for block in _text_blocks(path):
            content.update(block)
        content.update(b"\0end")  # so that the files' ends are part of the hash
    file = folder / f"{owner.hexdigest()}-{content.hexdigest()}.index"
    if (index := _opened(file, paths, tokenizer)) is not None:
        return index
    needed = sum(lookup_memory_bytes(paths))
    if free_bytes is not None and needed > free_bytes:
        free = format_size(max(free_bytes, 0))
        raise MemoryLimitError(
            f"building the lookup index needs {format_size(needed)} of RAM, and {free} may be used; raise the limit "
            "(`ram`), use fewer files, or build it once with more RAM"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _build(file, _tokens(paths, tokenizer))
        for former in folder.glob(f"{owner.hexdigest()}-*.index"):
            if former != file:
                with suppress(OSError):  # another process on Windows may have it mapped
                    former.unlink()
    except OSError as exc:
        raise StorageError(
            f"the lookup index cannot be written to {folder} ({exc.strerror or exc}); "
            "make room there, or set XDG_CACHE_HOME to another folder"
        ) from exc
    index = _opened(file, paths, tokenizer)
    if index is None:
        raise StorageError(f"the lookup index {file} cannot be read back; check the disk")
    return index


def _text_blocks(file: Path) -> Iterator[bytes]:
    """The bytes of a text file. Raises UsageError for anything else."""
    decoder, is_empty = codecs.getincrementaldecoder("utf-8")(), True
    try:
        with open_regular(file) as opened:
            while block := opened.read(_BLOCK_BYTES):
                if b"\0" in block:
                    raise UsageError(f"lookup file {file} is binary, not text; give text files")
                decoder.decode(block)
                is_empty = False
                yield block
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as exc:
        raise UsageError(f"lookup file {file} is not UTF-8 text; convert it, or omit it") from exc
    except OSError as exc:
        raise UsageError(f"lookup file {file} cannot be read ({exc.strerror or exc}); give a text file") from exc
    if is_empty:
        raise UsageError(f"lookup file {file} is empty; omit it")


def _opened(file: Path, files: Sequence[Path], tokenizer: Tokenizer) -> FileIndex | None:
    """The index in a cached file; None if it is missing, damaged or no regular file."""
    try:
        with open_regular(file) as opened:
            magic, num_tokens, checksum = _HEADER.unpack(opened.read(_HEADER.size))
            size = _HEADER.size + 2 * _TOKEN_BYTES * num_tokens
            if magic != _MAGIC or num_tokens < 1 or os.fstat(opened.fileno()).st_size != size:
                return None
            if _checksum(opened) != checksum:
                return None
            arrays = np.memmap(opened, np.int32, "r", offset=_HEADER.size, shape=(2, num_tokens))
    except (OSError, ValueError, struct.error):
        return None
    return FileIndex(arrays[0], arrays[1], files, tokenizer.token_bytes)


def _checksum(file: BinaryIO) -> int:
    """CRC-32 of the rest of a file."""
    checksum = 0
    while block := file.read(_BLOCK_BYTES):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _tokens(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Token ids of all files, piece by piece, with NO_TOKEN after each file."""
    for file in files:
        try:
            with io.TextIOWrapper(open_regular(file), encoding="utf-8", newline="") as opened:
                # Pieces end with a line if there is one.
                while piece := opened.read(PIECE_CHARACTERS) + opened.readline(PIECE_CHARACTERS):
                    yield np.array(tokenizer.encode(piece, add_special_tokens=False), dtype=np.int32)
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(f"lookup file {file} changed while it was read ({exc}); try again") from exc
        yield np.array([NO_TOKEN], dtype=np.int32)


def _build(file: Path, tokens: Iterator[Tokens]) -> None:
    """Build the index in a temporary file, and rename it when it is complete.

    The file is written, not mapped, so that a full disk raises OSError; with a mapped file it would kill the process.
    """
    with NamedTemporaryFile(dir=file.parent, prefix=".building-", delete=False) as made:
        building = Path(made.name)
    try:
        with building.open("r+b") as opened:
            opened.write(bytes(_HEADER.size))
            num_tokens = 0
            for part in tokens:
                num_tokens += len(part)
                if num_tokens >= _MAX_TOKENS:
                    raise UsageError(
                        "the lookup files have more tokens than an index can hold, 2**31 - 1; give fewer files"
                    )
                opened.write(part.data)
            opened.flush()
            for first in range(0, num_tokens, SHARD_TOKENS):
                count, offset = min(SHARD_TOKENS, num_tokens - first), _HEADER.size + _TOKEN_BYTES * first
                places = sorted_places(np.fromfile(building, np.int32, count, offset=offset), 0, count)
                opened.write((places + np.int32(first)).data)
            opened.seek(_HEADER.size)
            checksum = _checksum(opened)
            opened.seek(0)
            opened.write(_HEADER.pack(_MAGIC, num_tokens, checksum))
            opened.flush()
            os.fsync(opened.fileno())
        building.replace(file)
    finally:
        building.unlink(missing_ok=True)
