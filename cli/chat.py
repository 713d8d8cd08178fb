"""`offspec chat`: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offspec import RECOMMENDED, LoadOptions, SamplingParams, SpeculationParams, with_recommended
from offspec.errors import OffspecError, UsageError
from offspec.user_files import expand_home, user_folder

from .chat_files import KeptChat, newest_file
from .constraints import CONSTRAINT, constraint_options
from .flag_declarations import OUTPUT, VALUES, OffspecCommand, option, record_of, with_flags
from .line_input import ReadMessage, line_editor, open_history, read_from_pipe, unquoted
from .options import (
    MODEL_HELP,
    SAMPLING,
    SPECULATION,
    fit_to_requests,
    given_sampling,
    is_typed,
    learning_options,
    load_engine,
    loading_options,
    lookup_files_option,
    model_argument,
    more_text_options,
    output_options,
    samples_as_recommended,
    sampling_options,
    special_in_text_option,
    speculation_options,
    think_option,
)
from .reasoning import thinking_first
from .server.privacy import public_name
from .settings import nearest, parsed_value, settable
from .terminal import as_shown, columns, draft_off, first_pass_shown, keys_held, marked, shows_colors, table, wrapped

if TYPE_CHECKING:
    from offspec import Session, Stats, Turn

MAX_NEW_TOKENS = 1024  # in a chat the model ends its replies itself
LEAVING = ("exit", "quit", "bye")
OWN_SETTINGS = {"when_full", "show_stats", "save_cache"}  # by click's names
SETTINGS = (SAMPLING, SPECULATION, CONSTRAINT)  # records whose flags are settings of the conversation, too
SHORTHANDS = {"verbose": "stats"}  # Ollama's name
# What `/set` shows first; the others follow.
USUAL_SETTINGS = ("temperature", "top-p", "top-k", "max-new-tokens", "seed", "stop", "stats")
WARN_SHARE = 0.75  # a note appears when this share of the context is in use


@click.command(
    cls=OffspecCommand,
    name="chat",
    help=f"""Chat with a model that has a chat template.

{MODEL_HELP} Each turn computes only its new tokens; the KV cache holds the rest. Type /help for the commands. Put three
quotes around a message of several lines. Ctrl-C stops a reply, Ctrl-D exits. From a pipe, each line is a message or a
command.

\b
Examples:
  offspec chat
  offspec chat ./Llama-3.1-70B-nf4 --draft ./Llama-3.2-1B-Instruct --temperature 0.7 --system "Be brief."
  printf 'def area(\\n/save talk.json\\n' | offspec chat builtin -q
