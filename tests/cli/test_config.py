"""Settings: flags win over the environment, over the file, over defaults; what nobody knows is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, SpeculationParams

from ..refusals import tells
from .conftest import Offspec


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "config.toml"
    monkeypatch.setenv("OFFSPEC_CONFIG", str(found))
    return found


def told(offspec: Offspec, *names: str) -> dict[str, Any]:
    result = offspec("config", *names, "--json")
    assert (result.code, result.err) == (0, "")
    return {row["key"]: row for row in json.loads(result.out)["settings"]}


def test_the_strongest_wins(file: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not file.exists()
    monkeypatch.setenv("OFFSPEC_CONFIG", "")
    assert told(offspec, "chat")["temperature"] == {
        "key": "temperature", "value": "the model's", "source": "default", "commands": []
    }  # fmt: skip
    assert told(offspec, "run")["temperature"]["value"] == 0
    monkeypatch.setenv("OFFSPEC_CONFIG", str(file))
    file.write_text('temperature = 0.5\nstop = ["a", "b"]\n[chat]\ntemperature = 0.6\n')
    assert (told(offspec, "run")["temperature"]["value"], told(offspec, "chat")["temperature"]["value"]) == (0.5, 0.6)
    assert told(offspec, "chat")["stop"] == {"key": "stop", "value": ["a", "b"], "source": str(file), "commands": []}
    monkeypatch.setenv("OFFSPEC_TEMPERATURE", "0.7")
    found = told(offspec, "chat")["temperature"]
    assert (found["value"], found["source"]) == ("0.7", "OFFSPEC_TEMPERATURE")
    monkeypatch.setenv("OFFSPEC_CHAT_TEMPERATURE", "0.8")
    assert told(offspec, "chat")["temperature"]["source"] == "OFFSPEC_CHAT_TEMPERATURE"
    assert told(offspec, "run")["temperature"]["source"] == "OFFSPEC_TEMPERATURE"


def test_settings_reach_a_command_and_flags_win(
    file: Path, run_args: Any, pair: Any, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(f"model = '{pair.target}'\ndraft = 'none'\nseed = 5\nraw = true\nmax_new_tokens = 3\n")
    monkeypatch.setenv("OFFSPEC_DEVICE", "cpu")
    answer = json.loads(offspec("run", "--json", stdin=b"hi").out)
    assert (answer["model"], answer["draft"], answer["seed"]) == (str(pair.target), None, 5)
    assert len(answer["token_ids"]) == 3
    flagged = json.loads(offspec(*run_args, "hi", "--seed", 6, "--json").out)
    assert (flagged["seed"], flagged["draft"], len(flagged["token_ids"])) == (6, str(pair.draft), 6)


def test_one_text_where_several_may_be_given(
    file: Path, run_args: Any, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.touch()
    whole = json.loads(offspec(*run_args, "hi", "--json").out)["text"]
    assert len(whole) > 3
    file.write_text(f"stop = {json.dumps(whole[2:4])}\n")
    assert json.loads(offspec(*run_args, "hi", "--json").out)["text"] == whole[: whole.index(whole[2:4])]
    monkeypatch.setenv("OFFSPEC_STOP", whole[1:3])
    assert json.loads(offspec(*run_args, "hi", "--json").out)["text"] == whole[: whole.index(whole[1:3])]


def test_a_lone_argument_is_the_prompt_where_a_setting_names_the_model(
    file: Path, pair: Any, run_args: Any, offspec: Offspec
) -> None:
    file.touch()
    asked = json.loads(offspec(*run_args, "def area(", "--json").out)
    file.write_text(f"model = '{pair.target}'\ndraft = '{pair.draft}'\ndevice = 'cpu'\nmax-new-tokens = 6\n")
    assert json.loads(offspec("run", "def area(", "--json", stdin=b"").out)["token_ids"] == asked["token_ids"]
    assert json.loads(offspec("run", pair.draft, "--draft", "none", "--json", stdin=b"hi").out)["model"] == str(
        pair.draft
    )
    for model in ("./no-such-folder", "no/such/folder"):
        offspec("run", model, stdin=b"hi").refusal(1, model, "folder")
    file.write_text("")
    offspec("run", "def area(", stdin=b"hi").refusal(1, "def area(", "folder")


def test_a_byte_order_mark_is_no_part_of_the_file(file: Path, offspec: Offspec) -> None:
    file.write_text("temperature = 0.5", encoding="utf-8-sig")
    assert told(offspec, "run")["temperature"]["value"] == 0.5


def test_the_file_turns_off_what_is_on_by_default(
    file: Path, run_args: Any, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[SpeculationParams] = []
    generate = Engine.generate

    def spy(engine: Engine, prompt: Any, params: Any, speculation: Any, **more: Any) -> Any:
        given.append(speculation)
        return generate(engine, prompt, params, speculation, **more)

    monkeypatch.setattr(Engine, "generate", spy)
    file.write_text('without = ["lookup"]\n')
    (prompts := file.with_name("prompts.txt")).write_text("hi\n")
    small = ("--budgets", 4, "--repeats", "0+1")
    assert offspec("bench", *run_args[1:], "--prompts", prompts, *small, "-q").code == 0
    assert {(s.lookup, s.reuse, s.overlap) for s in given if s.budget} == {(False, True, True)}
    assert told(offspec, "bench")["without"]["value"] == ["lookup"]
    assert offspec(*run_args, "hi").code == 0, "a setting of another command is none of its own"
    file.write_text('[run]\nwithout = ["lookup"]\n')
    offspec(*run_args, "hi").refusal(2, "without", "offspec bench")


def test_the_table_says_where_commands_differ(file: Path, offspec: Offspec) -> None:
    file.write_text("[chat]\ntemperature = 0.7\n")
    lines = offspec("config").out.splitlines()
    assert lines[0] == str(file)
    assert any(line.split() == ["temperature", "0.7", str(file), "chat"] for line in lines)
    assert any(line.startswith("temperature ") and "0.0" in line and "default" in line for line in lines)


def test_a_file_that_is_not_there_yet(offspec: Offspec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OFFSPEC_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tells(offspec("config").out.splitlines()[0], "config.toml", "exist")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("temprature = 1", ("'temprature'", "'temperature'")),
        ("[chat]\nprompt-file = 'x'", ("offspec chat", "prompt-file")),
        ("[chta]\ntemperature = 1", ("command", "[chta]", "'chat'")),
        ("temperature = 'hot'", ("temperature", "'hot'")),
        ("ram = 20", ("ram", "20", "unit")),
        ("temperature = ", ("TOML",)),
    ],
)
def test_what_cannot_be_meant(content: str, words: tuple[str, ...], file: Path, offspec: Offspec) -> None:
    file.write_text(content)
    shown = offspec("config")
    assert (shown.code, shown.out.splitlines()[0], len(shown.err.splitlines())) == (2, str(file), 1)
    assert any(line.split()[:3] == ["temperature", "0.0", "default"] for line in shown.out.splitlines())
    for message in (shown.err, offspec("run", "builtin", "hi").refusal(2)):
        assert tells(message, file, *words)
    for help_flags in (("--help",), ("run", "--help"), ("run", "--help-all"), ("chat", "-h")):
        assert offspec(*help_flags).code == 0


def test_everything_that_cannot_be_meant_is_told_beside_what_can(
    file: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("temprature = 1\ntemperature = 'hot'\nseed = 5\n")
    monkeypatch.setenv("OFFSPEC_NONSENSE", "1")
    result = offspec("config", "run", "--json")
    assert result.code == 2
    rows = {row["key"]: row for row in json.loads(result.out)["settings"]}
    assert (rows["temperature"]["source"], rows["seed"]["value"]) == ("default", 5)
    first, second, last = result.err.splitlines()
    assert tells(first, "OFFSPEC_NONSENSE")
    assert tells(second, "'temprature'")
    assert last.startswith("Error: ")
    assert tells(last, file, "temperature", "'hot'", "number")


def test_a_key_is_not_shown(file: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[serve]\napi-key = 'hush'\n")
    for flags in ((), ("--json",)):
        shown = offspec("config", *flags).out
        assert ("hush" in shown, "(set)" in shown) == (False, True)
    file.write_text("")
    assert told(offspec, "serve")["api-key"]["value"] is None
    monkeypatch.setenv("OFFSPEC_API_KEY", "hush")
    assert told(offspec, "serve")["api-key"]["value"] == "(set)"


def test_variables_that_cannot_be_meant(offspec: Offspec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offspec("config", "chta").refusal(2, "'chta'", "chat")
    monkeypatch.setenv("OFFSPEC_CONFIG", str(tmp_path / "none.toml"))
    assert tells(offspec("config").err, tmp_path / "none.toml", "OFFSPEC_CONFIG")
    monkeypatch.setenv("OFFSPEC_CONFIG", "/dev/zero")
    assert tells(offspec("config").err, "/dev/zero", "device")
    (nested := tmp_path / "nested.toml").write_text("a = " + "[" * 100_000)
    monkeypatch.setenv("OFFSPEC_CONFIG", str(nested))
    assert tells(offspec("config").err, nested, "TOML")
    monkeypatch.setenv("OFFSPEC_CONFIG", "")
    monkeypatch.setenv("OFFSPEC_TEMP", "1")
    assert tells(offspec("config").err, "OFFSPEC_TEMP", "'temp'")
    monkeypatch.delenv("OFFSPEC_TEMP")
    monkeypatch.setenv("OFFSPEC_CHAT_TOP_P", "7")
    assert tells(offspec("config").err, "OFFSPEC_CHAT_TOP_P", "top-p")
    offspec("chat", stdin=b"").refusal(2, "OFFSPEC_CHAT_TOP_P")
