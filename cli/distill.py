"""`offspec distill`: trains an exit layer, or finds layers to skip, so that a model can be its own draft."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from offspec import format_seconds
from offspec.training.distill_params import DistillParams

from .help_groups import OffspecCommand, option, research_option
from .options import MODEL, MODEL_HELP, Number, WholeNumber, load_engine, memory_flags
from .terminal import TimeLeft, is_watched, show_line

if TYPE_CHECKING:
    from offspec.training.distillation import Distilled, Teacher

P = DistillParams


@click.command(
    cls=OffspecCommand,
    name="distill",
    help=f"""Train an exit layer, so that the first layers of MODEL become its draft (--draft self).

With --skip, nothing is trained: a search finds in which order layers are best skipped. --draft resident then drafts
without the layers that are streamed, and streams those that it can best do without.

{MODEL_HELP} The target generates texts, or reads given ones. One transformer layer after layer N learns to predict the
target's output. MODEL itself does not change. The built-in model takes some minutes. A run needs disk space for the
hidden state of every token. It needs memory for the head, and 16 bytes for each weight of one layer.

--resume continues a run that was interrupted, for example by Ctrl-C. The result is the same as without interruption.

\b
Examples:
  offspec distill builtin --exit-layer 2
  offspec run builtin --draft self "def area("
  offspec distill ./Llama-3.1-8B --exit-layer 4 --text notes.txt --out exit4.safetensors
  offspec distill ./Llama-3.1-8B --skip
""",
)
@click.argument("model", default="builtin", type=MODEL)
@option(
    "--exit-layer",
    type=int,
    metavar="N",
    help="Number of initial layers used as the draft; they stay in memory. Try a quarter of all layers first.",
)
@option("--skip", "skips", is_flag=True, help="Find layers to skip, for --draft resident, instead of training.")
@option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File for the result. [default: in the user's data folder, where --draft finds it]",
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
    help="Number of texts that the model generates.",
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
    type=Number(0, min_open=True),
    default=P.temperature,
    show_default=True,
    metavar="T",
    help="Sampling temperature of the texts.",
)
@research_option(
    "--learning-rate",
    type=Number(0, min_open=True),
    default=P.learning_rate,
    show_default=True,
    metavar="R",
    help="Learning rate at hidden size 256; scales with the inverse square root of the hidden size.",
)
@research_option(
    "--init",
    type=click.Choice(["next", "last"]),
    default=P.init,
    show_default=True,
    help="Initialise with a copy of the next layer, or of the last one, which trains faster.",
)
@option("--seed", type=WholeNumber(0), default=P.seed, show_default=True, metavar="S", help="Random seed.")
@option("--resume", is_flag=True, help="Resume an interrupted run.")
@option("--revision", metavar="REV", help="Branch, tag or commit of a hub id.")
@option("--device", default="auto", metavar="auto|cpu|cuda[:N]", help="Device that computes. [default: auto]")
@option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
    default="auto",
    show_default=True,
    help="Compute dtype of the target; the exit layer is trained in fp32.",
)
@memory_flags
@option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a sentence.")
@option("-q", "--quiet", is_flag=True, help="Print no progress and no notes to stderr.")
@option("-v", "--verbose", is_flag=True, help="Explain automatic choices; show tracebacks.")
def command(
    model: str,
    exit_layer: int | None,
    skips: bool,
    out: Path | None,
    texts: tuple[Path, ...],
    resume: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    revision: str | None,
    device: str,
    dtype: str,
    vram: int | None,
    ram: int | None,
    context: int | None,
    **settings: Any,
) -> None:
    if skips == (exit_layer is not None):
        raise click.UsageError("Give either --exit-layer N, to train an exit layer, or --skip.")
    if skips:
        _refuse_training_flags()
    params = DistillParams(**settings)
    from offspec.checkpoints.opening import open_target
    from offspec.training.distillation import Teacher, distill

    loading = {"revision": revision, "device": device, "dtype": dtype, "vram": vram, "ram": ram, "context": context}
    engine = load_engine(model, quiet=quiet, verbose=verbose, draft="none", **loading)
    files = open_target(model, revision, dtype, engine.target.device.type)
    teacher = Teacher(engine.target, files, engine.tokenizer, close_before_training=True)
    more: dict[str, Any] = {"out": None if out is None else out.expanduser(), "texts": texts, "resume": resume}
    began = time.monotonic()
    with _progress(quiet=quiet) as line:
        if exit_layer is None:
            said, sentence = _skips(teacher, params, progress=line, **more)
        else:
            said, sentence = _exit(distill(teacher, exit_layer, params, progress=line, **more))
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(said | {"seconds": round(seconds, 3)}))
    else:
        click.echo(f"{sentence}; took {format_seconds(seconds)}")


def _refuse_training_flags() -> None:
    """Raises click.UsageError for flags of training that --skip does not use."""
    context = click.get_current_context()
    for name in ("steps", "num_texts", "text_tokens", "batch_texts", "learning_rate", "init"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--skip trains nothing; leave out --{name.replace('_', '-')}.")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[TrainingLine | None]:
    """A progress line on a terminal, and what to do after Ctrl-C."""
    line = TrainingLine() if is_watched() and not quiet else None
    try:
        yield line
    except KeyboardInterrupt:
        click.echo("\nInterrupted; the same command with --resume continues from the last checkpoint.", err=True)
        raise
    finally:
        if line is not None:
            line.clear()


def _exit(done: Distilled) -> tuple[dict[str, Any], str]:
    """The result of training as JSON and as a sentence."""
    said = {"path": str(done.path), "exit_layer": done.exit_layer, "num_tokens": done.num_tokens}
    said |= {"num_steps": done.num_steps, "agreement_before": done.agreement_before, "agreement": done.agreement}
    agrees = f"the exit layer predicts the target's likeliest token at {done.agreement:.0%} of held-out positions"
    return said, f"{done.path}: {agrees} (untrained: {done.agreement_before:.0%})"


def _skips(teacher: Teacher, params: DistillParams, **more: Any) -> tuple[dict[str, Any], str]:
    """Search layers to skip; the result as JSON and as a sentence."""
    from offspec.training.skipping import SkipParams, search_skips

    found = search_skips(teacher, SkipParams(temperature=params.temperature, seed=params.seed), **more)
    shares = ", ".join(f"{n}: {share:.0%}" for n, share in enumerate(found.agreement) if n)
    said = {"path": str(found.path), "order": found.order, "agreement": found.agreement, "num_tokens": found.num_tokens}
    return said, f"{found.path}: without so many layers the likeliest token is the target's at {shares} of positions"


class TrainingLine:
    """A progress line on a terminal: the phase, its progress and the time left."""

    def __init__(self) -> None:
        self._what, self._left = "", TimeLeft()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self._what, self._left = what, TimeLeft()
        show_line(f"{what}: {done} of {total}{self._left(time.monotonic(), done, total)}")

    def clear(self) -> None:
        show_line()
