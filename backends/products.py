"""Products on a CPU: a kernel's if there is one for the matrix and the rows, whatever their number; otherwise torch's.

The kernels (`backends.x86`) unpack weights in registers, and sum a row in one order however many rows there are. Up to
64 rows they take at most as long as torch's product, and less where torch must unpack or convert the matrix first; of
256 and more rows of fp16 and fp32 up to 1.3 times as long (docs/LOG.md, "Kernels by rule").
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import FAST, INT8
from .x86.compiler import is_recording
from .x86.encodings import Float16, Float32
from .x86.processor import can_pair, has_tiles, num_lanes, per_processor
from .x86.row_product import RowProduct
from .x86.row_steps import add_rows, can_step
from .x86.tile_product import in_tiles

HALF_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
PLAIN_FORMS = {**HALF_DTYPES, torch.float32: "fp32"}
EXACT_DTYPES = tuple(PLAIN_FORMS)  # of rows that kernels multiply
FEW_ROWS = 4  # up to which sums in fp32 take less time than tiles or pairs (docs/LOG.md, "Kernels by rule")


# ------------------------------------------------------------------------------------------------ exact rows

_THREAD = threading.local()


@contextmanager
def exact_rows(is_on: bool = True, *, in_bytes: bool = False) -> Iterator[None]:
    """Inside, this thread computes each row on a CPU with the same bits whatever rows share its pass.

    in_bytes: rows are rounded to 8 bits where there is such a product (`backends.x86.byte_product`).
    """
    before = are_rows_exact(), are_rows_in_bytes()
    _THREAD.are_rows_exact, _THREAD.are_rows_in_bytes = is_on, is_on and in_bytes
    try:
        yield
    finally:
        _THREAD.are_rows_exact, _THREAD.are_rows_in_bytes = before


def are_rows_exact() -> bool:
    """Whether this thread is inside `exact_rows`."""
    return getattr(_THREAD, "are_rows_exact", False)


def are_rows_in_bytes() -> bool:
    """Whether this thread is inside `exact_rows` with rows in 8 bits."""
    return getattr(_THREAD, "are_rows_in_bytes", False)


def must_be_exact(x: Tensor) -> bool:
    """Whether rows x on any device must be computed with the same bits whatever rows share their pass."""
    has_gradients = torch.is_grad_enabled() and x.requires_grad
    return are_rows_exact() and x.dtype in EXACT_DTYPES and not has_gradients


def kernel_for(product: RowProduct, x: Tensor) -> RowProduct:
    """The kernel for rows x: up to FEW_ROWS that need not be exact take sums in fp32, others `exact_kernel`."""
    return product if rows_of(x) <= FEW_ROWS and not are_rows_exact() else exact_kernel(product, x.dtype)


def exact_kernel(product: RowProduct, dtype: torch.dtype) -> RowProduct:
    """The kernel for exact rows of a dtype: a rule of dtype, CPU and the user's choice alone."""
    if product.in_bytes is not None and are_rows_in_bytes():
        return product.in_bytes
    if dtype != torch.bfloat16 or product.encoding.lanes < 16:
        return product
    return in_tiles(product) if has_tiles() else product.in_pairs if can_pair() else product


def multiply_by_kernel(
    x: Tensor, weight: Tensor, dtype: torch.dtype | None = None, scratch: Tensor | None = None
) -> Tensor:
    """x [..., K] times a plain weight [N, K] → [..., N] in `dtype`, or x's, by a kernel.

    Columns that it cannot read become zeros. A weight with numbers that x's dtype has not is rounded to it, as a
    resident one was when it was loaded.
    """
    if not _is_exact_as_stored(x, weight):
        weight = weight.to(x.dtype) if scratch is None else scratch[: weight.numel()].view(weight.shape).copy_(weight)
    product = plain_product(weight.dtype)
    assert product is not None, "no kernels"
    if not x.numel() or not weight.numel():
        return F.linear(x, weight.to(x.dtype)).to(dtype or x.dtype)
    if (missing := -x.shape[-1] % product.encoding.step) > 0:
        x, weight = (torch.constant_pad_nd(each, (0, missing)) for each in (x, weight))
    return kernel_for(product, x)(x, [weight.contiguous()], weight.shape[0], dtype)


