"""The interface of a kind of draft: its files, memory, loading, drafter, and listener.

`--draft` names a kind, or a model. First, the kind is opened: `OpenedDraft` checks its files and counts its memory.
Then it is loaded as a `Draft`. A new kind is one file with these two classes, which a line in `kinds.py` names, or the
user: `--draft module:Name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offspec.backends.choice import CPU
from offspec.backends.device_kinds import kind_of
from offspec.loaders.params import Progress
from offspec.loaders.streaming.placement import Placement
from offspec.scheduler.drafting.drafter import Drafter, DraftRequest, NoDrafter
from offspec.scheduler.drafting.forced import ForcedDrafter
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import Guesser
from offspec.scheduler.guessing.retrieval import Retrieval, SuffixIndex
from offspec.scheduler.pace.controllers import Controller, controller_for
from offspec.scheduler.pace.costs import Predict
from offspec.scheduler.params import SpeculationParams
from offspec.scheduler.trees.verify import TargetPass

from ..checkpoints.model_files import ModelFiles
from ..errors import UsageError
from ..methods import research
from ..model.decoder import CachedDecoder, Decoder
from ..model.memory.request_caches import DraftText, RequestCaches
from ..notes import Note
from ..planning.draft_forecast import Guessing
from ..planning.memory import MemoryUse, Reservation
from ..text.tokenizer import Tokenizer
from .draft_stats import DraftStats

NEEDS_DRAFT_MODEL = (
    "joint and other lossy acceptance needs a draft model, and none is loaded; choose one (`draft=PATH`)"
)


@dataclass(frozen=True)
class DraftOptions:
    """The user's settings of the draft.

    draft: auto, none, lookup, mtp, self, self:N, self:FILE, shadow, shadow:BITS, shadow:FOLDER, module:Name (an
    `OpenedDraft` of another package), or a model.
    exit_file: the exit layer for `self`. exit_layer: the number of first layers with which `self` drafts without a
    trained exit layer. learn: the draft may learn between requests. learn_file: what it learnt before; without
    `learn`, it must exist. needs_draft_model: requests will use lossy acceptance. draft_window: tokens that a draft
    keeps in its KV cache; None is chosen (`model_draft`, `layer_drafts`). context: tokens of the longest text, if the
    user gave their number.
    """

    draft: str = "auto"
    exit_file: Path | None = None
    learn: bool = False
    learn_file: Path | None = None
    needs_draft_model: bool = False
    exit_layer: int | None = None
    draft_window: int | None = None
    context: int | None = None

    @property
    def learns(self) -> bool:
        return self.learn or self.learn_file is not None

    def refuse_model_needs(self) -> None:
        """For kinds without a model. Raises UsageError if a draft model is needed."""
        if self.needs_draft_model:
            raise UsageError(NEEDS_DRAFT_MODEL)

    def refuse_exit_file(self) -> None:
        """For kinds without an exit layer. Raises UsageError if an exit file or an exit layer was given."""
        if self.exit_layer is not None and self.draft.partition(":")[0] != "self":
            raise UsageError(f"`exit_layer={self.exit_layer}` needs an early-exit draft; add `draft=self`, or omit it")
        if self.exit_file is not None:
            raise UsageError(
                f"`exit_file={self.exit_file}` needs an early-exit draft; add `draft=self`, or omit the file"
            )


@dataclass(frozen=True)
class Choice:
    """The draft with the most predicted tokens/s, by name, and all predictions (name → tokens/s, most first)."""

    name: str
    tokens_per_s: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} {rate:.2g}" for name, rate in self.tokens_per_s.items())


# Chooses among drafts by a plan and this machine's rates; others are predicted, too. None: there is no prediction.
Choose = Callable[[Sequence[str], Sequence[str]], Choice | None]


@dataclass(frozen=True)
class OpenRequest:
    """A request to open a draft: the user's options, and the target.

    tokenizer: the target's; None if memory is only planned and files may be missing. dtype: auto, bf16, fp16, fp32.
    notes: opening appends each automatic choice. progress(bytes_done, bytes_total): called while a shadow is made.
    choose(names, others): decides where several drafts are possible; without it, the first is taken.
    device: the target's.
    """

    options: DraftOptions
    target: ModelFiles
    tokenizer: Tokenizer | None
    dtype: str
    notes: list[Note]
    progress: Progress | None = None
    choose: Choose | None = None
    device: torch.device = CPU


class OpenedDraft(Protocol):
    """A draft with checked files, not loaded yet. It declares its memory (`planning.memory.MemoryUser`).

    Its class has a class method `open(request: OpenRequest)`, which raises a subclass of OffspecError.
    """

    @property
    def models(self) -> Sequence[ModelFiles]:
        """The models that `load` will load."""

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        """The memory that the draft needs beside `target`."""

    def guessing(self, placement: Placement) -> Guessing:
        """How it guesses if the target's layers are placed so, for predictions of its speed."""

    def load(self, device: torch.device) -> Attach:
        """Load the draft's own weights before the target's. The result makes the `Draft`, given the loaded target.

        Raises torch.OutOfMemoryError or a subclass of OffspecError.
        """


