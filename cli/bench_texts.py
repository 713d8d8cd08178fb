"""`offspec bench --texts`: its flags, and its table."""

from __future__ import annotations

import reprlib
import textwrap
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from offspec import SpeculationParams

from .options import MAX_TEXTS
from .terminal import table

if TYPE_CHECKING:
    from offspec.tools.benchmark import Figure
    from offspec.tools.texts_benchmark import TextsReport, TextsRow

NOT_WITH = {"budgets": "--budgets", "files": "--save"}


def several_numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    """A click callback: "1,2,4,8" as numbers of texts without duplicates."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    for part in parts:
        if not part.isdecimal() or not 1 <= int(part) <= MAX_TEXTS:
            raise click.BadParameter(f"{reprlib.repr(part)} is not a number of texts from 1 to {MAX_TEXTS}.")
    return list(dict.fromkeys(map(int, parts)))


def check_flags(speculation: SpeculationParams) -> None:
    """Raises click.UsageError for what --texts does not go with."""
    ctx = click.get_current_context()
    given = [flag for name, flag in NOT_WITH.items() if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if speculation.is_lossy:
        given.append(f"--accept {speculation.accept}")
    if given:
        raise click.UsageError(f"--texts compares numbers of texts, with the automatic budget: omit {given[0]}.")


def texts_table(report: TextsReport, width: int) -> list[str]:
    """One line per number of texts, then remarks."""
    rows = [["texts", "tokens/s together", "each", "tokens/pass", "gain"], *map(_cells, report.rows())]
    lines = table(rows)
    same = f"all {report.num_compared} texts equal those of the first row"
    if report.num_different:
        same = (
            f"{report.num_different} of {report.num_compared} texts differ from those of the first row; "
            "where --stats says up to near-ties, these can cause it (run offspec verify to check), else it is an error"
        )
    remarks = [
        f"tokens/s: of {report.num_prompts} prompts with at most so many texts at a time, prompts included, +- half "
        "the range over the repeats; each: of one text while it is under way (median); tokens/pass: of all texts; "
        "memory is planned for the largest number of texts",
        same,
    ]
    return [*lines, *(line for text in remarks for line in textwrap.wrap(text, max(width, 20)))]


def _cells(row: TextsRow) -> list[str]:
    figures = (row.each_tokens_per_s.median, row.tokens_per_pass.median)
    return [
        str(row.num_texts),
        with_spread(row.tokens_per_s),
        *(f"{figure:.2f}" for figure in figures),
        f"{row.gain.median:.2f}x",
    ]


def with_spread(figure: Figure) -> str:
    """The median, and half the range, if there is one: a single measurement has none."""
    decimals = 1 if figure.median >= 10 else 2
    if figure.low == figure.high:
        return f"{figure.median:.{decimals}f}"
    return f"{figure.median:.{decimals}f} +-{(figure.high - figure.low) / 2:.{decimals}f}"
