"""The pages: every command is run, examples run, links lead somewhere, the chart shows the table's figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

from offspec import Engine, __version__
from offspec.cli.main import COMMANDS, cli

from ..pages import ELSEWHERE, FENCE, PAGES, ROOT, blocks, commands, commands_of

SVG = "{http://www.w3.org/2000/svg}"
MEDIAN_WORDS, MOST_WORDS = 15, 35  # of a sentence, in README and help
USERS_WORDS = 12_200  # of README and all pages in docs/ itself, which are for users


def check_parses(args: list[str]) -> None:
    """Every flag is known, every value is of its type, nothing is too much. Files need not be there."""
    assert args, "offspec alone"
    context = click.Context(cli, info_name="offspec")
    command = cli.get_command(context, args[0])
    assert command is not None, args[0]
    context = click.Context(command, parent=context, info_name=args[0])
    values, left, _ = command.make_parser(context).parse_args(args=args[1:])
    assert left == []
    for parameter in command.get_params(context):
        if parameter.name in values and not isinstance(parameter.type, (click.Path, click.File)):
            parameter.type_cast_value(context, values[parameter.name])


def test_commands_are_found() -> None:
    found = [command for command in commands() if command.program == "offspec"]
    assert {command.words[1] for command in found} == set(COMMANDS)
    names = ("usage", "drafts", "large-models", "developing/joint", "developing/early-exit")
    assert {"README.md", *(f"docs/{name}.md" for name in names)} <= {command.page for command in found}
    line = "X=1 offspec run builtin 'a # b' < in.txt && git diff | offspec chat > out # offspec serve"
    first, second, third = commands_of(line)
    assert (first.words, first.environment, first.stdin) == (("offspec", "run", "builtin", "a # b"), ("X=1",), "in.txt")
    assert (second.is_piped, third.is_piped, third.words) == (False, True, ("offspec", "chat"))


def test_every_command_is_run_or_named() -> None:
    """`tests/cli/test_commands` and `tests/benchmarks/test_commands` run programs; ELSEWHERE has the others."""
    assert [str(found) for found in commands() if found.program not in ("", "offspec", "benchmark")] == []
    assert [name for name in ELSEWHERE if not any(found.begins(name) for found in commands())] == []
    assert [where for where in ELSEWHERE.values() if "/" in where and not (ROOT / where).exists()] == []


def test_the_description_on_pypi_stands_alone() -> None:
    """Its commands parse, and it has neither links nor pictures, which would be relative ones."""
    tomllib = pytest.importorskip("tomllib")
    text = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["readme"]["text"]
    assert "](" not in text
    (block,) = (content for name, content in FENCE.findall(text) if name == "sh")
    found = [command for line in block.splitlines() for command in commands_of(line) if command.program == "offspec"]
    assert len(found) == 4
    for command in found:
        check_parses(list(command.words[1:]))


def test_tests_that_a_page_names_are_there() -> None:
    files = [word for found in commands() if "pytest" in found.words for word in found.words if "/" in word]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_example_of_a_command_runs() -> None:
    page = ROOT / "docs" / "developing" / "extending.md"
    (code,) = (code for code in blocks(page, "python") if "`offspec tokens`" in code)
    names: dict[str, Any] = {"__name__": "offspec.cli.tokens", "__package__": "offspec.cli"}
    exec(compile(code, "docs/developing/extending.md", "exec"), names)
    result = CliRunner().invoke(names["command"], ["builtin", "def area("])
    assert (result.exit_code, result.output) == (0, "301 695 69 12\n")


@pytest.mark.parametrize(
    "args",
    [["run", "builtin", "--drat", "x"], ["run", "m", "p", "more"], ["run", "--temperature", "warm"], ["quantise", "m"]],
    ids=" ".join,
)
def test_what_does_not_parse_is_noticed(args: list[str]) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        check_parses(args)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_help_parse(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    lines = (command.help or "").replace("\\\n", " ").splitlines()
    examples = [line.strip() for line in lines if re.match(r"\s*(\S.* \| )?(\S+=\S+ )?offspec [a-z]+( |$)", line)]
    assert examples
    for line in examples:
        for found in commands_of(line):
            if found.words[0] == "offspec":
                check_parses(found.args)


def sentences(text: str) -> Iterator[int]:
    """The number of words of each sentence of a paragraph; `[default: …]` is a sentence of its own."""
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\[\"(])|(?=\[default)", text):
        if words := [word for word in sentence.split() if re.search(r"\w", word)]:
            yield len(words)


def help_texts(name: str) -> Iterator[str]:
    """The paragraphs of `offspec NAME --help-all`, without examples."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    yield from (part for part in re.split(r"\n\n+", command.help or "") if not part.lstrip().startswith("\b"))
    yield from (parameter.help or "" for parameter in command.params if isinstance(parameter, click.Option))


