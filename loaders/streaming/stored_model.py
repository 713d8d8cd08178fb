"""A checkpoint's stored weights in units: the bytes to read and to keep for each, and how they are bound.

A unit is a layer's weights, without those of its experts; each expert is a unit of its own.

Nothing here is in memory; `tiers` reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch

from offspec.backends.weights import Weight, dense
from offspec.errors import CheckpointError

from ..files.checkpoint import Checkpoint
from ..files.records import FLOAT_DTYPES, Record
from ..formats import StoredWeight, formats_in, stored_weights
from .placement import UnitCost
from .weights import EXPERT, split_names


@dataclass(frozen=True)
class StoredUnit:
    """Stored weights that are read together, by short name: of one layer or expert, or one outside the layers.

    packs: whether packed matrices that have lost nothing stay packed in memory; otherwise those that are resident are
    unpacked when they are loaded. exact: plain vectors that keep their stored dtype.
    """

    weights: Mapping[str, StoredWeight]
    packs: bool = False
    exact: Collection[str] = ()

    @cached_property
    def record(self) -> Record:
        return record_of((self,))

    @property
    def num_weights(self) -> int:
        return sum(prod(weight.shape) for weight in self.weights.values())

    def cost(self, dtype: torch.dtype) -> UnitCost:
        """The bytes to stream it, and to keep it resident for computing in `dtype`."""
        if dtype in self._costs:
            return self._costs[dtype]
        if self.is_converted(dtype):
            resident = self.num_weights * dtype.itemsize
        else:
            converted = {n: w for n, w in self.weights.items() if n in self.exact or not w.is_kept_as_read(dtype)}
            resident = sum(prod(w.shape) * self._bound_dtype(name, dtype).itemsize for name, w in converted.items())
            if len(converted) < len(self.weights):  # the others stay in the buffer of the record
                resident += self.record.nbytes
        return self._costs.setdefault(dtype, UnitCost(self.record.read_bytes, self.record.nbytes, resident))

    @cached_property
    def _costs(self) -> dict[torch.dtype, UnitCost]:
        """By dtype, those that a plan has asked for."""
        return {}

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

    def to(self, device: torch.device) -> StoredUnit:
        """The same unit with the formats' tables on `device`."""
        return replace(self, weights={name: weight.to(device) for name, weight in self.weights.items()})

    def bind(
        self, buffer: torch.Tensor, dtype: torch.dtype, *, is_kept: bool, record: Record | None = None
    ) -> dict[str, Weight]:
        """The weights in a buffer with `record`, the unit's own or one that holds it.

        Vectors that are not `exact` have `dtype`; matrices have it too if they are kept.
        """
        bound = self._views((record or self.record).parts(buffer), dtype, is_kept=is_kept)
        if not is_kept or not self.is_converted(dtype):
            return bound
        for name, weight in bound.items():
            if name in self._of_two_forms and self._of_two_forms[name].is_kept_as_read(dtype):
                bound[name] = dense(weight, dtype)
            elif isinstance(weight, torch.Tensor):
                bound[name] = weight.clone()
        return bound

    def _views(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, *, is_kept: bool) -> dict[str, Weight]:
        bound: dict[str, Weight] = {}
        for name, stored in self.weights.items():
            weight = stored.bind([parts[info.name] for info in stored.streamed])
            stays_packed = stored.is_packed and stored.is_kept_as_read(dtype)
            as_plain = len(weight.shape) < 2 or (is_kept and not stays_packed)
            plain = dense(weight, self._bound_dtype(name, dtype)) if as_plain else None
            if plain is not None and is_kept and name in self.exact:
                plain = plain.clone()  # a view would keep the whole buffer
            bound[name] = weight if plain is None else plain
        return bound

    def _bound_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a weight that is converted for computing in `dtype`."""
        return FLOAT_DTYPES[self.weights[name].dtype] if name in self.exact else dtype


Experts = tuple[StoredUnit, ...]  # of one layer, in the order of their numbers


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint's stored weights: a unit for each layer, and those outside the layers by full name.

    experts: of each layer that has some, by its number, if each expert is a unit; otherwise they belong to their layer.
    """

    layers: list[StoredUnit]
    shared: Mapping[str, StoredWeight]
    experts: Mapping[int, Experts] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        layer_prefix: str,
        ignore: Collection[str] = (),
        by_expert: bool = False,
        exact: Collection[str] = (),
    ) -> StoredModel:
        """Group a checkpoint's tensors into weights, and the weights into units. Raises CheckpointError.

        exact: short names of vectors that keep their stored dtype.
        """
        infos = {n: info for n, info in checkpoint.tensors.items() if n not in ignore}
        weights = stored_weights(infos, formats_in(checkpoint))
        layers, shared = split_names(weights, layer_prefix)
        model = cls(
            [StoredUnit({short: weights[name] for short, name in layer.items()}, exact=exact) for layer in layers],
            {name: weights[name] for name in shared},
        )
        return model.by_expert() if by_expert else model

    def by_expert(self) -> StoredModel:
        """The same model with a unit for each expert. Raises CheckpointError for a missing number."""
        layers, experts = list[StoredUnit](), dict[int, Experts]()
        for index, layer in enumerate(self.layers):
            common, by_number = dict[str, StoredWeight](), defaultdict[int, dict[str, StoredWeight]](dict)
            for name, weight in layer.weights.items():
                if match := EXPERT.fullmatch(name):
                    by_number[int(match[1])][match[2]] = weight
                else:
                    common[name] = weight
            layers.append(replace(layer, weights=common))
            if by_number:
                if missing := [number for number in range(max(by_number)) if number not in by_number]:
                    raise CheckpointError(
                        f"layer {index} lacks expert {missing[0]} of {max(by_number) + 1}; download it again"
                    )
                experts[index] = tuple(StoredUnit(by_number[number]) for number in range(len(by_number)))
        return replace(self, layers=layers, experts=experts)

    @property
    def units(self) -> Iterator[StoredUnit]:
        """All units: layers, and experts."""
        yield from self.layers
        for experts in self.experts.values():
            yield from experts

    @cached_property
    def has_two_forms(self) -> bool:
        """Whether it is packed without loss, so that resident layers may be kept packed or unpacked."""
        return any(has_two_forms(weight) for unit in self.first_layer for weight in unit.weights.values())

    @property
    def first_layer(self) -> tuple[StoredUnit, ...]:
        """The first layer, and the experts of the first layer that has some."""
        return (self.layers[0], *next(iter(self.experts.values()), ()))

    def expert_costs(self, dtype: torch.dtype) -> list[UnitCost]:
        """Of all experts; computed once, because there are thousands."""
        if dtype not in self._expert_costs:
            units = (unit for experts in self.experts.values() for unit in experts)
            self._expert_costs[dtype] = [unit.cost(dtype) for unit in units]
        return self._expert_costs[dtype]

    @cached_property
    def _expert_costs(self) -> dict[torch.dtype, list[UnitCost]]:
        return {}

    @cached_property
    def num_expert_weights(self) -> int:
        return sum(unit.num_weights for experts in self.experts.values() for unit in experts)

    @cached_property
    def by_name(self) -> Mapping[str, StoredWeight]:
        """All weights by full name."""
        inner = (weight for unit in self.units for weight in unit.weights.values())
        return {**self.shared, **{weight.name: weight for weight in inner}}

    def to(self, device: torch.device) -> StoredModel:
        """The same model with the formats' tables (scales) on `device`."""
        layers = [layer.to(device) for layer in self.layers]
        experts = {index: tuple(each.to(device) for each in units) for index, units in self.experts.items()}
        return StoredModel(layers, {name: w.to(device) for name, w in self.shared.items()}, experts)

    def keeping(self, *, packed: bool) -> StoredModel:
        """The same model with matrices that have two forms packed in resident units, or unpacked there."""
        experts = {index: tuple(replace(each, packs=packed) for each in units) for index, units in self.experts.items()}
        return replace(self, layers=[replace(layer, packs=packed) for layer in self.layers], experts=experts)

    def scratch_elements(self, streamed: Collection[int], dtype: torch.dtype) -> int:
        """Elements of the largest matrix that needs scratch memory, with the layers `streamed` streamed."""
        units = [(layer, index in streamed) for index, layer in enumerate(self.layers)]
        units += [(unit, True) for experts in self.experts.values() for unit in experts]  # some may be
        made = (
            prod(weight.shape)
            for unit, is_streamed in units
            for weight in unit.weights.values()
            if unit.needs_scratch(weight, dtype, is_streamed=is_streamed)
        )
        return max(made, default=0)


def record_of(units: Iterable[StoredUnit]) -> Record:
    """One record that holds all weights of some units."""
    return Record.of(info for unit in units for weight in unit.weights.values() for info in weight.streamed)


def has_two_forms(weight: StoredWeight) -> bool:
    """Whether it is packed, and unpacks to a plain tensor with the same bits."""
    return weight.is_packed and weight.plain_dtype is not None
