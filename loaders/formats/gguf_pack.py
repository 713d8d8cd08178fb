"""Quantises matrices to GGUF's types Q4_K, Q3_K, Q2_K and Q4_1, in plain torch, from the weights alone.

A block's scale, and its minimum if the type has one, start from the range of its weights. Then codes and scales are
improved by turns: least squares gives the best scale and minimum for the codes, and these give new codes. A block of
256 rounds its 8 or 16 scales to integers of 4 or 6 bits; the codes are rounded last, with the stored scales.

Source: the layouts of ggml-common.h, as `gguf_blocks` decodes them. llama.cpp searches a grid of scales instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offspec.errors import CheckpointError

from ..gguf_types import GGUF_TYPES, GgufType

ROUNDS = 2  # of least squares; a third one takes 0.5 to 1.7 % off the squared error of normal weights
TILE = 1 << 19  # weights at a time: the temporaries stay in a core's cache
TYPES: Mapping[str, GgufType] = {kind.name: kind for kind in GGUF_TYPES.values()}


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, and 0 where that is 0."""
    return torch.where(scales == 0, 0, 1 / scales)


def _half(numbers: Tensor) -> Tensor:
    """[B] → uint8 [B, 2], as fp16."""
    return numbers.to(torch.float16)[:, None].view(torch.uint8)


def _stored(numbers: Tensor) -> Tensor:
    """What fp16 makes of them, fp32."""
    return numbers.to(torch.float16).float()


def _grouped(weights: Tensor, size: int) -> Tensor:
    """fp32 [B, K] → [K / size, size, B]: groups of neighbours. Summing over dim 1 adds long rows, which is fast."""
    return weights.T.contiguous().view(-1, size, len(weights))


def _in_order(codes: Tensor) -> Tensor:
    """[G, size, B] → uint8 [B, G · size]: the reverse of `_grouped`."""
    return codes.to(torch.uint8).flatten(0, 1).T.contiguous()


