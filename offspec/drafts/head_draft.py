"""A trained head as the draft (`model.heads`): EAGLE and its relatives, which continue from the target's states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offspec.loaders.files.checkpoint import without_remedy
from offspec.loaders.files.hub import resolve_files
from offspec.loaders.files.mistral_folder import FILES as MISTRAL_FILES
from offspec.loaders.files.safetensors_folder import CONFIG_FILE, INDEX_FILE
from offspec.loaders.streaming.placement import Item, Placement
from offspec.scheduler.drafting.drafter import Drafter
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import Guesser
from offspec.scheduler.pace.costs import Predict
from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.trees.verify import TargetPass

from ..checkpoints.exit_layers import fingerprint, has_weights, refuse_foreign
from ..checkpoints.head_files import MISTRAL, PICKLES, SAFETENSORS, HeadFiles, StoredTensors, find_head
from ..checkpoints.model_files import ModelFiles
from ..checkpoints.opening import locate
from ..errors import CheckpointError, UsageError
from ..model.block import memory_bytes
from ..model.decoder import CachedDecoder, Decoder, activation_bytes
from ..model.heads.head import Head
from ..model.heads.mtp import KIND as MTP_KIND
from ..model.heads.text import HeadText
from ..model.memory.request_caches import RequestCaches
from ..notes import Note
from ..planning.draft_forecast import Guessing
from ..planning.memory import MemoryUse, Reservation
from .acceptance import of_head
from .base import Attach, Draft, DraftOptions, DraftTask, Learner, Listener, OpenRequest, controller_of
from .draft_stats import DraftStats
from .model_draft import guessers_beside_model, guessing_items
from .recall import RecallingText

NAME, MTP = "head", "mtp"
LEAST_MTP_BITS = 6.0  # per number, below which an MTP layer is reported to accept little


class HeadDrafter(ModelDrafter):
    """Drafts with a head, and gives it the target's states after each pass."""

    def __init__(self, feed: Callable[[TargetPass], None], *args: Any, **options: Any) -> None:
        """feed: `HeadText.feed`. The other arguments are `ModelDrafter`'s."""
        super().__init__(*args, **options)
        self._feed = feed

    def observe(self, done: TargetPass) -> None:
        self._feed(done)
        super().observe(done)


class HeadDraft(Draft):
    """A loaded head. It has no text before the target's first pass, so it does not draft for that."""

    overlaps = False  # a tree does not live on, see `HeadText.keep`
    allows_reload = False  # it may use the target's embedding and head

    def __init__(self, head: Head, name: str) -> None:
        super().__init__(name)
        self.head, self.target_layers = head, head.target_layers

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> RequestCaches:
        text = CachedDecoder(target, num_tokens + num_nodes)
        num_entries = num_tokens + MAX_ROWS if num_tokens else 0
        return RequestCaches(text, HeadText(self.head, num_entries, self.head.cache_beside(text)))

    def new_stats(
        self, target: Decoder, predict_pass_s: Predict | None = None, predict_round_s: Predict | None = None
    ) -> DraftStats:
        return DraftStats.of(target, self.head, predict_pass_s, predict_round_s)

    def guessers(self, task: DraftTask, stats: DraftStats) -> list[Guesser]:
        return guessers_beside_model(task, stats, super().guessers(task, stats))

    def drafter(self, task: DraftTask, stats: DraftStats) -> Drafter:
        """Raises UsageError for a baseline's tree."""
        text, speculation = task.text, task.speculation
        if not isinstance(text, HeadText) or speculation.budget == 0:
            return super().drafter(task, stats)
        if speculation.tree != "best-first":
            raise UsageError(f"a head drafts best-first trees only, not {speculation.tree}; omit `tree`")
        recalling = None
        if stats.recall is not None and speculation.recall:
            recalling = RecallingText(text, task.target, stats.recall)
        return HeadDrafter(
            text.feed,
            recalling or text,
            replace(task, most_read=1),  # it reads what the target has told it of
            replace(speculation, reuse=False, overlap=False),
            stats,
            guessers=self.guessers(task, stats),
            corrector=recalling,
            controller=controller_of(task, stats),
        )

    def new_listener(self) -> Listener:
        return super().new_listener() if self.aligner is None else self.aligner.new_listener()

    def close(self) -> None:
        self.head.weights.close()


