"""A target in memory: its plan, its rates, and how its weights are loaded again if memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import RLock
from weakref import WeakSet

import torch

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.link import CopyStream
from offspec.loaders.streaming.placement import KV_ITEM, STATES_ITEM, WINDOWS_ITEM
from offspec.loaders.streaming.tiers import TieredWeights
from offspec.scheduler.params import SamplingParams

from .checkpoints.load import decoder_over
from .errors import MemoryLimitError, UsageError
from .model.decoder import Decoder
from .model.memory.kv_in_ram import EntriesInRam
from .model.memory.sequence_cache import SequenceCache, total_bytes
from .notes import Note
from .planning.draft_forecast import Guessing, round_s
from .planning.out_of_memory import explain_out_of_memory, retry_out_of_memory, with_fewer_residents
from .planning.plan import Plan
from .planning.spilling import spill_watch


class LoadedTarget:
    """A target in memory, with its plan and measured rates. Engines with different drafts can share one.

    turn: the lock that a request holds while it uses the models. notes: automatic choices and their reasons.
    """

    def __init__(
        self, decoder: Decoder, memory: PlannedMemory | None = None, *, notes: list[Note] | None = None
    ) -> None:
        """memory: the plan of its weights, and the means to load them again with fewer resident layers."""
        self.decoder, self.notes = decoder, notes if notes is not None else list[Note]()
        self.turn = RLock()
        self.is_deterministic = False  # see `LoadOptions.deterministic`
        self.recommended_sampling = SamplingParams()  # by the model's authors
        self.rates: Rates | None = None
        self.link_bytes_per_s: float | None = None
        self.most_context: int | None = None  # tokens of a text, if the plan's are more than somebody wants
        self.plan_without_draft: Plan | None = None  # of a streamed target that has a draft
        self._memory, self._streamed_before = memory, 0
        self._has_weights, self._is_closed = True, False
        self._caches = WeakSet[SequenceCache]()
        self._spill_watch = spill_watch(decoder.device)

    @property
    def plan(self) -> Plan | None:
        """The plan it was loaded by; None without one."""
        return None if self._memory is None else self._memory.plan

    @property
    def max_context(self) -> int:
        """The maximum number of tokens of a text; the plan's may be lower than the model's."""
        planned = self.decoder.config.max_context if self.plan is None else self.plan.context
        return planned if self.most_context is None else min(planned, self.most_context)

    def predict_pass_s(self, width: int) -> float:
        """Predicted seconds of a pass over `width` rows, from the rates measured while loading."""
        assert self.plan is not None
        assert self.rates is not None
        return self.plan.predict_pass_s(self.rates, width)

    def plain_speedup_without_draft(self) -> float | None:
        """How many times as fast a plain pass would be if the draft's memory held layers; None without such a draft.

        By prediction. None also where nothing is streamed.
        """
        if self.plan_without_draft is None or self.rates is None:
            return None
        return self.predict_pass_s(1) / self.plan_without_draft.predict_pass_s(self.rates, 1)

    def predicts_rounds(self, guessing: Guessing) -> Callable[[int], float]:
        """Rows → predicted seconds of a draft round, by the same rates."""
        assert self.plan is not None
        assert self.rates is not None
        from .planning.probe import ProductRates  # imported here, because it imports what measures and loads

        rates_of = ProductRates(self.plan.inputs.target, self.rates, self.plan.placement.limits.kind)
        return partial(round_s, self.plan, guessing, rates_of)

    def note_once(self, note: Note) -> None:
        """Add a note about a request, unless it stands there already."""
        if note not in self.notes:
            self.notes.append(note)

    def observe_pass(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Compare a pass of `num_rows` rows, after a text of `num_tokens` tokens, with its prediction.

        Only where the driver may move device memory to RAM without a word; `notes` then says so.
        """
        if self._spill_watch is None or self.plan is None or self.rates is None:
            return
        predicted_s = self.plan.predict_pass_s(self.rates, num_rows, num_tokens)
        if (note := self._spill_watch.observe(self.plan, predicted_s, seconds)) is not None:
            self.notes.append(note)

    @property
    def bytes_streamed(self) -> int:
        """Bytes of weights, and of KV entries in RAM, streamed so far."""
        entries = self.decoder.entries_in_ram
        copied = 0 if entries is None else entries.copies.num_bytes
        return self._streamed_before + self.decoder.weights.bytes_streamed + copied

    def make_kv_room(self, cache: SequenceCache, num_entries: int) -> None:
        """Call this before a text's cache grows to `num_entries` entries.

        Memory within the limit that no text's cache needs holds some of the layers on disk. This frees these layers
        as far as the caches need it.
        """
        plan, weights = self.plan, self.decoder.weights
        if plan is None or not isinstance(weights, TieredWeights) or plan.placement.limits.device is not None:
            return
        files = plan.inputs.target
        self._caches.add(cache)
        of_texts = (KV_ITEM, WINDOWS_ITEM, STATES_ITEM)
        planned = sum(item.on_device for item in plan.placement.items if item.name in of_texts)
        needed = files.kv_bytes(num_entries - cache.num_in_beginning)
        taken = total_bytes(self._caches) + (needed if num_entries > cache.capacity else 0)
        unused = plan.placement.limits.ram - plan.placement.ram_bytes
        weights.spare(unused + planned - taken)

    def spare_nothing(self) -> None:
        """Free all layers that are held only until a text's cache needs their memory."""
        if isinstance(self.decoder.weights, TieredWeights):
            self.decoder.weights.spare(0)

    def make_room(self, message: str, free_more: Callable[[], None] = lambda: None) -> None:
        """After device memory ran out, load the weights again with fewer resident layers; possible once.

        `decoder` stays the same object, with new weights. message: torch's error. free_more: called before the weights
        are loaded, to free other memory. Raises MemoryLimitError, with the plan's figures, if this is not possible.
        """
        if self._memory is None:
            raise MemoryLimitError(f"{self.decoder.device} ran out of memory ({message})")
        memory = self._memory
        memory.reduce_residents(message)
        free_more()
        self._streamed_before = self.bytes_streamed
        self.decoder.weights.close()
        accelerator_of(memory.device).release_memory()
        self._has_weights = False
        self.decoder.weights = retry_out_of_memory(memory.load_weights, memory.reduce_residents)
        self.decoder.entries_in_ram = memory.entries_in_ram()
        self._has_weights = True

    def check(self) -> None:
        """Raises UsageError after `close`, MemoryLimitError if the weights could not be loaded again."""
        if self._is_closed:
            raise UsageError("this engine is closed and has no weights; load the model again (Engine.load)")
        if not self._has_weights:
            raise MemoryLimitError(
                "the target is no longer in memory: memory ran out, and its weights could not be loaded again; "
                "load the model again"
            )

    def close(self) -> None:
        """Free the weights and end the read-ahead threads. Repeated calls do nothing."""
        self._is_closed = True
        self.decoder.weights.close()


