"""A conversation: its turns, what of it the model sees, and KV caches that are kept from turn to turn.

The model is told the conversation as its chat template writes it, but replies as the tokens that it said itself: text
does not always encode to the tokens that it was decoded from, and only the same tokens are in the caches. So a turn
scores what is new and nothing else. Knows nothing of the terminal.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

from offspec.loaders.small_files import parse_json, read_small_file
from offspec.scheduler.params import SamplingParams, SpeculationParams

from .checkpoints.atomic_files import write_atomically
from .engine import Engine, Message
from .errors import ContextLengthError, OffspecError, StorageError, UsageError
from .model.text_caches import SoleUser, TextCaches
from .request import Step
from .stats import Stats
from .text.tokenizer import Tokenizer

FILE_FORMAT, FILE_VERSION = "offspec chat", 1
SPARE_SHARE = 4  # of the context: the most that is kept free for a reply, and what is freed where it is full
INTERRUPTED = "interrupted"


@dataclass
class Turn:
    """A message and its reply. token_ids: the reply's, as the model said them, without the end-of-text token.

    finish_reason is a `Step`'s, or `interrupted`. num_dropped: turns before it that the model was not shown any more.
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

    drops_oldest: where the context is full, the oldest turns are not shown to the model any more (the system message
    always is); otherwise the next message is refused. tell(text) is called before that happens.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        *,
        drops_oldest: bool = True,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raises TokenizerError where the model has no chat template, or one that refuses a system message."""
        engine.tokenizer.check_chat_template()
        self.engine, self.drops_oldest, self.turns = engine, drops_oldest, list[Turn]()
        self._tell = tell
        self._system: str | None = None
        self._caches = lasting_caches(engine)
        self._lock = RLock()  # held while the turns are looked at and changed
        self._reply = SoleUser(
            "a reply of this conversation is under way: end it or close its iterator first, or begin another Session"
        )
        self._exported = set[Path]()
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message. Setting it raises TokenizerError where the template refuses one."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None:
            encode_turns(self.engine.tokenizer, text, [Turn("?")])
        self._system = text

    @property
    def num_tokens(self) -> int:
        """Tokens of the context that the conversation took with its last turn, the reply included."""
        if not self.turns:
            return 0
        last = self.turns[-1]
        if last.stats is not None:
            return last.stats.num_prompt_tokens + last.stats.num_tokens
        return len(self.encode(self.turns[last.num_dropped :])) + len(last.token_ids)  # it comes from a file

    def spare(self, params: SamplingParams) -> int:
        """Tokens that are kept free for a reply, as long as there are turns to drop."""
        return min(params.max_new_tokens, self.engine.max_context // SPARE_SHARE)

    def encode(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of the system message and these turns, up to where the last one's reply begins."""
        return encode_turns(self.engine.tokenizer, self.system, turns)

    def reply(
        self,
        message: str,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        again: bool = False,
    ) -> Generator[Step, None, None]:
        """Answer a message, a step a pass. again: in place of the last turn, which stays if nothing comes.

        Closing the iterator, or an exception in it, ends the reply and keeps what was said; a turn in which nothing was
        said is taken back. Raises ContextLengthError or UsageError at once, NumericalError while running; UsageError
        also where another reply is under way, in this thread or another.
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
        """The ids of as many turns as the context holds; `turn` is told how many were dropped."""
        # What was dropped stays dropped, so that the caches' beginning stays the same from turn to turn.
        dropped = min(before[-1].num_dropped if before else 0, len(before))
        ids, limit, spare = self.encode([*before[dropped:], turn]), self.engine.max_context, self.spare(params)
        turn.num_dropped = dropped
        if not self.drops_oldest and len(ids) >= limit:
            raise ContextLengthError(
                f"the conversation would have {len(ids)} tokens, and the context has {limit}: save it and begin anew, "
                "take turns back, or let the oldest be dropped"
            )
        if not self.drops_oldest or len(ids) + spare <= limit:
            return ids
        room = limit - limit // SPARE_SHARE  # some turns more than need be, or the next turn would begin anew again

        def fits(dropped: int) -> bool:
            return len(self.encode([*before[dropped:], turn])) + spare <= room

        # By halves: a rendering for each number of turns would take minutes.
        if number := bisect_left(range(dropped, len(before)), True, key=fits):
            turn.num_dropped += number
            ids = self.encode([*before[turn.num_dropped :], turn])
            what = "turn is" if number == 1 else f"{number} turns are"
            self._tell(f"the context of {limit} tokens is full: the oldest {what} not shown to the model any more")
        return ids

    def undo(self) -> Turn:
        """Take back the last turn. Raises UsageError where there is none, or a reply is under way."""
        with self._lock:
            self._reply.check_free()
            if not self.turns:
                raise UsageError("there is no turn to take back")
            return self.turns.pop()

    def clear(self) -> None:
        """Begin anew, with the same system message. Raises UsageError while a reply is under way."""
        with self._lock:
            self._reply.check_free()
            self.turns = []

    # ---------------------------------------------------------------------------------------- files

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Write the conversation, and `settings` beside it, as JSON: all of it or nothing.

        Only a saved chat is overwritten. Raises StorageError.
        """
        _check_free(path, "is no saved chat", _is_saved)
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

    def load(self, path: Path) -> dict[str, Any]:
        """Take over a saved conversation, in place of this one; returns the settings that were saved with it.

        Raises UsageError for a file that is not one, or while a reply is under way, with this conversation as it was.
        Replies keep their tokens where these mean the same text here, so another model can go on, too.
        """
        saved = read_saved(path)
        with self._lock:
            self._reply.check_free()
            self._take_over(saved)
        return saved.settings

    def _take_over(self, saved: Saved) -> None:
        system, self.system = self.system, saved.system
        try:
            if saved.turns:
                self.encode(saved.turns)
        except OffspecError:
            self._system = system
            raise
        self.turns = saved.turns

    def export(self, path: Path) -> None:
        """Write the conversation as Markdown, for people.

        Only what was written so by this object is overwritten. Raises StorageError.
        """
        _check_free(path, "was not exported from this conversation", lambda path: path.resolve() in self._exported)
        parts = [f"# {self.engine.name}"]
        if self.system is not None:
            parts += ["## System", self.system]
        for turn in self.turns:
            parts += ["## You", turn.message, "## Reply", turn.reply]
        _write(path, "\n\n".join(part.strip("\n") for part in parts) + "\n")
        self._exported.add(path.resolve())


