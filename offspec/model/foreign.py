"""`ForeignDecoder`: a decoder whose layers are transformers' modules, with offspec's weights, KV cache and masks.

As in `Decoder`, a pass is layer-major: transformers' code determines how each layer is called (`Modules.prepare`). Then
the layers are called one by one, each while its weights are borrowed. Imports transformers.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from offspec.loaders.accelerators.cuda import span
from offspec.loaders.formats import Weight
from offspec.loaders.streaming.weights import WeightSource

from .block import PassRows
from .decoder import AfterLayer, AppendedRows, Decoder, JoinedRows
from .foreign_config import ForeignConfig, Source
from .foreign_modules import LayerCall, TextCache, build
from .foreign_probe import by_kind
from .kv_cache import MakeLayerCaches, plain_layers
from .lent_modules import Lender


class RowsCache(TextCache):
    """The KV cache of rows first .. last of a pass."""

    def __init__(self, rows: AppendedRows, config: ForeignConfig, first: int, last: int) -> None:
        super().__init__(rows.visibility.start + first)
        self._rows, self._config, self._first, self._last = rows, config, first, last

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, T, D] of these rows → all keys and values for their attention."""
        dims, width = self._config.key_value_dims[layer_idx], self._config.kv[layer_idx].head_dim
        keys, values = (
            nn.functional.pad(given[0].transpose(0, 1), (0, width - dim))
            for given, dim in zip((key_states, value_states), dims, strict=True)
        )
        keys, values = self._rows.exchange(layer_idx, keys, values, self._first, self._last)
        return keys[None, ..., : dims[0]], values[None, ..., : dims[1]]


def _texts(rows: AppendedRows | JoinedRows) -> list[tuple[AppendedRows, int, int]]:
    """Each text's rows, and the range of them in the pass."""
    return list(rows.ranges()) if isinstance(rows, JoinedRows) else [(rows, 0, len(rows))]


class ForeignDecoder(Decoder):
    """A decoder of a `ForeignConfig`. `normed` and `head` may be called during a pass, from another thread."""

    config: ForeignConfig

    def __init__(
        self,
        config: ForeignConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        make_layer_caches: MakeLayerCaches = plain_layers,
    ) -> None:
        self.config, self.weights, self.dtype, self.device = config, weights, dtype, device
        self.blocks = []  # transformers' modules compute in their place
        self.current_layer = 0
        self.make_layer_caches = make_layer_caches
        # Two of them, because recall computes logits while another thread runs a pass.
        self._body, self._tail = (build(config.raw, config.form, dtype) for _ in range(2))
        self._tail_turn = Lock()
        for modules in (self._body, self._tail):
            modules.fill_buffers(device)
        self._layers = [
            Lender(layer, sources, dtype)
            for layer, sources in zip(self._body.layers, config.layer_sources, strict=True)
        ]
        self._body.embedding._parameters.pop("weight", None)
        inside = f"{self._body.name_of(self._body.base)}."
        preparing = {path: source for path, source in config.shared_sources.items() if path.startswith(inside)}
        head = {f"{self._tail.name_of(self._tail.head)}.weight": Source(((config.head_name,),))}
        self._preparing = Lender(self._body.causal, preparing, dtype)
        self._finishing = Lender(self._tail.causal, dict(config.shared_sources) | head, dtype)

    # ---------------------------------------------------------------------------------------- a pass

    @torch.inference_mode()
    def through(
        self, hidden: Tensor, rows: PassRows, layers: range | None = None, after: AfterLayer | None = None
    ) -> Tensor:
        assert isinstance(rows, (AppendedRows, JoinedRows))
        assert layers is None or len(layers) == len(self._layers), "a pass takes all of transformers' modules"
        texts = _texts(rows)
        with self._preparing.lend(self._shared(), self.weights.scratch):
            calls = [
                self._calls(hidden[begin:end], text, 0, len(text)) if len(text.chunks) == 1 else None
                for text, begin, end in texts
            ]
            for index, lender in enumerate(self._layers):
                self.current_layer = index
                with (
                    span("layer"),
                    self.weights.layer(index) as tensors,
                    lender.lend(tensors, self.weights.scratch),
                ):
                    parts = [
                        self._through_layer(index, hidden[begin:end], text, own)
                        for (text, begin, end), own in zip(texts, calls, strict=True)
                    ]
                    hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
                if after is not None:
                    after(index, hidden)
        self.current_layer = 0
        return hidden

    def _through_layer(self, index: int, hidden: Tensor, rows: AppendedRows, calls: list[LayerCall] | None) -> Tensor:
        """calls: of the only chunk. Several chunks are prepared again in each layer, because masks are large."""
        if calls is not None:
            return self._body.call_layer(index, calls[index], calls[0].hidden[0] if index == 0 else hidden)
        for first, last in rows.chunks:
            call = self._calls(hidden[first:last], rows, first, last)[index]
            given = call.hidden[0] if index == 0 else hidden[first:last]
            hidden[first:last] = self._body.call_layer(index, call, given)
        return hidden

    def _calls(self, hidden: Tensor, rows: AppendedRows, first: int, last: int) -> list[LayerCall]:
        """How the layers are called for rows first .. last, whose hidden states are these."""
        cache = RowsCache(rows, self.config, first, last)
        return self._body.prepare(hidden, rows.visibility.positions[first:last], cache, self._mask(rows, first, last))

    def _mask(self, rows: AppendedRows, first: int, last: int) -> Any:
        masks = {window is None: self._mask_of(rows, first, last, window) for window in set(self.config.windows)}
        return by_kind(masks) if self.config.form.has_mask_kinds else next(iter(masks.values()))

    def _mask_of(self, rows: AppendedRows, first: int, last: int, window: int | None) -> Tensor:
        """[1, 1, T, S]: bools, or for eager attention numbers to add to scores."""
        seen = rows.mask(first, last, window)
        if seen is None:
            num_keys = rows.visibility.start + last
            seen = torch.ones(last - first, num_keys, dtype=torch.bool, device=self.device)
        if self.config.form.attention == "eager":
            lowest = torch.finfo(self.dtype).min
            seen = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, lowest)
        return seen[None, None]

    def _shared(self) -> dict[str, Weight]:
        """The weights outside the layers, except the embedding."""
        names = {name for source in self.config.shared_sources.values() for part in source.names for name in part}
        return {name: self.weights.shared(name) for name in names | {self.config.head_name}}

    # ---------------------------------------------------------------------------------------- its parts

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        rows = self.embedding_rows(tokens)
        module = self._body.embedding
        if type(module).forward is nn.Embedding.forward:
            return rows
        module.weight = rows  # so that the module applies its other operations to these rows
        try:
            found: Tensor = module(torch.arange(len(rows), device=rows.device))
        finally:
            module.weight = None
        return found

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        with self._tail_turn, self._finishing.lend(self._shared(), None):
            return self._tail.finish(hidden)

    @torch.inference_mode()
    def linear_logits(self, states: Tensor) -> Tensor:
        """`Decoder.linear_logits`, but linear only if the config has `has_linear_head`."""
        with self._tail_turn, self._finishing.lend(self._shared(), None):
            return self._tail.logits(states).float()
