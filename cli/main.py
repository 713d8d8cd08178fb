"""The `offspec` program: finds the command, and turns every error into one line and an exit code.

0 done; 1 a failure while running; 2 wrong usage; 130 Ctrl-C; 143 and 129 SIGTERM and SIGHUP. Commands are imported only
when they are called, so that `offspec --help` needs neither torch nor numpy.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from offspec import __version__
from offspec.errors import OffspecError

from .help_groups import HELP_NAMES

COMMANDS = {
    "run": "Generate text for one prompt, or for a file of them.",
    "chat": "Talk to a model.",
    "serve": "Answer requests over HTTP, as OpenAI's API has them.",
    "bench": "Measure speculative against plain decoding.",
    "plan": "Show what would go where, and how long a pass would take.",
    "quantize": "Make a 4-bit checkpoint of a 16-bit one, or lay one out to stream well.",
    "distill": "Train an exit layer, so that a model's first layers draft for it.",
    "verify": "Show that speculative text equals plain decoding, token for token.",
    "doctor": "Show what this machine has, measured, and what would help most.",
    "config": "Show every setting and where it comes from.",
}
COMPLETION = "_OFFSPEC_COMPLETE"  # set by the shell's completion script (click)
ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # besides Ctrl-C
DONE, FAILURE, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own name, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
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
    """offspec runs language models far larger than the GPU, with exactly the output the model alone would have given.

    \b
    Example:  offspec run builtin "def area("
    """
    if ctx.invoked_subcommand is None:
        _show(ctx.get_help())
        ctx.exit(WRONG_USAGE)
    if ctx.invoked_subcommand != "config":  # which has nothing to be set, and shows what is wrong with a file
        from .config import Commands
        from .settings import Settings

        try:
            ctx.default_map = {ctx.invoked_subcommand: Settings(Commands(ctx)).defaults(ctx.invoked_subcommand)}
        except click.UsageError:
            if not {*HELP_NAMES, "--help-all"} & set(ctx.obj):  # which must work whatever is set
                raise


def main() -> NoReturn:
    """Entry point of the script and of `python -m offspec`."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP is ignored
            signal.signal(number, _leave)
    sys.exit(run(sys.argv[1:]))


def _leave(number: int, frame: FrameType | None) -> None:
    """End as an exception does, so that what was learnt is written; what comes meanwhile changes nothing."""
    for other in ENDING_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def run(args: list[str]) -> int:
    """Run one command line; returns the exit code."""
    verbose = any(arg in ("-v", "--verbose") for arg in args)
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" rather than a traceback
        if sys.stdout is None:
            raise OSError("standard output is closed")
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
        return _fail(f"{exc.format_message()} (see {where} --help)", exc.exit_code)
    except BrokenPipeError:
        _detach_stdout()
        return DONE  # whoever reads us has had enough, as with `| head`
    except OSError as exc:
        _detach_stdout()
        return _fail(f"cannot read or write: {exc}", FAILURE)
    except OffspecError as exc:
        return _fail(str(exc), exc.exit_code, traceback=verbose)
    except Exception as exc:  # noqa: BLE001 (out of memory, or a mistake of ours: still one line)
        return _fail(f"{type(exc).__name__}: {exc} (unexpected; -v shows where)", FAILURE, traceback=verbose)


def _fail(message: str, exit_code: int, *, traceback: bool = False) -> int:
    """Say what went wrong, in one line whatever the message quotes; returns the exit code."""
    if traceback:
        from traceback import format_exc

        _show(format_exc().rstrip())
    _show(f"Error: {' '.join(message.split())}")
    return exit_code


def _show(text: str) -> None:
    with suppress(OSError):  # where standard error cannot be written to, the exit code has to say it all
        click.echo(text, err=True)


def _detach_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere, instead of failing once more."""
    with suppress(OSError, AttributeError):  # it may be closed, or a stand-in without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
