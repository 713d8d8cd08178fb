"""Decodes the blocks of GGUF's quantised types in plain torch.

`UNPACK` has a function for each type: blocks uint8 [B, bytes of a block] → fp32 [B, weights of a block], on any device,
equal bit for bit to the `gguf` package. Everything except the last sum, of a scaled code and a minimum, is exact in
fp32, so the order of the products does not matter. But an infinite scale times code 0 is NaN, so offsets are subtracted
from codes as integers.

Source: the layouts of ggml-common.h (`block_q4_0` and so on) and their decoders in ggml-quants.c. The grids of the IQ1,
IQ2 and IQ3 types are large tables from the `gguf` package, if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from offspec.errors import UnsupportedModelError

# Values of the 16 codes of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of MXFP4's codes, which have a sign, two bits of an exponent and one of a mantissa (OCP MX v1.0).
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
VALUES: Mapping[str, Sequence[int]] = {"IQ4_NL": IQ4_VALUES, "IQ4_XS": IQ4_VALUES, "MXFP4": MXFP4_VALUES}

# Byte offsets of the fp16 scales in a block. IQ1_M splits its scale into four pieces; MXFP4's is an exponent.
HALVES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    **dict.fromkeys(("IQ1_M", "MXFP4"), ()),
}
GRID_TYPES = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"})


# ------------------------------------------------------------------------------------------------------- pieces


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at`: fp32 [B, 1]."""
    return blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _words(pieces: Tensor) -> Tensor:
    """uint8 [..., 2n] → int32 [..., n]: 16-bit words, the lower byte first."""
    wide = pieces.int()
    return wide[..., 0::2] | wide[..., 1::2] << 8


def _fields(pieces: Tensor, places: range, mask: int) -> Tensor:
    """[..., n] → [..., len(places), n]: the bits of `mask` from each place on.

    A GPU computes the places: a copy would wait for the layers that are being copied, at each product.
    """
    shifts = torch.arange(places.start, places.stop, places.step, dtype=pieces.dtype, device=pieces.device)
    return (pieces[..., None, :] >> shifts[:, None]).bitwise_and_(mask)


def _inner_fields(pieces: Tensor, places: range, mask: int) -> Tensor:
    """[..., n] → [..., n · len(places)]: the bit fields of each piece, concatenated."""
    return _fields(pieces, places, mask).transpose(-1, -2).flatten(-2)


def _bits(pieces: Tensor) -> Tensor:
    """uint8 [..., n] → [..., 8n], the lowest bit first."""
    return _inner_fields(pieces, range(8), mask=1)


def _nibbles(pieces: Tensor) -> Tensor:
    """uint8 [..., n] → [..., 2n]: the lower halves of all bytes, then the upper ones."""
    return _fields(pieces, range(0, 8, 4), mask=15).flatten(-2)


def _grouped(blocks: Tensor, group: int) -> Tensor:
    """[..., n] → [..., n / group, group]"""
    return blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // group, group)


# ------------------------------------------------------------------------------------------------------- blocks of 32


