"""Rotary position embedding (RoFormer, 2104.09864) and its scalings. Knows nothing of attention or caches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .config import RopeConfig


def rotation(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies (fp32 [head_dim / 2], radians per token) and the factor that cos and sin are multiplied by.

    Raises CheckpointError for YaRN with numbers it cannot be computed from.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.scaling["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope.scaling), 1.0
    if rope.kind == "yarn":
        try:
            return _yarn(frequencies, rope, head_dim), _yarn_attention_factor(rope.scaling)
        except (ArithmeticError, ValueError) as exc:  # from numbers that no model has, like a theta of 1
            said = {"rope_theta": rope.theta, **rope.scaling}
            raise CheckpointError(f"config.json: RoPE scaling 'yarn' cannot be computed from {said} ({exc})") from exc
    return frequencies, 1.0


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    factor, context = float(scaling["factor"]), int(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = context * frequencies / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (2309.00071, 3.2): dimensions that turn often within the original context are kept, the others slowed."""
    scaling, factor = rope.scaling, float(rope.scaling["factor"])
    context = int(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / factor)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """YaRN's softmax temperature, applied to cos and sin (so to queries and keys alike)."""
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


class RotaryEmbedding:
    """The rotation of one kind of layer. cos and sin come in `dtype`; angles are computed in fp32."""

    def __init__(self, rope: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises CheckpointError, see `rotation`."""
        frequencies, self._magnitude = rotation(rope, head_dim)
        self._frequencies, self._dtype = frequencies.to(device), dtype

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] of positions [T] on the device."""
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self._magnitude).to(self._dtype), (angles.sin() * self._magnitude).to(self._dtype)


class Rotations:
    """cos and sin of one pass's positions, computed once for all layers that share an embedding."""

    def __init__(self, positions: Tensor) -> None:
        """positions [T], on the device."""
        self._positions = positions
        self._found: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = {}

    def of(self, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim]."""
        if rotary not in self._found:
            self._found[rotary] = rotary.at(self._positions)
        return self._found[rotary]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, heads, head_dim] by cos, sin [T, 1, head_dim]; halves are pairs, as in Hugging Face."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
