"""The Markdown table of a run: methods by sets and temperatures, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .estimates import Estimate, ratio_of_sums, speedup
from .results import Cell
from .rows import AUTHORS

COPIED = 0.5  # share of an answer's 4-grams from which on it counts as a repetition of its prompt
ABSENT = "\N{EN DASH}"


def show(cells: Sequence[Cell]) -> str:
    """All tables: one for each pair, budget and kind of text."""
    parts = list[str]()
    ordered = sorted(cells, key=_table_of)
    for (model, draft, size), group in groupby(ordered, key=_table_of):
        parts.append(_table(f"{model}, draft {draft}, {'auto' if size == 0 else size} nodes", list(group)))
    agreements = [cell for cell in cells if cell.estimate is not None]
    parts += [f"agreement of draft {cell.key.draft} and target, {cell}" for cell in agreements]
    return "\n\n".join(parts)


def _table_of(cell: Cell) -> tuple[str, str, int]:
    return cell.key.model, cell.key.draft, cell.key.budget or 0


def _table(title: str, cells: Sequence[Cell]) -> str:
    cells = [cell for cell in cells if cell.estimate is None]
    if not cells:
        return title
    methods = list(dict.fromkeys(cell.key.method for cell in cells))
    columns = sorted({(cell.key.temperature, cell.key.set, repeats) for cell in cells for repeats in (False, True)})
    columns = [column for column in columns if any(_of(cell, column) for cell in cells)]
    head = [f"{each[1]}{', repeating' if each[2] else ''}, T = {each[0]:g}" for each in columns]
    lines = [title, "", "| tokens per pass | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for method in methods:
        row = [_shown(cells, method, column) for column in columns]
        lines.append(f"| {method} | " + " | ".join(row) + " |")
    return "\n".join(lines)


Column = tuple[float, str, bool]


def _of(cell: Cell, column: Column) -> list[int]:
    """The places of a cell's texts that belong to a column."""
    temperature, name, repeats = column
    if (cell.key.temperature, cell.key.set) != (temperature, name):
        return []
    return [i for i, share in enumerate(cell.copied) if (share > COPIED) == repeats]


def _shown(cells: Sequence[Cell], method: str, column: Column) -> str:
    """Tokens per pass with its interval, the number of prompts, and the ratio to the reference on the same texts."""
    cell = _find(cells, method, column)
    if cell is None:
        return ABSENT
    places = _of(cell, column)
    tokens, passes = ([values[i] for i in places] for values in (cell.tokens, cell.passes))
    text = f"{ratio_of_sums(tokens, passes)} of {len(places)}"
    reference = _find(cells, AUTHORS, column)
    if reference is None or method == AUTHORS:
        return text
    gain: Estimate = speedup(tokens, passes, [reference.passes[i] for i in places])
    return f"{text}, x{gain.value:.2f}"


def _find(cells: Sequence[Cell], method: str, column: Column) -> Cell | None:
    return next((cell for cell in cells if cell.key.method == method and _of(cell, column)), None)
