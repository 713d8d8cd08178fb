"""Sources of a model's weights: the `WeightSource` protocol, `RamWeights` over tensors, `LayerView` over a source.

A source lends *units*, groups of weights that are used together: a layer without its experts, or an expert. Tensor
names determine the unit of each tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import torch

from offspec.backends.expert_table import ExpertTable
from offspec.backends.weights import Weight, as_table, take_rows
from offspec.errors import CheckpointError

from ..files.checkpoint import show
from .small_transfers import to_device
from .stream import Unit

EXPERT = re.compile(r"(?:.+\.)?experts\.(0|[1-9][0-9]{0,4})\.(.+)")  # within a layer: the expert's number, and the rest
LentExperts: TypeAlias = Mapping[int, Mapping[str, Weight]]  # expert's number → its weights by short name


class HostExperts(dict[int, Mapping[str, Weight]]):
    """`LentExperts` in RAM, which the CPU computes although a device computes their layer."""


ViewedLayer: TypeAlias = int | Mapping[str, Weight]  # a layer of the source by its number, or weights in its place


class WeightSource(Protocol):
    """The weights of one model, unit by unit, on the compute device.

    Units may be requested in any order, and any number of times per pass. An implementation may be fast in one order
    only (`stream.Ring`: the order of layers in a pass).
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def bytes_streamed(self) -> int:
        """Bytes streamed for passes so far, counted on use; passes may differ."""

    @property
    def is_resident(self) -> bool:
        """Whether every request for a unit returns the same tensors until `close`."""

    @property
    def scratch(self) -> torch.Tensor | None:
        """Scratch memory in which `Backend.linear` dequantises or converts a matrix; None if no matrix needs it."""

    def lend(self, unit: Unit) -> AbstractContextManager[Mapping[str, Weight]]:
        """A unit's weights by short name, valid only inside the `with` block: a streaming source reuses memory."""

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        """`lend` for the unit of layer `index`: "x.weight" is the checkpoint's "<prefix>3.x.weight" for layer 3."""

    def experts(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        """Some experts of a layer, in groups, each valid until the next is requested.

        rows: the expert's number → the rows that use it. Each is lent once, in any order, on any device.
        """

    def expert_table(self, layer: int) -> ExpertTable | None:
        """A layer's experts, if all of them stay on a GPU that multiplies with them at once. Valid until `close`."""

    def ahead(self, layer: int) -> Mapping[str, Weight] | None:
        """Weights of a layer, to predict its experts for `expect`; None if that is of no use. Valid until `close`."""

    def expect(self, layer: int, rows: Mapping[int, int]) -> None:
        """Announce experts that `experts` will probably be asked for after the next request; see there."""

    def shared(self, name: str) -> Weight:
        """A weight outside the layers by its full name, valid until `close`. Raises CheckpointError if missing."""

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """Rows [T, columns] of a table outside the layers, on the compute device; indices: int64 [T] on the CPU."""

    def close(self) -> None:
        """Free the memory; no requests are allowed afterwards."""


class RamWeights:
    """A source over tensors in memory."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Weight]],
        shared: Mapping[str, Weight],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """layers: the weights of each layer by short name. shared: weights outside the layers by full name.

        dtype: of rows from a packed table; rows of a plain table keep their dtype.
        """
        self._layers = layers
        self._experts = [experts_in(layer) for layer in layers]
        self._shared, self._dtype = shared, dtype
        self.is_resident = True
        self.scratch = None
        self.bytes_streamed = 0

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], layer_prefix: str) -> RamWeights:
        """Create a source from tensors by full name, without copies. Raises CheckpointError."""
        layers, shared = split_names(tensors, layer_prefix)
        return cls(
            [{short: tensors[name] for short, name in layer.items()} for layer in layers],
            {name: tensors[name] for name in shared},
        )

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def lend(self, unit: Unit) -> AbstractContextManager[Mapping[str, Weight]]:
        return nullcontext(self._layers[unit])

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return self.lend(index)

    def experts(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        yield {number: self._experts[layer][number] for number in rows}

    def expert_table(self, layer: int) -> None: ...

    def ahead(self, layer: int) -> None: ...

    def expect(self, layer: int, rows: Mapping[int, int]) -> None: ...

    def shared(self, name: str) -> Weight:
        if name not in self._shared:
            raise missing(name)
        return self._shared[name]

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        table = as_table(self.shared(name))
        dtype = table.dtype if isinstance(table, torch.Tensor) else self._dtype
        return take_rows(table, to_device(indices, table.device), dtype)

    def close(self) -> None:
        self._layers, self._experts, self._shared = [], [], {}


class LayerView:
    """Some layers of another source, all resident, others in place of some, and everything outside the layers.

    A draft that is made of its target's own parts has its weights from such a view. Two threads may use the view and
    its source at the same time: the view has a scratch of its own.
    """

    is_resident = True
    bytes_streamed = 0

    def __init__(self, source: WeightSource, layers: Sequence[ViewedLayer], scratch: torch.Tensor | None) -> None:
        """scratch: see `WeightSource.scratch`; large enough for every layer of the view."""
        self._source, self._layers, self.scratch = source, tuple(layers), scratch

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def lend(self, unit: Unit) -> AbstractContextManager[Mapping[str, Weight]]:
        layer = self._layers[unit]
        return self._source.lend(layer) if isinstance(layer, int) else nullcontext(layer)

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return self.lend(index)

    def experts(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        viewed = self._layers[layer]
        if isinstance(viewed, int):
            yield from self._source.experts(viewed, rows)
        else:
            experts = experts_in(viewed)
            yield {number: experts[number] for number in rows}

    def expert_table(self, layer: int) -> ExpertTable | None:
        viewed = self._layers[layer]
        return self._source.expert_table(viewed) if isinstance(viewed, int) else None

    def ahead(self, layer: int) -> None: ...

    def expect(self, layer: int, rows: Mapping[int, int]) -> None: ...

    def shared(self, name: str) -> Weight:
        return self._source.shared(name)

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        return self._source.rows(name, indices)

    def close(self) -> None:
        """Frees the view's own weights; the source stays open."""
        self._layers, self.scratch = (), None


def experts_in(layer: Mapping[str, Weight]) -> dict[int, dict[str, Weight]]:
    """A layer's experts by their numbers, from weights by short name."""
    experts = defaultdict[int, dict[str, Weight]](dict)
    for name, weight in layer.items():
        if match := EXPERT.fullmatch(name):
            experts[int(match[1])][match[2]] = weight
    return dict(experts)


def missing(name: str) -> CheckpointError:
    """The error for a missing tensor."""
    return CheckpointError(f"tensor {show(name)} is missing; the checkpoint is incomplete or of another kind")


def split_names(names: Iterable[str], layer_prefix: str) -> tuple[list[dict[str, str]], list[str]]:
    """{short name: full name} per layer, and the names outside the layers. Raises CheckpointError for gaps."""
    pattern = re.compile(re.escape(layer_prefix) + r"(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)
    layers: dict[int, dict[str, str]] = {}
    shared = []
    for name in names:
        if match := pattern.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = name
        else:
            shared.append(name)
    if not layers:
        raise CheckpointError(f"no tensor is named {layer_prefix}0.*; the checkpoint has another architecture")
    missing = next((index for index in range(len(layers)) if index not in layers), None)
    if missing is not None:
        have = f"there are tensors up to layer {max(layers)}"
        raise CheckpointError(f"layer {missing} is missing ({layer_prefix}{missing}.*), but {have}; download it again")
    return [layers[index] for index in range(len(layers))], shared
