"""Which controller the parameters call for."""

from __future__ import annotations

from .baselines.thompson import ThompsonSampling
from .budget import Controller, FixedBudget, MarginalRate
from .costs import Costs
from .params import MAX_NODES, SpeculationParams


def controller_for(params: SpeculationParams, costs: Costs, max_nodes: int = MAX_NODES) -> Controller:
    """What the parameters call for. max_nodes: of a tree where they leave the budget to be found."""
    budget = params.budget
    inner = MarginalRate(costs, max_nodes) if budget is None else FixedBudget(budget, params.width)
    if params.stopping == "default":
        return inner
    return ThompsonSampling(inner, costs if params.stopping == "thompson-calibrated" else None)