def _affine(weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales and minima (at least 0) [G, B]: weights [G, n, B] ≈ scale · code - minimum, codes from 0 to `most`."""
    num = weights.shape[1]
    total, lows = weights.sum(1), weights.amin(1).clamp_max_(0).neg_()
    scales = (weights.amax(1) + lows).clamp_min_(0) / most
    for _ in range(ROUNDS):
        codes = _codes(weights, scales, lows, most)
        first, second, mixed = codes.sum(1), codes.square().sum(1), (codes * weights).sum(1)
        spread = num * second - first * first  # 0 where all codes are equal
        fitted = torch.where(spread > 0, (num * mixed - first * total) / spread, scales)
        shift = (fitted * first - total) / num
        is_below = shift < 0  # no minimum can be above 0: the best scale without one
        lows = shift.clamp_min(0)
        scales = torch.where(is_below, mixed * _inverse(second), fitted).clamp_min_(0)
    return scales, lows


def _codes(weights: Tensor, scales: Tensor, lows: Tensor, most: int) -> Tensor:
    """fp32 [G, n, B]: the nearest codes for scales and minima [G, B]."""
    return weights.add(lows[:, None]).mul_(_inverse(scales)[:, None]).round_().clamp_(0, most)


def _symmetric(weights: Tensor, least: int) -> Tensor:
    """Scales [G, B] of either sign: weights [G, n, B] ≈ scale · code, codes from `least` (below 0) to -least - 1."""
    low, high = weights.amin(1), weights.amax(1)
    scales = torch.where(-low > high, low, high) / least  # the largest weight takes the code without a counterpart
    for _ in range(ROUNDS):
        codes = _signed_codes(weights, scales, least)
        scales = (codes * weights).sum(1) * _inverse(codes.square().sum(1))
    return scales


def _signed_codes(weights: Tensor, scales: Tensor, least: int) -> Tensor:
    return weights.mul(_inverse(scales)[:, None]).round_().clamp_(least, -least - 1)


def _to_integers(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """numbers (at least 0) [G, B] → a factor [B] as fp16 stores it, and integers [G, B] up to `most`."""
    factor = _stored(numbers.amax(0) / most)
    return factor, numbers.mul(_inverse(factor)).round_().clamp_(0, most)


def _bytes(codes: Tensor) -> Tensor:
    """[G, B] → uint8 [B, G]."""
    return codes.to(torch.uint8).T


def _crumbs(codes: Tensor) -> Tensor:
    """uint8 [B, 256], two bits each → [B, 64]: four weights at distances of 32 share a byte."""
    parts = codes.view(-1, 2, 4, 32)
    return (parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6).flatten(1)


def _q4_k(weights: Tensor) -> Tensor:
    """fp32 [B, 256] → uint8 [B, 144]: d, dmin, 8 scales and minima of 6 bits, codes of 4 bits."""
    groups = _grouped(weights, 32)
    scales, lows = _affine(groups, 15)
    (d, scales), (dmin, lows) = _to_integers(scales, 63), _to_integers(lows, 63)
    codes = _in_order(_codes(groups, d * scales, dmin * lows, 15)).view(-1, 4, 2, 32)
    s, m = _bytes(scales), _bytes(lows)
    packed = (s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4)
    return torch.cat((_half(d), _half(dmin), *packed, (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)), dim=1)


def _q2_k(weights: Tensor) -> Tensor:
    """fp32 [B, 256] → uint8 [B, 84]: 16 scales and minima of 4 bits, codes of 2 bits, d, dmin."""
    groups = _grouped(weights, 16)
    scales, lows = _affine(groups, 3)
    (d, scales), (dmin, lows) = _to_integers(scales, 15), _to_integers(lows, 15)
    codes = _in_order(_codes(groups, d * scales, dmin * lows, 3))
    return torch.cat((_bytes(scales) | _bytes(lows) << 4, _crumbs(codes), _half(d), _half(dmin)), dim=1)


def _q3_k(weights: Tensor) -> Tensor:
    """fp32 [B, 256] → uint8 [B, 110]: third bits, codes of 2 bits, 16 scales of 6 bits with a sign, d."""
    groups = _grouped(weights, 16)
    scales = _symmetric(groups, -4)
    d = _stored(scales.abs().amax(0) / 31)
    integers = scales.mul(_inverse(d)).round_().clamp_(-31, 31)
    codes = _in_order(_signed_codes(groups, d * integers, -4).add_(4))
    s = _bytes(integers + 32)
    lower = s[:, :8] & 15 | (s[:, 8:] & 15) << 4
    upper = s >> 4
    upper = upper[:, :4] | upper[:, 4:8] << 2 | upper[:, 8:12] << 4 | upper[:, 12:] << 6
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    third = ((codes >> 2).view(-1, 8, 32) << places).sum(1, dtype=torch.uint8)
    return torch.cat((third, _crumbs(codes & 3), lower, upper, _half(d)), dim=1)


def _q4_1(weights: Tensor) -> Tensor:
    """fp32 [B, 32] → uint8 [B, 20]: d, m, codes of 4 bits; w = d · code + m."""
    group = _grouped(weights, 32)
    least = group.amin(1)
    scales, lows = _affine(group - least[:, None], 15)  # from 0 on, so that m may have either sign
    d, m = _stored(scales), _stored(least - lows)
    codes = _in_order(_codes(group, d, -m, 15))
    return torch.cat((_half(d[0]), _half(m[0]), codes[:, :16] | codes[:, 16:] << 4), dim=1)


PACK: Mapping[str, Callable[[Tensor], Tensor]] = {"Q4_K": _q4_k, "Q3_K": _q3_k, "Q2_K": _q2_k, "Q4_1": _q4_1}


def pack_rows(weight: Tensor, name: str) -> Tensor:
    """weight [N, K] in any float dtype → uint8 [N, bytes of a row] in the type `name` of `PACK`.

    K is a multiple of the type's block. Raises CheckpointError for weights beyond the range of fp16.
    """
    kind = TYPES[name]
    num_rows, num_columns = weight.shape
    out = torch.empty(num_rows, num_columns // kind.num_weights * kind.num_bytes, dtype=torch.uint8)
    step = max(1, TILE // num_columns)
    for first in range(0, num_rows, step):
        blocks = weight[first : first + step].float().reshape(-1, kind.num_weights)
        largest = blocks.abs().amax()
        if not bool(largest <= torch.finfo(torch.float16).max):  # not a number is not less, either
            raise CheckpointError("has weights that are not finite, or beyond the range of fp16")
        out[first : first + step] = PACK[name](blocks).view(-1, out.shape[1])
    return out


@dataclass(frozen=True)
class GgufPacker:
    """Writes matrices in one of these types, each as one tensor of bytes under a name that ends in the type's."""

    name: str
    is_lossless = False

    def prepare(self) -> None:
        pass

    def for_shape(self, shape: tuple[int, ...]) -> GgufPacker | None:
        """Q4_1 if a row is not a multiple of 256 weights; None if it is not a multiple of 32."""
        if shape[1] % TYPES[self.name].num_weights == 0:
            return self
        return GgufPacker("Q4_1") if shape[1] % TYPES["Q4_1"].num_weights == 0 else None

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (suffix(self.name),)

    def num_bytes(self, elements: int) -> int:
        kind = TYPES[self.name]
        return elements // kind.num_weights * kind.num_bytes

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        return {suffix(self.name): pack_rows(weight, self.name)}

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        return {}

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}


def suffix(name: str) -> str:
    """The suffix of a matrix's name in a safetensors folder if it is stored in this type."""
    return f".{name.lower()}"
