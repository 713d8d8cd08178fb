"""Flags, declared once: spelling, type, default, help, heading, and the record that they are a field of.

From a declaration follow the flag's place in `--help`, its keys in the settings, its name in messages, and the record
that the command receives. A command with several records gets each of them, built once. Errors and notes of `offspec`,
`loaders` and `scheduler` name a setting by its argument in Python, between backticks (`draft=none`); the terminal says
`--draft none`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, Generic, Protocol, TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])
R = TypeVar("R")


class Decorator(Protocol):
    """A decorator that adds options to a command."""

    def __call__(self, command: F, /) -> F: ...


HELP_NAMES = ("-h", "--help")
SHOWS_ALL = "offspec.shows_all_flags"  # set in a click context's `meta` by `--help-all`
VALUES = "offspec.values"  # in `meta`: the values of all flags, by click's names, before records were built
LIKE = 0.8  # similarity of a misspelt flag to the one that is meant
FEW = 16  # a command with at most this number of flags shows all of them under one heading

# Headings of `--help`, in their order. Flags stand below them in the order of their declaration.
OWN, MODEL, DRAFT, MEMORY, SAMPLING, OUTPUT = "Options", "Model", "Draft", "Memory", "Sampling", "Output"
HEADINGS = (OWN, MODEL, DRAFT, MEMORY, SAMPLING, OUTPUT)
# Parts of drafting and streaming that `offspec bench` can turn off.
PARTS = ("lookup", "recall", "reuse", "overlap", "forced", "read-ahead")
# Flags that have gone, and those of llama.cpp and Ollama (docs/from-llama-cpp.md) → what does the same.
REPLACED = {
    **dict.fromkeys(("-m", "--model"), "MODEL as the first argument"),
    **dict.fromkeys(("-hf", "--hf-repo"), "MODEL as org/name:Q4_K_M"),
    **dict.fromkeys(
        ("-ngl", "--ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu", "-ncmoe", "--n-cpu-moe", "--cpu-moe"),
        "nothing: layers and experts are placed by free memory, which --vram SIZE and --ram SIZE limit",
    ),
    **dict.fromkeys(("-md", "--model-draft"), "--draft MODEL"),
    **dict.fromkeys(("--draft-max", "--draft-n"), "--budget N"),
    **dict.fromkeys(("--ctx-size", "--num-ctx"), "--context N"),
    **dict.fromkeys(("--n-predict", "--predict", "--num-predict"), "--max-new-tokens N"),
    **dict.fromkeys(("-f", "--file"), "--prompt-file FILE"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system TEXT"),
    **dict.fromkeys(("-r", "--reverse-prompt"), "--stop TEXT"),
    **dict.fromkeys(("-t", "--num-thread"), "--threads N"),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "--kv-cache 8 or 4"),
    **dict.fromkeys(("-fa", "--flash-attn"), "nothing: the fastest attention is chosen"),
    **dict.fromkeys(("-no-cnv", "--no-conversation"), "--raw"),
    "-np": "--parallel N",
    "-s": "--seed S",
    "--repeat-penalty": "--repetition-penalty R",
    "--prompt-cache": "--cache-prompt FILE",
    "--grammar-file": "--grammar FILE",
    "--exit-file": "--draft self:FILE",
    "--exit-layer": "--draft self:N",
    "--json-object": "--json-schema object",
    "--prompt-ids": 'a line like {"prompt": [1, 2, 3]} of a .jsonl --prompt-file',
    "--strength": "--tau T",
    **{f"--no-{part}": f"--without {part} to offspec bench" for part in PARTS[:-1]},  # `verify` has --no-read-ahead
    "--recycling": "--draft lookup, which recycles",
    **dict.fromkeys(("--csv", "--plot"), "--save FILE to offspec bench"),
    "--regex": "--grammar /REGEX/",
    "--strict": "nothing: a note names misspelt keys",
    "--deterministic": "--arithmetic deterministic",
    "--revision": "MODEL as org/name@REVISION",
    "--ray": "--batch ray or ray:HOST:PORT",
    **dict.fromkeys(("-p", "--prompt"), "PROMPT as the second argument"),
    "--warmup": "--repeats WARMUPS+N",
    **dict.fromkeys(("--wrap", "--no-wrap"), "nothing: the terminal breaks lines"),
}
FLAGS: dict[str, str] = {}  # name of a setting in Python → flag; of every command that was imported
# Flags that messages name before a command's module, which declares them, can be imported: memory is short.
_ALWAYS = {"context": "--context", "ram": "--ram", "vram": "--vram"}


def with_flags(message: str) -> str:
    """The message with flags in place of arguments; other words between backticks stay."""
    flags = _ALWAYS | FLAGS

    def named(match: re.Match[str]) -> str:
        return " ".join(filter(None, (flags[match[1]], match[2]))) if match[1] in flags else match[0]

    return re.sub(r"`([a-z_]+)(?:=([^`]*))?`", named, message)


class OffspecOption(click.Option):
    """A flag. group: its heading in help. is_rare: only `--help-all` shows it, unless the command has few flags.

    is_research: a flag for comparing or tuning methods, which only `--help-all` shows. record: what it is a field of.
    Help omits the range: the help text or the error message names it.
    """

    def __init__(
        self,
        param_decls: Sequence[str],
        *,
        group: str = OWN,
        is_rare: bool = False,
        is_research: bool = False,
        record: FlagRecord[Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(param_decls, **settings)
        assert group in HEADINGS, group
        self.group = group
        self.is_rare = is_rare
        self.is_research = is_research
        self.record = record
        flag = max(self.opts, key=len)
        FLAGS.setdefault(flag.lstrip("-").replace("-", "_"), flag)
        FLAGS[str(self.name)] = flag

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        if extra.get("default", "").endswith(".0"):
            extra["default"] = extra["default"][:-2]
        return extra


def option(*names: str, **settings: Any) -> Decorator:
    """`click.option` for an `OffspecOption`."""
    return click.option(*names, cls=OffspecOption, **settings)


class RecordArgument(click.Argument):
    """An argument that is a field of a record."""

    def __init__(self, param_decls: Sequence[str], *, record: FlagRecord[Any], **settings: Any) -> None:
        super().__init__(param_decls, **settings)
        self.record = record


class FlagRecord(Generic[R]):
    """A dataclass whose fields are flags. A command gets it as the argument `name`."""

    def __init__(self, name: str, kind: type, make: Callable[..., R], **settings: Any) -> None:
        """kind: the dataclass, for defaults. make: makes one of the flags' values. settings: of each of its flags."""
        self.name = name
        self._make = make
        self._settings = settings
        self._defaults = {field.name: field.default for field in fields(kind)}

    def option(self, field: str, *names: str, **settings: Any) -> Decorator:
        """A flag for a field, spelt like it unless `names` has another spelling; the default is the field's.

        Help shows the default, unless the help text says it or it is off.
        """
        spelt = any(name.startswith("--") for name in names)
        flags = names if spelt else (f"--{field.replace('_', '-')}", *names)
        settings = {"default": self._defaults[field], "record": self, **self._settings, **settings}
        help_says_it = "[default" in settings["help"] or isinstance(settings["default"], (bool, tuple))
        return option(field, *flags, show_default=not help_says_it, **settings)

    def argument(self, field: str, **settings: Any) -> Decorator:
        """An argument for a field."""
        return click.argument(field, cls=RecordArgument, record=self, default=self._defaults[field], **settings)

    def of(self, command: click.Command, values: Mapping[str, object]) -> R:
        """The record of a command's values, by click's names. Raises what making it raises."""
        return self._make(**{str(p.name): values[str(p.name)] for p in command.params if record_of(p) is self})


