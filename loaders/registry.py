"""A list of known kinds, such as checkpoint containers or weight formats. Each kind is added once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Kinds in the order in which they are tried; kinds added later are tried first."""

    def __init__(self, *kinds: T) -> None:
        self._kinds = list(kinds)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._kinds))

    def add(self, kind: T) -> None:
        """Add a kind, which is tried before all others."""
        assert kind not in self._kinds, "registered twice"
        self._kinds.insert(0, kind)

    def remove(self, kind: T) -> None:
        self._kinds.remove(kind)
