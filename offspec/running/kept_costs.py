"""Seconds of passes and draft rounds, kept from process to process for the same machine, arithmetic and placement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.machine.measured_files import measured_file, read_measured, write_measured
from offspec.loaders.machine.product_rates import processor_identity
from offspec.scheduler.pace.costs import Costs

from ..drafts.base import Draft
from ..loaded_target import LoadedTarget

_REVISION = 1  # of the file's content; files of other revisions are ignored


def kept_costs_file(loaded: LoadedTarget, draft: Draft) -> Path | None:
    """The file for these models where they lie; None where nothing is predicted, or nothing may be kept."""
    plan, target = loaded.plan, loaded.decoder
    if plan is None or loaded.rates is None or loaded.is_deterministic:
        return None
    machine = [accelerator_of(target.device).name, *processor_identity()]
    model = draft.decoder
    drafting = [draft.name, model and [repr(model.config), repr(model.dtype), repr(model.device)]]
    arithmetic = [repr(target.config), repr(target.dtype), target.arithmetic]
    placement = [plan.tiers, repr(plan.layers), repr(plan.placement.experts)]
    return measured_file("costs", [_REVISION, machine, drafting, arithmetic, placement])


def write_costs(costs: Costs, file: Path | None) -> None:
    """Write what was observed, if anything was."""
    if file is not None and (passes := costs.target.observed()):
        write_measured(file, {"pass": passes, "round": costs.draft.observed()})


def read_costs(costs: Costs, file: Path | None) -> None:
    """Correct predictions by what an earlier process observed; a missing or damaged file changes nothing."""
    content = {} if file is None else read_measured(file)
    costs.target.expect(_pairs(content.get("pass")))
    costs.draft.expect(_pairs(content.get("round")))


def _pairs(content: Any) -> Iterable[tuple[int, float]]:
    """Rows and seconds as they were written; what is something else is left out."""
    for pair in content if isinstance(content, list) else ():
        if isinstance(pair, list) and [type(part) for part in pair] == [int, float]:
            rows, seconds = pair
            if rows > 0 and 0 < seconds < math.inf:
                yield rows, seconds
