"""Products with all chosen experts at once are used where they agree with those one after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec.backends.on_gpu import FasterKernel
from offspec.model.parts import chosen_experts
from offspec.model.parts.chosen_experts import ChosenExperts

CPU = torch.device("cpu")


@pytest.mark.parametrize(("distance", "is_allowed"), [(0.0, True), (0.01, True), (0.5, False)])
def test_a_kernel_with_other_results_is_not_used(
    monkeypatch: pytest.MonkeyPatch, distance: float, is_allowed: bool
) -> None:
    ways, calls = FasterKernel(), list[str]()
    ways.is_fixed = True  # every kernel that runs is used
    monkeypatch.setattr(chosen_experts, "FASTER_KERNEL", ways)
    experts: Any = ChosenExperts.__new__(ChosenExperts)
    experts._x, experts.outputs = torch.zeros(1, 4), torch.zeros(2, 4)
    experts._chosen = SimpleNamespace(rows_of_each=1.0)
    table: Any = SimpleNamespace(kind=lambda dtype, rows: "a kind")

    def plain() -> None:
        calls.append("plain")
        experts.outputs.fill_(1.0)

    def at_once(table: object) -> None:
        calls.append("at once")
        experts.outputs.fill_(1.0 + distance)

    monkeypatch.setattr(experts, "_at_once", at_once)
    experts._faster(table, plain)
    assert ways.is_kernel("a kind", CPU) == is_allowed
    assert calls[-1] == ("at once" if is_allowed else "plain")
    calls.clear()
    experts._faster(table, plain)
    assert calls == [calls[-1]], "they are compared once"
