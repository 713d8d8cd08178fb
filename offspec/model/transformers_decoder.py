"""`ForeignDecoder`: a decoder whose layers are transformers' modules, with offspec's weights, KV cache and masks.

transformers' code determines how each layer is called (`Modules.prepare`). Then the layers are called one by one, as
parts, each while its weights are borrowed. Imports transformers.
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from offspec.backends.backend import Backend
from offspec.backends.weights import Weight
from offspec.loaders.streaming.weights import WeightSource

from .block import Block
from .decoder import Decoder
from .lent_modules import Lender
from .memory.kv_cache import MakeLayerCaches, plain_layers
from .parts.part import LayerWeights
from .parts.transformers_layer import LayerOfModules
from .pass_rows import AppendedRows
from .transformers_config import ForeignConfig, Source
from .transformers_modules import LayerCall, TextCache, build
from .transformers_probe import by_kind


class RowsCache(TextCache):
    """The KV cache of rows first .. last of a pass."""

    def __init__(self, rows: AppendedRows, config: ForeignConfig, first: int, last: int) -> None:
        super().__init__(rows.visibility.start + first)
        self._rows = rows
        self._config = config
        self._first = first
        self._last = last

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, T, D] of these rows → all keys and values for their attention."""
        dims, width = self._config.key_value_dims[layer_idx], self._config.kv[layer_idx].head_dim
        keys, values = (
            nn.functional.pad(given[0].transpose(0, 1), (0, width - dim))
            for given, dim in zip((key_states, value_states), dims, strict=True)
        )
        keys, values = self._rows.exchange(layer_idx, (keys, values), self._first, self._last)
        return keys[None, ..., : dims[0]], values[None, ..., : dims[1]]


class Body:
    """The layers of a `ForeignDecoder`, which compute rows of a text by transformers' modules."""

    def __init__(self, config: ForeignConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self.modules = build(config.raw, config.form, dtype)
        self.modules.fill_buffers(device)
        self._lenders = [
            Lender(layer, sources, dtype)
            for layer, sources in zip(self.modules.layers, config.layer_sources, strict=True)
        ]
        self.modules.embedding._parameters.pop("weight", None)
        inside = f"{self.modules.name_of(self.modules.base)}."
        preparing = {path: source for path, source in config.shared_sources.items() if path.startswith(inside)}
        self._preparing = Lender(self.modules.causal, preparing, dtype)

    def compute(
        self, layer: int, x: Tensor, weights: LayerWeights, text: AppendedRows, first: int, last: int
    ) -> Tensor:
        """`parts.transformers_layer.ComputeLayer`."""
        call = self._calls(x, text, first, last)[layer]
        with self._lenders[layer].lend(weights.tensors, weights.scratch):
            return self.modules.call_layer(layer, call, call.hidden[0] if layer == 0 else x)

    def _calls(self, x: Tensor, text: AppendedRows, first: int, last: int) -> list[LayerCall]:
        """How the layers are called for rows first .. last, whose hidden states are these.

        If they are all rows of the text, it is prepared once in a pass; otherwise in each layer, because masks are
        large.
        """
        if last - first < len(text):
            return self._prepare(x, text, first, last)
        if self not in text.once:
            text.once[self] = self._prepare(x, text, first, last)
        calls: list[LayerCall] = text.once[self]
        return calls

    def _prepare(self, x: Tensor, text: AppendedRows, first: int, last: int) -> list[LayerCall]:
        cache = RowsCache(text, self._config, first, last)
        positions, mask = text.visibility.positions[first:last], self._mask(text, first, last)
        with self._preparing.lend(shared_weights(self._config, self._weights), self._weights.scratch):
            return self.modules.prepare(x, positions, cache, mask)

    def _mask(self, rows: AppendedRows, first: int, last: int) -> Any:
        masks = {window is None: self._mask_of(rows, first, last, window) for window in set(self._config.windows)}
        return by_kind(masks) if self._config.form.has_mask_kinds else next(iter(masks.values()))

    def _mask_of(self, rows: AppendedRows, first: int, last: int, window: int | None) -> Tensor:
        """[1, 1, T, S]: bools, or for eager attention numbers to add to scores."""
        seen = rows.mask(first, last, window)
        if seen is None:
            num_keys = rows.visibility.start + last
            seen = torch.ones(last - first, num_keys, dtype=torch.bool, device=self._device)
        if self._config.form.attention == "eager":
            lowest = torch.finfo(self._dtype).min
            seen = torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, lowest)
        return seen[None, None]


def shared_weights(config: ForeignConfig, weights: WeightSource) -> dict[str, Weight]:
    """The weights outside the layers, except the embedding."""
    names = {name for source in config.shared_sources.values() for part in source.names for name in part}
    return {name: weights.shared(name) for name in names | {config.head_name}}


class ForeignDecoder(Decoder):
    """A decoder of a `ForeignConfig`. `normed` and `head` may be called during a pass, from another thread."""

    def __init__(
        self,
        config: ForeignConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        make_layer_caches: MakeLayerCaches = plain_layers,
    ) -> None:
        body = Body(config, weights, dtype, device)
        super().__init__(
            config,
            weights,
            dtype=dtype,
            device=device,
            make_layer_caches=make_layer_caches,
            blocks=[Block(index, [LayerOfModules(config, index, body.compute)]) for index in range(config.num_layers)],
        )
        self._body = body.modules
        # Modules of its own, because recall computes logits while another thread runs a pass.
        self._tail = build(config.raw, config.form, dtype)
        self._tail.fill_buffers(device)
        self._tail_turn = Lock()
        head = {f"{self._tail.name_of(self._tail.head)}.weight": Source(((config.head_name,),))}
        self._finishing = Lender(self._tail.causal, dict(config.shared_sources) | head, dtype)
        self._shared = partial(shared_weights, config, weights)

    # ---------------------------------------------------------------------------------------- its parts

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        rows = self.embedding_rows(tokens)
        module = self._body.embedding
        if type(module).forward is nn.Embedding.forward:
            return rows
        module.weight = rows  # so that the module applies its other operations to these rows
        try:
            embedded: Tensor = module(torch.arange(len(rows), device=rows.device))
        finally:
            module.weight = None
        return embedded

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        with self._tail_turn, self._finishing.lend(self._shared(), None):
            return self._tail.finish(hidden)

    @torch.inference_mode()
    def logits_by(self, backend: Backend, states: Tensor) -> Tensor:
        """`Decoder.logits_by`, but linear only if the config has `has_linear_head`."""
        with self._tail_turn, self._finishing.lend(self._shared(), None):
            return self._tail.logits(states).float()
