"""Small GGUF files for tests, by the `gguf` package's writer, and damaged ones, by hand."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np

STRING, ARRAY, UINT32 = 8, 9, 4


def write_gguf(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], kinds: Mapping[str, str] = {}
) -> Path:
    """kinds: a tensor's name → the type that it is quantised to by the package, F32 where it is not named. A tensor of
    bytes has blocks of its type.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        is_packed = tensor.dtype == np.uint8
        content = tensor if is_packed else gguf.quants.quantize(tensor.astype(np.float32), kind)
        writer.add_tensor(name, content, raw_dtype=kind)
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def string(text: bytes | str) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def entry(key: str, kind: int, value: bytes) -> bytes:
    """A key of the metadata and its value, as bytes."""
    return string(key) + struct.pack("<I", kind) + value


def description(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """What a header says of a tensor; shape in GGUF's order, inputs first."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    entries: list[bytes],
    tensors: list[bytes],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, ...] = (),
) -> bytes:
    """A file's header up to where its data begins. counts: of tensors and keys, where they lie."""
    num_tensors, num_keys = counts or (len(tensors), len(entries))
    content = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(entries) + b"".join(tensors)
    return content + b"\0" * (-len(content) % 32)
