"""Notes: what was chosen for the user, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """An automatic choice and its reason. advice: the user could improve it."""

    text: str
    advice: bool = False