@dataclass(frozen=True)
class OpenedHead:
    """A head's files, checked against the target."""

    name: str
    files: HeadFiles
    target: ModelFiles
    options: DraftOptions
    models: Sequence[ModelFiles] = ()

    @classmethod
    def open(cls, request: OpenRequest) -> OpenedHead:
        """Raises UsageError, CheckpointError, UnsupportedModelError."""
        options, target = request.options, request.target
        options.refuse_exit_file()
        options.refuse_model_needs()
        files = _files(request)
        if files.trained_for is not None and has_weights(target) and files.trained_for != fingerprint(target):
            raise CheckpointError(
                f"the head {files.path} was trained for another target than {target.checkpoint.path}; make one with "
                "offspec distill"
            )
        request.notes.extend(_notes(files, options.draft, target))
        if options.draft_window is not None:
            text = f"`draft_window={options.draft_window}` does nothing: a head keeps what it reads of all of the text"
            request.notes.append(Note(text, advice=True))
        return cls(options.draft, files, target, options)

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        """Its weights, its KV cache, and the target's states that it reads."""
        spec, itemsize = self.files.spec, target.dtype.itemsize
        states = max(1, len(spec.target_layers)) * target.config.hidden_size
        weights = self.files.nbytes(target.dtype, packed=not self.options.learns)
        items = [
            Item("head's weights", on_device=weights),
            Item("head's KV cache", on_device=memory_bytes(spec.config, reservation.num_tokens + MAX_ROWS, itemsize)),
            # Side by side, they are copied.
            Item("head's inputs", on_device=2 * reservation.pass_rows * states * itemsize),
            *guessing_items(spec.config, target, is_mapped=spec.num_columns != target.config.vocab_size),
        ]
        num_keys = reservation.context + reservation.tree
        workspace = activation_bytes(spec.config, reservation.pass_rows, num_keys, itemsize)
        return MemoryUse(tuple(items), workspace, reads_all_entries=spec.reads_target_entries)

    def guessing(self, placement: Placement) -> Guessing:
        """A round goes through about as much as a layer of the target for each of its own, and its head."""
        spec = self.files.spec
        return Guessing(((self.target, max(1, spec.config.num_layers)),), of_head(spec.kind), overlaps=False)

    def load(self, device: torch.device) -> Attach:
        tensors = self.files.load(self.target.dtype, device, packed=not self.options.learns)

        def attach(target: Decoder) -> HeadDraft:
            draft = HeadDraft(self.files.spec.make(tensors, target), self.name)
            draft.aligner = self.new_learner(draft.head, tensors)
            return draft

        return attach

    def new_learner(self, head: Head, tensors: Mapping[str, Any]) -> Learner | None:
        """What trains the head, whose weights are `tensors`."""
        return None


def _files(request: OpenRequest) -> HeadFiles:
    """The head that `draft` names. Raises OffspecError."""
    if request.options.draft == MTP:
        return HeadFiles.of_mtp(request.target)
    folder, is_own = _folder(request), request.options.draft.partition(":")[0] == NAME
    try:
        return HeadFiles.open(folder, request.target.config.as_native())
    except CheckpointError as exc:
        if not is_own:
            raise
        remedy = "delete the folder, and make the head again with offspec distill MODEL --head KIND"
        raise CheckpointError(f"{without_remedy(exc)}; {remedy}") from exc


def _notes(files: HeadFiles, draft: str, target: ModelFiles) -> list[Note]:
    """What drafts, and what may be wrong with it."""
    name, stored = target.checkpoint.path.name, files.tensors
    description = (
        f"the MTP layer of {files.path.name}" if draft == MTP else f"{files.path.name}, a head ({files.spec.kind})"
    )
    notes = [Note(f"draft: {description}")]
    if files.stated_target and files.stated_target != name:
        text = f"the head says that it is for {files.stated_target}, not {name}; it may accept little"
        notes.append(Note(text, advice=True))
    if files.spec.kind == MTP_KIND and isinstance(stored, StoredTensors) and stored.bits < LEAST_MTP_BITS:
        text = f"the MTP layer is in {stored.bits:.1f} bits, in which it accepts little"
        notes.append(Note(f"{text}; take a checkpoint that keeps it in 8 or 16", advice=True))
    return notes


def _folder(request: OpenRequest) -> Path:
    """The head's folder: of `draft=PATH`, or one that offspec made (`head`, `head:medusa`). Raises OffspecError."""
    kind, _, head_name = request.options.draft.partition(":")
    if kind != NAME:
        path = locate(request.options.draft, None, "draft")
        is_here = path.is_file() or any((path / name).is_file() for name in (*SAFETENSORS, INDEX_FILE, *PICKLES))
        if is_here or MISTRAL.recognises(path):
            return path
        return resolve_files(request.options.draft, [CONFIG_FILE, *SAFETENSORS, *PICKLES, *MISTRAL_FILES])
    refuse_foreign(request.target.config, "a head")
    if not has_weights(request.target):
        raise UsageError(
            f"`draft={NAME}` needs the weights of {request.target.checkpoint.path}, to which the head belongs"
        )
    return find_head(request.target, head_name)
