"""The layers of a decoder: lists of parts, and what a config says of all of them together.

A block does not depend on where weights or a text's memory are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import ModelConfig
from .memory.kv_cache import KVLayout, MemoryLayout
from .memory.kv_formats import PLAIN, KVFormat
from .parts.kinds import parts_of
from .parts.part import LayerWeights, Part, PassRows
from .rope import RotaryEmbeddings


class Block:
    """Layer `index` of a decoder: its parts, in the order of their computation. Holds no weights."""

    def __init__(self, index: int, parts: Sequence[Part]) -> None:
        self.index = index
        self.parts = tuple(parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Short name → shape of each of the layer's tensors."""
        return {name: shape for part in self.parts for name, shape in part.shapes.items()}

    @property
    def memories(self) -> tuple[MemoryLayout, ...]:
        """The shapes of what the layer keeps of a text: KV entries, a state, both or nothing."""
        return tuple(layout for part in self.parts for layout in part.memories)

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """The layer over rows first .. last of a pass: hidden states x [T, hidden] → [T, hidden], a new tensor."""
        for part in self.parts:
            x = part.forward(x, weights, rows, first, last)
        return x


# ------------------------------------------------------------------------------------------------ from a config


def build_blocks(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> list[Block]:
    """A decoder's layers, in their order. dtype: of the arithmetic. Raises CheckpointError, see `rope.rotation`."""
    rotaries = rotaries_of(config, dtype, device)
    return [Block(index, parts_of(config, index, rotaries)) for index in range(config.num_layers)]


def rotaries_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RotaryEmbeddings:
    """The rotations of a decoder's layers, none of them computed yet."""
    return RotaryEmbeddings(is_interleaved=config.has_interleaved_rope, dtype=dtype, device=device)


def matrix_shapes(config: ModelConfig, index: int = 0) -> dict[str, tuple[int, int]]:
    """Short name without ".weight" → shape of each matrix of layer `index`, in the order of use."""
    return {name: shape for part in parts_of(config, index) for name, shape in part.matrices.items()}


def layer_shapes(config: ModelConfig, index: int = 0) -> dict[str, tuple[int, ...]]:
    """Short name → shape of each tensor of layer `index`."""
    return Block(index, parts_of(config, index)).shapes


def memory_layouts(
    config: ModelConfig, layers: range | None = None, *, forgets: bool = False
) -> list[tuple[MemoryLayout, ...]]:
    """The shapes of what each layer keeps of a text, of all layers or of `layers`.

    forgets: layers with a window drop KV entries outside of it.
    """
    layouts = [Block(index, parts_of(config, index)).memories for index in layers or range(config.num_layers)]
    return layouts if forgets else [tuple(map(of_all_entries, layer)) for layer in layouts]


def of_all_entries(layout: MemoryLayout) -> MemoryLayout:
    """The same layout for a layer that keeps all of its KV entries."""
    return layout.without_window if isinstance(layout, KVLayout) else layout


def kv_layouts(config: ModelConfig, layers: range | None = None) -> list[KVLayout | None]:
    """The shape of each layer's KV entries, of all layers or of `layers`; None for one without them."""
    kept = memory_layouts(config, layers)
    return [next((layout for layout in layer if isinstance(layout, KVLayout)), None) for layer in kept]


def has_entries_alone(config: ModelConfig) -> bool:
    """Whether offspec's own parts compute the layers, and these keep KV entries of a text or nothing.

    Then a draft can use some of the layers and their entries, and entries can be dropped from the middle of a text.
    """
    layouts = (layout for layer in memory_layouts(config) for layout in layer)
    return config.is_native and all(isinstance(layout, KVLayout) for layout in layouts)


def keeps_states(config: ModelConfig) -> bool:
    """Whether offspec's own parts compute the layers, and some of these keep a state of a text."""
    return config.is_native and not has_entries_alone(config)


def memory_bytes(
    config: ModelConfig,
    num_entries: int,
    itemsize: int,
    layers: range | None = None,
    kv: KVFormat = PLAIN,
    *,
    forgets: bool = False,
) -> int:
    """Bytes of a text's memory with room for `num_entries` entries, of all layers or of `layers`; KV entries as `kv`.

    It equals `SequenceCache.nbytes` by `Decoder.new_cache`. forgets: see `memory_layouts`.
    """
    layouts = (layout for layer in memory_layouts(config, layers, forgets=forgets) for layout in layer)
    return sum(kv.memory_bytes(layout, num_entries, itemsize) for layout in layouts)