""",
)
@model_argument
@option("--system", metavar="TEXT", help="System message.")
@option(
    "--load",
    "saved",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Continue a conversation saved with /save; flags override its settings.",
)
@option("--resume", is_flag=True, help="Continue the latest conversation with MODEL on a terminal.")
@option(
    "--autosave/--no-autosave",
    is_rare=True,
    default=True,
    show_default=True,
    help="On a terminal, keep the conversation in the user's state folder, for --resume.",
)
@option(
    "--when-full",
    type=click.Choice(["drop", "stop"]),
    default="drop",
    show_default=True,
    help="When the context is full: drop the oldest turns, or refuse the message.",
)
@option(
    "--history",
    is_rare=True,
    metavar="FILE|none",
    help="File for the history of typed lines. [default: in the user's state folder]",
)
@option(
    "--save-cache/--no-save-cache",
    default=True,
    show_default=True,
    help="/save also writes the KV entries to FILE.kv, so that /load need not compute them.",
)
@loading_options
@lookup_files_option
@think_option
@special_in_text_option
@speculation_options
@learning_options
@sampling_options(MAX_NEW_TOKENS)
@more_text_options
@constraint_options
@option(
    "--color-accepted",
    group=OUTPUT,
    is_rare=True,
    is_flag=True,
    help="Color accepted draft tokens green, looked-up ones cyan, the target's own tokens yellow.",
)
@output_options(stats="Show tokens/s and other statistics after each reply.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    system: str | None,
    saved: Path | None,
    resume: bool,
    autosave: bool,
    history: str | None,
    color_accepted: bool,
    quiet: bool,
    verbose: bool,
    loading: LoadOptions,
    speculation: SpeculationParams,
    sampling: SamplingParams,
    **others: object,  # settings of the conversation, which `Values` reads
) -> None:
    if resume and saved is not None:
        raise click.UsageError("Give --resume or --load, not both.")
    model = loading.model
    resumed = newest_file(model) if resume else None
    settings = Values(ctx.command, ctx.meta[VALUES])
    settings.params()  # raises for a constraint that cannot be read
    loading = replace(fit_to_requests(loading, sampling, speculation), chats=True)
    engine = load_engine(loading, quiet=quiet, verbose=verbose)
    chosen = with_recommended(sampling, engine.recommended_sampling, given_sampling(speculation))
    settings.set({name.replace("_", "-"): getattr(chosen, name) for name in RECOMMENDED})
    from offspec import Session

    drops_oldest = settings["when_full"] == "drop"
    session = Session(engine, system, drops_oldest=drops_oldest, notify=partial(_note, quiet=quiet))
    on_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    kept = KeptChat() if on_terminal and autosave else None
    chat = Chat(session, settings, kept, marks=color_accepted and shows_colors(), quiet=quiet, verbose=verbose)
    if (file := saved or resumed) is not None:
        _continue(chat, file, system)
        if resumed is not None and kept is not None:
            kept.file = resumed
    if on_terminal and not quiet:
        click.echo(f"{_described(chat)}. /help shows the commands, Ctrl-D exits.")
        for turn in session.turns[-1:]:
            click.echo(_shown(turn))
    read = line_editor(_history_file(history, quiet=quiet), chat.completions) if on_terminal else read_from_pipe
    num_errors = chat.talk(read)
    if kept is not None and kept.file is not None:
        _note(f"offspec chat {shlex.quote(model)} --resume continues this conversation", quiet=quiet)
    if num_errors and not on_terminal:
        raise OffspecError(f"{num_errors} line{'s' * (num_errors > 1)} failed; see the errors above")


samples_as_recommended(command)


def _described(chat: Chat) -> str:
    """The names of the models, and how the text is sampled."""
    engine, (params, _) = chat.session.engine, chat.values.params()
    names = f"{public_name(engine.name)}, draft {public_name(engine.draft_name or 'none')}"
    shown = [name for name in RECOMMENDED if getattr(params, name) != getattr(SamplingParams, name)]
    sampling = [f"{name.replace('_', '-')} {getattr(params, name):g}" for name in shown]
    return ", ".join([names, *(sampling if params.temperature else ["greedy"])])


def _continue(chat: Chat, file: Path, system: str | None) -> None:
    """Load a conversation; the command line's settings override its own."""
    flags = chat.values.given_as_flags()
    chat.load(str(file))
    chat.change(flags)
    if is_typed("system"):
        chat.session.system = system


def _history_file(wanted: str | None, *, quiet: bool) -> Path | None:
    if wanted == "none":
        return None
    file = user_folder("state") / "chat_history" if wanted is None else expand_home(wanted)
    if open_history(file):
        return file
    _note(f"cannot write {file}, so the history of typed lines is off; --history FILE sets another file", quiet=quiet)
    return None


def _note(text: str, *, quiet: bool) -> None:
    if not quiet:
        click.echo(as_shown(f"({text})", sys.stderr), err=True)


# ------------------------------------------------------------------------------------------------ settings


