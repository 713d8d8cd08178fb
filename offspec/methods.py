"""The methods of the room of research. The front door names its module, which is imported when a method is used."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # not typing's, see `offspec/__init__.py`
if TYPE_CHECKING:
    from typing import Any

RESEARCH = ""  # set by `offspec/__init__.py`; no module below the room imports it


def research() -> Any:
    """The module with LOSSY and TREES (name → what makes a drafter), STOPPING (name → a controller around another),
    LAYOUTS of heads, and `learning_draft`.
    """
    return import_module(RESEARCH)
