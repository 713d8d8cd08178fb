"""The weights of a checkpoint by config.json alone, for plans: names, shapes and sizes, but nothing to load.

Each weight format computes its own sizes (`WeightFormat.sized`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from offspec.loaders.checkpoint import DTYPE_BYTES, TensorInfo
from offspec.loaders.formats import StoredWeight, format_named
from offspec.loaders.tiers import StoredLayer, StoredModel

from ..model.block import layer_shapes
from ..model.config import ModelConfig


def stored_from_config(config: ModelConfig, form: str) -> StoredModel:
    """The weights of a model of this shape in the format `form` (of PLAN_FORMATS)."""
    shared = _Layer(format_named(form).outside_layers or form, config.shared_shapes()).weights("")
    return StoredModel(layers_from_config(config, form), shared)


def layers_from_config(config: ModelConfig, form: str) -> list[StoredLayer]:
    """The layers alone, in one of PLAN_FORMATS or SHADOW_FORMATS."""
    shapes = [layer_shapes(config, i) for i in range(config.num_layers)]
    return [StoredLayer(_Layer(form, shapes[i]).weights(f"{config.layer_prefix}{i}.")) for i in range(len(shapes))]


class _Layer:
    """Lays out weights one after another in an imaginary file."""

    def __init__(self, form: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._form, self._shapes, self._end = form, shapes, 0

    def weights(self, prefix: str) -> dict[str, StoredWeight]:
        return {name: self._weight(prefix + name, shape) for name, shape in self._shapes.items()}

    def _weight(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        weight = format_named(self._form).sized(self._form, name, shape, self._allocate)
        assert weight is not None, "each of PLAN_FORMATS implements `sized`"
        return weight

    def _allocate(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        info = TensorInfo(name, dtype, shape, Path(name.split(".")[0]), self._end, nbytes)
        self._end += nbytes
        return info
