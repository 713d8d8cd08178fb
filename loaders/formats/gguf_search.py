"""Quantises matrices to GGUF's types as llama.cpp does: it searches a grid of scales for the least weighted error.

Source: `quantize_row_*` of ggml-quants.c. Sums are added in another order than there. Where several scales fit nearly
alike, that decides, so up to a twentieth of the numbers (Q5_K) differ, with equal errors. With an importance matrix
[K], the mean square of each input, errors count by it. Without one, they count by the weights' own size. `gguf_pack` is
faster, and coarser in 4 bits; shadows use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from .gguf_blocks import IQ4_VALUES
from .gguf_pack import TYPES, as_half, as_stored, in_tiles, inverse, pack_scales

Quantise = Callable[[Tensor, Tensor | None], Tensor]  # blocks fp32 [B, K], importance fp32 [B, K] → uint8 [B, bytes]
TILE = 1 << 17  # weights at a time
LEAST = 1e-15  # of a group's largest weight; below, its codes are 0


def _grouped(blocks: Tensor, size: int) -> Tensor:
    return blocks.view(len(blocks), -1, size)


def _nearest(numbers: Tensor, least: int, most: int) -> Tensor:
    return numbers.round_().clamp_(least, most)


# ------------------------------------------------------------------------------------------------ searches of a scale


def _affine(x: Tensor, weights: Tensor, most: int, first: float, step: float, num_steps: int) -> tuple[Tensor, Tensor]:
    """Scales and minima (at least 0) [B, G]: x [B, G, n] ≈ scale · code - minimum, codes from 0 to `most`.

    Starting scales are (most + first + i · step) codes to the range of x, i = 0 … num_steps.
    """
    low, high = x.amin(-1).clamp_max_(0), x.amax(-1)
    total, mixed_total = weights.sum(-1), (weights * x).sum(-1)

    def coded(codes_to_range: float) -> Tensor:
        factor = codes_to_range * inverse(high - low)
        return _nearest((x - low[..., None]).mul_(factor[..., None]), 0, most)

    def error(scale: Tensor, low: Tensor, codes: Tensor) -> Tensor:
        return (codes * scale[..., None]).add_(low[..., None]).sub_(x).square_().mul_(weights).sum(-1)

    scale = (high - low) / most
    best = error(scale, low, coded(most))
    for i in range(num_steps + 1):
        codes = coded(most + first + i * step)
        weighted = weights * codes
        one, two, mixed = weighted.sum(-1), (weighted * codes).sum(-1), weighted.mul_(x).sum(-1)
        spread = total * two - one * one
        fitted, shift = (total * mixed - mixed_total * one) / spread, (two * mixed_total - one * mixed) / spread
        is_above = shift > 0
        fitted, shift = torch.where(is_above, mixed / two, fitted), shift.masked_fill_(is_above, 0)
        errors = error(fitted, shift, codes)
        is_better = (spread > 0) & (errors < best)
        best, scale, low = (torch.where(is_better, *pair) for pair in ((errors, best), (fitted, scale), (shift, low)))
    return scale, -low


def _signed(x: Tensor, weights: Tensor, most: int) -> Tensor:
    """Scales [B, G] of either sign: x [B, G, n] ≈ scale · code, codes from -most to most - 1."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    factors = ((-most - 0.1 * i) / largest for i in (0, *range(-9, 0), *range(1, 10)))
    return _best(x, weights, largest, (_nearest(x * factor, -most, most - 1) for factor in factors))


def _best(x: Tensor, weights: Tensor, largest: Tensor, tries: Iterable[Tensor]) -> Tensor:
    """The scales that fit the best of several codings [B, G, n] of x, by least squares; 0 for groups of zeros."""
    scale = best = torch.zeros(x.shape[:-1])
    for codes in tries:
        weighted = weights * codes
        mixed, two = (weighted * x).sum(-1), weighted.mul_(codes).sum(-1)
        is_better = (two > 0) & (mixed * mixed > best * two)
        fitted = mixed / two
        scale, best = torch.where(is_better, fitted, scale), torch.where(is_better, fitted * mixed, best)
    return scale.masked_fill_(largest[..., 0].abs() < LEAST, 0)


