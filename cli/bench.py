"""`offspec bench`: compares speculative and plain decoding in one run."""

from __future__ import annotations

import csv
import json
import re
import reprlib
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offspec import LoadOptions, SamplingParams, SpeculationParams
from offspec.errors import StorageError

from . import flag_declarations as heading
from . import terminal
from .batch import check_sink, read_prompts
from .flag_declarations import PARTS, OffspecCommand, option
from .options import (
    MAX_TEXTS,
    MODEL_HELP,
    WholeNumber,
    draft_window_option,
    fit_to_requests,
    ignore_eos_option,
    is_typed,
    learn_file_option,
    load_engine,
    loading_options,
    lookup_files_option,
    lossy_settings,
    model_argument,
    output_options,
    research_options,
    reworded,
    sampling_options,
    several,
    several_budgets,
)
from .terminal import ProgressLine, columns, is_watched

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.tools.benchmark import BenchmarkReport, BenchmarkRow, Figure, Outcome, Workload
    from offspec.tools.texts_benchmark import TextsReport, TextsRow

PLOT_SUFFIXES = (".png", ".svg")
READ_AHEAD = "read-ahead"  # of PARTS, the one that is not of drafting
MAX_NEW_TOKENS = 64
NOT_WITH_TEXTS = {"budgets": "--budgets", "files": "--save"}
CLEARLY = 0.9  # the verdict names the default's gain if it is below this share of the fastest budget's gain


def _saved_files(ctx: click.Context, param: click.Parameter, value: tuple[Path, ...]) -> tuple[Path, ...]:
    """A click callback: refuses files that could not be written, before the measurement starts."""
    for file in value:
        if file.suffix.lower() not in (".csv", *PLOT_SUFFIXES):
            raise click.BadParameter(f"{file} must end with .csv, {' or '.join(PLOT_SUFFIXES)}.")
        if file.suffix.lower() in PLOT_SUFFIXES and find_spec("matplotlib") is None:
            raise click.BadParameter("plots need matplotlib: pip install 'offspec[bench]'.")
    return value


