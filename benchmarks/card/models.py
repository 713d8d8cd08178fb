"""The built-in pair grown to a job's shapes: files contain only distinct layers, and are held in memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.grow import Layout, Shape, grow
from offspec.checkpoints.model_files import ModelFiles
from offspec.loaders.files.checkpoint import TensorInfo
from offspec.loaders.files.containers import open_config
from offspec.loaders.files.safetensors_folder import SafetensorsFolder, read_header
from offspec.loaders.formats.four_bit import CODES, pack_4bit
from offspec.loaders.formats.process_state import has_bitsandbytes
from offspec.loaders.machine.hardware import read_memory
from offspec.loaders.streaming.stored_model import StoredModel
from offspec.loaders.units import GIB
from offspec.model.config import read_config
from offspec.model.names import LAYER_PREFIX


class Remembered:
    """A `Reader` over files that are read once and then kept in memory, to measure the link instead of the disk."""

    def __init__(self) -> None:
        self._files: dict[Path, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def remember(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._files[path] = np.fromfile(path, dtype=np.uint8)

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        part = self._files[path][offset : offset + len(out)]
        np.frombuffer(out, dtype=np.uint8)[: len(part)] = part

    def close(self) -> None: ...


@dataclass(frozen=True)
class Grown:
    """A grown model; its files contain only distinct layers."""

    files: ModelFiles
    reader: Remembered

    @classmethod
    def make(cls, source: Path, folder: Path, shape: Shape, device: torch.device) -> Grown:
        config = open_config(source).config
        speaking = Layout(read_config(config), shape).layers
        idle = next((layer for layer in range(shape.num_layers) if layer not in speaking), None)
        written = sorted({*speaking, *([] if idle is None else [idle])})
        num_threads = max(1, min(4, (os.cpu_count() or 1) // 2, read_memory().available_bytes // (12 * GIB)))
        has_bitsandbytes()  # imported by one thread before there are several
        of_torch = torch.get_num_threads()
        grow(source, folder, shape, layers=written, pack=partial(pack, device=device), num_threads=num_threads, say=say)
        torch.set_num_threads(of_torch)  # packing sets it, each thread for itself
        paths = sorted(folder.glob("model-*.safetensors"))
        infos = {name: info for path in paths for name, info in read_header(path).items()}
        for layer in range(shape.num_layers):
            if layer not in written:
                infos |= _alias(infos, f"{LAYER_PREFIX}{idle}.", f"{LAYER_PREFIX}{layer}.")
        checkpoint = replace(SafetensorsFolder().open_config(folder), tensors=infos)
        stored = StoredModel.of(checkpoint, layer_prefix=LAYER_PREFIX)
        reader = Remembered()
        reader.remember(paths)
        return cls(ModelFiles(checkpoint, read_config(checkpoint.config), stored, torch.bfloat16), reader)

    def in_dtype(self, dtype: torch.dtype) -> Grown:
        return Grown(replace(self.files, dtype=dtype), self.reader)


def _alias(infos: Mapping[str, TensorInfo], prefix: str, name: str) -> dict[str, TensorInfo]:
    """The tensors that begin with `prefix` under another name."""
    found = {name + key.removeprefix(prefix): info for key, info in infos.items() if key.startswith(prefix)}
    return {key: replace(info, name=key) for key, info in found.items()}


def pack(matrix: Tensor, quant_type: str, device: torch.device) -> Mapping[str, Tensor]:
    """`pack_4bit` on the device; without bitsandbytes, plain torch with scales of 32 bit instead of 8."""
    packer = pack_4bit if has_bitsandbytes() else pack_plainly
    return packer(matrix.to(device), quant_type)


def pack_plainly(matrix: Tensor, quant_type: str, blocksize: int = 64) -> dict[str, Tensor]:
    """As `pack_4bit(nested=False)`, except for ties between two NF4 values; K must be a multiple of the block."""
    values, order = torch.tensor(CODES[quant_type], device=matrix.device).sort()
    middles, codes, absmax = (values[1:] + values[:-1]) / 2, list[Tensor](), list[Tensor]()
    for rows in matrix.split(max(1, 2**26 // matrix.shape[1])):
        blocks = rows.reshape(-1, blocksize).float()
        absmax.append(blocks.abs().amax(1))
        near = order[torch.bucketize(blocks / absmax[-1].clamp_min(1e-30)[:, None], middles)].view(-1, 2)
        codes.append((near[:, 0] << 4 | near[:, 1]).to(torch.uint8))
    shape, dtype = list(matrix.shape), str(matrix.dtype).removeprefix("torch.")
    state = {"quant_type": quant_type, "blocksize": blocksize, "dtype": dtype, "shape": shape}
    said = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        "": torch.cat(codes)[:, None].cpu(),
        ".absmax": torch.cat(absmax).cpu(),
        ".quant_map": torch.tensor(CODES[quant_type]),
        f".quant_state.bitsandbytes__{quant_type}": said,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
