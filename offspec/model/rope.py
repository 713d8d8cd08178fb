"""Rotary position embedding (RoFormer, 2104.09864) and its scalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT
from offspec.backends.choice import backend_of
from offspec.backends.x86.compiler import is_recording
from offspec.backends.x86.row_steps import can_step, turn_heads

from ..errors import CheckpointError
from .rope_config import LONG_FACTORS, ORIGINAL_CONTEXT, SHORT_FACTORS, RopeConfig


def rotation(rope: RopeConfig, rotary_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies (fp32 [rotary_dim / 2], radians per token), and the factor of cos and sin.

    Raises CheckpointError for YaRN or LongRoPE with parameters outside their formulas' range.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.scaling["factor"], 1.0
    if rope.kind == "proportional":
        return _proportional(frequencies, rope.scaling), 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope.scaling), 1.0
    try:
        if rope.kind == "yarn":
            return _yarn(frequencies, rope, rotary_dim), _yarn_attention_factor(rope.scaling)
        if rope.kind == "longrope":
            # LongRoPE (2402.13753): one factor per frequency; `ModelConfig.for_context` chooses the set.
            factors = rope.scaling[LONG_FACTORS if rope.scaling.get("is_long") else SHORT_FACTORS]
            return frequencies / torch.tensor(factors, dtype=torch.float32), _longrope_attention_factor(rope.scaling)
    except (ArithmeticError, ValueError) as exc:  # from invalid parameters, like a theta of 1
        given = {"rope_theta": rope.theta, **{k: v for k, v in rope.scaling.items() if not isinstance(v, tuple)}}
        raise CheckpointError(
            f"config.json: RoPE scaling {rope.kind!r} cannot be computed from {given} ({exc})"
        ) from exc
    return frequencies, 1.0


def _proportional(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Gemma 4: the last pairs do not turn; those that do have the frequencies of a whole head."""
    num_turning = int(scaling["partial_rotary_factor"] * len(frequencies))
    turns = torch.arange(len(frequencies)) < num_turning
    return torch.where(turns, frequencies / float(scaling.get("factor") or 1), 0.0)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    factor, context = float(scaling["factor"]), int(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = context * frequencies / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def _longrope_attention_factor(scaling: Mapping[str, Any]) -> float:
    """The softmax temperature, from LongRoPE's extension of the context; also for short texts."""
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    if (factor := scaling["factor"]) <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(scaling[ORIGINAL_CONTEXT]))


def _yarn(frequencies: Tensor, rope: RopeConfig, rotary_dim: int) -> Tensor:
    """YaRN (2309.00071, 3.2): keep dimensions with many turns within the original context, slow down the others."""
    scaling, factor = rope.scaling, float(rope.scaling["factor"])
    context = int(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / factor)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """YaRN's softmax temperature, applied to cos and sin (so to queries and keys alike)."""
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    factor, mscale, mscale_all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    """The square root of the scores' growth in texts that are `factor` times as long as the original context."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


TABLE_POSITIONS, MOST_TABLES = 256, 64


class RotaryEmbedding:
    """The rotation of one kind of layer. cos and sin have `dtype`; angles are computed in fp32.

    Where the backend `rounds_tails`, a position's numbers come from a table of TABLE_POSITIONS positions, since torch
    rounds some of them otherwise in tensors of another length. The last MOST_TABLES tables are kept.
    """

    def __init__(
        self,
        rope: RopeConfig,
        rotary_dim: int,
        *,
        is_interleaved: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """is_interleaved: pairs are neighbours. Raises CheckpointError, see `rotation`."""
        frequencies, self._magnitude = rotation(rope, rotary_dim)
        self._frequencies = frequencies.to(device)
        self._has_tables = backend_of(device).rounds_tails
        self._dtype = dtype
        self._is_interleaved = is_interleaved
        self._tables: dict[int, Tensor] = {}  # cos and sin [2, TABLE_POSITIONS, 1, rotary_dim], by their number

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rotary_dim] of positions [T] on the device."""
        if not self._has_tables:
            return self._computed(positions)
        numbers, of_position = torch.unique(positions // TABLE_POSITIONS, return_inverse=True)
        tables = torch.cat([self._table(number) for number in numbers.tolist()], dim=1)
        cos, sin = tables[:, of_position * TABLE_POSITIONS + positions % TABLE_POSITIONS]
        return cos, sin

    def _table(self, number: int) -> Tensor:
        if number not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            first = number * TABLE_POSITIONS
            self._tables[number] = torch.stack(self._computed(torch.arange(first, first + TABLE_POSITIONS)))
        return self._tables[number]

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self._frequencies
        if self._is_interleaved:
            angles = torch.stack((angles, angles), dim=-1).flatten(-2)[:, None]
        else:
            angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self._magnitude).to(self._dtype), (angles.sin() * self._magnitude).to(self._dtype)


class RotaryEmbeddings:
    """The rotations of a decoder's layers: one object for all with equal RoPE, so that a pass computes angles once."""

    def __init__(self, *, is_interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
        """Arguments as in `RotaryEmbedding`."""
        self._is_interleaved = is_interleaved
        self._dtype = dtype
        self._device = device
        self._made: list[tuple[RopeConfig, int, RotaryEmbedding]] = []

    def of(self, rope: RopeConfig, rotary_dim: int) -> RotaryEmbedding:
        """Raises CheckpointError, see `rotation`."""
        for other, other_dim, embedding in self._made:
            if (other, other_dim) == (rope, rotary_dim):
                return embedding
        embedding = RotaryEmbedding(
            rope, rotary_dim, is_interleaved=self._is_interleaved, dtype=self._dtype, device=self._device
        )
        self._made.append((rope, rotary_dim, embedding))
        return embedding


class Rotations:
    """cos and sin of one pass's positions, computed once for all layers that share an embedding."""

    def __init__(self, positions: Tensor) -> None:
        """positions [T], on the device."""
        self._positions = positions
        self._found: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = {}
        self._growths: dict[tuple[float, int], Tensor] = {}

    def of(self, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rotary_dim]."""
        if rotary not in self._found:
            self._found[rotary] = rotary.at(self._positions)
        return self._found[rotary]

    def growth(self, beta: float, context: int) -> Tensor:
        """fp32 [T, 1, 1], the factor of queries: 1 + beta ln(1 + floor(position / context)).

        It keeps attention sharp in texts longer than those of the first training phase (Llama 4).
        """
        if (beta, context) not in self._growths:
            steps, exact = self._positions // context, backend_of(self._positions.device, EXACT)
            self._growths[beta, context] = (1 + beta * exact.each(torch.log, (1 + steps).float()))[:, None, None]
        return self._growths[beta, context]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """Rotate heads x [T, heads, head_dim] by cos, sin [T, 1, rotary_dim].

    Dimensions from rotary_dim on do not change. Pairs are made of a head's halves, as in Hugging Face's Llama, or with
    is_interleaved of neighbours.
    """
    if (rotary_dim := cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :rotary_dim], cos, sin, is_interleaved=is_interleaved)
        return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
    if is_interleaved:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin
    if is_recording() and x.dtype == cos.dtype and can_step(x.dtype, rotary_dim // 2):
        return turn_heads(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
