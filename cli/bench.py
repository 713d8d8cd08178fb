"""`offspec bench`: speculative against plain decoding, measured in the same run."""

from __future__ import annotations

import csv
import json
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offspec.errors import StorageError

from .batch import check_sink, read_prompts
from .help_groups import OffspecCommand, option
from .options import (
    MODEL,
    MODEL_HELP,
    WholeNumber,
    learning_options,
    load_engine,
    loading_options,
    lossy_settings,
    request_of,
    reworded,
    sampling_options,
    several_budgets,
    speculation_options,
)
from .terminal import columns, is_watched, show_line

if TYPE_CHECKING:
    from offspec.tools.benchmark import BenchmarkReport, BenchmarkRow, Figure, Outcome

PLOT_SUFFIXES = (".png", ".svg")
MAX_NEW_TOKENS = 64
CLEARLY = 0.9  # of the fastest budget's gain: what the default has to reach, or it is told beside it


def _plot_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A click callback: refuses what could not be written, before anything is measured."""
    if value is None:
        return None
    if value.suffix.lower() not in PLOT_SUFFIXES:
        raise click.BadParameter(f"{value} must end with {' or '.join(PLOT_SUFFIXES)}.")
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise click.BadParameter("plots need matplotlib: pip install 'offspec[bench]'.")
    return value


@click.command(
    cls=OffspecCommand,
    name="bench",
    help=f"""Measure speculative against plain decoding on the same prompts, in the same run.

{MODEL_HELP} Tokens/s include the first pass, which reads the prompt. Figures are medians over repeats, with the range.
The built-in prompts ask for code, chat, prose and repetitive text. --accept joint adds a row that is marked lossy, and
the likelihood of each text under the target.

\b
Examples:
  offspec bench builtin
  offspec bench ./Llama-3.1-70B-nf4 --draft ./Llama-3.2-1B-Instruct --budgets auto --repeats 1 --max-new-tokens 16
  offspec bench builtin --budgets 4,16,64,256 --plot passes.svg --csv runs.csv --json