def _q8_0(blocks: Tensor) -> Tensor:
    """d fp16, codes int8 [32]: w = d · code."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    """d fp16, codes of 4 bit [32]: w = d · (code - 8)."""
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """d, m fp16, codes of 4 bit [32]: w = d · code + m."""
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _five_bit(blocks: Tensor, at: int) -> Tensor:
    """The fifth bits of 32 codes from byte `at` on, then their lower four."""
    return _nibbles(blocks[:, at + 4 :]).bitwise_or_(_bits(blocks[:, at : at + 4]) << 4).float()


def _q5_0(blocks: Tensor) -> Tensor:
    """d fp16, codes of 5 bit [32]: w = d · (code - 16)."""
    return _five_bit(blocks, 2).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    """d, m fp16, codes of 5 bit [32]: w = d · code + m."""
    return _five_bit(blocks, 4).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _iq4_nl(blocks: Tensor) -> Tensor:
    """d fp16, codes of 4 bit [32]: w = d · value[code]."""
    return _values(IQ4_VALUES, blocks.device)[_nibbles(blocks[:, 2:]).int()].mul_(_half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Tensor:
    """e uint8, codes of 4 bit [32]: w = 2^(e - 128) · value[code]."""
    exponents = blocks[:, :1].int()
    words = torch.where(exponents < 2, exponents + 1 << 21, exponents - 1 << 23)  # below 2, fp32 has no exponent
    return _values(MXFP4_VALUES, blocks.device)[_nibbles(blocks[:, 1:]).int()].mul_(words.view(torch.float32))


@cache
def _values(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


# ------------------------------------------------------------------------------------------------------ blocks of 256


def _scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [B, 256], scales fp32 [B, G]: each scale times its 256 / G codes; [B, G, 256 / G]."""
    return _grouped(codes.float(), codes.shape[1] // scales.shape[1]).mul_(scales[..., None])


def _q2_k(blocks: Tensor) -> Tensor:
    """scales [16] (4 bit, above them 4 of a minimum), codes of 2 bit [256], d, dmin fp16: w = d·s·code - dmin·min."""
    scales = (_half(blocks, 80) * (blocks[:, :16] & 15)).float()
    lows = (_half(blocks, 82) * (blocks[:, :16] >> 4)).float()
    codes = _fields(_grouped(blocks[:, 16:80], 32), range(0, 8, 2), mask=3).flatten(1)
    return _scaled(codes, scales).sub_(lows[..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """third bits [256], codes of 2 bit [256], scales of 6 bit [16], d fp16: w = d · (s - 32) · (code - 4)."""
    upper = _fields(blocks[:, :32], range(8), mask=1).flatten(1)
    codes = _fields(_grouped(blocks[:, 32:96], 32), range(0, 8, 2), mask=3).flatten(1)
    scales = _nibbles(blocks[:, 96:104]) | _fields(blocks[:, 104:108], range(0, 8, 2), mask=3).flatten(1) << 4
    numbers = (codes | upper << 2).float().sub_(4)
    return _scaled(numbers, _half(blocks, 108) * scales.float().sub_(32)).flatten(1)


def _scales_and_lows(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: d and dmin fp16, then 8 scales and 8 minima of 6 bit in 12 bytes; each times its factor.

    Bytes 0-3 have four scales, 4-7 four minima; what is above their six bits belongs to the other four of each, whose
    lower four bits are in bytes 8-11: the scale's below the minimum's.
    """
    first, second, third = _grouped(blocks[:, 4:16], 4).unbind(1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    lows = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * lows.float()


def _q4_k(blocks: Tensor) -> Tensor:
    """d, dmin, scales and minima, codes of 4 bit [256]: w = d·s·code - dmin·min."""
    scales, lows = _scales_and_lows(blocks)
    codes = _nibbles(_grouped(blocks[:, 16:], 32)).flatten(1)
    return _scaled(codes, scales).sub_(lows[..., None]).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    """d, dmin, scales and minima, fifth bits [256], codes of 4 bit [256]: w = d·s·code - dmin·min."""
    scales, lows = _scales_and_lows(blocks)
    upper = _fields(blocks[:, 16:48], range(8), mask=1).flatten(1)
    codes = _nibbles(_grouped(blocks[:, 48:], 32)).flatten(1) | upper << 4
    return _scaled(codes, scales).sub_(lows[..., None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """lower four bits [256], upper two [256], scales int8 [16], d fp16: w = d · s · (code - 32)."""
    lower = _nibbles(_grouped(blocks[:, :128], 64)).flatten(1)
    upper = _fields(_grouped(blocks[:, 128:192], 32), range(0, 8, 2), mask=3).flatten(1)
    numbers = (lower | upper << 4).float().sub_(32)
    scales = blocks[:, 192:208].view(torch.int8).float()
    return _scaled(numbers, _half(blocks, 208) * scales).flatten(1)


def _iq4_xs(blocks: Tensor) -> Tensor:
    """d fp16, upper two bits of 8 scales, lower four, codes of 4 bit [256]: w = d · (s - 32) · value[code]."""
    upper = _inner_fields(_words(blocks[:, 2:4]), range(0, 16, 2), mask=3)
    scales = _inner_fields(blocks[:, 4:8], range(0, 8, 4), mask=15).int() | upper << 4
    codes = _nibbles(_grouped(blocks[:, 8:], 16)).flatten(1)
    values = _values(IQ4_VALUES, blocks.device)[codes.int()]
    return _scaled(values, _half(blocks, 0) * scales.float().sub_(32)).flatten(1)


# ------------------------------------------------------------------------------------------------------- grids


@cache
def _grid(name: str, device: torch.device) -> Tensor:
    """Rows of a type's grid, fp32 [points, 4 or 8]. Raises UnsupportedModelError without the `gguf` package."""
    try:
        from gguf import quants

        quant_type = getattr(quants, name)
        quant_type.init_grid()
        return torch.tensor(quant_type.grid).flatten(0, 2).to(device)
    except (ImportError, AttributeError) as exc:
        raise UnsupportedModelError(
            f"weights in {name} need the tables of the gguf package; pip install 'offspec[gguf]'"
        ) from exc


def check_grid(name: str) -> None:
    """Raises UnsupportedModelError if a type needs a table that is not installed."""
    if name in GRID_TYPES:
        _grid(name, torch.device("cpu"))


def _points(name: str, indices: Tensor) -> Tensor:
    """Indices [B, n] of grid rows → fp32 [B, n, 4 or 8]."""
    return _grid(name, indices.device)[indices.long()]


def _signs(bits: Tensor) -> Tensor:
    """uint8 [..., n], a bit for each sign → fp32 [..., n, 8] of 1 and -1."""
    return _grouped(_bits(bits), 8).float().mul_(-2).add_(1)


def _even_signs(codes: Tensor) -> Tensor:
    """Seven bits each [..., n]; the eighth sign makes their number even: fp32 [..., n, 8]."""
    parity = codes ^ codes >> 4
    parity = parity ^ parity >> 2
    parity = (parity ^ parity >> 1) & 1
    return _signs((codes | parity << 7).to(torch.uint8))


def _on_grid(scales: Tensor, points: Tensor, signs: Tensor) -> Tensor:
    """scales [B, G], points [B, n, 4 or 8], signs [B, m, 8] → [B, 256]."""
    return _scaled(points.flatten(1), scales).flatten(1).mul_(signs.flatten(1))


def _signs_and_scales(pieces: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [B, 4n], 32-bit words: four times seven bits of signs, four of a scale: [B, 4n, 8], [B, n]."""
    words = pieces.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return _even_signs(_inner_fields(words, range(0, 28, 7), mask=127)), (words >> 28 & 15).float()


def _iq2_xxs(blocks: Tensor) -> Tensor:
    """d fp16, then 8 times: 4 indices, a word of signs and scale: w = d · (0.5 + s) / 4 · point · sign."""
    pieces = _grouped(blocks[:, 2:], 8)
    signs, scales = _signs_and_scales(pieces[..., 4:].flatten(1))
    return _on_grid(_half(blocks, 0) * (scales + 0.5) * 0.25, _points("IQ2_XXS", pieces[..., :4].flatten(1)), signs)


def _iq2_xs(blocks: Tensor) -> Tensor:
    """d fp16, 32 words (9 bits of an index, 7 of signs), scales of 4 bit [16]."""
    words = _words(blocks[:, 2:66])
    scales = _inner_fields(blocks[:, 66:], range(0, 8, 4), mask=15).float()
    return _on_grid(_half(blocks, 0) * (scales + 0.5) * 0.25, _points("IQ2_XS", words & 511), _even_signs(words >> 9))


def _iq2_s(blocks: Tensor) -> Tensor:
    """d fp16, lower eight bits of indices [32], signs [32], upper two bits [32], scales of 4 bit [16]."""
    indices = blocks[:, 2:34].int() | _inner_fields(blocks[:, 66:74], range(0, 8, 2), mask=3).int() << 8
    scales = _inner_fields(blocks[:, 74:], range(0, 8, 4), mask=15).float()
    return _on_grid(_half(blocks, 0) * (scales + 0.5) * 0.25, _points("IQ2_S", indices), _signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: Tensor) -> Tensor:
    """d fp16, indices [64], 8 words of signs and scale: w = d · (0.5 + s) / 2 · point · sign."""
    signs, scales = _signs_and_scales(blocks[:, 66:])
    return _on_grid(_half(blocks, 0) * (scales + 0.5) * 0.5, _points("IQ3_XXS", blocks[:, 2:66]), signs)


def _iq3_s(blocks: Tensor) -> Tensor:
    """d fp16, indices [64], their ninth bits, signs [32], scales of 4 bit [8]: w = d · (1 + 2s) · point · sign."""
    indices = blocks[:, 2:66].int() | _bits(blocks[:, 66:74]).int() << 8
    scales = _inner_fields(blocks[:, 106:], range(0, 8, 4), mask=15).float()
    return _on_grid(_half(blocks, 0) * (scales * 2 + 1), _points("IQ3_S", indices), _signs(blocks[:, 74:106]))


def _shifted(scales: Tensor, indices: Tensor, negative: Tensor, name: str) -> Tensor:
    """w = scale · (point ± 1/8). scales [B, G], indices [B, 32], negative [B, S], each for its share of the weights."""
    shift = 0.125 - 0.25 * negative.float()
    points = _points(name, indices).flatten(1)
    points = _grouped(points, points.shape[1] // shift.shape[1]).add_(shift[..., None])
    return _scaled(points.flatten(1), scales).flatten(1)


def _iq1_s(blocks: Tensor) -> Tensor:
    """d fp16, lower eight bits of indices [32], 8 words: four times three upper bits, a scale of 3, a shift's sign."""
    words = _words(blocks[:, 34:])
    indices = blocks[:, 2:34].int() | _inner_fields(words, range(0, 12, 3), mask=7) << 8
    return _shifted(_half(blocks, 0) * ((words >> 12 & 7) * 2 + 1), indices, words >> 15, "IQ1_S")


def _iq1_m(blocks: Tensor) -> Tensor:
    """Indices' lower eight bits [32], their upper three with a shift's sign [32], 4 words: four times three bits of a
    scale, and four bits of d.
    """
    words, upper = _words(blocks[:, 48:]), _inner_fields(blocks[:, 32:48], range(0, 8, 4), mask=15).int()
    whole = words[:, 0] >> 12 | words[:, 1] >> 8 & 0xF0 | words[:, 2] >> 4 & 0xF00 | words[:, 3] & 0xF000
    d = whole.to(torch.int16).view(torch.float16).float()[:, None]
    indices = blocks[:, :32].int() | (upper & 7) << 8
    scales = d * (_inner_fields(words, range(0, 12, 3), mask=7) * 2 + 1)
    return _shifted(scales, indices, upper >> 3, "IQ1_M")


UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
