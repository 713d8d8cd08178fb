"""Rows on a GPU: torch's functions, fused products with packed matrices, and Triton's kernels for exact rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import EXACT
from .backend import Backend, ExactRows, needs_gradients, rows_of
from .on_gpu import FUSED_ROWS, WORKING_KERNELS, on_device, row_kernels
from .weights import ALIGNMENT, HALF_DTYPES, PackedMatrix, PackedTable, PackedWeight, Product, Unpackable, Weight, dense
from .x86.row_attention import KeySlots, KeysOfRows, Scores, Visible, can_attend_on_gpu

ROWS = "exact rows"  # the kind of these kernels in `WORKING_KERNELS`
SLICE = 1 << 26  # of a packed head: the memory for its unpacked numbers, 128 MiB in 16 bits


class GpuBackend(Backend):
    """The fastest ways."""

    chooses_at_once = True
    fuses = True
    is_faster = True
    tile = 1 << 24  # large, because launches dominate

    def unpack(self, matrix: Unpackable, out: Tensor) -> None:
        if (kernel := matrix.launched_unpacking(out)) is None:
            matrix.unpack(out)
        else:
            WORKING_KERNELS.run((matrix.form, out.dtype), out.device, kernel, partial(matrix.unpack, out))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        bias = bias if bias is None else bias.to(x.dtype)
        if bias is not None and bias.data_ptr() % ALIGNMENT:
            bias = bias.clone()  # cuBLASLt may select a kernel that needs an aligned bias (pytorch#194497)
        return super().linear(x, weight, bias, scratch)

    def multiply_plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        return F.linear(x, dense(weight, x.dtype, scratch), bias)

    def multiply_packed(self, x: Tensor, matrix: PackedWeight, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        if (fused := self._fused(matrix, x)) is not None:
            return fused(x, bias, scratch)
        return self.linear(x, dense(matrix, x.dtype, scratch), bias)

    def _fused(self, matrix: Weight, x: Tensor) -> Product | None:
        """The product that does not dequantise, if it was measured to be faster; otherwise None."""
        if not isinstance(matrix, PackedMatrix) or needs_gradients(x):
            return None
        most = FUSED_ROWS.get(matrix.form, tuple(matrix.shape), x.dtype, x.device)
        return matrix.fused_linear if 0 < rows_of(x) <= most else None

    def linear_fp32(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        if self._is_sliced(x, weight, scratch):
            assert isinstance(weight, PackedTable)
            return _plus(self._by_slices(x, weight), bias)
        return self._linear_fp32(x, weight, bias, scratch)

    def _linear_fp32(self, x: Tensor, weight: Weight, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        """Sums are not rounded where torch can (2.8 and newer), if no product of its own multiplies the matrix."""
        is_plain = isinstance(weight, Tensor)
        is_product_of_torch = is_plain or (isinstance(weight, PackedMatrix) and self._fused(weight, x) is None)
        is_half = x.dtype in HALF_DTYPES
        if is_half and has_fp32_output() and is_product_of_torch and not torch.is_grad_enabled():
            return _plus(torch.mm(x, dense(weight, x.dtype, scratch).t(), out_dtype=torch.float32), bias)
        return self.linear(x, weight, bias, scratch).float()

    def _is_sliced(self, x: Tensor, weight: Weight, scratch: Tensor | None) -> bool:
        """Whether a large table is unpacked for this product, and there is no memory planned for all of it."""
        if scratch is not None or isinstance(weight, Tensor) or not isinstance(weight, PackedTable):
            return False
        return math.prod(weight.shape) > SLICE and self._fused(weight, x) is None

    def _by_slices(self, x: Tensor, table: PackedTable) -> Tensor:
        """`linear_fp32` by some of the table's rows [N, K] at a time."""
        num_rows, num_inputs = table.shape
        height = max(1, SLICE // num_inputs)
        out = x.new_empty(*x.shape[:-1], num_rows, dtype=torch.float32)
        for first in range(0, num_rows, height):
            some = torch.arange(first, min(first + height, num_rows), device=table.device)
            out[..., first : first + len(some)] = self.linear_fp32(x, table.take(some).dequantize(x.dtype))
        return out


class ExactGpuBackend(GpuBackend):
    """By `backends.triton.rows`. Fused products are not exact: they split their sums by the number of rows."""

    arithmetic = EXACT
    chooses_at_once = False
    shares_keys = False

    def __init__(self, device: torch.device = torch.device("cuda")) -> None:  # noqa: B008 (it cannot change)
        self._device = device

    def _fused(self, matrix: Weight, x: Tensor) -> Product | None:
        return None

    def multiply_plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        if needs_gradients(x):
            return super().multiply_plain(x, weight, bias, scratch)
        product = exact_product(x, dense(weight, x.dtype, scratch))
        return product if bias is None else product.add_(bias)

    def _linear_fp32(self, x: Tensor, weight: Weight, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        if needs_gradients(x):
            return super()._linear_fp32(x, weight, bias, scratch)
        return _plus(exact_product(x, dense(weight, x.dtype, scratch), torch.float32), bias)

    def by_head(self, x: Tensor, matrices: Tensor) -> Tensor:
        rows = x.transpose(0, 1).flatten(0, 1)
        product = self.linear_each(rows, [len(x)] * len(matrices), list(matrices.contiguous()))
        return product.view(len(matrices), len(x), -1).transpose(0, 1)

    def reason_against(self, rows: ExactRows) -> str | None:
        if rows.keeps_states:
            return "its layers keep states of the text, which other rows round otherwise"
        if row_kernels() is None:
            return "Triton is not installed"
        if rows.has_experts:
            return "the CPU beside the GPU may compute its experts, which rounds otherwise"
        if rows.has_packed_keys:  # all of them would be unpacked, into memory that plans do not count
            return "its packed KV entries are read in the fastest way on a GPU"
        if not can_attend_on_gpu(rows.group, rows.head_dim, rows.dtype.itemsize):
            return "its heads are too large for the kernel of attention"
        return self._known_fault

    def fault(self) -> str | None:
        """By one launch; None also where there is no GPU to launch them on."""
        if (kernels := row_kernels()) is None:
            return "Triton is not installed"
        if torch.cuda.is_available():
            trial = torch.zeros(16, 16, dtype=torch.float16, device=self._device)
            WORKING_KERNELS.run(ROWS, self._device, partial(kernels.multiply, trial, trial, None), lambda: None)
        return self._known_fault

    @property
    def _known_fault(self) -> str | None:
        if WORKING_KERNELS.has(ROWS, self._device) is not False:
            return None
        return "Triton cannot build its kernels (it needs a C compiler and Python's headers)"

    def attend_slots(self, queries: Tensor, parts: Iterable[KeySlots], visible: Visible, scores: Scores) -> Tensor:
        kernels = row_kernels()
        assert kernels is not None, "exact rows without kernels"
        keys, values = (torch.cat(each, 1) for each in zip(*((part.keys, part.values) for part in parts), strict=True))
        rows, slots = visible.moved[queries.device]
        with on_device(queries.device):
            attended: Tensor = kernels.attend(
                queries, keys, values, rows, slots, scale=scores.scale, cap=scores.cap, sinks=scores.sinks
            )
        return attended

    def attend_texts(self, queries: Tensor, texts: Sequence[KeysOfRows], scores: Scores) -> Tensor:
        out = torch.empty_like(queries)
        for first, part, visible in texts:
            some = slice(first, first + len(visible.rows))
            out[some] = self.attend_slots(queries[some], [part], visible, scores)
        return out


def exact_product(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] times a plain weight [N, K] of its dtype by `backends.triton.rows` → [..., N] in `dtype`, or x's."""
    kernels = row_kernels()
    assert kernels is not None, "exact rows without kernels"
    with on_device(x.device):
        product: Tensor = kernels.multiply(x, weight.contiguous(), dtype)
    return product


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product.add_(bias)


def slice_elements(shape: Sequence[int]) -> int:
    """Elements of a packed head of this shape that are unpacked at a time."""
    return min(math.prod(shape), SLICE)


@cache
def has_fp32_output() -> bool:
    """Whether torch's products can have fp32 results for 16-bit inputs."""
    return hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None