class Values:
    """The settings of a conversation, parsed and checked by the same click parameters as the flags."""

    def __init__(self, command: click.Command, values: Mapping[str, object]) -> None:
        """values: by click's names, as the command received them."""
        self._command = command
        self.parameters = {
            key: parameter
            for key, parameter in settable(command).items()
            if parameter.name in values and (parameter.name in OWN_SETTINGS or record_of(parameter) in SETTINGS)
        }
        self._values = {str(p.name): values[str(p.name)] for p in self.parameters.values()}

    def params(self) -> tuple[SamplingParams, SpeculationParams]:
        """Raises UsageError or click.UsageError for an invalid value or combination."""
        sampling = CONSTRAINT.of(self._command, self._values).applied_to(SAMPLING.of(self._command, self._values))
        speculation = SPECULATION.of(self._command, self._values)
        speculation.check_sampling(sampling)
        return sampling, speculation

    def __getitem__(self, name: str) -> object:
        """A value by click's name."""
        return self._values[name]

    def set(self, changes: Mapping[str, object]) -> None:
        """Change settings, by their flags' names without dashes; all or none. Raises UsageError."""
        values = dict(self._values)
        for key, value in changes.items():
            if key not in self.parameters:
                guess = nearest(key, set(self.parameters))
                meant = f"did you mean {guess}?" if guess else f"choose one of {', '.join(self.parameters)}"
                raise UsageError(f"unknown setting {key!r}; {meant}")
            parameter = self.parameters[key]
            try:
                values[str(parameter.name)] = None if value is None else parsed_value(parameter, value, self._command)
            except click.ClickException as exc:
                raise UsageError(f"{key}: {exc.message}") from exc
        before, self._values = self._values, values
        try:
            self.params()
        except (click.UsageError, OffspecError, TypeError) as exc:
            self._values = before
            if isinstance(exc, OffspecError):
                raise
            raise UsageError(exc.message if isinstance(exc, click.UsageError) else "a setting has no value") from exc

    def as_dict(self) -> dict[str, object]:
        """The settings by the flags' names without dashes, as values that the flags accept and JSON can hold."""
        values = {key: self._values[str(p.name)] for key, p in self.parameters.items()}
        if values.get("budget", 0) is None:
            values["budget"] = "auto"
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def given_as_flags(self) -> dict[str, object]:
        """The settings that the command line gave; they override all others."""
        return {key: value for key, value in self.as_dict().items() if is_typed(str(self.parameters[key].name))}


# ------------------------------------------------------------------------------------------------ the conversation


