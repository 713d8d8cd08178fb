"""Attention of rows to one part of the keys, with the softmax's sums, by which the results of parts are merged.

`scaled_dot_product_attention` hides the sums, but the operators behind it return their logarithms: on a CPU its
FlashAttention; on CUDA FlashAttention for parts without a mask, and memory-efficient attention for those with one. None
of them holds scores. What no operator takes is computed by formula, in fp32 with all scores of a part.

Queries are [kv_heads, group, T, D]: those that share a key head together, as rows of one matrix. Results have the same
shape, and the sums' logarithms are [kv_heads, group, T]. A row without keys in a part has any finite result, and a
logarithm so small that merging drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from offspec.backends.device_kinds import DeviceKind, kind_of

# By formula: scores (heads * rows * keys) of a part, with at least so many keys.
PART_SCORES, LEAST_PART_KEYS = 2**23, 256

# Operators of torch.ops.aten, and the arguments that are used here.
CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
CUDA_FLASH = "_scaled_dot_product_flash_attention"
CUDA_EFFICIENT = "_scaled_dot_product_efficient_attention"
ARGUMENTS = {
    CPU_FLASH: {"query", "key", "value", "attn_mask", "scale"},
    CUDA_FLASH: {"query", "key", "value", "scale"},
    CUDA_EFFICIENT: {"query", "key", "value", "attn_bias", "compute_log_sumexp", "scale"},
}

# Limits of torch's CUDA kernels, beside those of `DeviceKind`.
LARGEST_FLASH_HEAD = 256
BIAS_ALIGNMENT = 16  # numbers of which a row of the bias has to be a multiple in memory
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
TENSOR_CORES = (8, 0)  # the compute capability from which on there is FlashAttention, and bf16
# Added to the scores of masked keys. Minus infinity would make NaN of rows without keys, in some versions.
MASKED_SCORE = {torch.float16: -65504.0, torch.bfloat16: -1e30, torch.float32: -1e30}


@dataclass(frozen=True)
class KeyPart:
    """Keys and values [kv_heads, S, D] of some slots, and the bool mask [T, S] of T rows; None for all of them."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None


class PartAttention(Protocol):
    """A way to compute attention to a part."""

    def __call__(self, queries: Tensor, part: KeyPart, scale: float) -> tuple[Tensor, Tensor]:
        """The result and the logarithms of sums, see the module's docstring."""

    def most_keys(self, num_rows: int) -> int | None:
        """The number of keys in a part for `num_rows` rows of all heads together; None for any number."""


def part_attention(queries: Tensor, cap: float | None) -> PartAttention:
    """The fastest way for queries [..., D] on their device. cap: c of c tanh(score / c).

    The operators' sums have no gradients.
    """
    if queries.requires_grad:
        return ByFormula(cap)
    head_dim, itemsize, device = queries.shape[-1], queries.dtype.itemsize, queries.device
    if reason_for_formula(head_dim, itemsize, cap, kind_of(device)) is not None:
        return ByFormula(cap)
    if device.type == "cpu":
        flash = operator(CPU_FLASH)
        return ByFormula() if flash is None else OnCpu(flash)
    operators = cuda_operators(device)
    return operators if operators.takes(queries.dtype) else ByFormula()


def reason_for_formula(head_dim: int, itemsize: int, cap: float | None, device: DeviceKind) -> str | None:
    """Why attention by parts is computed by formula; None if torch's operators do it.

    itemsize: bytes of a number. What an unusual build of torch or an old card lacks is not known here.
    """
    if cap is not None:
        return "scores are capped"
    if itemsize > device.attended_itemsize:
        return f"numbers of {8 * itemsize} bits"
    if head_dim * itemsize % device.attended_alignment:
        return f"heads of {head_dim} numbers"
    return None


