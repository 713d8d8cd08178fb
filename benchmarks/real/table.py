"""The Markdown table of a run: methods by sets and temperatures, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path

from .estimates import ratio_of_sums, speedup
from .results import Cell
from .rows import AUTHORS

COPIED = 0.5  # share of an answer's 4-grams from which on it counts as a repetition of its prompt
ABSENT = "\N{EN DASH}"


def show(cells: Sequence[Cell]) -> str:
    """All tables: one for each pair, budget and kind of text."""
    parts = list[str]()
    ordered = sorted(cells, key=_table_of)
    for (model, draft, size), group in groupby(ordered, key=_table_of):
        nodes = "auto" if size == 0 else size
        parts.append(_table(f"{Path(model).name}, draft {Path(draft).name}, {nodes} nodes", list(group)))
    agreements = [cell for cell in cells if cell.estimate is not None]
    parts += [f"agreement of draft {Path(cell.key.draft).name} and target, {cell}" for cell in agreements]
    return "\n\n".join(parts)


def _table_of(cell: Cell) -> tuple[str, str, int]:
    return cell.key.model, cell.key.draft, cell.key.budget or 0


def _table(title: str, cells: Sequence[Cell]) -> str:
    cells = [cell for cell in cells if cell.estimate is None]
    if not cells:
        return title
    methods = list(dict.fromkeys(cell.key.method for cell in cells))
    columns = sorted({Column.of(cell, repeats) for cell in cells for repeats in (False, True)}, key=astuple)
    columns = [column for column in columns if any(column.places(cell) for cell in cells)]
    lines = [title, "", f"| tokens per pass | {' | '.join(map(str, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for method in methods:
        row = [_shown(cells, method, column) for column in columns]
        lines.append(f"| {method} | " + " | ".join(row) + " |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Column:
    """Texts of one set at one temperature, and whether those that repeat their prompt or the others."""

    temperature: float
    set: str
    repeats: bool
    num_prompts: int
    num_tokens: int

    @classmethod
    def of(cls, cell: Cell, repeats: bool) -> Column:
        key = cell.key
        return cls(key.temperature, key.set, repeats, key.num_prompts, key.num_tokens)

    def places(self, cell: Cell) -> list[int]:
        """The places of a cell's texts that belong to this column."""
        if Column.of(cell, self.repeats) != self:
            return []
        return [i for i, share in enumerate(cell.copied) if (share > COPIED) == self.repeats]

    def __str__(self) -> str:
        return f"{Path(self.set).stem}{', repeating' if self.repeats else ''}, T = {self.temperature:g}"


def _shown(cells: Sequence[Cell], method: str, column: Column) -> str:
    """Tokens per pass with its interval, the number of prompts, and the ratio to the reference on the same texts."""
    cell = _find(cells, method, column)
    if cell is None:
        return ABSENT
    places = column.places(cell)
    tokens, passes = ([values[i] for i in places] for values in (cell.tokens, cell.passes))
    text = f"{ratio_of_sums(tokens, passes)} of {len(places)}"
    reference = _find(cells, AUTHORS, column)
    if reference is None or method == AUTHORS:
        return text
    return f"{text}, x{speedup(tokens, passes, [reference.passes[i] for i in places])}"


def _find(cells: Sequence[Cell], method: str, column: Column) -> Cell | None:
    return next((cell for cell in cells if cell.key.method == method and column.places(cell)), None)
