"""Ways to multiply with a matrix on a CPU, and the choice of the fastest for a number of rows, by measured costs.

    torch     torch's product: oneDNN if the CPU has instructions for the dtype, otherwise slow loops;
              a packed matrix is first unpacked as a whole, then multiplied by one of these methods
    tiles     converts some rows of the matrix at a time to fp32, and multiplies with torch's fp32 product
    kernel    a kernel of `backends.x86`, which unpacks in registers

The results agree within rounding. Without costs in `COSTS` (`loaders.machine.product_costs`), the method is torch's.

Inside `exact_rows`, rows are multiplied by kernels alone, which sum a row in one order however many rows there are.
bf16 rows take the kernel with bf16 factors in pairs if the CPU has its instruction.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

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

TORCH, TILES, KERNEL = "torch", "tiles", "kernel"
HALF_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # plain dtypes with several methods
EXACT_DTYPES = (*HALF_DTYPES, torch.float32)  # of rows that kernels multiply
TILE_ROWS = 512
LARGE_ELEMENTS = 1 << 22  # for matrices from this size on, the overhead of a call is negligible


@dataclass(frozen=True)
class ProductKind:
    """The key for the time of a product, besides the number of rows. form: the weights' format ("bf16", "nf4").

    arithmetic: of `arithmetic.ARITHMETIC`. All but FAST have one method, the kernel of `exact_rows`.
    """

    form: str
    dtype: torch.dtype
    is_large: bool
    arithmetic: str = FAST

    @classmethod
    def of(cls, form: str, dtype: torch.dtype, num_elements: int) -> ProductKind:
        return cls(form, dtype, num_elements >= LARGE_ELEMENTS)

    def __str__(self) -> str:
        size = "large" if self.is_large else "small"
        exact = "" if self.arithmetic == FAST else f", {self.arithmetic}"
        return f"{self.form} x {str(self.dtype).removeprefix('torch.')}, {size}{exact}"


Seconds = Mapping[int, float]  # rows → seconds per weight of the matrix


@dataclass(frozen=True)
class MethodCosts:
    """The costs of each method for one kind of product, at some numbers of rows."""

    seconds: Mapping[str, Seconds]

    def method(self, num_rows: int) -> str:
        """The fastest method."""
        return min(self.seconds, key=lambda method: between(self.seconds[method], num_rows))

    def least(self, num_rows: int) -> float:
        """Seconds per weight with the fastest method."""
        return min(between(seconds, num_rows) for seconds in self.seconds.values())


class ProductCosts:
    """The costs measured in this process, or earlier on this machine.

    forced: a method to use regardless of costs, for weights of `forced_form`, or of all forms if that is "". is_fixed:
    nothing is measured any more, and the methods of forms given to `fix` are kernels, for any number of rows.
    """

    def __init__(self) -> None:
        self._known: dict[ProductKind, MethodCosts] = {}
        self._chosen: dict[tuple[ProductKind, int], str] = {}
        self._fixed = set[str]()  # forms
        self.is_fixed = False
        self.forced: str | None = None
        self.forced_form = ""

    def set(self, kind: ProductKind, costs: MethodCosts) -> None:
        self._known[kind] = costs
        self._chosen.clear()

    def get(self, kind: ProductKind) -> MethodCosts | None:
        return self._known.get(kind)

    def fix(self, form: str) -> None:
        """Use kernels for weights of this form, where there are some, whatever was measured."""
        self._fixed.add(form)

    def method(self, kind: ProductKind, num_rows: int) -> str:
        """The method to use; torch's if there is no measurement."""
        if self.forced is not None and self.forced_form in ("", kind.form):
            return self.forced
        if kind.form in self._fixed:
            return KERNEL
        key = (kind, num_rows)
        if key not in self._chosen:
            costs = self._known.get(kind)
            self._chosen[key] = TORCH if costs is None else costs.method(num_rows)
        return self._chosen[key]

    def clear(self) -> None:
        self._fixed.clear()
        self._known.clear()
        self._chosen.clear()


COSTS = ProductCosts()


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


def exact_kernel(product: RowProduct, dtype: torch.dtype) -> RowProduct:
    """The kernel for rows of a dtype inside `exact_rows`: a rule of dtype, CPU and the user's choice alone."""
    if product.in_bytes is not None and are_rows_in_bytes():
        return product.in_bytes
    if dtype != torch.bfloat16 or product.encoding.lanes < 16:
        return product
    return in_tiles(product) if has_tiles() else product.in_pairs if can_pair() else product


