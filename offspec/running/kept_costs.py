"""Seconds of passes and draft rounds, kept from process to process for the same machine, arithmetic and placement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.machine.measured_files import measured_file, read_measured, write_measured
from offspec.loaders.machine.product_costs import processor_identity

if TYPE_CHECKING:
    from .models import Models

_REVISION = 1  # of the file's content; files of other revisions are ignored


def keep_costs(models: Models) -> None:
    """Write what was observed, if anything was and if the target has a plan."""
    costs = models.learnt.costs
    if (file := _file(models)) is not None and (passes := costs.target.observed()):
        write_measured(file, {"pass": passes, "round": costs.draft.observed()})


def recall_costs(models: Models) -> None:
    """Correct predictions by what an earlier process observed; a missing or damaged file changes nothing."""
    if (file := _file(models)) is not None:
        content = read_measured(file)
        models.learnt.costs.target.recall(_pairs(content.get("pass")))
        models.learnt.costs.draft.recall(_pairs(content.get("round")))


def _pairs(content: Any) -> Iterable[tuple[int, float]]:
    """Rows and seconds as they were written; what is something else is left out."""
    for pair in content if isinstance(content, list) else ():
        if isinstance(pair, list) and [type(part) for part in pair] == [int, float]:
            rows, seconds = pair
            if rows > 0 and 0 < seconds < math.inf:
                yield rows, seconds


def _file(models: Models) -> Path | None:
    """The file for these models where they lie; None where nothing is predicted, or nothing may be kept."""
    loaded, plan, draft = models.loaded, models.loaded.plan, models.draft.decoder
    if plan is None or loaded.rates is None or loaded.is_deterministic:
        return None
    machine = [accelerator_of(models.device).name, *processor_identity()]
    drafting = [models.draft.name, draft and [repr(draft.config), repr(draft.dtype), repr(draft.device)]]
    target = loaded.decoder
    arithmetic = [repr(target.config), repr(target.dtype), target.is_exact, target.has_byte_rows]
    placement = [plan.tiers, repr(plan.layers), repr(plan.placement.experts)]
    return measured_file("costs", [_REVISION, machine, drafting, arithmetic, placement])
