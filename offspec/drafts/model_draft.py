"""A small model as the draft, resident: it has the target's vocabulary, or one that shares many tokens with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from offspec.backends.arithmetic import EXACT, FAST
from offspec.backends.device_kinds import kind_of
from offspec.backends.x86.processor import can_pair, has_tiles
from offspec.loaders.streaming.placement import Item, Placement
from offspec.scheduler.drafting.drafter import Drafter, NoDrafter
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import Guesser, PromptLookup
from offspec.scheduler.joint import JointDrafter
from offspec.scheduler.pace.costs import WIDTHS
from offspec.scheduler.pace.trials import WindowTrials
from offspec.scheduler.params import DRAFT_ROWS, MAX_ROWS, SpeculationParams
from offspec.scheduler.trees.verify import TargetPass

from ..checkpoints.load import is_exact_as_draft, load_decoder
from ..checkpoints.model_files import ModelFiles
from ..checkpoints.opening import AUTO, locate, model_to_plan, open_model
from ..errors import OffspecError, UsageError, VocabularyMismatchError
from ..methods import research
from ..model.block import has_entries_alone, keeps_states, memory_layouts
from ..model.config import ModelConfig
from ..model.cuda_graphs import TreeGraphs, is_static
from ..model.decoder import CachedDecoder, Decoder
from ..model.memory.chunk_attention import NUM_SINKS
from ..model.memory.draft_window import LEAST_WINDOW, WindowedText, context_window, most_entries
from ..model.memory.recurrent_states import RecurrentLayout
from ..model.memory.request_caches import DraftText, RequestCaches
from ..model.row_logits import HEAD_ROWS
from ..notes import Note
from ..planning.draft_forecast import Guessing
from ..planning.memory import MemoryUse, Reservation
from ..planning.plan import all_resident, draft_items, pass_bytes, resident_bytes, unpacking_items
from ..text.tokenizer import Tokenizer, check_vocabularies
from .acceptance import OTHER_VOCABULARY, SMALL_MODEL, wrong_guesses
from .base import Attach, Draft, DraftOptions, DraftTask, Learner, Listener, MakeDrafter, OpenRequest, controller_of
from .draft_stats import DraftStats
from .family_drafts import may_share_vocabulary
from .recall import MOST_PROMPT, RecallingText, recall_bytes
from .reencoded_text import OtherVocabulary

TRIED_WINDOW = 512  # tokens; tried behind texts of at least twice as many (`scheduler.pace.trials`)
WALKED_SLICES = 3  # slices of HEAD_ROWS rows that a walk keeps beside the current one


class ModelDraft(Draft):
    """A loaded draft model."""

    decoder: Decoder

    def __init__(
        self,
        decoder: Decoder,
        name: str | None,
        aligner: Learner | None = None,
        other: OtherVocabulary | None = None,
        *,
        is_larger: bool = False,
    ) -> None:
        """aligner: trains the draft, or applied what it learnt before.

        other: the draft's vocabulary, if it is not the target's. is_larger: the draft has more weights than the
        target, and they take more memory.
        """
        super().__init__(name)
        self.window: int | None = None  # tokens that it keeps of a text (`model.memory.draft_window`); None: all
        self.tries_window = False  # requests may keep TRIED_WINDOW of them, if that brings as many tokens per pass
        self.decoder, self.aligner, self.other, self._is_larger = decoder, aligner, other, is_larger
        self.graphs: TreeGraphs | None = None  # captured rounds, on a GPU only

    def prepare(self, max_context: int) -> None:
        if self.window is not None and self.window >= max_context:
            self.window = None
        self.tries_window &= max_context > 2 * TRIED_WINDOW
        if kind_of(self.decoder.device).records and is_static(self.decoder) and self.graphs is None:
            self.graphs = TreeGraphs(self.decoder, self._num_entries(max_context) + 1 + MAX_ROWS)
            self.graphs.prepare()

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> RequestCaches:
        return RequestCaches(CachedDecoder(target, num_tokens + num_nodes), self.new_text(num_tokens))

    def new_text(self, num_tokens: int) -> DraftText:
        """An empty text of the draft, with room for `num_tokens` of the target's tokens and for pending nodes."""
        drafted = self._num_entries(num_tokens) + MAX_ROWS if num_tokens else 0
        cached = (
            CachedDecoder(self.decoder, drafted, keeps_all=True) if self.graphs is None else self.graphs.text(drafted)
        )
        text = WindowedText(cached, self.window) if self.window or self.tries_window else cached
        return text if self.other is None else self.other.text(text)

    def _num_entries(self, num_tokens: int) -> int:
        """Entries of the draft's cache for a text of `num_tokens` of the target's tokens."""
        return _num_entries(num_tokens, self.decoder.config, self.other, self.window)

    def guessers(self, task: DraftTask, stats: DraftStats) -> list[Guesser]:
        return guessers_beside_model(task, stats, super().guessers(task, stats))

    def drafter(self, task: DraftTask, stats: DraftStats) -> Drafter:
        text, speculation = task.text, task.speculation
        task = replace(task, most_rows=min(task.most_rows, self.decoder.config.most_pending))
        if text is None:  # an engine without this draft made the caches, so only guessers can draft
            return super().drafter(task, stats)
        if speculation.is_lossy:
            is_joint = speculation.accept == "joint"
            make_lossy: Callable[..., Drafter] = JointDrafter if is_joint else research().LOSSY[speculation.accept]
            return make_lossy(text, task.sampler, speculation, task.final)
        if speculation.budget == 0:
            return NoDrafter()
        if self._is_larger and speculation.budget is None and task.target.weights.is_resident:
            # A round brings one token more at best, and takes longer than the pass that would bring it.
            return super().drafter(task, stats)
        if not self.overlaps or (keeps_states(self.decoder.config) and kind_of(self.decoder.device).has_streams):
            # Tensors of states are made and dropped by both streams, and nothing orders the reuse of their memory.
            speculation = replace(speculation, overlap=False)
        if speculation.tree != "best-first":
            make_tree: MakeDrafter = research().TREES[speculation.tree]
            return make_tree(text, task, stats)
        has_window = self._choose_window(text, task, stats.windows)
        recalling = None
        if stats.recall is not None and speculation.recall:
            recalling = RecallingText(text, task.target, stats.recall)
        make: Callable[..., ModelDrafter] = ModelDrafter
        if has_window is not None:
            make = partial(WindowTrialDrafter, partial(stats.windows.observe, len(task.prompt), has_window))
        return make(
            recalling or text,
            task,
            speculation,
            stats,
            guessers=self.guessers(task, stats),
            corrector=recalling,
            controller=controller_of(task, stats),
        )

    def _choose_window(self, text: DraftText, task: DraftTask, trials: WindowTrials) -> bool | None:
        """Choose whether this request's draft has a window, if that is to be found out; None if it is not."""
        if not self.tries_window or not isinstance(text, WindowedText):
            return None
        is_long = len(task.prompt) >= 2 * TRIED_WINDOW
        has_window = is_long and trials.choose(len(task.prompt))
        text.begin(task.prompt, TRIED_WINDOW if has_window else None)
        return has_window if is_long else None

    def new_listener(self) -> Listener:
        """The aligner records the target's predictions; the first pass includes those along the prompt."""
        if self.aligner is None:
            return super().new_listener()
        return self.aligner.new_listener()

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
        self.decoder.weights.close()


