"""Quantises matrices to GGUF's types Q4_K, Q3_K, Q2_K and Q4_1, from the weights alone.

A block's scale, and its minimum if the type has one, start from the range of its weights. Then codes and scales are
improved by turns: least squares gives the best scale and minimum for the codes, and these give new codes. A block of
256 rounds its 8 or 16 scales to integers of 4 or 6 bits; the codes are rounded last, with the stored scales. Groups are
fitted and rounded by kernels (`group_quantising`), or in plain torch where there are none, with equal bits.

Source: the layouts of ggml-common.h, as `gguf_blocks` decodes them. llama.cpp searches a grid of scales instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offspec.backends.x86.group_quantising import ROUNDS, TINY, Groups, can_run
from offspec.errors import CheckpointError

from ..files.gguf_types import GGUF_TYPES, GgufType

VERSION = "3"  # of the method: an unfinished result of another one is not resumed
TILE = 1 << 19  # weights at a time: the temporaries stay in a core's cache
TYPES: Mapping[str, GgufType] = {kind.name: kind for kind in GGUF_TYPES.values()}
BY_32, BY_16, SIGNED = Groups(32, 0, 15), Groups(16, 0, 3), Groups(16, -4, 3)


def inverse(scales: Tensor) -> Tensor:
    """1 / scale, and 0 where that is next to 0."""
    return torch.where(scales.abs() < TINY, 0, 1 / scales)


def as_half(numbers: Tensor) -> Tensor:
    """[B] → uint8 [B, 2], as fp16."""
    return numbers.to(torch.float16)[:, None].view(torch.uint8)


def as_stored(numbers: Tensor) -> Tensor:
    """What fp16 makes of them, fp32."""
    return numbers.to(torch.float16).float()


def _fit(weights: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Scales and minima [B, G] of contiguous weights fp32 [B, K]."""
    if can_run():
        return groups.fit(weights)
    grouped = _grouped(weights, groups.size)
    if groups.has_minimum:
        scales, lows = _affine(grouped, groups.most)
        return scales.T, lows.T
    scales = _symmetric(grouped, groups.least).T
    return scales, torch.zeros_like(scales)


def _codes(weights: Tensor, groups: Groups, scales: Tensor, lows: Tensor | None = None) -> Tensor:
    """The nearest codes - `groups.least`, uint8 [B, K], for scales and minima (None: 0) [B, G]."""
    lows = torch.zeros_like(scales) if lows is None else lows
    if can_run():
        return groups.codes(weights, scales, lows)
    codes = _nearest(_grouped(weights, groups.size), scales.T, lows.T, groups.least, groups.most)
    return (codes - groups.least).to(torch.uint8).flatten(0, 1).T.contiguous()


# ------------------------------------------------------------------------------- the kernels' twin, with equal bits


def _grouped(weights: Tensor, size: int) -> Tensor:
    """fp32 [B, K] → [K / size, size, B]: groups of neighbours. Adding along dim 1 adds long rows, which is fast."""
    return weights.T.contiguous().view(-1, size, len(weights))


