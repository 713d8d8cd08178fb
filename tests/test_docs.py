"""The pages: commands parse, examples run, links lead somewhere, the chart shows the table's figures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import click
import pytest

from offspec import Engine, __version__
from offspec.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parent.parent
# The log tells what was tried when; its commands are of their day.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "offspec/builtin/README.md")),
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "LOG.md"),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SEPARATORS = {"&&", "||", "|", ";", "<", ">", "$(", ")", "&", "\n"}
SVG = "{http://www.w3.org/2000/svg}"
MEDIAN_WORDS, MOST_WORDS = 15, 35  # of a sentence, in README and help


def blocks(page: Path, language: str) -> list[str]:
    return [content for name, content in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def shell_lines(page: Path) -> Iterator[str]:
    """Lines of sh blocks, and of blocks that are indented."""
    for content in blocks(page, "sh"):
        yield from content.replace("\\\n", " ").splitlines()
    outside = FENCE.sub("", page.read_text(encoding="utf-8")).replace("\\\n", " ")
    yield from (line.strip() for line in outside.splitlines() if line.startswith("    "))


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each call of offspec in a line of shell: `FOO=1 offspec run … && offspec chat … # comment`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if word not in SEPARATORS:
            words.append(word)
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words[:1] == ["offspec"]:
            yield words[1:]
        words = []


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


def calls() -> list[tuple[str, list[str]]]:
    return [(page.name, args) for page in PAGES for line in shell_lines(page) for args in commands_of(line)]


def test_calls_are_found() -> None:
    found = calls()
    assert {args[0] for _, args in found} == set(COMMANDS)
    assert {"README.md", "usage.md", "streaming.md", "drafts.md", "joint.md", "early-exit.md"} <= {n for n, _ in found}
    both = "X=1 offspec run builtin 'a # b' && offspec chat | head # offspec serve"
    assert list(commands_of(both)) == [["run", "builtin", "a # b"], ["chat"]]


@pytest.mark.parametrize(("page", "args"), calls(), ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_commands_parse(page: str, args: list[str]) -> None:
    check_parses(args)


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
        for args in commands_of(line):
            check_parses(args)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_starts_are_there(page: Path) -> None:
    named = set(re.findall(r"python -m (benchmarks[\w.]*)", page.read_text(encoding="utf-8")))
    files = {name: ROOT / name.replace(".", "/") for name in named}
    assert [
        n for n, path in files.items() if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file())
    ] == []


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_every_page_can_be_reached_from_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", (ROOT / "README.md").read_text(encoding="utf-8")))
    linked |= {f"docs/{name}" for page in PAGES for name in re.findall(r"\]\(([\w-]+\.md)", page.read_text("utf-8"))}
    assert {str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")} <= linked


def test_the_changelog_has_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == __version__


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
    from offspec.loading import LoadOptions
    from offspec.session import Session

    page = FENCE.sub("", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    spans = re.findall(r"`[^`]+`|^## .+$", page, re.MULTILINE)
    told = set(re.findall(r"\w+", " ".join(spans)))
    settings = (LoadOptions, offspec.SamplingParams, offspec.SpeculationParams, offspec.ConvertParams, offspec.Stats)
    expected = {field.name for kind in (*settings, offspec.Step) for field in fields(kind)} - {"model"}
    expected |= {name for kind in (Engine, Session) for name in vars(kind) if not name.startswith("_")}
    expected |= {name for name in vars(errors) if name.endswith("Error")}
    expected |= {name for name in offspec.__all__ if not name.startswith("_")}
    assert expected - told == set()


def test_the_chart_shows_the_tables_figures() -> None:
    """docs/peers.svg beside the table of 128 tokens in docs/benchmarks.md; bars are as long as their figures."""
    table = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").partition("**With recall, 128 tokens**")[2]
    rates = dict(re.findall(r"^\| ([^|]+?) \| \d+ x \d+ \| ([\d.]+) ", table.partition("\n- ")[0], re.MULTILINE))
    rows = ["offspec", "llama.cpp, draft, 16", "transformers, assistant, 20", "llama.cpp", "transformers", "airllm"]
    chart = ElementTree.parse(ROOT / "docs" / "peers.svg")
    texts = [element.text or "" for element in chart.iter(f"{SVG}text")]
    shown = [float(text) for text in texts if re.fullmatch(r"\d\.\d\d", text)]
    assert shown == [round(float(rates[row]), 2) for row in rows]
    bars = [float(bar.get("width", "")) for bar in chart.iter(f"{SVG}rect") if bar.get("class") in ("ours", "peer")]
    assert bars == pytest.approx([bars[0] * rate / shown[0] for rate in shown], abs=0.1)
