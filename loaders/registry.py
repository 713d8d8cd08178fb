"""A list of known kinds, each added once: checkpoint containers and weight formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Kinds in the order in which they are asked whether something is theirs; what is added later is asked first."""

    def __init__(self, *kinds: T) -> None:
        self._kinds = list(kinds)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._kinds))

    def add(self, kind: T) -> None:
        """Asked before all that are there."""
        assert kind not in self._kinds, "registered twice"
        self._kinds.insert(0, kind)

    def remove(self, kind: T) -> None:
        self._kinds.remove(kind)
