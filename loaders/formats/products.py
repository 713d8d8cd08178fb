"""Ways to multiply with a matrix on a CPU, and which of them is taken for how many rows, as it was measured.

    torch     torch's own product: oneDNN where the CPU has instructions for the dtype, slow loops where it has not;
              a packed matrix is unpacked as a whole first, then multiplied in one of these ways
    tiles     some rows of the matrix at a time converted to fp32, and multiplied by torch's fp32 product
    kernel    one of `loaders.kernels`, which unpacks in registers

They agree within rounding. Unless `COSTS` was told what they take (`loaders.product_costs`) it is torch's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.compiler import instructions
from ..kernels.encodings import Float16
from ..kernels.row_product import RowProduct

TORCH, TILES, KERNEL = "torch", "tiles", "kernel"
HALF_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # that there is a choice for
TILE_ROWS = 512
LARGE_ELEMENTS = 1 << 22  # from here on a matrix is large, and what a call costs does not count


@dataclass(frozen=True)
class ProductKind:
    """What the time of a product depends on, beside the number of rows. form: how the weights lie ("bf16", "nf4")."""

    form: str
    dtype: torch.dtype
    is_large: bool

    @classmethod
    def of(cls, form: str, dtype: torch.dtype, num_elements: int) -> ProductKind:
        return cls(form, dtype, num_elements >= LARGE_ELEMENTS)

    def __str__(self) -> str:
        size = "large" if self.is_large else "small"
        return f"{self.form} x {str(self.dtype).removeprefix('torch.')}, {size}"


Seconds = Mapping[int, float]  # rows → seconds for each weight of the matrix


@dataclass(frozen=True)
class WayCosts:
    """What each way takes for one kind of product, at some numbers of rows."""

    seconds: Mapping[str, Seconds]

    def way(self, num_rows: int) -> str:
        """The one that takes least."""
        return min(self.seconds, key=lambda way: between(self.seconds[way], num_rows))

    def least(self, num_rows: int) -> float:
        """Seconds for each weight, by that way."""
        return min(between(seconds, num_rows) for seconds in self.seconds.values())


class ProductCosts:
    """What was measured in this process, or before on this machine.

    forced: a way to take whatever it costs, for weights of `forced_form`, or of all forms where that is "".
    """

    def __init__(self) -> None:
        self._known: dict[ProductKind, WayCosts] = {}
        self._chosen: dict[tuple[ProductKind, int], str] = {}
        self.forced: str | None = None
        self.forced_form = ""

    def set(self, kind: ProductKind, costs: WayCosts) -> None:
        self._known[kind] = costs
        self._chosen.clear()

    def get(self, kind: ProductKind) -> WayCosts | None:
        return self._known.get(kind)

    def way(self, kind: ProductKind, num_rows: int) -> str:
        """The way to take; torch's where nothing was measured."""
        if self.forced is not None and self.forced_form in ("", kind.form):
            return self.forced
        key = (kind, num_rows)
        if key not in self._chosen:
            costs = self._known.get(kind)
            self._chosen[key] = TORCH if costs is None else costs.way(num_rows)
        return self._chosen[key]

    def clear(self) -> None:
        self._known.clear()
        self._chosen.clear()


COSTS = ProductCosts()


def between(points: Seconds, place: int) -> float:
    """On the line between the points beside `place`; beyond the last at its rate a row, before the first as there."""
    known = sorted(points)
    if place >= known[-1]:
        return points[known[-1]] * place / known[-1]
    if place <= known[0]:
        return points[known[0]]
    right = bisect_left(known, place)
    low, high = known[right - 1], known[right]
    return points[low] + (points[high] - points[low]) * (place - low) / (high - low)


# ------------------------------------------------------------------------------------------------ plain matrices


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] on a CPU, plus bias [N] → [..., N] in x's dtype, in the way that takes least.

    scratch: at least N·K elements of x's dtype, for a weight of another.
    """
    way = TORCH
    if weight.dtype in HALF_DTYPES and not _needs_grad(x, weight):
        way = COSTS.way(ProductKind.of(HALF_DTYPES[weight.dtype], x.dtype, weight.numel()), rows_of(x))
    if way == KERNEL and (product := half_product(weight.dtype)) is not None and can_multiply(product, x, weight):
        return plus(product(x, [weight], weight.shape[0]), bias)
    if way == TILES:
        return plus(_by_tiles(x, weight), bias)
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype) if scratch is None else scratch[: weight.numel()].view(weight.shape).copy_(weight)
    return F.linear(x, weight, bias)


def plus(product: Tensor, bias: Tensor | None) -> Tensor:
    """product [..., N], which is changed, and bias [N]."""
    return product if bias is None else product.add_(bias)


def rows_of(x: Tensor) -> int:
    """How many rows [..., K] has."""
    return math.prod(x.shape[:-1])


def can_multiply(product: RowProduct, x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel takes these, which trusts what it is told: whole steps, lying row after row."""
    return (
        x.shape[-1] == weight.shape[1]
        and product.encoding.can_read(x.shape[-1])
        and weight.is_contiguous()
        and x.numel() > 0
        and weight.numel() > 0
    )


def _needs_grad(x: Tensor, weight: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


def _by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    wide, num_outputs = x.float(), weight.shape[0]
    out = torch.empty(*x.shape[:-1], num_outputs, dtype=x.dtype)
    tile = torch.empty(min(TILE_ROWS, num_outputs), weight.shape[1])
    for first in range(0, num_outputs, TILE_ROWS):
        some = weight[first : first + TILE_ROWS]
        out[..., first : first + TILE_ROWS] = F.linear(wide, tile[: len(some)].copy_(some))
    return out


# ------------------------------------------------------------------------------------------------ kernels


@cache
def half_product(dtype: torch.dtype) -> RowProduct | None:
    """The kernel for matrices of bf16 or fp16; None where this CPU has none."""
    lanes = num_lanes()
    return RowProduct(Float16(lanes, HALF_DTYPES[dtype])) if lanes else None


def num_lanes() -> int:
    """fp32 numbers in a vector of this CPU; 0 where there are no kernels for it."""
    found = instructions()
    return 16 if "avx512" in found else 8 if "avx2" in found else 0
