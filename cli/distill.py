"""`offspec distill`: trains an exit layer, a head or a draft, and measures what a head or draft gains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from offspec import LoadOptions, format_seconds
from offspec.research.distill_params import HEADS, DistillParams, DraftParams, HeadParams, Init
from offspec.user_files import expand_home

from .flag_declarations import SAMPLING, FlagRecord, OffspecCommand, option
from .options import (
    MODEL_HELP,
    Number,
    WholeNumber,
    is_typed,
    load_engine,
    memory_flags,
    model_argument,
    model_flags,
    output_options,
    reworded,
    several,
)
from .terminal import ProgressLine, TimeLeft

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.research.distillation import Distilled, Teacher
    from offspec.research.draft_distillation import DistilledDraft
    from offspec.research.heads import DistilledHead
    from offspec.tools.draft_gain import DraftGain

SETTINGS = FlagRecord[dict[str, Any]]("settings", DraftParams, dict)
# Flags of one kind of training, by click's names → the flag that they need.
ONLY_WITH = {"on_policy": "--draft", "rounds": "--draft", "lora_rank": "--draft", "head_tokens": "--head"}
MOST_MEASURED = 64  # tokens generated after each held-out prompt


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
    callback=several(click.INT),
    metavar="N[,N...]",
    help="Train an exit layer after the first N layers, say a quarter. Of several, --draft self uses the fastest.",
)
@option("--head", type=click.Choice(HEADS), help="Train a head of this kind, for --draft head.")
@option(
    "--head-tokens",
    is_research=True,
    type=WholeNumber(1),
    metavar="N",
    help="Use only the N most frequent tokens of the texts; a head over MODEL's own still predicts all. [default: all]",
)
@option("--draft", "small", metavar="SMALL", help="Train this model: a path, a hub id, or builtin.")
@SETTINGS.option(
    "lora_rank",
    "--lora",
    default=None,
    type=WholeNumber(1),
    metavar="RANK",
    help="Train low-rank additions only, and write one file for --learn-file. [default: all weights]",
)
@SETTINGS.option(
    "on_policy",
    type=Number(0, 1),
    metavar="SHARE",
    help="Share of the texts that the draft writes and MODEL reads; MODEL writes the others. [default: 0]",
)
@SETTINGS.option(
    "rounds", is_research=True, type=WholeNumber(1), metavar="N", help="How often the draft writes new texts."
)
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
@SETTINGS.option("steps", type=WholeNumber(1), metavar="N", help="Training steps.")
@SETTINGS.option("num_texts", type=WholeNumber(1), metavar="N", help="Number of texts that MODEL generates.")
@SETTINGS.option("text_tokens", type=WholeNumber(2), metavar="N", help="Tokens per text.")
@SETTINGS.option("batch_texts", is_research=True, type=WholeNumber(1), metavar="N", help="Texts per step.")
@SETTINGS.option(
    "temperature", group=SAMPLING, type=Number(0, min_open=True), metavar="T", help="Sampling temperature of the texts."
)
@SETTINGS.option(
    "prompt_tokens",
    type=WholeNumber(0),
    metavar="N",
    help="Use the first N tokens of each piece of --text, and let MODEL write the rest. [default: all are used]",
)
@SETTINGS.option(
    "num_labels",
    is_research=True,
    type=WholeNumber(1),
    metavar="K",
    help="Keep the K likeliest tokens of the model's distribution; the others count as one.",
)
@SETTINGS.option(
    "learning_rate",
    is_research=True,
    default=None,
    type=Number(0, min_open=True),
    metavar="R",
    help="Learning rate at hidden size 256; scales with the inverse square root of the hidden size (a head: inverse). "
    f"[default: {DistillParams.learning_rate}; {HeadParams.learning_rate} for a head, {DraftParams.learning_rate} for "
    "a model]",
)
@SETTINGS.option(
    "init",
    is_research=True,
    type=click.Choice(get_args(Init)),
    help="Initialise with a copy of the next layer, or of the last one, which trains faster.",
)
@SETTINGS.option("seed", group=SAMPLING, type=WholeNumber(0), metavar="S", help="Random seed.")
@option("--resume", is_flag=True, help="Resume an interrupted run.")
@model_flags
@memory_flags
@output_options(json="Print one JSON object instead of a sentence.", quiet="Print no progress and no notes to stderr.")
def command(
    exit_layers: list[int] | None,
    head: str | None,
    head_tokens: int | None,
    small: str | None,
    out: Path | None,
    texts: tuple[Path, ...],
    resume: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    loading: LoadOptions,
    settings: dict[str, Any],
) -> None:
    small = small if is_typed("small") else None  # the settings' draft is for other commands
    if (small is not None) + (exit_layers is not None) + (head is not None) != 1:
        raise click.UsageError(
            "Give one of --exit-layer N, to train an exit layer, --head, to train a head, or --draft SMALL, "
            "to train a draft."
        )
    settings = {name: value for name, value in (settings | {"head_tokens": head_tokens}).items() if value is not None}
    for name, needed in ONLY_WITH.items():
        if needed != ("--head" if head is not None else "--draft" if small is not None else ""):
            _refuse_flag(name, needed)
            settings.pop(name, None)
    _check_out(out, exit_layers, is_folder=small is not None or head is not None)
    job = Job(loading, None if out is None else expand_home(out), texts, resume, quiet, verbose)
    began = time.monotonic()
    if small is not None:
        summary, sentence = _draft(job, small, DraftParams(**settings))
    elif head is not None:
        summary, sentence = _head(job, head, HeadParams(**settings))
    else:
        summary, sentence = _exits(job, sorted(exit_layers or []), DistillParams(**settings))
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(summary | {"seconds": round(seconds, 3)}))
    else:
        click.echo(f"{sentence}; took {format_seconds(seconds)}")


reworded(command, dtype="Compute dtype of the target; the exit layer is trained in fp32.")


def _refuse_flag(name: str, needed: str) -> None:
    """Raises click.UsageError if the flag is in the command line."""
    (parameter,) = (each for each in command.params if each.name == name)
    if is_typed(name):
        raise click.UsageError(f"{max(parameter.opts, key=len)} needs {needed}; leave it out.")


def _check_out(out: Path | None, exit_layers: list[int] | None, *, is_folder: bool) -> None:
    """Raises click.BadParameter for a place that the result cannot have. is_folder: it may be a folder."""
    if out is not None and len(exit_layers or ()) > 1:
        raise click.BadParameter("several exit layers have a file each; give one of them.", param_hint="--out")
    if out is not None and out.is_dir() and not is_folder:
        raise click.BadParameter(f"{out} is a folder; give a file.", param_hint="--out")


# ------------------------------------------------------------------------------------------------ trainings


@dataclass(frozen=True)
class Job:
    """What all trainings need: the target to load, where the result goes, and what is read."""

    loading: LoadOptions
    out: Path | None
    texts: Sequence[Path]
    resume: bool
    quiet: bool
    verbose: bool

    @property
    def files(self) -> dict[str, Any]:
        return {"out": self.out, "texts": self.texts, "resume": self.resume}

    def engine(self, draft: str, learn_file: Path | None = None) -> Engine:
        """The target with a draft."""
        loading = replace(self.loading, draft=draft, learn_file=learn_file)
        return load_engine(loading, quiet=self.quiet, verbose=self.verbose)

    def teacher(self) -> Teacher:
        """The target, which is closed before training where it is not needed. Raises a subclass of OffspecError."""
        from offspec.research.distillation import Teacher

        engine = self.engine("none")
        return Teacher.of(self.loading.model, engine.target, engine.tokenizer)

    def gain(
        self, done: DistilledHead | DistilledDraft, params: DistillParams, draft: str, learn_file: Path | None = None
    ) -> DraftGain:
        """What a draft brings on held-out texts. done: the result of the training."""
        from offspec.tools.draft_gain import measure_gain

        engine, count = self.engine(draft, learn_file), min(MOST_MEASURED, params.text_tokens // 2)
        advice = f"the training is complete, and its result is {done.path}."
        with training_line(quiet=self.quiet, advice=advice) as line:
            measured = measure_gain(engine, done.prompts, count, params.temperature, line)
        engine.close()
        return measured


@contextmanager
def training_line(
    *, quiet: bool, advice: str = "the same command with --resume continues from the last checkpoint."
) -> Iterator[TrainingLine]:
    """A progress line, and `advice` after Ctrl-C."""
    line = TrainingLine(quiet=quiet)
    try:
        yield line
    except KeyboardInterrupt:
        click.echo(f"\nInterrupted; {advice}", err=True)
        raise
    finally:
        line.show()


class TrainingLine(ProgressLine):
    """The phase of a training, its progress and the time left."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._stage, self._left = "", TimeLeft()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage, self._left = stage, TimeLeft()
        self.show(f"{stage}: {done} of {total}{self._left(time.monotonic(), done, total)}")


