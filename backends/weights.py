"""Weights in memory: plain tensors, and matrices in another layout, which a `Backend` multiplies."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from .x86.row_product import RowProduct

HALF_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
PLAIN_FORMS = {**HALF_DTYPES, torch.float32: "fp32"}
ALIGNMENT = 16  # bytes that a GPU's fast products need for operands


class Product(Protocol):
    """x [..., K], bias [N] in x's dtype, scratch (see `Backend.linear`) → [..., N]."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor: ...


class Multiplier(Protocol):
    """What a matrix needs of a `Backend`."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, scratch: Tensor | None) -> Tensor: ...
    def multiply_packed(
        self, x: Tensor, matrix: PackedWeight, bias: Tensor | None, scratch: Tensor | None
    ) -> Tensor: ...


class Unpackable(Protocol):
    """A packed matrix, see `formats.unpacked.UnpackedMatrix`."""

    @property
    def form(self) -> str: ...
    def unpack(self, out: Tensor) -> None: ...
    def compiled_unpacking(self, out: Tensor) -> Callable[[], None] | None: ...
    def launched_unpacking(self, out: Tensor) -> Callable[[], None] | None: ...


class PackedWeight(Protocol):
    """A matrix in another layout than torch multiplies: quantised, or in its stored parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]: outputs, inputs."""
        ...

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K] in `dtype`; in the memory of `out` (contiguous, of that shape and dtype) if given."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None, scratch: Tensor | None, backend: Multiplier) -> Tensor:
        """`Backend.linear` of x by the matrix; bias: in x's dtype."""
        ...

    @property
    def fused_linear(self) -> Product | None:
        """`linear` without dequantising, which is faster for few rows; None if no such kernel exists."""
        ...

    @property
    def unpacked_dtype(self) -> torch.dtype:
        """A dtype that holds all numbers of the matrix: bf16 if they are bf16's, else fp32."""
        ...

    def is_recordable(self, dtype: torch.dtype) -> bool:
        """Whether a CUDA graph may record its use with rows of `dtype`: kernels alone, no choice of a method."""
        ...


Weight: TypeAlias = Tensor | PackedWeight


@runtime_checkable
class PackedTable(PackedWeight, Protocol):
    """A packed matrix that gives access to single rows: an embedding."""

    @property
    def device(self) -> torch.device: ...

    def take(self, indices: Tensor) -> PackedWeight:
        """The matrix [T, K] of these rows; indices: int64 [T], on its device."""
        ...


Table: TypeAlias = Tensor | PackedTable


Kernel: TypeAlias = tuple[RowProduct, list[Tensor]]  # and its arguments


class Launched(NamedTuple):
    """What tells two matrices apart in a kernel's launch. kind: what is equal where just the addresses differ."""

    kind: Hashable
    addresses: tuple[int, ...]


class PackedMatrix:
    """Base of most packed weights: dequantises for each product, unless there is a kernel.

    form: its format's name. unpacked_dtype: one that holds its numbers.
    """

    form = ""
    unpacked_dtype = torch.float32

    @cached_property
    def launched(self) -> Launched:
        """What a launch of its kernel is told of it."""
        parts = () if self.kernel is None else self.kernel[1]
        shape: tuple[int, ...] = self.shape  # type: ignore[attr-defined]  # a PackedWeight's
        return Launched((self.form, shape), tuple(part.data_ptr() for part in parts))

    @property
    def fused_linear(self) -> Product | None:
        return None

    def is_recordable(self, dtype: torch.dtype) -> bool:
        return False

    @property
    def address(self) -> int | None:
        """Where all of its bytes lie, one row of the matrix after another; None if there is no such place."""
        return None

    @property
    def kernel(self) -> tuple[RowProduct, list[Tensor]] | None:
        """The CPU kernel that multiplies with the packed matrix, and its arguments; None if there is none."""
        return None

    def kernel_for(self, dtype: torch.dtype) -> Kernel | None:
        """The kernel that multiplies rows of a dtype, and its arguments; None: they take the plain matrix's."""
        return self.kernel

    def linear(
        self: PackedWeight, x: Tensor, bias: Tensor | None, scratch: Tensor | None, backend: Multiplier
    ) -> Tensor:
        return backend.multiply_packed(x, self, bias, scratch)


def dense(weight: Weight, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
    """The weight as a plain tensor of `dtype`; a converted one is in `scratch` (1-D, of that dtype) if given."""
    if isinstance(weight, Tensor) and (scratch is None or weight.dtype == dtype):
        return weight.to(dtype)
    out = None if scratch is None else scratch[: math.prod(weight.shape)].view(weight.shape)
    if not isinstance(weight, Tensor):
        return weight.dequantize(dtype, out)
    assert out is not None
    return out.copy_(weight)


def as_table(weight: Weight) -> Table:
    """A weight that gives access to single rows."""
    assert isinstance(weight, Tensor | PackedTable), "the format has no access to single rows"
    return weight


def take_rows(table: Table, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, K] of a table [N, K], in `dtype`; indices: int64 [T], on its device."""
    if isinstance(table, Tensor):
        return F.embedding(indices, table).to(dtype)
    return table.take(indices).dequantize(dtype)
