"""What cannot work is refused in one line, with the right exit code, and nothing on stdout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ..pair import CONTEXT, Pair, scale_weights, variant
from ..refusals import tells
from .conftest import Offspec

Breaker = Callable[[Path, Pair], tuple[Path, Sequence[str]]]


def a_file(folder: Path, pair: Pair) -> tuple[Path, Sequence[str]]:
    return pair.target / "model.safetensors", ("the folder",)


def no_tokenizer(folder: Path, pair: Pair) -> tuple[Path, Sequence[str]]:
    variant(pair.target, folder)
    (folder / "tokenizer.json").unlink()
    return folder, ("tokenizer.json",)


def truncated_weights(folder: Path, pair: Pair) -> tuple[Path, Sequence[str]]:
    weights = variant(pair.target, folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder, ("truncated", "download")


def unsupported_architecture(folder: Path, pair: Pair) -> tuple[Path, Sequence[str]]:
    variant(pair.target, folder, model_type="mamba", architectures=["MambaForCausalLM"])
    return folder, ("mamba", "recurrent")


def other_shape(folder: Path, pair: Pair) -> tuple[Path, Sequence[str]]:
    variant(pair.target, folder, intermediate_size=64)
    return folder, ("[48, 32]", "[64, 32]")


def not_a_number(folder: Path, pair: Pair) -> tuple[Path, Sequence[str]]:
    scale_weights(variant(pair.target, folder), {"model.norm.weight": float("nan")})
    return folder, ("not finite", "--dtype fp32")


BREAKERS: list[Breaker] = [a_file, no_tokenizer, truncated_weights, unsupported_architecture, other_shape, not_a_number]


@pytest.mark.parametrize("breaker", BREAKERS)
def test_a_model_that_cannot_run(breaker: Breaker, pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    model, words = breaker(tmp_path / "model", pair)
    where = () if breaker is not_a_number else (model,)
    offspec("run", model, "hi", "--draft", "none", "--device", "cpu", "--json").refusal(1, *where, *words)


@pytest.mark.parametrize("line", [("run", ""), ("run", "builtin", "--draft", "")])
def test_an_empty_name_is_refused(line: Sequence[str], offspec: Offspec) -> None:
    """As `"$(command)"` is if the command fails."""
    offspec(*line, stdin=b"hi").refusal(2, "empty", "a folder, a GGUF file", "$(...)")


def test_a_draft_with_another_vocabulary(pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    folder = variant(pair.draft, tmp_path / "draft")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    result = offspec("run", pair.target, "hi", "--draft", folder, "-n", 2)
    assert (result.code, len(result.out) > 0) == (0, True)
    assert tells(result.err, "draft", "vocabulary")


@pytest.mark.parametrize(
    ("num_words", "flags", "words"),
    [
        (100_000, (), ("the model's context", CONTEXT)),
        (CONTEXT, ("-c", 64), ("the planned context", "--context", f"up to {CONTEXT}")),
    ],
)
def test_a_prompt_longer_than_the_context(
    run_args: Sequence[object],
    num_words: int,
    flags: Sequence[object],
    words: Sequence[object],
    tmp_path: Path,
    offspec: Offspec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before weights are read; in one way, whether its tokens were counted or are too many to count."""
    monkeypatch.setattr("offspec.loading.load_planned", None)
    (file := tmp_path / "long.txt").write_text("x " * num_words)
    offspec(*run_args, *flags, "--prompt-file", file).refusal(1, "the prompt has", "shorten the prompt", *words)


def test_a_prompt_that_leaves_room_for_one_token(run_args: Sequence[object], tmp_path: Path, offspec: Offspec) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [40] * number}) + "\n" for number in (CONTEXT - 1, CONTEXT)))
    result = offspec(*run_args, "--prompt-file", prompts, "--budget", "256")
    assert result.code == 1
    assert len(json.loads(result.out)["token_ids"]) == 1
    assert tells(result.err.splitlines()[0], "line 2", "context", CONTEXT)


