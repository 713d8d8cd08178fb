"""A conversation: each turn scores only what is new, says what a fresh run says, and survives files
and interruptions.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.atomic_files import write_atomically
from offspec.errors import ContextLengthError, OffspecError, StorageError, TokenizerError, UsageError
from offspec.session import Session, Turn
from offspec.text.tokenizer import Tokenizer

from ..pair import CONTEXT, Pair, variant
from ..refusals import refused, tells

GREEDY = SamplingParams(max_new_tokens=6)
WARM = SamplingParams(max_new_tokens=6, temperature=0.6, seed=3)
MESSAGES = ("def area(", "hi", "for item in", "and?")


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu") as loaded:
        yield loaded


def say(session: Session, message: str, params: SamplingParams = GREEDY, **more: Any) -> Turn:
    for _ in session.reply(message, params, **more):
        pass
    return session.turns[-1]


def fresh(session: Session, params: SamplingParams, budget: int = 0) -> list[int]:
    """What a run without kept caches says to the whole conversation, plainly decoded."""
    ids = session.encode(session.turns[session.turns[-1].num_dropped :])
    steps = list(session.engine.generate(ids, params, SpeculationParams(budget=budget)))
    tokens = [token for step in steps for token in step.token_ids]
    return tokens[:-1] if steps[-1].finish_reason == "eos" else tokens


# ------------------------------------------------------------------------------------------------ turns and caches


@pytest.mark.parametrize(("params", "budgets"), [(GREEDY, 4 * [None]), (WARM, [0, 8, 0, 64])], ids=["greedy", "warm"])
def test_a_turn_scores_what_is_new_and_says_what_a_fresh_run_says(
    params: SamplingParams, budgets: list[int | None], engine: Engine
) -> None:
    session = Session(engine, "Be brief.")
    held = 0
    for message, budget in zip(MESSAGES, budgets, strict=True):
        turn = say(session, message, params, speculation=SpeculationParams(budget=budget))
        stats = turn.stats
        assert stats is not None
        # All but the last emitted token was in the caches, and that one too where it was a guess (the end of a text may
        # be); the rest is this message and the template around.
        assert stats.num_prefilled_tokens in {stats.num_prompt_tokens - held, stats.num_prompt_tokens - held + 1}
        assert turn.token_ids == fresh(session, params)
        held = stats.num_prompt_tokens + stats.num_tokens
        assert session.num_tokens >= held


def test_the_tokens_of_a_reply_are_those_that_were_said(engine: Engine) -> None:
    """Random weights say tokens that their own text would not encode to."""
    session, encode = Session(engine), engine.tokenizer.encode
    turns = (say(session, "hi", replace(WARM, seed=seed), again=seed > 0) for seed in range(50))
    turn = next(turn for turn in turns if encode(turn.reply) != turn.token_ids and turn.reply.isascii())
    ids = session.encode([turn, Turn("next")])
    start = len(session.encode([turn]))
    assert ids[start : start + len(turn.token_ids)] == turn.token_ids
    text = engine.tokenizer.render_chat(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": turn.reply},
            {"role": "user", "content": "next"},
        ]
    )
    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "reply",
    [
        "{{ '<|assistant|>' + m['content'].strip() + '<|end|>' if m['role'] == 'assistant' else '<|user|>' + "
        "m['content'] }}",
        "{{ '<|user|>' + m['content'] if m['role'] == 'user' else '<|end|>' }}",
    ],
    ids=["strips", "leaves out"],
)
def test_a_template_that_changes_replies_is_believed(reply: str, pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "model")
    template = "{% for m in messages %}" + reply + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    session = Session(Engine.load(str(folder), draft="none", device="cpu"))
    session.turns = [Turn("a", " a x ", session.engine.tokenizer.encode(" a x ")), Turn("b a", "z", [1])]
    turns = [*session.turns, Turn("c")]
    messages = [
        {"role": role, "content": text}
        for turn in session.turns
        for role, text in (("user", turn.message), ("assistant", turn.reply))
    ]
    rendered = session.engine.tokenizer.render_chat([*messages, {"role": "user", "content": "c"}])
    assert session.engine.tokenizer.decode(session.encode(turns), skip_special_tokens=False) == rendered


def test_changes_are_scored_from_where_they_begin(engine: Engine) -> None:
    session = Session(engine)
    for message in MESSAGES[:3]:
        say(session, message)
    first = say(session, "and?")
    again = say(session, "and?", again=True)
    assert (again.reply, len(session.turns)) == (first.reply, 4)
    assert again.stats is not None
    assert again.stats.num_prefilled_tokens == 1  # the last token of the prompt, whose logits are wanted
    session.undo()
    session.undo()
    turn = say(session, "other")
    assert turn.stats is not None
    assert turn.stats.num_prefilled_tokens < 12
    assert turn.token_ids == fresh(session, GREEDY)
    session.system = "Be long."
    whole = say(session, "now")
    assert whole.stats is not None
    assert whole.stats.num_prefilled_tokens >= whole.stats.num_prompt_tokens - 1
    assert whole.token_ids == fresh(session, GREEDY)
    session.clear()
    assert (session.turns, session.system) == ([], "Be long.")
    with refused(UsageError, "no turn"):
        session.undo()


# ------------------------------------------------------------------------------------------------ interruptions


@pytest.mark.each_value
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OffspecError("it failed")], ids=["Ctrl-C", "error"])
@pytest.mark.parametrize("where", ["prepare", "score_together", "keep"])
def test_a_turn_left_in_the_middle_of_a_pass(
    where: str, error: BaseException, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(engine)
    say(session, "hi")
    owner = {"score_together": "running.passes", "keep": "model.memory.sequence_cache.SequenceCache"}.get(
        where, "scheduler.drafting.model_drafter.ModelDrafter"
    )
    name, calls = f"offspec.{owner}.{where}", []
    steps = session.reply("def area(", SamplingParams(max_new_tokens=40))
    said = next(steps).text + next(steps).text

    def fail(*args: object, **more: object) -> None:
        calls.append(1)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(name, fail)
        with pytest.raises(type(error)):
            next(steps)
    assert calls
    turn = session.turns[-1]
    assert (turn.reply, turn.finish_reason) == (said, "interrupted")
    after = say(session, "go on")
    assert after.token_ids == fresh(session, GREEDY)
    assert after.stats is not None
    assert after.stats.num_prefilled_tokens < 40


def test_a_turn_in_which_nothing_was_said_is_taken_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(engine)
    kept = say(session, "hi")

    def fail(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    for again in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr("offspec.scheduler.drafting.drafter.verify_exactly", fail)
            with pytest.raises(KeyboardInterrupt):
                list(session.reply("more", again=again))
        assert session.turns == [kept]
    assert say(session, "more").token_ids == fresh(session, GREEDY)


def test_a_reply_that_is_closed_keeps_what_was_said(engine: Engine) -> None:
    session = Session(engine)
    steps = session.reply("hi", SamplingParams(max_new_tokens=40))
    said = next(steps).text
    steps.close()
    assert [(turn.message, turn.reply, turn.finish_reason) for turn in session.turns] == [("hi", said, "interrupted")]


# ------------------------------------------------------------------------------------------------ a full context


@pytest.mark.slow
def test_the_oldest_turns_are_dropped_and_that_is_said(engine: Engine) -> None:
    told: list[str] = []
    session = Session(engine, "Be brief.", notify=told.append)
    system = engine.tokenizer.encode("<|system|>Be brief.")
    for number in range(7):
        turn = say(session, f"message {number}")
        ids = session.encode(session.turns[turn.num_dropped :])
        assert ids[: len(system)] == system
        assert turn.stats is not None
        assert turn.stats.num_prompt_tokens == len(ids) <= CONTEXT - session.spare(GREEDY)
        assert turn.token_ids == fresh(session, GREEDY)
        assert bool(told) == (turn.num_dropped > 0)
    assert len(session.turns) == 7
    assert 0 < len(told) < 4  # several turns at once, so that most turns go on from the caches
    assert all(tells(text, "context", CONTEXT, "oldest") for text in told)


def test_or_the_message_is_refused(engine: Engine) -> None:
    session = Session(engine, drops_oldest=False)
    while session.num_tokens < CONTEXT - 16:
        say(session, "message")
    num_turns = len(session.turns)
    with refused(ContextLengthError, "context", CONTEXT):
        session.reply("a message of some length", GREEDY)
    assert len(session.turns) == num_turns > 2
    session.undo()
    session.undo()
    assert say(session, "short").token_ids == fresh(session, GREEDY)


@pytest.mark.parametrize("drops", [True, False])
def test_a_message_that_never_fits(drops: bool, engine: Engine) -> None:
    session = Session(engine, drops_oldest=drops)
    kept = say(session, "hi")
    with refused(ContextLengthError, "context", CONTEXT):
        session.reply("x" * 500, GREEDY)
    assert session.turns == [kept]


def test_a_model_that_cannot_chat(pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    with refused(TokenizerError, folder, "no chat template"):
        Session(Engine.load(str(folder), draft="none", device="cpu"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"rag": "x"}}))
    with refused(TokenizerError, folder / "tokenizer_config.json", '"chat_template"'):
        Session(Engine.load(str(folder), draft="none", device="cpu"))


def test_a_template_that_refuses_a_system_message(pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "model")
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    session = Session(Engine.load(str(folder), draft="none", device="cpu"))
    with refused(TokenizerError, folder, "no system"):
        session.system = "x"
    assert session.system is None


# ------------------------------------------------------------------------------------------------ files


def test_a_saved_conversation_goes_on_as_it_would_have(engine: Engine, tmp_path: Path) -> None:
    session, file = Session(engine, "Schön"), tmp_path / "talk.json"
    for message in MESSAGES[:3]:
        say(session, message, WARM)
    session.save(file, {"temperature": 1.0, "stop": ["ö"]})
    other = Session(engine)
    assert other.load(file) == {"temperature": 1.0, "stop": ["ö"]}
    assert other.system == "Schön"
    assert say(other, "and?", WARM).token_ids == say(session, "and?", WARM).token_ids
    assert other.turns[-1].stats is not None
    assert other.turns[-1].stats.num_prefilled_tokens == other.turns[-1].stats.num_prompt_tokens


def good_file() -> dict[str, Any]:
    turn = {"message": "a", "reply": "b", "token_ids": [1], "finish_reason": "eos", "num_dropped": 0}
    return {"format": "offspec chat", "version": 1, "model": "m", "system": None, "settings": {}, "turns": [turn]}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{", "JSON"),
        (b"[" * 100000, "JSON"),
        (b'{"messages": []}', '"format"'),
        (good_file() | {"version": 2}, "version 2"),
        (good_file() | {"settings": []}, "damaged"),
        (good_file() | {"turns": [{**good_file()["turns"][0], "token_ids": [2.5]}]}, "turn 1"),
        (good_file() | {"turns": [*good_file()["turns"], {"message": "b"}]}, "turn 2"),
        (good_file() | {"turns": [{**good_file()["turns"][0], "num_dropped": 1}]}, "turn 1"),
    ],
)
def test_a_file_that_is_no_conversation(content: Any, word: str, engine: Engine, tmp_path: Path) -> None:
    session, file = Session(engine, "kept"), tmp_path / "talk.json"
    session.turns = [kept := Turn("hi", "a")]
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with refused(UsageError, file, word):
        session.load(file)
    assert (session.turns, session.system) == ([kept], "kept")
    with refused(UsageError, tmp_path):
        session.load(tmp_path)
    with refused(UsageError, "/dev/zero", "regular file"):
        session.load(Path("/dev/zero"))


def test_tokens_that_this_model_does_not_have_are_not_believed(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    content = good_file()
    content["turns"][0]["token_ids"] = [2**31]
    file.write_text(json.dumps(content))
    session = Session(engine)
    session.load(file)
    assert say(session, "go on").token_ids == fresh(session, GREEDY)


def test_writing_is_all_or_nothing(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.json"

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    session = Session(engine)
    session.save(file, {})
    before = file.read_text()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with refused(StorageError, file, "No space left"):
            session.save(file, {"stop": []})
    assert (file.read_text(), list(tmp_path.iterdir())) == (before, [file])
    with refused(StorageError, tmp_path / "no" / "such" / "folder.json"):
        session.save(tmp_path / "no" / "such" / "folder.json", {})
    with refused(StorageError, tmp_path):
        write_atomically(tmp_path, b"a folder")
    assert isinstance(StorageError("x"), OffspecError)
    session.save(file, {})
    assert json.loads(file.read_text())["format"] == "offspec chat"
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="links and modes as POSIX has them")
def test_a_link_stays_and_what_it_leads_to_keeps_its_mode(engine: Engine, tmp_path: Path) -> None:
    session, link, file = Session(engine), tmp_path / "link.json", tmp_path / "notes" / "talk.json"
    file.parent.mkdir()
    link.symlink_to(Path("notes", "talk.json"))
    session.save(link, {})  # what it leads to is not there yet
    file.chmod(0o640)
    session.save(link, {"stop": []})
    assert link.is_symlink()
    assert json.loads(file.read_text())["settings"] == {"stop": []}
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(tmp_path.rglob("*")) == [link, file.parent, file]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_and_devices_are_neither_read_nor_replaced(engine: Engine, tmp_path: Path) -> None:
    session, pipe = Session(engine), tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with refused(UsageError, path, "regular file"):
            session.load(path)
        with refused(StorageError, path):
            session.save(path, {})
    assert pipe.is_fifo()


# ------------------------------------------------------------------------------------------------ one at a time


def test_caches_serve_one_request_at_a_time(engine: Engine) -> None:
    """Two would rewind each other's text, and both say what neither was asked for."""
    caches = engine.new_caches()
    alone = [[token for step in engine.generate(text, WARM) for token in step.token_ids] for text in MESSAGES[:2]]
    first = engine.generate(MESSAGES[0], WARM, caches=caches)
    found = list(next(first).token_ids)
    with refused(UsageError, "caches", "another request"):
        engine.generate(MESSAGES[1], WARM, caches=caches)
    assert found + [token for step in first for token in step.token_ids] == alone[0]
    assert [t for step in engine.generate(MESSAGES[1], WARM, caches=caches) for t in step.token_ids] == alone[1]


