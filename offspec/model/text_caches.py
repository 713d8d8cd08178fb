"""The KV caches of one text, the target's and the draft's, kept from request to request.

A request that goes on from the text they hold scores only what is new. Knows nothing of where the text comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from .decoder import CachedDecoder


class TextCaches:
    """`text` is what has been scored or emitted so far; either cache holds a beginning of it, and maybe pending nodes.

    A request appends to `text`. It may be left anywhere (Ctrl-C): what the caches hold beyond `text` is forgotten by
    the next `rewind`.
    """

    def __init__(self, target: CachedDecoder, draft: CachedDecoder | None) -> None:
        """Both of them empty."""
        self.text: list[int] = []
        self.target, self.draft = target, draft

    def rewind(self, text: Sequence[int]) -> int:
        """Keep only what `text` begins with, and take it as the text; returns how many of its tokens are to be scored.

        Its last token is always among these, because its logits are what the next one follows from.
        """
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.text, text[:-1], strict=False)))
        for cached in (self.target, self.draft):
            if cached is not None:
                cached.truncate(min(cached.length, same))
        self.text = list(text)
        return len(text) - self.target.length

    def drop_target(self) -> None:
        """Give up the target's cache for its memory; `rewind` finds that all of the text is to be scored again."""
        self.target.cache = self.target.decoder.new_cache()
