"""The calls of benchmarks in README and docs: their flags as they stand there, with tiny models and few tokens.

One call of each module, and nightly one with each set of flags, is run. The others are parsed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import grow, which_model

from ..pages import Command, commands
from ..pair import Pair, build_pair

# Arguments that come after those of the pages and take precedence, by module.
SMALL: dict[str, tuple[str, ...]] = {
    "benchmarks.acceptance": (
        *("--model", "target", "--draft", "draft", "--max-prompts", "1", "--max-new-tokens", "4", "--budgets", "4"),
    ),
    "benchmarks.exactness": ("--tokens", "4", "--forms", "bf16", "--dtypes", "bf16"),
    "benchmarks.grow": (),
    "benchmarks.many": ("--ram", "2GiB", "--texts", "1,2", "--prompts", "2", "--max-new-tokens", "3"),
    "benchmarks.real.training_texts": ("--model", "builtin", "--count", "1", "--tokens", "2"),
    "benchmarks.scheduling.schedulers": (
        *("--model", "target", "--draft", "draft", "--prompts", "1", "--tokens", "2", "--budgets", "16"),
        *("--temperatures", "0"),
    ),
    "benchmarks.scheduling.worlds": ("--worlds", "1", "--passes", "2"),
    "benchmarks.which_model": ("--gpus", "rtx3060", "--forms", "nf4"),
}
SHAPE = grow.Shape(512, 1024, 9, 16, 4)  # in place of a 7B's


def module_of(command: Command) -> tuple[str, list[str]]:
    """`python -m MODULE ARGS` or `python FOLDER/FILE.py ARGS`."""
    _, *words = command.words
    if words[0] == "-m":
        return words[1], words[2:]
    return words[0].removesuffix(".py").replace("/", "."), words[1:]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), 5, max_position_embeddings=1024)


@pytest.fixture
def folder(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the pair."""
    monkeypatch.chdir(tmp_path)
    for name, path in (("target", pair.target), ("draft", pair.draft)):
        (tmp_path / name).symlink_to(path)
    monkeypatch.setitem(grow.SHAPES, "7b", SHAPE)
    monkeypatch.setattr(which_model, "TARGETS", dict([*which_model.TARGETS.items()][:1]))
    return tmp_path


def kind_of(command: Command) -> tuple[str, str, frozenset[str]]:
    """Module, subcommand and flags, without those that `SMALL` sets."""
    module, args = module_of(command)
    flags = frozenset(arg for arg in args if arg.startswith("--"))
    return module, "" if args[:1] == [] or args[0].startswith("--") else args[0], flags - set(SMALL[module])


ALL = [found for found in commands() if found.program == "benchmark"]
FIRSTS = {kind_of(command): command for command in reversed(ALL)}
RUN = {kind_of(command)[:2]: command for command in reversed(ALL)}


class Parsed(Exception):  # noqa: N818 - no error
    """The arguments were taken."""


@pytest.mark.parametrize("command", [command for command in ALL if command not in RUN.values()], ids=str)
def test_commands_like_those_that_run_parse(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, args: Sequence[str] | None = None) -> None:
        raise Parsed(parse(parser, args))

    module, args = module_of(command)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [module, *args])
    with pytest.raises(Parsed):
        import_module(module).main()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command,
            marks=() if command in RUN.values() else pytest.mark.nightly,
        )
        for command in FIRSTS.values()
    ],
    ids=str,
)
@pytest.mark.usefixtures("folder")
def test_commands_run(command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, args = module_of(command)
    monkeypatch.setattr(sys, "argv", [module, *args, *SMALL[module]])
    import_module(module).main()
    said = capsys.readouterr()
    assert said.out.strip() or said.err.strip()
