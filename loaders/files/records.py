"""A layer as one record: the extents of files to read into one buffer to have all of its tensors.

Checkpoints usually store a layer's tensors together, but not always: sorted by dtype, or split at a shard's end, they
lie in several extents. This module only computes extents; it reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch

from offspec.backends.device_kinds import kind_of
from offspec.backends.weights import ALIGNMENT

from .checkpoint import TensorInfo
from .readers import BLOCK_BYTES, READ_BYTES, align_down, align_up

MAX_GAP_BYTES = 128 * 1024  # reading a gap of this size is cheaper than a separate read
LOOSE_ALIGNMENT = 64

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [nbytes] → [nbytes / itemsize] of `dtype`, without a copy if the alignment allows it."""
    return (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype)


@dataclass(frozen=True)
class Extent:
    """`nbytes` of `path` from byte `offset`, to read to `start` in the record; the file contains at least `least`."""

    path: Path
    offset: int
    nbytes: int
    least: int
    start: int


@dataclass(frozen=True)
class Record:
    """The tensors of one unit: their extents on disk, and their places in a buffer of `nbytes`.

    places: full tensor name → (start, bytes) in the buffer. step: `shift` is a multiple of it.
    """

    nbytes: int
    extents: tuple[Extent, ...]
    places: dict[str, tuple[int, int]]
    step: int = 4

    @property
    def read_bytes(self) -> int:
        """Bytes to read, including gaps between tensors."""
        return sum(extent.least for extent in self.extents)

    @cached_property
    def reads(self) -> tuple[Extent, ...]:
        """The extents in pieces of READ_BYTES."""
        pieces = list[Extent]()
        for extent in self.extents:
            for begin in range(0, extent.least, READ_BYTES):
                nbytes, least = (min(READ_BYTES, size - begin) for size in (extent.nbytes, extent.least))
                pieces.append(Extent(extent.path, extent.offset + begin, nbytes, least, extent.start + begin))
        return tuple(pieces)

    @cached_property
    def shift(self) -> int:
        """The offset of the record in memory, in bytes, that aligns the most of its bytes to ALIGNMENT.

        Files align their data to 8 bytes only, some of them less. The offset is a multiple of 4, so that numbers of up
        to 4 bytes stay aligned, and of 2 where no tensor has larger ones.
        """
        shifts = range(0, ALIGNMENT, self.step)
        aligned = {s: sum(n for start, n in self.places.values() if (start + s) % ALIGNMENT == 0) for s in shifts}
        return max(shifts, key=lambda s: (aligned[s], -s))

    def on(self, device: torch.device, raw: torch.Tensor) -> torch.Tensor:
        """The record's bytes `raw` on `device`: the same tensor in RAM, otherwise a shifted copy."""
        if not kind_of(device).has_own_memory:
            return raw
        out = torch.empty(raw.numel() + ALIGNMENT, dtype=torch.uint8, device=device)[self.shift :][: raw.numel()]
        return out.copy_(raw)

    def parts(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor's bytes (uint8, 1-D) as views of a buffer with the record."""
        return {name: buffer[start : start + nbytes] for name, (start, nbytes) in self.places.items()}

    @classmethod
    def of(cls, infos: Iterable[TensorInfo]) -> Record:
        """The record of some tensors, with close extents merged and all of them aligned for O_DIRECT."""
        ordered = sorted(infos, key=lambda info: (info.path, info.offset))
        loose = [info for info in ordered if info.offset % info.alignment]
        extents, places, end = list[Extent](), dict[str, tuple[int, int]](), 0
        for group in _stretches(info for info in ordered if info not in loose):
            first = align_down(group[0].offset)
            least = max(info.offset + info.nbytes for info in group) - first
            extents.append(Extent(group[0].path, first, align_up(least), least, end))
            places |= {info.name: (end + info.offset - first, info.nbytes) for info in group}
            end += align_up(least)
        for info in loose:  # misaligned for its dtype in the file, so it gets its own extent
            extents.append(Extent(info.path, info.offset, info.nbytes, info.nbytes, end))
            places[info.name] = (end, info.nbytes)
            end += align_up(info.nbytes, LOOSE_ALIGNMENT)
        step = 2 if all(info.alignment == 2 for info in ordered) else 4
        return cls(align_up(end), tuple(extents), places, step)


def _stretches(infos: Iterable[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Runs of tensors (by path and offset) for one extent each."""
    for _, group in groupby(infos, key=lambda info: info.path):
        run, end = list[TensorInfo](), 0
        for info in group:
            if run and info.offset > end + MAX_GAP_BYTES:
                yield run
                run = []
            run.append(info)
            end = max(end, info.offset + info.nbytes)
        yield run


assert READ_BYTES % BLOCK_BYTES == 0
