"""The methods of the table: each replays recorded texts of the target and returns one result per text.

No row drafts during the target's pass: that spares seconds, and a replay would compute all of its rounds. Rows that
find their own budget are the exception: their seconds decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.scheduling.replay import Recording, Replayed
from benchmarks.scheduling.schedulers import COSTS, INDEPENDENT, Bench, Shape
from benchmarks.scheduling.specexec import SpecExecSettings
from benchmarks.scheduling.tree_rules import multi_step
from offspec import Engine, SpeculationParams

from .methods import Method, replayed_texts

AUTHORS, OURS, ALONE = "SpecExec (authors' settings)", "offspec", "offspec, no recall, no lookup"
CHAIN = "offspec, a chain, no recall, no lookup"
LONGEST_CHAIN = 8  # nodes up to which a chain is measured beside the tree
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


@dataclass(frozen=True)
class SpecInferRow:
    """SpecInfer's acceptance: trees of drafted chains, verified by ratios; it draws its own texts, of equal length."""

    name: str
    shape: Shape

    def replay(self, engine: Engine, recordings: Sequence[Recording]) -> list[Replayed]:
        texts = Bench(engine, recordings).sampled_texts(multi_step, self.shape)
        return [Replayed(text.num_tokens, text.num_passes, num_drafted_tokens=text.num_drafted) for text in texts]


def without_model(budget: int | None) -> Iterator[Row]:
    """Rows that need no draft model."""
    yield OffspecRow(Method("lookup and token recycling", False, SpeculationParams(budget)))


def with_model(budget: int | None) -> Iterator[Row]:
    """Rows of a draft with a model."""

    def row(name: str, **settings: Any) -> Row:
        return OffspecRow(Method(name, True, SpeculationParams(budget, overlap=budget is None, **settings)))

    alone = {"lookup": False, "recall": False}
    if budget is not None:
        yield SpecExecRow(AUTHORS, SpecExecSettings(budget))
        for temperature in (0.5, 0.7, 1.4):
            settings = SpecExecSettings(budget, draft_temperature=temperature)
            yield SpecExecRow(f"SpecExec, draft at {temperature}", settings)
        for tree in ("sequoia", "opt-tree"):
            yield row(f"`--tree {tree}`", scoring="specexec", tree=tree, reuse=False, **alone)
        yield row("`--draft-scoring specexec`", scoring="specexec", **alone)
        if budget in INDEPENDENT:
            yield SpecInferRow("SpecInfer (its own texts)", INDEPENDENT[budget])
    yield row(ALONE, **alone)
    yield row("offspec, no recall", recall=False)
    yield row(OURS)
    yield row("offspec, recycling", recycling=True)


def of_targets_states(budget: int | None) -> Iterator[Row]:
    """Rows of a draft that needs the target's states: a shadow, an exit, a head."""
    alone = {"lookup": False, "recall": False}
    for name, settings in ((ALONE, alone), (OURS, {})):
        yield OffspecRow(Method(name, True, SpeculationParams(budget, overlap=budget is None, **settings)))
    if budget is not None and budget <= LONGEST_CHAIN:
        chain = SpeculationParams(budget, overlap=False, width=1, children=1, max_depth=budget, **alone)
        yield OffspecRow(Method(CHAIN, True, chain))


def chosen(rows: Iterable[Row], pattern: str) -> list[Row]:
    """Those whose name the pattern matches."""
    return [row for row in rows if re.search(pattern, row.name)]
