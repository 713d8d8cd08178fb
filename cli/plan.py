"""`offspec plan`: predicts the placement of a model's layers and the time of a pass, without its weights."""

from __future__ import annotations

import json
import math
from textwrap import wrap
from typing import TYPE_CHECKING

import click

from offspec import PLAN_FORMATS, LoadOptions, format_seconds, format_size

from .flag_declarations import DRAFT, OWN, OffspecCommand, option, with_flags
from .options import (
    DRAFT_NAME,
    LOADING,
    MAX_TEXTS,
    MODEL_HELP,
    WholeNumber,
    draft_window_option,
    is_typed,
    memory_flags,
    model_argument,
    model_flags,
    output_options,
    reworded,
    size,
)
from .terminal import ProgressLine, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offspec.tools.forecast import Drafting, Forecast, Prospect
    from offspec.tools.improvements import Gain

WIDTHS = (1, 16, 64, 256, 512)
WIDTH = 118  # characters of a line of text
LEAST_TIMES_AS_FAST = 1.1  # of another program, to be advised
LEAST_DIFFERENCE = 1.02  # between rows of a table that is worth showing


@click.command(
    cls=OffspecCommand,
    name="plan",
    help=f"""Show how many layers would be resident on the device, in RAM and on disk, and how long a pass would take.

{MODEL_HELP} The plan needs only headers or config.json; for a hub id, only these are downloaded.

\b
Examples:
  offspec plan ./Llama-3.1-70B-Instruct --draft ./Llama-3.2-1B-Instruct --ram 48GiB
  offspec plan meta-llama/Llama-3.1-70B-Instruct --format nf4 --gpu rtx4090 --ram 64GiB
  offspec plan ./Qwen2.5-32B-Instruct --draft ./Qwen2.5-0.5B-Instruct --draft shadow --gpu rtx4090 --ram 128GiB
""",
)
@model_argument
@option(
    "--draft",
    group=DRAFT,
    type=DRAFT_NAME,
    default=(LoadOptions.draft,),
    multiple=True,
    metavar="PATH|auto|mtp|shadow|head|self|lookup|none",
    help="Draft to plan for, as for `offspec run`; repeatable, to compare several. [default: auto]",
)
@draft_window_option
@model_flags
@memory_flags
@LOADING.option(
    "texts",
    group=OWN,
    type=WholeNumber(1, MAX_TEXTS),
    metavar="N",
    help="Plan KV entries for N texts that share passes, as for `offspec run --batch N`.",
)
@LOADING.option(
    "cache_ram",
    group=OWN,
    callback=size,
    default="0",
    metavar="SIZE",
    help="Plan RAM for earlier conversations, as for `offspec serve --cache-ram SIZE`. [default: none]",
)
@option(
    "--gpu",
    metavar="NAME",
    help="Plan for this GPU (rtx4090, 4090, a100-80, ...), or for one described by memory, its rate and the link's: "
    "12GiB,504GB/s,25GB/s.",
)
@option(
    "--cpu",
    metavar="NAME",
    help="Kind of computer beside --gpu, for a mixture's experts in RAM: desktop, desktop-ddr4, workstation, server, "
    "or this (measured). [default: desktop, with two channels of DDR5]",
)
@option(
    "--ram-rate",
    callback=size,
    metavar="SIZE",
    help="Bytes per second that the CPU beside --gpu reads from RAM, e.g. 60GB. [default: --cpu's]",
)
@option(
    "--format",
    "form",
    type=click.Choice(PLAN_FORMATS, case_sensitive=False),
    help="Plan for the model in this format; fp4 is as large as nf4. q2_k to q8_0 are llama.cpp's mixtures. "
    "[default: the model's format]",
)
@option(
    "--disk",
    "disk_rate",
    callback=size,
    metavar="SIZE",
    help="Bytes per second that the disk reads, e.g. 3.5GB. [default: measured; 7GB with --gpu]",
)
@output_options(json="Print one JSON object instead of the table.")
def command(
    gpu: str | None,
    form: str | None,
    disk_rate: int | None,
    cpu: str | None,
    ram_rate: int | None,
    draft: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    verbose: bool,
    loading: LoadOptions,
) -> None:
    if gpu is not None and loading.device != "auto" and is_typed("device"):
        raise click.UsageError(f"--gpu {gpu} and --device {loading.device} both name the device; omit one.")
    from offspec.tools.forecast import Assumptions, make_forecast

    line, assumptions = ProgressLine(quiet=quiet), Assumptions(gpu, form, disk_rate, cpu, ram_rate)

    def progress(step: str) -> None:
        line.show(f"measuring {step}" if step else "")

    forecast = make_forecast(loading, assumptions, drafts=draft, widths=WIDTHS, progress=progress)
    line.show()
    for note in forecast.notes:
        if verbose or (note.advice and not quiet):
            click.echo(f"offspec: {with_flags(note.text)}", err=True)
    if as_json:
        click.echo(json.dumps(forecast.as_dict()))
    else:
        click.echo("\n".join(describe(forecast, compares=len(draft) > 1, shows_all=verbose)))