def readme_texts() -> Iterator[str]:
    """README's paragraphs and list items, without headings, tables, images, code and the targets of links."""
    text = FENCE.sub("\n", (ROOT / "README.md").read_text(encoding="utf-8"))
    text = re.sub(r"^(    |#|\||!).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    yield from re.split(r"\n\s*\n|\n(?=[-*]|\d+\. )", text)


@pytest.mark.parametrize("source", ["README.md", *COMMANDS])
def test_sentences_are_short(source: str) -> None:
    texts = readme_texts() if source == "README.md" else help_texts(source)
    lengths = [(length, text) for text in texts for length in sentences(text)]
    assert median(length for length, _ in lengths) <= MEDIAN_WORDS
    assert [text for length, text in lengths if length > MOST_WORDS] == []


def test_long_sentences_are_noticed() -> None:
    assert list(sentences("One two. Three `four` five [default: 6]")) == [2, 3, 2]
    assert max(sentences(" ".join(["word"] * (MOST_WORDS + 1)))) > MOST_WORDS


def test_modules_that_pages_start_are_there() -> None:
    pattern = r"python -m (benchmarks[\w.]*)"
    named = {(page.name, name) for page in PAGES for name in re.findall(pattern, page.read_text(encoding="utf-8"))}
    files = {named_by: ROOT / named_by[1].replace(".", "/") for named_by in named}
    assert [
        n for n, path in files.items() if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file())
    ] == []


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            if "://" in target:
                continue
            path = page.parent / file if file else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append((page.name, target))
    assert broken == []


def test_every_page_can_be_reached_from_readme() -> None:
    reached, open_pages = set(), [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        if page not in reached and page.is_file():
            reached.add(page)
            targets = re.findall(r"\]\(([\w./-]+\.md)", page.read_text(encoding="utf-8"))
            open_pages += [(page.parent / target).resolve() for target in targets]
    assert {*(ROOT / "docs").rglob("*.md")} - reached == set()


def test_users_pages_are_read_in_an_hour() -> None:
    """Figures belong in docs/results/, what describes the code in docs/developing/."""
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != "LOG.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= USERS_WORDS


def test_readme_leads_no_user_into_the_log() -> None:
    assert "/LOG.md" not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_changelog_has_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == __version__


@pytest.mark.slow
def test_python_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in blocks(ROOT / "docs" / "python.md", "python"):
        exec(compile(code, "docs/python.md", "exec"), names)
    assert "no-such-model" in capsys.readouterr().out


def test_the_python_page_names_every_public_member() -> None:
    from dataclasses import fields

    import offspec
    from offspec import errors
    from offspec.session import Session

    page = FENCE.sub("", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    spans = re.findall(r"`[^`]+`|^## .+$", page, re.MULTILINE)
    told = set(re.findall(r"\w+", " ".join(spans)))
    settings = (
        offspec.LoadOptions,
        offspec.SamplingParams,
        offspec.SpeculationParams,
        offspec.ConvertParams,
        offspec.Stats,
    )
    expected = {field.name for kind in (*settings, offspec.Step) for field in fields(kind)} - {"model"}
    expected |= {name for kind in (Engine, Session) for name in vars(kind) if not name.startswith("_")}
    expected |= {name for name in vars(errors) if name.endswith("Error")}
    expected |= {name for name in offspec.__all__ if not name.startswith("_")}
    assert expected - told == set()


def test_the_chart_shows_the_tables_figures() -> None:
    """docs/peers.svg beside the table of all rows in docs/results/benchmarks.md; bars are as long as their figures."""
    table = (ROOT / "docs" / "results" / "benchmarks.md").read_text(encoding="utf-8")
    rates = dict(re.findall(r"^\| ([^|]+?) \| \d+ x \d+ \| ([\d.]+) ", table, re.MULTILINE))
    chart = ElementTree.parse(ROOT / "docs" / "peers.svg")
    texts = list(chart.iter(f"{SVG}text"))
    names = [element.text or "" for element in texts if element.get("text-anchor") == "end"]
    shown = [float(text) for element in texts if re.fullmatch(r"\d+\.\d\d", text := element.text or "")]
    assert len(names) >= 6
    assert shown == pytest.approx([float(rates[name]) for name in names], abs=0.006)
    bars = [float(bar.get("width", "")) for bar in chart.iter(f"{SVG}rect") if bar.get("class") in ("ours", "peer")]
    assert bars == pytest.approx([bars[0] * rate / shown[0] for rate in shown], abs=0.5)


@pytest.mark.parametrize(
    "source", ["README.md", "docs/faq.md", "docs/limitations.md", "docs/from-llama-cpp.md", "offspec", "run"]
)
def test_the_claim_has_its_condition(source: str) -> None:
    """Wherever it stands first, "the text of plain decoding" says where it holds."""
    if source.endswith(".md"):
        text = (ROOT / source).read_text(encoding="utf-8")
    else:
        context = click.Context(cli)
        command = cli if source == "offspec" else cli.get_command(context, source)
        assert command is not None
        text = " ".join([command.help or "", *help_texts(source)] if source != "offspec" else [command.help or ""])
    plain = " ".join(re.sub(r"[\[\]]", "", text).split())
    assert "exactly on a CPU, and on a GPU for streamed targets" in plain
