"""Selects the controller for given parameters."""

from __future__ import annotations

from ..pace.controllers import Controller, FixedBudget, MarginalRate
from ..pace.costs import Costs
from ..pace.thompson import CalibrationSampling, ThompsonSampling
from ..params import MAX_NODES, SpeculationParams


def controller_for(params: SpeculationParams, costs: Costs, max_nodes: int = MAX_NODES) -> Controller:
    """The controller for `params`. max_nodes: limit of a tree whose budget is found at run time."""
    budget = params.budget
    inner = MarginalRate(costs, max_nodes) if budget is None else FixedBudget(budget, params.width)
    if params.stopping == "thompson":
        return ThompsonSampling(inner)
    return CalibrationSampling(inner) if params.stopping == "thompson-calibrated" else inner
