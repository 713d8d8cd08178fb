"""MXFP4 matrices of models whose config.json has `quant_method: mxfp4` (gpt-oss): codes e2m1, exponents for 32 inputs.

X.weight_blocks   uint8 [N, K/32, 16], two codes a byte, low half first
X.weight_scales   E8M0 [N, K/32], named U8
gpt-oss stores a layer's experts together, as X_blocks [experts, …]; `offspec.checkpoints.experts` gives them the names
above. Only experts are quantised. Source: OCP Microscaling Formats (MX) 1.0, 5.4.1, 6.3; transformers' `Mxfp4Config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..files.checkpoint import Checkpoint, TensorInfo
from ..params import MXFP4
from .core import DAMAGED, Allocate, StoredWeight, TensorGroup
from .scaled import (
    EXPONENTS,
    FP4,
    MX_BLOCK,
    ScaledFormat,
    ScaledLayout,
    ScaledParts,
    ScaledWeight,
    sized_scaled,
    sized_vector,
)

BLOCKS, SCALES = "weight_blocks", "weight_scales"
_BLOCK_BYTES = 16
_KEPT = re.compile(r".+\.(self_attn|router)\..+", re.DOTALL)  # matrices of gpt-oss's layers that are not quantised


class Mxfp4Format(ScaledFormat):
    """gpt-oss's MXFP4, recognised by the parts of a weight. It also sizes MXFP4 of other containers."""

    names = (MXFP4,)
    plan_forms = (MXFP4,)
    companions = re.compile(rf"(.+)\.({BLOCKS}|{SCALES})", re.DOTALL)

    def __init__(self, *, is_set: bool = False) -> None:
        self.is_set = is_set

    def in_checkpoint(self, checkpoint: Checkpoint) -> Mxfp4Format | None:
        quantization = checkpoint.config.get("quantization_config")
        is_of_it = isinstance(quantization, Mapping) and quantization.get("quant_method") == MXFP4
        return Mxfp4Format(is_set=True) if is_of_it else None

    def recognises(self, group: TensorGroup) -> bool:
        return self.is_set and not group.parts.keys().isdisjoint((BLOCKS, SCALES))

    def read(self, group: TensorGroup) -> StoredWeight:
        blocks, scales = (_part(group, name) for name in (BLOCKS, SCALES))
        if len(blocks.shape) != 3 or blocks.dtype != "U8" or blocks.shape[2] != _BLOCK_BYTES or 0 in blocks.shape:
            group.refuse(blocks, f"has blocks that are {blocks.dtype} {list(blocks.shape)}; {DAMAGED}")
        if scales.dtype not in EXPONENTS or scales.shape != blocks.shape[:2]:
            stored = f"{scales.dtype} {list(scales.shape)}"
            group.refuse(scales, f"has scales that are {stored} beside {list(blocks.shape)} blocks; {DAMAGED}")
        shape = (blocks.shape[0], blocks.shape[1] * MX_BLOCK[1])
        return ScaledWeight(group.name, ScaledLayout(shape, MXFP4, FP4, MX_BLOCK), ScaledParts(blocks, scales))

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        quantization = config.get("quantization_config") or {}
        return MXFP4 if quantization.get("quant_method") == MXFP4 else None

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight:
        if len(shape) != 2 or _KEPT.fullmatch(name):
            return sized_vector(name, shape, allocate)
        layout = ScaledLayout((shape[0], shape[1]), MXFP4, FP4, MX_BLOCK)
        return sized_scaled(layout, name, allocate, ("U8", "F8_E8M0"))


def _part(group: TensorGroup, name: str) -> TensorInfo:
    if name not in group.parts:
        group.refuse(next(iter(group.parts.values())), f"lacks its {name}; {DAMAGED}")
    return group.parts[name]
