"""A conversation: its turns, the turns within the context, and KV caches that are kept from turn to turn.

The chat template renders the conversation, but replies keep their original token ids. Text does not always encode to
the tokens that it was decoded from, and the caches hold the original ones. So a turn scores only new tokens.
This module does not depend on the terminal.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any

from offspec.loaders.files.small_files import parse_json, read_small_file
from offspec.scheduler.params import SamplingParams, SpeculationParams

from .checkpoints.atomic_files import write_atomically
from .engine import Engine
from .errors import ContextLengthError, OffspecError, StorageError, UsageError
from .model.memory.request_caches import RequestCaches, SoleUser
from .planning.plan import DEFAULT_CONTEXT
from .prompt_cache import PromptCache
from .running.steps import Step
from .stats import Stats
from .text.context_limit import ContextLimit
from .text.prompt import Message
from .text.tokenizer import Tokenizer

FILE_FORMAT, FILE_VERSION = "offspec chat", 1
SPARE_SHARE = 4  # 1/SPARE_SHARE of the context is the most kept free for a reply, and is freed if the context is full
INTERRUPTED = "interrupted"


@dataclass
class Turn:
    """A message and its reply. token_ids: the reply's original token ids, without the end-of-text token.

    finish_reason is a `Step`'s, or `interrupted`. num_dropped: the number of earlier turns that were left out of the
    prompt.
    """

    message: str
    reply: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = INTERRUPTED
    num_dropped: int = 0
    stats: Stats | None = None

    def add(self, step: Step) -> None:
        self.reply += step.text
        self.token_ids += step.token_ids[:-1] if step.finish_reason == "eos" else step.token_ids
        self.finish_reason, self.stats = step.finish_reason or INTERRUPTED, step.stats


class Session:
    """One conversation with an engine.

    drops_oldest: if the context is full, leave out the oldest turns, but never the system message; otherwise refuse
    the next message. notify(text) is called when turns are left out.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        *,
        drops_oldest: bool = True,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raises TokenizerError if the model has no chat template, or one that refuses a system message."""
        engine.tokenizer.check_chat_template()
        self.engine, self.drops_oldest, self.turns = engine, drops_oldest, list[Turn]()
        self._notify = notify
        self._system: str | None = None
        self._caches = lasting_caches(engine)
        self._lock = RLock()  # guards the turns
        self._reply = SoleUser(
            "a reply of this conversation is running; finish it, close its iterator, or use another Session"
        )
        self._exported = set[Path]()
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message. Setting it raises TokenizerError if the template refuses it."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None:
            encode_turns(self.engine.tokenizer, text, [Turn("?")])
        self._system = text

    @property
    def num_tokens(self) -> int:
        """Tokens of the context in use after the last turn, including the reply."""
        if not self.turns:
            return 0
        last = self.turns[-1]
        if last.stats is not None:
            return last.stats.num_prompt_tokens + last.stats.num_tokens
        return len(self.encode(self.turns[last.num_dropped :])) + len(last.token_ids)  # a turn from a file

    def spare(self, params: SamplingParams) -> int:
        """Tokens that are kept free for a reply, as long as there are turns to leave out."""
        return min(params.max_new_tokens, self.engine.max_context // SPARE_SHARE)

    def encode(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of the system message and these turns, up to the start of the last turn's reply."""
        return encode_turns(self.engine.tokenizer, self.system, turns)

    def reply(
        self,
        message: str,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        again: bool = False,
    ) -> Generator[Step, None, None]:
        """Answer a message: an iterator with one `Step` per pass. again: the new turn replaces the last one.

        Closing the iterator, or an exception in it, ends the reply and keeps its tokens so far. Without any token, the
        turns stay as they were. Raises ContextLengthError or UsageError at once, NumericalError or MemoryLimitError
        while running. Another running reply, in any thread, is a UsageError.
        """
        with self._lock:
            self._reply.check_free()
            return self._reply.begin(self._begin(message, params or SamplingParams(), speculation, again=again))

    def _begin(
        self, message: str, params: SamplingParams, speculation: SpeculationParams | None, *, again: bool
    ) -> Generator[Step, None, None]:
        before, turn = self.turns[: len(self.turns) - again], Turn(message)
        ids = self._fit(before, turn, params)
        return self._run(before, turn, self.engine.generate(ids, params, speculation, caches=self._caches))

    def _run(self, before: list[Turn], turn: Turn, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        with closing(steps):
            for step in steps:
                turn.add(step)
                self.turns = [*before, turn]
                yield step

    def _fit(self, before: Sequence[Turn], turn: Turn, params: SamplingParams) -> list[int]:
        """Token ids of as many turns as the context holds. Sets `turn.num_dropped`."""
        # Turns that were dropped before stay dropped, so that the caches' text keeps its beginning.
        dropped = min(before[-1].num_dropped if before else 0, len(before))
        ids, limit, spare = self.encode([*before[dropped:], turn]), self.engine.max_context, self.spare(params)
        turn.num_dropped = dropped
        if not self.drops_oldest and len(ids) >= limit:
            raise ContextLengthError(
                f"the conversation would have {len(ids)} tokens, and the context is {limit}; save it and start a new "
                "one, undo turns, or allow dropping the oldest turns (`when_full=drop`)"
            )
        if not self.drops_oldest or len(ids) + spare <= limit:
            return ids
        room = limit - limit // SPARE_SHARE  # drop more than necessary, so that the next turns can reuse the caches

        def fits(dropped: int) -> bool:
            return len(self.encode([*before[dropped:], turn])) + spare <= room

        # Binary search: rendering the chat once for each number of turns would take minutes.
        if number := bisect_left(range(dropped, len(before)), True, key=fits):
            turn.num_dropped += number
            ids = self.encode([*before[turn.num_dropped :], turn])
            turns_left_out = "turn" if number == 1 else f"{number} turns"
            self._notify(
                f"the context of {limit} tokens is full; the oldest {turns_left_out} will be left out from now on"
            )
        return ids

    def undo(self) -> Turn:
        """Remove the last turn and return it. Raises UsageError if there is none, or while a reply is running."""
        with self._lock:
            self._reply.check_free()
            if not self.turns:
                raise UsageError("there is no turn to undo")
            return self.turns.pop()

    def clear(self) -> None:
        """Remove all turns, but keep the system message. Raises UsageError while a reply is running."""
        with self._lock:
            self._reply.check_free()
            self.turns = []

    # ---------------------------------------------------------------------------------------- files

    def save(self, path: str | PathLike[str], settings: Mapping[str, Any]) -> None:
        """Write the conversation and `settings` as JSON, atomically.

        Overwrites only saved chats. Raises StorageError.
        """
        path = Path(path)
        _check_free(path, "is not a saved chat", _is_saved)
        turns = [{name: value for name, value in asdict(turn).items() if name != "stats"} for turn in self.turns]
        content = {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            "model": self.engine.name,
            "system": self.system,
            "settings": dict(settings),
            "turns": turns,
        }
        _write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def save_entries(self, path: str | PathLike[str]) -> None:
        """Write the conversation's KV entries beside the saved chat `path`, so that it need not be scored again.

        `tell` gets the file and its size, or why there is none.
        """
        with self._lock:
            self._reply.check_free()
            try:
                self._entries(path).write(self._caches, min(self._caches.target.length, len(self._caches.text)))
            except OffspecError as exc:
                self._notify(f"the KV entries are not kept: {exc}")

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Replace this conversation by a saved one. Returns the saved settings.

        The KV entries of `save_entries` are read too, if they are there and fit.

        Raises UsageError for any other file, or while a reply is running; this conversation is then unchanged.
        Replies keep their token ids if these decode to the same text here, so another model can continue the
        conversation.
        """
        saved = read_saved(Path(path))
        with self._lock:
            self._reply.check_free()
            self._take_over(saved)
            if saved.turns and entries_path(path).exists():
                try:
                    self._entries(path).read(self._caches, self.encode([*saved.turns, Turn("?")]))
                except OffspecError as exc:
                    self._notify(f"{exc}; the conversation is scored again")
        return saved.settings

    def _entries(self, path: str | PathLike[str]) -> PromptCache:
        """Raises UsageError for a draft that splits the target's entries, and for a file of something else."""
        return PromptCache(self.engine, entries_path(path), self._notify)

    def _take_over(self, saved: Saved) -> None:
        system, self.system = self.system, saved.system
        try:
            if saved.turns:
                self.encode(saved.turns)
        except OffspecError:
            self._system = system
            raise
        self.turns = saved.turns

    def export(self, path: str | PathLike[str]) -> None:
        """Write the conversation as Markdown. Overwrites only files that this object exported. Raises StorageError."""
        path = Path(path)
        _check_free(path, "was not exported from this conversation", lambda path: path.resolve() in self._exported)
        parts = [f"# {self.engine.name}"]
        if self.system is not None:
            parts += ["## System", self.system]
        for turn in self.turns:
            parts += ["## You", turn.message, "## Reply", turn.reply]
        _write(path, "\n\n".join(part.strip("\n") for part in parts) + "\n")
        self._exported.add(path.resolve())


def entries_path(path: str | PathLike[str]) -> Path:
    """The file of the KV entries of the saved chat `path`."""
    return Path(path).with_name(f"{Path(path).name}.kv")


def lasting_caches(engine: Engine) -> RequestCaches:
    """KV caches for requests that continue one another. They allocate the context asked for, and a tree, at once.

    Of a longer default context they allocate DEFAULT_CONTEXT, and grow: the plan has twice as much room for it. Without
    a plan, they grow as needed.
    """
    if (plan := engine.plan) is None:
        return engine.new_caches()
    was_asked_for = plan.inputs.options.context is not None
    return engine.new_caches(plan.context if was_asked_for else min(plan.context, DEFAULT_CONTEXT), plan.tree)


# ------------------------------------------------------------------------------------------------ to tokens


def turns_of(messages: Sequence[Message], reply_ids: Sequence[list[int]]) -> tuple[str | None, list[Turn]] | None:
    """The system message and the turns of alternating messages that end with a user's; None for any other form.

    reply_ids: the original token ids of each reply, empty where they are not known.
    """
    roles = [message["role"] for message in messages]
    num_system = int(roles[:1] == ["system"])
    turns_roles = (["user", "assistant"] * len(messages))[: len(messages) - num_system]
    if roles[num_system:] != turns_roles or roles[-1] != "user":
        return None
    texts = [message["content"] for message in messages]
    questions, answered = texts[num_system::2], texts[num_system + 1 :: 2]
    turns = [Turn(*turn) for turn in zip(questions, answered, reply_ids, strict=False)]
    return texts[0] if num_system else None, [*turns, Turn(questions[-1])]


def _messages(system: str | None, turns: Sequence[Turn], replies: Sequence[str]) -> list[Message]:
    """The turns as messages. The last turn has no reply yet."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for turn, reply in zip(turns, [*replies, None], strict=True):
        messages.append({"role": "user", "content": turn.message})
        if reply is not None:
            messages.append({"role": "assistant", "content": reply})
    return messages


def encode_turns(
    tokenizer: Tokenizer, system: str | None, turns: Sequence[Turn], limit: ContextLimit | None = None
) -> list[int]:
    """Token ids of the rendered conversation, with the original ids of each reply that the template leaves unchanged.

    A second rendering has placeholders instead of replies, and shows where the replies are. A template may change a
    reply: strip it, or omit its reasoning. From the first changed reply on, all text is encoded anew. Raises
    ContextLengthError if the text has far more tokens than the limit.
    """
    answered = turns[:-1]
    messages = _messages(system, turns, [turn.reply for turn in answered])
    if limit is not None:
        tokenizer.check_messages(messages, limit)
    chat = tokenizer.hide_special(messages)
    text, placeholders = tokenizer.render_chat(chat.messages), [f"\ue000{i}\ue001" for i in range(len(answered))]
    if limit is not None:
        tokenizer.check_length(text, limit)
    replies = [message["content"] for message in chat.messages if message["role"] == "assistant"]
    next_one = iter(placeholders)
    rest = tokenizer.render_chat(
        [m | {"content": next(next_one)} if m["role"] == "assistant" else m for m in chat.messages]
    )
    ids, context = list[int](), ""
    done = at = 0  # text[:done] is encoded, text[:at] is matched with both renderings
    for turn, reply, placeholder in zip(answered, replies, placeholders, strict=True):
        before, _, rest = rest.partition(placeholder)
        if not text.startswith(before + reply, at):
            break
        start, at = at + len(before), at + len(before) + len(reply)
        if _is_said(turn, tokenizer):
            ids += [*tokenizer.encode_after(context, text[done:start], chat.texts), *turn.token_ids]
            done, context = at, reply
    return ids + tokenizer.encode_after(context, text[done:], chat.texts)


def _is_said(turn: Turn, tokenizer: Tokenizer) -> bool:
    """Whether the reply's token ids decode to its text. A file by somebody else may contain special tokens: refused."""
    ids = turn.token_ids
    is_plain = tokenizer.special_in_text or tokenizer.special_ids.isdisjoint(ids)
    return bool(ids) and is_plain and tokenizer.decode(ids, skip_special_tokens=False) == turn.reply


# ------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class Saved:
    """The content of a saved chat."""

    system: str | None
    settings: dict[str, Any]
    turns: list[Turn]


def read_saved(path: Path) -> Saved:
    """Read a file by `Session.save`. Raises UsageError for any other file."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe or a device may never end
        raise UsageError(f"{path} cannot be read: it is not a regular file; use a file written by /save")
    try:
        content = parse_json(read_small_file(path))
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise UsageError(f"{path} is not a saved chat: invalid JSON ({exc}); use a file written by /save") from exc
    if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
        raise UsageError(f'{path} is not a saved chat: "format" is not "{FILE_FORMAT}"; use a file written by /save')
    version = content.get("version")
    if version != FILE_VERSION:
        raise UsageError(f"{path} has format version {version!r}, only {FILE_VERSION} is supported; update offspec")
    system, settings, turns = (content.get(key) for key in ("system", "settings", "turns"))
    if not (system is None or isinstance(system, str)) or not isinstance(settings, dict) or not isinstance(turns, list):
        raise UsageError(f"{path} is damaged: system, settings or turns are missing or have a wrong type")
    return Saved(system, settings, [_turn(path, number, turn) for number, turn in enumerate(turns, 1)])


def _turn(path: Path, number: int, content: Any) -> Turn:
    kinds = {"message": str, "reply": str, "finish_reason": str, "num_dropped": int, "token_ids": list}
    good = isinstance(content, dict) and content.keys() == kinds.keys()
    good = good and all(isinstance(content[name], kind) for name, kind in kinds.items())
    good = good and all(type(token) is int and 0 <= token < 2**32 for token in content["token_ids"])
    if not good or not 0 <= content["num_dropped"] < number:
        raise UsageError(f"{path} is damaged: turn {number} has missing, unknown or invalid fields")
    return Turn(**content)


def _is_saved(path: Path) -> bool:
    try:
        read_saved(path)
    except UsageError:
        return False
    return True


def _check_free(path: Path, fault: str, is_ours: Callable[[Path], bool]) -> None:
    """Raises StorageError if the file exists and is not ours."""
    if os.path.exists(path) and not is_ours(path):
        raise StorageError(f"{path} exists and {fault}; choose another file")


def _write(path: Path, text: str) -> None:
    """Raises StorageError."""
    try:
        content = text.encode()
    except UnicodeEncodeError as exc:
        raise StorageError(f"{path} cannot be written: {exc}; the conversation is still in memory") from exc
    write_atomically(path, content)
