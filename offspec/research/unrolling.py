"""Unrolls a head over texts as it drafts (EAGLE-3's training-time test, 2503.01840, section 3.1), and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.heads.head import Advanced, Head, Inputs
from ..model.parts.part import Attending, Entries
from ..model.rope import Rotations
from .target_texts import Shard

LATER_LOSS = 0.8  # weight of a step's loss by that of the step before (EAGLE-3's code)
LARGEST_LOGITS = 2**26  # logits computed at once; a packed head is unpacked for each time


def weighted(losses: Sequence[Tensor]) -> Tensor:
    """The mean of the steps' losses, with weights that fall from step to step."""
    weights = [LATER_LOSS**step for step in range(len(losses))]
    return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)


class Unrolled(NamedTuple):
    """A step: the head's states and features [B * n, ...], and the texts' places [n] whose next tokens it predicts."""

    made: Advanced
    places: Tensor


Unroll = Callable[[Head, Tensor, Tensor, int], Iterator[Unrolled]]


def unroll(head: Head, features: Tensor, tokens: Tensor, steps: int) -> Iterator[Unrolled]:
    """The steps of a head as it drafts: over the text, then its own features.

    features [B, T, F]: of the places of B texts. tokens [B, T]. Row i of a step s has token i + 1 + s; n = T - 1 - s.
    """
    num_texts, length = tokens.shape
    rows = UnrolledRows(head.device, num_texts, length - 1)
    for step in range(min(steps, length - 2)):
        count = length - 1 - step
        rows.begin(count)
        some = tokens[:, 1 + step :].cpu().numpy().reshape(-1)
        made = head.advance(Inputs(features[:, :count].flatten(0, 1), some, np.full(len(some), step)), rows)
        features = made.features.view(num_texts, count, -1)
        yield Unrolled(made, torch.arange(1 + step, length, device=tokens.device))


def cross_entropy(head: Head, states: Tensor, shard: Shard) -> Tensor:
    """Of the head's logits with the target's distribution over the kept tokens, mean over rows."""
    step = max(1, LARGEST_LOGITS // head.target.config.vocab_size)
    parts = list[Tensor]()
    for first in range(0, len(states), step):
        some = slice(first, first + step)
        columns = head.vocabulary.columns_of(shard["labels"][some].long())
        wanted = shard["log_probabilities"][some].exp() * (columns >= 0)
        logits = head.head(states[some])
        parts.append(SoftCrossEntropy.apply(logits, columns.clamp(min=0), wanted))  # type: ignore[no-untyped-call]
    return torch.stack(parts).sum() / len(states)


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross entropy of logits [R, V] with `wanted` [R, K], the probabilities of columns [R, K].

    Its backward makes one tensor of the logits' size. Autograd's own makes five, which takes longer than the products.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, wanted: Tensor) -> Tensor:
        whole = logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, whole, columns, wanted)
        return (wanted * (whole - logits.gather(1, columns))).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, whole, columns, wanted = ctx.saved_tensors
        gradients = (logits - whole).exp_().mul_(wanted.sum(-1, keepdim=True))
        return gradients.scatter_add_(1, columns, -wanted).mul_(gradient), None, None


class UnrolledRows:
    """`PassRows` of texts that a head is unrolled over: the rows of a step, after those of the steps before.

    Row i of a later step is the child of row i of the step before. It attends to the first step's rows up to i, which
    are the text, and to its ancestors.
    """

    inputs: Tensor | None = None

    def __init__(self, device: torch.device, num_texts: int, length: int) -> None:
        self._num_texts, self._length, self._device = num_texts, length, device
        self._step, self._count = -1, length
        self._entries: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: keys and values of each step

    def begin(self, count: int) -> None:
        """The next step, with the first `count` rows of each text."""
        self._step, self._count = self._step + 1, count
        positions = torch.arange(count, device=self._device) + self._step
        self.rotations = Rotations(positions.repeat(self._num_texts))
        self.chunks = [(0, self._num_texts * count)]

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
        queries, keys, values = (
            each.view(self._num_texts, self._count, *each.shape[1:]).transpose(1, 2) for each in (queries, *entries)
        )
        steps = self._entries.setdefault(part.layer, [])
        steps.append((keys, values))
        scale = part.config.attention_scale or queries.shape[-1] ** -0.5
        group = queries.shape[1] // keys.shape[1]
        seen = [
            [each[:, :, : self._count].repeat_interleave(group, 1).to(queries.dtype) for each in entry]
            for entry in steps
        ]
        (keys, values), *above = seen
        if not above:
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
            return out.transpose(1, 2).flatten(0, 1)
        later = torch.ones(self._count, self._count, dtype=torch.bool, device=self._device).triu(1)  # keys of the text
        scores = [(queries @ keys.transpose(2, 3)).masked_fill(later, -torch.inf)]
        scores += [(queries * key).sum(-1, keepdim=True) for key, _ in above]
        shares = (torch.cat(scores, -1).float() * scale).softmax(-1).to(queries.dtype)
        out = shares[..., : self._count] @ values
        for number, (_, value) in enumerate(above, self._count):
            out = out + shares[..., number, None] * value
        return out.transpose(1, 2).flatten(0, 1)
