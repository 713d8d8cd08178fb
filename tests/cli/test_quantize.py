"""`offspec quantize`: what it prints, how it refuses, and that a run that was killed goes on."""

from __future__ import annotations

import json
import os
import pty
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offspec as offspec_package
from offspec.cli.quantize import ConversionLine
from offspec.loaders import convert as conversion

from ..pair import Pair, variant
from ..refusals import tells
from .conftest import Offspec


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["nf4", "keep"])
def test_the_result_is_told_and_runs(form: str, pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    result = offspec("quantize", pair.target, tmp_path / "made", "--format", form)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"{tmp_path / 'made'}: ")
    ran = offspec("run", tmp_path / "made", "def area(", "--device", "cpu", "--max-new-tokens", 3, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["stats"]["num_tokens"] == 3


def test_keep_says_what_the_source_says(pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    offspec("quantize", pair.target, tmp_path / "made", "--format", "keep")
    flags = ("--device", "cpu", "--max-new-tokens", 12, "--json", "--draft", "none")
    texts = [json.loads(offspec("run", model, "def area(", *flags).out) for model in (pair.target, tmp_path / "made")]
    assert texts[0]["token_ids"] == texts[1]["token_ids"]


def test_a_result_that_is_larger_is_told(
    pair: Pair, tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a GGUF file of 3 bits is."""

    def smaller_before(*args: Any, **more: Any) -> Any:
        done = convert(*args, **more)
        return replace(done, source_bytes=done.result_bytes - 1)

    convert = offspec_package.convert
    monkeypatch.setattr(offspec_package, "convert", smaller_before)
    assert "the result is larger" in offspec("quantize", pair.target, tmp_path / "small").err
    assert offspec("quantize", pair.target, tmp_path / "quiet", "-q").err == ""
    assert offspec("quantize", pair.target, tmp_path / "kept", "--format", "keep").err == ""


def test_json(pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    result = offspec("quantize", pair.target, tmp_path / "made", "--json", "--no-double-quant")
    said = json.loads(result.out)
    assert (result.code, result.err) == (0, "")
    assert (said["format"], said["num_resumed"], said["target"]) == ("nf4", 0, str(tmp_path / "made"))
    assert 0 < said["result_bytes"] < said["source_bytes"]
    assert said["num_files"] == len(list((tmp_path / "made").glob("*.safetensors")))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("{source}", "{source}"), 2, ("{source}", "SRC", "new folder")),
        (("{source}", "{source}/nf4"), 2, ("{source}/nf4", "SRC", "new folder")),
        (("{source}", "{new}", "--format", "int3"), 2, ("--format", "int3", "nf4")),
        (("{source}", "{new}", "--format", "keep", "--no-double-quant"), 2, ("keep",)),
        (("{taken}", "{new}"), 1, ("{taken}", "safetensors")),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], code: int, words: tuple[str, ...], pair: Pair, tmp_path: Path, offspec: Offspec
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    places = {"source": pair.target, "new": tmp_path / "new", "taken": tmp_path / "taken"}
    result = offspec("quantize", *(argument.format(**places) for argument in arguments))
    result.refusal(code, *(word.format(**places) for word in words))
    assert not (tmp_path / "new").exists()


def test_interrupted_it_goes_on(pair: Pair, tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C before the third file is written, when the second one is verified and there."""
    write = conversion.write_shard

    def interrupted(path: Path, *more: Any) -> None:
        if path.name.startswith("model-00003"):
            while not list(path.parent.glob("model-00002-*.safetensors")):
                time.sleep(0.001)
            raise KeyboardInterrupt
        write(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_shard", interrupted)
        assert offspec("quantize", pair.target, tmp_path / "made").code == 130
    again = offspec("quantize", pair.target, tmp_path / "made", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["num_resumed"] >= 2
    offspec("quantize", pair.target, tmp_path / "whole")
    assert contents(tmp_path / "made") == contents(tmp_path / "whole")


def all_of(terminal: int) -> str:
    """What was written to a terminal that nobody writes to any more; one read may bring a part of it."""
    parts = list[bytes]()
    with suppress(OSError):  # at the end
        while part := os.read(terminal, 65536):
            parts.append(part)
    return b"".join(parts).decode()


def test_progress_is_for_terminals(
    pair: Pair, tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, inside = pty.openpty()
    try:
        with open(inside, "w", encoding="utf-8") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            code = offspec("quantize", pair.target, tmp_path / "made", "--format", "keep").code
        shown = all_of(terminal)
    finally:
        os.close(terminal)
    assert code == 0
    assert "% of" in shown
    assert shown.endswith("\x1b[K")


def test_a_model_that_is_not_run_is_made_with_a_warning(pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    source = variant(pair.target, tmp_path / "source", model_type="mamba", architectures=["MambaForCausalLM"])
    result = offspec("quantize", source, tmp_path / "made", "--json", "--quiet")
    assert (result.code, json.loads(result.out)["format"], len(result.err.splitlines())) == (0, "nf4", 1)
    assert tells(result.err, "offspec: ", "mamba", "recurrent")


def test_what_is_left_is_told_from_this_runs_pace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 100.01, 110.0])
    line = ConversionLine()
    monkeypatch.setattr("offspec.cli.terminal.is_watched", lambda: True)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for done in (500, 510, 600):  # 500 were there from an earlier run; 100 in ten seconds, 400 to go
        line(done, 1000)
    shown = capsys.readouterr().err
    assert shown.count("% of") == 2
    assert shown.endswith("60 % of 1 kB, 40 s left")


@pytest.mark.parametrize("flags", [("--format", "bf16"), ("--no-double-quant",)])
def test_a_shadow_has_its_own_format(offspec: Offspec, tmp_path: Path, flags: tuple[str, ...]) -> None:
    offspec("quantize", "builtin", tmp_path / "shadow", "--shadow", "4", *flags).refusal(2, "--shadow", flags[0])
    assert not (tmp_path / "shadow").exists()


@pytest.mark.slow
def test_a_shadow_in_a_folder(offspec: Offspec, tmp_path: Path) -> None:
    made = offspec("quantize", "builtin", tmp_path / "shadow", "--shadow", "2", "-q", "--json")
    assert made.code == 0
    assert json.loads(made.out)["format"] == "q2_k"
    draft = f"shadow:{tmp_path / 'shadow'}"
    assert offspec("run", "builtin", "def f(", "-n", "4", "--draft", draft, "-q").code == 0


def test_without_a_folder_only_a_shadow_is_made(offspec: Offspec) -> None:
    offspec("quantize", "builtin").refusal(2, "DST")
