"""fp8 matrices (e4m3) of models whose config.json has `quant_method: fp8` (DeepSeek, Qwen, AutoFP8) or `fbgemm_fp8`.

X.weight              F8_E4M3 [N, K]
X.weight_scale_inv    factor of the codes, one per block of `weight_block_size` (2412.19437, 3.3.2):
                      fp32, bf16 or, with `scale_fmt: ue8m0`, E8M0 [ceil(N/128), ceil(K/128)]
X.weight_scale        the same with another name; without blocks one number, or [N, 1]
X.input_scale         not used: activations stay in 16 bit, only weights have 8 bit
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offspec.errors import UnsupportedModelError

from ..files.checkpoint import Checkpoint, TensorInfo, fault, show
from ..files.records import FLOAT_DTYPES
from ..params import FP8_METHODS
from .core import DAMAGED, REMEDY, Allocate, StoredWeight, TensorGroup
from .plain import PlainWeight
from .scaled import (
    ACTIVATIONS,
    EXPONENTS,
    Block,
    Codes,
    ScaledFormat,
    ScaledLayout,
    ScaledParts,
    ScaledWeight,
    grid,
    sized_scaled,
    sized_vector,
)

CODES = Codes("fp8", 8)
SCALES = ("weight_scale_inv", "weight_scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", *EXPONENTS)
_PLANNED_BLOCK = (128, 128)


@dataclass(frozen=True)
class Fp8Settings:
    """The settings of a config.json for all matrices. block: None if scales are for rows or whole matrices."""

    block: Block | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Fp8Settings | None:
        """The settings of its `quantization_config`; None for another method, or without one.

        Raises UnsupportedModelError for another kind of fp8, CheckpointError.
        """
        quantization, path = checkpoint.config.get("quantization_config"), checkpoint.path
        if not isinstance(quantization, Mapping) or quantization.get("quant_method") not in FP8_METHODS:
            return None
        if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedModelError(
                f"{path}: fp8 in {show(quantization['fmt'])} is not supported, only e4m3; {REMEDY}"
            )
        block = quantization.get("weight_block_size")
        if block is None:
            return cls(None)
        if not is_block(block):
            raise fault(path, f"config.json has weight_block_size {show(block)}, which is not two numbers of weights")
        return cls((block[0], block[1]))


def is_block(value: object) -> bool:
    """Whether a JSON value is a block: outputs and inputs. The bound keeps row numbers by block within 64 bits."""
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and 0 < size < 2**31 for size in value)


def block_of(shape: tuple[int, int], scales: TensorInfo, block: Block | None) -> Block | None:
    """The weights that share a scale, by the shape of the scales: all, a row, or a `block`; None if none fits."""
    if math.prod(scales.shape) == 1:
        return shape
    if scales.shape in ((shape[0],), (shape[0], 1)):
        return 1, shape[1]
    return block if block is not None and scales.shape == grid(shape, block) else None


class Fp8Format(ScaledFormat):
    """fp8, recognised by its scales or its codes."""

    names = ("fp8",)
    plan_forms = ("fp8",)
    companions = re.compile(rf"(.+)\.({'|'.join(SCALES)}|{ACTIVATIONS})", re.DOTALL)

    def __init__(self, settings: Fp8Settings | None = None) -> None:
        """settings: from a checkpoint's config; without them, the format recognises nothing."""
        self.settings, self.is_set = settings, settings is not None

    def in_checkpoint(self, checkpoint: Checkpoint) -> Fp8Format | None:
        settings = Fp8Settings.of(checkpoint)
        return None if settings is None else Fp8Format(settings)

    def recognises(self, group: TensorGroup) -> bool:
        return self.is_set and (len(group.parts) > 1 or group.weight.dtype.startswith("F8_"))

    def read(self, group: TensorGroup) -> StoredWeight:
        assert self.settings is not None
        weight, scale_parts = group.weight, [part for part in SCALES if part in group.parts]
        if not scale_parts and weight.dtype in FLOAT_DTYPES:
            return PlainWeight(group.name, weight)
        if len(scale_parts) != 1:
            group.refuse(weight, f"has {' and '.join(scale_parts) or 'no weight_scale_inv'}, one is needed; {DAMAGED}")
        if weight.dtype != "F8_E4M3" or len(weight.shape) != 2 or 0 in weight.shape:
            description = f"has a {scale_parts[0]}, but is {weight.dtype} {list(weight.shape)}, not F8_E4M3 [N, K]"
            group.refuse(weight, f"{description}; {DAMAGED}")
        scales, shape = group.parts[scale_parts[0]], (weight.shape[0], weight.shape[1])
        block = block_of(shape, scales, self.settings.block)
        if block is None or scales.dtype not in _SCALE_DTYPES:
            sizes = self.settings.block or "without blocks"
            stored = f"{scales.dtype} {list(scales.shape)}"
            description = f"has a {scale_parts[0]} that is {stored}, which {list(shape)} {sizes} has not"
            group.refuse(scales, f"{description}; {DAMAGED}")
        layout = ScaledLayout(shape, "fp8", CODES, block)
        return ScaledWeight(group.name, layout, ScaledParts(weight, scales))

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        quantization = config.get("quantization_config") or {}
        return "fp8" if quantization.get("quant_method") in FP8_METHODS else None

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight:
        """With blocks, as in DeepSeek's and Qwen's models; vectors are plain."""
        if len(shape) != 2:
            return sized_vector(name, shape, allocate)
        layout = ScaledLayout((shape[0], shape[1]), "fp8", CODES, _PLANNED_BLOCK)
        return sized_scaled(layout, name, allocate, ("F8_E4M3", "F32"))