def _rounds(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """A click callback: the rounds before those that are measured, and these."""
    match = re.fullmatch(r"(?:(\d{1,6})\+)?([1-9]\d{0,5})", value)
    if match is None:
        raise click.BadParameter(f"{reprlib.repr(value)} is no number of rounds from 1, such as 3, or 0+3.")
    return int(match[1] or 1), int(match[2])


@click.command(
    cls=OffspecCommand,
    name="bench",
    help=f"""Compare speculative and plain decoding on the same prompts, in the same run.

{MODEL_HELP} Tokens/s include the first pass, which contains the prefill. Figures are medians over repeats, with the
range. The built-in prompts ask for code, chat, prose and repetitive text. --accept joint, or another lossy
value, adds a row that is marked lossy, and shows the likelihood of each text under the target. With --texts, bench
compares numbers of texts that share passes.

\b
Examples:
  offspec bench builtin
  offspec bench ./Llama-3.1-70B-nf4 --draft ./Llama-3.2-1B-Instruct --budgets auto --repeats 1 --max-new-tokens 16
  offspec bench builtin --budgets 4,16,64,256 --save passes.svg --save runs.csv --json
  offspec bench ./Llama-3.1-70B-nf4 --draft ./Llama-3.2-1B-Instruct --texts 1,2,4,8 --max-new-tokens 32
""",
)
@model_argument
@option(
    "--prompts",
    "prompt_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Prompts: a text file, one per line, or .jsonl with "prompt" or "messages", and "kind".',
)
@option(
    "--budgets",
    default="16,64,256,auto",
    show_default=True,
    callback=several_budgets,
    help="Tree sizes to measure, separated by commas.",
)
@option(
    "--texts",
    "numbers",
    metavar="N,N,...",
    callback=several(WholeNumber(1, MAX_TEXTS)),
    help="Instead of tree sizes, measure these numbers of texts that share passes, e.g. 1,2,4,8.",
)
@option(
    "--repeats",
    default="1+3",
    show_default=True,
    metavar="[W+]N",
    callback=_rounds,
    help="Measured rounds, after W that are not measured; W is 1 if it is omitted.",
)
@option(
    "--save",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_saved_files,
    metavar="FILE",
    help="Save one row per run as .csv, or a plot as .png or .svg, which needs matplotlib; may be repeated.",
)
@loading_options
@lookup_files_option
@draft_window_option
@learn_file_option
@option(
    "--without",
    multiple=True,
    is_research=True,
    group=heading.DRAFT,
    type=click.Choice(PARTS),
    help="Turn off a part of drafting, or reading ahead; the text is the same. May be repeated.",
)
@research_options
@sampling_options(MAX_NEW_TOKENS)
@ignore_eos_option
@output_options(
    json="Print one JSON object; the table goes to stderr.", quiet="Print no progress and no notes to stderr."
)
def command(
    prompt_file: Path | None,
    budgets: list[int | None],
    numbers: list[int] | None,
    repeats: tuple[int, int],
    files: tuple[Path, ...],
    without: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    verbose: bool,
    loading: LoadOptions,
    speculation: SpeculationParams,
    sampling: SamplingParams,
) -> None:
    turned_off: dict[str, Any] = dict.fromkeys(set(without) - {READ_AHEAD}, False)
    speculation = replace(speculation, **turned_off)
    loading = replace(fit_to_requests(loading, sampling, speculation), synchronous=READ_AHEAD in without)
    if numbers is not None:
        _check_texts_flags(speculation)
    for file in files:
        check_sink(file)
    workloads = None if prompt_file is None else _workloads(prompt_file)
    settings: dict[str, object] = {
        "warmup": repeats[0],
        "repeats": repeats[1],
        "max_new_tokens": sampling.max_new_tokens,
    }
    settings |= {"temperature": sampling.temperature, **lossy_settings(speculation)}
    show = partial(_show, settings=settings, as_json=as_json, quiet=quiet)
    load = partial(load_engine, quiet=quiet, verbose=verbose)
    line = ProgressLine(quiet=quiet)
    runs: dict[str, Any] = {"num_warmups": repeats[0], "num_repeats": repeats[1]}
    runs["progress"] = lambda done, total: line.show(f"run {done + 1} of {total}" if done < total else "")
    if numbers is not None:
        from offspec.tools.texts_benchmark import check_numbers, default_workloads, measure_texts

        workloads = workloads or default_workloads(numbers)
        check_numbers(numbers, workloads)
        engine = load(replace(loading, texts=max(numbers)))
        texts_report = measure_texts(engine, workloads, sampling, speculation, numbers, **runs)
        show(engine, texts_report.as_dict(), partial(texts_table, texts_report))
        return
    from offspec.tools.benchmark import WORKLOADS, measure

    engine = load(replace(loading, tree=max((nodes or 0 for nodes in budgets), default=0)))
    exact = [replace(speculation, accept="exact", budget=nodes) for nodes in (budgets if engine.guesses else ())]
    compared = [*exact, *[speculation] * speculation.is_lossy]
    report = measure(engine, workloads or WORKLOADS, sampling, compared, **runs)
    show(engine, report.as_dict(), partial(table, report, verbose=verbose))
    for file in files:
        if file.suffix.lower() == ".csv":
            write_csv(report, file)
        else:
            from .plots import plot

            plot(report, f"{engine.name}, draft {engine.draft_name or 'none'}", file)


def _check_texts_flags(speculation: SpeculationParams) -> None:
    """Raises click.UsageError for what --texts does not go with."""
    given = [flag for name, flag in NOT_WITH_TEXTS.items() if is_typed(name)]
    if speculation.is_lossy:
        given.append(f"--accept {speculation.accept}")
    if given:
        raise click.UsageError(f"--texts compares numbers of texts, with the automatic budget: omit {given[0]}.")


# Measuring a draft on the prompts that it is trained on would be meaningless, so `bench` has no --learn.
reworded(
    command,
    learn_file="File with the draft's training (offspec chat --learn).",
    seed="Random seed; the draft does not change the text. [default: 0]",
    verbose="Explain automatic choices, show how sure the draft was and how often right; show tracebacks.",
)


def _workloads(file: Path) -> list[Workload]:
    from offspec.tools.benchmark import Workload

    return [Workload(str(task.content.get("kind", "prompts")), task.prompt) for task in read_prompts(file)]


def _show(
    engine: Engine,
    report: Mapping[str, object],
    table: Callable[[int], list[str]],
    *,
    settings: Mapping[str, object],
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the table, and the report as JSON if wanted. table: its lines for a number of columns."""
    if not (as_json and quiet):
        on_terminal = is_watched() if as_json else sys.stdout.isatty()
        click.echo("\n".join(table(columns() if on_terminal else WIDE)), err=as_json)
    if as_json:
        names = {"model": engine.name, "draft": engine.draft_name, "settings": settings}
        exactness = {"exact": engine.is_exact, "inexact_reason": engine.inexact_reason}
        click.echo(json.dumps({**names, **exactness, **report}))


# ------------------------------------------------------------------------------------------------ the table


WIDE = 120  # columns of output to a file or a pipe


def table(report: BenchmarkReport, width: int, *, verbose: bool = False) -> list[str]:
    """One line per kind of prompts and budget (blocks on a narrow terminal), then verdict and remarks.

    verbose: also how often the draft's nodes were accepted, by their predicted probability.
    """
    rows = [_cells(row) for row in report.rows()]
    lines = terminal.table([[*rows[0]], *([*cells.values()] for cells in rows)])
    if len(lines[0]) > width:
        lines = [line for cells in rows for line in (*(f"{name}: {cell}" for name, cell in cells.items()), "")]
    outcome = report.outcome()
    judged = [] if outcome is None else ["", verdict(outcome), ""]
    remarks = [*judged, *_remarks(report), *(_reliability(report) if verbose else ())]
    return [*lines, *(line for text in remarks for line in textwrap.wrap(text, max(width, 20)) or [""])]


def _cells(row: BenchmarkRow) -> dict[str, str]:
    draft, target, rest = (f"{ms:.1f}" for ms in row.later_ms) if row.later_ms is not None else "---"
    return {
        "prompts": row.kind,
        "budget": row.budget_name,
        "tokens/s": _with_spread(row.tokens_per_s),
        "gain": f"{row.gain.median:.2f}x" if row.budget != 0 else "",
        "first": f"{row.first_pass_s.median:.2f}",
        "later": "-" if row.later_tokens_per_s is None else f"{row.later_tokens_per_s.median:.1f}",
        "tokens": f"{row.tokens_per_pass.median:.2f}",
        "draft": draft,
        "target": target,
        "rest": rest,
        **({} if row.log_likelihood is None else {"nats/token": f"{row.log_likelihood:.3f}"}),
    }


def _remarks(report: BenchmarkReport) -> list[str]:
    lossy = [run for run in report.runs if run.accept != "exact"]
    guessed = [run for run in report.runs if run.budget != 0 and run.accept == "exact"]
    same, reason = "all texts equal plain decoding", report.runs[0].stats.inexact_reason
    if different := report.num_different():
        same = f"{different} of {len(guessed)} texts differ from plain decoding" + (
            ", which is an error"
            if reason is None
            else f"; near-ties can cause this, as {reason} (run offspec verify to check)"
        )
    spread = ", +- half the range over the repeats" if any(run.repeat > 0 for run in report.runs) else ""
    remarks = [
        f"tokens/s: of all passes including the first with the prompt{spread}; first: seconds of the first pass; "
        "later: tokens/s without it; tokens: per pass; draft, target, rest: ms per later pass",
        same if guessed else "there is no draft",
    ]
    for name, acceptance in report.acceptance.items():
        remarks.append(
            f"budget {name}: predicted {acceptance.predicted_per_pass:.2f} accepted nodes per pass, "
            f"measured {acceptance.accepted_per_pass:.2f}"
        )
    if lossy:
        name, num_different = lossy[0].budget_name, report.num_different(lossy[0].accept)
        remarks.append(
            f"{name}: {num_different} of {len(lossy)} texts differ from plain decoding, as is "
            "expected; nats/token: log-likelihood under the target, closer to 0 is likelier"
        )
    return remarks


def verdict(outcome: Outcome) -> str:
    """Whether speculation pays off here, and if not, why."""
    name, gain = outcome.best.budget_name, f"{outcome.gain:.2f}x"
    if outcome.pays:
        reached = f"budget {name} reaches {gain} the tokens/s of plain decoding"
        if outcome.is_disturbed:
            tokens = f"{outcome.best.tokens_per_pass.median:.2f}"
            return (
                f"The measurement was disturbed: {reached}, but its passes yield {tokens} tokens. "
                "Repeat it when other programs are idle, or with more --repeats."
            )
        auto, beside = outcome.auto, ""
        if auto is not None and auto.gain.median < CLEARLY * outcome.gain:
            beside = f", auto (the default) reaches {auto.gain.median:.2f}x"
        return f"Speculation pays off here: {reached}{beside}."
    reached = f"the fastest budget, {name}, reaches {gain} the tokens/s of plain decoding"
    judged = "makes no difference" if outcome.pays is None else "does not pay off"
    return f"Speculation {judged} here: {reached}. {_why_not(outcome)}".rstrip()


def _why_not(outcome: Outcome) -> str:
    if outcome.pass_ratio is None or outcome.added_ms is None:
        return ""
    draft, target, rest = outcome.added_ms
    parts = {"drafting": draft, "scoring the draft tokens": target, "the rest": rest}
    most = max(parts, key=lambda name: parts[name])
    took = f"A pass takes {outcome.pass_ratio:.2f} times as long as a plain one"
    cost = f", mostly for {most} ({parts[most]:.1f} ms more)" if parts[most] > 0 else ""
    return (
        f"{took}{cost}, and yields {outcome.best.tokens_per_pass.median:.2f} tokens. Speculation pays off if a pass "
        "takes about as long for many tokens as for one: a target streamed from RAM or disk, or a target much larger "
        "than its draft. --budget 0 disables speculation."
    )


def _reliability(report: BenchmarkReport) -> list[str]:
    """The best budget's nodes by tenths of predicted probability: mean prediction, share accepted, count."""
    best = report.best()
    bins = report.acceptance[best.budget_name].reliability() if best is not None else []
    if best is None or not bins:
        return []
    lines = [f"{predicted:9.3f}  {share:9.3f}  {count:8}" for predicted, share, count in bins]
    return ["", f"draft nodes of budget {best.budget_name}:", "predicted   accepted     nodes", *lines]


def texts_table(report: TextsReport, width: int) -> list[str]:
    """One line per number of texts, then remarks."""
    rows = [["texts", "tokens/s together", "each", "tokens/pass", "gain"], *map(_text_cells, report.rows())]
    lines = terminal.table(rows)
    same = f"all {report.num_compared} texts equal those of the first row"
    if report.num_different:
        same = (
            f"{report.num_different} of {report.num_compared} texts differ from those of the first row; "
            "where --stats says up to near-ties, these can cause it (run offspec verify to check), else it is an error"
        )
    remarks = [
        f"tokens/s: of {report.num_prompts} prompts with at most so many texts at a time, prompts included, +- half "
        "the range over the repeats; each: of one text while it is under way (median); tokens/pass: of all texts; "
        "memory is planned for the largest number of texts",
        same,
    ]
    return [*lines, *(line for text in remarks for line in textwrap.wrap(text, max(width, 20)))]


def _text_cells(row: TextsRow) -> list[str]:
    figures = (row.each_tokens_per_s.median, row.tokens_per_pass.median)
    return [
        str(row.num_texts),
        _with_spread(row.tokens_per_s),
        *(f"{figure:.2f}" for figure in figures),
        f"{row.gain.median:.2f}x",
    ]


def _with_spread(figure: Figure) -> str:
    """The median, and half the range, if there is one: a single measurement has none."""
    decimals = 1 if figure.median >= 10 else 2
    if figure.low == figure.high:
        return f"{figure.median:.{decimals}f}"
    return f"{figure.median:.{decimals}f} +-{(figure.high - figure.low) / 2:.{decimals}f}"


def write_csv(report: BenchmarkReport, file: Path) -> None:
    """Write one row per run. Raises StorageError."""
    rows = [
        {
            "kind": run.kind,
            "prompt": run.workload,
            "budget": run.budget_name if run.budget is None else run.budget,
            "repeat": run.repeat,
            "seconds": run.seconds,
            **run.stats.as_dict(),
        }
        for run in report.runs
    ]
    try:
        with file.open("w", newline="", encoding="utf-8") as sink:
            writer = csv.DictWriter(sink, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as exc:
        raise StorageError(f"cannot write {file}: {exc.strerror}; choose another --save") from exc
