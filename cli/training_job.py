"""What the trainings of `offspec distill` share: the loaded target, the progress line, and which flags go together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from offspec import LoadOptions
from offspec.research.distill_params import DistillParams

from .options import load_engine
from .terminal import ProgressLine, TimeLeft

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.research.distillation import Teacher
    from offspec.tools.draft_gain import DraftGain

MOST_MEASURED = 64  # tokens generated after each held-out prompt


@dataclass(frozen=True)
class TrainingJob:
    """A training's target and files. more: `out`, `texts` and `resume` of the training."""

    loading: LoadOptions
    more: Mapping[str, Any]
    quiet: bool
    verbose: bool

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
        self,
        path: Path,
        prompts: Sequence[list[int]],
        params: DistillParams,
        draft: str,
        learn_file: Path | None = None,
    ) -> DraftGain:
        """What a draft brings on held-out texts. path: the result of the training, for advice after Ctrl-C."""
        from offspec.tools.draft_gain import measure_gain

        engine, count = self.engine(draft, learn_file), min(MOST_MEASURED, params.text_tokens // 2)
        with training_line(quiet=self.quiet, advice=f"the training is complete, and its result is {path}.") as line:
            measured = measure_gain(engine, prompts, count, params.temperature, line)
        engine.close()
        return measured


def is_typed(name: str) -> bool:
    """Whether the flag with this click name is in the command line, not only in the user's settings."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_flags(names: Iterable[str], why: str) -> None:
    """Raises click.UsageError if one of these flags is in the command line."""
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and is_typed(parameter.name):
            raise click.UsageError(f"{max(parameter.opts, key=len)} {why}; leave it out.")


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
