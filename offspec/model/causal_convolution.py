"""Causal depthwise convolutions along texts: of a chain, and of a tree's nodes, each of which looks along its path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def path_windows(values: Tensor, before: Tensor, parents: Tensor, first: int = 0) -> Tensor:
    """[R, C, K]: each row's value behind those of the K - 1 places before it on its path, the oldest first.

    values [P + R, C]: of earlier rows, then of the R rows from `first` on. before [K - 1, C]: those before the root's
    children, the oldest first. parents [P + R]: a row's parent among them, or `recurrence.ROOT`.
    """
    num_before = len(before)
    places = torch.cat((before, values))
    above = torch.cat((torch.arange(-1, num_before - 1, device=parents.device).clamp_(min=0), parents + num_before))
    place = torch.arange(num_before + first, len(places), device=parents.device)
    window_places = [place]
    for _ in range(num_before):
        place = above[place]
        window_places.append(place)
    return places[torch.stack(window_places[::-1], 1)].transpose(1, 2)


def path_convolution(windows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A depthwise causal convolution along paths: [R, C] of windows [R, C, K] and weight [C, K]."""
    return _summed(windows.unbind(-1), weight, bias)


def chain_convolution(values: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of a chain [R, C], without windows in memory, to the bit: [R, C]."""
    text = torch.cat((before, values))
    return _summed([text[place : place + len(values)] for place in range(weight.shape[1])], weight, bias)


def _summed(places: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Product by product, so that a row's sum is rounded alike whatever rows are beside it, and faster than F.conv1d.

    places: K times [R, C], the oldest first.
    """
    total = places[0] * weight[:, 0]
    for place, factors in zip(places[1:], weight.t()[1:], strict=True):
        total += place * factors
    return total if bias is None else total + bias
