"""The `offspec` program: finds the command, and turns every error into one line and an exit code.

Exit codes: 0 success; 1 failure while running; 2 wrong usage; 130 Ctrl-C; 143 SIGTERM; 129 SIGHUP. Calling a command
imports its module, so `offspec --help` needs neither torch nor numpy.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from io import BufferedWriter, FileIO, TextIOWrapper
from types import FrameType
from typing import Any, NoReturn, TextIO

import click
from click.shell_completion import shell_complete

from offspec import __version__
from offspec.errors import OffspecError

from .flag_declarations import HELP_NAMES, Commands, with_flags
from .interrupts import INTERRUPTED, handle_interrupts

COMMANDS = {
    "run": "Generate text for one prompt, or for a file of prompts.",
    "chat": "Chat with a model.",
    "serve": "Serve OpenAI's API over HTTP.",
    "bench": "Compare speculative and plain decoding.",
    "plan": "Predict the placement of a model's layers and the time of a pass.",
    "quantize": "Convert a checkpoint to 4 bit, packed bf16 or plain floats, in a layout for fast streaming.",
    "distill": "Train a draft for a model: an exit layer, a head or a small model.",
    "verify": "Compare speculative text with plain decoding, token by token.",
    "models": "List, download and remove models.",
    "doctor": "Show this machine's hardware, its measured rates, and advice.",
    "config": "Show every setting with its value and source.",
}
ELSEWHERE = {  # commands of Ollama and others → what does that here
    "pull": "offspec models pull downloads one; other commands do when it is first named",
    "list": "offspec models lists them",
    "rm": "offspec models rm removes one",
}
NEXT = """offspec runs language models that are larger than the GPU or the RAM. Next:

  offspec doctor                    is this machine ready?
  offspec run builtin "def area("   a first text, without a download
  offspec serve builtin             a page to chat in at http://127.0.0.1:8080, and APIs

offspec --help shows all commands."""
COMPLETION = "_OFFSPEC_COMPLETE"  # set by the shell's completion script (click)
# Signals that end the program, besides Ctrl-C.
ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
SERVE_THREAD = "offspec-serve"  # the name of the thread that runs a server's passes
DONE, FAILURE, WRONG_USAGE = 0, 1, 2
MOST_CHARACTERS = 1000  # of an error, which may name a path of thousands


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own name, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if not ctx.resilient_parsing and cmd_name in ELSEWHERE:
                ctx.fail(f"no such command {cmd_name!r}; {ELSEWHERE[cmd_name]}")
            if not ctx.resilient_parsing and (meant := get_close_matches(cmd_name, COMMANDS, n=1)):
                ctx.fail(f"no such command {cmd_name!r}; did you mean {meant[0]}?")
            return None
        command = import_module(f"offspec.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": list(HELP_NAMES), "max_content_width": 100},
)
@click.version_option(__version__, "--version", prog_name="offspec")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run language models that are larger than the GPU or the RAM.

    The text is that of plain decoding: exactly on a CPU, and on a GPU for streamed targets.

    \b
    Example:  offspec run builtin "def area("
    """
    if ctx.invoked_subcommand is None:
        _show(NEXT)
        ctx.exit(WRONG_USAGE)
    if ctx.invoked_subcommand != "config":  # config has no settings of its own, and itself reports a faulty file
        from .settings import Settings

        try:
            ctx.default_map = {ctx.invoked_subcommand: Settings(Commands(ctx)).defaults(ctx.invoked_subcommand)}
        except click.UsageError:
            if not {*HELP_NAMES, "--help-all"} & set(ctx.obj):  # help must work with any settings
                raise


def main() -> NoReturn:
    """Run the process's command line, and exit."""
    sys.stderr = _lenient(sys.stderr)
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP is ignored
            signal.signal(number, _leave)
    try:
        handle_interrupts(at_once=False)
        code = _run_program()
        handle_interrupts(at_once=True)  # everything is written
    except KeyboardInterrupt:  # another Ctrl-C, while the first one was handled
        handle_interrupts(at_once=True)
        code = INTERRUPTED
    if any(thread.name == SERVE_THREAD for thread in threading.enumerate()):
        # A pass of a server that has stopped. Python would end while torch computes, or wait for a minute.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _run_program() -> int:
    """Run the process's command line; returns the exit code."""
    try:
        return run(sys.argv[1:])
    except SystemExit as exc:  # from `_leave`, or a server's handler of SIGTERM
        return exc.code if isinstance(exc.code, int) else FAILURE