def _total(numbers: Tensor) -> Tensor:
    """[G, n, B] → [G, B], by halves."""
    while (size := numbers.shape[1]) > 1:
        numbers = numbers[:, : size // 2] + numbers[:, size // 2 :]
    return numbers[:, 0]


def _affine(weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales and minima (at least 0) [G, B]: weights [G, n, B] ≈ scale · code - minimum, codes from 0 to `most`."""
    num = weights.shape[1]
    total, lows = _total(weights), weights.amin(1).clamp_max_(0).neg_()
    scales = (weights.amax(1) + lows).clamp_min_(0) / most
    for _ in range(ROUNDS):
        codes = _nearest(weights, scales, lows, 0, most)
        first, second, mixed = _total(codes), _total(codes.square()), _total(codes * weights)
        spread = num * second - first * first  # 0 where all codes are equal
        fitted = torch.where(spread > 0, (num * mixed - first * total) / spread, scales)
        shift = (fitted * first - total) / num
        is_below = shift < 0  # no minimum can be above 0: the best scale without one
        lows = shift.clamp_min(0) + 0.0  # not -0
        scales = torch.where(is_below, mixed * inverse(second), fitted).clamp_min_(0) + 0.0
    return scales, lows


def _symmetric(weights: Tensor, least: int) -> Tensor:
    """Scales [G, B] of either sign: weights [G, n, B] ≈ scale · code, codes from `least` (below 0) to -least - 1."""
    low, high = weights.amin(1), weights.amax(1)
    scales = torch.where(-low > high, low, high) / least  # the largest weight takes the code without a counterpart
    for _ in range(ROUNDS):
        codes = _nearest(weights, scales, torch.zeros_like(scales), least, -least - 1)
        scales = _total(codes * weights) * inverse(_total(codes.square()))
    return scales


def _nearest(weights: Tensor, scales: Tensor, lows: Tensor, least: int, most: int) -> Tensor:
    """fp32 [G, n, B]: the nearest codes for scales and minima [G, B]."""
    return weights.add(lows[:, None]).mul_(inverse(scales)[:, None]).round_().clamp_(least, most)


# --------------------------------------------------------------------------------------------------------- the types


def _to_integers(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """numbers (at least 0) [B, G] → a factor [B, 1] as fp16 stores it, and integers [B, G] up to `most`."""
    factor = as_stored(numbers.amax(1, keepdim=True) / most)
    return factor, numbers.mul(inverse(factor)).round_().clamp_(0, most)


def _words(codes: Tensor, *shape: int) -> Tensor:
    """uint8 [B, K] → int64 [B, *shape], eight neighbours at once: shifted codes stay in their bytes."""
    return codes.view(torch.int64).view(-1, *shape)


def _as_bytes(words: Tensor) -> Tensor:
    """int64 [B, …] → uint8 [B, 8 …]."""
    return words.flatten(1).view(torch.uint8)


def _crumbs(codes: Tensor) -> Tensor:
    """uint8 [B, 256], two bits each → [B, 64]: four weights at distances of 32 share a byte."""
    parts = _words(codes, 2, 4, 4)
    return _as_bytes(parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6)


def _q4_k(weights: Tensor) -> Tensor:
    """fp32 [B, 256] → uint8 [B, 144]: d, dmin, 8 scales and minima of 6 bits, codes of 4 bits."""
    scales, lows = _fit(weights, BY_32)
    (d, scales), (dmin, lows) = _to_integers(scales, 63), _to_integers(lows, 63)
    codes = _words(_codes(weights, BY_32, d * scales, dmin * lows), 4, 2, 4)
    nibbles = _as_bytes(codes[:, :, 0] | codes[:, :, 1] << 4)
    return torch.cat((as_half(d[:, 0]), as_half(dmin[:, 0]), pack_scales(scales, lows), nibbles), dim=1)


def pack_scales(scales: Tensor, lows: Tensor) -> Tensor:
    """Integers [B, 8] of 6 bits, twice → uint8 [B, 12], as Q4_K and Q5_K store them."""
    s, m = scales.to(torch.uint8), lows.to(torch.uint8)
    packed = (s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4)
    return torch.cat(packed, dim=1)


def _q2_k(weights: Tensor) -> Tensor:
    """fp32 [B, 256] → uint8 [B, 84]: 16 scales and minima of 4 bits, codes of 2 bits, d, dmin."""
    scales, lows = _fit(weights, BY_16)
    (d, scales), (dmin, lows) = _to_integers(scales, 15), _to_integers(lows, 15)
    codes = _codes(weights, BY_16, d * scales, dmin * lows)
    both = scales.to(torch.uint8) | lows.to(torch.uint8) << 4
    return torch.cat((both, _crumbs(codes), as_half(d[:, 0]), as_half(dmin[:, 0])), dim=1)


def _q3_k(weights: Tensor) -> Tensor:
    """fp32 [B, 256] → uint8 [B, 110]: third bits, codes of 2 bits, 16 scales of 6 bits with a sign, d."""
    scales, _ = _fit(weights, SIGNED)
    d = as_stored(scales.abs().amax(1, keepdim=True) / 31)
    integers = scales.mul(inverse(d)).round_().clamp_(-31, 31)
    codes = _codes(weights, SIGNED, d * integers)
    s = (integers + 32).to(torch.uint8)
    lower = s[:, :8] & 15 | (s[:, 8:] & 15) << 4
    upper = s >> 4
    upper = upper[:, :4] | upper[:, 4:8] << 2 | upper[:, 8:12] << 4 | upper[:, 12:] << 6
    bits = _words(codes >> 2, 8, 4)
    third = bits[:, 0].clone()
    for place in range(1, 8):
        third |= bits[:, place] << place
    return torch.cat((_as_bytes(third), _crumbs(codes & 3), lower, upper, as_half(d[:, 0])), dim=1)


def _q4_1(weights: Tensor) -> Tensor:
    """fp32 [B, 32] → uint8 [B, 20]: d, m, codes of 4 bits; w = d · code + m."""
    least = weights.amin(1, keepdim=True)
    scales, lows = _fit(weights - least, BY_32)  # from 0 on, so that m may have either sign
    d, m = as_stored(scales), as_stored(least - lows)
    codes = _words(_codes(weights, BY_32, d, -m), 2, 2)
    return torch.cat((as_half(d[:, 0]), as_half(m[:, 0]), _as_bytes(codes[:, 0] | codes[:, 1] << 4)), dim=1)


PACK: Mapping[str, Callable[[Tensor], Tensor]] = {"Q4_K": _q4_k, "Q3_K": _q3_k, "Q2_K": _q2_k, "Q4_1": _q4_1}


def pack_rows(weight: Tensor, name: str) -> Tensor:
    """weight [N, K] in any float dtype → uint8 [N, bytes of a row] in the type `name` of `PACK`.

    K is a multiple of the type's block. Raises CheckpointError for weights beyond the range of fp16.
    """
    return in_tiles(weight, TYPES[name], TILE, PACK[name])


def in_tiles(weight: Tensor, kind: GgufType, tile: int, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """weight [N, K] → uint8 [N, bytes of a row], about `tile` weights at a time.

    pack: blocks of whole rows fp32 [B, weights of a block] → uint8 [B, bytes]. Raises CheckpointError for weights
    beyond the range of fp16.
    """
    num_rows, num_columns = weight.shape
    out = torch.empty(num_rows, num_columns // kind.num_weights * kind.num_bytes, dtype=torch.uint8)
    step = max(1, tile // num_columns)
    for first in range(0, num_rows, step):
        blocks = weight[first : first + step].float().reshape(-1, kind.num_weights)
        low, high = blocks.aminmax()
        if not bool(torch.maximum(-low, high) <= torch.finfo(torch.float16).max):  # not a number is not less, either
            raise CheckpointError("has weights that are not finite, or beyond the range of fp16")
        out[first : first + step] = pack(blocks).view(-1, out.shape[1])
    return out


@dataclass(frozen=True)
class GgufPacker:
    """Writes matrices in one of GGUF's types, each as one tensor of bytes under a name that ends in the type's.

    quantise: weight [N, K], type → uint8 [N, bytes of a row].
    """

    name: str
    quantise: Callable[[Tensor, str], Tensor] = pack_rows
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
        return {suffix(self.name): self.quantise(weight, self.name)}

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        return {}

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "quantiser": VERSION}


def suffix(name: str) -> str:
    """The suffix of a matrix's name in a safetensors folder if it is stored in this type."""
    return f".{name.lower()}"