class WindowTrialDrafter(ModelDrafter):
    """Tells `watch` how many tokens each pass with a tree brings."""

    def __init__(self, watch: Callable[[int], None], *given: Any, **named: Any) -> None:
        """given, named: `ModelDrafter`'s."""
        super().__init__(*given, **named)
        self._watch = watch

    def observe(self, done: TargetPass) -> None:
        super().observe(done)
        if len(done.tree):
            self._watch(len(done.verdict.tokens))


def guessers_beside_model(task: DraftTask, stats: DraftStats, retrieving: Sequence[Guesser]) -> list[Guesser]:
    """The guessers that the request asks for, beside those of other texts."""
    looked_up: list[Guesser] = [PromptLookup(stats.lookups)] if task.speculation.lookup else []
    recycled: list[Guesser] = [stats.recycling] if task.speculation.recycling else []
    return [*looked_up, *retrieving, *recycled]


@dataclass(frozen=True)
class OpenedModel:
    """A draft model's files, checked against the target.

    other: the draft's vocabulary, if it is another one than the target's. is_larger, window: see `ModelDraft`.
    shares_vocabulary: whether it has the target's, as far as its files tell while it is only planned for.
    wrong_guesses: see `acceptance.wrong_guesses`.
    """

    name: str
    files: ModelFiles
    options: DraftOptions
    other: OtherVocabulary | None = None
    is_larger: bool = False
    window: int | None = None
    shares_vocabulary: bool = True
    wrong_guesses: float = 1.0

    @classmethod
    def planned(cls, name: str, files: ModelFiles, request: OpenRequest) -> OpenedModel:
        """A draft to plan with: nothing but its config.json, or headers, need be there."""
        target, options, files = request.target, request.options, _in_fastest_rows(files, request)
        guesses = wrong_guesses(files.num_parameters, target.num_parameters)
        window = _window(options.draft_window, files, target, None)
        return cls(name, files, options, None, False, window, _share_vocabulary(target, files), guesses)

    @classmethod
    def open(cls, request: OpenRequest) -> OpenedModel:
        """Raises VocabularyMismatchError where too few tokens are shared, another OffspecError for bad files."""
        name, options = request.options.draft, request.options
        options.refuse_exit_file()
        path = locate(name, None, "draft", weights=request.tokenizer is not None)
        settings = (request.dtype, request.notes)
        if request.tokenizer is None:
            return cls.planned(name, model_to_plan(path, None, *settings), request)
        files = _in_fastest_rows(open_model(path, *settings), request)
        other = _other_vocabulary(request.tokenizer, request.target, files)
        if other is not None:
            request.notes.append(other.note(name))
        if is_larger := _is_larger(files, request.target):
            text = f"the draft {name} is larger than the target, so it is asked only where layers are streamed, or"
            request.notes.append(Note(f"{text} if `budget` sets the number of nodes", advice=True))
        window = _window(options.draft_window, files, request.target, other)
        if window is not None:
            text = f"the draft keeps the last {window} tokens of a text, and the first {NUM_SINKS}"
            why = "" if options.draft_window else f", because its context is {files.config.max_context}"
            request.notes.append(Note(text + why))
        guesses = wrong_guesses(files.num_parameters, request.target.num_parameters)
        return cls(name, files, options, other, is_larger, window, other is None, guesses)

    @property
    def models(self) -> Sequence[ModelFiles]:
        return (self.files,)

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        files = self.files
        longest = _num_entries(reservation.context, files.config, self.other, self.window)
        # All texts share the tokens, and each has as many entries as the longest one at most.
        num_tokens = max(longest, min(reservation.num_tokens, reservation.texts * longest))
        num_entries = num_tokens + max(MAX_ROWS, reservation.texts * DRAFT_ROWS)
        items = (
            *unpacking_items(files),
            *draft_items(files),
            Item("draft KV cache", on_device=files.kv_bytes(num_entries)),
            *guessing_items(files.config, target, is_mapped=not self.shares_vocabulary),
        )
        return MemoryUse(items, pass_bytes(files, reservation))

    def guessing(self, placement: Placement) -> Guessing:
        acceptance = SMALL_MODEL if self.shares_vocabulary else OTHER_VOCABULARY
        layers = ((self.files, self.files.config.num_layers),)
        most_keys = None if self.window is None else most_entries(self.window)
        is_usual = not keeps_states(self.files.config)
        return Guessing(layers, acceptance, self.wrong_guesses, is_usual, is_usual, most_keys)

    def load(self, device: torch.device) -> Attach:
        decoder = load_decoder(self.files, all_resident(self.files), device)
        decoder.arithmetic = EXACT if is_exact_as_draft(self.files, device) else FAST
        learner = self.new_learner(decoder)

        def attach(target: Decoder) -> ModelDraft:
            draft = ModelDraft(decoder, self.name, learner, self.other, is_larger=self.is_larger)
            draft.files, draft.window = self.files, self.window
            draft.tries_window = self.other is None and self.window is None and has_entries_alone(self.files.config)
            return draft

        return attach

    def new_learner(self, decoder: Decoder) -> Learner | None:
        """What trains the draft."""
        return None