class _LenientFile(FileIO):
    """A file that loses what the system refuses to write: notes must not end a program that answers."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def _lenient(stream: TextIO) -> TextIO:
    """The stream as one to which writing never fails. On Windows, where a console is no file, it is unchanged."""
    if sys.platform == "win32" or stream is None:
        return stream
    file = _LenientFile(stream.fileno(), "w", closefd=False)
    return TextIOWrapper(BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True)


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit by an exception, so that the draft's training is saved; later signals are ignored."""
    for other in ENDING_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def run(args: list[str]) -> int:
    """Run one command line; returns the exit code."""
    verbose = any(arg in ("-v", "--verbose") for arg in args)
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?"
        if sys.stdout is None:
            return _fail("standard output is closed; leave it open, or redirect it (> /dev/null)", FAILURE)
        try:
            os.getcwd()
        except FileNotFoundError as exc:  # libraries would end the process with messages of their own
            raise OffspecError("the working folder was removed; change to another one (cd)") from exc
        if instruction := os.environ.get(COMPLETION):
            return shell_complete(cli, {}, "offspec", COMPLETION, instruction)
        # Not `cli.main`, which has an exit code of its own for a closed pipe.
        with cli.make_context("offspec", list(args), obj=args) as context:
            cli.invoke(context)
        sys.stdout.flush()
        return DONE
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort):
        _show("")
        return INTERRUPTED
    except click.ClickException as exc:
        where = exc.ctx.command_path if isinstance(exc, click.UsageError) and exc.ctx else "offspec"
        message = exc.format_message()
        if where == "offspec run" and "unexpected extra argument" in message:
            message += "; put quotes around the prompt"
        return _fail(f"{message} (see {where} --help)", exc.exit_code)
    except BrokenPipeError:
        _detach(sys.stdout)
        return DONE  # the reader closed the pipe, as `| head` does
    except OffspecError as exc:
        return _fail(with_flags(str(exc)), exc.exit_code, traceback=verbose)
    except Exception as exc:  # noqa: BLE001 (a disk, memory, or a bug: still one line)
        return _fail_with(exc, verbose=verbose)


def _fail_with(exc: Exception, *, verbose: bool) -> int:
    """Print an error that is not ours; returns the exit code."""
    from offspec import memory_error

    if (lack := memory_error(exc)) is not None:
        return _fail(with_flags(str(lack)), lack.exit_code, traceback=verbose)
    if isinstance(exc, OSError):
        from offspec.user_files import reason, remedy

        # What is written to files has their names.
        unnamed = (
            "standard output" if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "a connection or file"
        )
        _detach(sys.stdout)
        advice = remedy(exc, "check that it exists and that you may use it")
        return _fail(f"{exc.filename or unnamed} cannot be read or written ({reason(exc)}); {advice}", FAILURE)
    return _fail(f"{type(exc).__name__}: {exc} (unexpected; -v shows the traceback)", FAILURE, traceback=verbose)


def _fail(message: str, exit_code: int, *, traceback: bool = False) -> int:
    """Print an error as one line, even if the message has several; returns the exit code."""
    if traceback:
        from traceback import format_exc

        _show(format_exc().rstrip())
    line = " ".join(message.split())
    if len(line) > MOST_CHARACTERS:
        line = f"{line[: MOST_CHARACTERS // 2]} … {line[-MOST_CHARACTERS // 2 :]}"
    _show(f"Error: {line}")
    return exit_code


def _show(text: str) -> None:
    try:
        click.echo(text, err=True)
    except OSError:  # only the exit code reports the error
        _detach(sys.stderr)


def _detach(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that the interpreter's flush at exit does not fail again."""
    with suppress(OSError, ValueError, AttributeError):  # it may be closed, or have no descriptor
        number = stream.fileno()
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), number)


if __name__ == "__main__":
    main()
