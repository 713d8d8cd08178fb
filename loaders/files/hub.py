"""Finds a model: a local folder or file, or a hub id, whose files are downloaded unless they are cached.

A hub id is `org/name`, or `org/name:Q4_K_M` for the GGUF file in that quantisation, as in llama.cpp. `org/name@REV`
and `org/name@REV:Q4_K_M` name a branch, tag or commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from itertools import product
from pathlib import Path

from offspec.errors import CheckpointError
from offspec.user_folders import expand_home, user_folder

from .checkpoint import fault, reading, show
from .containers import is_checkpoint
from .gguf_file import BESIDE_MODELS, has_header, part_paths
from .mistral_folder import FILES as MISTRAL_FILES
from .mistral_folder import PARAMS_FILE
from .safetensors_folder import COMPANIONS, CONFIG_FILE, INDEX_FILE, SINGLE_FILE, shard_names, why_no_folder
from .shards import write_verified

HEADER_BYTES = 32 * 2**20  # of a GGUF file; vocabularies of 260,000 tokens with as many merges have 12 MiB
_AROUND = ("", "*[-._/]"), ("", "[-.]*")  # a word in a file's name, as patterns of fnmatch; see `_named_as`
_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
_HUB_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9_./-]+))?(?::([A-Za-z0-9_.-]+))?")
NOT_HERE = "no folder or file has that name"


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The path of a local checkpoint, or the folder of a hub id ("org/name"), downloaded unless it is cached.

    Of a hub repository, only the needed weights are downloaded, because other files may double the size.
    weights=False: download only the small JSON files, or the headers of GGUF files.
    revision: branch, tag or commit of a hub id that names none. Raises CheckpointError.
    """
    local = _local(model)
    if local is not None:
        return local
    if (match := _HUB_ID.fullmatch(model)) is None:
        raise CheckpointError(
            f"{show(model)}: no such folder or file; give a local path, or a hub id of the form org/name, "
            "org/name@REVISION or org/name:Q4_K_M"
        )
    repository, revision, quantisation = match[1], match[2] or revision, match[3]
    if quantisation:
        download = _download_gguf if weights else _download_headers
        return _the_file_in(quantisation, download(repository, quantisation, revision), repository)
    if not weights:
        return _download(repository, revision, (CONFIG_FILE, INDEX_FILE, PARAMS_FILE))
    files = (CONFIG_FILE, *COMPANIONS, SINGLE_FILE, INDEX_FILE, PARAMS_FILE)
    folder = _download(repository, revision, files)
    if (folder / PARAMS_FILE).is_file() and not (folder / CONFIG_FILE).exists():
        return _download(repository, revision, (*COMPANIONS, *MISTRAL_FILES))
    shards = shard_names(folder)  # their names may be arbitrary
    return _download(repository, revision, (*files, *map(escape, shards))) if shards else folder


def resolve_files(model: str, names: Sequence[str]) -> Path:
    """The path of a local folder, or the folder of a hub id with these of its files. Raises CheckpointError."""
    if (local := _local(model)) is not None:
        return local
    repository, _, revision = model.partition("@")
    return _download(repository, revision or None, names)


def _download_gguf(repository: str, quantisation: str, revision: str | None) -> Path:
    """Download a repository's GGUF files in exactly this quantisation; returns the folder. F16 must not match BF16, nor
    Q4_K match Q4_K_M. mmproj files contain no language model.
    """
    spellings = sorted({quantisation, quantisation.upper(), quantisation.lower()})
    words = [f"{before}{spelling}{after}" for spelling in spellings for before, after in product(*_AROUND)]
    return _download(repository, revision, [f"{word}.gguf" for word in words], ignored=["*mmproj*"])


