"""`--arithmetic deterministic` fixes choices between kernels for the rest of a process; tests end this."""

from __future__ import annotations

import pytest

from offspec.backends.on_gpu import FUSED_ROWS


def end_with_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are free now, and what fixes them is undone with `monkeypatch`."""
    monkeypatch.setattr(FUSED_ROWS, "is_fixed", False)