@pytest.mark.parametrize(
    "flags",
    [
        ("--budget", "many"),
        ("--budget", "9" * 5000),
        ("--max-new-tokens", "0"),
        ("--seed", str(2**64)),
        ("--threads", "0"),
        ("--dtype", "int3"),
        ("--device", "cuda:999"),
        ("--device", "two\nlines"),
        ("--accept", "lossy"),
        ("--temperature", "0.5", "--accept", "joint"),
        ("--draft", "none", "--accept", "joint"),
        ("--no-such-flag",),
    ],
    ids=lambda flags: " ".join(flags)[:40],
)
def test_a_flag_that_cannot_be_meant(flags: Sequence[str], run_args: Sequence[object], offspec: Offspec) -> None:
    message = offspec(*run_args, "hi", *flags).refusal(2)
    assert flags[0].removeprefix("--") in message.replace("_", "-")


@pytest.mark.parametrize(
    "flags",
    [("--draft-scoring", "foo"), ("--beam", "300", "--accept", "joint"), ("--tree", "sequoia", "--accept", "joint")],
    ids=" ".join,
)
def test_a_flag_of_research_that_cannot_be_meant(
    flags: Sequence[str], run_args: Sequence[object], offspec: Offspec
) -> None:
    message = offspec("bench", *run_args[1:], *flags).refusal(2)
    assert flags[0].removeprefix("--").removeprefix("draft-") in message.replace("_", "-")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (("hi", "--prompt-file", __file__), ("--prompt-file",)),
        (("--prompt-file", "."), ("--prompt-file",)),
        (("hi", "--raw", "--system", "Be brief."), ("--raw", "--system")),
        (("", "--raw"), ("prompt", "empty")),
        ((), ("--prompt-file",)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_prompt_that_cannot_be_meant(
    prompt: Sequence[str], words: Sequence[object], run_args: Sequence[object], offspec: Offspec
) -> None:
    offspec(*run_args, *prompt).refusal(2, *words)


def test_input_that_does_not_end_is_refused(
    run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.cli.reading.MOST_TEXT_BYTES", 1 << 20)
    offspec(*run_args, stdin=b"a" * (2 << 20)).refusal(2, "1 MiB", "standard input")
    chat = offspec("chat", *run_args[1:], stdin=b"a" * (2 << 20) + b"\nhi\n")
    assert chat.code == 1
    assert len(chat.out.strip()) > 0
    first, last = [line for line in chat.err.splitlines() if line.startswith("Error: ")]
    assert tells(first, "1 MiB", "line", "standard input")
    assert tells(last, "1 line")


def test_bytes_that_are_no_text(run_args: Sequence[object], tmp_path: Path, offspec: Offspec) -> None:
    latin = "é".encode("latin-1")
    (tmp_path / "latin.txt").write_bytes(latin)
    offspec(*run_args, stdin=latin).refusal(2, "standard input", "UTF-8")
    offspec(*run_args, "--prompt-file", tmp_path / "latin.txt").refusal(2, tmp_path / "latin.txt", "UTF-8")
    offspec(*run_args, latin.decode("utf-8", "surrogateescape")).refusal(2, "PROMPT", "UTF-8")


def test_verbose_shows_where(tmp_path: Path, offspec: Offspec) -> None:
    result = offspec("run", tmp_path / "model", "hi", "-v")
    assert result.code == 1
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("Error: ")


def test_even_our_own_mistakes_are_one_line(
    run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter((ArithmeticError("no such\nnumber"), MemoryError("cannot allocate\n64 GiB")))

    def fail(*args: object, **more: object) -> None:
        raise next(errors)

    monkeypatch.setattr("offspec.scheduler.drafting.drafter.verify_exactly", fail)
    offspec(*run_args, "hi").refusal(1, "ArithmeticError", "no such number")
    offspec(*run_args, "hi").refusal(1, "memory", "cannot allocate 64 GiB", "--context")


def test_a_folder_that_may_not_be_listed_is_named(pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    folder = variant(pair.target, tmp_path / "model")
    shutil.rmtree(folder)
    folder.symlink_to(folder)  # a loop: it is there, and cannot be opened
    offspec("run", folder, "hi", "--draft", "none").refusal(1, folder)