def record_of(parameter: click.Parameter) -> FlagRecord[Any] | None:
    """The record that the parameter is a field of."""
    return parameter.record if isinstance(parameter, (OffspecOption, RecordArgument)) else None


def all_of(*options: Decorator) -> Decorator:
    """Several options as one decorator; help shows them in this order."""

    def decorate(command: F, /) -> F:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


class OffspecCommand(click.Command):
    """A command with `--help` by groups; its last line is `--help-all` if `--help` omits flags."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """The same names in every context: click creates the help option once, from the first context."""
        return list(HELP_NAMES)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _help_all_option(sum(map(self._is_left_out, self.params)))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for arg in takewhile(lambda arg: arg != "--", args):
            flag = arg.partition("=")[0]
            if flag in REPLACED and len(flag) > 2 and flag[1] != "-":  # click would read -ngl as -n gl
                raise click.UsageError(f"offspec {self.name} has no {flag}; give {REPLACED[flag]}", ctx)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            if place := where_is(exc.option_name, Commands(ctx)):
                near = get_close_matches(exc.option_name, exc.possibilities or (), n=1, cutoff=LIKE)
                question = f"; did you mean {near[0]}?" if near else ""
                raise click.UsageError(f"offspec {self.name} has no {exc.option_name}; {place}{question}", ctx) from exc
            raise

    def invoke(self, ctx: click.Context) -> object:
        """Call the command with its records in place of their flags' values."""
        values = ctx.meta[VALUES] = dict(ctx.params)
        records = dict.fromkeys(record for parameter in self.params if (record := record_of(parameter)) is not None)
        others = {str(p.name) for p in self.params if record_of(p) is None} & values.keys()
        ctx.params = {name: values[name] for name in others} | {each.name: each.of(self, values) for each in records}
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
        for parameter in self.get_params(ctx):
            if self._is_left_out(parameter) and not ctx.meta.get(SHOWS_ALL):
                continue
            if isinstance(parameter, click.Option) and (line := parameter.get_help_record(ctx)) is not None:
                # A command with few flags has one heading; click's own flags are --help and --help-all.
                group = parameter.group if isinstance(parameter, OffspecOption) else OUTPUT
                groups[group if self._has_many else OWN].append(line)
        for heading, lines in groups.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)

    def _is_left_out(self, parameter: click.Parameter) -> bool:
        if not isinstance(parameter, OffspecOption):
            return False
        return parameter.is_research or (parameter.is_rare and self._has_many)

    @property
    def _has_many(self) -> bool:
        return sum(isinstance(parameter, click.Option) for parameter in self.params) > FEW


def where_is(flag: str, commands: Mapping[str, click.Command]) -> str:
    """What does the same as a flag that a command lacks: another flag, or the commands that have it; or nothing."""
    if flag in REPLACED:
        return f"give {REPLACED[flag]}"
    having = [
        name
        for name, command in commands.items()
        if any(flag in (*parameter.opts, *parameter.secondary_opts) for parameter in command.params)
    ]
    if not having:
        return ""
    *others, last = having
    return f"offspec {', '.join(others)} and {last} have it" if others else f"offspec {last} has it"


class Commands(Mapping[str, click.Command]):
    """Every command of the program except `config`, imported on first use."""

    def __init__(self, ctx: click.Context) -> None:
        group = ctx.find_root().command
        self._group = group if isinstance(group, click.Group) else click.Group()
        self._ctx = ctx
        self._names = [name for name in self._group.list_commands(ctx) if name != "config"]

    def __getitem__(self, name: str) -> click.Command:
        command = self._group.get_command(self._ctx, name) if name in self._names else None
        if command is None:
            raise KeyError(name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _help_all_option(num_left_out: int) -> click.Option:
    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[SHOWS_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        hidden=num_left_out == 0,
        callback=show,
        help=f"Show {num_left_out} more flags.",
    )
