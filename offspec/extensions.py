"""Methods by name: those of the core, and those that extensions such as the laboratory add.

An extension is a module with a table METHODS: kind of method → name → "module:object". It is imported when names are
listed, or when a name is asked for that the core does not know; an object's module only when the method is used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # not typing's, see `offspec/__init__.py`
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

EXTENSIONS: list[str] = []  # modules with such tables; the front door (`offspec/__init__.py`) adds them


class Methods:
    """The methods of one kind: those that the core has, then those that extensions add."""

    def __init__(self, kind: str, *names: str) -> None:
        """names: of the core's methods, for which it has code of its own."""
        self._kind, self._names = kind, names

    def __iter__(self) -> Iterator[str]:
        return iter((*self._names, *self._added()))

    def __len__(self) -> int:
        return len(self._names) + len(self._added())

    def __contains__(self, name: object) -> bool:
        return name in self._names or (isinstance(name, str) and name in self._added())

    def load(self, name: str) -> Any:
        """The method that an extension adds; None if no extension has this name."""
        path = self._added().get(name)
        if path is None:
            return None
        module, _, attribute = path.partition(":")
        return getattr(import_module(module), attribute)

    def _added(self) -> dict[str, str]:
        """The extensions' names, and where their methods are."""
        tables = (import_module(module).METHODS.get(self._kind, {}) for module in EXTENSIONS)
        return {name: path for table in tables for name, path in table.items()}
