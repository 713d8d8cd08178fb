"""What a program needs to run as a user who is not root: a Python that this user can reach."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path


def reachable_python(folder: Path) -> Iterator[str]:
    """Commands that let any user reach this Python, if its folder lies in one that others may not enter.

    They mount folders below `folder`, so they belong in a mount namespace of their own (`unshare --mount`).
    """
    base = Path(sys.base_prefix).resolve()
    closed = next((parent for parent in reversed(base.parents) if not parent.stat().st_mode & 0o001), None)
    if closed is not None:
        view = folder / "view"
        inside = shlex.quote(str(view / base.relative_to(closed)))
        yield f"mkdir -p {inside}"
        yield f"mount --bind {shlex.quote(str(base))} {inside}"
        yield f"mount --rbind {shlex.quote(str(view))} {shlex.quote(str(closed))}"