def _in_fastest_rows(files: ModelFiles, request: OpenRequest) -> ModelFiles:
    """A draft of packed matrices with rows in fp32 on a CPU that multiplies bf16 in pairs, but not in tiles.

    There two instructions for fp32 take less time (docs/LOG.md, "Kernels by rule"). Not if the user gave a dtype. KV
    entries take twice the memory.
    """
    is_free = request.dtype == AUTO and not request.options.learns and files.packed_form is not None
    if not is_free or files.dtype != torch.bfloat16 or not is_exact_as_draft(files, request.device):
        return files
    if not can_pair() or has_tiles():
        return files
    request.notes.append(Note("the draft's rows are in fp32, as this CPU is faster with them"))
    return replace(files, dtype=torch.float32)


def _window(wanted: int | None, draft: ModelFiles, target: ModelFiles, other: OtherVocabulary | None) -> int | None:
    """Tokens that the draft keeps of a text; None: all of them.

    wanted: by the user. None is what fits the draft's context, if the target has a longer one: with all entries, the
    draft could not continue longer texts. With another vocabulary it reads the end of a long text again instead
    (`reencoded_text`). Raises UsageError for a draft whose entries cannot be dropped.
    """
    if wanted is not None:
        return check_window(wanted, draft.config)
    is_short = draft.config.max_context < target.config.max_context
    return context_window(draft.config) if is_short and other is None and has_entries_alone(draft.config) else None


