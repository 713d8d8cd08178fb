"""`offspec distill`: trains an exit layer, a head or a draft."""

from __future__ import annotations

import json
import reprlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from offspec import LoadOptions, format_seconds
from offspec.research.distill_params import HEADS, DistillParams, DraftParams, HeadParams, Init
from offspec.user_files import expand_home

from .distill_draft import DRAFT_FLAGS, distil_draft, draft_options, draft_to_train
from .flag_declarations import SAMPLING, OffspecCommand, option, research_option
from .options import (
    MODEL_HELP,
    MOST_DIGITS,
    Number,
    WholeNumber,
    memory_flags,
    model_argument,
    model_flags,
    output_options,
    reworded,
)
from .training_job import TrainingJob, refuse_flags, training_line

if TYPE_CHECKING:
    from offspec.research.distillation import Distilled

P = DistillParams
HEAD_FLAGS = ("head_tokens",)


def layer_numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    """A click callback: different numbers of layers, ascending."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    if not all(word.removeprefix("-").isdecimal() and len(word) < MOST_DIGITS for word in words):
        raise click.BadParameter(f"{reprlib.repr(value)} is no list of whole numbers, such as 4 or 4,6,8.")
    return sorted({int(word) for word in words})


@click.command(
    cls=OffspecCommand,
    name="distill",
    help=f"""Train a draft for MODEL on MODEL's output: an exit layer, a head, or a small model.

With --exit-layer, the first layers of MODEL become its draft (--draft self). With --head, a head is trained (--draft
head): it reads MODEL's hidden states, predicts several tokens ahead, and needs little memory. With --draft, a small
model of the same vocabulary learns MODEL's predictions.

{MODEL_HELP} MODEL generates texts, or reads those of --text. The draft learns to predict MODEL's output; MODEL itself
does not change. The built-in model takes some minutes. A run needs disk space for MODEL's predictions at every token.
It needs 16 bytes of memory for each weight that is trained.

--resume continues a run that was interrupted, for example by Ctrl-C. The result is the same as without interruption.

\b
Examples:
  offspec distill builtin --exit-layer 2
  offspec run builtin --draft self "def area("
  offspec distill ./Llama-3.1-8B --exit-layer 4 --text notes.txt --out exit4.safetensors
  offspec distill ./Llama-3.1-8B --head eagle3
  offspec distill ./Llama-3.1-70B --draft ./Llama-3.2-1B --text notes.txt --out ./my-draft