""",
)
@click.argument("model", default="builtin", type=MODEL)
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
    "--warmup", type=WholeNumber(0), default=1, show_default=True, metavar="N", help="Rounds before the measured ones."
)
@option("--repeats", type=WholeNumber(1), default=3, show_default=True, metavar="N", help="Measured rounds.")
@option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a row per run.")
@option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_plot_file,
    help="Plot passes and accepted tokens as .png or .svg; needs matplotlib.",
)
@loading_options
@speculation_options
@learning_options
@partial(sampling_options, max_new_tokens=MAX_NEW_TOKENS)
@option("--json", "as_json", is_flag=True, help="Print one JSON object; the table goes to stderr.")
@option("-q", "--quiet", is_flag=True, help="No progress and notes on stderr.")
@option("-v", "--verbose", is_flag=True, help="Say what was chosen and why; show tracebacks.")
def command(
    model: str,
    prompt_file: Path | None,
    budgets: list[int | None],
    warmup: int,
    repeats: int,
    csv_file: Path | None,
    plot_file: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    params, speculation = request_of(options)
    options["needs_draft_model"] = speculation.is_lossy
    for file in (csv_file, plot_file):
        if file is not None:
            check_sink(file)
    from offspec.tools.benchmark import WORKLOADS, Workload, measure

    workloads = list(WORKLOADS)
    if prompt_file is not None:
        workloads = [
            Workload(str(task.content.get("kind", "prompts")), task.prompt) for task in read_prompts(prompt_file)
        ]
    tree = max((nodes or 0 for nodes in budgets), default=0)
    engine = load_engine(model, quiet=quiet, verbose=verbose, tree=tree, **options)
    if not engine.guesses:
        budgets = []

    def progress(done: int, total: int) -> None:
        if is_watched() and not quiet:
            show_line(f"run {done + 1} of {total}" if done < total else "")

    ways = [replace(speculation, accept="exact", budget=nodes) for nodes in budgets]
    ways += [speculation] * speculation.is_lossy
    report = measure(engine, workloads, params, ways, num_warmups=warmup, num_repeats=repeats, progress=progress)
    if not (as_json and quiet):
        on_terminal = is_watched() if as_json else sys.stdout.isatty()
        click.echo("\n".join(table(report, columns() if on_terminal else WIDE)), err=as_json)
    if as_json:
        settings = {
            "warmup": warmup,
            "repeats": repeats,
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            **lossy_settings(speculation),
        }
        click.echo(
            json.dumps({"model": engine.name, "draft": engine.draft_name, "settings": settings, **report.as_dict()})
        )
    if csv_file is not None:
        write_csv(report, csv_file)
    if plot_file is not None:
        from .plots import plot

        plot(report, f"{engine.name}, draft {engine.draft_name or 'none'}", plot_file)


# A draft that learnt from the prompts it is measured on would say nothing: --learn-file alone, learnt elsewhere, does.
command.params = [parameter for parameter in command.params if parameter.name not in ("budget", "learn")]
reworded(
    command,
    learn_file="What the draft learnt elsewhere (offspec run --learn), read at the start.",
    seed="Random seed; the draft does not change the text. [default: 0]",
)


# ------------------------------------------------------------------------------------------------ the table


WIDE = 120  # what a file or a pipe gets


def table(report: BenchmarkReport, width: int) -> list[str]:
    """A line for each kind of prompts and budget, blocks where the terminal is narrow, and what is to be said to it."""
    rows = [_cells(row) for row in report.rows()]
    sizes = [max(len(name), *(len(cells[name]) for cells in rows)) for name in rows[0]]
    lines = [
        "  ".join(cell.rjust(size) for cell, size in zip(cells, sizes, strict=True))
        for cells in (list(rows[0]), *(list(cells.values()) for cells in rows))
    ]
    if len(lines[0]) > width:
        lines = [line for cells in rows for line in (*(f"{name}: {cell}" for name, cell in cells.items()), "")]
    outcome = report.outcome()
    judged = [] if outcome is None else ["", verdict(outcome), ""]
    remarks = [*judged, *_remarks(report), *_reliability(report)]
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
        "a pass": f"{row.tokens_per_pass.median:.2f}",
        "draft": draft,
        "target": target,
        "rest": rest,
        **({} if row.log_likelihood is None else {"nats/token": f"{row.log_likelihood:.3f}"}),
    }


def _with_spread(figure: Figure) -> str:
    decimals = 1 if figure.median >= 10 else 2
    return f"{figure.median:.{decimals}f} +-{(figure.high - figure.low) / 2:.{decimals}f}"


def _remarks(report: BenchmarkReport) -> list[str]:
    lossy = [run for run in report.runs if run.accept == "joint"]
    different, guessed = (
        report.num_different(),
        [run for run in report.runs if run.budget != 0 and run.accept == "exact"],
    )
    same = (
        "all texts equal plain decoding"
        if not different
        else (
            f"{different} of {len(guessed)} texts differ from plain decoding; in 16-bit arithmetic near-ties may "
            "(offspec verify tells), in fp32 none should"
        )
    )
    remarks = [
        "tokens/s: of everything, the first pass with the prompt too, +- half the range over the repeats; first: "
        "seconds "
        "of that pass; later: tokens/s without it; a pass: tokens; draft, target, rest: ms of a later pass",
        same if guessed else "there is no draft",
    ]
    for name, found in report.acceptance.items():
        remarks.append(
            f"budget {name}: {found.predicted_per_pass:.2f} guesses a pass were expected to be accepted, "
            f"{found.accepted_per_pass:.2f} were"
        )
    if lossy:
        remarks.append(
            f"joint, lossy: {report.num_different('joint')} of {len(lossy)} texts differ from plain decoding, as they "
            "may; "
            "nats/token: log-likelihood under the target, nearer to 0 is likelier"
        )
    return remarks


def verdict(outcome: Outcome) -> str:
    """Whether speculation pays here, and why not."""
    name, gain = outcome.best.budget_name, f"{outcome.gain:.2f}x"
    if outcome.pays:
        return f"Speculation pays here: budget {name} has {gain} plain decoding's tokens/s{_default_beside(outcome)}."
    if outcome.pays is None:
        said = f"Speculation makes no difference here: budget {name}, the fastest, has {gain} plain decoding's tokens/s"
    else:
        said = f"Speculation does not pay here: budget {name}, the fastest, has {gain} plain decoding's tokens/s"
    return f"{said}. {_why_not(outcome)}".rstrip()


def _default_beside(outcome: Outcome) -> str:
    """What the default budget reaches, where another one is clearly faster."""
    auto = outcome.auto
    if auto is None or auto.gain.median >= CLEARLY * outcome.gain:
        return ""
    return f", auto (the default) {auto.gain.median:.2f}x"


def _why_not(outcome: Outcome) -> str:
    if outcome.pass_ratio is None or outcome.added_ms is None:
        return ""
    draft, target, rest = outcome.added_ms
    parts = {"drafting": draft, "scoring the guesses": target, "the rest": rest}
    most = max(parts, key=lambda name: parts[name])
    took = f"A pass took {outcome.pass_ratio:.2f} times as long as a plain one"
    cost = f", mostly for {most} ({parts[most]:.1f} ms more)" if parts[most] > 0 else ""
    return (
        f"{took}{cost}, and brought {outcome.best.tokens_per_pass.median:.2f} tokens. It pays where passes are slow "
        "whatever they score: a target that is streamed from RAM or disk, or one much larger than its draft; otherwise "
        "--budget 0 decodes plainly."
    )


def _reliability(report: BenchmarkReport) -> list[str]:
    """A line for each tenth of predicted probability: how many guesses of the best budget had it, and came true."""
    best = report.best()
    bins = report.acceptance[best.budget_name].reliability() if best is not None else []
    if best is None or not bins:
        return []
    lines = [f"{predicted:9.3f}  {share:9.3f}  {count:8}" for predicted, share, count in bins]
    return ["", f"guesses of budget {best.budget_name}:", "predicted  came true   guesses", *lines]


def write_csv(report: BenchmarkReport, file: Path) -> None:
    """A row a run. Raises StorageError."""
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
        raise StorageError(f"{file} cannot be written: {exc.strerror}; choose another --csv") from exc