class Chat:
    """Reads lines, answers messages and runs commands. An error prints one line; the conversation continues."""

    def __init__(
        self,
        session: Session,
        values: Values,
        kept: KeptChat | None = None,
        *,
        marks: bool = False,
        quiet: bool = False,
        verbose: bool = False,
    ) -> None:
        """kept: where the conversation is saved after each line; None is nowhere."""
        self.session, self.values, self._kept = session, values, kept
        self._marks, self._quiet, self._verbose = marks, quiet, verbose
        self._note = partial(_note, quiet=quiet)
        self._edited: str | None = None  # the message that the next one replaces
        self._is_warned = self._is_draft_off = False

    def change(self, settings: Mapping[str, object]) -> None:
        """Change settings, by the flags' names without dashes. If it raises UsageError, nothing changes."""
        self.values.set(settings)
        self.session.drops_oldest = self.values["when_full"] == "drop"

    def talk(self, read: ReadMessage) -> int:
        """Process lines until the end of input; returns the number of lines that failed.

        That is also where nothing can be read any more: the terminal is gone and SIGHUP ignored (nohup).
        """
        num_errors = 0
        while True:
            try:
                try:
                    line = read(self._edited or "")
                except BrokenPipeError:
                    raise
                except (EOFError, OSError):
                    return num_errors
                if not self.do(line):
                    return num_errors
            except KeyboardInterrupt:
                self._note("the message is unchanged" if self._edited else "Ctrl-D exits")
                self._edited = None
            except BrokenPipeError:
                raise
            except Exception as exc:  # noqa: BLE001 (no error may lose the conversation)
                num_errors += 1
                self._tell_error(exc)

    def do(self, line: str) -> bool:
        """Process one message or command; False if it ends the chat. Raises OffspecError."""
        try:
            return self._do(line)
        finally:
            self._keep()

    def _keep(self) -> None:
        """Save the conversation, if it has a turn; a failure is told once."""
        if self._kept is not None and self.session.turns:
            try:
                self.session.save(self._kept.file_to_write(), self.values.as_dict())
            except (OSError, OffspecError) as exc:
                self._kept.file = None  # no note at the end names it
                self._kept = None
                self._note(f"this conversation is not kept for --resume: {exc}")

    def _do(self, line: str) -> bool:
        text, again = unquoted(line), self._edited is not None
        self._edited = None
        if not line.startswith("/"):
            if text.strip():
                self.answer(text, again=again)
            return True
        name, _, argument = line[1:].partition(" ")
        if name in LEAVING:
            return False
        if name not in COMMANDS:
            guess = nearest(name, COMMANDS)
            meant = f"did you mean /{guess}?" if guess else "/help lists them"
            raise UsageError(f"unknown command /{name}; {meant} (put a message that begins with / in three quotes)")
        getattr(self, name)(argument.strip())
        return True

    def answer(self, message: str, *, again: bool = False) -> None:
        """Print the reply step by step. Ctrl-C stops it; the conversation keeps the printed part."""
        with keys_held():
            self._answer(message, again=again)

    def _answer(self, message: str, *, again: bool) -> None:
        sampling, speculation = self.values.params()
        sampling = thinking_first(sampling, [{"role": "user", "content": message}])
        steps, last = self.session.reply(message, sampling, speculation, again=again), ""
        try:
            for step in first_pass_shown(self.session.engine, steps, quiet=self._quiet):
                sys.stdout.write(marked(step) if self._marks else as_shown(step.text))
                sys.stdout.flush()
                last = step.text or last
        except KeyboardInterrupt:
            steps.close()
            if not last:
                self._note("stopped before the first token; the message is removed")
                return
            click.echo()
            self._note("stopped; the conversation keeps this part of the reply")
            return
        except BaseException:
            if last:
                click.echo()
            raise
        if not last.endswith("\n"):
            click.echo()
        turn = self.session.turns[-1]
        self._explain_end(turn, sampling)
        if turn.stats is not None:
            self._tell_stats(turn.stats)
            try:
                self.session.engine.learn(turn.stats)
            except KeyboardInterrupt:
                self._note("learning stopped; this reply does not change the draft")

    def _tell_stats(self, stats: Stats) -> None:
        """Print a reply's statistics if they are asked for. Why the draft is off is told once."""
        if self.values["show_stats"]:
            click.echo(wrapped(f"({reply_figures(stats)})"), err=True)
        was_off, self._is_draft_off = self._is_draft_off, bool(off := draft_off(stats))
        if off and not was_off and (self.values["show_stats"] or self._verbose):
            self._note(wrapped(f"the draft is {off}"))

    def _explain_end(self, turn: Turn, sampling: SamplingParams) -> None:
        """Print a note if a limit cut the reply, or if the context is nearly full."""
        session = self.session
        if turn.finish_reason == "length":
            if len(turn.token_ids) >= sampling.max_new_tokens:
                self._note(f"cut at {sampling.max_new_tokens} tokens; /set max-new-tokens N allows more")
            else:
                self._note("cut, because the context is full")
        limit = session.engine.max_context
        is_filling = session.num_tokens + session.spare(sampling) > WARN_SHARE * limit
        if is_filling and not self._is_warned:
            then = "the oldest turns will be dropped" if session.drops_oldest else "messages will be refused"
            self._note(f"{session.num_tokens} of {limit} tokens of context in use; when it is full, {then}")
        self._is_warned = is_filling

    def _tell_error(self, error: Exception) -> None:
        message = error.message if isinstance(error, click.ClickException) else with_flags(str(error))
        if not isinstance(error, (OffspecError, click.ClickException)):
            message = f"{type(error).__name__}: {message} (unexpected; -v shows the traceback)"
        if self._verbose:
            from traceback import format_exc

            click.echo(format_exc().rstrip(), err=True)
        click.echo(as_shown(f"Error: {' '.join(message.split())}", sys.stderr), err=True)

    def completions(self, text: str) -> Iterable[str]:
        """Completions of the last word of a line."""
        if not text.startswith("/"):
            return []
        name, space, rest = text[1:].partition(" ")
        if not space:
            return [f"/{command}" for command in (*COMMANDS, *LEAVING) if command.startswith(name)]
        if name == "set" and " " not in rest:
            return [key for key in self.values.parameters if key.startswith(rest)]
        if name in ("save", "load", "export"):
            return _files(rest)
        return []

    # ---------------------------------------------------------------------------------------- commands

    def regen(self, argument: str) -> None:
        sampling, _ = self.values.params()
        if sampling.temperature == 0 or sampling.seed is not None:
            why = "temperature is 0" if sampling.temperature == 0 else "the seed is set"
            remedy = "/set temperature 0.7" if sampling.temperature == 0 else "/set seed none"
            self._note(f"{why}, so the reply will be the same; {remedy} allows another")
        self.answer(self._last().message, again=True)

    def undo(self, argument: str) -> None:
        line = " ".join(self.session.undo().message.split())
        self._note(f"removed: {line if len(line) <= 60 else f'{line[:57]}...'}")

    def edit(self, argument: str) -> None:
        if argument:
            self.answer(argument, again=bool(self._last()))
            return
        message = self._last().message
        self._edited = f'"""{message}"""' if "\n" in message else message

    def system(self, argument: str) -> None:
        if argument:
            self.session.system = None if argument == "none" else unquoted(argument)
        click.echo("no system message" if self.session.system is None else as_shown(self.session.system))

    def set(self, argument: str) -> None:
        if not argument:
            self.show_settings()
            return
        try:
            key, *words = shlex.split(argument)
        except ValueError as exc:
            raise UsageError(f"/set {argument}: {exc}") from exc
        key = key.replace("_", "-").lstrip("-")
        typed, key = key, SHORTHANDS.get(key, key)
        parameter = self.values.parameters.get(key)
        takes_several = parameter is not None and parameter.multiple
        if not words and isinstance(parameter, click.Option) and parameter.is_flag:
            words = ["true"]
        if words == ["none"]:
            value: object = [] if takes_several else None
        elif takes_several and words:
            value = words
        elif len(words) != 1:
            raise UsageError(
                f"give a setting and its value, like /set temperature 0.7; /set {key} none unsets it, /set without "
                "arguments shows all settings"
            )
        else:
            value = words[0]
        self.change({key: value})
        click.echo(f"{typed} {_worded(self.values.as_dict()[key])}")

    def show_settings(self) -> None:
        values = self.values.as_dict()
        others = [key for key in values if key not in USUAL_SETTINGS]
        rows = [(key, _worded(value)) for key, value in values.items()]
        lines = dict(zip(values, table(rows, 2), strict=True))
        click.echo(as_shown("\n".join(lines.get(key, "") for key in (*USUAL_SETTINGS, "", *others))))

    def show(self, argument: str) -> None:
        session = self.session
        if session.system is not None:
            click.echo(as_shown(f"system message: {session.system}\n"))
        for turn in session.turns:
            click.echo(_shown(turn))
        click.echo(f"{_described(self)}, {_turns(session)}; /set shows the settings")

    def stats(self, argument: str) -> None:
        click.echo("\n".join(stats_table(self.session, columns() if sys.stdout.isatty() else None)))

    def clear(self, argument: str) -> None:
        self.session.clear()
        self._keep_apart()
        self._note("new conversation with the same system message and settings")

    def save(self, argument: str) -> None:
        path = _path(argument, "/save")
        self.session.save(path, self.values.as_dict())
        self._note(f"{_turns(self.session)} saved in {path}")
        if self.values["save_cache"]:
            self.session.save_entries(path)

    def load(self, argument: str) -> None:
        path, before = _path(argument, "/load"), (self.session.turns, self.session.system)
        settings = self.session.load(path)
        try:
            self.change(settings)
        except OffspecError as exc:
            self.session.turns, self.session.system = before
            raise UsageError(f"{path}: {exc}") from exc
        self._keep_apart()
        self._note(f"{_turns(self.session)} loaded from {path}")

    def _keep_apart(self) -> None:
        """Another conversation begins: it must not replace the earlier one."""
        if self._kept is not None:
            self._kept.file = None

    def export(self, argument: str) -> None:
        path = _path(argument, "/export")
        self.session.export(path)
        self._note(f"written to {path}")

    def help(self, argument: str) -> None:
        lines = table([(f"/{name} {takes}", help_text) for name, (takes, help_text) in COMMANDS.items()], 2)
        click.echo("\n".join([*lines, "", *KEYS]))

    def _last(self) -> Turn:
        if not self.session.turns:
            raise UsageError("the conversation has no turn yet")
        return self.session.turns[-1]


