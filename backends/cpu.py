"""Rows on a CPU: by a kernel if there is one for the matrix and the rows, whatever their number; otherwise by torch.

The kernels (`backends.x86`) unpack weights in registers, and sum a row in one order however many rows there are. Up to
64 rows they take at most as long as torch's product, and less where torch must unpack or convert the matrix first; of
256 and more rows of fp16 and fp32 up to 1.3 times as long (docs/LOG.md, "Kernels by rule").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import INT8
from .backend import Backend, ExactRows, first_rows, rows_of
from .weights import HALF_DTYPES, PLAIN_FORMS, Kernel, PackedMatrix, PackedWeight, Unpackable, Weight, dense
from .x86.compiler import is_recording
from .x86.encodings import Float16, Float32
from .x86.processor import can_pair, has_tiles, num_lanes, per_processor
from .x86.row_attention import KeySlots, KeysOfRows, Scores, Visible, attend_rows, attend_rows_of_texts, can_attend
from .x86.row_product import ProductJob, RowProduct
from .x86.row_steps import add_rows, can_step, gate_rows, mix_rows, norm_rows, silu_rows
from .x86.state_steps import can_step_states
from .x86.tile_product import in_tiles

EXACT_DTYPES = tuple(PLAIN_FORMS)  # of rows that kernels multiply
FEW_ROWS = 4  # up to which sums in fp32 take less time than tiles or pairs (docs/LOG.md, "Kernels by rule")
# torch computes the end of a tensor, and of a thread's share of it, by other instructions than the rest, which round
# exponentials otherwise: where the numbers are no multiple of TAIL, or more than SHARE. So it does with numbers that do
# not lie side by side.
TAIL, SHARE = 64, 32768


class CpuBackend(Backend):
    """The fastest ways."""

    rounds_tails = True
    converts_fp8 = False
    multiplies_rows = True
    # Results of torch's operations stay in the allocator's pool of 2 MiB. A whole matrix of 117 MB needs fresh pages
    # each time, and took 64 ms instead of 16.
    tile = 1 << 20

    @property
    def walks_states(self) -> bool:  # type: ignore[override]
        return can_step_states()

    def kernel_for(self, product: RowProduct, x: Tensor) -> RowProduct:
        """The kernel for rows x: up to FEW_ROWS take sums in fp32, others `exact_kernel`."""
        return product if rows_of(x) <= FEW_ROWS else self.exact_kernel(product, x.dtype)

    def exact_kernel(self, product: RowProduct, dtype: torch.dtype) -> RowProduct:
        """The kernel for any number of rows of a dtype: a rule of dtype and CPU alone."""
        if dtype != torch.bfloat16 or product.encoding.lanes < 16:
            return product
        return in_tiles(product) if has_tiles() else product.in_pairs if can_pair() else product

    def prepare(self, products: Iterable[RowProduct], dtype: torch.dtype) -> None:
        for product in products:
            threading.Thread(target=self.exact_kernel(product, dtype).prepare, name="compile", daemon=True).start()

    def unpack(self, matrix: Unpackable, out: Tensor) -> None:
        (matrix.compiled_unpacking(out) or partial(matrix.unpack, out))()

    # ---------------------------------------------------------------------------------------- products

    def multiply_plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        if has_kernel(x, weight):
            return plus(self._by_kernel(x, weight, scratch=scratch), bias)
        return F.linear(x, dense(weight, x.dtype, scratch), bias)

    def multiply_packed(self, x: Tensor, matrix: PackedWeight, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        if (kernel := self._kernel_of(x, matrix)) is None:
            return self.linear(x, dense(matrix, x.dtype, scratch), bias)
        product, parts = kernel
        return plus(product(x, parts, matrix.shape[0]), bias)

    def linear_fp32(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """Sums are not rounded by kernels."""
        if (kernel := self._kernel_of(x, weight)) is not None:
            multiply, parts = kernel
            return plus(multiply(x, parts, weight.shape[0], torch.float32), bias)
        if has_kernel(x):  # a matrix in memory was converted when it was loaded
            return plus(self._by_kernel(x, dense(weight, x.dtype, scratch), torch.float32), bias)
        return self.linear(x, weight, bias, scratch).float()

    def linears(
        self, x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None], scratch: Tensor | None = None
    ) -> list[Tensor]:
        """In one call, if one kernel multiplies each of them."""
        kernels = [kernel for weight in weights if (kernel := self._kernel_of(x, weight)) is not None]
        if len(kernels) < len(weights) or len({id(product) for product, _ in kernels}) > 1:
            return super().linears(x, weights, biases, scratch)
        rows, sizes = x.reshape(-1, x.shape[-1]), [weight.shape[0] for weight in weights]
        jobs = [ProductJob(parts, size, 0, len(rows)) for (_, parts), size in zip(kernels, sizes, strict=True)]
        results = torch.split(kernels[0][0].each(rows, jobs), [len(rows) * size for size in sizes])
        shaped = [each.view(*x.shape[:-1], size) for each, size in zip(results, sizes, strict=True)]
        cast = [bias if bias is None else bias.to(x.dtype) for bias in biases]
        return [plus(each, bias) for each, bias in zip(shaped, cast, strict=True)]

    def linear_each(
        self, x: Tensor, counts: Sequence[int], weights: Sequence[Weight], scratch: Tensor | None = None
    ) -> Tensor:
        """In one call, if kernels multiply each of them alone."""
        if (kernel := self._common_kernel(x, counts, weights)) is None:
            return super().linear_each(x, counts, weights, scratch)
        product, matrices = kernel
        num_outputs, firsts = weights[0].shape[0], first_rows(x, counts)
        jobs = [ProductJob(parts, num_outputs, *rows) for parts, *rows in zip(matrices, firsts, counts, strict=True)]
        return product.each(x, jobs).view(-1, num_outputs)

    def by_head(self, x: Tensor, matrices: Tensor) -> Tensor:
        if x.dtype not in HALF_DTYPES:
            return super().by_head(x, matrices)
        return self._by_head(x, matrices)

    def _by_head(self, x: Tensor, matrices: Tensor) -> Tensor:
        rows = x.transpose(0, 1).flatten(0, 1)
        product = self.linear_each(rows, [len(x)] * len(matrices), list(matrices.contiguous()))
        return product.view(len(matrices), len(x), -1).transpose(0, 1)

    def mix(self, outputs: Tensor, scales: Tensor) -> Tensor:
        """One output after another."""
        total, *others = (outputs.view(*scales.shape, -1) * scales[..., None]).unbind(1)
        for each in others:
            total = total + each
        return total.to(outputs.dtype)

    # ---------------------------------------------------------------------------------------- kernels

    def _by_kernel(
        self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """x [..., K] times a plain weight [N, K] → [..., N] in `dtype`, or x's.

        Columns that the kernel cannot read become zeros. A weight with numbers that x's dtype has not is rounded to it,
        as a resident one was when it was loaded.
        """
        if not _is_exact_as_stored(x, weight):
            weight = dense(weight, x.dtype, scratch)
        product = plain_product(weight.dtype)
        assert product is not None, "no kernels"
        if not x.numel() or not weight.numel():
            return F.linear(x, weight.to(x.dtype)).to(dtype or x.dtype)
        if (missing := -x.shape[-1] % product.encoding.step) > 0:
            x, weight = (torch.constant_pad_nd(each, (0, missing)) for each in (x, weight))
        return self.kernel_for(product, x)(x, [weight.contiguous()], weight.shape[0], dtype)

    def _kernel_of(self, x: Tensor, weight: Weight) -> Kernel | None:
        """The kernel that multiplies rows x with the weight as it is, and its arguments; None: another method does."""
        if isinstance(weight, Tensor):
            if not (has_kernel(x, weight) and _is_exact_as_stored(x, weight)):
                return None
            product = plain_product(weight.dtype)
            assert product is not None, "no kernels"
            return (self.kernel_for(product, x), [weight]) if can_multiply(product, x, weight) else None
        if not isinstance(weight, PackedMatrix) or not x.numel() or not has_kernel(x):
            return None
        if (kernel := weight.kernel_for(x.dtype)) is None or x.shape[-1] != weight.shape[1]:
            return None
        return self.kernel_for(kernel[0], x), kernel[1]

    def _common_kernel(
        self, x: Tensor, counts: Sequence[int], weights: Sequence[Weight]
    ) -> tuple[RowProduct, list[list[Tensor]]] | None:
        """The kernel that multiplies each of the weights with its rows, and their parts; None if none is for all."""
        if len(weights) < 2:
            return None
        first, most = weights[0], x[: max(counts)]
        if (chosen := self._kernel_of(most, first)) is None:
            return None
        if isinstance(first, PackedMatrix):  # the choice is one of form, shape and rows
            form = first.form
            kernels = [each.kernel for each in weights if isinstance(each, PackedMatrix) and each.form == form]
            product = kernels[0] and kernels[0][0]
        else:
            kernels, product = [self._kernel_of(most, weight) for weight in weights], chosen[0]
        parts = [kernel[1] for kernel in kernels if kernel is not None and kernel[0] is product]
        return (chosen[0], parts) if len(parts) == len(weights) else None


class ExactCpuBackend(CpuBackend):
    """By kernels alone; where there is none, torch's way of equal bits. Functions of rows keep no gradients."""

    records_rows = True

    def __init__(self, arithmetic: str) -> None:
        """arithmetic: EXACT or INT8."""
        self.arithmetic = arithmetic
        self.takes_bytes = arithmetic == INT8

    def kernel_for(self, product: RowProduct, x: Tensor) -> RowProduct:
        return self.exact_kernel(product, x.dtype)

    def exact_kernel(self, product: RowProduct, dtype: torch.dtype) -> RowProduct:
        """In 8 bits, if the user chose that and there is such a product."""
        if self.takes_bytes and product.in_bytes is not None:
            return product.in_bytes
        return super().exact_kernel(product, dtype)

    def by_head(self, x: Tensor, matrices: Tensor) -> Tensor:
        return self._by_head(x, matrices)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rows(x, weight, eps) if can_step(x.dtype, x.shape[-1]) else super().rms_norm(x, weight, eps)

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """function(x) of so many whole vectors as torch takes alike."""
        numbers = F.pad(x.contiguous().view(-1), (0, -x.numel() % TAIL))
        return torch.cat([function(some) for some in torch.split(numbers, SHARE)])[: x.numel()].view(x.shape)

    def silu(self, x: Tensor) -> Tensor:
        """On all threads."""
        return silu_rows(x) if can_step(x.dtype, x.shape[-1]) else super().silu(x)

    def swiglu(self, gate: Tensor, up: Tensor, *, is_clamped: bool) -> Tensor | None:
        return gate_rows(gate, up, is_clamped=is_clamped) if can_step(gate.dtype, gate.shape[-1]) else None

    def mix(self, outputs: Tensor, scales: Tensor) -> Tensor:
        if can_step(outputs.dtype, outputs.shape[-1]):
            return mix_rows(outputs, scales)
        return super().mix(outputs, scales)

    def reason_against(self, rows: ExactRows) -> str | None:
        if not can_be_exact(rows.dtype):
            return "there are no kernels for this processor"
        if not can_attend(rows.group, rows.dtype):
            return "too many query heads share a key head"
        return None

    def attend_slots(self, queries: Tensor, parts: Iterable[KeySlots], visible: Visible, scores: Scores) -> Tensor:
        return attend_rows(queries, parts, visible, scores)

    def attend_texts(self, queries: Tensor, texts: Sequence[KeysOfRows], scores: Scores) -> Tensor:
        return attend_rows_of_texts(queries, texts, scores)