def multiply_exactly(
    x: Tensor, weight: Tensor, dtype: torch.dtype | None = None, scratch: Tensor | None = None
) -> Tensor:
    """x [..., K] times a plain weight [N, K] → [..., N] in `dtype`, or x's, by a kernel.

    Columns that it cannot read become zeros. A weight with numbers that x's dtype has not is rounded to it, as a
    resident one was when it was loaded.
    """
    if not _is_exact_as_stored(x, weight):
        weight = weight.to(x.dtype) if scratch is None else scratch[: weight.numel()].view(weight.shape).copy_(weight)
    product = plain_product(weight.dtype)
    assert product is not None, "exact rows without kernels"
    if not x.numel() or not weight.numel():
        return F.linear(x, weight.to(x.dtype)).to(dtype or x.dtype)
    if (missing := -x.shape[-1] % product.encoding.step) > 0:
        x, weight = (torch.constant_pad_nd(each, (0, missing)) for each in (x, weight))
    return exact_kernel(product, x.dtype)(x, [weight.contiguous()], weight.shape[0], dtype)


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


def between(points: Seconds, place: int) -> float:
    """Linear interpolation at `place`; after the last point proportional to rows, before the first constant."""
    places = sorted(points)
    if place >= places[-1]:
        return points[places[-1]] * place / places[-1]
    if place <= places[0]:
        return points[places[0]]
    right = bisect_left(places, place)
    low, high = places[right - 1], places[right]
    return points[low] + (points[high] - points[low]) * (place - low) / (high - low)


# ------------------------------------------------------------------------------------------------ plain matrices


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] on a CPU, plus bias [N] → [..., N] in x's dtype, by the fastest method.

    scratch: at least N·K elements of x's dtype, for a weight of another dtype.
    """
    if must_be_exact(x):
        return plus(multiply_exactly(x, weight, scratch=scratch), bias)
    if (chosen := chosen_kernel(x, weight)) is not None:
        return plus(chosen[0](x, chosen[1], weight.shape[0]), bias)
    if _way(x, weight) == TILES:
        return plus(_by_tiles(x, weight), bias)
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype) if scratch is None else scratch[: weight.numel()].view(weight.shape).copy_(weight)
    return F.linear(x, weight, bias)


def chosen_kernel(x: Tensor, weight: Tensor) -> tuple[RowProduct, list[Tensor]] | None:
    """The kernel that multiplies rows x with a plain weight as it is, and its arguments; None for other methods."""
    if must_be_exact(x):
        product = plain_product(weight.dtype) if _is_exact_as_stored(x, weight) else None
        product = product and exact_kernel(product, x.dtype)
    else:
        product = plain_product(weight.dtype) if _way(x, weight) == KERNEL else None
    return (product, [weight]) if product is not None and can_multiply(product, x, weight) else None


def _way(x: Tensor, weight: Tensor) -> str:
    return TORCH if torch.is_grad_enabled() and weight.requires_grad else method_for(weight.dtype, x, weight.numel())


def method_for(dtype: torch.dtype, x: Tensor, num_elements: int) -> str:
    """The method for a plain matrix of `dtype` with `num_elements` elements, and the rows x."""
    if dtype not in HALF_DTYPES or (torch.is_grad_enabled() and x.requires_grad):
        return TORCH
    return COSTS.method(ProductKind.of(HALF_DTYPES[dtype], x.dtype, num_elements), rows_of(x))


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


def _by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    wide, num_outputs = x.float(), weight.shape[0]
    out = torch.empty(*x.shape[:-1], num_outputs, dtype=x.dtype)
    tile = torch.empty(min(TILE_ROWS, num_outputs), weight.shape[1])
    for first in range(0, num_outputs, TILE_ROWS):
        some = weight[first : first + TILE_ROWS]
        out[..., first : first + TILE_ROWS] = F.linear(wide, tile[: len(some)].copy_(some))
    return out


# ------------------------------------------------------------------------------------------------ kernels


@per_processor
def plain_product(dtype: torch.dtype) -> RowProduct | None:
    """The kernel for matrices of bf16, fp16 or fp32; None if this CPU has none."""
    if not (lanes := num_lanes()):
        return None
    return RowProduct(Float32(lanes) if dtype == torch.float32 else Float16(lanes, HALF_DTYPES[dtype]))
