"""Unrolls a DFlash head over texts (2602.06036, section 4.2): blocks begin at random places of each text.

A block's rows see the text before it and themselves, as in drafting.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device

from ..model.heads.dflash import DFlashHead
from ..model.heads.head import Advanced, Head
from ..model.parts.part import Attending, Entries
from ..model.rope import Rotations
from .unrolling import Unrolled

NUM_BLOCKS = 24  # of each text and training step; their rows and the texts' are about as many


def unroll_blocks(head: Head, features: Tensor, tokens: Tensor, steps: int) -> Iterator[Unrolled]:
    """A step s is the row s + 1 of each block. The other arguments are those of `unrolling.unroll`."""
    assert isinstance(head, DFlashHead)
    begins, size = block_places(tokens), head.shape.size
    rows = BlocksOfTexts(features, begins, size)
    states = head.filled(tokens[:, begins].flatten().cpu().numpy(), features.flatten(0, 1), rows)
    by_block = states.view(len(tokens), len(begins), size, -1)
    for step in range(min(steps, tokens.shape[1] - 2)):
        places = begins[begins + step < tokens.shape[1]] + step
        states = by_block[:, : len(places), step + 1].flatten(0, 1)
        states = head.beside_tokens(states, tokens[:, places].flatten().cpu().numpy())
        yield Unrolled(Advanced(states, states[:, :0]), places)


def block_places(tokens: Tensor) -> Tensor:
    """Places [n] of texts [B, T] where blocks begin, ascending: some, or without gradients all.

    They follow from the texts, so that an interrupted training goes on as it would have.
    """
    places = torch.arange(1, tokens.shape[1])
    if torch.is_grad_enabled():
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        places = places[torch.randperm(len(places), generator=generator)[:NUM_BLOCKS].sort().values]
    return to_device(places, tokens.device)


class BlocksOfTexts:
    """`PassRows` of n blocks behind each of B texts."""

    inputs: Tensor | None = None

    def __init__(self, features: Tensor, begins: Tensor, size: int) -> None:
        """features [B, T, F]: of the texts' places. begins [n]: the places of the blocks' first rows."""
        num_texts, length, _ = features.shape
        device, num_rows = features.device, len(begins) * size
        positions = (begins[:, None] + torch.arange(size, device=device)).flatten()
        self.text_rotations = Rotations(torch.arange(length, device=device).repeat(num_texts))
        self.rotations = Rotations(positions.repeat(num_texts))
        self.chunks = [(0, num_texts * num_rows)]
        self._num_texts = num_texts
        self._stored: dict[int, Entries] = {}  # of the texts, by layer
        block = torch.arange(len(begins), device=device).repeat_interleave(size)
        before = torch.arange(length, device=device) < begins.repeat_interleave(size)[:, None]
        self._mask = torch.cat((before, block[:, None] == block), 1)  # [n * size, T + n * size]

    def store(self, layer: int, entries: Entries) -> None:
        self._stored[layer] = entries

    def attend(
        self,
        part: Attending,
        queries: Tensor,
        entries: Entries | None,
        first: int,
        last: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert entries is not None, "a head's layers have entries"
        assert sinks is None, "a head's layers have no sinks"
        group = queries.shape[1] // entries[0].shape[1]
        pairs = zip(self._stored[part.layer], entries, strict=True)
        both = [torch.cat((self._by_text(text), self._by_text(block)), 2) for text, block in pairs]
        keys, values = (each.repeat_interleave(group, 1).to(queries.dtype) for each in both)
        scale = part.config.attention_scale
        out = F.scaled_dot_product_attention(self._by_text(queries), keys, values, attn_mask=self._mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _by_text(self, heads: Tensor) -> Tensor:
        """[B * R, heads, D] → [B, heads, R, D]."""
        return heads.view(self._num_texts, -1, *heads.shape[1:]).transpose(1, 2)
