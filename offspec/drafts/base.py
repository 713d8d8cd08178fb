"""What a kind of draft is: its files, its memory, how it is loaded, what it drafts on, and what it is told.

`--draft` names a kind, or a model. A kind is opened before anything is loaded (`OpenedDraft`: its files are checked and
its memory is counted), then loaded (`Draft`). A new kind is one file with these two, and one line in `kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offspec.scheduler.budget import Controller
from offspec.scheduler.controllers import controller_for
from offspec.scheduler.drafter import Drafter, DraftRequest, NoDrafter
from offspec.scheduler.lookup import Guesser
from offspec.scheduler.model_drafter import ModelDrafter
from offspec.scheduler.params import SpeculationParams, max_nodes
from offspec.scheduler.retrieval import Retrieval, SuffixIndex
from offspec.scheduler.verify import TargetPass

from ..checkpoints.opening import ModelFiles, Note
from ..errors import UsageError
from ..model.decoder import CachedDecoder, Decoder
from ..model.text_caches import TextCaches
from ..planning.memory import MemoryUse, Room
from ..text.tokenizer import Tokenizer
from ..training.online import Aligner
from .learnt import EstimatesAndRecall

NO_MODEL_TO_WEIGH = "joint acceptance weighs the target against a draft model, and there is none; give --draft PATH"


@dataclass(frozen=True)
class DraftOptions:
    """What the user says of the draft.

    draft: auto, none, lookup, self, or a model. exit_file: of `self`. learn: it may learn between requests. learn_file:
    what it learnt before; without `learn` it must be there. needs_model: joint
    acceptance will be asked for.
    """

    draft: str = "auto"
    exit_file: Path | None = None
    learn: bool = False
    learn_file: Path | None = None
    needs_model: bool = False

    @property
    def learns(self) -> bool:
        return self.learn or self.learn_file is not None

    def refuse_model_needs(self) -> None:
        """For kinds without a model. Raises UsageError where one is needed."""
        if self.needs_model:
            raise UsageError(NO_MODEL_TO_WEIGH)

    def refuse_learning(self) -> None:
        """For kinds without a model of their own. Raises UsageError."""
        if self.learns:
            raise UsageError("only a draft model can learn, and there is none; give one with --draft PATH")

    def refuse_exit_file(self) -> None:
        """For kinds without an exit layer. Raises UsageError."""
        if self.exit_file is not None:
            raise UsageError(f"--exit-file {self.exit_file} is for --draft self; give that too, or leave it out")


@dataclass(frozen=True)
class OpenRequest:
    """A draft is asked for: options, and the target that it is for.

    tokenizer: the target's; None where it is only planned for, and files may be missing. dtype: auto, bf16, fp16, fp32.
    notes: takes down what is chosen automatically.
    """

    options: DraftOptions
    target: ModelFiles
    tokenizer: Tokenizer | None
    dtype: str
    device_type: str
    notes: list[Note]


class OpenedDraft(Protocol):
    """A draft whose files were checked; nothing is loaded. It declares its memory (`planning.memory.MemoryUser`)."""

    @property
    def models(self) -> Sequence[ModelFiles]:
        """Those that will be loaded for it."""

    def memory_use(self, target: ModelFiles, room: Room) -> MemoryUse:
        """What it takes beside `target`."""

    def load(self, device: torch.device) -> Attach:
        """Load it, before the target; what is returned makes the draft of it when the target is there, too.

        Raises torch.OutOfMemoryError or OffspecError's children.
        """


@dataclass(frozen=True)
class DraftTask:
    """One request, as a draft sees it.

    text: the draft's own cached text, where it has a model. index: other texts to look up in.
    """

    text: CachedDecoder | None
    target: Decoder
    request: DraftRequest
    speculation: SpeculationParams
    index: SuffixIndex | None = None


class Draft:
    """A loaded draft. This one has no model: subclasses say what theirs is and does.

    name: what guesses: a model's name, `lookup`, `self`; None where nothing does. decoder: the model that drafts.
    aligner: what the draft learns with. overlaps: it can draft while the target's pass runs. allows_reload: the target
    may be loaded anew beside it. target_layers: the target's layers whose states it is told of after a pass.
    """

    overlaps = True
    allows_reload = True
    target_layers: Sequence[int] = ()

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.decoder: Decoder | None = None
        self.aligner: Aligner | None = None

    def prepare(self, max_context: int) -> None:
        """Before the first text. max_context: tokens of the longest one."""

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> TextCaches:
        """Empty caches of one text, with room for so many tokens and a tree beside them."""
        return TextCaches(CachedDecoder(target, num_tokens + num_nodes), None)

    def new_learnt(self, target: Decoder, predict_pass_s: Callable[[int], float] | None) -> EstimatesAndRecall:
        """What is learnt of this draft beside this target, nothing yet.

        predict_pass_s: what a pass may take, by rows.
        """
        return EstimatesAndRecall.of(target, self.decoder, predict_pass_s)

    def guessers(self, task: DraftTask, learnt: EstimatesAndRecall) -> list[Guesser]:
        """Those that need no model."""
        return [] if task.index is None else [Retrieval(task.index, learnt.retrievals)]

    def drafter(self, task: DraftTask, learnt: EstimatesAndRecall) -> Drafter:
        """What guesses in one request."""
        guessers = self.guessers(task, learnt)
        if task.speculation.budget == 0 or not guessers:
            return NoDrafter()
        return ModelDrafter(
            None,
            task.request,
            task.speculation,
            learnt,
            guessers=guessers,
            controller=controller_of(task, learnt),
        )

    def new_listener(self) -> Listener:
        """What is told of every pass of one request beside its drafter, in order."""
        return _ignore

    def close(self) -> None:
        """Let go of its memory."""


def _ignore(done: TargetPass) -> None:
    pass


Attach = Callable[[Decoder], Draft]
Listener = Callable[[TargetPass], None]


def controller_of(task: DraftTask, learnt: EstimatesAndRecall) -> Controller:
    """How long to draft and how much to send, as the request asks for."""
    return controller_for(task.speculation, learnt.costs, max_nodes(task.target.device.type))
