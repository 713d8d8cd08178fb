"""One engine of several: loads a model on its own machine, and answers lists of prompts.

It does not know who calls it. Everything that it takes and returns can be pickled, and it raises nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from offspec import LoadOptions, __version__
from offspec.errors import CheckpointError, HardwareError, MemoryLimitError, OffspecError

from .batch import Answer, Asked

if TYPE_CHECKING:
    from offspec import Engine


@dataclass(frozen=True)
class EngineJob:
    """What every engine needs. Paths are looked up on the engine's machine, relative to `folder` if it exists there.

    options: what to load. answers: yields, for an engine and prompts, the place of each prompt
    in the list and its answer or error, in any order; another exception ends the engine. prompts_per_call: how many
    prompts an engine gets at a time.
    """

    options: LoadOptions
    answers: Callable[[Engine, Sequence[Asked]], Generator[tuple[int, Answer | OffspecError], None, None]]
    prompts_per_call: int = 1
    folder: str = field(default_factory=os.getcwd)
    version: str = __version__


@dataclass(frozen=True)
class Report:
    """What an engine did with a list of prompts.

    results: by the places of prompts in the list: the answer, or the error of a prompt that has none.
    fault: why the engine cannot answer the others, or any; None if it did all. dtype: that of the arithmetic.
    notes: for an empty list, automatic choices while loading and their reasons, as (text, is advice).
    """

    results: dict[int, Answer | str]
    fault: str | None = None
    dtype: str = ""
    notes: list[tuple[str, bool]] = field(default_factory=list)


class NodeEngine:
    """An engine in a process of its own; a fault in loading is reported by every `answer`."""

    def __init__(self, job: EngineJob, ram: int | None = None) -> None:
        """ram: a limit in bytes for an engine that shares its machine with others; None is all that is free."""
        self._job, self._fault = job, ""
        try:
            self._engine = _load(job, ram)
        except Exception as exc:  # noqa: BLE001 (out of memory, a library that is missing: the others go on)
            self._fault = reason_of(exc)

    def answer(self, prompts: Sequence[Asked]) -> Report:
        """Answer the prompts. An empty list waits until the model is loaded."""
        results: dict[int, Answer | str] = {}
        if self._fault:
            return Report(results, self._fault)
        try:
            with closing(self._job.answers(self._engine, prompts)) as answers:
                for place, result in answers:
                    if isinstance(result, OffspecError) and self._is_lost_by(result):
                        raise result
                    results[place] = str(result) if isinstance(result, OffspecError) else result
        except Exception as exc:  # noqa: BLE001 (whatever it is, it is told where the prompts come from)
            self._fault = reason_of(exc)
            return Report(results, self._fault)
        notes = [(note.text, note.advice) for note in self._engine.notes] if not prompts else []
        return Report(results, dtype=str(self._engine.target.dtype).removeprefix("torch."), notes=notes)

    def _is_lost_by(self, error: OffspecError) -> bool:
        """Whether the engine failed, not the prompt."""
        if isinstance(error, MemoryLimitError):
            try:
                self._engine.loaded.check()
            except MemoryLimitError:
                return True
        return isinstance(error, (CheckpointError, HardwareError))


def _load(job: EngineJob, ram: int | None) -> Engine:
    """The engine. Raises OffspecError, also if it would cut texts earlier than others do."""
    if job.version != __version__:
        raise OffspecError(f"it has offspec {__version__}, not {job.version}; install the same version")
    with suppress(OSError):
        os.chdir(job.folder)
    from offspec import DEFAULT_CONTEXT, Engine

    options = job.options if job.options.ram is not None else replace(job.options, ram=ram)
    engine = Engine.load(options)
    wanted = min(DEFAULT_CONTEXT, engine.target.config.max_context)
    if options.context is None and engine.max_context < wanted:
        raise MemoryLimitError(
            f"its memory allows a context of {engine.max_context} tokens, not {wanted}; with --context "
            f"{engine.max_context} every node has the same"
        )
    if options.context is None:
        engine.loaded.most_context = wanted  # nodes with more memory answer as the others do
    return engine


def reason_of(exc: BaseException) -> str:
    """An error as one line."""
    message = " ".join(str(exc).split())
    return message if isinstance(exc, OffspecError) else f"{type(exc).__name__}: {message}"