def check_window(window: int | None, draft: ModelConfig) -> int | None:
    """The window, if a user gave one. Raises UsageError for a short one, or a draft whose entries cannot be dropped."""
    if window is None:
        return None
    if window < LEAST_WINDOW:
        raise UsageError(f"`draft_window={window}` is too short; give at least {LEAST_WINDOW}, or auto")
    if not has_entries_alone(draft):
        raise UsageError(
            f"`draft_window={window}` drops KV entries of the draft, and offspec cannot drop those of a "
            f"{draft.model_type}; omit it"
        )
    return window


def _num_entries(num_tokens: int, draft: ModelConfig, other: OtherVocabulary | None, window: int | None) -> int:
    """Entries of the draft's cache for `num_tokens` of the target's; with another vocabulary, what it can read."""
    if other is not None:
        num_tokens = other.reencoder.most_tokens(num_tokens)
    if window is not None:
        return min(num_tokens, most_entries(window))
    return num_tokens if other is None else min(num_tokens, draft.max_context)


def _is_larger(draft: ModelFiles, target: ModelFiles) -> bool:
    """Whether a pass of the draft takes longer than a pass of a resident target."""
    weights = [sum(layer.num_weights for layer in model.stored.layers) for model in (draft, target)]
    return weights[0] > weights[1] and resident_bytes(draft) > resident_bytes(target)


def guessing_items(
    draft: ModelConfig,
    target: ModelFiles,
    *,
    is_mapped: bool = False,
    num_waiting: int = MAX_ROWS + MOST_PROMPT,
) -> list[Item]:
    """The memory that a draft model needs beside its weights and its KV cache.

    is_mapped: its logits are spread over the target's vocabulary. num_waiting: see `recall_bytes`.
    """
    itemsize, size = target.dtype.itemsize, draft.vocab_size
    columns = max(size, target.config.vocab_size) if is_mapped else size
    # At temperature 1, a round has its logits in fp32, its noise, their sum, and a copy; a tree has the noise of its
    # positions in fp32 and fp64; a walk has the logits of the slices of the tree that it passes through.
    rounds = 4 * 4 * int(WIDTHS[-1]) * columns
    noise = (4 + 8) * SpeculationParams.max_depth * max(columns, target.config.vocab_size)
    return [
        Item("recall", on_device=recall_bytes(draft, target.config, itemsize, num_waiting)),
        Item("guessing", on_device=rounds + noise + 4 * WALKED_SLICES * HEAD_ROWS * target.config.vocab_size),
    ]


def state_items(target: ModelFiles, texts: int, layers: range) -> list[Item]:
    """Of `texts` texts: a draft's states in the target's recurrent layers among `layers`, and their pending nodes."""
    layouts = [each for layer in memory_layouts(target.config, layers) for each in layer]
    itemsize, most = target.dtype.itemsize, target.config.most_pending
    size = sum(each.nbytes(most, itemsize, num_copies=1) for each in layouts if isinstance(each, RecurrentLayout))
    return [Item("draft's states", on_device=texts * size)] if size else []


def _share_vocabulary(target: ModelFiles, draft: ModelFiles) -> bool:
    """Whether a draft that is only planned for has the target's vocabulary: by both tokenizers, if they are there."""
    paths = [files.checkpoint.tokenizer_path for files in (target, draft)]
    if draft.config.vocab_size == target.config.vocab_size and None not in paths:
        with suppress(OffspecError):  # of a tokenizer that is damaged, or not supported
            return _have_one_vocabulary(*paths)
    return may_share_vocabulary(target.config, draft.config)


@lru_cache(maxsize=16)
def _have_one_vocabulary(target: Path, draft: Path) -> bool:
    try:
        check_vocabularies(Tokenizer.load(target), Tokenizer.load(draft))
    except VocabularyMismatchError:
        return False
    return True


def _other_vocabulary(tokenizer: Tokenizer, target: ModelFiles, draft: ModelFiles) -> OtherVocabulary | None:
    """The draft's vocabulary, or None if it is the target's.

    Raises VocabularyMismatchError where too few tokens are shared. A draft without a tokenizer must have the same
    number of tokens.
    """
    path, tokenizer_path = draft.checkpoint.path, draft.checkpoint.tokenizer_path
    if tokenizer_path is not None:
        drafts = Tokenizer.load(tokenizer_path)
        try:
            check_vocabularies(tokenizer, drafts)
        except VocabularyMismatchError:
            return OtherVocabulary.of(tokenizer, drafts, target.config.vocab_size, draft.config.vocab_size)
    elif draft.config.vocab_size != target.config.vocab_size:
        raise VocabularyMismatchError(
            f"the draft {path} has {draft.config.vocab_size} tokens and no tokenizer.json, the target has "
            f"{target.config.vocab_size} tokens; use a draft of the target's family"
        )
    return None