COMMANDS = {  # names of methods of `Chat` → the argument, and the help text
    "regen": ("", "Generate the last reply again."),
    "undo": ("", "Remove the last message and its reply."),
    "edit": ("[TEXT]", "Edit the last message and generate a new reply."),
    "system": ("[TEXT|none]", "Show or change the system message."),
    "set": ("[NAME VALUE]", "Show or change settings, e.g. /set temperature 0.7."),
    "show": ("", "Show the conversation."),
    "stats": ("", "Show tokens, tokens per pass and tokens/s of each turn."),
    "clear": ("", "Start a new conversation."),
    "save": ("FILE", "Save conversation and settings, and the KV entries as FILE.kv."),
    "load": ("FILE", "Continue a conversation from a file."),
    "export": ("FILE.md", "Write the conversation as Markdown."),
    "help": ("", "Show this list."),
}
KEYS = (
    '""" starts and ends a message of several lines; Alt-Enter inserts a line break.',
    "Ctrl-C stops a reply and keeps its text; Ctrl-D, /exit, /quit or /bye exits. Tab completes.",
    "/set verbose shows tokens/s after each reply.",
)


STATS_COLUMNS = ("turn", "prompt", "new", "reply", "per pass", "first s", "tokens/s", "seed")


def stats_table(session: Session, width: int | None = None) -> list[str]:
    """One line per turn, or a sentence per turn if the table would be wider than `width`.

    new: the scored tokens of the prompt; the KV caches held the others. seed: set by the user, or random.
    """
    rows = [_stats_cells(number, turn) for number, turn in enumerate(session.turns, 1)]
    used = f"{session.num_tokens} of {session.engine.max_context} tokens of context used"
    lines = table([STATS_COLUMNS, *rows])
    if width is None or max(map(len, lines)) <= width:
        return [*lines, used]
    sentences = [
        ", ".join(f"{name} {cell}" for name, cell in zip(STATS_COLUMNS, row, strict=True) if cell) for row in rows
    ]
    return [line for text in (*sentences, used) for line in textwrap.wrap(text, max(width, 20), subsequent_indent="  ")]