def lasting_caches(engine: Engine) -> TextCaches:
    """KV caches for requests that go on from one another: what was planned for a text is taken at once.

    Without a plan nobody knows how much that would be.
    """
    return engine.new_caches(engine.max_context, engine.plan.tree) if engine.plan is not None else engine.new_caches()


# ------------------------------------------------------------------------------------------------ to tokens


def turns_of(messages: Sequence[Message], said: Mapping[str, list[int]]) -> tuple[str | None, list[Turn]] | None:
    """The system message and the turns of a conversation that a user's message ends; None for one of another form.

    said: replies with the tokens that they were said as.
    """
    roles = [message["role"] for message in messages]
    num_system = int(roles[:1] == ["system"])
    turns_roles = (["user", "assistant"] * len(messages))[: len(messages) - num_system]
    if roles[num_system:] != turns_roles or roles[-1] != "user":
        return None
    texts = [message["content"] for message in messages]
    asked, answered = texts[num_system::2], texts[num_system + 1 :: 2]
    turns = [Turn(text, reply, said.get(reply, [])) for text, reply in zip(asked, answered, strict=False)]
    return texts[0] if num_system else None, [*turns, Turn(asked[-1])]


def _messages(system: str | None, turns: Sequence[Turn], replies: Sequence[str]) -> list[Message]:
    """The last turn's reply is still to come."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for turn, reply in zip(turns, [*replies, None], strict=True):
        messages.append({"role": "user", "content": turn.message})
        if reply is not None:
            messages.append({"role": "assistant", "content": reply})
    return messages


def encode_turns(
    tokenizer: Tokenizer, system: str | None, turns: Sequence[Turn], most_tokens: int | None = None
) -> list[int]:
    """The template's text as ids, with the very tokens of each reply that stands in it as it was said.

    A second rendering with marks instead of replies shows where they stand. From a reply on that the template changes
    (it may strip one, or leave out its reasoning) the text is encoded as it is. Raises ContextLengthError for a text
    that is far longer than `most_tokens`.
    """
    said = turns[:-1]
    messages = _messages(system, turns, [turn.reply for turn in said])
    if most_tokens is not None:
        tokenizer.check_messages(messages, most_tokens)
    chat = tokenizer.hide_special(messages)
    text, marks = tokenizer.render_chat(chat.messages), [f"\ue000{i}\ue001" for i in range(len(said))]
    if most_tokens is not None:
        tokenizer.check_length(text, most_tokens)
    replies = [message["content"] for message in chat.messages if message["role"] == "assistant"]
    standing_in = iter(marks)
    rest = tokenizer.render_chat(
        [m | {"content": next(standing_in)} if m["role"] == "assistant" else m for m in chat.messages]
    )
    ids, context = list[int](), ""
    done = at = 0  # text[:done] is encoded, text[:at] is understood
    for turn, reply, mark in zip(said, replies, marks, strict=True):
        before, _, rest = rest.partition(mark)
        if not text.startswith(before + reply, at):
            break
        start, at = at + len(before), at + len(before) + len(reply)
        if _is_said(turn, tokenizer):
            ids += [*tokenizer.encode_after(context, text[done:start], chat.texts), *turn.token_ids]
            done, context = at, reply
    return ids + tokenizer.encode_after(context, text[done:], chat.texts)


def _is_said(turn: Turn, tokenizer: Tokenizer) -> bool:
    """Whether the reply's tokens are the reply. Special tokens in it come from a file that somebody else wrote."""
    ids = turn.token_ids
    is_plain = tokenizer.special_in_text or tokenizer.special_ids.isdisjoint(ids)
    return bool(ids) and is_plain and tokenizer.decode(ids, skip_special_tokens=False) == turn.reply


