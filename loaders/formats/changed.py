"""Undoes a container's changes to weights: another order of rows or columns, or of numbers (`checkpoint.Change`).

The bytes stay unchanged. For a matrix in another order, the inputs and outputs of each product are reordered: K and N
numbers per row instead of the matrix's N·K. Vectors, and plain matrices that stay in memory, are changed when they are
bound (`StoredUnit.bind`).

llama.cpp's orders: within a head of Llama's queries and keys, row i and row i + head_dim / 2, which RoPE rotates
together, are adjacent (`permute` in its conversion). A gated delta net's value heads are sorted by their place among
those of one key head (`_reorder_v_heads`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offspec.backends import weights
from offspec.backends.weights import Multiplier, PackedMatrix, Product, Weight

from ..files.checkpoint import Change, Order, TensorInfo
from .core import DAMAGED, StoredWeight, TensorGroup


def changed(group: TensorGroup, stored: StoredWeight) -> StoredWeight:
    """The weight as the architecture expects it. Raises CheckpointError if its shape contradicts the change."""
    info = group.parts.get("")
    if info is None or info.change is None:
        return stored
    change, shape = info.change, stored.shape
    by_dim = [(0, change.rows), (1, change.columns)]
    if not shape or any(order and not (len(shape) > dim and order.fits(shape[dim])) for dim, order in by_dim):
        group.refuse(info, f"is {list(shape)}, which does not fit the order of its heads; {DAMAGED}")
    if (change.added or change.is_negative_exp) and len(shape) != 1:
        group.refuse(info, f"is {list(shape)}, which should be a vector; {DAMAGED}")
    if change.is_transposed and (len(shape) != 2 or stored.is_packed):
        group.refuse(info, f"is {stored.dtype} {list(shape)}, which should be a plain matrix; {DAMAGED}")
    return ChangedWeight(stored, change)


def in_order(numbers: Tensor, order: Order | None, dim: int = -1) -> Tensor:
    """Reorder the numbers along `dim` from the container's order to the architecture's."""
    return numbers if order is None else _exchanged(numbers, order, dim, (-1, order.count))


def as_stored(numbers: Tensor, order: Order | None, dim: int = -1) -> Tensor:
    """Reorder the numbers along `dim` from the architecture's order to the container's."""
    return numbers if order is None else _exchanged(numbers, order, dim, (order.count, -1))


def _exchanged(numbers: Tensor, order: Order, dim: int, levels: tuple[int, int]) -> Tensor:
    dim %= numbers.dim()
    kept, others = torch.split(numbers, [order.kept, numbers.shape[dim] - order.kept], dim)
    by_level = torch.unflatten(others, dim, (order.groups, *levels, order.run)).transpose(dim + 1, dim + 2)
    exchanged = by_level.flatten(dim, dim + 3)
    return torch.cat((kept, exchanged), dim) if order.kept else exchanged


@dataclass(frozen=True)
class ReorderedMatrix:
    """A matrix [N, K] with rows and columns in a container's order (a `weights.PackedWeight`)."""

    stored: Weight
    rows: Order | None = None
    columns: Order | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    @property
    def unpacked_dtype(self) -> torch.dtype:
        return self.stored.dtype if isinstance(self.stored, Tensor) else self.stored.unpacked_dtype

    def is_recordable(self, dtype: torch.dtype) -> bool:
        return isinstance(self.stored, Tensor) or self.stored.is_recordable(dtype)

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        matrix = in_order(in_order(weights.dense(self.stored, dtype), self.rows, 0), self.columns, 1)
        return matrix if out is None else out.copy_(matrix)

    def linear(self, x: Tensor, bias: Tensor | None, scratch: Tensor | None, backend: Multiplier) -> Tensor:
        def product(x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
            return backend.linear(x, self.stored, bias, scratch)

        return self._reordered(product, x, bias, scratch)

    @property
    def fused_linear(self) -> Product | None:
        fused = None if isinstance(self.stored, Tensor) else self.stored.fused_linear
        return None if fused is None else partial(self._reordered, fused)

    def _reordered(
        self, product: Product, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """The product with the stored matrix, of numbers in its order."""
        bias = None if bias is None else as_stored(bias, self.rows)
        return in_order(product(as_stored(x, self.columns), bias, scratch), self.rows)


@dataclass(frozen=True)
class TransposedMatrix(PackedMatrix):
    """A matrix [N, K] that is stored as a plain tensor [K, N]."""

    stored: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape[::-1])

    @property
    def unpacked_dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.stored.dtype

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        matrix = torch.empty(self.shape, dtype=dtype, device=self.stored.device) if out is None else out
        return matrix.copy_(self.stored.t())


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
        return self.stored.shape[::-1] if self.change.is_transposed else self.stored.shape

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
        """Undo the change. A vector with other numbers becomes fp32, so that it is rounded only once, later."""
        change = self.change
        if change.is_transposed:
            assert isinstance(weight, Tensor)
            return TransposedMatrix(weight)
        if not isinstance(weight, Tensor) or weight.dim() == 2:
            return ReorderedMatrix(weight, change.rows, change.columns) if change.rows or change.columns else weight
        if change.is_negative_exp:
            weight = (-weight.float()).log()
        elif change.added:
            weight = weight.float() - change.added
        return in_order(weight, change.rows, 0)