def _summary(done: Distilled | DistilledHead | DistilledDraft, **figures: Any) -> dict[str, Any]:
    """The result of a training as JSON."""
    fields = {**asdict(done), "path": str(done.path), **figures}
    return {name: value for name, value in fields.items() if name != "prompts"}


def _draft(job: Job, small: str, params: DraftParams) -> tuple[dict[str, Any], str]:
    """Train a small model and measure it; the result as JSON and as a sentence."""
    from offspec.research.draft_distillation import Untrained, distill_draft

    if job.out is None:
        raise click.UsageError("Give --out, a new folder for the draft (with --lora, a file).")
    teacher = job.teacher()
    with training_line(quiet=job.quiet) as line:
        draft = Untrained.of_model(small, teacher.tokenizer, teacher.target.device)
        done = distill_draft(teacher, draft, params, progress=line, **job.files)
    teacher.target.weights.close()
    was = job.gain(done, params, small).tokens_per_pass
    after = job.gain(done, params, small, done.path) if params.lora_rank else job.gain(done, params, str(done.path))
    agrees = f"its likeliest token is the target's at {done.agreement:.0%} of positions ({done.agreement_before:.0%})"
    now = after.tokens_per_pass
    return (
        _summary(done, tokens_per_pass_before=was, tokens_per_pass=now),
        f"{done.path}: {now:.2f} tokens per pass of 64 nodes on held-out texts (before: {was:.2f}); {agrees}",
    )