# ------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class Saved:
    """What a file holds."""

    system: str | None
    settings: dict[str, Any]
    turns: list[Turn]


def read_saved(path: Path) -> Saved:
    """Read what `Session.save` wrote. Raises UsageError for anything else."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe or a device may never end
        raise UsageError(f"{path} cannot be read: it is no regular file; give a file that /save wrote")
    try:
        content = parse_json(read_small_file(path))
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise UsageError(f"{path} is no saved chat: not JSON ({exc})") from exc
    if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
        raise UsageError(f'{path} is no saved chat: "format" is not "{FILE_FORMAT}"; give a file that /save wrote')
    version = content.get("version")
    if version != FILE_VERSION:
        raise UsageError(f"{path} has version {version!r} of the format, and {FILE_VERSION} is read: update offspec")
    system, settings, turns = (content.get(key) for key in ("system", "settings", "turns"))
    if not (system is None or isinstance(system, str)) or not isinstance(settings, dict) or not isinstance(turns, list):
        raise UsageError(f"{path} is damaged: system, settings or turns are not what /save writes")
    return Saved(system, settings, [_turn(path, number, turn) for number, turn in enumerate(turns, 1)])


def _turn(path: Path, number: int, content: Any) -> Turn:
    kinds = {"message": str, "reply": str, "finish_reason": str, "num_dropped": int, "token_ids": list}
    good = isinstance(content, dict) and content.keys() == kinds.keys()
    good = good and all(isinstance(content[name], kind) for name, kind in kinds.items())
    good = good and all(type(token) is int and 0 <= token < 2**32 for token in content["token_ids"])
    if not good or not 0 <= content["num_dropped"] < number:
        raise UsageError(f"{path} is damaged: turn {number} is not what /save writes")
    return Turn(**content)


def _is_saved(path: Path) -> bool:
    try:
        read_saved(path)
    except UsageError:
        return False
    return True


def _check_free(path: Path, fault: str, is_ours: Callable[[Path], bool]) -> None:
    """Raises StorageError where something else than ours stands."""
    if os.path.exists(path) and not is_ours(path):
        raise StorageError(f"{path} exists and {fault}; name another file")


def _write(path: Path, text: str) -> None:
    """Raises StorageError."""
    try:
        content = text.encode()
    except UnicodeEncodeError as exc:
        raise StorageError(f"{path} cannot be written: {exc}; nothing is lost") from exc
    write_atomically(path, content)
