"""Lists of known kinds, such as checkpoint containers or weight formats, by name. Each kind is added once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def named(package: str, name: Any) -> Any:
    """What a module of the package defines: "module.name". So a list of kinds imports only those that are used.

    Anything but a string is itself: a kind that is added later.
    """
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"{package}.{module}"), attribute)


class Registry(Generic[T]):
    """Kinds in the order in which they are tried; kinds added later are tried first."""

    def __init__(self, package: str, *names: str) -> None:
        """names: see `named`; of classes, of which an object is made at the first use."""
        self._package, self._names = package, names

    @cached_property
    def _kinds(self) -> list[T]:
        return [named(self._package, name)() for name in self._names]

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._kinds))

    def add(self, kind: T) -> None:
        """Add a kind, which is tried before all others."""
        assert kind not in self._kinds, "registered twice"
        self._kinds.insert(0, kind)

    def remove(self, kind: T) -> None:
        self._kinds.remove(kind)
