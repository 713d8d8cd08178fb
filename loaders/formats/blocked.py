"""16-bit matrices resident on a CPU, in oneDNN's blocked order.

For every `F.linear`, oneDNN reorders the matrix, which for few rows takes longer than the product. A resident matrix
can be reordered once; products of up to a dozen rows then run at about the speed of memory (docs/LOG.md has figures).
Values and size do not change. torch provides the operations for compiled models; `is_supported` tells whether this
version and this processor have them. No checkpoint stores this format: `in_blocks` creates it from plain matrices, and
it is not registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from offspec.backends import products
from offspec.backends.weights import PackedMatrix, Weight

ROWS = 16  # the order is optimised for this number of rows, and nearly as good for others


class BlockedMatrix(PackedMatrix):
    """A matrix [N, K] in oneDNN's order (a `weights.PackedWeight`)."""

    def __init__(self, matrix: Tensor) -> None:
        """Copies the matrix, for which `can_be_blocked` must hold."""
        self.shape, self.dtype = tuple(matrix.shape), matrix.dtype
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS)

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] in the matrix's dtype → x times its transpose, plus bias [N]: [..., N]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")
        return product

    def linear(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """By oneDNN; if rows have another dtype or must be exact, the matrix is made plain for each product."""
        is_exact = products.must_be_exact(x)
        return self.times(x, bias) if x.dtype == self.dtype and not is_exact else super().linear(x, bias, scratch)

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The plain matrix in `dtype`."""
        plain = self._blocks.to_dense().to(dtype)
        return plain if out is None else out.copy_(plain)


@cache
def is_supported(dtype: torch.dtype) -> bool:
    """Whether torch and this CPU support the blocked order for this dtype."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        BlockedMatrix(torch.zeros(16, 16, dtype=dtype)).times(torch.zeros(1, 16, dtype=dtype))
    except (RuntimeError, AttributeError):  # the CPU lacks instructions; torch lacks the operation
        return False
    return True


def can_be_blocked(matrix: object) -> bool:
    return (
        isinstance(matrix, Tensor) and (matrix.dim(), matrix.device.type) == (2, "cpu") and is_supported(matrix.dtype)
    )


def in_blocks(weights: Mapping[str, Weight]) -> dict[str, Weight] | None:
    """Copies of a layer's weights with matrices in oneDNN's order; None unless all matrices support it."""
    if not all(can_be_blocked(weight) for weight in weights.values() if len(weight.shape) > 1):
        return None
    kept = dict[str, Weight]()
    for name, weight in weights.items():
        assert isinstance(weight, Tensor)
        kept[name] = BlockedMatrix(weight) if weight.dim() > 1 else weight.clone()
    return kept
