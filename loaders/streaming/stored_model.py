"""A checkpoint's stored weights in units: the bytes to read and to keep for each, and how they are bound.

Nothing here is in memory; `tiers` reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from ..files.checkpoint import Checkpoint
from ..files.records import Record
from ..formats import StoredWeight, Weight, dense, formats_in, stored_weights
from .placement import UnitCost
from .weights import split_names


@dataclass(frozen=True)
class StoredUnit:
    """Stored weights that are read together, by short name: those of one layer, or one outside the layers.

    packs: whether packed matrices that have lost nothing stay packed in memory; otherwise those that are resident are
    unpacked when they are loaded.
    """

    weights: Mapping[str, StoredWeight]
    packs: bool = False

    @cached_property
    def record(self) -> Record:
        return Record.of(info for weight in self.weights.values() for info in weight.streamed)

    @property
    def num_weights(self) -> int:
        return sum(prod(weight.shape) for weight in self.weights.values())

    def cost(self, dtype: torch.dtype) -> UnitCost:
        """The bytes to stream it, and to keep it resident for computing in `dtype`."""
        if self.is_converted(dtype):
            return UnitCost(self.record.read_bytes, self.record.nbytes, self.num_weights * dtype.itemsize)
        converted = [w for w in self.weights.values() if not w.is_kept_as_read(dtype)]
        resident = sum(prod(w.shape) * dtype.itemsize for w in converted)
        if len(converted) < len(self.weights):  # the others stay in the buffer of the record
            resident += self.record.nbytes
        return UnitCost(self.record.read_bytes, self.record.nbytes, resident)

    def needs_scratch(self, weight: StoredWeight, dtype: torch.dtype, *, is_streamed: bool) -> bool:
        """Whether products with one of its weights need memory for the matrix in `dtype`."""
        if not is_streamed and self.is_converted(dtype):
            return False
        return weight.is_packed or (is_streamed and len(weight.shape) > 1 and not weight.is_kept_as_read(dtype))

    def is_converted(self, dtype: torch.dtype) -> bool:
        """Whether matrices are kept unpacked that are read packed, and everything in memory of its own."""
        changes = any(weight.is_kept_as_read(dtype) for weight in self._of_two_forms.values())
        return changes and all(weight.plain_dtype is not None for weight in self.weights.values())

    @cached_property
    def _of_two_forms(self) -> Mapping[str, StoredWeight]:
        """Weights that may be kept in another form than they are read in, by short name."""
        return {} if self.packs else {name: weight for name, weight in self.weights.items() if has_two_forms(weight)}

    def bind(self, buffer: torch.Tensor, dtype: torch.dtype, *, is_kept: bool) -> dict[str, Weight]:
        """The weights in a buffer with the record. Vectors have `dtype`; matrices too if they are kept."""
        bound = self._views(buffer, dtype, is_kept=is_kept)
        if not is_kept or not self.is_converted(dtype):
            return bound
        for name, weight in bound.items():
            if name in self._of_two_forms and self._of_two_forms[name].is_kept_as_read(dtype):
                bound[name] = dense(weight, dtype)
            elif isinstance(weight, torch.Tensor):
                bound[name] = weight.clone()
        return bound

    def _views(self, buffer: torch.Tensor, dtype: torch.dtype, *, is_kept: bool) -> dict[str, Weight]:
        parts = self.record.parts(buffer)
        bound: dict[str, Weight] = {}
        for name, stored in self.weights.items():
            weight = stored.bind([parts[info.name] for info in stored.streamed])
            stays_packed = stored.is_packed and stored.is_kept_as_read(dtype)
            as_plain = len(weight.shape) < 2 or (is_kept and not stays_packed)
            bound[name] = dense(weight, dtype) if as_plain else weight
        return bound


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint's stored weights: a unit for each layer, and those outside the layers by full name."""

    layers: list[StoredUnit]
    shared: Mapping[str, StoredWeight]

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, layer_prefix: str, ignore: Collection[str] = ()) -> StoredModel:
        """Group a checkpoint's tensors into weights, and the weights into layers. Raises CheckpointError."""
        infos = {n: info for n, info in checkpoint.tensors.items() if n not in ignore}
        weights = stored_weights(infos, formats_in(checkpoint))
        layers, shared = split_names(weights, layer_prefix)
        return cls(
            [StoredUnit({short: weights[name] for short, name in layer.items()}) for layer in layers],
            {name: weights[name] for name in shared},
        )

    @cached_property
    def has_two_forms(self) -> bool:
        """Whether it is packed without loss, so that resident layers may be kept packed or unpacked."""
        return any(has_two_forms(weight) for weight in self.layers[0].weights.values())

    @cached_property
    def by_name(self) -> Mapping[str, StoredWeight]:
        """All weights by full name."""
        layers = (weight for layer in self.layers for weight in layer.weights.values())
        return {**self.shared, **{weight.name: weight for weight in layers}}

    def to(self, device: torch.device) -> StoredModel:
        """The same model with the formats' tables (scales) on `device`."""
        layers = [replace(layer, weights={n: w.to(device) for n, w in layer.weights.items()}) for layer in self.layers]
        return StoredModel(layers, {name: w.to(device) for name, w in self.shared.items()})

    def keeping(self, *, packed: bool) -> StoredModel:
        """The same model with matrices that have two forms packed in resident layers, or unpacked there."""
        return replace(self, layers=[replace(layer, packs=packed) for layer in self.layers])

    def scratch_elements(self, streamed: Collection[int], dtype: torch.dtype) -> int:
        """Elements of the largest matrix that needs scratch memory, with the layers `streamed` streamed."""
        made = (
            prod(weight.shape)
            for index, layer in enumerate(self.layers)
            for weight in layer.weights.values()
            if layer.needs_scratch(weight, dtype, is_streamed=index in streamed)
        )
        return max(made, default=0)


def has_two_forms(weight: StoredWeight) -> bool:
    """Whether it is packed, and unpacks to a plain tensor with the same bits."""
    return weight.is_packed and weight.plain_dtype is not None