""",
)
@model_argument
@option(
    "--exit-layer",
    "exit_layers",
    callback=layer_numbers,
    metavar="N[,N...]",
    help="Train an exit layer after the first N layers, say a quarter. Of several, --draft self uses the fastest.",
)
@option("--head", type=click.Choice(HEADS), help="Train a head of this kind, for --draft head.")
@research_option(
    "--head-tokens",
    type=WholeNumber(1),
    metavar="N",
    help="Use only the N most frequent tokens of the texts; a head over MODEL's own still predicts all. [default: all]",
)
@draft_options
@option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="File for the result, or folder for a head or draft. [default: in the user's data folder; none for --draft]",
)
@option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Train on this text file instead of generated texts; may be repeated.",
)
@option("--steps", type=WholeNumber(1), default=P.steps, show_default=True, metavar="N", help="Training steps.")
@option(
    "--num-texts",
    type=WholeNumber(1),
    default=P.num_texts,
    show_default=True,
    metavar="N",
    help="Number of texts that MODEL generates.",
)
@option(
    "--text-tokens",
    type=WholeNumber(2),
    default=P.text_tokens,
    show_default=True,
    metavar="N",
    help="Tokens per text.",
)
@research_option(
    "--batch-texts",
    type=WholeNumber(1),
    default=P.batch_texts,
    show_default=True,
    metavar="N",
    help="Texts per step.",
)
@option(
    "--temperature",
    group=SAMPLING,
    type=Number(0, min_open=True),
    default=P.temperature,
    show_default=True,
    metavar="T",
    help="Sampling temperature of the texts.",
)
@option(
    "--prompt-tokens",
    type=WholeNumber(0),
    default=P.prompt_tokens,
    metavar="N",
    help="Use the first N tokens of each piece of --text, and let MODEL write the rest. [default: all are used]",
)
@research_option(
    "--num-labels",
    type=WholeNumber(1),
    default=P.num_labels,
    show_default=True,
    metavar="K",
    help="Keep the K likeliest tokens of the model's distribution; the others count as one.",
)
@research_option(
    "--learning-rate",
    type=Number(0, min_open=True),
    metavar="R",
    help="Learning rate at hidden size 256; scales with the inverse square root of the hidden size (a head: inverse). "
    f"[default: {P.learning_rate}; {HeadParams.learning_rate} for a head, {DraftParams.learning_rate} for a model]",
)
@research_option(
    "--init",
    type=click.Choice(get_args(Init)),
    default=P.init,
    show_default=True,
    help="Initialise with a copy of the next layer, or of the last one, which trains faster.",
)
@option(
    "--seed", group=SAMPLING, type=WholeNumber(0), default=P.seed, show_default=True, metavar="S", help="Random seed."
)
@option("--resume", is_flag=True, help="Resume an interrupted run.")
@model_flags
@memory_flags
@output_options(json="Print one JSON object instead of a sentence.", quiet="Print no progress and no notes to stderr.")
def command(
    exit_layers: list[int] | None,
    head: str | None,
    out: Path | None,
    texts: tuple[Path, ...],
    resume: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    loading: LoadOptions,
    **settings: Any,
) -> None:
    settings = {name: value for name, value in settings.items() if value is not None}
    small = draft_to_train(settings)
    if (small is not None) + (exit_layers is not None) + (head is not None) != 1:
        raise click.UsageError(
            "Give one of --exit-layer N, to train an exit layer, --head, to train a head, or --draft SMALL, "
            "to train a draft."
        )
    if small is None:
        refuse_flags(DRAFT_FLAGS, "needs --draft")
    if head is None:
        refuse_flags(HEAD_FLAGS, "needs --head")
        settings.pop("head_tokens", None)
    _check_out(out, exit_layers, is_folder=small is not None or head is not None)
    more: dict[str, Any] = {"out": None if out is None else expand_home(out), "texts": texts, "resume": resume}
    job = TrainingJob(loading, more, quiet=quiet, verbose=verbose)
    began = time.monotonic()
    if small is not None:
        summary, sentence = distil_draft(job, small, settings)
    elif head is not None:
        summary, sentence = _head(job, head, HeadParams(**settings))
    else:
        summary, sentence = _exits(job, exit_layers or [], DistillParams(**settings))
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(summary | {"seconds": round(seconds, 3)}))
    else:
        click.echo(f"{sentence}; took {format_seconds(seconds)}")


reworded(command, dtype="Compute dtype of the target; the exit layer is trained in fp32.")


def _check_out(out: Path | None, exit_layers: list[int] | None, *, is_folder: bool) -> None:
    """Raises click.BadParameter for a place that the result cannot have. is_folder: it may be a folder."""
    if out is not None and len(exit_layers or ()) > 1:
        raise click.BadParameter("several exit layers have a file each; give one of them.", param_hint="--out")
    if out is not None and out.is_dir() and not is_folder:
        raise click.BadParameter(f"{out} is a folder; give a file.", param_hint="--out")


def _head(job: TrainingJob, kind: str, params: HeadParams) -> tuple[dict[str, Any], str]:
    """Train a head and measure it; the result as JSON and as a sentence. Raises a subclass of OffspecError."""
    from offspec.research.heads import distill_head

    teacher = job.teacher()
    with training_line(quiet=job.quiet) as line:
        done = distill_head(teacher, kind, params, progress=line, **job.more)
    teacher.target.weights.close()
    gain = job.gain(done.path, done.prompts, params, draft=str(done.path))
    summary: dict[str, Any] = {"path": str(done.path), "kind": kind, "num_tokens": done.num_tokens}
    summary |= {"num_steps": done.num_steps, "agreement_before": done.agreement_before, "agreement": done.agreement}
    summary |= {"tokens_per_pass": gain.tokens_per_pass, "found_by_depth": gain.by_depth}
    agrees, held_shares = (", ".join(f"{share:.0%}" for share in shares) for shares in (done.agreement, gain.by_depth))
    sentence = (
        f"{done.path}: {gain.tokens_per_pass:.2f} tokens per pass of 64 nodes on held-out texts; its likeliest token "
        f"is the target's at {agrees} of positions, 1 to {len(done.agreement)} tokens ahead"
    )
    return summary, sentence + (
        f"; trees held the next token in {held_shares} of the cases, by depth" if held_shares else ""
    )


def _exits(job: TrainingJob, exit_layers: list[int], params: DistillParams) -> tuple[dict[str, Any], str]:
    """Train exit layers; the result as JSON and as a sentence."""
    from offspec.research.distillation import distill_exits

    teacher = job.teacher()
    with training_line(quiet=job.quiet) as line:
        exits = [_exit(done) for done in distill_exits(teacher, exit_layers, params, progress=line, **job.more)]
    if len(exits) == 1:
        return exits[0]
    return {"exits": [summary for summary, _ in exits]}, "\n".join(sentence for _, sentence in exits)


def _exit(done: Distilled) -> tuple[dict[str, Any], str]:
    """The result of training as JSON and as a sentence."""
    summary = {"path": str(done.path), "exit_layer": done.exit_layer, "num_tokens": done.num_tokens}
    summary |= {"num_steps": done.num_steps, "agreement_before": done.agreement_before, "agreement": done.agreement}
    agrees = f"the exit layer predicts the target's likeliest token at {done.agreement:.0%} of held-out positions"
    return summary, f"{done.path}: {agrees} (untrained: {done.agreement_before:.0%})"
