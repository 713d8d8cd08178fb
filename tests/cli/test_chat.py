"""`offspec chat` through a pipe: replies, commands, and mistakes that are told and cost nothing."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine
from offspec.cli import chat as chat_module
from offspec.cli import terminal
from offspec.cli.line_input import line_editor, open_history, unquoted
from offspec.cli.main import run
from offspec.cli.terminal import CONTROLS, wrapped

from ..pair import CONTEXT, Pair, variant
from ..refusals import check_message, tells
from .conftest import Keyboard, Offspec, Result

Talk = Callable[..., Result]


@pytest.fixture
def talk(pair: Pair, offspec: Offspec) -> Talk:
    """A conversation with the tiny pair: lines in, what was shown out."""

    def call(*lines: str, flags: Sequence[object] = ()) -> Result:
        stdin = "".join(f"{line}\n" for line in lines).encode()
        args = ("chat", pair.target, "--draft", pair.draft, "--device", "cpu", "--max-new-tokens", 8, *flags)
        return offspec(*args, stdin=stdin)

    return call


def saved(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_a_pipe_drives_it(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    result = talk("hi", "", '"""', "two", "lines", '"""', '"""one"""', f"/save {file}", "/exit", "not this")
    assert result.code == 0
    turns = saved(file)["turns"]
    assert [turn["message"] for turn in turns] == ["hi", "two\nlines", "one"]
    assert result.out == "".join(turn["reply"].rstrip("\n") + "\n" for turn in turns)
    assert "3 turns saved" in result.err


def test_stats_tell_what_was_prefilled(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    result = talk("hi", "and?", "more", "/stats", f"/save {file}")
    rows = [line.split() for line in result.out.splitlines() if line.split()[:1] in (["1"], ["2"], ["3"])]
    prompt, new, reply = ([int(row[column]) for row in rows[-3:]] for column in (1, 2, 3))
    assert new[0] == prompt[0]
    for k in (1, 2):
        held = prompt[k - 1] + reply[k - 1]  # the last one only where it was a guess, as the end of a text may be
        assert new[k] in {prompt[k] - held, prompt[k] - held + 1}
    assert "of 128 tokens of context used" in result.out


def test_stats_tell_the_seed_that_was_drawn(talk: Talk, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    told = talk("hi", "/stats", f"/save {first}", flags=("--temperature", 1)).out.splitlines()
    assert told[-3].split()[-1] == "seed"
    talk(f"/set seed {told[-2].split()[-1]}", "hi", f"/save {second}", flags=("--temperature", 1))
    assert saved(second)["turns"] == saved(first)["turns"]


@pytest.fixture
def sampling_model(pair: Pair, tmp_path: Path) -> Path:
    """Its authors recommend sampling."""
    folder = variant(pair.target, tmp_path / "model")
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return folder


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ((), {"temperature": 0.6, "top-k": 20, "top-p": 1, "repetition-penalty": 1.05}),
        (("--temperature", 0.9, "--top-k", 0), {"temperature": 0.9, "top-k": 0, "repetition-penalty": 1.05}),
        (("--draft", "builtin", "--accept", "joint"), {"temperature": 0, "top-k": 0, "repetition-penalty": 1}),
    ],
)
def test_a_chat_samples_as_the_model_recommends(
    sampling_model: Path, pair: Pair, offspec: Offspec, flags: Sequence[object], wanted: dict[str, float]
) -> None:
    flags = [pair.draft if flag == "builtin" else flag for flag in flags]
    shown = offspec("chat", sampling_model, "--device", "cpu", *flags, stdin=b"/set\n")
    assert shown.code == 0, shown
    settings = dict(line.split()[:2] for line in shown.out.splitlines() if line.strip())
    assert {name: float(settings[name]) for name in wanted} == wanted


def test_a_saved_conversation_keeps_its_own_sampling(sampling_model: Path, offspec: Offspec, tmp_path: Path) -> None:
    chat, file = ("chat", sampling_model, "--draft", "none", "--device", "cpu", "-n", 4), tmp_path / "talk.json"
    offspec(*chat, "--temperature", 0, stdin=f"hi\n/save {file}\n".encode())
    shown = offspec(*chat, "--load", file, stdin=b"/set temperature 0\n/show\n")
    assert "greedy" in shown.out
    assert saved(file)["settings"]["repetition-penalty"] == 1


def test_the_banner_names_models_without_folders_and_the_sampling(
    sampling_model: Path, pair: Pair, offspec_at_terminal: Offspec
) -> None:
    shown = offspec_at_terminal("chat", sampling_model, "--draft", pair.draft, "--device", "cpu", "--no-autosave")
    banner = shown.out.splitlines()[0]
    assert banner.startswith("model, draft draft, temperature 0.6, top-k 20, repetition-penalty 1.05. ")
    assert str(sampling_model.parent) not in shown.out


def test_files_of_others_are_not_overwritten(talk: Talk, tmp_path: Path) -> None:
    chat, exported, notes = tmp_path / "talk.json", tmp_path / "talk.md", tmp_path / "notes"
    notes.write_text("precious")
    result = talk("hi", f"/save {chat}", f"/save {chat}", f"/export {exported}", f"/export {exported}")
    assert (result.code, "1 turn saved" in result.err) == (0, True)
    result = talk("ho", f"/save {chat}", f"/save {notes}", f"/save {exported}", f"/export {notes}", f"/export {chat}")
    assert [f"{file} exists" in result.err for file in (chat, exported, notes)] == [True, True, True]
    assert (result.err.count("not a saved chat"), "4 lines" in result.err) == (2, True)
    assert (notes.read_text(), [turn["message"] for turn in saved(chat)["turns"]]) == ("precious", ["ho"])


def test_commands_change_the_conversation(talk: Talk, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    result = talk(
        *("/system Be brief.", "/system", "hi", "more", f"/save {first}", "/undo", "/edit other", "/regen"),
        *(f"/save {second}", "/clear", "/show", f"/load {first}", "/show", f"/export {tmp_path / 'talk.md'}", "/help"),
    )
    assert result.code == 0, result
    assert [turn["message"] for turn in saved(first)["turns"]] == ["hi", "more"]
    assert [turn["message"] for turn in saved(second)["turns"]] == ["other"]
    assert saved(second)["system"] == "Be brief."
    assert tells(result.err, "temperature is 0", "/set temperature 0.7")
    assert "0 turns" in result.out
    assert ">>> more" in result.out
    assert "## You\n\nmore" in (tmp_path / "talk.md").read_text()
    for name in chat_module.COMMANDS:
        assert f"\n/{name}" in f"\n{result.out}"


def test_what_happens_when_the_context_is_full_can_be_set(talk: Talk, tmp_path: Path) -> None:
    first, file = tmp_path / "first.json", tmp_path / "talk.json"
    long = "word " * 12
    dropped = talk(*[long] * 4, f"/save {first}")
    assert (dropped.code, saved(first)["turns"][-1]["num_dropped"] > 0) == (0, True)
    refused = talk("/set when_full stop", *[long] * 4, f"/save {file}")
    assert (refused.code, refused.out.splitlines()[0]) == (1, "when-full stop")
    assert tells(refused.err, "context", 128)
    assert saved(file)["settings"]["when-full"] == "stop"
    assert tells(talk(f"/load {file}", long, long).err, "context", 128)


def test_a_note_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"name   a number of words\n{'word ' * 9}--a-long-flag /a/path/that/is/long"
    assert wrapped(text) == text
    monkeypatch.setattr(terminal, "is_watched", lambda: True)
    monkeypatch.setattr(terminal, "columns", lambda: 24)
    assert wrapped(text, "  ").splitlines() == [
        "name   a number of words",
        "word word word word word",
        "  word word word word",
        "  --a-long-flag",
        "  /a/path/that/is/long",
    ]


def test_settings_are_those_of_the_flags(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        "/set temperature 0.7",
        "/set top_p 0.9",
        '/set stop "x y" z',
        "/set seed 5",
        "/set budget 4",
        "/set ignore-eos true",
    ]
    result = talk(*lines, "/set", "hi", f"/save {file}", flags=("--top-k", 40))
    assert (result.code, result.err.count("Error")) == (0, 0)
    settings = saved(file)["settings"]
    assert settings["temperature"] == 0.7
    assert (settings["top-p"], settings["top-k"], settings["stop"]) == (0.9, 40, ["x y", "z"])
    assert (settings["seed"], settings["budget"], settings["ignore-eos"]) == (5, 4, True)
    assert "stop 'x y' z" in result.out
    again = talk(f"/load {file}", "/set seed none", "/set stop none", f"/save {file}", "/regen")
    assert again.code == 0
    assert saved(file)["settings"] == settings | {"seed": None, "stop": []}
    loaded = talk(f"/save {file}", flags=("--load", file, "--seed", 9))
    assert (loaded.code, saved(file)["settings"]["temperature"]) == (0, 0.7)


def test_flags_win_over_a_loaded_file(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk("/set temperature 0.7", "/set top-p 0.9", "/set budget 4", "/system Be brief.", "hi", f"/save {file}")
    flags = ("--load", file, "--temperature", 0, "--budget", "auto", "--system", "Be kind.")
    assert talk(f"/save {file}", flags=flags).code == 0
    found = saved(file)["settings"]
    assert (found["temperature"], found["budget"], found["top-p"]) == (0, "auto", 0.9)
    assert (saved(file)["system"], len(saved(file)["turns"])) == ("Be kind.", 1)


def test_quiet_leaves_nothing_but_errors(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    messages = ["word " * 12] * 4  # until the context is full
    assert talk(*messages, f"/save {file}", "/undo", f"/load {file}", flags=("-q",)).err == ""
    assert talk("/undo", flags=("-q",)).err.startswith("Error: ")


def test_a_lossy_turn_says_so(talk: Talk) -> None:
    told = talk("hi", "/set accept joint", "again", "/set temperature 1", "/stats", flags=("--temperature", 0))
    assert "temperature must be 0" in told.err
    turns = [line for line in told.out.splitlines() if line.lstrip()[:1].isdigit() and "." in line]
    assert ["lossy" in line for line in turns[-2:]] == [False, True]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", ("temperature", "hot")),
        ("/set stopping foo", ("foo",)),
        ("/set temperature", ("/set temperature 0.7",)),
        ("/set temprature 1", ("temprature", "temperature")),
        ("/set stop 'open", ("quotation",)),
        ("/regn", ("/regn", "/regen")),
        ("/undo", ("no turn",)),
        ("/save", ("/save", "file")),
        ("/load no-such-file.json", ("no-such-file.json", "read")),
        ("/save /no/such/folder/talk.json", ("/no/such/folder", "choose another file")),
        ("x" * 600, ("tokens", "context", CONTEXT)),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_mistake_is_told_and_the_conversation_goes_on(
    line: str, words: Sequence[object], talk: Talk, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    result = talk(line, "hi", f"/save {file}")
    errors = [text for text in result.err.splitlines() if text.startswith("Error: ")]
    assert (result.code, len(errors)) == (1, 2), result  # the line, and the count at the end
    check_message(errors[0].removeprefix("Error: "), *words)
    assert saved(file)["settings"]["temperature"] == 0
    assert [turn["message"] for turn in saved(file)["turns"]] == ["hi"]


@pytest.mark.parametrize(
    ("change", "word"), [({"settings": {"temperature": "hot"}}, "hot"), ({"version": 9}, "version 9")]
)
def test_a_file_that_cannot_be_loaded_changes_nothing(
    change: dict[str, Any], word: str, talk: Talk, tmp_path: Path
) -> None:
    file, after = tmp_path / "talk.json", tmp_path / "after.json"
    talk("hi", f"/save {file}")
    file.write_text(json.dumps(saved(file) | change))
    result = talk("/system kept", "ho", f"/load {file}", f"/save {after}")
    (error, _) = [line for line in result.err.splitlines() if line.startswith("Error: ")]
    check_message(error, file, word)
    assert (saved(after)["system"], [turn["message"] for turn in saved(after)["turns"]]) == ("kept", ["ho"])
    talk(flags=("--load", file)).refusal(2, file, word)


def test_even_our_own_mistakes_do_not_lose_the_conversation(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = chat_module.Chat.answer

    def answer(self: Any, message: str, **more: Any) -> None:
        if message == "fail":
            raise RuntimeError("out of memory\nand more")
        reply(self, message, **more)

    monkeypatch.setattr(chat_module.Chat, "answer", answer)
    result = talk("hi", "fail", f"/save {tmp_path / 'talk.json'}")
    assert tells(result.err, "Error: RuntimeError", "out of memory and more", "unexpected", "-v")
    assert len(saved(tmp_path / "talk.json")["turns"]) == 1
    assert "Traceback" in talk("fail", flags=("-v",)).err


def test_a_full_context_is_told_beforehand(talk: Talk) -> None:
    result = talk(*["word " * 8] * 5)
    assert result.code == 0
    warning, *notes = [line for line in result.err.splitlines() if tells(line, "context", CONTEXT)]
    assert tells(warning, "oldest turns", "in use")
    assert any(tells(note, "oldest") for note in notes)


def test_a_reply_that_is_cut_says_so(talk: Talk) -> None:
    result = talk("hi")
    assert tells(result.err, "cut", 8, "/set max-new-tokens")


def test_lines_that_are_no_text(pair: Pair, offspec: Offspec) -> None:
    result = offspec("chat", pair.target, "--draft", "none", "--device", "cpu", stdin=b"\xff\n/stats\n")
    assert "UTF-8" in result.err
    assert "0 of 128" in result.out


def test_what_cannot_chat_is_refused_before_it_is_loaded(
    pair: Pair, tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = variant(pair.target, tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    monkeypatch.setattr("offspec.loading.load_weights", None)
    offspec("chat", folder, "--draft", "none", stdin=b"hi\n").refusal(1, "chat template")
    offspec("run", folder, "hi", "--draft", "none", "--system", "be brief").refusal(1, "chat template")
    monkeypatch.setattr(chat_module, "load_engine", None)
    offspec("chat", pair.target, "--temperature", "-1", stdin=b"hi\n").refusal(2, "temperature", -1)
    offspec("chat", pair.target, "--when-full", "go", stdin=b"hi\n").refusal(2, "--when-full", "go")


def test_ctrl_c_stops_the_reply_only(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal would come: in the middle of the second pass."""
    walk, calls = Engine.generate, []

    def generate(self: Engine, *args: Any, **more: Any) -> Any:
        for number, step in enumerate(walk(self, *args, **more)):
            calls.append(number)
            if len(calls) == 2:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(Engine, "generate", generate)
    file = tmp_path / "talk.json"
    result = talk("hi", "go on", f"/save {file}", flags=("--budget", 0))
    assert result.code == 0
    assert "stopped" in result.err
    first, second = saved(file)["turns"]
    assert (first["finish_reason"], second["finish_reason"]) == ("interrupted", "length")
    assert len(first["token_ids"]) == 1