@pytest.mark.parametrize("way", ["closed", "dropped", "Ctrl-C"])
def test_a_request_that_was_left_lets_go_of_its_caches(engine: Engine, way: str) -> None:
    caches = engine.new_caches()
    steps = engine.generate(MESSAGES[0], WARM, caches=caches)
    next(steps)
    if way == "closed":
        steps.close()
    elif way == "Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            steps.throw(KeyboardInterrupt)
    else:
        del steps
    expected = [token for step in engine.generate(MESSAGES[1], WARM) for token in step.token_ids]
    assert [t for step in engine.generate(MESSAGES[1], WARM, caches=caches) for t in step.token_ids] == expected


@pytest.mark.slow
def test_a_conversation_has_one_reply_at_a_time(engine: Engine, tmp_path: Path) -> None:
    session, other = Session(engine), Session(engine)
    say(other, "hi")
    other.save(tmp_path / "talk.json", {})
    say(session, "hi")
    steps = session.reply("def area(", GREEDY)
    next(steps)
    changes = (
        lambda: session.reply("hi", GREEDY),
        session.undo,
        session.clear,
        lambda: session.load(tmp_path / "talk.json"),
    )
    for change in changes:
        with refused(UsageError, "reply", "running"):
            change()
    for _ in steps:
        pass
    assert [turn.message for turn in session.turns] == ["hi", "def area("]
    assert session.turns[-1].token_ids == fresh(session, GREEDY)
    assert session.undo().message == "def area("


