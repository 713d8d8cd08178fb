"""The `offspec` program: finds the command, and turns every error into one line and an exit code.

0 done; 1 a failure while running; 2 wrong usage; 130 Ctrl-C. Commands are imported only when they are called, so that
`offspec --help` needs neither torch nor numpy.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NoReturn

import click

from offspec import __version__
from offspec.errors import OffspecError

COMMANDS = {
    "run": "Generate text for one prompt.",
    "verify": "Show that speculative text equals plain decoding, token for token.",
}
DONE, FAILURE, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own name, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"offspec.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", prog_name="offspec")
def cli() -> None:
    """offspec runs language models far larger than the GPU, with exactly the output the model alone would have given.

    \b
    Example:  offspec run builtin "def area("
    """


def main() -> NoReturn:
    """Entry point of the script and of `python -m offspec`."""
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run one command line; returns the exit code."""
    verbose = False
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" rather than a traceback
        verbose = any(arg in ("-v", "--verbose") for arg in args)
        result = cli.main(args, prog_name="offspec", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except KeyboardInterrupt:
        _show("")
        return INTERRUPTED
    except click.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as exc:
        _show(exc.format_message())
        return WRONG_USAGE
    except click.ClickException as exc:
        where = exc.ctx.command_path if isinstance(exc, click.UsageError) and exc.ctx else "offspec"
        _show(f"Error: {' '.join(exc.format_message().split())} (see {where} --help)")
        return exc.exit_code
    except BrokenPipeError:
        _detach_stdout()
        return DONE  # whoever reads us has had enough, as with `| head`
    except OSError as exc:
        _detach_stdout()
        _show(f"Error: cannot read or write: {exc}")
        return FAILURE
    except OffspecError as exc:
        if verbose:
            import traceback

            traceback.print_exc()
        _show(f"Error: {exc}")
        return exc.exit_code


def _show(line: str) -> None:
    click.echo(line, err=True)


def _detach_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere, instead of failing once more."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


if __name__ == "__main__":
    main()
