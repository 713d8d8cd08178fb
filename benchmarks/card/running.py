"""An engine of grown models, limited to its plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.streaming import star
from offspec import Engine
from offspec.backends.arithmetic import EXACT, FAST
from offspec.drafts.model_draft import ModelDraft
from offspec.loaded_target import LoadedTarget, PlannedMemory
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import Placement
from offspec.loaders.streaming.tiers import TieredWeights, TierOptions
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.exactness import is_exact_by_default
from offspec.model.names import EMBEDDING
from offspec.notes import Note
from offspec.planning.out_of_memory import retry_out_of_memory
from offspec.planning.plan import Plan, all_resident
from offspec.planning.probe import measure_fused_limits
from offspec.process import prepare
from offspec.scheduler.params import MAX_NODES
from offspec.text.tokenizer import Tokenizer

from .jobs import CONTEXT
from .models import Grown


@dataclass(frozen=True)
class Running:
    """An engine, its final plan, the notes about it, and the seconds of loading."""

    engine: Engine
    plan: Plan
    notes: list[Note]
    load_s: float
    held_bytes: int  # of the device before; what is allowed is beyond that

    def peak_bytes(self) -> int:
        """The peak device memory of torch so far."""
        return accelerator_of(self.engine.target.device).held_bytes()[1] - self.held_bytes


@contextmanager
def loaded(
    target: Grown, draft: Grown, plan: Plan, rates: Rates, device: torch.device, width: int
) -> Iterator[Running]:
    """An engine for `plan`, limited by torch's allocator; for a plan with fewer resident layers if a pass of `width`
    runs out of memory.
    """
    prepare(device)
    accelerator_of(device).release_memory()
    held = accelerator_of(device).held_bytes()[0]
    if device.type == "cuda":
        accelerator_of(device).limit_memory(plan.placement.limits.device)
    began, files, notes = time.perf_counter(), target.files, list[Note]()
    measure_fused_limits([files], device)

    def weights(grown: Grown, placement: Placement, embedding: str | None) -> TieredWeights:
        return TieredWeights(
            grown.files.stored,
            placement,
            dtype=files.dtype,
            device=device,
            row_tables=() if embedding is None else (embedding,),
            options=TierOptions(reader=grown.reader),
        )

    memory = PlannedMemory(plan, device, notes, lambda plan: weights(target, plan.placement, EMBEDDING))

    def load() -> tuple[Decoder, Decoder]:
        """Load both models and run the largest pass, so that a lack of memory shows here."""
        small = weights(draft, all_resident(draft.files), None)
        guesser = Decoder(draft.files.config, small, dtype=files.dtype, device=device)
        decoder = memory.load_decoder()
        is_streamed = not plan.placement.is_resident
        is_exact = is_exact_by_default(files.config, files.dtype, device, is_streamed=is_streamed)
        decoder.arithmetic = EXACT if is_exact else FAST
        try:
            CachedDecoder(decoder, CONTEXT + MAX_NODES).score_rows(list(range(5, 21)), *star(width - 1))[0]
        except BaseException:
            decoder.weights.close()
            raise
        return decoder, guesser

    decoder, guesser = retry_out_of_memory(load, memory.reduce_residents)
    plan, kept = memory.plan, LoadedTarget(decoder, memory, notes=notes)
    kept.rates, kept.link_bytes_per_s = rates, rates.host_to_device_bytes_per_s
    tokenizer = Tokenizer.load(files.checkpoint.path)
    engine = Engine(kept, tokenizer, ModelDraft(guesser, "grown"), name="grown")
    try:
        yield Running(engine, plan, notes, time.perf_counter() - began, held)
    finally:
        engine.close()
        del engine, decoder, guesser
        accelerator_of(device).release_memory()
        if device.type == "cuda":
            accelerator_of(device).limit_memory(None)