reworded(
    command,
    draft="Draft, as for `offspec run`; several are compared, and the plan is for the fastest. [default: auto]",
    verbose="Show all tables; explain automatic choices; show tracebacks.",
)


def describe(forecast: Forecast, *, compares: bool = False, shows_all: bool = False) -> list[str]:
    """The plan: what limits its truth, the verdict and what it assumes; then the drafts, if several are compared.

    shows_all: all details, instead of the command that shows them.
    """
    lines = [forecast.title, *(part for line in _verdict(forecast) for part in _wrapped(line, "", "  "))]
    if forecast.busy:
        slowed = f"{forecast.busy}, so the measured rates are too low; plan again when it is idle."
        lines.insert(0, f"{slowed[0].upper()}{slowed[1:]}")
    lines += ["", "Assumed:"]
    lines += [line for name, text in forecast.assumptions() for line in _wrapped(f"{name}: {with_flags(text)}")]
    if not shows_all:
        lines += _drafts(forecast) if compares else []
        return [*lines, "", "-v shows memory, passes, drafts, texts at once, KV caches and what more memory brings."]
    lines += ["", *_memory(forecast), *_seconds(forecast), *_drafts(forecast), *_texts(forecast), *_caches(forecast)]
    if (first := forecast.entries_in_ram_from) is not None:
        lines += ["", f"From a context of {first} tokens on, KV entries of streamed layers are in RAM, and"]
        lines += ["each pass reads them beside the weights (in this format)."]
    return [*lines, *_gains(forecast)]


def _wrapped(text: str, first: str = "  ", others: str = "    ") -> list[str]:
    """Lines of at most WIDTH characters. first, others: indents of the first one and of those after it."""
    return wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )


def _verdict(forecast: Forecast) -> list[str]:
    """At most seven lines: where layers go, tokens/s, other programs, the first token, and what would help most."""
    from offspec.tools.forecast import PROMPT_TOKENS

    slow = ", but too slowly to be worth it: take a smaller model, or fewer bits" if forecast.is_too_slow else ""
    lines = [f"It runs{slow}. {forecast.where}", *_speed(forecast), *_other_programs(forecast)]
    if forecast.prompt_s is not None:
        first = format_seconds(forecast.prompt_s)
        lines.append(f"With a prompt of {PROMPT_TOKENS} tokens, the first token comes after {first}.")
    if (best := forecast.improvement) is not None:
        rate = f"{_digits(best.tokens_per_s)} tokens/s, {best.times:.1f} times as many"
        if isinstance(best.value, int):
            change = f"{format_size(best.value)} more {best.kind}"
        else:
            download = f", a download of {format_size(best.download_bytes)}" if best.download_bytes else ""
            change = f"{'4 bit, ' if best.kind == 'format' else ''}--{best.kind} {best.value}{download}"
        lines.append(f"What would help most: {change} ({rate}).")
    return lines


