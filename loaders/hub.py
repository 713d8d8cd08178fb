"""Finds a model: a local folder or file, or a hub id, whose files are downloaded where they are not cached.

A hub id is `org/name`, or `org/name:Q4_K_M` for the GGUF file in that quantisation, as llama.cpp writes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from itertools import product
from pathlib import Path

from platformdirs import user_cache_path

from offspec.errors import CheckpointError

from .checkpoint import fault, reading, show
from .containers import is_checkpoint
from .gguf_file import part_paths
from .safetensors_folder import COMPANIONS, CONFIG_FILE, INDEX_FILE, SINGLE_FILE, shard_names, why_no_folder
from .shards import write_verified

HEADER_BYTES = 32 * 2**20  # of a GGUF file; vocabularies of 260,000 tokens with as many merges take 12 MiB
_AROUND = ("", "*[-._/]"), ("", "[-.]*")  # a word in a file's name, as patterns of fnmatch; see `_named_as`
_HUB_ID = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::([A-Za-z0-9_.-]+))?")
NOT_HERE = "there is no folder or file of that name"


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The path of a local checkpoint, or the folder of a hub id ("org/name"), downloaded where it is not cached.

    From the hub come safetensors folders, and of weights only those that are read; what else a repository holds may be
    as large again.
    weights=False: only the JSON files, which are small, are downloaded, or the beginnings of GGUF files.
    `revision` (branch, tag or commit) is for hub ids; a folder has none. Raises CheckpointError.
    """
    local = _local(model)
    if local is not None:
        return local
    if (match := _HUB_ID.fullmatch(model)) is None:
        raise CheckpointError(
            f"{show(model)}: no such folder or file; give a local one, or a hub id of the form org/name or "
            "org/name:Q4_K_M"
        )
    if match[2]:
        download = _download_gguf if weights else _download_headers
        return _the_file_in(match[2], download(match[1], match[2], revision), match[1])
    if not weights:
        return _download(model, revision, (CONFIG_FILE, INDEX_FILE))
    files = (CONFIG_FILE, *COMPANIONS, SINGLE_FILE, INDEX_FILE)
    folder = _download(model, revision, files)
    shards = shard_names(folder)  # whatever they are called
    return _download(model, revision, (*files, *map(escape, shards))) if shards else folder


def _download_gguf(repository: str, quantisation: str, revision: str | None) -> Path:
    """The folder of a repository whose GGUF files in this quantisation were downloaded, and no others: F16 is a part
    of the name of BF16, and Q4_K of that of Q4_K_M. mmproj files have no language model in them.
    """
    spellings = sorted({quantisation, quantisation.upper(), quantisation.lower()})
    words = [f"{before}{spelling}{after}" for spelling in spellings for before, after in product(*_AROUND)]
    return _download(repository, revision, [f"{word}.gguf" for word in words], ignored=["*mmproj*"])


def _download_headers(repository: str, quantisation: str, revision: str | None) -> Path:
    """A folder with the beginnings of these files, which are enough to plan with. Kept in the user's cache by commit.

    Raises StorageError where they cannot be kept.
    """
    from huggingface_hub import HfApi, HfFileSystem

    with _hub_errors(repository, revision):
        info = HfApi().model_info(repository, revision=revision)
        names = [file.rfilename for file in info.siblings or ()]
    folder = user_cache_path("offspec", appauthor=False) / "headers" / repository.replace("/", "--") / str(info.sha)
    for name in filter(_named_as(quantisation).fullmatch, names):
        target = folder / name
        if not target.is_file():
            with _hub_errors(repository, revision):
                content = HfFileSystem().read_block(f"{repository}@{info.sha}/{name}", 0, HEADER_BYTES)
            write_verified(target, [memoryview(content)])
    return folder


def _named_as(quantisation: str) -> re.Pattern[str]:
    """Names of files that have the quantisation in them as a word."""
    return re.compile(rf"(.*[-._/])?{re.escape(quantisation)}([-.].*)?\.gguf", re.IGNORECASE | re.DOTALL)


def _the_file_in(quantisation: str, folder: Path, repository: str) -> Path:
    """The file in this quantisation, the first of a split set. Raises CheckpointError where it is none or several."""
    names = {file: str(file.relative_to(folder)) for file in sorted(folder.rglob("*.gguf"))}
    named = [file for file, name in names.items() if _named_as(quantisation).fullmatch(name)]
    firsts = [file for file in named if part_paths(file)[0] == file and not file.name.startswith("mmproj")]
    if not firsts:
        what = f"has no GGUF file in {quantisation}; look at its files on the hub, and name a quantisation that it has"
        raise CheckpointError(f"{repository}: {what}")
    if len(firsts) > 1:
        several = ", ".join(show(names[file]) for file in firsts[:8])
        raise CheckpointError(
            f"{repository}:{quantisation}: {len(firsts)} files are called so ({several}); give a path"
        )
    return firsts[0]


def _local(model: str) -> Path | None:
    if not model:  # Path("") would be the current folder
        return None
    path = Path(os.path.expanduser(model))
    with reading(path):
        if path.is_dir() or (path.exists() and is_checkpoint(path)):
            return path
        if path.exists():
            raise fault(path, why_no_folder(path))
    return None


def _download(model: str, revision: str | None, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(model, revision):
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(ignored))
        )


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Says in one line what went wrong. Raises CheckpointError."""
    try:
        yield
    # Everything: the library's transport (requests, httpx, httpx2) and its errors' base class changed from one major
    # version to the next, and a lost connection must not be a traceback.
    except Exception as exc:
        raise CheckpointError(_explain_hub_error(model, revision, exc)) from exc


def _explain_hub_error(model: str, revision: str | None, exc: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(exc, errors.GatedRepoError):  # a RepositoryNotFoundError too, so it comes first
        page = f"https://huggingface.co/{model}"
        return f"{model}: gated on the hub; accept its terms at {page} and set HF_TOKEN to a token of that account"
    if isinstance(exc, errors.RepositoryNotFoundError):
        return f"{model}: neither a folder here nor a model on the hub; check the name, or set HF_TOKEN if private"
    if isinstance(exc, errors.RevisionNotFoundError):
        return f"{model}: no revision {show(revision or 'main')} on the hub; name a branch, tag or commit that it has"
    if isinstance(exc, errors.HFValidationError):
        return f"{model}: no such folder, and not a valid hub id ({_first_line(exc)}); check the name"
    if isinstance(exc, errors.OfflineModeIsEnabled) or isinstance(exc.__cause__, errors.OfflineModeIsEnabled):
        cache = "the local hub cache does not have all of it, and HF_HUB_OFFLINE forbids downloads"
        return f"{model}: {NOT_HERE}; {cache}: check the path, or unset HF_HUB_OFFLINE once"
    if isinstance(exc, errors.LocalEntryNotFoundError):
        reason = _first_line(exc.__cause__ or exc)
        return f"{model}: {NOT_HERE}, and the hub cannot be reached ({reason}); check the path or the network"
    failed = f"the download failed ({_first_line(exc)})"
    return f"{model}: {NOT_HERE}, and {failed}; try again, files that are complete are kept"


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[0]}" if lines else type(exc).__name__