def _stats_cells(number: int, turn: Turn) -> list[str]:
    """Cells in the order of STATS_COLUMNS; a turn from a file has only the first two."""
    if (s := turn.stats) is None:
        return [str(number), "(loaded)", *[""] * 6]
    rate = f"{s.decode_tokens_per_s:.1f}" if s.decode_tokens_per_s else "-"
    seed = f"{s.seed}{'  lossy' * s.is_lossy}"
    counts = map(str, (number, s.num_prompt_tokens, s.num_prefilled_tokens, s.num_tokens))
    return [*counts, f"{s.tokens_per_pass:.2f}", f"{s.ttft_s:.2f}", rate, seed]


def reply_figures(stats: Stats) -> str:
    """The statistics of a reply as one line."""
    rate = f", {stats.decode_tokens_per_s:.1f} tokens/s" if stats.decode_tokens_per_s else ""
    off = ", draft off" if stats.draft_off_since else ""
    return (
        f"{stats.num_tokens} tokens{rate}, {stats.tokens_per_pass:.2f} tokens per pass, "
        f"first after {stats.ttft_s:.2f} s{off}"
    )


def _shown(turn: Turn) -> str:
    """A message and its reply, as `/show` has them."""
    state = " (stopped)" if turn.finish_reason == "interrupted" else ""
    return as_shown(f">>> {turn.message}\n{turn.reply.rstrip()}{state}\n")


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UsageError(f"{command} needs a file, like {command} talk{'.md' if command == '/export' else '.json'}")
    return expand_home(argument)


def _files(beginning: str) -> Sequence[str]:
    path = expand_home(beginning)
    folder, stem = (path, "") if beginning.endswith(("/", "\\")) else (path.parent, path.name)
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.name.startswith(stem))
    except OSError:
        return []
    return [f"{entry}/" if entry.is_dir() else str(entry) for entry in entries]


def _turns(session: Session) -> str:
    number = len(session.turns)
    return f"{number} turn{'s' * (number != 1)}"


def _worded(value: object) -> str:
    if isinstance(value, list):
        return shlex.join(value) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
