"""docs/developing/methods.md: each method once; its flags and files are there, and the page counts them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click

from offspec.cli.main import COMMANDS, cli

from ..pages import ROOT

PAGE = (ROOT / "docs" / "developing" / "methods.md").read_text(encoding="utf-8")
STATES = ("built", "part", "baseline", "covered", "no")
LINK = re.compile(r"\[([^\]]+)\]\((https://[^)]+)\)")
# Publications (arXiv) that must be there: the list that the project began with, and later ones.
PUBLICATIONS = """
1811.03115 2203.16487 2211.17192 2302.01318 2302.07863 2304.04487 2305.09781 2308.04623 2309.08168 2310.07177
2310.07707 2310.08461 2310.15141 2310.18813 2311.00430 2311.08252 2311.08981 2312.11462 2401.06706 2401.06761
2401.07851 2401.10774 2401.13660 2401.15077 2402.01528 2402.02057 2402.02082 2402.05109 2402.08644 2402.11131
2402.11809 2402.12374 2402.13720 2402.14160 2402.15678 2403.00858 2403.06988 2403.09919 2403.10444 2403.18647
2404.00242 2404.08856 2404.11912 2404.12022 2404.14897 2404.15778 2404.16710 2404.18911 2404.19124 2405.00263
2405.04304 2405.07542 2405.13019 2405.15842 2405.18628 2405.19261 2405.19325 2405.19715 2405.20314 2406.02532
2406.03853 2406.04523 2406.07368 2406.12295 2406.13170 2406.14066 2406.16758 2406.16858 2406.17276 2406.17404
2406.18200 2407.01955 2407.09685 2407.09722 2407.16207 2408.00264 2408.04678 2408.05636 2408.05676 2408.07978
2408.08146 2408.08696 2408.11049 2408.11850 2408.15237 2408.15562 2409.00142 2502.05202 2503.01840 2504.11651
2408.15766 2411.04975 2412.18934 2412.19437 2505.10259 2505.14969 2509.18344 2602.01469 2602.06036 2602.16052
2604.12989 2608.20961
"""


@dataclass(frozen=True)
class Row:
    """An item of the page's lists: a method, its publication, its state, the file that the state links to."""

    name: str
    link: str | None
    state: str
    code: str
    here: str


ITEM = re.compile(
    r"^- (?:\[([^\]]+)\]\((https://[^)]+)\)|(\S.*?))\s+\[(\w+)\]\(\.\./\.\./([^)]+)\):\s+((?:.|\n  )+)", re.M
)


def rows_of(page: str) -> list[Row]:
    return [Row(name or plain, link or None, *rest) for name, link, plain, *rest in ITEM.findall(page)]


ROWS = rows_of(PAGE)
NOT_BUILT = LINK.findall(PAGE.partition("\n## Not built\n")[2])  # names and links


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
    assert unknown("offspec distill --resume") == []
    assert unknown("--draft-scoring specexec") == []
    assert unknown("offspec guess --tree best-first --nodes 4") == ["offspec guess", "--nodes 4"]
    assert unknown("--tree pine") == ["--tree pine"]


def test_each_publication_is_there_once() -> None:
    names = Counter([*(row.name for row in ROWS), *(name for name, _ in NOT_BUILT)])
    links = Counter([*(row.link for row in ROWS if row.link), *(link for _, link in NOT_BUILT)])
    assert {f"https://arxiv.org/abs/{number}" for number in PUBLICATIONS.split()} <= links.keys()
    assert {*links.values(), *names.values()} == {1}


def test_the_page_counts_them() -> None:
    counts = Counter([*(row.state for row in ROWS), *("no" for _ in NOT_BUILT)])
    assert set(counts) == set(STATES)
    line = f"Methods: {counts.total()}, of which " + ", ".join(f"{state} {counts[state]}" for state in STATES) + "."
    assert line in PAGE


def test_flags_are_there() -> None:
    spans = [span for row in ROWS for span in re.findall(r"`((?:offspec |--)[^`]+)`", row.here)]
    assert len(spans) > len(ROWS) / 2
    assert [word for span in spans for word in unknown(span)] == []


def defined_in(file: str) -> set[str]:
    """The module's name, and the public ones that it defines."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return {Path(file).stem, *re.findall(r"^(?:class |def )?([A-Za-z]\w+)(?=[:(]| = )", text, re.MULTILINE)}


def test_files_are_there_and_tests_name_them() -> None:
    assert [row.code for row in ROWS if not (ROOT / row.code).is_file()] == []
    files = list((ROOT / "tests").rglob("test_*.py"))
    words = {file.stem.removeprefix("test_") for file in files}
    words.update(word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8")))
    assert [row.code for row in ROWS if not defined_in(row.code) & words] == []
