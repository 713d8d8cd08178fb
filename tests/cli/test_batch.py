"""`offspec run --prompt-file prompts.jsonl`: every line that can be done is, once, and the others are told."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, SamplingParams
from offspec.cli.batch import Asked, PromptBatch
from offspec.errors import NumericalError
from offspec.running import batch as shared
from offspec.scheduler.drafting import drafter
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import Logits, Verdict
from offspec.text.tokenizer import Tokenizer

from ..pair import CONTEXT, Pair
from ..refusals import tells
from .conftest import Offspec, Result, finish, start

GOOD = (
    '{"prompt": "hi", "id": "a"}',
    '{"messages": [{"role": "user", "content": "sch\\u00f6n"}]}',
    '{"prompt": "more"}',
)
Run = Callable[..., Result]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(GOOD) + "\n\n")
    return file


@pytest.fixture
def batch(source: Path, run_args: Sequence[object], offspec: Offspec) -> Run:
    return lambda *flags: offspec(*run_args, "--prompt-file", source, *flags)


def records(text: str) -> list[dict[str, Any]]:
    """The answers by their lines: texts that share passes end in any order."""
    return sorted(map(json.loads, text.splitlines()), key=lambda answer: answer["line"])


def test_each_line_is_answered_as_alone(batch: Run, run_args: Sequence[object], offspec: Offspec) -> None:
    result = batch()
    assert (result.code, result.err) == (0, "")
    answers = records(result.out)
    assert [answer["line"] for answer in answers] == [1, 2, 3]
    assert (answers[0]["id"], answers[0]["prompt"]) == ("a", "hi")
    for answer, prompt in zip(answers, ("hi", "schön", "more"), strict=True):
        alone = json.loads(offspec(*run_args, prompt, "--json").out)
        same = ("text", "token_ids", "prompt_token_ids", "finish_reason", "model", "draft")
        assert {key: answer[key] for key in same} == {key: alone[key] for key in same}


def test_a_stopped_run_goes_on(batch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "answers.jsonl"
    assert batch("--output", output).out == ""
    whole = output.read_bytes()
    first, second, _ = whole.splitlines(keepends=True)
    output.write_bytes(first + second[:30])
    result = batch("--output", output)
    assert (result.code, result.out) == (0, "")
    assert "1 of 3 prompts were answered before" in result.err
    again = records(output.read_text())
    assert [(a["line"], a["text"]) for a in again] == [(a["line"], a["text"]) for a in records(whole.decode())]
    assert output.read_bytes().startswith(first)
    monkeypatch.setattr(Engine, "load", None)  # nothing is left to do, so nothing is loaded
    assert "3 of 3" in batch("--output", output).err
    assert batch("--output", output, "-q").err == ""


def test_misspelt_keys_are_told_once(batch: Run, source: Path) -> None:
    lines = ['{"prompt": "hi", "max_new_tokns": 2, "step": 1}', '{"prompt": "ho", "max_new_tokns": 2}', GOOD[2]]
    source.write_text("\n".join(lines))
    result = batch()
    assert (result.code, len(records(result.out))) == (0, 3)
    (line,) = result.err.splitlines()
    assert tells(line, "line 1", "'max_new_tokns'", "'max_new_tokens'", "1 more")
    assert batch("--quiet").err == ""


def test_a_broken_line_is_told_and_the_others_are_done(batch: Run, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    lines = [GOOD[0], '{"prompt": ', *GOOD[1:]]
    source.write_text("\n".join(lines))
    result = batch("--output", output)
    told, last = result.err.splitlines()
    assert (result.code, result.out) == (1, "")
    assert tells(told, source, "line 2", "JSON")
    assert last.startswith("Error: ")
    assert tells(last, "1 of 4", source, "(2)")
    assert [answer["line"] for answer in records(output.read_text())] == [1, 3, 4]
    lines[1] = '{"prompt": "late"}'
    source.write_text("\n".join(lines))
    assert batch("--output", output).code == 0
    assert [answer["line"] for answer in records(output.read_text())] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1]", ("object", "prompt", "messages")),
        (b'{"prompt": "a", "messages": []}', ("object", "prompt", "messages")),
        (b'{"messages": [{"role": "user"}]}', ('"messages"', "list")),
        (b'{"prompt": "a", "text": "b"}', ("'text'",)),
        (b'{"prompt": "\xff"}', ("UTF-8", "byte 12")),
        (b'{"prompt": "%s"}' % (b"x" * 500), ("context", CONTEXT)),
        (b'{"messages": [{"role": "odd", "content": "\\ud800"}]}', ("encoded",)),
    ],
)
def test_lines_that_cannot_be_done(line: bytes, words: Sequence[object], batch: Run, source: Path) -> None:
    source.write_bytes(line + b"\n" + GOOD[0].encode())
    result = batch()
    assert (result.code, [answer["line"] for answer in records(result.out)]) == (1, [2])
    assert tells(result.err.splitlines()[0], "line 1", *words)


def test_a_failure_while_running_is_told_and_the_others_are_done(
    batch: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = drafter.verify_exactly

    def fail(tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
        if position > 8:
            raise NumericalError("the logits are not finite")
        return walk(tree, logits, sampler, position)

    monkeypatch.setattr(drafter, "verify_exactly", fail)
    result = batch("--max-new-tokens", 1)
    assert result.code == 1
    told, last = result.err.splitlines()
    assert tells(told, "line 2", "the logits are not finite")
    assert tells(last, "1 of 3", source)
    assert [answer["line"] for answer in records(result.out)] == [1, 3]


def test_a_line_has_settings_of_its_own(
    batch: Run, run_args: Sequence[object], offspec: Offspec, source: Path, tmp_path: Path
) -> None:
    own = {"max_new_tokens": 5, "temperature": 0.9, "seed": 3, "top_k": 20, "repetition_penalty": 1.5}
    lines = [{"prompt": "hi", **own}, {"prompt": "hi"}, {"prompt": "hi", "seed": None, "max_tokens": 4}]
    source.write_text("\n".join(map(json.dumps, lines)))
    output = tmp_path / "answers.jsonl"
    assert batch("--output", output).code == 0
    first, second, third = records(output.read_text())
    flags = [part for key, value in own.items() for part in (f"--{key.replace('_', '-')}", value)]
    alone = json.loads(offspec(*run_args, "hi", *flags, "--json").out)
    assert (first["token_ids"], first["seed"]) == (alone["token_ids"], 3)
    assert [len(answer["token_ids"]) for answer in (first, second, third)] == [5, 6, 4]
    assert first["settings"].items() >= own.items()
    assert (second["settings"]["max_new_tokens"], third["settings"]["seed"]) == (6, None)
    assert batch("--output", output).code == 0
    source.write_text(source.read_text().replace("0.9", "0.8"))
    batch("--output", output).refusal(2, "settings", "line 1", "--output")


@pytest.mark.parametrize("own", ['"temperature": "hot"', '"max_new_tokens": 0'])
def test_settings_of_a_line_that_cannot_be_followed(own: str, batch: Run, source: Path) -> None:
    source.write_text(f'{{"prompt": "hi", {own}}}\n{GOOD[2]}')
    result = batch()
    assert (result.code, [answer["line"] for answer in records(result.out)]) == (1, [2])
    assert tells(result.err, "line 1", own.split(chr(34))[1])


def test_a_dash_is_standard_output(batch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert [answer["line"] for answer in records(batch("--output", "-").out)] == [1, 2, 3]
    assert set(tmp_path.iterdir()) == before


def test_how_long_the_rest_takes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run answered counts as done, and not for the pace."""
    output, shown, now = tmp_path / "answers.jsonl", list[str](), 0.0

    def answers(prompts: Sequence[Asked]) -> Generator[tuple[int, dict[str, Any]], None, None]:
        nonlocal now
        for place in range(len(prompts)):
            now += 10
            yield place, {}

    def answer_all() -> None:
        with closing(PromptBatch(source, output, {}, SamplingParams())) as batch:
            batch.collect(answers, quiet=False)

    monkeypatch.setattr("offspec.cli.terminal.is_watched", lambda: True)
    monkeypatch.setattr("offspec.cli.terminal.show_line", lambda text="": shown.append(text))
    monkeypatch.setattr("time.monotonic", lambda: now)
    answer_all()
    assert shown == ["prompt 1 of 3", "prompt 2 of 3, 20 s left", "prompt 3 of 3, 10 s left", ""]
    output.write_bytes(output.read_bytes().splitlines(keepends=True)[0])
    shown.clear()
    answer_all()
    assert shown == ["prompt 2 of 3", "prompt 3 of 3, 10 s left", ""]