def test_only_our_own_files_are_overwritten(engine: Engine, tmp_path: Path) -> None:
    session, chat, exported = Session(engine), tmp_path / "talk.json", tmp_path / "talk.md"
    for _ in range(2):
        session.save(chat, {})
        session.export(exported)
    writes: tuple[tuple[Path, Callable[[], None]], ...] = (
        (exported, lambda: session.save(exported, {})),
        (chat, lambda: session.export(chat)),
        (exported, lambda: Session(engine).export(exported)),
    )
    for file, write in writes:
        with refused(StorageError, file, "exists", "another file"):
            write()
    assert json.loads(chat.read_text())["format"] == "offspec chat"
    assert exported.read_text().startswith("# ")


def test_export_is_markdown(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine, "Be brief.")
    turn = say(session, "schön")
    session.export(tmp_path / "talk.md")
    text = (tmp_path / "talk.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {engine.name}\n\n## System\n\nBe brief.\n\n## You\n\nschön\n\n## Reply\n\n")
    assert turn.reply.strip("\n") in text


# ------------------------------------------------------------------------------------------------ the tokenizer's part


def test_text_is_encoded_as_it_stands_behind_other_text(pair: Pair) -> None:
    tokenizer = Tokenizer.load(pair.target)
    for text in ("def area(width):\n    return width", "schön 😀 ok"):
        whole = tokenizer.encode(text)
        for at in range(len(text) + 1):
            tail = tokenizer.encode_after(text[:at], text[at:])
            assert tokenizer.decode(tail) == text[at:]
            assert tail in (whole[len(whole) - len(tail) :], tokenizer.encode(text[at:]))
