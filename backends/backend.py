"""`Backend`: what computes a decoder's rows, chosen once from its device and its arithmetic (`choice.backend_of`).

A layer's weights have it (`LayerWeights`), and so have the rows of a text: nothing asks a tensor where it lies. Two
backends at once are the normal case, for a draft and a target. This module has what all of them do alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import FAST
from .weights import PackedWeight, Unpackable, Weight, dense
from .x86.row_attention import KeySlots, KeysOfRows, Scores, Visible
from .x86.row_product import RowProduct


@dataclass(frozen=True)
class ExactRows:
    """What exact rows need of a backend. group: the most query heads that share a key head. head_dim: the largest."""

    dtype: torch.dtype
    keeps_states: bool
    has_experts: bool
    has_packed_keys: bool
    group: int
    head_dim: int


class Backend(ABC):
    """One device's functions of rows, in the fastest way; they keep gradients. Subclasses are exact."""

    arithmetic = FAST  # of `arithmetic.ARITHMETIC`
    is_faster = False  # than exact rows, unless a pass waits for weights
    takes_bytes = False  # rows are rounded to 8 bits where there are such products
    rounds_tails = False  # torch rounds some functions of single numbers otherwise in tensors of another length
    records_rows = False  # steps of one row can be recorded (`x86.recording`)
    walks_states = False  # recurrences go from state to state (`x86.state_steps`)
    shares_keys = True  # rows of several texts attend to their common beginning together
    chooses_at_once = False  # experts that rows chose can be multiplied by their addresses
    fuses = False  # packed matrices can be multiplied by a GPU's kernels
    multiplies_rows = False  # a matrix [N, K] should be contiguous
    converts_fp8 = True  # torch converts fp8 fast
    tile = 0  # elements to dequantise at a time, in plain torch

    @property
    def is_exact(self) -> bool:
        """Whether a row has the same bits whatever rows share its pass."""
        return self.arithmetic != FAST

    def prepare(self, products: Iterable[RowProduct], dtype: torch.dtype) -> None:  # noqa: B027 (most need nothing)
        """Compile, in the background, what multiplies rows of a dtype with matrices that have these kernels."""

    @abstractmethod
    def unpack(self, matrix: Unpackable, out: Tensor) -> None:
        """The numbers of a packed matrix [N, K] → out, contiguous: by a kernel, or by its plain twin."""

    # ---------------------------------------------------------------------------------------- products

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """x [..., K] times weight [N, K], plus bias [N] → [..., N] in x's dtype.

        scratch: at least N·K elements of x's dtype, 1-D, for a matrix that must be dequantised or converted first;
        without it, memory is allocated each time.
        """
        bias = bias if bias is None else bias.to(x.dtype)
        if needs_gradients(x) and _is_unpacked_for(x, weight):
            product: Tensor = ProductOfUnpacked.apply(x, weight)  # type: ignore[no-untyped-call]
            return product if bias is None else product + bias
        if isinstance(weight, Tensor):
            return self.multiply_plain(x, weight, bias, scratch)
        return weight.linear(x, bias, scratch, self)

    @abstractmethod
    def multiply_plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        """`linear` by a tensor; bias: in x's dtype."""

    @abstractmethod
    def multiply_packed(self, x: Tensor, matrix: PackedWeight, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        """`linear` by a `PackedMatrix`; bias: in x's dtype."""

    @abstractmethod
    def linear_fp32(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """As `linear`, with an fp32 result [..., N]: the sums, if possible without being rounded to x's dtype first."""

    def linears(
        self, x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None], scratch: Tensor | None = None
    ) -> list[Tensor]:
        """`linear` of x [..., K] by several weights."""
        return [self.linear(x, weight, bias, scratch) for weight, bias in zip(weights, biases, strict=True)]

    def linear_each(
        self, x: Tensor, counts: Sequence[int], weights: Sequence[Weight], scratch: Tensor | None = None
    ) -> Tensor:
        """x [R, K] times several weights [N, K], of which each multiplies `counts` rows → [sum of counts, N].

        Each multiplies the next rows, and after the last row the first ones again: one row may be that of all. The
        result has x's dtype. scratch: as for `linear`.
        """
        parts = zip(first_rows(x, counts), counts, weights, strict=True)
        return torch.cat([self.linear(x[first : first + num], weight, None, scratch) for first, num, weight in parts])

    def by_head(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x [T, heads, K] times each head's own matrix of [heads, N, K] → [T, heads, N]."""
        return torch.bmm(x.transpose(0, 1), matrices.transpose(1, 2)).transpose(0, 1)

    # ---------------------------------------------------------------------------------------- functions of rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [..., N] over N, times weight [N]."""
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """function(x) of each number of x."""
        return function(x)

    def silu(self, x: Tensor) -> Tensor:
        """silu(x) of each number of x [T, N]."""
        return self.each(F.silu, x)

    def swiglu(self, gate: Tensor, up: Tensor, *, is_clamped: bool) -> Tensor | None:
        """SwiGLU's inner numbers [T, N] in one step, see `row_steps.gate_rows`; None: there is no such step."""
        return None

    def mix(self, outputs: Tensor, scales: Tensor) -> Tensor:
        """The sum [T, N] of each row's outputs: [T·used, N] times fp32 scales [T, used]."""
        return (outputs.view(*scales.shape, -1) * scales[..., None]).sum(1).to(outputs.dtype)

    # ---------------------------------------------------------------------------------------- exact rows

    def fault(self) -> str | None:
        """Why its kernels do not run on this machine, as far as a launch tells; None if they do."""
        return None

    def reason_against(self, rows: ExactRows) -> str | None:
        """Why this backend cannot compute such rows exactly; None if it can. It launches nothing, see `fault`."""
        return "rows are computed in the fastest way"

    def attend_slots(self, queries: Tensor, parts: Iterable[KeySlots], visible: Visible, scores: Scores) -> Tensor:
        """Attention of queries [R, heads, D] → [R, heads, D]; only of exact backends.

        parts: keys and values, see `row_attention.attend_rows`. visible: what each row sees, `moved` where queries are.
        """
        raise NotImplementedError

    def attend_texts(self, queries: Tensor, texts: Sequence[KeysOfRows], scores: Scores) -> Tensor:
        """`attend_slots` of several texts, each with all keys in one part; of rows of none of them it means nothing."""
        raise NotImplementedError


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


def needs_gradients(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def rows_of(x: Tensor) -> int:
    """The number of rows of x [..., K]."""
    return math.prod(x.shape[:-1])


def first_rows(x: Tensor, counts: Sequence[int]) -> list[int]:
    """The first row of x for each of several weights, see `Backend.linear_each`."""
    return [first % max(1, len(x)) for first in accumulate(counts[:-1], initial=0)]


def _is_unpacked_for(x: Tensor, weight: Weight) -> bool:
    """Whether a product with x needs a copy of the weight; one that learns is converted by autograd itself."""
    return not isinstance(weight, Tensor) or (weight.dtype != x.dtype and not weight.requires_grad)
