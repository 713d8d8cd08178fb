"""A draft made of the target's own layers: all of them in fewer bits, or some of them as they are.

Examples: SubSpec's low-bit copies (2509.18344), skipped layers (Draft & Verify, 2309.08168), an early exit
(LayerSkip, 2404.16710). In each of them a layer's keys and values estimate what the target computes there. So
`LayerDraftText` reads the target's entries, those of a prompt included (`shared_cache`). This module knows nothing of
files, or of how trees grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from offspec.loaders.streaming.weights import LayerView
from offspec.scheduler.trees.token_tree import BoolArray, IntArray

from .cuda_graphs import USES_BEFORE_RECORDING, WIDTHS, RoundBuffers, StaticRounds
from .decoder import CachedDecoder, Decoder
from .memory.shared_cache import GapVisibility, SharedCache
from .memory.text_memory import TextMemory
from .pass_rows import AppendedRows, TextRows


class LayerDraft(Decoder):
    """Some layers of a target, in their order, with its embedding, norm and head. numbers: the layers of the target."""

    def __init__(self, target: Decoder, numbers: Sequence[int], weights: LayerView) -> None:
        """weights: as many layers as `numbers`."""
        assert weights.num_layers == len(numbers)
        super().__init__(
            target.config.only_layers(numbers),
            weights,
            dtype=target.dtype,
            device=target.device,
            make_layer_caches=target.make_layer_caches,
        )
        self.numbers = tuple(numbers)

    def rows(self, rows: TextRows, cache: TextMemory, positions: Tensor | None = None) -> AppendedRows:
        """`Decoder.rows`, which do not attend to the gap of a shared cache."""
        appended = super().rows(rows, cache, positions)
        if not isinstance(cache, SharedCache):
            return appended
        seen = appended.visibility
        gap = GapVisibility(seen.start, seen.positions, seen.key_positions, seen.tree_mask, cache.gap)
        return replace(appended, visibility=gap)


class LayerDraftText(CachedDecoder):
    """The cached text of a `LayerDraft`, in its target's KV cache.

    The last token of a pass is the target's choice, which the target has not scored yet. If the draft has scored it,
    its entry is the draft's own until the next pass.
    """

    decoder: LayerDraft
    cache: SharedCache

    def __init__(self, decoder: LayerDraft, target: CachedDecoder, buffers: RoundBuffers | None = None) -> None:
        """buffers: of the draft's static rounds; None: it has none."""
        self.decoder = decoder
        self.cache = SharedCache(target, decoder.numbers)
        self._rounds: StaticRounds | None = None
        if buffers is not None:
            self._rounds = StaticRounds(buffers, self.cache, uses_before=USES_BEFORE_RECORDING)

    def begin(self, room: int) -> None:
        """Start a request whose trees have at most `room` nodes, from the target's entries."""
        self.cache.begin(room)

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray, before: int = 0
    ) -> Tensor:
        """`CachedDecoder.states`; the states of a static round are valid until the next call."""
        states = None
        if self._rounds is not None and max(len(chain), len(tokens)) <= WIDTHS[-1]:
            self.cache.extend(len(chain) + len(tokens))  # places the first own entries
            states = self._rounds.run(chain, tokens, depths, mask)
        if states is None:
            return super().states(chain, tokens, depths, mask, before)
        return states[-1 - before :] if chain else states

    def reserve(self, capacity: int) -> None:
        """Nothing: the target's cache has room for the draft's entries (`TextCaches.num_shared`)."""
