"""`LayerView`: some layers of a model, others in place of some, and everything outside the layers.

A draft that is made of its target's own parts has its weights from such a view. Knows nothing of drafting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from ..formats import Weight
from .stream import Unit
from .weights import WeightSource

ViewedLayer: TypeAlias = int | Mapping[str, Weight]  # a layer of the source by its number, or weights in its place


class LayerView:
    """A `WeightSource` over another one, whose layers in the view are resident.

    Two threads may use the view and its source at the same time: the view has a scratch of its own.
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

    def shared(self, name: str) -> Weight:
        return self._source.shared(name)

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        return self._source.rows(name, indices)

    def close(self) -> None:
        """Frees the view's own weights; the source stays open."""
        self._layers, self.scratch = (), None