def _other_programs(forecast: Forecast) -> list[str]:
    """About how fast llama.cpp is, and whether it is the better choice."""
    rate = forecast.llama_cpp_tokens_per_s
    if rate is None:
        greedy, fits = forecast.planned.greedy, forecast.is_resident and not forecast.has_card
        is_plain = greedy is not None and not greedy.num_nodes
        return ["Use llama.cpp: without a draft it decodes faster what fits in RAM."] if fits and is_plain else []
    where = "" if forecast.is_resident else ", which computes on the CPU what is in RAM"
    about = f"about {_digits(rate, 2)} tokens/s without a draft (estimate)"
    times, is_mixture = rate / forecast.compared_tokens_per_s, forecast.plan.experts is not None
    if times < (1 / LEAST_TIMES_AS_FAST if is_mixture else LEAST_TIMES_AS_FAST):
        return [f"llama.cpp{where}: {about}."]
    reference = "offspec" if forecast.plan.placement.streamed else "offspec without one"
    unmeasured = ", whose figure was not measured on a card" if is_mixture else ""
    return [f"Use llama.cpp{where}: {about}, {times:.1f} times as many as {reference}{unmeasured}."]


def _speed(forecast: Forecast) -> list[str]:
    """Tokens/s with the planned draft and without one."""
    planned, plain = forecast.planned, f"{_digits(forecast.plain_tokens_per_s)} tokens/s"
    assert planned.greedy is not None
    assert planned.sampled is not None
    if not planned.greedy.num_nodes:
        slower = f"; --draft {planned.name} does not make it faster" if planned.source else ""
        return [f"Without a draft: {plain}{slower}."]
    rates = [
        f"{_rate_range(drafting)} tokens/s, {_tokens_range(drafting)} tokens per pass"
        for drafting in (planned.greedy, planned.sampled)
    ]
    another = " (another vocabulary)" if planned.shares_vocabulary is False else ""
    return [
        f"With --draft {planned.name}{another}, at temperature 0: {rates[0]}.",
        f"At temperature 1: {rates[1]}. Without a draft: {plain}.",
    ]


def _rate_range(drafting: Drafting) -> str:
    """Tokens/s: "7.20 (3.60 to 10.9)"."""
    return _with_range(*map(_digits, (drafting.tokens_per_s, drafting.least_tokens_per_s, drafting.most_tokens_per_s)))


def _tokens_range(drafting: Drafting) -> str:
    """Tokens per pass: "5.1 (3.4 to 8.0)"."""
    tokens = (drafting.tokens_per_pass, drafting.least_tokens_per_pass, drafting.most_tokens_per_pass)
    return _with_range(*(f"{number:.1f}" for number in tokens))


def _with_range(usual: str, least: str, most: str) -> str:
    return usual if least == most else f"{usual} ({least} to {most})"


def _memory(forecast: Forecast) -> list[str]:
    """What needs how much memory, the limits, and what `serve` takes in addition."""
    limits = forecast.plan.placement.limits
    rows = [["", forecast.device_name, "RAM"]]
    rows += [[name, _cell(device), _cell(ram)] for name, device, ram in forecast.rows()]
    rows.append(["limit", *(format_size(limit or 0) for limit in (limits.device, limits.ram))])
    if not forecast.has_card:
        rows = [[name, ram] for name, _, ram in rows]
    lines = [f"The largest context that fits with this KV cache is {forecast.max_context} tokens (--context)."]
    if forecast.parked_bytes:
        most = format_size(forecast.parked_bytes)
        flag = f"--cache-ram {most.replace(' ', '')}"
        lines += ["", f"offspec serve also keeps earlier conversations, in up to {most} of RAM; {flag} plans it."]
    return [*table(rows, 1), *lines]


def _cell(number: int) -> str:
    return format_size(number) if number else "-"


