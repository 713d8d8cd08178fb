"""A checkpoint that is not here: what its weights would be like, from config.json alone. For plans; nothing can be loaded.

The sizes are those that transformers and bitsandbytes would write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offspec.loaders.checkpoint import DTYPE_BYTES, TensorInfo
from offspec.loaders.formats import Layout4bit, PlainWeight, StoredWeight, Weight4bit
from offspec.loaders.params import GROUPED_METHODS
from offspec.loaders.tiers import StoredLayer, StoredModel

from ..model.config import ModelConfig

_STORED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_BLOCK = 64  # weights a scale; scales of 8 bit, as double quantisation leaves them


def format_of(config: Mapping[str, Any]) -> str:
    """The format that a config.json tells of: nf4 where it is quantised to 4 bit, its dtype otherwise."""
    said = config.get("quantization_config") or {}
    # AWQ's and GPTQ's sizes are within a percent of NF4's.
    if said.get("load_in_4bit") or said.get("quant_method") in GROUPED_METHODS:
        return "nf4"
    dtype = config.get("torch_dtype") or config.get("dtype")
    return {"float16": "fp16", "float32": "fp32"}.get(str(dtype), "bf16")


def stored_from_config(config: ModelConfig, form: str) -> StoredModel:
    """The weights of a model of this shape in the format `form` (of PLAN_FORMATS); nf4 leaves what is outside the layers in bf16."""
    layers = [_Layer(form, config.layer_shapes()).weights(f"model.layers.{i}.") for i in range(config.num_layers)]
    shared = _Layer("bf16" if form == "nf4" else form, config.shared_shapes()).weights("")
    return StoredModel([StoredLayer(layer) for layer in layers], shared)


class _Layer:
    """Lays weights out one after another in a file of their own."""

    def __init__(self, form: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._form, self._shapes, self._end = form, shapes, 0

    def weights(self, prefix: str) -> dict[str, StoredWeight]:
        return {name: self._weight(prefix + name, shape) for name, shape in self._shapes.items()}

    def _weight(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        if self._form == "nf4" and len(shape) == 2:
            elements = math.prod(shape)
            codes = self._info(name, "U8", (-(-elements // 2), 1))
            scales = self._info(f"{name}.absmax", "U8", (-(-elements // _BLOCK),))
            return Weight4bit(name, Layout4bit((shape[0], shape[1]), "nf4", _BLOCK), (codes, scales))
        return PlainWeight(name, self._info(name, _STORED.get(self._form, "BF16"), shape))

    def _info(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        info = TensorInfo(name, dtype, shape, Path(name.split(".")[0]), self._end, nbytes)
        self._end += nbytes
        return info
