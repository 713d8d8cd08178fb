"""Finds a checkpoint (local folder or hub id) and says which tensors lie where: headers only, each validated first.

Nothing in a file is believed before it is checked: lengths, names, types and offsets all come from strangers. Only
safetensors is read, because a pickle can run code. Knows nothing of what the tensors mean, and does not load them.
Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, then the data without holes).
"""

from __future__ import annotations

import math
import os
import re
import reprlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, TypeGuard

from offspec.errors import CheckpointError, MissingWeightsError

from .small_files import MOST_JSON_BYTES, open_regular, parse_json, read_small_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
UNFINISHED_MARKER = "offspec-quantize.json"  # in what `convert` has begun and not finished

# What belongs to a checkpoint beside weights, index and config.json: tokenizer, chat templates, the terms it is under.
COMPANIONS = (
    *("generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template*", "additional_chat_templates/*", "quantize_config.json"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
)

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

_LENGTH_BYTES = 8
_MAX_RANK = 64  # torch's own limit
_MAX_ELEMENTS = 2**60  # beyond any disk, and small enough that byte counts stay within 64 bits
_LFS_POINTER = b"version https://git-lfs"

_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")
_PICKLE_REFUSED = (
    "holds pickled weights only, which can run code and are not read; on a machine you trust convert them with "
    "transformers: AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST)"
)
_GGUF_REFUSED = "GGUF is not read; use the safetensors checkpoint that it was made from"
_NO_WEIGHTS = f"holds neither {SINGLE_FILE} nor {INDEX_FILE}; choose a model that is published as safetensors"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes from byte `offset` (absolute) of file `path`."""

    name: str
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A folder of weights whose headers have been read and found consistent; no weights are in memory."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]  # {} where the folder has none
    tensors: dict[str, TensorInfo]  # by full name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(info.nbytes for info in self.tensors.values())

    @classmethod
    def open(cls, path: Path | str, *, headers_only: bool = False) -> Checkpoint:
        """Reads the folder's JSON files and safetensors headers. Raises CheckpointError, MissingWeightsError for one.

        headers_only: the files may end behind their headers, as when only these were fetched, to plan with.
        """
        folder = Path(path)
        names = _list_folder(folder)
        # Weights come first: a folder of pickles or GGUF often lacks config.json too, and that is not its trouble.
        tensors = _find_tensors(folder, names, headers_only=headers_only)
        if "config.json" not in names:
            raise fault(folder, "has no config.json, which says how the model is built; download it again, completely")
        config = _read_json_object(folder / "config.json")
        has_generation_config = "generation_config.json" in names
        generation_config = _read_json_object(folder / "generation_config.json") if has_generation_config else {}
        return cls(folder, config, generation_config, tensors)


def read_config_json(folder: Path) -> dict[str, Any]:
    """The folder's config.json, whatever else is there. Raises CheckpointError."""
    return _read_json_object(folder / "config.json")


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder for a folder or a hub id ("org/name"), downloading the latter where it is not cached.

    Of weights only those that `Checkpoint.open` reads; what else a repository holds may be as large again.
    weights=False: only the JSON files, which are small, are downloaded.
    `revision` (branch, tag or commit) is for hub ids; a folder has none. Raises CheckpointError.
    """
    folder = _local_folder(model)
    if folder is not None:
        return folder
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{show(model)}: no such folder; give a local folder or a hub id of the form org/name")
    if not weights:
        return _download(model, revision, ("config.json", INDEX_FILE))
    files = ("config.json", *COMPANIONS, SINGLE_FILE, INDEX_FILE)
    folder = _download(model, revision, files)
    names = _list_folder(folder)
    if SINGLE_FILE in names or INDEX_FILE not in names:
        return folder
    shards = _shard_paths(folder, _read_weight_map(folder / INDEX_FILE))  # whatever they are called
    return _download(model, revision, (*files, *map(escape, shards)))


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


# ---------------------------------------------------------------------------------------------- local folder or hub id


def _local_folder(model: str) -> Path | None:
    if not model:  # Path("") would be the current folder
        return None
    path = Path(os.path.expanduser(model))
    with reading(path):
        if path.is_dir():
            return path
        if path.exists():
            raise fault(path, _file_refused(path))
    return None


def _file_refused(path: Path) -> str:
    if path.suffix == ".gguf":
        return _GGUF_REFUSED
    return "is a file; give the folder that holds config.json and the *.safetensors"


def _download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=list(patterns))
    # Everything: the library's transport (requests, httpx, httpx2) and its errors' base class changed from one major
    # version to the next, and a lost connection must not be a traceback.
    except Exception as exc:
        raise CheckpointError(_explain_hub_error(model, revision, exc)) from exc
    return Path(folder)


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
        return f"{model}: not completely in the local hub cache, and HF_HUB_OFFLINE forbids to download; unset it once"
    if isinstance(exc, errors.LocalEntryNotFoundError):
        reason = _first_line(exc.__cause__ or exc)
        return f"{model}: the hub cannot be reached ({reason}); check the network, or give a local folder"
    return f"{model}: the download failed ({_first_line(exc)}); try again, files that are complete are kept"


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[0]}" if lines else type(exc).__name__


# ------------------------------------------------------------------------------------------------------------- folder


def _list_folder(folder: Path) -> frozenset[str]:
    with reading(folder):
        return frozenset(os.listdir(folder))


def _find_tensors(folder: Path, names: frozenset[str], *, headers_only: bool) -> dict[str, TensorInfo]:
    if SINGLE_FILE in names:
        return read_header(folder / SINGLE_FILE, headers_only=headers_only)
    if INDEX_FILE in names:
        return _read_shards(folder, headers_only=headers_only)
    raise fault(folder, _why_no_weights(names), MissingWeightsError)


def _why_no_weights(names: frozenset[str]) -> str:
    if UNFINISHED_MARKER in names:
        return "is unfinished; give the same `offspec quantize` command again, it goes on where it stopped"
    if any(fnmatch(name, "model-*-of-*.safetensors") for name in names):
        return f"has shards but no {INDEX_FILE}; download that file as well"
    if any(fnmatch(name, pattern) for name in names for pattern in _PICKLES):
        return _PICKLE_REFUSED
    if any(fnmatch(name, "*.gguf") for name in names):
        return _GGUF_REFUSED
    return _NO_WEIGHTS


def _read_shards(folder: Path, *, headers_only: bool) -> dict[str, TensorInfo]:
    weight_map = _read_weight_map(folder / INDEX_FILE)
    shards = _shard_paths(folder, weight_map)
    _refuse_missing(folder, shards)
    headers = {shard: read_header(path, headers_only=headers_only) for shard, path in shards.items()}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise fault(shards[shard], f"lacks tensor {show(name)}, which {INDEX_FILE} promises; download it again")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = _read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault(path, "has no weight_map of tensors to files; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise fault(path, f"tensor {show(name)} lies in {show(shard)}, not a file name; download it again")
    return weight_map


def _shard_paths(folder: Path, weight_map: Mapping[str, str]) -> dict[str, Path]:
    """By their names, of which none leads out of the folder."""
    return {shard: _shard_path(folder, shard) for shard in sorted(set(weight_map.values()))}


def _shard_path(folder: Path, shard: str) -> Path:
    # Judged by its text: in the hub's cache every file is a link that leaves the folder, and rightly so.
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    if posix.is_absolute() or windows.anchor or ".." in windows.parts or "\0" in shard:
        raise fault(folder / INDEX_FILE, f"shard {show(shard)} lies outside the folder; do not trust this checkpoint")
    return folder / posix


def _refuse_missing(folder: Path, shards: dict[str, Path]) -> None:
    missing = []
    for shard, path in shards.items():
        with reading(path):
            if not path.is_file():
                missing.append(shard)
    if missing:
        count = f"{len(missing)} of {len(shards)} shards missing"
        what = f"lacks {show(missing[0])}, which {INDEX_FILE} names ({count}); download it again"
        raise fault(folder, what, MissingWeightsError)


def _read_json_object(path: Path) -> dict[str, Any]:
    with reading(path):
        content = read_small_file(path)
    try:
        value = parse_json(content)
    except ValueError as exc:
        raise fault(path, f"is not JSON ({exc}); download it again") from exc
    if not isinstance(value, dict):
        raise fault(path, f"is a JSON {type(value).__name__}, not an object; download it again")
    return value


# ------------------------------------------------------------------------------------------------- safetensors header


def read_header(path: Path, *, headers_only: bool = False) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, by name, after the whole header was checked. Raises CheckpointError.

    headers_only: the file may end behind its header.
    """
    header, file_bytes = _read_header_bytes(path)
    entries = _parse_header(path, header)
    _check_metadata(path, entries.pop("__metadata__", {}))
    data_start = _LENGTH_BYTES + len(header)
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in entries.items()}
    _check_layout(path, tensors.values(), data_start, None if headers_only else file_bytes)
    return tensors