def _is_exact_as_stored(x: Tensor, weight: Tensor) -> bool:
    """Whether exact rows x multiply a plain weight without its conversion to their dtype, and its bits are the same."""
    if weight.dtype == torch.float16 and x.dtype == torch.bfloat16:
        return can_pair()  # pairs round it to bf16
    return weight.dtype == x.dtype or (weight.dtype in HALF_DTYPES and x.dtype == torch.float32)


def in_arithmetic(arithmetic: str) -> AbstractContextManager[None]:
    """Inside, this thread computes rows in one of `arithmetic.ARITHMETIC`."""
    return exact_rows(arithmetic != FAST, in_bytes=arithmetic == INT8)


def can_be_exact(dtype: torch.dtype) -> bool:
    """Whether this CPU has kernels for `exact_rows` with rows of a dtype."""
    return dtype in EXACT_DTYPES and num_lanes() > 0


# ------------------------------------------------------------------------------------------------ plain matrices


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] on a CPU, plus bias [N] → [..., N] in x's dtype.

    scratch: at least N·K elements of x's dtype, for a weight of another dtype.
    """
    if has_kernel(x, weight):
        return plus(multiply_by_kernel(x, weight, scratch=scratch), bias)
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype) if scratch is None else scratch[: weight.numel()].view(weight.shape).copy_(weight)
    return F.linear(x, weight, bias)


def has_kernel(x: Tensor, weight: Tensor | None = None) -> bool:
    """Whether rows x on a CPU are multiplied by kernels; weight: a plain matrix, or None for packed ones."""
    if x.dtype not in EXACT_DTYPES or not num_lanes():
        return False
    if weight is not None and (weight.dtype not in EXACT_DTYPES or x.shape[-1] != weight.shape[1]):
        return False  # torch's product raises an error for other shapes
    learns = x.requires_grad or (weight is not None and weight.requires_grad)
    return not (learns and torch.is_grad_enabled())


def chosen_kernel(x: Tensor, weight: Tensor) -> tuple[RowProduct, list[Tensor]] | None:
    """The kernel that multiplies rows x with a plain weight as it is, and its arguments; None if there is none."""
    if not (has_kernel(x, weight) and _is_exact_as_stored(x, weight)):
        return None
    product = plain_product(weight.dtype)
    assert product is not None, "no kernels"
    return (kernel_for(product, x), [weight]) if can_multiply(product, x, weight) else None


def plus(product: Tensor, bias: Tensor | None) -> Tensor:
    """Product [..., N] plus bias [N], maybe in place."""
    if bias is None:
        return product
    return add_rows(product, bias) if steps_add(product, bias) else product.add_(bias)


def steps_add(x: Tensor, other: Tensor) -> bool:
    """Whether `add_rows` adds two tensors: only for a recording, as it takes Python longer than torch's sum."""
    return is_recording() and x.dtype == other.dtype and can_step(x.dtype, x.shape[-1])


def rows_of(x: Tensor) -> int:
    """The number of rows of x [..., K]."""
    return math.prod(x.shape[:-1])


def can_multiply(product: RowProduct, x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel supports these operands: whole steps and contiguous rows. The kernel itself does not check."""
    return (
        x.shape[-1] == weight.shape[1]
        and product.encoding.can_read(x.shape[-1])
        and weight.is_contiguous()
        and x.numel() > 0
        and weight.numel() > 0
    )


# ------------------------------------------------------------------------------------------------ kernels


@per_processor
def plain_product(dtype: torch.dtype) -> RowProduct | None:
    """The kernel for matrices of bf16, fp16 or fp32; None if this CPU has none."""
    if not (lanes := num_lanes()):
        return None
    return RowProduct(Float32(lanes) if dtype == torch.float32 else Float16(lanes, HALF_DTYPES[dtype]))
