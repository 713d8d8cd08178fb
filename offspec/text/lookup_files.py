"""A user's text files as an index for retrieval (`--lookup-files`): tokenised and sorted once, then mapped from a cache.

The cache holds one file for the same paths and tokenizer; its name tells the content, so that it is made anew when a file
changes. Knows nothing of how guesses are made of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import numpy.typing as npt

from offspec.loaders.tiers import Progress
from offspec.scheduler.lookup import NOTHING
from offspec.scheduler.retrieval import SuffixIndex, build_index

from ..errors import StorageError, UsageError
from .tokenizer import Tokenizer

PIECE_CHARACTERS = 1 << 20  # tokenised together
_MAX_TOKENS = 1 << 31  # places are int32
_LAYOUT = b"offspec lookup 1"  # of the cached file: int32 [2, N], tokens and order


def default_folder() -> Path:
    """Where indices are kept: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offspec" / "lookup"


def open_index(
    files: Sequence[str | Path], tokenizer: Tokenizer, folder: Path | None = None, progress: Progress | None = None
) -> SuffixIndex:
    """The index of these text files, mapped from `folder`; built first where they or the tokenizer are new or changed.

    Building holds the token ids (4 bytes each) and some 200 MB. progress(bytes_done, bytes_total) follows it.
    Raises UsageError for a file that is missing, unreadable, empty or not UTF-8 text, StorageError where the index
    cannot be written.
    """
    if not files:
        raise UsageError("no files to look up in; give at least one text file")
    folder, paths = folder or default_folder(), [Path(file) for file in files]
    owner, content = _fingerprints(paths, tokenizer)
    file = folder / f"{owner}-{content}.npy"
    if (index := _opened(file)) is not None:
        return index
    tokens = _tokens(paths, tokenizer, progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, tokens)
        for former in folder.glob(f"{owner}-*.npy"):
            if former != file:
                with suppress(OSError):  # another process on Windows may have it mapped
                    former.unlink()
    except OSError as exc:
        raise StorageError(
            f"the lookup index cannot be written to {folder} ({exc.strerror or exc}); "
            "make room there, or set XDG_CACHE_HOME to another folder"
        ) from exc
    index = _opened(file)
    if index is None:
        raise StorageError(f"the lookup index {file} cannot be read back; check the disk")
    return index


def _fingerprints(files: Sequence[Path], tokenizer: Tokenizer) -> tuple[str, str]:
    """Two short hashes: of the paths and the tokenizer, and of the content."""
    owner = hashlib.blake2b(_LAYOUT + tokenizer.fingerprint, digest_size=8)
    content = hashlib.blake2b(digest_size=16)
    for file in files:
        owner.update(os.fsencode(file.resolve()) + b"\0")
        try:
            with file.open("rb") as opened:
                while block := opened.read(PIECE_CHARACTERS):
                    content.update(block)
        except OSError as exc:
            raise _unreadable(file, exc) from exc
        content.update(b"\0end")  # so that where one file ends counts
    return owner.hexdigest(), content.hexdigest()


def _unreadable(file: Path, exc: OSError) -> UsageError:
    if isinstance(exc, FileNotFoundError):
        return UsageError(f"lookup file {file} does not exist; check the path")
    if isinstance(exc, IsADirectoryError):
        return UsageError(f"lookup file {file} is a folder; give the text files in it")
    return UsageError(f"lookup file {file} cannot be read ({exc.strerror or exc}); check its permissions")


def _opened(file: Path) -> SuffixIndex | None:
    """The index in a cached file; None where there is none, or a damaged one."""
    try:
        arrays = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if arrays.dtype != np.int32 or arrays.ndim != 2 or len(arrays) != 2:
        return None
    return SuffixIndex(arrays[0], arrays[1])


def _tokens(files: Sequence[Path], tokenizer: Tokenizer, progress: Progress | None) -> npt.NDArray[np.int32]:
    """Token ids of all files, NOTHING behind each."""
    total, done = sum(file.stat().st_size for file in files), 0
    parts: list[npt.NDArray[np.int32]] = []
    for file in files:
        for piece in _pieces(file):
            parts.append(np.array(tokenizer.encode(piece, add_special_tokens=False), dtype=np.int32))
            done += len(piece.encode())
            if progress is not None:
                progress(done, total)
        parts.append(np.array([NOTHING], dtype=np.int32))
    if (num_tokens := sum(map(len, parts))) >= _MAX_TOKENS:
        raise UsageError(f"the lookup files have {num_tokens} tokens, and an index takes 2**31 - 1; give fewer files")
    return np.concatenate(parts)


def _pieces(file: Path) -> Iterator[str]:
    """A text file in pieces of some PIECE_CHARACTERS, cut behind a line's end where there is one."""
    is_empty = True
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            while piece := opened.read(PIECE_CHARACTERS) + opened.readline(PIECE_CHARACTERS):
                if "\0" in piece:
                    raise UsageError(f"lookup file {file} is binary, not text; give text files")
                is_empty = False
                yield piece
    except UnicodeDecodeError as exc:
        raise UsageError(f"lookup file {file} is not UTF-8 text; convert it, or leave it out") from exc
    except OSError as exc:
        raise _unreadable(file, exc) from exc
    if is_empty:
        raise UsageError(f"lookup file {file} is empty; leave it out")


def _write(file: Path, tokens: npt.NDArray[np.int32]) -> None:
    """Build the index in a file of its own, which takes its name when it is complete."""
    with NamedTemporaryFile(dir=file.parent, prefix=".building-", delete=False) as made:
        building = Path(made.name)
    try:
        shape = (2, len(tokens))
        arrays = np.lib.format.open_memmap(building, mode="w+", dtype=np.int32, shape=shape)
        arrays[0] = tokens
        build_index(arrays[0], arrays[1])
        arrays.flush()
        del arrays
        building.replace(file)
    finally:
        building.unlink(missing_ok=True)