def _read_header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON header and the length of the whole file."""
    with reading(path), open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(len(_LFS_POINTER))
        header_bytes = _header_length(path, start, file_bytes)
        file.seek(_LENGTH_BYTES)
        header = file.read(header_bytes)
    if len(header) < header_bytes:  # it shrank after it was measured
        _refuse_truncated(path, _LENGTH_BYTES + header_bytes, _LENGTH_BYTES + len(header))
    return header, file_bytes


def _header_length(path: Path, start: bytes, file_bytes: int) -> int:
    if start == _LFS_POINTER:
        what = "is a git-lfs pointer, not the weights; run `git lfs pull` in its folder"
        raise fault(path, what, MissingWeightsError)
    if len(start) < _LENGTH_BYTES:
        raise fault(path, f"is no safetensors file: {file_bytes} bytes have no room for a header; download it again")
    header_bytes: int = struct.unpack("<Q", start[:_LENGTH_BYTES])[0]
    if header_bytes > MOST_JSON_BYTES:
        raise fault(path, f"is no safetensors file: a header of {header_bytes} bytes is absurd; download it again")
    if _LENGTH_BYTES + header_bytes > file_bytes:
        _refuse_truncated(path, _LENGTH_BYTES + header_bytes, file_bytes)
    return header_bytes


def _refuse_truncated(path: Path, promised: int, present: int) -> NoReturn:
    raise fault(path, f"truncated: header promises {promised} bytes, file has {present}; download it again")


def _parse_header(path: Path, header: bytes) -> dict[str, Any]:
    if not header.startswith(b"{"):
        raise fault(path, "header is not a JSON object; the file is damaged, download it again")
    try:
        entries: dict[str, Any] = parse_json(header, _refuse_duplicates)
    except ValueError as exc:
        raise fault(path, f"header is not valid JSON ({exc}); the file is damaged, download it again") from exc
    return entries


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two equal keys they believe, so one of them would see other weights than we do.
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {show(counts.most_common(1)[0][0])} occurs twice")
    return found


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise fault(path, "header's __metadata__ does not map strings to strings; the file is damaged, get it again")


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    def refuse(what: str) -> NoReturn:
        raise fault(path, f"tensor {show(name)} {what}; the file is damaged, download it again")

    if not isinstance(entry, dict):
        refuse(f"is described by {show(entry)}, not by an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        refuse(f"has dtype {show(dtype)}, not a name")
    if dtype not in DTYPE_BYTES:
        what = f"tensor {show(name)} has dtype {show(dtype)}, which this version does not read"
        raise fault(path, f"{what}, only {', '.join(DTYPE_BYTES)}; use a 16- or 4-bit checkpoint of this model")
    if not _is_shape(shape):
        refuse(f"has shape {show(shape)}, not a list of sizes")
    if not _is_naturals(span) or len(span) != 2 or span[0] > span[1]:
        refuse(f"has data_offsets {show(span)}, not [begin, end]")
    nbytes = DTYPE_BYTES[dtype] * math.prod(shape)
    if span[1] - span[0] != nbytes:
        refuse(f"is {dtype} {show(shape)} and needs {nbytes} bytes, but its data_offsets span {span[1] - span[0]}")
    return TensorInfo(name, dtype, tuple(shape), path, data_start + span[0], nbytes)


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    # `type`, not isinstance: True is an int to Python, and to nobody else.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _is_shape(value: object) -> TypeGuard[list[int]]:
    # Zeros are left out of the product, else one of them would excuse any other size.
    return _is_naturals(value) and len(value) <= _MAX_RANK and math.prod(size or 1 for size in value) <= _MAX_ELEMENTS


def _check_layout(path: Path, tensors: Iterable[TensorInfo], data_start: int, file_bytes: int | None) -> None:
    """The tensors fill the file to its last byte (where its length counts), without an overlap or a hole."""
    end = data_start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            what = "overlaps the one before it" if info.offset < end else "leaves a hole before it"
            raise fault(path, f"tensor {show(info.name)} {what}; the file is damaged, download it again")
        end += info.nbytes
    if file_bytes is None:
        return
    if end > file_bytes:
        _refuse_truncated(path, end, file_bytes)
    if end < file_bytes:
        raise fault(path, f"too long: header promises {end} bytes, file has {file_bytes}; download it again")
