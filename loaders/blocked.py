"""16-bit matrices that stay on a CPU, in the order in which oneDNN multiplies them.

As `F.linear` is given a matrix, oneDNN brings it into an order of its own for every product, which for few rows takes longer than
the product. A matrix that stays can be brought into it once: up to a dozen rows are then multiplied about as fast as
memory can be read (docs/LOG.md has figures). The values are the same, and so is the size. What torch has for this it made for
compiled models; `is_supported` says where this version or this processor has it not.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

ROWS = 16  # that the order is chosen for; it serves other numbers nearly as well


class BlockedMatrix:
    """A matrix [N, K] in oneDNN's order (a `formats.PackedWeight`)."""

    def __init__(self, matrix: Tensor) -> None:
        """Copies it. matrix: one that `can_be_blocked`."""
        self.shape, self.dtype = tuple(matrix.shape), matrix.dtype
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS)

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] in the matrix's dtype → x times its transpose, plus bias [N]: [..., N]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")
        return product

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