def _head(job: Job, kind: str, params: HeadParams) -> tuple[dict[str, Any], str]:
    """Train a head and measure it; the result as JSON and as a sentence. Raises a subclass of OffspecError."""
    from offspec.research.heads import distill_head

    teacher = job.teacher()
    with training_line(quiet=job.quiet) as line:
        done = distill_head(teacher, kind, params, progress=line, **job.files)
    teacher.target.weights.close()
    gain = job.gain(done, params, draft=str(done.path))
    agrees, held_shares = (", ".join(f"{share:.0%}" for share in shares) for shares in (done.agreement, gain.by_depth))
    held = f"; trees held the next token in {held_shares} of the cases, by depth" if held_shares else ""
    return (
        _summary(done, tokens_per_pass=gain.tokens_per_pass, found_by_depth=gain.by_depth),
        f"{done.path}: {gain.tokens_per_pass:.2f} tokens per pass of 64 nodes on held-out texts; its likeliest token "
        f"is the target's at {agrees} of positions, 1 to {len(done.agreement)} tokens ahead{held}",
    )


def _exits(job: Job, exit_layers: list[int], params: DistillParams) -> tuple[dict[str, Any], str]:
    """Train exit layers; the result as JSON and as a sentence."""
    from offspec.research.distillation import distill_exits

    teacher = job.teacher()
    with training_line(quiet=job.quiet) as line:
        exits = list(distill_exits(teacher, exit_layers, params, progress=line, **job.files))
    summaries = list(map(_summary, exits))
    sentences = [
        f"{done.path}: the exit layer predicts the target's likeliest token at {done.agreement:.0%} of held-out "
        f"positions (untrained: {done.agreement_before:.0%})"
        for done in exits
    ]
    return summaries[0] if len(exits) == 1 else {"exits": summaries}, "\n".join(sentences)
