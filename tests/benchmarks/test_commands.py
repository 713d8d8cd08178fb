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

from benchmarks import grow, unpack, which_model
from benchmarks.drafts import specialise
from offspec.cli.main import run

from ..pages import Command, commands
from ..pair import Pair, build_pair

TINY = ("--model", "target", "--draft", "draft")
# Arguments that come after those of the pages and take precedence, by module.
SMALL: dict[str, tuple[str, ...]] = {
    "benchmarks.acceptance": (*TINY, "--max-prompts", "1", "--max-new-tokens", "4", "--budgets", "4"),
    "benchmarks.drafts.alignment": (
        *(*TINY, "--folder", "headers", "--prompt-tokens", "16", "--max-new-tokens", "8"),
        *("--held-out", "1", "--requests", "0,1"),
    ),
    "benchmarks.drafts.card_model": ("--cases", "7b"),
    "benchmarks.drafts.choice": (*TINY, "--tokens", "2", "--texts", "1"),
    "benchmarks.drafts.distilled": ("--folder", "headers"),
    "benchmarks.drafts.early_exit": (
        *("--model", "target", "--prompts", "1", "--tokens", "4", "--budgets", "4", "--temperatures", "0"),
    ),
    "benchmarks.drafts.own_layers": (
        *("--model", "target", "--prompts", "1", "--tokens", "4", "--budgets", "4", "--temperatures", "0"),
        *("--resident", "2", "--drafts", "shadow:4,resident,exit,lookup"),
    ),
    "benchmarks.drafts.retrieval": (
        *("--prompts", "1", "--tokens", "4", "--temperatures", "0", "--megabytes", "0.02"),
        *("--lengths", "2", "--leasts", "2"),
    ),
    "benchmarks.drafts.specialise": ("--model", "target", "--folder", "headers"),
    "benchmarks.drafts.window": (
        *("--model", "target", "--draft", "draft", "--prompt-tokens", "120", "--tokens", "4", "--windows", "0,64"),
        *("--context", "512", "--texts", "headers/0.txt"),
    ),
    "benchmarks.exactness": ("--tokens", "4", "--forms", "bf16", "--dtypes", "bf16"),
    "benchmarks.grow": (),
    "benchmarks.long_texts": ("--tokens", "20", "--text", "headers/0.txt"),
    "benchmarks.many": ("--ram", "2GiB", "--texts", "1,2", "--prompts", "2", "--max-new-tokens", "3"),
    "benchmarks.methods": (*TINY, "--prompts", "1", "--tokens", "2", "--budget", "4", "--costs", "card"),
    "benchmarks.prompt_cache": ("--prompt-tokens", "60", "--tokens", "4", "--file", "headers/0.txt"),
    "benchmarks.real.training_texts": ("--model", "builtin", "--count", "1", "--tokens", "2"),
    "benchmarks.scheduling.joint": (
        "--max-prompts",
        "1",
        "--max-new-tokens",
        "4",
        "--taus",
        "0.1",
        "--searched",
        "1,2",
    ),
    "benchmarks.scheduling.lossy": (
        *(*TINY, "--max-prompts", "1", "--max-new-tokens", "2", "--temperatures", "0"),
        *("--strengths", "0.5", "--rollbacks", "0.1", "--beam", "2", "--gamma", "2"),
    ),
    "benchmarks.scheduling.schedulers": (
        *(*TINY, "--prompts", "1", "--tokens", "2", "--budgets", "16", "--temperatures", "0"),
    ),
    "benchmarks.scheduling.stopping": ("--prompts", "1", "--tokens", "2", "--temperatures", "1", "--costs", "card"),
    "benchmarks.scheduling.worlds": ("--worlds", "1", "--passes", "2"),
    "benchmarks.shared_beginnings": (
        "--model",
        "target",
        "--tokens",
        "80",
        "--answers",
        "2",
        "--new",
        "3",
        "--context",
        "256",
    ),
    "benchmarks.which_model": ("--gpus", "rtx3060", "--forms", "nf4"),
    "benchmarks.unpack": ("--types", "nf4", "--shape", "256x256", "--rows", "1"),
}
# Modules whose own tests make such a call: theirs run nightly here.
OWN_TESTS = ("alignment", "distilled", "early_exit", "own_layers", "specialise")
TESTED = {"benchmarks.long_texts", "benchmarks.scheduling.joint", *(f"benchmarks.drafts.{name}" for name in OWN_TESTS)}
SHORT = {"--minutes": "0.001", "--steps": "1"}  # in place of what a page says
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
    """The current folder: the pair, texts to learn from, and where results go."""
    monkeypatch.chdir(tmp_path)
    for name, path in (("target", pair.target), ("draft", pair.draft)):
        (tmp_path / name).symlink_to(path)
    for name in ("headers", "docs/results"):
        (tmp_path / name).mkdir(parents=True)
    for number in range(8):
        for kind in ("h", "txt"):
            (tmp_path / "headers" / f"{number}.{kind}").write_text(f"int number_{number}(int width);\n" * 20)
    monkeypatch.setitem(grow.SHAPES, "7b", SHAPE)
    monkeypatch.setattr(which_model, "TARGETS", dict([*which_model.TARGETS.items()][:1]))
    monkeypatch.setattr(unpack, "CACHE_BYTES", 1 << 17)
    monkeypatch.setattr(specialise, "WINDOW", 32)
    monkeypatch.setattr(specialise, "ROWS", 2)
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


@pytest.mark.parametrize(
    "command", [command for command in ALL if command not in RUN.values() or module_of(command)[0] in TESTED], ids=str
)
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
            marks=() if command in RUN.values() and module_of(command)[0] not in TESTED else pytest.mark.nightly,
        )
        for command in FIRSTS.values()
    ],
    ids=str,
)
@pytest.mark.usefixtures("folder")
def test_commands_run(command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, args = module_of(command)
    if "--plot" in args:
        pytest.importorskip("matplotlib")
    for file in (arg for arg in args if arg.startswith("exit")):  # made by the commands before this one
        flags = ("--steps", "1", "--num-texts", "16", "--text-tokens", "8", "--out", file)
        assert run(["distill", "target", "--exit-layer", file[4], *flags]) == 0
    short = [flag for name, value in SHORT.items() if name in args for flag in (name, value)]
    monkeypatch.setattr(sys, "argv", [module, *args, *SMALL[module], *short])
    import_module(module).main()
    said = capsys.readouterr()
    assert said.out.strip() or said.err.strip()
