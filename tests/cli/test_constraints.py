"""Flags and keys that say what an answer must be, in `run`, prompt files, `chat` and `verify`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offspec import Constraint
from offspec.cli.constraints import constraint_in
from offspec.errors import UsageError

from ..pair import Pair
from ..refusals import refused, tells
from .conftest import Offspec

SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 1}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "answer.gbnf").write_text('root ::= "yes" | "no"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (("--json-schema", "schema.json"), r'\["(red|green)"\]'),
        (("--grammar", "answer.gbnf"), "yes|no"),
        (("--grammar", "/[a-c]{4}/"), "[a-c]{4}"),
        (("--json-schema", "object", "-n", "40"), r"\{.*\}"),
    ],
    ids=str,
)
def test_run_obeys(
    files: Path, monkeypatch: pytest.MonkeyPatch, run_args: Sequence[object], offspec: Offspec, flags: Any, pattern: str
) -> None:
    monkeypatch.chdir(files)
    result = offspec(*run_args, "hi", *flags)
    assert (result.code, result.err) == (0, "") or tells(result.err, "cut")
    assert re.fullmatch(pattern, result.out.strip()) or tells(result.err, "cut")


def test_a_cut_answer_is_told_although_the_limit_was_given(run_args: Sequence[object], offspec: Offspec) -> None:
    result = offspec(*run_args, "hi", "--grammar", "/[a-c]{400}/")
    assert result.code == 0
    assert tells(result.err, "6", "constraint", "--max-new-tokens")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--grammar", "/a/", "--json-schema", "object"), ["--grammar", "--json-schema"]),
        (("--json-schema", "missing.json"), ["missing.json"]),
        (("--grammar", "/a(/"), ["regex"]),
        (("--json-schema", '{"uniqueItems": true, "type": "array"}'), ["uniqueItems"]),
    ],
    ids=str,
)
def test_run_refuses(run_args: Sequence[object], offspec: Offspec, flags: Any, words: Sequence[str]) -> None:
    offspec(*run_args, "hi", *flags).refusal(2, *words)


def test_lines_name_their_own(tmp_path: Path, run_args: Sequence[object], offspec: Offspec) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "hi"},
        {"prompt": "hi", "json_schema": SCHEMA},
        {"prompt": "hi", "grammar": 'root ::= "maybe"'},
        {"prompt": "hi", "regex": 5},
        {"prompt": "hi", "regex": "a", "json_object": True},
        {"prompt": "hi", "regex": "a("},
    ]
    source, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    command = (*run_args, "--prompt-file", source, "--output", output, "-n", 12, "--grammar", "/[xy]{2}/")
    result = offspec(*command)
    found = {record["line"]: record for record in map(json.loads, output.read_text().splitlines())}
    assert re.fullmatch("[xy]{2}", found[1]["text"])
    assert json.loads(found[2]["text"]) in (["red"], ["green"])
    assert found[3]["text"] == "maybe"
    assert found[3]["settings"]["constraint"] == {"kind": "grammar", "text": 'root ::= "maybe"'}
    assert (result.code, sorted(found)) == (1, [1, 2, 3])
    assert tells(result.err, "line 4", "line 5", "line 6")
    assert offspec(*command).code == 1
    assert len(output.read_text().splitlines()) == 3, "answered lines are skipped"


def test_a_chat_turns_a_constraint_on_and_off(pair: Pair, offspec: Offspec) -> None:
    lines = "/set grammar /[xy]{3}/\nhi\n/set grammar /a(/\nhi\n/set grammar none\nhi\n"
    result = offspec("chat", pair.target, "--draft", pair.draft, "--device", "cpu", "-n", "8", stdin=lines.encode())
    assert re.search("\n[xy]{3}\n", result.out)
    assert tells(result.err, "regex", "unclosed group", "1 line failed")


def test_verify_compares_constrained_texts(pair: Pair, offspec: Offspec, tmp_path: Path) -> None:
    (prompts := tmp_path / "prompts.txt").write_text("def area(\n")
    settings = ("--temperatures", "0,1", "--budgets", "8", "--scorings", "coupled", "-n", "8", "--json")
    result = offspec(
        "verify", pair.target, "--draft", pair.draft, "--prompts", prompts, "--grammar", "/([a-c]|dd){9}/", *settings
    )
    found = json.loads(result.out)
    assert (found["exact"], found["settings"][0]["constraint"]["kind"]) == (True, "regex")


def test_keys() -> None:
    default = Constraint.json_object()
    assert constraint_in({"prompt": "", "json_schema": None, "json_object": False}, default) is default
    assert constraint_in({"json_schema": '{"type": "null"}'}, None) == Constraint.json_schema('{"type": "null"}')
    with refused(UsageError, "json_schema"):
        constraint_in({"json_schema": [1]}, None)
    with refused(UsageError, "json_object"):
        constraint_in({"json_object": "yes"}, None)
