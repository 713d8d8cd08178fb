"""The weights of a checkpoint by config.json alone, for plans: names, shapes and sizes, but nothing to load.

Each weight format computes its own sizes (`WeightFormat.sized`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from offspec.loaders.files.checkpoint import DTYPE_BYTES, TensorInfo
from offspec.loaders.formats import StoredWeight, format_named
from offspec.loaders.streaming.stored_model import StoredModel, StoredUnit

from ..model.block import layer_shapes
from ..model.config import ModelConfig
from .gguf_mixtures import MIXTURES

FormOf = Callable[[str, tuple[int, ...]], str]  # a weight's name in its layer and its shape → its form


def stored_from_config(config: ModelConfig, form: str) -> StoredModel:
    """The weights of a model of this shape in the format `form` (of PLAN_FORMATS)."""
    outside = format_named(form).outside_layers or form if form not in MIXTURES else form

    def of_layer(layer: int | None) -> FormOf:
        if form in MIXTURES:  # as a GGUF file has them: in several types
            return lambda name, shape: MIXTURES[form].type_of(config, name, shape, layer)
        return lambda name, shape: outside if layer is None else form

    model = StoredModel(_layers(config, of_layer), _weights(of_layer(None), config.shared_shapes()))
    return model if config.experts is None else model.by_expert()


def layers_from_config(config: ModelConfig, form: str) -> list[StoredUnit]:
    """The layers alone, in a format with one form for all matrices: of PLAN_FORMATS or SHADOW_FORMATS."""
    return _layers(config, lambda i: lambda name, shape: form)


def weights_from_shapes(shapes: Mapping[str, tuple[int, ...]], form: str) -> dict[str, StoredWeight]:
    """Weights of these names and shapes in a format, of PLAN_FORMATS."""
    return _weights(lambda name, shape: form, shapes)


def _layers(config: ModelConfig, form_in: Callable[[int], FormOf]) -> list[StoredUnit]:
    return [
        StoredUnit(_weights(form_in(i), layer_shapes(config, i), f"{config.layer_prefix}{i}."))
        for i in range(config.num_layers)
    ]


def _weights(form_of: FormOf, shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> dict[str, StoredWeight]:
    """Weights one after another in an imaginary file."""
    weights, end = dict[str, StoredWeight](), 0

    def allocate(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        nonlocal end
        info = TensorInfo(name, dtype, shape, Path(name.split(".")[0]), end, math.prod(shape) * DTYPE_BYTES[dtype])
        end += info.nbytes
        return info

    for name, shape in shapes.items():
        form = form_of(name, shape)
        weight = format_named(form).sized(form, prefix + name, shape, allocate)
        assert weight is not None, "each of PLAN_FORMATS implements `sized`"
        weights[name] = weight
    return weights