# ------------------------------------------------------------------------------------------------ the line editor


@pytest.mark.skipif(sys.platform == "win32", reason="prompt_toolkit has no pipe input there")
def test_ctrl_z_suspends(monkeypatch: pytest.MonkeyPatch) -> None:
    from prompt_toolkit.application import Application
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    suspended = list[object]()
    monkeypatch.setattr(Application, "suspend_to_background", lambda self, *args: suspended.append(self))
    with create_pipe_input() as keys:
        read = line_editor(None, lambda text: [], source=keys, sink=DummyOutput())
        keys.send_text("h\x1ai\r")
        assert read("") == "hi"
    assert len(suspended) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="prompt_toolkit has no pipe input there")
def test_keys(tmp_path: Path) -> None:
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    history = tmp_path / "deep" / "history"
    assert open_history(history)
    with create_pipe_input() as keys:
        read = line_editor(history, lambda text: ["/regen"] if text == "/re" else [], source=keys, sink=DummyOutput())
        keys.send_text("hi\r")
        assert read("") == "hi"
        keys.send_text('"""two\rlines"""\r')
        assert unquoted(read("")) == "two\nlines"
        keys.send_text("a\x1b\rb\r")
        assert read("") == "a\nb"
        keys.send_text("\x1b[200~pasted\nlines\n\x1b[201~\r")
        assert read("") == "pasted\nlines\n"
        keys.send_text("/re\t\r")
        assert read("") == "/regen"
        keys.send_text("!\r")
        assert read("proposed") == "proposed!"
        keys.send_text("\x1b[A\r")
        assert read("") == "proposed!"
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            read("")
        keys.send_text("x\x03")
        with pytest.raises(KeyboardInterrupt):
            read("")
    assert "+proposed!" in history.read_text()
    if sys.platform != "win32":
        assert history.stat().st_mode & 0o077 == 0
    assert not open_history(tmp_path)


