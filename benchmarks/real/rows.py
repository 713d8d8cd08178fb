"""The methods of the table: each replays recorded texts of the target and returns one result per text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.methods import Method, replayed_texts
from benchmarks.scheduling.replay import Recording, Replayed
from benchmarks.scheduling.schedulers import COSTS, Bench
from benchmarks.scheduling.specexec import SpecExecSettings
from offspec import Engine, SpeculationParams

CARD = "card"  # the cost model whose seconds decide where a method may choose its budget


class Row(Protocol):
    """One method with its settings."""

    @property
    def name(self) -> str: ...

    def replay(self, engine: Engine, recordings: Sequence[Recording]) -> list[Replayed]:
        """One result per recorded text; estimates are kept from text to text, as in an engine."""


@dataclass(frozen=True)
class OffspecRow:
    """A method that offspec's own flags choose."""

    method: Method

    @property
    def name(self) -> str:
        return self.method.name

    def replay(self, engine: Engine, recordings: Sequence[Recording]) -> list[Replayed]:
        return replayed_texts(engine, self.method, recordings, COSTS[CARD])


@dataclass(frozen=True)
class SpecExecRow:
    """SpecExec as its authors' code does it: the draft's raw log-softmax, without the request's temperature."""

    name: str
    settings: SpecExecSettings

    def replay(self, engine: Engine, recordings: Sequence[Recording]) -> list[Replayed]:
        return Bench(engine, recordings).specexec_texts(self.settings, CARD)


def without_model(budget: int | None) -> Iterator[Row]:
    """Rows that need no draft model."""
    yield OffspecRow(Method("lookup", False, SpeculationParams(budget)))
    yield OffspecRow(Method("lookup and token recycling", False, SpeculationParams(budget, recycling=True)))


def with_model(budget: int | None) -> Iterator[Row]:
    """Rows of a draft with a model."""
    alone = {"lookup": False, "recall": False}
    if budget is not None:
        plain = {**alone, "reuse": False, "overlap": False}
        yield SpecExecRow("SpecExec (authors' settings)", SpecExecSettings(budget))
        for temperature in (0.5, 0.7, 1.4):
            settings = SpecExecSettings(budget, draft_temperature=temperature)
            yield SpecExecRow(f"SpecExec, draft at {temperature}", settings)
        for tree in ("sequoia", "opt-tree"):
            params = SpeculationParams(budget, scoring="specexec", tree=tree, **plain)
            yield OffspecRow(Method(f"`--tree {tree}`", True, params))
        params = SpeculationParams(budget, scoring="specexec", **alone)
        yield OffspecRow(Method("`--draft-scoring specexec`", True, params))
    yield OffspecRow(Method("offspec, no recall, no lookup", True, SpeculationParams(budget, **alone)))
    yield OffspecRow(Method("offspec, no recall", True, SpeculationParams(budget, recall=False)))
    yield OffspecRow(Method("offspec", True, SpeculationParams(budget)))
    yield OffspecRow(Method("offspec, `--recycling`", True, SpeculationParams(budget, recycling=True)))


def chosen(rows: Iterator[Row], pattern: str) -> list[Row]:
    """Those whose name the pattern matches."""
    return [row for row in rows if re.search(pattern, row.name)]
