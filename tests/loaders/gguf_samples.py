"""Blocks of GGUF's quantised types for tests, and what the `gguf` package makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offspec.loaders.files.checkpoint import Change, TensorInfo
from offspec.loaders.formats.gguf import QUANTISED, GgufMatrix
from offspec.loaders.formats.gguf_blocks import HALVES

NAMES = list(QUANTISED)
# fp16 numbers where a block has its scales: zero and its negative, the least and the largest of the subnormal ones, the
# largest number, and what is none.
EDGE_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00)


def random_blocks(name: str, num_rows: int, num_blocks: int, *, seed: int = 0) -> Tensor:
    """Rows [N, bytes] of blocks with arbitrary bytes, but for scales that are ordinary numbers."""
    kind = QUANTISED[name]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_rows * num_blocks, kind.num_bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES[name]:
        blocks[:, place + 1] = blocks[:, place + 1] & 0x83 | 0x28
    if name == "IQ1_M":  # the upper four bits of its scale
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x20
    if name == "MXFP4":  # an exponent
        blocks[:, 0] = blocks[:, 0] & 7 | 120
    return blocks.view(num_rows, -1)


def edge_blocks(name: str) -> Tensor:
    """Blocks [B, bytes]: bytes all 0 and all 255 and arbitrary ones, with each of the edge values as scales."""
    kind = QUANTISED[name]
    arbitrary = torch.randint(
        0, 256, (64, kind.num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)
    )
    found = [torch.zeros(1, kind.num_bytes, dtype=torch.uint8), torch.full((1, kind.num_bytes), 255, dtype=torch.uint8)]
    for half in EDGE_HALVES:
        for blocks in (*found[:2], arbitrary):
            edged = blocks.clone()
            for place in HALVES[name]:
                edged[:, place], edged[:, place + 1] = half & 255, half >> 8
            found.append(edged)
    if name == "MXFP4":
        exponents = arbitrary[:8].clone()
        exponents[:, 0] = torch.tensor((0, 1, 2, 3, 127, 253, 254, 255))
        found.append(exponents)
    return torch.cat((*found, arbitrary))


def oracle(name: str, rows: Tensor) -> Tensor:
    """fp32 [N, K], by the `gguf` package."""
    from gguf import GGMLQuantizationType, quants  # here, because machines with a GPU may lack it

    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[name]))


def matrix_of(name: str, rows: Tensor) -> GgufMatrix:
    return GgufMatrix(QUANTISED[name], rows)


def info_of(path: Path, name: str, rows: Tensor, dtype: str, change: Change | None = None) -> TensorInfo:
    """A tensor of a quantised type, appended to the file."""
    with path.open("ab") as file:
        offset = file.tell()
        file.write(rows.numpy().tobytes())
    kind = QUANTISED[dtype]
    shape = (rows.shape[0], rows.shape[1] // kind.num_bytes * kind.num_weights)
    return TensorInfo(name, dtype, shape, path, offset, rows.numel(), change)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Of every number, its sign where it is zero included; what is no number may be any."""
    words = {4: torch.int32, 2: torch.int16}[found.element_size()]
    nan = expected.isnan()
    return (
        found.dtype == expected.dtype
        and torch.equal(found.isnan(), nan)
        and torch.equal(found.view(words)[~nan], expected.view(words)[~nan])
    )
