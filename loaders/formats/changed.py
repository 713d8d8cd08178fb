"""Undoes a container's changes to weights: reordered rows, or norms with 1 added (`checkpoint.Change`).

The bytes stay unchanged. For a matrix with rows in llama.cpp's order, the outputs of each product are reordered: N
numbers per row instead of the matrix's N·K. Vectors, and plain matrices that stay in memory, are changed when they are
bound (`StoredUnit.bind`).

llama.cpp's order (`permute` in convert_hf_to_gguf.py): within a head, row i and row i + head_dim / 2, which RoPE
rotates together, are adjacent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..files.checkpoint import Change, TensorInfo
from . import core
from .core import DAMAGED, Product, StoredWeight, TensorGroup, Weight


def changed(group: TensorGroup, stored: StoredWeight) -> StoredWeight:
    """The weight as the architecture expects it. Raises CheckpointError if its shape contradicts the change."""
    info = group.parts.get("")
    if info is None or info.change is None:
        return stored
    change, shape = info.change, stored.shape
    if len(shape) not in (1, 2) or (change.num_heads and shape[0] % (2 * change.num_heads)):
        group.refuse(info, f"is {list(shape)}, which does not fit {change.num_heads} heads; {DAMAGED}")
    if change.added and len(shape) != 1:
        group.refuse(info, f"is {list(shape)}, which should be a vector; {DAMAGED}")
    return ChangedWeight(stored, change)


def in_order(numbers: Tensor, num_heads: int, dim: int = -1) -> Tensor:
    """Reorder the num_heads · head_dim numbers along `dim` from llama.cpp's order to the architecture's."""
    dim %= numbers.dim()
    before, length, after = numbers.shape[:dim], numbers.shape[dim], numbers.shape[dim + 1 :]
    pairs = numbers.reshape(*before, num_heads, length // num_heads // 2, 2, *after)
    return pairs.transpose(dim + 1, dim + 2).reshape(numbers.shape)


def _as_stored(bias: Tensor | None, num_heads: int) -> Tensor | None:
    """Reorder a bias [N] from the architecture's order to llama.cpp's."""
    return None if bias is None else bias.view(num_heads, 2, -1).transpose(1, 2).flatten()


@dataclass(frozen=True)
class ReorderedMatrix:
    """A matrix [N, K] with rows in llama.cpp's order of `num_heads` heads (a `core.PackedWeight`)."""

    stored: Weight
    num_heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    @property
    def unpacked_dtype(self) -> torch.dtype:
        return self.stored.dtype if isinstance(self.stored, Tensor) else self.stored.unpacked_dtype

    def is_recordable(self, dtype: torch.dtype) -> bool:
        return isinstance(self.stored, Tensor) or self.stored.is_recordable(dtype)

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        matrix = in_order(core.dense(self.stored, dtype), self.num_heads, dim=0)
        return matrix if out is None else out.copy_(matrix)

    def linear(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        return in_order(core.linear(x, self.stored, _as_stored(bias, self.num_heads), scratch), self.num_heads)

    @property
    def fused_linear(self) -> Product | None:
        fused = None if isinstance(self.stored, Tensor) else self.stored.fused_linear
        if fused is None:
            return None

        def product(x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
            return in_order(fused(x, _as_stored(bias, self.num_heads), scratch), self.num_heads)

        return product


@dataclass(frozen=True)
class ChangedWeight:
    """A stored weight (a `core.StoredWeight`) whose change is undone when it is bound."""

    stored: StoredWeight
    change: Change

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        return self.stored.streamed

    @property
    def plain_dtype(self) -> str | None:
        return self.stored.plain_dtype

    @property
    def is_packed(self) -> bool:
        return self.stored.is_packed

    @property
    def fused_kind(self) -> Hashable | None:
        return self.stored.fused_kind

    def is_kept_as_read(self, dtype: torch.dtype) -> bool:
        """True for packed matrices only; of other weights, a changed copy is kept."""
        return self.stored.is_packed and self.stored.is_kept_as_read(dtype)

    def bind(self, parts: Sequence[Tensor]) -> Weight:
        return self._undone(self.stored.bind(parts))

    def sample(self, device: torch.device) -> Weight:
        return self._undone(self.stored.sample(device))

    def to(self, device: torch.device | str) -> ChangedWeight:
        return ChangedWeight(self.stored.to(device), self.change)

    def _undone(self, weight: Weight) -> Weight:
        """Undo the change. A vector with an added number becomes fp32, so that it is rounded only once, later."""
        change = self.change
        if not isinstance(weight, Tensor) or weight.dim() > 1:
            return ReorderedMatrix(weight, change.num_heads) if change.num_heads else weight
        vector = weight.float() - change.added if change.added else weight
        return in_order(vector, change.num_heads) if change.num_heads else vector