class PlannedMemory:
    """The plan that a target's weights are loaded by. If memory runs out, it is replaced by one with fewer residents.

    This can happen once while loading, and once afterwards.
    """

    def __init__(
        self, plan: Plan, device: torch.device, notes: list[Note], load_weights: Callable[[Plan], TieredWeights]
    ) -> None:
        """load_weights: loads the target's by a plan; may raise torch.OutOfMemoryError. notes: get one per new plan."""
        self.plan, self.device = plan, device
        self._can_reduce = True
        self._notes, self._load_weights = notes, load_weights
        self._first_failure: str | None = None  # the message of the first out-of-memory error

    def load_weights(self) -> TieredWeights:
        """Load the target's weights by the plan. Raises torch.OutOfMemoryError."""
        return self._load_weights(self.plan)

    def load_decoder(self) -> Decoder:
        """Load the target's weights, and make its decoder. Raises torch.OutOfMemoryError."""
        files, context = self.plan.inputs.target, self.plan.context
        files = replace(files, config=files.config.for_context(context))
        decoder = decoder_over(files, self.load_weights(), self.device)
        decoder.entries_in_ram, decoder.forgets = self.entries_in_ram(), files.forgets
        return decoder

    def entries_in_ram(self) -> EntriesInRam | None:
        """The layers whose KV entries the plan puts in RAM, for caches made from now on."""
        far = self.plan.placement.entries_in_ram
        return EntriesInRam(frozenset(far), self.plan.inputs.target.kv, CopyStream(self.device)) if far else None

    def settle(self, *, can_reduce: bool) -> None:
        """Call this after loading; earlier failures no longer count. can_reduce: `reduce_residents` may be used again.

        It may not if the draft shares the target's weights.
        """
        self._first_failure, self._can_reduce = None, can_reduce

    def reduce_residents(self, message: str) -> None:
        """Plan for fewer resident layers. message: torch's error.

        Raises MemoryLimitError the second time, if no layer is resident, or if `settle` forbade it.
        """
        if not self._can_reduce:
            raise MemoryLimitError(explain_out_of_memory(self.plan, self.device, message))
        if self._first_failure is not None:
            raise MemoryLimitError(f"{self._first_failure}; still out of memory with fewer resident layers")
        self._first_failure = explain_out_of_memory(self.plan, self.device, message)
        accelerator_of(self.device).release_memory()
        try:
            leaner = with_fewer_residents(self.plan)
        except MemoryLimitError as exc:
            raise MemoryLimitError(f"{self._first_failure}; cannot plan with fewer resident layers") from exc
        before, now = len(self.plan.placement.resident), len(leaner.placement.resident)
        self._notes.append(
            Note(f"{self._first_failure}; loaded again with {now} instead of {before} resident layers", advice=True)
        )
        self.plan = leaner
