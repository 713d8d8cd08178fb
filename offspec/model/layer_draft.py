"""A draft made of the target's own layers: all of them in fewer bits, or some of them as they are.

Examples: SubSpec's low-bit copies (2509.18344), skipped layers (Draft & Verify, 2309.08168), an early exit
(LayerSkip, 2404.16710). In each of them a layer's keys and values estimate what the target computes there. So
`LayerDraftText` copies the target's entries after each pass, those of a prompt included. This module knows nothing of
files, or of how trees grow.
"""

from __future__ import annotations

from collections.abc import Sequence

from offspec.loaders.layer_view import LayerView
from offspec.scheduler.params import MAX_ROWS

from .decoder import CachedDecoder, Decoder

MOST_ROWS = 1024  # nodes pending in the KV cache, whose entries are as large as the target's


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


class LayerDraftText(CachedDecoder):
    """The cached text of a `LayerDraft`. Entries of committed tokens are the target's as soon as the target has them.

    The last token of a pass is the target's choice, which the target has not scored yet. If the draft has scored it,
    its entry is the draft's own until the next pass.
    """

    decoder: LayerDraft

    def __init__(self, decoder: LayerDraft, target: CachedDecoder, capacity: int = 0) -> None:
        super().__init__(decoder, capacity)
        self._target = target
        self._num_exact = 0  # entries from the start that are the target's

    def reserve(self, capacity: int) -> None:
        """Make room for a text and MOST_ROWS nodes; `capacity` counts MAX_ROWS nodes."""
        super().reserve(capacity - MAX_ROWS + MOST_ROWS)

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """As `CachedDecoder.keep`, to be called after the target's; then copies the target's new entries."""
        super().keep(path, pending)
        length = self._target.length
        if length > self.length:  # tokens that the draft has not scored: a prompt, or those of other guessers
            assert not pending, "nodes below a token that the draft has not scored"
            self.cache.extend(length - self.length)
            self.cache.append(length - self.length, 0)
        if length > self._num_exact:
            self.cache.copy(self._target.cache, self.decoder.numbers, self._num_exact, length)
            self._num_exact = length

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._num_exact = min(self._num_exact, length)
