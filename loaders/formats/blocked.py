"""16-bit matrices that stay on a CPU, in the order in which oneDNN multiplies them.

As `F.linear` is given a matrix, oneDNN brings it into an order of its own for every product, which for few rows takes
longer than the product. A matrix that stays can be brought into it once: up to a dozen rows are then multiplied about
as fast as memory can be read (docs/LOG.md has figures). The values are the same, and so is the size. What torch has for
this it made for compiled models; `is_supported` says where this version or this processor has it not. No checkpoint
stores weights so: it is what becomes of plain ones (`in_blocks`), and not registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from .core import PackedMatrix, Weight

ROWS = 16  # that the order is chosen for; it serves other numbers nearly as well


class BlockedMatrix(PackedMatrix):
    """A matrix [N, K] in oneDNN's order (a `core.PackedWeight`)."""

    def __init__(self, matrix: Tensor) -> None:
        """Copies it. matrix: one that `can_be_blocked`."""
        self.shape, self.dtype = tuple(matrix.shape), matrix.dtype
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS)

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] in the matrix's dtype → x times its transpose, plus bias [N]: [..., N]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")
        return product

    def linear(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        return self.times(x, bias) if x.dtype == self.dtype else super().linear(x, bias, scratch)

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The matrix as it was, in `dtype`."""
        plain = self._blocks.to_dense().to(dtype)
        return plain if out is None else out.copy_(plain)


@cache
def is_supported(dtype: torch.dtype) -> bool:
    """Whether matrices of this dtype have such an order here."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        BlockedMatrix(torch.zeros(16, 16, dtype=dtype)).times(torch.zeros(1, 16, dtype=dtype))
    except (RuntimeError, AttributeError):  # no instructions for it; another torch
        return False
    return True


def can_be_blocked(matrix: object) -> bool:
    return (
        isinstance(matrix, Tensor) and (matrix.dim(), matrix.device.type) == (2, "cpu") and is_supported(matrix.dtype)
    )


def in_blocks(weights: Mapping[str, Weight]) -> dict[str, Weight] | None:
    """Copies of a layer's weights, the matrices in oneDNN's order; None unless all matrices can be."""
    if not all(can_be_blocked(weight) for weight in weights.values() if len(weight.shape) > 1):
        return None
    kept = dict[str, Weight]()
    for name, weight in weights.items():
        assert isinstance(weight, Tensor)
        kept[name] = BlockedMatrix(weight) if weight.dim() > 1 else weight.clone()
    return kept
