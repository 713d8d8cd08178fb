"""Weights in memory: interfaces of resident ones, plain or packed, and the products of rows with them.

Quantised matrices are dequantised for each use, unless their format has a faster method.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import products
from .on_gpu import FUSED_ROWS, on_device, row_kernels
from .x86.row_product import ProductJob, RowProduct

ALIGNMENT = 16  # bytes that a GPU's fast products need for operands


# Elements dequantised at once. The kernel allocates its result: the allocator's pool has 2 MiB, but a whole matrix of
# 117 MB needs fresh pages each time: 16 ms of CPU instead of 64.
TILE = 1 << 20
TILE_ON_CUDA = 1 << 24  # larger, because launches dominate
SLICE = 1 << 26  # of a packed head on a GPU: the memory for its unpacked numbers, 128 MiB in 16 bits


class Product(Protocol):
    """x [..., K], bias [N] in x's dtype, scratch (see `linear`) → [..., N]."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor: ...


class PackedWeight(Protocol):
    """A matrix in another layout than torch multiplies: quantised, or in its stored parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]: outputs, inputs."""
        ...

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K] in `dtype`; in the memory of `out` (contiguous, of that shape and dtype) if given."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """x [..., K] times the matrix, plus bias [N] (in x's dtype) → [..., N]; scratch as for `linear` below."""
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

    def kernel_for(self, x: Tensor) -> Kernel | None:
        """The kernel for rows x, and its arguments; None: the plain matrix's."""
        kernel = self.kernel
        return None if kernel is None else (products.kernel_for(kernel[0], x), kernel[1])

    def linear(self: PackedWeight, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        if (fused := _chosen_fused(self, x)) is not None:
            return fused(x, bias, scratch)
        if (kernel := _kernel_for(x, self)) is not None:
            product, parts = kernel
            return products.plus(product(x, parts, self.shape[0]), bias)
        return linear(x, dense(self, x.dtype, scratch), bias)


class ProductOfUnpacked(torch.autograd.Function):
    """x [..., K] times a matrix [N, K] that is unpacked or converted, again for the gradient of x.

    Autograd's own would keep such a copy for each product until then.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Weight) -> Tensor:
        ctx.matrix = matrix
        return F.linear(x, dense(matrix, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ dense(ctx.matrix, gradient.dtype), None


def _chosen_fused(matrix: Any, x: Tensor) -> Product | None:
    """The product on a GPU that does not dequantise, if it was measured to be faster; otherwise None.

    It splits its sums by the number of rows, so exact ones are dequantised.
    """
    if products.must_be_exact(x):
        return None
    most = FUSED_ROWS.get(matrix.form, matrix.shape, x.dtype, x.device)
    if not 0 < products.rows_of(x) <= most or _needs_gradients(x):
        return None
    fused: Product | None = matrix.fused_linear
    return fused


def _needs_gradients(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _chosen_kernel(matrix: Any, x: Tensor) -> Kernel | None:
    """The kernel for rows x, if there is one."""
    if not x.numel() or x.shape[-1] != matrix.shape[1] or not products.has_kernel(x):
        return None
    kernel: Kernel | None = matrix.kernel_for(x)
    return kernel


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], plus bias [N] → [..., N] in x's dtype.

    scratch: at least N·K elements of x's dtype, 1-D, for a matrix that must be dequantised or converted first; without
    it, memory is allocated each time.
    """
    bias = bias if bias is None else bias.to(x.dtype)
    if _needs_gradients(x) and _is_unpacked_for(x, weight):
        product: Tensor = ProductOfUnpacked.apply(x, weight)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias
    if bias is not None and bias.is_cuda and bias.data_ptr() % ALIGNMENT:
        bias = bias.clone()  # cuBLASLt may select a kernel that needs an aligned bias (pytorch#194497)
    if not isinstance(weight, Tensor):
        return weight.linear(x, bias, scratch)
    if weight.device.type == "cpu":
        return products.multiply(x, weight, bias, scratch)
    if weight.dtype != x.dtype:
        weight = dense(weight, x.dtype, scratch)
    if products.must_be_exact(x):
        return products.plus(exact_on_gpu(x, weight), bias)
    return F.linear(x, weight, bias)


def _is_unpacked_for(x: Tensor, weight: Weight) -> bool:
    """Whether a product with x needs a copy of the weight; one that learns is converted by autograd itself."""
    return not isinstance(weight, Tensor) or (weight.dtype != x.dtype and not weight.requires_grad)


def linears(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None], scratch: Tensor | None = None
) -> list[Tensor]:
    """`linear` of x [..., K] by several weights; on a CPU in one call, if one kernel multiplies each of them."""
    kernels = [kernel for weight in weights if (kernel := _kernel_for(x, weight)) is not None]
    if len(kernels) < len(weights) or len({id(product) for product, _ in kernels}) > 1:
        return [linear(x, weight, bias, scratch) for weight, bias in zip(weights, biases, strict=True)]
    rows, sizes = x.reshape(-1, x.shape[-1]), [weight.shape[0] for weight in weights]
    jobs = [ProductJob(parts, size, 0, len(rows)) for (_, parts), size in zip(kernels, sizes, strict=True)]
    results = torch.split(kernels[0][0].each(rows, jobs), [len(rows) * size for size in sizes])
    shaped = [each.view(*x.shape[:-1], size) for each, size in zip(results, sizes, strict=True)]
    cast = [bias if bias is None else bias.to(x.dtype) for bias in biases]
    return [products.plus(each, bias) for each, bias in zip(shaped, cast, strict=True)]


def linear_each(x: Tensor, counts: Sequence[int], weights: Sequence[Weight], scratch: Tensor | None = None) -> Tensor:
    """x [R, K] times several weights [N, K], of which each multiplies `counts` rows → [sum of counts, N] in x's dtype.

    Each multiplies the next rows, and after the last row the first ones again: one row may be that of all. On a CPU all
    are multiplied in one call, if kernels multiply each of them alone. scratch: as for `linear`.
    """
    num_rows = x.shape[0]
    firsts = [first % max(1, num_rows) for first in accumulate(counts[:-1], initial=0)]
    if (kernel := _common_kernel(x, counts, weights)) is not None:
        product, matrices = kernel
        num_outputs = weights[0].shape[0]
        jobs = [ProductJob(parts, num_outputs, *rows) for parts, *rows in zip(matrices, firsts, counts, strict=True)]
        return product.each(x, jobs).view(-1, num_outputs)
    each = zip(firsts, counts, weights, strict=True)
    return torch.cat([linear(x[first : first + count], weight, None, scratch) for first, count, weight in each])


def _common_kernel(
    x: Tensor, counts: Sequence[int], weights: Sequence[Weight]
) -> tuple[RowProduct, list[list[Tensor]]] | None:
    """The kernel that multiplies each of the weights with its rows, and their parts; None if it is not one for all."""
    if len(weights) < 2:
        return None
    first, most = weights[0], x[: max(counts)]
    if (chosen := _kernel_for(most, first)) is None:
        return None
    if isinstance(first, PackedMatrix):  # the choice is one of form, shape and rows
        form = first.form
        kernels = [each.kernel for each in weights if isinstance(each, PackedMatrix) and each.form == form]
        product = kernels[0] and kernels[0][0]
    else:
        kernels, product = [_kernel_for(most, weight) for weight in weights], chosen[0]
    parts = [kernel[1] for kernel in kernels if kernel is not None and kernel[0] is product]
    return (chosen[0], parts) if len(parts) == len(weights) else None


def _kernel_for(x: Tensor, weight: Weight) -> Kernel | None:
    """The kernel that multiplies rows x on a CPU with the weight; None if another method does."""
    if x.device.type != "cpu":
        return None
    if isinstance(weight, Tensor):
        return products.chosen_kernel(x, weight)
    return _chosen_kernel(weight, x) if isinstance(weight, PackedMatrix) else None


def linear_fp32(x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """As `linear`, with an fp32 result [..., N].

    On a GPU the sums are not rounded to x's dtype first, where torch can (2.8 and newer), if the matrix is plain or is
    dequantised for the product, and no gradient is wanted; nor by kernels on a CPU, nor of exact rows. Other products
    are rounded first.
    """
    if _is_sliced(x, weight, scratch):
        assert isinstance(weight, PackedTable)
        return products.plus(_by_slices(x, weight), bias)
    if products.must_be_exact(x) and x.device.type != "cpu":
        return products.plus(exact_on_gpu(x, dense(weight, x.dtype, scratch), torch.float32), bias)
    is_half, is_plain = x.dtype in products.HALF_DTYPES, isinstance(weight, Tensor)
    is_product_of_torch = is_plain or (isinstance(weight, PackedMatrix) and _chosen_fused(weight, x) is None)
    if x.is_cuda and is_half and has_fp32_output() and is_product_of_torch and not torch.is_grad_enabled():
        product = torch.mm(x, dense(weight, x.dtype, scratch).t(), out_dtype=torch.float32)
        return product if bias is None else product + bias
    if (kernel := _kernel_for(x, weight)) is not None:
        multiply, parts = kernel
        return products.plus(multiply(x, parts, weight.shape[0], torch.float32), bias)
    if x.device.type == "cpu" and products.has_kernel(x):  # a matrix in memory was converted when it was loaded
        return products.plus(products.multiply_by_kernel(x, dense(weight, x.dtype, scratch), torch.float32), bias)
    return linear(x, weight, bias, scratch).float()


def _is_sliced(x: Tensor, weight: Weight, scratch: Tensor | None) -> bool:
    """Whether a large table on a GPU is unpacked for this product, and there is no memory planned for all of it."""
    if x.device.type == "cpu" or scratch is not None or isinstance(weight, Tensor):
        return False
    is_large = math.prod(weight.shape) > SLICE and isinstance(weight, PackedTable)
    return is_large and _chosen_fused(weight, x) is None


def _by_slices(x: Tensor, table: PackedTable) -> Tensor:
    """`linear_fp32` by some of the table's rows [N, K] at a time."""
    num_rows, num_inputs = table.shape
    height = max(1, SLICE // num_inputs)
    out = x.new_empty(*x.shape[:-1], num_rows, dtype=torch.float32)
    for first in range(0, num_rows, height):
        some = torch.arange(first, min(first + height, num_rows), device=table.device)
        out[..., first : first + len(some)] = linear_fp32(x, table.take(some).dequantize(x.dtype))
    return out


def slice_elements(shape: Sequence[int]) -> int:
    """Elements of a packed head of this shape that are unpacked at a time on a GPU."""
    return min(math.prod(shape), SLICE)


def exact_on_gpu(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] times a plain weight [N, K] of its dtype by `backends.triton.rows` → [..., N] in `dtype`, or x's."""
    kernels = row_kernels()
    assert kernels is not None, "exact rows without kernels"
    with on_device(x.device):
        product: Tensor = kernels.multiply(x, weight.contiguous(), dtype)
    return product


@cache
def has_fp32_output() -> bool:
    """Whether torch's products on a GPU can have fp32 results for 16-bit inputs."""
    return hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None


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


def tile(device: torch.device) -> int:
    """Elements to dequantise at a time."""
    return TILE_ON_CUDA if device.type == "cuda" else TILE
