"""What takes memory beside the target's streamed layers: each feature declares its own items; planning adds them up.

A feature is a kind of draft, a draft that learns, an index of texts. Pure: nothing is read or allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from offspec.loaders.placement import Item

from ..checkpoints.opening import ModelFiles


@dataclass(frozen=True)
class MemoryOptions:
    """What the user allows: bytes of VRAM and RAM (None: what is free), and the context and the tree to make room for.

    tree: nodes, beside the context; None, or less than that, is the largest that is sent where the budget is found.
    """

    vram: int | None = None
    ram: int | None = None
    context: int | None = None
    tree: int | None = None


@dataclass(frozen=True)
class Room:
    """What room is made for: tokens of a text, and nodes of a tree beside it."""

    context: int
    tree: int


@dataclass(frozen=True)
class MemoryUse:
    """What a feature takes. items: each for itself; items of one name, of several features, are added up.

    workspace_bytes: what a pass of its model allocates while it runs; passes of several models do not meet, so of all
    features the largest counts. num_pinned_layers: so many of the target's first layers have to be resident.
    """

    items: tuple[Item, ...] = ()
    workspace_bytes: int = 0
    num_pinned_layers: int = 0


class MemoryUser(Protocol):
    """A feature that takes memory."""

    def memory_use(self, target: ModelFiles, room: Room) -> MemoryUse:
        """What it takes beside `target`, in bytes."""


def add_up(items: Iterable[Item]) -> list[Item]:
    """Items of one name as one, in the place of the first."""
    sums: dict[str, Item] = {}
    for item in items:
        known = sums.get(item.name, Item(item.name))
        on_device, on_host = known.on_device + item.on_device, known.on_host + item.on_host
        sums[item.name] = replace(known, on_device=on_device, on_host=on_host)
    return list(sums.values())