def _positive(x: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """A factor [B, 1] and codes [B, G] from 0 to `most`: x (at least 0) ≈ factor · code, by weights [B, G]."""
    largest = x.amax(-1, keepdim=True)
    best, chosen = torch.full_like(largest, torch.inf), torch.zeros_like(largest)
    for i in (0, *range(-4, 0), *range(1, 5)):
        factor = (most + 0.1 * i) * inverse(largest)
        codes = _nearest(x * factor, 0, most)
        errors = (codes * inverse(factor)).sub_(x).square_().mul_(weights).sum(-1, keepdim=True)
        best, chosen = torch.where(errors < best, errors, best), torch.where(errors < best, factor, chosen)
    codes = _nearest(x * chosen, 0, most)
    mixed, two = (weights * x * codes).sum(-1), (weights * codes * codes).sum(-1)
    for _ in range(5):
        for place in range(x.shape[-1]):
            each, weight, code = x[:, place], weights[:, place], codes[:, place]
            rest, rest_two = mixed - weight * each * code, two - weight * code * code
            other = _nearest(each * rest_two / rest, 0, most)
            new, new_two = rest + weight * each * other, rest_two + weight * other * other
            is_better = (rest > 0) & (rest_two > 0) & (new * new * two > mixed * mixed * new_two)
            mixed, two = torch.where(is_better, new, mixed), torch.where(is_better, new_two, two)
            codes[:, place] = torch.where(is_better, other, code)
    return (mixed * inverse(two))[:, None], codes


# ----------------------------------------------------------------------------------------------------------- the types


def _with_minima(
    blocks: Tensor, importance: Tensor | None, most: int, first: float, num_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Q4_K and Q5_K: the factors d, dmin [B, 1] as stored, scales and minima [B, 8] of 6 bits, codes uint8 [B, 256]."""
    x = _grouped(blocks, 32)
    if importance is None:
        weights = x.square().mean(-1, keepdim=True).sqrt_() + x.abs()
        scales, lows = _affine(x, weights, most, first, 0.1, num_steps)
        d, dmin = as_stored(scales.amax(-1, keepdim=True) / 63), as_stored(lows.amax(-1, keepdim=True) / 63)
        (scales, lows) = (
            _nearest(each * (63 * inverse(each.amax(-1, keepdim=True))), 0, 63) for each in (scales, lows)
        )
    else:
        variance = 2 * blocks.square().mean(-1, keepdim=True)
        weights = _grouped(importance * (variance + blocks.square()).sqrt_(), 32)
        scales, lows = _affine(x, weights, most, -0.9, 0.05, 36)
        (d, scales), (dmin, lows) = (_positive(each, weights.sum(-1), 63) for each in (scales, lows))
        d, dmin = as_stored(d), as_stored(dmin)
    codes = x.add((dmin * lows)[..., None]).mul_(inverse(d * scales)[..., None])
    return d, dmin, scales, lows, _nearest(codes, 0, most).to(torch.uint8).flatten(1)


def _halves(codes: Tensor, size: int) -> Tensor:
    """uint8 [B, K] → [B, K / 2]: of each 2 · size codes of 4 bits, the first ones and the last ones share bytes."""
    pairs = codes.view(len(codes), -1, 2, size)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _q4_k(blocks: Tensor, importance: Tensor | None) -> Tensor:
    d, dmin, scales, lows, codes = _with_minima(blocks, importance, 15, -1.0, 20)
    return torch.cat((as_half(d[:, 0]), as_half(dmin[:, 0]), pack_scales(scales, lows), _halves(codes, 32)), dim=1)


def _q5_k(blocks: Tensor, importance: Tensor | None) -> Tensor:
    d, dmin, scales, lows, codes = _with_minima(blocks, importance, 31, -0.5, 15)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((codes.view(-1, 8, 32) >> 4) << places).sum(1, dtype=torch.uint8)
    head = as_half(d[:, 0]), as_half(dmin[:, 0]), pack_scales(scales, lows)
    return torch.cat((*head, fifth, _halves(codes & 15, 32)), dim=1)


def _q6_k(blocks: Tensor, importance: Tensor | None) -> Tensor:
    x = _grouped(blocks, 16)
    scales = _signed(x, x.square() if importance is None else _grouped(importance, 16), 32)
    largest = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
    factor = torch.where(largest.abs() < LEAST, 0, -128 / largest)
    d = as_stored(inverse(factor))
    scales = (scales * factor).round_().clamp_(-128, 127)
    codes = (_nearest(x * inverse(d * scales)[..., None], -32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = torch.stack((codes[:, :, 0] & 15 | codes[:, :, 2] << 4, codes[:, :, 1] & 15 | codes[:, :, 3] << 4), dim=2)
    high = codes >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    stored_scales = scales.to(torch.int8).view(torch.uint8)
    return torch.cat((low.flatten(1), high.flatten(1), stored_scales, as_half(d[:, 0])), dim=1)


def _q8_0(blocks: Tensor, importance: Tensor | None) -> Tensor:
    d = blocks.abs().amax(-1, keepdim=True) / 127
    numbers = blocks * inverse(d)
    codes = numbers.abs().add_(0.5).floor_().copysign_(numbers)  # halves are rounded away from 0
    return torch.cat((as_half(d[:, 0]), codes.to(torch.int8).view(torch.uint8)), dim=1)


def _fifth_bits(codes: Tensor) -> Tensor:
    """uint8 [B, 32] of 5 bits → [B, 4]: the highest bits."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((codes.view(-1, 4, 8) >> 4) << places).sum(-1, dtype=torch.uint8)


def _q5_0(blocks: Tensor, importance: Tensor | None) -> Tensor:
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -16
    codes = (blocks * inverse(d) + 16.5).clamp_(0, 31).to(torch.uint8)
    return torch.cat((as_half(d[:, 0]), _fifth_bits(codes), _halves(codes & 15, 16)), dim=1)


def _q5_1(blocks: Tensor, importance: Tensor | None) -> Tensor:
    low = blocks.amin(-1, keepdim=True)
    d = (blocks.amax(-1, keepdim=True) - low) / 31
    codes = ((blocks - low) * inverse(d) + 0.5).clamp_(0, 31).to(torch.uint8)
    return torch.cat((as_half(d[:, 0]), as_half(low[:, 0]), _fifth_bits(codes), _halves(codes & 15, 16)), dim=1)


_CODES = torch.tensor(IQ4_VALUES, dtype=torch.float32)
_BETWEEN = (_CODES[1:] + _CODES[:-1]) / 2


def _places(numbers: Tensor) -> Tensor:
    """The places of the nearest numbers in _CODES."""
    return torch.bucketize(numbers, _BETWEEN, right=True)


def _nonlinear(blocks: Tensor, importance: Tensor | None, num_weights: int) -> tuple[Tensor, Tensor]:
    """IQ4: groups x [B, G, 32] and their scales [B, G], x ≈ scale · one of _CODES."""
    x = _grouped(blocks, 32)
    weights = x.square()
    if importance is not None:
        variance = 2 * blocks.square().sum(-1, keepdim=True) / num_weights
        weights = _grouped(importance * (variance + blocks.square()).sqrt_(), 32)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    factors = ((i + IQ4_VALUES[0]) / largest for i in (-2 * IQ4_VALUES[0], *range(-7, 8)))
    return x, _best(x, weights, largest, (_CODES[_places(x * factor)] for factor in factors))


def _iq4_nl(blocks: Tensor, importance: Tensor | None) -> Tensor:
    x, scales = _nonlinear(blocks, importance, 32)
    codes = _places(x * inverse(scales)[..., None]).to(torch.uint8).flatten(1)
    return torch.cat((as_half(scales[:, 0]), _halves(codes, 16)), dim=1)


def _iq4_xs(blocks: Tensor, importance: Tensor | None) -> Tensor:
    x, scales = _nonlinear(blocks, importance, 256)
    d = -scales.gather(-1, scales.abs().argmax(-1, keepdim=True)) / 32
    integers = _nearest(scales * inverse(d), -32, 31)
    codes = _places(x * inverse(d * integers)[..., None]).to(torch.uint8).flatten(1)
    six = (integers + 32).to(torch.uint8)
    low = six[:, ::2] & 15 | (six[:, 1::2] & 15) << 4
    high = ((six.long() >> 4) << torch.arange(0, 16, 2)).sum(-1).to(torch.int16)[:, None].view(torch.uint8)
    return torch.cat((as_half(d[:, 0]), high, low, _halves(codes, 16)), dim=1)


QUANTISE: Mapping[str, Quantise] = {
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "Q4_K": _q4_k,
    "IQ4_XS": _iq4_xs,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
}


def search_rows(weight: Tensor, name: str, importance: Tensor | None = None) -> Tensor:
    """weight [N, K] in any float dtype → uint8 [N, bytes of a row] in the type `name` of `QUANTISE`.

    K is a multiple of the type's block. importance: fp32 [K]. Raises CheckpointError for weights beyond the range of
    fp16.
    """
    kind = TYPES[name]

    def pack(blocks: Tensor) -> Tensor:
        if importance is None:
            return QUANTISE[name](blocks, None)
        rows = blocks.numel() // len(importance)
        return QUANTISE[name](blocks, importance.repeat(rows).view(-1, kind.num_weights))

    return in_tiles(weight, kind, TILE, pack)