def test_completions(tmp_path: Path, pair: Pair) -> None:
    (tmp_path / "talk.json").touch()
    values = chat_module.Values(chat_module.command, {"temperature": 0.0, "top_p": 1.0, "top_k": 0})
    chat = chat_module.Chat(None, values)  # type: ignore[arg-type]
    assert list(chat.completions("/s")) == ["/system", "/set", "/show", "/stats", "/save"]
    assert list(chat.completions("/set to")) == ["top-p", "top-k"]
    assert list(chat.completions(f"/load {tmp_path}/ta")) == [str(tmp_path / "talk.json")]
    assert list(chat.completions("/load /no/such/")) == []
    assert list(chat.completions("hello /s")) == []


def test_keys_typed_during_a_reply_are_the_next_lines(
    keyboard: Keyboard, pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = chat_module.first_pass_shown

    def typing(engine: Engine, steps: Any, **more: Any) -> Any:
        keyboard.type(b"/show\n/exit\n")
        return shown(engine, steps, **more)

    monkeypatch.setattr(chat_module, "first_pass_shown", typing)
    keyboard.type(b"hi\n")
    assert run(["chat", str(pair.target), "--draft", "none", "--device", "cpu", "-n", "8"]) == 0
    assert ">>> hi" in capsys.readouterr().out
    assert keyboard.echo() == b"hi\r\n"


# ------------------------------------------------------------------------------------------------ what is kept


@pytest.fixture
def chat_args(pair: Pair) -> Sequence[object]:
    return ("chat", pair.target, "--draft", "none", "--device", "cpu", "-n", 8, "--seed", 3)


def kept(folder: Path) -> dict[Path, list[str]]:
    """The messages of each conversation."""
    return {file: [turn["message"] for turn in saved(file)["turns"]] for file in chats(folder)}


def chats(folder: Path) -> list[Path]:
    return sorted((folder / "state" / "offspec" / "chats").glob("*.json"))


def test_a_conversation_on_a_terminal_is_kept_and_resumed(
    chat_args: Sequence[object], offspec_at_terminal: Offspec, tmp_path: Path
) -> None:
    first = offspec_at_terminal(*chat_args, "--system", "Be brief.", typed=["hi", "/set temperature 0.5", "more"])
    assert tells(first.err, f"offspec chat {chat_args[1]} --resume")
    (file,) = chats(tmp_path)
    assert file.stat().st_mode & 0o077 == 0
    again = offspec_at_terminal(*chat_args, "--resume", typed=["/system", "/set temperature 0.5", "last"])
    assert tells(again.err, "2 turns loaded")
    reply = saved(file)["turns"][1]["reply"].rstrip().translate(CONTROLS)
    assert f"Ctrl-D exits.\n>>> more\n{reply}\n\n" in again.out, "what was said last"
    assert ">>> hi" not in again.out
    assert "\nBe brief.\n" in again.out
    assert kept(tmp_path) == {file: ["hi", "more", "last"]}


def test_a_terminal_that_is_gone_ends_the_chat(
    chat_args: Sequence[object], offspec_at_terminal: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `nohup`, no signal tells of it."""

    tries = iter([OSError(errno.EIO, "Input/output error")] * 2 + [EOFError()])

    def gone(proposed: str) -> str:
        raise next(tries)

    monkeypatch.setattr(chat_module, "line_editor", lambda history, complete: gone)
    assert offspec_at_terminal(*chat_args).code == 0
    assert len(list(tries)) == 2, "it was read again"


def test_another_conversation_has_another_file(
    chat_args: Sequence[object], offspec_at_terminal: Offspec, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    offspec_at_terminal(*chat_args, typed=["one", f"/save {file}", "/clear", "two", f"/load {file}", "three"])
    assert list(kept(tmp_path).values()) == [["one"], ["two"], ["one", "three"]]


def test_only_the_newest_conversations_stay(
    chat_args: Sequence[object], offspec_at_terminal: Offspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.cli.chat_files.MOST_FILES", 2)
    offspec_at_terminal(*chat_args, typed=["one", "/clear", "two", "/clear", "three"])
    assert list(kept(tmp_path).values()) == [["two"], ["three"]]


def test_what_is_not_a_conversation_on_a_terminal_is_not_kept(
    chat_args: Sequence[object], offspec_at_terminal: Offspec, talk: Talk, tmp_path: Path
) -> None:
    assert "--resume" not in offspec_at_terminal(*chat_args, typed=["/help"]).err
    assert "--resume" not in offspec_at_terminal(*chat_args, "--no-autosave", typed=["hi"]).err
    talk("hi")
    assert chats(tmp_path) == []


def test_a_conversation_that_cannot_be_kept_goes_on(
    chat_args: Sequence[object], offspec_at_terminal: Offspec, tmp_path: Path
) -> None:
    (tmp_path / "state" / "offspec").mkdir(parents=True)
    (tmp_path / "state" / "offspec" / "chats").write_text("a file")
    result = offspec_at_terminal(*chat_args, typed=["hi", "more", "/show"])
    assert (result.code, result.err.count("not kept for --resume")) == (0, 1)
    assert ">>> more" in result.out
    assert "continues this conversation" not in result.err


def test_what_cannot_be_resumed(
    chat_args: Sequence[object], offspec_at_terminal: Offspec, offspec: Offspec, pair: Pair, tmp_path: Path
) -> None:
    offspec("chat", pair.draft, "--resume").refusal(2, "--resume", pair.draft, "omit --resume")
    offspec_at_terminal(*chat_args, typed=["hi"])
    offspec("chat", pair.draft, "--resume").refusal(2, "--resume", pair.draft, pair.target)
    offspec("chat", pair.target, "--resume", "--load", chats(tmp_path)[0]).refusal(2, "--resume", "--load")