# ------------------------------------------------------------------------------------------------ what there is


def can_be_exact(dtype: torch.dtype) -> bool:
    """Whether this CPU has kernels for exact rows of a dtype."""
    return dtype in EXACT_DTYPES and num_lanes() > 0


def has_kernel(x: Tensor, weight: Tensor | None = None) -> bool:
    """Whether rows x are multiplied by kernels; weight: a plain matrix, or None for packed ones."""
    if x.dtype not in EXACT_DTYPES or not num_lanes():
        return False
    if weight is not None and (weight.dtype not in EXACT_DTYPES or x.shape[-1] != weight.shape[1]):
        return False  # torch's product raises an error for other shapes
    learns = x.requires_grad or (weight is not None and weight.requires_grad)
    return not (learns and torch.is_grad_enabled())


def _is_exact_as_stored(x: Tensor, weight: Tensor) -> bool:
    """Whether exact rows x multiply a plain weight without its conversion to their dtype, and its bits are the same."""
    if weight.dtype == torch.float16 and x.dtype == torch.bfloat16:
        return can_pair()  # pairs round it to bf16
    return weight.dtype == x.dtype or (weight.dtype in HALF_DTYPES and x.dtype == torch.float32)


def can_multiply(product: RowProduct, x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel supports these operands: whole steps and contiguous rows. The kernel itself does not check."""
    return (
        x.shape[-1] == weight.shape[1]
        and product.encoding.can_read(x.shape[-1])
        and weight.is_contiguous()
        and x.numel() > 0
        and weight.numel() > 0
    )


@per_processor
def plain_product(dtype: torch.dtype) -> RowProduct | None:
    """The kernel for matrices of bf16, fp16 or fp32; None if this CPU has none."""
    if not (lanes := num_lanes()):
        return None
    return RowProduct(Float32(lanes) if dtype == torch.float32 else Float16(lanes, HALF_DTYPES[dtype]))


def plus(product: Tensor, bias: Tensor | None) -> Tensor:
    """Product [..., N] plus bias [N], maybe in place."""
    if bias is None:
        return product
    return add_rows(product, bias) if steps_add(product, bias) else product.add_(bias)


def steps_add(x: Tensor, other: Tensor) -> bool:
    """Whether `add_rows` adds two tensors: only for a recording, as it takes Python longer than torch's sum."""
    return is_recording() and x.dtype == other.dtype and can_step(x.dtype, x.shape[-1])
