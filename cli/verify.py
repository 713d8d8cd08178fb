"""`offspec verify`: decode prompts plainly and speculatively, and compare the token ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offspec.errors import VerificationError

from .options import MODEL_HELP, load_engine, loading_options

if TYPE_CHECKING:
    from offspec.verification import Report


def _numbers(kind: type) -> Any:
    """A click callback that reads "a,b,c"."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> list[Any]:
        try:
            return [kind(part) for part in value.split(",")]
        except ValueError as exc:
            raise click.BadParameter(f"{value!r} is not a list of numbers like 1,16,64") from exc

    return parse


def _words(*known: str) -> Any:
    """A click callback that reads a list of known words."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
        words = value.split(",")
        if bad := [word for word in words if word not in known]:
            raise click.BadParameter(f"{bad[0]!r} is not one of {', '.join(known)}")
        return words

    return parse


@click.command(
    name="verify",
    help=f"""Show that speculative text equals plain decoding, token for token.

Decodes held-out prompts plainly, then with every combination of the settings below, and compares token ids. In fp32
every token must be the same; in 16-bit arithmetic a difference is excused where the target itself was undecided.
Leaves with 1 if any text differs. {MODEL_HELP}

\b
Example:
  offspec verify builtin --json
  offspec verify ./Llama-3.1-8B --draft ./Llama-3.2-1B --dtype bf16 --budgets 64 --max-prompts 4
""",
)
@click.argument("model", default="builtin")
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text file, one prompt a line. [default: the built-in pair's held-out prompts]",
)
@click.option("--max-prompts", type=click.IntRange(1), metavar="N", help="Only the first N prompts.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=32, show_default=True, metavar="N", help="Tokens a prompt."
)
@click.option("--temperatures", default="0,0.6,1", show_default=True, callback=_numbers(float), help="Comma-separated.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True, help="Used at temperature 1."
)
@click.option("--budgets", default="1,16,64,256", show_default=True, callback=_numbers(int), help="Comma-separated.")
@click.option(
    "--scorings",
    default="coupled,specexec",
    show_default=True,
    callback=_words("coupled", "specexec"),
    help="Comma-separated.",
)
@click.option(
    "--drafts",
    default="own,random",
    show_default=True,
    callback=_words("own", "random"),
    help="own: the draft of --draft. random: one with random weights.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@loading_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and notes on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Say what was chosen and why; traceback on errors.")
def command(
    model: str,
    prompt_file: Path | None,
    max_prompts: int | None,
    max_new_tokens: int,
    temperatures: list[float],
    top_p: float,
    budgets: list[int],
    scorings: list[Any],
    drafts: list[str],
    seed: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    dtype: str,
    **loading: Any,
) -> None:
    from offspec import builtin
    from offspec.verification import settings_of, verify

    settings = settings_of(temperatures, top_p, budgets, scorings, drafts)
    prompts = (
        [line for line in prompt_file.read_text(encoding="utf-8").splitlines() if line]
        if prompt_file
        else builtin.prompts()
    )
    if not prompts:
        raise click.UsageError(f"{prompt_file} holds no prompt.")
    # What is compared is the algorithm, so the arithmetic is exact unless asked otherwise.
    engine = load_engine(model, quiet=quiet, verbose=verbose, dtype="fp32" if dtype == "auto" else dtype, **loading)

    def progress(done: int, total: int) -> None:
        if not quiet and sys.stderr.isatty():
            click.echo(f"\r{done}/{total} settings", err=True, nl=done == total)

    report = verify(
        engine, prompts[:max_prompts], settings, max_new_tokens=max_new_tokens, seed=seed, progress=progress
    )
    if as_json:
        click.echo(json.dumps({"model": engine.name, "draft": engine.draft_name, **report.as_dict()}))
    else:
        click.echo(table(report))
    if not report.is_exact:
        first = report.differences[0]
        raise VerificationError(
            f"{len(report.differences)} texts differ from plain decoding; the first: prompt {first.prompt_index}, token "
            f"{first.token_index}, {first.setting}"
        )


def table(report: Report) -> str:
    """Settings and tokens per pass, and the verdict."""
    lines = [f"{'temperature':>11}  {'top-p':>5}  {'draft':<6}  {'scoring':<8}  {'budget':>6}  tokens per pass"]
    for s, tokens_per_pass in zip(report.settings, report.tokens_per_pass, strict=True):
        lines.append(
            f"{s.temperature:>11g}  {s.top_p:>5g}  {s.draft:<6}  {s.scoring:<8}  {s.budget:>6}  {tokens_per_pass:.2f}"
        )
    near_ties = sum(difference.is_near_tie for difference in report.differences)
    verdict = (
        "identical to plain decoding" if report.is_exact else f"{len(report.differences) - near_ties} texts DIFFER"
    )
    excused = f", {near_ties} near-ties of 16-bit arithmetic" if near_ties else ""
    lines.append(
        f"{report.num_prompts} prompts, {len(report.settings)} settings, {report.num_tokens} tokens: {verdict}{excused}"
    )
    return "\n".join(lines)
