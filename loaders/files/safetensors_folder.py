"""Folders of *.safetensors with a config.json. Reads headers only, and checks each before use.

Files are untrusted: lengths, names, types and offsets are checked before use. Pickles are refused, because they can run
code.
Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, then the data without holes).
"""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, TypeGuard

from offspec.errors import MissingWeightsError

from .checkpoint import DTYPE_BYTES, TensorInfo, fault, reading, show
from .small_files import MOST_JSON_BYTES, open_regular, parse_json, read_small_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
UNFINISHED_MARKER = "offspec-quantize.json"  # in an unfinished result of `convert`

# Files of a checkpoint besides weights, index and config.json: tokenizer, chat templates, licences.
COMPANIONS = (
    *("generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template*", "additional_chat_templates/*", "quantize_config.json"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
)

_LENGTH_BYTES = 8
_MAX_RANK = 64  # torch's own limit
_MAX_ELEMENTS = 2**60  # larger than any disk; byte counts still fit into 64 bits
_LFS_POINTER = b"version https://git-lfs"

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")
_PICKLE_REFUSED = (
    "contains only pickled weights, which can run code and are not supported; convert them on a machine you trust with "
    "transformers: AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST)"
)
_NO_WEIGHTS = f"contains neither {SINGLE_FILE} nor {INDEX_FILE}"
_OF_THE_HUB = "choose a model published as safetensors, or for GGUF name the quantisation, as in org/name:Q4_K_M"
_OF_THE_USER = "give the folder with config.json and the *.safetensors, or a GGUF file"


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """A folder of weights with consistent headers (a `checkpoint.Checkpoint`)."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]  # {} if the folder has none
    tensors: dict[str, TensorInfo]  # by full name
    notes: tuple[str, ...] = ()

    @property
    def tokenizer_path(self) -> Path | None:
        return self.path if (self.path / "tokenizer.json").is_file() else None

    def companions(self) -> dict[str, Path]:
        """See `Checkpoint`. Refuses links that lead out of the folder: they could make offspec copy any file."""
        paths = sorted({path for pattern in COMPANIONS for path in self.path.glob(pattern) if path.is_file()})
        folder = self.path.resolve()
        folders = [folder, folder.parent.parent / "blobs"] if _is_of_the_hub(folder) else [folder]
        for path in (self.path / CONFIG_FILE, *paths):
            file = path.resolve()
            if not any(file.is_relative_to(each) for each in folders):
                description = f"is a link to {show(str(file))}, outside of the checkpoint, and is not followed"
                raise fault(path, f"{description}; replace the link by a copy, or remove it")
        return {str(path.relative_to(self.path)): path for path in paths}

    def config_json(self) -> bytes:
        path = self.path / CONFIG_FILE
        with reading(path):
            return read_small_file(path)


class SafetensorsFolder:
    """The container that is tried last; it reports the missing files of an invalid folder."""

    def recognises(self, path: Path) -> bool:
        return path.is_dir()

    def open(self, path: Path, *, headers_only: bool = False) -> SafetensorsCheckpoint:
        names = list_folder(path)
        # Weights come first: a folder of pickles or GGUF often also lacks config.json, which is not its main problem.
        tensors = find_tensors(path, names, headers_only=headers_only)
        if CONFIG_FILE not in names:
            raise fault(path, "has no config.json, which describes the architecture; download the complete model again")
        config = read_json_object(path / CONFIG_FILE)
        has_generation_config = "generation_config.json" in names
        generation_config = read_json_object(path / "generation_config.json") if has_generation_config else {}
        return SafetensorsCheckpoint(path, config, generation_config, tensors)

    def open_config(self, path: Path) -> SafetensorsCheckpoint:
        return SafetensorsCheckpoint(path, read_json_object(path / CONFIG_FILE), {}, {})

    def weight_files(self, path: Path) -> list[Path]:
        return [file for file in path.glob("*.safetensors") if file.is_file()]


def _is_of_the_hub(folder: Path) -> bool:
    """Whether this is a folder of the hub's cache: models--org--name/snapshots/revision."""
    return folder.parent.name == "snapshots"


def shard_names(folder: Path) -> list[str]:
    """The files that the folder's index names; [] if a single file contains all weights.

    Raises CheckpointError, also for a name that leads out of the folder.
    """
    names = list_folder(folder)
    if SINGLE_FILE in names or INDEX_FILE not in names:
        return []
    return list(_shard_paths(folder / INDEX_FILE, _read_weight_map(folder / INDEX_FILE)))


def why_no_folder(path: Path) -> str:
    """The error text for a file instead of a folder."""
    return "is a file, but not GGUF; give the folder with config.json and the *.safetensors"


# ------------------------------------------------------------------------------------------------------------- folder


def list_folder(folder: Path) -> frozenset[str]:
    with reading(folder):
        return frozenset(os.listdir(folder))


def find_tensors(
    folder: Path, names: frozenset[str], *, headers_only: bool, single: str = SINGLE_FILE, index: str = INDEX_FILE
) -> dict[str, TensorInfo]:
    """The tensors of a folder with these files, in the file `single`, or in those that `index` names."""
    if single in names:
        return read_header(folder / single, headers_only=headers_only)
    if index in names:
        weight_map = _read_weight_map(folder / index)
        shards = _shard_paths(folder / index, weight_map)
        missing = []
        for shard, path in shards.items():
            with reading(path):
                if not path.is_file():
                    missing.append(shard)
        if missing:
            count = f"{len(missing)} of {len(shards)} shards missing"
            description = f"lacks {show(missing[0])}, which {index} names ({count}); download it again"
            raise fault(folder, description, MissingWeightsError)
        headers = {shard: read_header(path, headers_only=headers_only) for shard, path in shards.items()}
        for name, shard in weight_map.items():
            if name not in headers[shard]:
                raise fault(shards[shard], f"lacks tensor {show(name)}, which {index} lists; download it again")
        return {name: headers[shard][name] for name, shard in weight_map.items()}
    why = f"contains neither {single} nor {index}; get them"
    raise fault(folder, _why_no_weights(folder, names) if single == SINGLE_FILE else why, MissingWeightsError)


def _why_no_weights(folder: Path, names: frozenset[str]) -> str:
    if UNFINISHED_MARKER in names:
        return "is unfinished; repeat the `offspec quantize` command to resume it"
    if any(fnmatch(name, "model-*-of-*.safetensors") for name in names):
        return f"has shards but no {INDEX_FILE}; download that file too"
    if any(fnmatch(name, pattern) for name in names for pattern in _PICKLES):
        return _PICKLE_REFUSED
    if _is_of_the_hub(folder):
        return f"{_NO_WEIGHTS}; {_OF_THE_HUB}"
    return f"{_NO_WEIGHTS if names else 'is an empty folder'}; {_OF_THE_USER}"


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault(path, "has no weight_map of tensors to files; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise fault(path, f"maps tensor {show(name)} to {show(shard)}, not to a file name; download it again")
    return weight_map


def _shard_paths(index: Path, weight_map: Mapping[str, str]) -> dict[str, Path]:
    """Paths by file name. Raises CheckpointError for a name that leads out of the index's folder."""
    paths = dict[str, Path]()
    for shard in sorted(set(weight_map.values())):
        # The check is on the name only: in the hub's cache, every file is a link that legitimately leaves the folder.
        posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
        if posix.is_absolute() or windows.anchor or ".." in windows.parts or "\0" in shard:
            raise fault(index, f"shard {show(shard)} is outside the folder; do not trust this checkpoint")
        paths[shard] = index.parent / posix
    return paths


def read_json_object(path: Path) -> dict[str, Any]:
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
    """Every tensor of one safetensors file by name, from a fully checked header. Raises CheckpointError.

    headers_only: the file may end after its header.
    """
    header, file_bytes = _read_header_bytes(path)
    if not header.startswith(b"{"):
        raise fault(path, "header is not a JSON object; the file is damaged, download it again")
    try:
        entries: dict[str, Any] = parse_json(header, _refuse_duplicates)
    except ValueError as exc:
        raise fault(path, f"header is not valid JSON ({exc}); the file is damaged, download it again") from exc
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise fault(path, "header's __metadata__ does not map strings to strings; the file is damaged, get it again")
    data_start = _LENGTH_BYTES + len(header)
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in entries.items()}
    _check_layout(path, tensors.values(), data_start, None if headers_only else file_bytes)
    return tensors


def _read_header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON header and the length of the whole file."""
    with reading(path), open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            description = "is a git-lfs pointer, not the weights; run `git lfs pull` in its folder"
            raise fault(path, description, MissingWeightsError)
        if len(start) < _LENGTH_BYTES:
            description = f"is not a safetensors file: {file_bytes} bytes are too few for a header"
            raise fault(path, f"{description}; download it again")
        header_bytes: int = struct.unpack("<Q", start[:_LENGTH_BYTES])[0]
        if header_bytes > MOST_JSON_BYTES:
            description = f"is not a safetensors file: its header would have {header_bytes} bytes"
            raise fault(path, f"{description}; download it again")
        if _LENGTH_BYTES + header_bytes > file_bytes:
            _refuse_truncated(path, _LENGTH_BYTES + header_bytes, file_bytes)
        file.seek(_LENGTH_BYTES)
        header = file.read(header_bytes)
    if len(header) < header_bytes:  # the file shrank meanwhile
        _refuse_truncated(path, _LENGTH_BYTES + header_bytes, _LENGTH_BYTES + len(header))
    return header, file_bytes


def _refuse_truncated(path: Path, promised: int, present: int) -> NoReturn:
    raise fault(path, f"truncated: the header declares {promised} bytes, the file has {present}; download it again")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two equal keys they use, so another reader could load other weights.
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {show(counts.most_common(1)[0][0])} occurs twice")
    return mapping


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    def refuse(description: str) -> NoReturn:
        raise fault(path, f"tensor {show(name)} {description}; the file is damaged, download it again")

    if not isinstance(entry, dict):
        refuse(f"has the description {show(entry)}, not an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        refuse(f"has dtype {show(dtype)}, not a name")
    if dtype not in DTYPE_BYTES:
        description = f"tensor {show(name)} has dtype {show(dtype)}, which this version does not support"
        raise fault(path, f"{description} (only {', '.join(DTYPE_BYTES)}); use a 16- or 4-bit checkpoint of this model")
    if not _is_shape(shape):
        refuse(f"has shape {show(shape)}, not a list of sizes")
    if not _is_naturals(span) or len(span) != 2 or span[0] > span[1]:
        refuse(f"has data_offsets {show(span)}, not [begin, end]")
    nbytes = DTYPE_BYTES[dtype] * math.prod(shape)
    if span[1] - span[0] != nbytes:
        refuse(f"is {dtype} {show(shape)} and needs {nbytes} bytes, but its data_offsets span {span[1] - span[0]}")
    return TensorInfo(name, dtype, tuple(shape), path, data_start + span[0], nbytes)


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    # `type`, not isinstance: in Python, True is an int.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _is_shape(value: object) -> TypeGuard[list[int]]:
    # The product omits zeros; otherwise a zero would allow any other size.
    return _is_naturals(value) and len(value) <= _MAX_RANK and math.prod(size or 1 for size in value) <= _MAX_ELEMENTS


def _check_layout(path: Path, tensors: Iterable[TensorInfo], data_start: int, file_bytes: int | None) -> None:
    """Raises CheckpointError unless tensors fill the file without overlap or hole, up to `file_bytes` (if given)."""
    end = data_start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            description = "overlaps the previous one" if info.offset < end else "leaves a hole before it"
            raise fault(path, f"tensor {show(info.name)} {description}; the file is damaged, download it again")
        end += info.nbytes
    if file_bytes is None:
        return
    if end > file_bytes:
        _refuse_truncated(path, end, file_bytes)
    if end < file_bytes:
        raise fault(path, f"too long: the header declares {end} bytes, the file has {file_bytes}; download it again")