def _drafts(forecast: Forecast) -> list[str]:
    """What each draft is expected to bring, which one is the fastest, and where tokens per pass come from."""
    if len(forecast.prospects) < 2:
        return []
    rows = [["draft", "memory", "resident", "pass s", "round s", "tokens/pass", "tokens/s", "sampled"]]
    rows += [_draft_row(prospect) for prospect in forecast.prospects if not prospect.why_not]
    refusals = [(each.name, each.why_not.partition(" (")[0]) for each in forecast.prospects if each.why_not]
    refused = [line for name, why in refusals for line in _wrapped(f"{name}: {with_flags(why)}")]
    if any(each.shares_vocabulary is False for each in forecast.prospects):
        refused.append("  * another vocabulary than the target's: fewer guesses come true")
    return [
        "",
        "Drafts, by these rates (sampled: tokens/s at temperature 1):",
        *table(rows, 1),
        *refused,
        *_fastest(forecast),
        *_sources(forecast),
    ]


def _draft_row(prospect: Prospect) -> list[str]:
    assert prospect.plan is not None
    assert prospect.greedy is not None
    assert prospect.sampled is not None
    best = prospect.greedy
    resident = f"{len(prospect.plan.placement.resident)} of {len(prospect.plan.layers)}"
    return [
        prospect.name.rstrip("/").rpartition("/")[2] + (" *" if prospect.shares_vocabulary is False else ""),
        _cell(prospect.draft_bytes),
        resident,
        _digits(best.pass_s),
        _digits(best.round_s) if best.round_s else "-",
        _tokens_range(best),
        _rate_range(best),
        _rate_range(prospect.sampled),
    ]


def _fastest(forecast: Forecast) -> list[str]:
    """The fastest draft and its lead; what it needs, if it is a shadow."""
    first, *rest = forecast.fastest_first
    lead = first.tokens_per_s / rest[0].tokens_per_s if rest else 1.0
    if rest and lead < LEAST_DIFFERENCE:
        return _wrapped(f"{first.name} and {rest[0].name} are equally fast.", "")
    lines = _wrapped(f"The fastest is {first.name}{f', {lead:.2f} times {rest[0].name}' if rest else ''}.", "")
    kind, _, bits = first.name.partition(":")
    if kind == "shadow" and bits.isdecimal():
        lines.append(f"A shadow is made once: offspec quantize {forecast.model} --shadow {bits}")
    return lines


def _sources(forecast: Forecast) -> list[str]:
    """Where tokens per pass and their ranges come from."""
    lines = list[str]()
    for name, sources in (
        ("Tokens per pass", (each.source for each in forecast.prospects)),
        ("Their ranges over prompts", (each.range_source for each in forecast.prospects)),
    ):
        lines += [f"{name}:"] if (distinct := list(dict.fromkeys(filter(None, sources)))) else []
        lines += [line for source in distinct for line in _wrapped(source)]
    return lines


def _texts(forecast: Forecast) -> list[str]:
    """Tokens/s of several texts that share passes, one column each."""
    prospects = forecast.texts
    if all(each.plan for each in prospects) and not _differ(each.tokens_per_s for each in prospects):
        return []
    return [
        "",
        "Texts that share passes, by these rates, at temperature 0, without their prompts:",
        *table(
            [
                ["texts", *(str(each.num_texts) for each in prospects)],
                ["tokens/s together", *(_digits(each.tokens_per_s) if each.plan else "-" for each in prospects)],
                ["tokens/s each", *(_digits(each.each_tokens_per_s) if each.plan else "-" for each in prospects)],
                ["tokens each may have", *(str(each.tokens_each) if each.plan else "-" for each in prospects)],
            ],
            1,
        ),
    ]