def most_scored_keys(num_rows: int) -> int:
    """The number of keys in a part by formula, for `num_rows` rows of all heads together."""
    return max(LEAST_PART_KEYS, PART_SCORES // num_rows)


def operator(name: str) -> Callable[..., Any] | None:
    """An operator of torch that returns the sums, if this version has it with the arguments that are used."""
    overloads = getattr(torch.ops.aten, name, None)
    if overloads is None:
        return None
    schema = overloads.default._schema
    takes = ARGUMENTS[name] <= {argument.name for argument in schema.arguments}
    return overloads.default if takes and len(schema.returns) >= 2 else None


@cache
def cuda_operators(device: torch.device) -> OnCuda:
    """What this build of torch has for CUDA, as far as the card runs it."""
    present = {
        name: operator(name)
        for name in (CUDA_FLASH, CUDA_EFFICIENT)
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
    }
    # Builds without FlashAttention, such as those for Windows were, have an operator that raises.
    has_flash = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    is_new = torch.cuda.get_device_capability(device) >= TENSOR_CORES
    flash = present.get(CUDA_FLASH) if is_new and has_flash() else None
    return OnCuda(flash, present.get(CUDA_EFFICIENT), takes_bf16=is_new)


@dataclass(frozen=True)
class OnCuda:
    """torch's operators for CUDA. flash: for parts without a mask; without it, `efficient` computes these, too."""

    flash: Callable[..., Any] | None
    efficient: Callable[..., Any] | None
    takes_bf16: bool = True

    def takes(self, dtype: torch.dtype) -> bool:
        return self.efficient is not None and dtype in MASKED_SCORE and (self.takes_bf16 or dtype != torch.bfloat16)

    def most_keys(self, num_rows: int) -> int | None:
        return None

    def __call__(self, queries: Tensor, part: KeyPart, scale: float) -> tuple[Tensor, Tensor]:
        is_flash = queries.dtype in SIXTEEN_BIT and queries.shape[-1] <= LARGEST_FLASH_HEAD
        if self.flash is not None and is_flash and part.mask is None:
            # Heads of a group are further rows, so that few rows fill the kernel's tiles. Nothing is copied.
            attended, sums, *_ = self.flash(
                queries.flatten(1, 2)[None], part.keys[None], part.values[None], scale=scale
            )
            return attended[0].view(queries.shape), sums[0].view(queries.shape[:3])
        return self._by_efficient(queries, part, scale)

    def _by_efficient(self, queries: Tensor, part: KeyPart, scale: float) -> tuple[Tensor, Tensor]:
        """Key heads are the batch, and those of a group share keys and bias, which are expanded without copies."""
        assert self.efficient is not None
        num_kv_heads, group, num_rows, _ = queries.shape
        keys, values = (each[:, None].expand(-1, group, -1, -1) for each in (part.keys, part.values))
        bias = None
        if part.mask is not None:
            bias = aligned_bias(part.mask, queries.dtype).expand(num_kv_heads, group, -1, -1)
        attended, sums, *_ = self.efficient(queries, keys, values, bias, compute_log_sumexp=True, scale=scale)
        return attended, sums[..., :num_rows]  # the sums are padded to a multiple of 32 rows


def aligned_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores for a bool mask [T, S]: [T, S], a slice of memory with aligned rows."""
    num_rows, num_keys = mask.shape
    width = -(-num_keys // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    bias = torch.full((num_rows, width), MASKED_SCORE[dtype], dtype=dtype, device=mask.device)[:, :num_keys]
    return bias.masked_fill_(mask, 0.0)


@dataclass(frozen=True)
class OnCpu:
    """torch's FlashAttention for CPUs, which takes masks."""

    flash: Callable[..., Any]

    def most_keys(self, num_rows: int) -> int | None:
        return None

    def __call__(self, queries: Tensor, part: KeyPart, scale: float) -> tuple[Tensor, Tensor]:
        group = queries.shape[1]
        mask = part.mask if part.mask is None or group == 1 else part.mask.repeat(group, 1)
        added = None
        if mask is not None:
            added = torch.zeros(mask.shape, dtype=queries.dtype).masked_fill_(~mask, -torch.inf)
        rows = queries.flatten(1, 2)[None]
        attended, sums = self.flash(rows, part.keys[None], part.values[None], attn_mask=added, scale=scale)
        if mask is not None:
            sums = sums.masked_fill(~mask.any(1), -torch.inf)
        return attended[0].view(queries.shape), sums[0].view(queries.shape[:3])


@dataclass(frozen=True)
class ByFormula:
    """Plain torch, with all scores of a part in fp32. cap: c of c tanh(score / c)."""

    cap: float | None = None

    def most_keys(self, num_rows: int) -> int | None:
        return most_scored_keys(num_rows)

    def __call__(self, queries: Tensor, part: KeyPart, scale: float) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(queries.dtype, torch.float32)
        scores = (queries.flatten(1, 2).to(exact) @ part.keys.to(exact).transpose(1, 2)) * scale
        if self.cap is not None:
            scores = (scores / self.cap).tanh_() * self.cap
        scores = scores.view(*queries.shape[:3], -1)
        if part.mask is not None:
            scores = scores.masked_fill_(~part.mask, -torch.inf)
        sums = scores.logsumexp(-1)
        weights = (scores - sums.clamp(min=torch.finfo(exact).min)[..., None]).exp_()
        return (weights.flatten(1, 2) @ part.values.to(exact)).view(queries.shape), sums