@dataclass(frozen=True, kw_only=True)
class DraftTask(DraftRequest):
    """One request, as a draft sees it.

    text: the draft's own cached text; None without a draft model. index: other texts for n-gram lookup. prompt: the
    tokens of the text so far.
    """

    text: DraftText | None
    target: Decoder
    speculation: SpeculationParams
    index: SuffixIndex | None = None
    prompt: Sequence[int] = ()


@dataclass(frozen=True)
class LearningRound:
    """The result of one round of learning.

    loss: mean KL(target ‖ draft) in nats per token on the new text, before training on it; loss_before: that of the
    original draft. Both are None without new text, or without time. share: the merged share of the additions.
    """

    seconds: float
    num_steps: int
    loss: float | None
    loss_before: float | None
    share: float


class Learner(Protocol):
    """Trains a draft between requests. num_steps: so far. adapter: what it has learnt, with `save(path)`."""

    is_listening: bool
    num_steps: int
    adapter: Any

    def new_listener(self) -> Listener: ...

    def learn(self, generation_s: float) -> LearningRound: ...


class Draft:
    """A loaded draft. This base class has no model; subclasses may have one.

    name: a model's name, `lookup`, or `self`; None if nothing drafts. decoder: the draft model, or None.
    aligner: trains the draft between requests, or None. overlaps: it can draft while the target's pass runs.
    allows_reload: the target's weights may be loaded again while this draft exists. keeps_target_whole: one cache has
    all of the target's KV entries of a text. target_layers: the target's layers whose states `TargetPass` reports to
    the draft. num_shared: entries of a text's KV cache in the target that are the draft's own. files: the draft
    model's, or None. as_planned: how it guesses, by the plan; None if no model guesses.
    """

    overlaps = True
    allows_reload = True
    keeps_target_whole = True
    target_layers: Sequence[int] = ()
    num_shared = 0

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.files: ModelFiles | None = None
        self.as_planned: Guessing | None = None
        self.decoder: Decoder | None = None
        self.aligner: Learner | None = None

    def prepare(self, max_context: int) -> None:
        """Called once, before the first text. max_context: tokens of the longest text."""

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> RequestCaches:
        """Empty caches of one text, with room for `num_tokens` tokens and a tree of `num_nodes` nodes."""
        return RequestCaches(CachedDecoder(target, num_tokens + num_nodes), None)

    def new_stats(
        self, target: Decoder, predict_pass_s: Predict | None = None, predict_round_s: Predict | None = None
    ) -> DraftStats:
        """Empty estimates for this draft with this target.

        predict_pass_s, predict_round_s: first estimates of the seconds of a pass and a draft round, by number of rows.
        """
        return DraftStats.of(target, self.decoder, predict_pass_s, predict_round_s)

    def guessers(self, task: DraftTask, stats: DraftStats) -> list[Guesser]:
        """The guessers of one request; they need no model."""
        return [] if task.index is None else [Retrieval(task.index, stats.retrievals)]

    def drafter(self, task: DraftTask, stats: DraftStats) -> Drafter:
        """The drafter of one request."""
        guessers = self.guessers(task, stats)
        speculation, constraint = task.speculation, task.sampler.constraint
        if speculation.budget != 0 and not guessers and constraint is not None:
            return ForcedDrafter(constraint, speculation.budget or most_nodes(task))
        if speculation.budget == 0 or not guessers:
            return NoDrafter()
        return ModelDrafter(
            None,
            task,
            task.speculation,
            stats,
            guessers=guessers,
            controller=controller_of(task, stats),
        )

    def new_listener(self) -> Listener:
        """A function that receives every pass of one request, in order, in addition to the drafter."""
        return lambda done: None

    def close(self) -> None:
        """Free the draft's memory."""


Attach = Callable[[Decoder], Draft]


class MakeDrafter(Protocol):
    """Makes the drafter of one request with a draft model, whose trees have another shape."""

    def __call__(self, text: DraftText, task: DraftTask, stats: DraftStats) -> Drafter: ...


Listener = Callable[[TargetPass], None]


def controller_of(task: DraftTask, stats: DraftStats) -> Controller:
    """Decides how long to draft and how many nodes to send, by the request's parameters."""
    controller, stopping = controller_for(task.speculation, stats.costs, most_nodes(task)), task.speculation.stopping
    return controller if stopping == "default" else research().STOPPING[stopping](controller)


def most_nodes(task: DraftTask) -> int:
    """The most nodes of a tree whose size is found at run time."""
    return min(kind_of(task.target.device).useful_rows, task.target.config.most_nodes)
