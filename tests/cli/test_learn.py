"""`--learn` and `--learn-file`: the answers are the same, what is learnt is kept, and what cannot be is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from offspec import Engine, SamplingParams, Stats
from offspec.checkpoints.atomic_files import write_atomically
from offspec.cli import main
from offspec.errors import StorageError

from ..pair import Pair, scale_weights, variant
from ..refusals import tells
from .conftest import Offspec, Result, Stdin, with_draft

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP, and SIGTERM ends at once")

pytestmark = pytest.mark.usefixtures("learning_takes_no_time")

PROMPTS = ("def area(", "for item in self")
TYPED = "".join(f"{prompt}\n" for prompt in PROMPTS).encode()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return file


@pytest.fixture
def chat_args(pair: Pair) -> Sequence[object]:
    model = (pair.target, "--draft", pair.draft, "--device", "cpu")
    return ("chat", *model, "--max-new-tokens", "10", "--seed", "5", "--ignore-eos")


def replies(offspec: Offspec, *args: object) -> str:
    result = offspec(*args, stdin=TYPED)
    assert result.code == 0
    return result.out


@pytest.fixture(scope="module")
def learnt(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of what the pair's draft has learnt."""
    file = tmp_path_factory.mktemp("learnt") / "learnt"
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", learn=True) as engine,
    ):
        assert engine.aligner is not None
        patch.setattr(engine.aligner, "_clock", lambda: 0.0)
        *_, last = engine.generate("def area(", SamplingParams(24, ignore_eos=True))
        engine.learn(last.stats)
        engine.aligner.adapter.save(file)
    return file.read_bytes()


@pytest.mark.slow
def test_replies_are_the_same_and_the_file_is_there(
    chat_args: Sequence[object], tmp_path: Path, offspec: Offspec
) -> None:
    file = tmp_path / "learnt.safetensors"
    args = (*chat_args, "--temperature", "0.9")
    plain = replies(offspec, *args)
    assert not file.exists()
    assert replies(offspec, *args, "--learn", "--learn-file", file) == plain
    assert replies(offspec, *args, "--learn-file", file) == plain
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]


@pytest.mark.slow
@needs_signals
def test_a_signal_keeps_what_was_learnt_before(
    chat_args: Sequence[object], tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, learn, calls = tmp_path / "learnt", Engine.learn, list[int]()

    def interrupted(engine: Engine, stats: Stats) -> None:
        calls.append(stats.num_tokens)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        learn(engine, stats)

    handlers = {number: signal.getsignal(number) for number in main.ENDING_SIGNALS}
    args = map(str, (*chat_args, "--learn", "--learn-file", file))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "learn", interrupted)
        patch.setattr(sys, "argv", ["offspec", *args])
        patch.setattr(sys, "stdin", Stdin(TYPED))
        try:
            signal.signal(signal.SIGTERM, main._leave)  # as `main` does, which would end this process
            assert main._run_program() == 143
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert replies(offspec, *chat_args, "--learn-file", file)
    assert not file.with_name(".learnt.lock").exists()


@needs_signals
def test_an_ignored_signal_stays_ignored() -> None:
    """As nohup has it."""
    main = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.argv = ['offspec', '--version']; "
    main += (
        "import offspec.cli.main as m\ntry: m.main()\nexcept SystemExit: print(signal.getsignal(signal.SIGHUP).name)"
    )
    shown = subprocess.run([sys.executable, "-c", main], capture_output=True, text=True, timeout=300, check=True)
    assert shown.stdout.splitlines()[-1] == "SIG_IGN"


def full(*wanted: Path) -> Callable[[Path, bytes], None]:
    """`write_atomically` where the disk of some folders is full."""

    def write(path: Path, content: bytes) -> None:
        if any(path.is_relative_to(folder) for folder in wanted):
            raise StorageError("no room") from OSError(28, "No space left on device")
        write_atomically(path, content)

    return write