def _caches(forecast: Forecast) -> list[str]:
    """What each format of the KV cache would bring, one row each; nothing if that is the same."""
    from offspec.tools.improvements import GAIN_WIDTH

    places = {prospect.plan and (prospect.plan.tiers, prospect.ram_bytes) for prospect in forecast.caches}
    times_of = zip(*((prospect.short_s, prospect.full_s) for prospect in forecast.caches), strict=True)
    if None not in places and len(places) == 1 and not any(_differ(filter(None, times)) for times in times_of):
        return []
    of_context = f"{forecast.plan.context} tokens"
    seconds = f"s per pass of {GAIN_WIDTH}"
    rows = [["--kv-cache", "entries", "a token", of_context, "in RAM", "resident", seconds, "behind a full context"]]
    for prospect in forecast.caches:
        name = prospect.name + (" (planned)" if prospect.name == forecast.plan.inputs.target.kv.name else "")
        sizes = [format_size(prospect.token_bytes), format_size(prospect.context_bytes), _cell(prospect.ram_bytes)]
        resident = (
            f"{len(prospect.plan.placement.resident)} of {len(prospect.plan.layers)}"
            if prospect.plan
            else "does not fit"
        )
        times = ["-" if each is None else _digits(each) for each in (prospect.short_s, prospect.full_s)]
        rows.append([name, prospect.stored_as, *sizes, resident, *times])
    return [
        "",
        "Formats of the KV cache, in the same memory:",
        *table(rows, 1),
        "With 8 or 4 bits the target computes with rounded keys and values: the text is that of plain decoding with",
        f"the same format, and may differ from that with {forecast.caches[0].stored_as}.",
    ]


def _differ(numbers: Iterable[float]) -> bool:
    """Whether positive numbers differ by more than predictions are good for."""
    values = list(numbers)
    return max(values) > LEAST_DIFFERENCE * min(values)


def _gains(forecast: Forecast) -> list[str]:
    """The gain of 4 bit, and of each additional 8 GiB of memory; nothing if they bring none."""
    from offspec.tools.improvements import FOUR_BIT, GAIN_WIDTH

    changes: list[tuple[str, Gain]] = [
        (f"{format_size(int(gain.value))} more {gain.kind}", gain) for gain in forecast.gains
    ]
    if forecast.four_bit is not None:
        changes.append((f"4 bit (--format {FOUR_BIT})", forecast.four_bit))
    figures = [(forecast.tree_pass_s, forecast.planned.tokens_per_s)]
    figures += [(change.pass_s, change.tokens_per_s) for _, change in changes]
    if not any(_differ(numbers) for numbers in zip(*figures, strict=True)):
        return []
    tiers = [forecast.plan.tiers, *(change.plan.tiers for _, change in changes)]
    rows = [["", f"s per pass of {GAIN_WIDTH}", "tokens/s"]]
    rows += [
        [name, _digits(seconds), _digits(rate)]
        for name, (seconds, rate) in zip(("as planned", *(name for name, _ in changes)), figures, strict=True)
    ]
    lines = [f"{line}  {where}".rstrip() for line, where in zip(table(rows, 1), ("", *tiers), strict=True)]
    return ["", "With more memory, or in 4 bit (tokens/s at temperature 0):", *lines]


def _seconds(forecast: Forecast) -> list[str]:
    if not forecast.pass_s:
        return []
    lines = ["", f"{'tokens in the pass':>20}  {'seconds':>9}  {'tokens/s':>8}"]
    if forecast.plan.usual_tokens:
        lines.insert(1, f"Behind a text of {forecast.plan.usual_tokens} tokens, half the context:")
    for width, seconds in forecast.pass_s.items():
        plain = f"{1 / seconds:8.2f}  plain decoding" if width == 1 else ""
        lines.append(f"{width:>20}  {_digits(seconds):>9}  {plain}".rstrip())
    return lines


def _digits(value: float, number: int = 3) -> str:
    """So many significant digits: "0.000412", "0.0312", "4.20", "128", of an estimate "2.6", "13", "130"."""
    decimals = number - 1 - math.floor(math.log10(value))
    return f"{round(value, decimals):.{max(0, decimals)}f}"