def _download_headers(repository: str, quantisation: str, revision: str | None) -> Path:
    """A folder with the headers of these files, which suffice for a plan. The user's cache keeps them by commit.

    Raises StorageError if they cannot be written.
    """
    from huggingface_hub import HfApi, HfFileSystem

    with _hub_errors(repository, revision):
        info = HfApi().model_info(repository, revision=revision)
        names = [file.rfilename for file in info.siblings or ()]
    folder = user_folder("cache") / "headers" / repository.replace("/", "--") / str(info.sha)
    for name in filter(_named_as(quantisation).fullmatch, names):
        target = folder / name
        if not has_header(target):
            with _hub_errors(repository, revision):
                content = HfFileSystem().read_block(f"{repository}@{info.sha}/{name}", 0, HEADER_BYTES)
            write_verified(target, [memoryview(content)])
    return folder


def _named_as(quantisation: str) -> re.Pattern[str]:
    """A pattern for names of GGUF files that contain the quantisation as a word."""
    return re.compile(rf"(.*[-._/])?{re.escape(quantisation)}([-.].*)?\.gguf", re.IGNORECASE | re.DOTALL)


def _the_file_in(quantisation: str, folder: Path, repository: str) -> Path:
    """The file in this quantisation, or the first of a split set. Raises CheckpointError for none or several."""
    names = {file: str(file.relative_to(folder)) for file in sorted(folder.rglob("*.gguf"))}
    named = [file for file, name in names.items() if _named_as(quantisation).fullmatch(name)]
    firsts = [file for file in named if part_paths(file)[0] == file and not file.name.startswith(BESIDE_MODELS)]
    if not firsts:
        description = (
            f"has no GGUF file in {quantisation}; choose a quantisation from the repository's files on the hub"
        )
        raise CheckpointError(f"{repository}: {description}")
    if len(firsts) > 1:
        several = ", ".join(show(names[file]) for file in firsts[:8])
        raise CheckpointError(f"{repository}:{quantisation}: {len(firsts)} files match ({several}); give a path")
    return firsts[0]


def _local(model: str) -> Path | None:
    if not model:  # Path("") would be the current folder
        return None
    path = expand_home(model)
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
    """Turn an exception in the body into a one-line CheckpointError."""
    try:
        yield
    # All exceptions: the library's transport (requests, httpx, httpx2) and the base class of its errors differ between
    # major versions, and a lost connection must not end in a traceback.
    except Exception as exc:
        raise CheckpointError(_explain_hub_error(model, revision, exc)) from exc


def _explain_hub_error(model: str, revision: str | None, exc: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(exc, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError, so it comes first
        page = f"https://huggingface.co/{model}"
        return f"{model}: gated on the hub; accept its terms at {page}, and set HF_TOKEN to a token of your account"
    if isinstance(exc, errors.RepositoryNotFoundError):
        return (
            f"{model}: neither a local folder nor a model on the hub; check the name, or for a private one set HF_TOKEN"
        )
    if isinstance(exc, errors.RevisionNotFoundError):
        return f"{model}: the hub has no revision {show(revision or 'main')}; give an existing branch, tag or commit"
    if isinstance(exc, errors.HFValidationError):
        return f"{model}: no such folder, and not a valid hub id ({_first_line(exc)}); check the name"
    if isinstance(exc, errors.OfflineModeIsEnabled) or isinstance(exc.__cause__, errors.OfflineModeIsEnabled):
        cache = "the local hub cache is incomplete, and HF_HUB_OFFLINE forbids downloads"
        return f"{model}: {NOT_HERE}; {cache}: check the path, or unset HF_HUB_OFFLINE once"
    if isinstance(exc, errors.LocalEntryNotFoundError):
        reason = _first_line(exc.__cause__ or exc)
        return f"{model}: {NOT_HERE}, and the hub cannot be reached ({reason}); check the path or the network"
    failed = f"the download failed ({_first_line(exc)})"
    return f"{model}: {NOT_HERE}, and {failed}; try again: complete files are kept"


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[0]}" if lines else type(exc).__name__
