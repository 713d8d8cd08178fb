"""`--arithmetic deterministic` fixes choices between kernels for the rest of a process; tests end this."""

from __future__ import annotations

import pytest

from offspec.backends.on_gpu import FUSED_ROWS
from offspec.loaders.machine import product_costs
from offspec.loaders.machine.card_choices import FASTER_KERNEL


def end_with_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are free now, and what fixes them is undone with `monkeypatch`."""
    for choices in (product_costs.COSTS, FUSED_ROWS, FASTER_KERNEL):
        monkeypatch.setattr(choices, "is_fixed", False)
    for name, nothing in (("_fixed", set()), ("_known", {}), ("_chosen", {})):
        monkeypatch.setattr(product_costs.COSTS, name, nothing)
