"""Where a model's weights come from: the `WeightSource` protocol, and `RamWeights`, over tensors in memory.

A source lends *units*: weights that are needed together, and given back together. Today a unit is a layer. Knows which
tensors belong to layer i, from their names, and nothing of what a layer is made of. Does not decide what fits where.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from offspec.errors import CheckpointError

from .checkpoint import show
from .formats import Weight, as_table, take_rows
from .small_transfers import to_device
from .stream import Unit


class WeightSource(Protocol):
    """The weights of one model, unit by unit, on the compute device.

    Units may be asked for in any order, each as often as it is needed, or not at all in a pass. An implementation may
    be fast in one order only (`stream.Ring`: the one in which a pass asks for layers).
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def bytes_streamed(self) -> int:
        """Bytes that came through a link for passes so far, counted as they were used; passes may differ in them."""
        ...

    @property
    def is_resident(self) -> bool:
        """Whether every unit is lent as the same tensors each time, until `close`."""
        ...

    @property
    def scratch(self) -> torch.Tensor | None:
        """Where `formats.linear` puts a matrix that it has to make first; None where all lie ready."""
        ...

    def lend(self, unit: Unit) -> AbstractContextManager[Mapping[str, Weight]]:
        """A unit's weights by their short names.

        They are valid inside the `with` block only: a streaming source reuses their memory afterwards.
        """
        ...

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        """`lend` for the unit that is layer `index`: "x.weight" is what the checkpoint calls "<prefix>3.x.weight"."""
        ...

    def shared(self, name: str) -> Weight:
        """A weight outside the layers by its full name, valid until `close`. Raises CheckpointError if missing."""
        ...

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """Rows [T, columns] of a table outside the layers, on the compute device; indices: int64 [T] on the CPU."""
        ...

    def close(self) -> None:
        """Lets go of the memory; nothing may be asked for afterwards."""
        ...


class RamWeights:
    """Tensors that are in memory anyway, for as long as the source lives."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Weight]],
        shared: Mapping[str, Weight],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """layers: each one's weights by their short names. shared: those outside the layers by their full names.

        dtype: of rows that come out of a packed table; those of a plain one come as they are.
        """
        self._layers = layers
        self._shared, self._dtype = shared, dtype
        self.is_resident = True
        self.scratch = None
        self.bytes_streamed = 0

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], layer_prefix: str) -> RamWeights:
        """Takes the tensors as they are, under their full names; nothing is copied. Raises CheckpointError."""
        layers, shared = split_names(tensors, layer_prefix)
        return cls(
            [{short: tensors[name] for short, name in layer.items()} for layer in layers],
            {name: tensors[name] for name in shared},
        )

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def lend(self, unit: Unit) -> AbstractContextManager[Mapping[str, Weight]]:
        assert isinstance(unit, int), "its units are layers"
        return nullcontext(self._layers[unit])

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return self.lend(index)

    def shared(self, name: str) -> Weight:
        if name not in self._shared:
            raise missing(name)
        return self._shared[name]

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        table = as_table(self.shared(name))
        dtype = table.dtype if isinstance(table, torch.Tensor) else self._dtype
        return take_rows(table, to_device(indices, table.device), dtype)

    def close(self) -> None:
        self._layers, self._shared = [], {}


def missing(name: str) -> CheckpointError:
    """The error of a tensor that is not there."""
    return CheckpointError(f"tensor {show(name)} is missing; the checkpoint is incomplete or of another kind")


def split_names(names: Iterable[str], layer_prefix: str) -> tuple[list[dict[str, str]], list[str]]:
    """Per layer its {short name: full name}, and the names outside the layers. Refuses a gap in the layers."""
    pattern = re.compile(re.escape(layer_prefix) + r"(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)
    layers: dict[int, dict[str, str]] = {}
    shared = []
    for name in names:
        if match := pattern.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = name
        else:
            shared.append(name)
    _refuse_gaps(layers, layer_prefix)
    return [layers[index] for index in range(len(layers))], shared


def _refuse_gaps(layers: Collection[int], layer_prefix: str) -> None:
    if not layers:
        raise CheckpointError(f"no tensor is named {layer_prefix}0.*; the checkpoint is of another kind")
    missing = next((index for index in range(len(layers)) if index not in layers), None)
    if missing is not None:
        have = f"there are tensors up to layer {max(layers)}"
        raise CheckpointError(f"layer {missing} is missing ({layer_prefix}{missing}.*), but {have}; download it again")