@pytest.mark.slow
def test_a_full_disk_does_not_lose_what_was_learnt(
    chat_args: Sequence[object], tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, home = tmp_path / "temporary", tmp_path / "home"
    other.mkdir()
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    monkeypatch.setenv("HOME", str(home))
    file = tmp_path / "disk" / "learnt"
    file.parent.mkdir()
    for disks, place, has_home in (((file.parent, other), home, True), ((file.parent,), other, False)):
        if not has_home:  # as in a container whose user is a number alone
            monkeypatch.delenv("HOME")
            monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
        with monkeypatch.context() as patch:
            patch.setattr("offspec.research.lora.write_atomically", full(*disks))
            result = offspec(*chat_args, "--learn", "--learn-file", file, stdin=TYPED)
        (kept,) = place.glob("offspec-*/learnt")
        assert result.code == 1
        (line,) = [line for line in result.err.splitlines() if line.startswith("Error: ")]
        assert tells(line, file, "No space left on device", kept)
        assert replies(offspec, *chat_args, "--learn-file", kept)
        shutil.rmtree(kept.parent)
    assert list(file.parent.iterdir()) == []
    assert [folder for folder in other.iterdir() if not any(folder.iterdir())] == []


@pytest.mark.slow
def test_ctrl_c_while_it_is_written_does_not_lose_it(
    chat_args: Sequence[object], tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, calls = tmp_path / "learnt", list[Path]()

    def write(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        write_atomically(path, content)

    monkeypatch.setattr("offspec.research.lora.write_atomically", write)
    assert offspec(*chat_args, "--learn", "--learn-file", file, stdin=TYPED).code == 130
    assert replies(offspec, *chat_args, "--learn-file", file)


def test_two_do_not_learn_into_one_file(
    learnt: bytes, chat_args: Sequence[object], tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused before a model is loaded; who only reads the file is not. Locks are those of open files."""
    file, link, load, others = tmp_path / "learnt", tmp_path / "link", Engine.load, list[Result]()
    file.write_bytes(learnt)
    link.symlink_to(file)

    def loading(*args: Any, **more: Any) -> Engine:
        monkeypatch.setattr(Engine, "load", None)
        others.append(offspec(*chat_args, "--learn", "--learn-file", link))
        monkeypatch.setattr(Engine, "load", load)
        others.append(offspec(*chat_args, "--learn-file", file))
        return load(*args, **more)

    monkeypatch.setattr(Engine, "load", loading)
    assert offspec(*chat_args, "--learn", "--learn-file", file).code == 0
    others[0].refusal(2, link, "another process")
    assert others[1].code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learnt", "link"]


def test_ctrl_c_while_a_chat_learns_leaves_the_reply(
    pair: Pair, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("chat", pair.target, "--draft", pair.draft, "--device", "cpu", "--max-new-tokens", "8", "--seed", "1")
    plain = offspec(*args, stdin=b"hi\nagain\n")
    monkeypatch.setattr(Engine, "learn", Mock(side_effect=KeyboardInterrupt))
    found = offspec(*args, "--learn", stdin=b"hi\nagain\n")
    assert (found.code, found.out) == (0, plain.out)
    assert found.err.count("stopped") == 2


@pytest.mark.slow
def test_bench_measures_what_was_learnt_elsewhere_and_learns_nothing(
    pair: Pair, prompts: Path, learnt: bytes, tmp_path: Path, offspec: Offspec
) -> None:
    file = tmp_path / "learnt"
    file.write_bytes(learnt)
    args = ("bench", pair.target, "--draft", pair.draft, "--device", "cpu", "--budgets", "8")
    short = ("--prompts", prompts, "--max-new-tokens", "4", "--repeats", "0+1", "-q")
    assert offspec(*args, *short, "--learn-file", file).code == 0
    assert file.read_bytes() == learnt
    assert offspec(*args, *short, "--learn").code == 2


# ------------------------------------------------------------------------------------------------ refused


def test_no_draft_model(pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    args = ("chat", pair.target, "--draft", "lookup", "--device", "cpu", "--learn", "--learn-file", tmp_path / "f")
    offspec(*args).refusal(2, "draft model", "--draft")


@pytest.mark.slow
def test_the_file_of_another_draft(
    pair: Pair, chat_args: Sequence[object], learnt: bytes, tmp_path: Path, offspec: Offspec
) -> None:
    file = tmp_path / "learnt"
    file.write_bytes(learnt)
    other = scale_weights(variant(pair.draft, tmp_path / "other"), {"lm_head.weight": 0.5})
    asked = offspec(*with_draft(chat_args, other), "--learn-file", file, "--learn")
    asked.refusal(2, file, "another draft")
    assert file.read_bytes() == learnt


def test_a_file_that_cannot_be_written(chat_args: Sequence[object], tmp_path: Path, offspec: Offspec) -> None:
    file = tmp_path / "no" / "folder"
    offspec(*chat_args, "--learn", "--learn-file", file).refusal(1, file, "written")


def test_a_file_that_is_something_else(
    chat_args: Sequence[object], pair: Pair, tmp_path: Path, offspec: Offspec
) -> None:
    weights = pair.draft / "model.safetensors"
    offspec(*chat_args, "--learn-file", weights).refusal(2, weights, "--learn")
    offspec(*chat_args, "--learn-file", tmp_path / "text").refusal(2, tmp_path / "text", "--learn")
    (tmp_path / "text").write_text("not weights")
    offspec(*chat_args, "--learn-file", tmp_path / "text").refusal(2, tmp_path / "text", "safetensors")
