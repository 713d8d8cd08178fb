"""`offspec verify`: decodes prompts with and without speculation, and compares the token ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offspec import ACCEPTS, SEED_LIMIT, LoadOptions, SamplingParams
from offspec.errors import VerificationError

from . import terminal
from .batch import read_prompts
from .constraints import ConstraintFlags, constraint_options
from .flag_declarations import OffspecCommand, option
from .options import (
    MODEL_HELP,
    Number,
    WholeNumber,
    load_engine,
    loading_options,
    lookup_files_option,
    model_argument,
    output_options,
    reworded,
    several,
    several_budgets,
    tuning_options,
)

if TYPE_CHECKING:
    from offspec import Scoring
    from offspec.tools.verification import VerificationReport

BUILTIN_PROMPTS = 20  # with all settings these take minutes; all held-out prompts take half an hour


def _refuse_lossy(ctx: click.Context, param: click.Parameter, value: str) -> None:
    """A click callback: refuses lossy acceptance, which `run` and `bench` have."""
    if value != "exact":
        raise click.BadParameter(
            f"{value} acceptance is lossy, so its text need not equal plain decoding; "
            "use `offspec bench` to measure it."
        )


@click.command(
    cls=OffspecCommand,
    name="verify",
    help=f"""Compare speculative text with plain decoding, token by token.

Decodes held-out prompts plainly, then with every combination of the settings below, and compares token ids. Every
token must be equal; where the text is not exact, near-ties may differ: two tokens whose logits differ by
no more than rounding. They are counted. The exit code is 1 if any other token differs. The built-in pair takes some
minutes on one core. {MODEL_HELP}

\b
Examples:
  offspec verify builtin --json
  offspec verify ./Llama-3.1-8B --draft ./Llama-3.2-1B --dtype bf16 --budgets 64 --max-prompts 4
""",
)
@model_argument
@option(
    "--prompts",
    "prompt_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Prompts: a text file, one per line, or .jsonl with "prompt" or "messages", used as plain text. '
    "[default: the built-in pair's held-out prompts]",
)
@option(
    "--max-prompts",
    type=WholeNumber(1),
    metavar="N",
    help=f"Use only the first N prompts. [default: all of a file, or {BUILTIN_PROMPTS} of the built-in pair's]",
)
@option(
    "--max-new-tokens", "-n", type=WholeNumber(1), default=16, show_default=True, metavar="N", help="Tokens per prompt."
)
@option(
    "--temperatures",
    default="0,0.6,1",
    show_default=True,
    callback=several(Number(0)),
    help="Temperatures to verify, separated by commas.",
)
@option(
    "--top-p",
    type=Number(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    metavar="P",
    help="Top-p at temperature 1.",
)
@option(
    "--budgets",
    default="1,16,256,auto",
    show_default=True,
    callback=several_budgets,
    help="Tree sizes to verify, separated by commas.",
)
@option(
    "--scorings",
    is_research=True,
    default="coupled,specexec",
    show_default=True,
    callback=several(click.Choice(["coupled", "specexec"])),
    help="Rankings to verify, separated by commas.",
)
@option(
    "--drafts",
    is_research=True,
    default="own,random",
    show_default=True,
    callback=several(click.Choice(["own", "random"])),
    help="own: the draft of --draft, with lookup. random: a draft with random weights.",
)
@option(
    "--seed",
    type=WholeNumber(0, SEED_LIMIT - 1),
    default=0,
    show_default=True,
    metavar="S",
    help="Seed of the first prompt; each further prompt has the next seed.",
)
@constraint_options
@loading_options
@lookup_files_option
@tuning_options
@option(
    "--accept",
    is_research=True,
    type=click.Choice(ACCEPTS),
    default="exact",
    is_eager=True,  # settings for other commands do not apply here
    expose_value=False,
    callback=_refuse_lossy,
    help="Only exact: the others are lossy and have nothing to verify.",
)
@output_options(json="Print one JSON object instead of the table.", quiet="Print no progress and no notes to stderr.")
def command(
    prompt_file: Path | None,
    max_prompts: int | None,
    max_new_tokens: int,
    temperatures: list[float],
    top_p: float,
    budgets: list[int | None],
    scorings: list[Scoring],
    drafts: list[str],
    seed: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    loading: LoadOptions,
    constraint: ConstraintFlags,
) -> None:
    from offspec.tools.verification import settings_of, verify

    required = constraint.applied_to(SamplingParams()).constraint
    settings = settings_of(temperatures, top_p, budgets, scorings, drafts, required)
    if prompt_file is not None:
        prompts = [task.text for task in read_prompts(prompt_file)][:max_prompts]
    else:
        from offspec import builtin

        prompts = builtin.prompts()[: max_prompts or BUILTIN_PROMPTS]
    loading = replace(loading, tree=max(nodes or 0 for nodes in budgets))
    if loading.dtype == "auto":  # where the text is not exact, fp32 has next to no near-ties with a plain KV cache
        loading = replace(loading, dtype="fp32")
        if verbose:
            click.echo("offspec: dtype fp32 (verify's default)", err=True)
    engine = load_engine(loading, quiet=quiet, verbose=verbose)
    if not engine.guesses and "random" in drafts:
        settings = [setting for setting in settings if setting.draft == "random"]
        if "own" in drafts and not quiet:
            click.echo("offspec: without --draft, only the random draft is verified", err=True)

    line = terminal.ProgressLine(quiet=quiet)

    def progress(done: int, total: int) -> None:
        line.show(f"{done}/{total} settings" if done < total else "")

    report = verify(engine, prompts, settings, max_new_tokens=max_new_tokens, seed=seed, progress=progress)
    if as_json:
        click.echo(json.dumps({"model": engine.name, "draft": engine.draft_name, **report.as_dict()}))
    else:
        click.echo(table(report))
    if not report.is_exact:
        raise VerificationError(f"{len(report.errors)} texts differ from plain decoding; the first: {report.errors[0]}")


reworded(command, dtype="Compute dtype. auto: fp32. Near-ties are allowed where the text is not exact.")


def table(report: VerificationReport) -> str:
    """Tokens per pass by setting, and the verdict."""
    rows = [("temperature", "top-p", "draft", "scoring", "budget", "tokens per pass")]
    for s, tokens in zip(report.settings, report.tokens_per_pass, strict=True):
        rows.append((f"{s.temperature:g}", f"{s.top_p:g}", s.draft, s.scoring, s.budget_name, f"{tokens:.2f}"))
    verdict = "identical to plain decoding" if report.is_exact else f"{len(report.errors)} texts DIFFER"
    counts = f"{report.num_prompts} prompts, {len(report.settings)} settings, {report.num_tokens} tokens"
    if report.near_ties:  # how often the other token of one was chosen
        rate = f"{report.near_ties_per_1000:.2g} per 1,000 tokens"
        verdict += f" {'up to' if report.is_exact else 'beside'} {len(report.near_ties)} near-ties, {rate}"
        verdict += f", at most {report.largest_gap:.2g} apart"
    return "\n".join([*terminal.table(rows), f"{counts}, promised {report.promise}: {verdict}"])
