"""`--help`: flags by groups, common flags first; `--help-all` also shows the others.

This module knows only the flags' click names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
HELP_NAMES = ("-h", "--help")
SHOWS_ALL = "offspec.shows_all_flags"  # set in a click context's `meta` by `--help-all`
FEW = 16  # a command with at most this number of flags shows all of them under one heading

# Heading → flags in display order; a command's other flags come first, under "Options".
OWN = "Options"
GROUPS: dict[str, tuple[str, ...]] = {
    "Model": ("device", "dtype", "deterministic", "fast_arithmetic", "revision", "threads", "think", "special_in_text"),
    "Draft": (
        *("draft", "budget", "lookup_files", "exit_file", "exit_layer", "draft_window"),
        *("learn", "learn_file"),
        *("lookup", "recycling", "recall", "reuse", "overlap", "forced", "scoring", "tree", "stopping"),
        *("accept", "tau", "strength", "beam", "gamma"),
    ),
    "Memory": ("vram", "ram", "context", "kv_cache", "synchronous"),
    "Sampling": (
        *("max_new_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty"),
        *("seed", "stop", "ignore_eos", "json_schema", "json_object", "grammar", "regex"),
    ),
    "Output": ("show_stats", "as_json", "color_accepted", "wrap", "quiet", "verbose"),
}
PLACES = {name: (heading, place) for heading, names in GROUPS.items() for place, name in enumerate(names)}
PLACES["help_all"] = ("Output", 101)
HELP_PLACE = ("Output", 100)  # --help has several names in click
# Only `--help-all` shows these flags.
ADVANCED = {
    *(
        "dtype",
        "deterministic",
        "fast_arithmetic",
        "revision",
        "threads",
        "kv_cache",
        "special_in_text",
        "think",
        "lookup_files",
    ),
    *("exit_file", "exit_layer", "draft_window", "learn", "learn_file"),
    *("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("ignore_eos", "color_accepted", "wrap", "prompt_ids", "max_texts", "num_answers", "ray", "history"),
    "autosave",
}


class OffspecOption(click.Option):
    """A flag whose help omits the range: the help text or the error message names it."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        if extra.get("default", "").endswith(".0"):
            extra["default"] = extra["default"][:-2]
        return extra


class ResearchOption(OffspecOption):
    """A flag for comparing or tuning methods. Only `--help-all` shows it."""


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """`click.option` for an `OffspecOption`."""
    return click.option(*names, cls=OffspecOption, **settings)


def research_option(*names: str, **settings: Any) -> Callable[[F], F]:
    """`click.option` for a `ResearchOption`."""
    return click.option(*names, cls=ResearchOption, **settings)


class OffspecCommand(click.Command):
    """A command with `--help` by groups; its last line is `--help-all` if `--help` omits flags."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """The same names in every context: click creates the help option once, from the first context."""
        return list(HELP_NAMES)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _help_all_option(sum(map(self._is_left_out, self.params)))]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[int, tuple[str, str]]]] = {heading: [] for heading in (OWN, *GROUPS)}
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        for parameter in options:
            if self._is_left_out(parameter) and not ctx.meta.get(SHOWS_ALL):
                continue
            if (record := parameter.get_help_record(ctx)) is not None:
                heading, place = self._place(parameter)
                groups[heading].append((place, record))
        for heading, found in groups.items():
            if found:
                with formatter.section(heading):
                    formatter.write_dl([record for _, record in sorted(found, key=lambda placed: placed[0])])

    def _place(self, parameter: click.Parameter) -> tuple[str, int]:
        """The heading, and the position below it. A command with few flags has one heading."""
        if not self._has_many:
            return OWN, 0
        return HELP_PLACE if "--help" in parameter.opts else PLACES.get(str(parameter.name), (OWN, 0))

    def _is_left_out(self, parameter: click.Parameter) -> bool:
        return isinstance(parameter, ResearchOption) or (self._has_many and parameter.name in ADVANCED)

    @property
    def _has_many(self) -> bool:
        return sum(isinstance(found, click.Option) for found in self.params) > FEW


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
