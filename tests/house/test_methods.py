"""docs/developing/methods.md: a row for each method; its flags and files are there, its counts are its rows'."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import click

from offspec.cli.main import COMMANDS, cli

from ..pages import ROOT

PAGE = (ROOT / "docs" / "developing" / "methods.md").read_text(encoding="utf-8")
STATES = ("built", "baseline", "covered", "no")
NUM_METHODS = 81
ABSENT, UNMEASURED = "\N{EN DASH}", "not measured"


@dataclass(frozen=True)
class Row:
    """A row of the page's tables."""

    method: str
    state: str
    here: str
    code: str
    tests: str
    figures: str


def rows_of(page: str) -> list[Row]:
    """The rows of all tables with these six columns; the tables' heads are not methods."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [Row(*row) for row in cells if len(row) == 6 and row[0] != "method" and not set(row[0]) <= {"-"}]


ROWS = rows_of(PAGE)


def flags() -> dict[str, set[str]]:
    """Each flag of any command, and the values it is limited to; none if it takes others."""
    context, found = click.Context(cli, info_name="offspec"), dict[str, set[str]]()
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
            for flag in (*parameter.opts, *parameter.secondary_opts):
                found.setdefault(flag, set()).update(map(str, choices))
    return found


FLAGS = flags()


def unknown(span: str) -> list[str]:
    """The words of `--flag`, `--flag value` or `offspec command --flag` that no command knows."""
    words = span.split()
    missing = [f"offspec {words[1]}"] if words[0] == "offspec" and words[1] not in COMMANDS else []
    for place, word in enumerate(words):
        if word.startswith("--"):
            value = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("--") else None
            if word not in FLAGS or (value and FLAGS[word] and value not in FLAGS[word]):
                missing.append(f"{word} {value or ''}".strip())
    return missing


def test_what_is_unknown() -> None:
    assert unknown("offspec distill --skip") == []
    assert unknown("--draft-scoring specexec") == []
    assert unknown("offspec guess --tree best-first --nodes 4") == ["offspec guess", "--nodes 4"]
    assert unknown("--tree pine") == ["--tree pine"]


def test_each_method_has_one_row() -> None:
    assert len(ROWS) == NUM_METHODS
    assert len({row.method for row in ROWS}) == NUM_METHODS
    papers = [link for row in ROWS for link in re.findall(r"\]\((https://[^)]+)\)", row.method)]
    assert len(papers) == len(set(papers)) == NUM_METHODS - 1, "ShadowSpec has no address"


def test_the_counts_are_those_of_the_rows() -> None:
    counts = Counter(row.state for row in ROWS)
    assert set(counts) <= set(STATES)
    told = f"Rows: {NUM_METHODS}, of which " + ", ".join(f"{state} {counts[state]}" for state in STATES) + "."
    assert told in PAGE


def test_flags_are_there() -> None:
    spans = [span for row in ROWS for span in re.findall(r"`((?:offspec |--)[^`]+)`", f"{row.here} {row.code}")]
    assert [word for span in spans for word in unknown(span)] == []


def test_files_are_there() -> None:
    named = {name for row in ROWS for name in re.findall(r"`([\w/]+\.py)`", f"{row.code} {row.tests}")}
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_what_is_built_names_its_files() -> None:
    for row in ROWS:
        code, tests = (re.findall(r"`([\w/]+\.py)`", cell) for cell in (row.code, row.tests))
        if row.state == "no":
            assert (row.code, row.tests, row.figures) == (ABSENT, ABSENT, ABSENT), row.method
            assert row.here, row.method
        else:
            assert code, row.method
            assert tests, row.method
            assert all(name.startswith("tests/") for name in tests), row.method
            assert row.figures == UNMEASURED or re.fullmatch(r"\[.+\]\([\w#./-]+\)", row.figures), row.method