def test_an_output_of_something_else_is_left_alone(batch: Run, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    batch("--output", output)
    before = output.read_bytes()
    batch("--output", output, "--temperature", "0.5").refusal(2, "line 1", "--output")
    source.write_text(source.read_text().replace("hi", "ho"))
    batch("--output", output).refusal(2, output, "line 1", "--output")
    assert output.read_bytes() == before
    output.write_text("notes of mine\n")
    batch("--output", output).refusal(2, output, "line 1", "answer", "--output")
    assert output.read_text() == "notes of mine\n"
    for line in ("[" * 100_000, '{"line": 1'):
        output.write_text(f"{line}\n")
        batch("--output", output).refusal(2, output, "line 1", "answer", "--output")
    output.write_text('{"line": 1, "score": 2}\n{"line": 2}')
    batch("--output", output).refusal(2, output, "another prompt", "line 1", "--output")
    assert output.read_text() == '{"line": 1, "score": 2}\n{"line": 2}'


def test_the_prompt_file_is_never_the_output(batch: Run, source: Path, tmp_path: Path) -> None:
    before, link = source.read_bytes(), tmp_path / "link.jsonl"
    link.symlink_to(source)
    for output in (source, link, tmp_path / "x" / ".." / source.name):
        (tmp_path / "x").mkdir(exist_ok=True)
        batch("--output", output).refusal(2, output, "prompt file", "--output")
    assert source.read_bytes() == before


def test_an_output_that_cannot_be_written_is_refused_first(
    batch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", None)
    output = tmp_path / "no" / "folder.jsonl"
    batch("--output", output).refusal(1, output, "written")


def test_an_output_whose_disk_fills_up_is_named(batch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, content: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output = tmp_path / "answers.jsonl"
    monkeypatch.setattr(PromptBatch, "_locked", lambda self, output: Full(output, "a+"))
    batch("--output", output).refusal(1, output, "No space left", "free")


def test_another_arithmetic_gives_other_answers(batch: Run, tmp_path: Path) -> None:
    assert batch("--output", tmp_path / "answers.jsonl").code == 0
    batch("--output", tmp_path / "answers.jsonl", "--dtype", "bf16").refusal(2, "settings", "--output")


def test_what_is_no_number_is_answered_once(
    batch: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text('{"prompt": "hi", "score": NaN}')
    assert batch("--output", tmp_path / "answers.jsonl").code == 0
    monkeypatch.setattr(Engine, "load", None)
    assert batch("--output", tmp_path / "answers.jsonl").code == 0


def test_what_lossy_answers_depend_on_is_remembered(batch: Run, tmp_path: Path) -> None:
    joint, output = ("--accept", "joint"), tmp_path / "answers.jsonl"
    assert batch("--output", output, *joint, "--tau", "0.3").code == 0
    whole = output.read_bytes()
    settings = records(whole.decode())[0]["settings"]
    assert settings.items() >= {"accept": "joint", "tau": 0.3, "beam": 8, "gamma": 16}.items()
    assert batch("--output", output, *joint, "--tau", "0.3").code == 0
    batch("--output", output, *joint, "--tau", "0.4").refusal(2, "settings", "--output")
    assert output.read_bytes() == whole
    exact = tmp_path / "exact.jsonl"
    assert batch("--output", exact).code == 0
    assert "tau" not in records(exact.read_text())[0]["settings"]  # how it was guessed does not matter there


def test_what_cannot_be_meant(batch: Run, run_args: Sequence[object], offspec: Offspec, tmp_path: Path) -> None:
    batch("hi").refusal(2, "PROMPT", "--prompt-file")
    offspec(*run_args, "hi", "--output", tmp_path / "x").refusal(2, "--output", "--prompt-file")


def test_a_file_without_a_prompt_is_refused_and_a_byte_order_mark_is_no_part_of_the_first_line(
    batch: Run, source: Path
) -> None:
    source.write_text("\n")
    batch().refusal(2, source, "no prompt")
    source.write_text(GOOD[0], encoding="utf-8-sig")
    assert [answer["line"] for answer in records(batch().out)] == [1]


def test_a_system_message_comes_before_messages_that_have_none(batch: Run, pair: Pair, source: Path) -> None:
    source.write_text(
        '{"prompt": "hi"}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
        '{"messages": [{"role": "system", "content": "Sing."}, {"role": "user", "content": "hi"}]}\n'
    )
    tokenizer = Tokenizer.load(pair.target)
    asked = [
        tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
        for answer in records(batch("--system", "Be brief.").out)
    ]
    assert asked[0] == asked[1] == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    assert asked[2] == "<|system|>Sing.<|end|><|user|>hi<|end|><|assistant|>"


def test_messages_are_not_raw(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", None)
    batch("--raw").refusal(2, "line 2", "messages", "chat template", "--raw")


def test_a_text_that_ctrl_c_ended_is_no_answer(batch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, run_pass, num_passes = tmp_path / "answers.jsonl", shared.run_pass, 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        if num_passes > 1 and len(output.read_bytes()):
            raise KeyboardInterrupt
        return run_pass(*args)

    monkeypatch.setattr(shared, "run_pass", interrupted)
    result = batch("--output", output, "--stats", "--batch", 1)
    assert (result.code, [answer["line"] for answer in records(output.read_text())]) == (130, [1])
    assert result.err.startswith("batch     1 prompts (1 length), ")


def test_two_runs_do_not_write_to_one_output(
    batch: Run, source: Path, run_args: Sequence[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused before it loads a model, whenever it comes, and the first loses nothing."""
    output, load, refusals = tmp_path / "answers.jsonl", Engine.load, list[str]()

    def loading(*args: Any, **more: Any) -> Engine:
        other = finish(start(*run_args, "--prompt-file", source, "--output", output))
        refusals.append(other.refusal(2))
        return load(*args, **more)

    monkeypatch.setattr(Engine, "load", loading)
    assert batch("--output", output).code == 0
    assert tells(refusals[0], output, "another process")
    assert [answer["line"] for answer in records(output.read_text())] == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir() if file not in (source, output)] == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_an_output_that_is_no_file_is_refused(batch: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path / "pipe", Path("/dev/zero")):
        batch("--output", output).refusal(2, output, "regular file", "--output")
