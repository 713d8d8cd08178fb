"""Memory needed beside the target's layers: each feature declares its own items, and planning adds them up.

A feature is, for example, a draft or an index of texts. Pure functions: nothing is read or allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from offspec.backends.device_kinds import GPU, DeviceKind
from offspec.loaders.streaming.placement import Item

from ..checkpoints.model_files import ModelFiles
from ..model.pass_rows import PASS_ROWS

AUTO = "auto"


@dataclass(frozen=True)
class MemoryOptions:
    """The user's limits: bytes of VRAM and RAM (None: all that is free), and the context and tree to reserve.

    tree: nodes beside the context. At least the largest automatic budget is reserved, also for None. texts: see
    `Reservation`. kv_cache: the name of a `KVFormat`, or AUTO, see `plan.make_plan`. prompt, answer_tokens: tokens of
    the request that will come, if it is known; without `context`, there is room for it.
    """

    vram: int | None = None
    ram: int | None = None
    context: int | None = None
    tree: int | None = None
    texts: int = 1
    kv_cache: str = AUTO
    prompt: int = 0
    answer_tokens: int = 0


SHARED_TOKENS = 1024  # tokens reserved for each text beside the first that shares its passes


@dataclass(frozen=True)
class Reservation:
    """The space that a plan reserves: tokens of the longest text, and nodes of all trees beside it.

    texts: the number of texts that share passes. One may have the full context; for each other one SHARED_TOKENS are
    reserved. They share all of it (`batch.Batch`), as the slots of llama.cpp's server share its context. device: that
    computes.
    """

    context: int
    tree: int
    texts: int = 1
    device: DeviceKind = GPU

    @property
    def pass_rows(self) -> int:
        """The most rows of a pass: those of a prompt's part, and of a tree."""
        return min(self.context, PASS_ROWS) + self.tree

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return self.context + (self.texts - 1) * min(self.context, SHARED_TOKENS)


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one feature. items: named amounts; the plan adds up items of several features with one name.

    workspace_bytes: allocated during a pass of the feature's model. Passes of several models do not run at once, so
    the plan counts the largest workspace only. num_required_resident: how many of the target's first layers must be
    resident. shadow_bytes: for each layer of the target, bytes on the device if that layer is streamed.
    target_entries: of the target's KV cache, all layers' alike. reads_all_entries: it reads those of all
    layers outside the target's passes, so that none may lie in RAM.
    """

    items: tuple[Item, ...] = ()
    workspace_bytes: int = 0
    num_required_resident: int = 0
    shadow_bytes: tuple[int, ...] = ()
    target_entries: int = 0
    reads_all_entries: bool = False

    @property
    def is_of_target_layers(self) -> bool:
        """Whether the target's layers draft, and read its KV entries."""
        return bool(self.target_entries or self.num_required_resident)


class MemoryUser(Protocol):
    """A feature that needs memory."""

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        """The memory that it needs beside `target`, in bytes."""


def add_up(items: Iterable[Item]) -> list[Item]:
    """Merge items of one name into one, at the position of the first."""
    sums: dict[str, Item] = {}
    for item in items:
        sum_so_far = sums.get(item.name, Item(item.name))
        on_device, on_host = sum_so_far.on_device + item.on_device, sum_so_far.on_host + item.on_host
        sums[item.name] = replace(sum_so_far, on_device=on_device, on_host=on_host)
    return list(sums.values())
