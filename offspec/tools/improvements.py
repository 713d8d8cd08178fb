"""Predicts a planned model with one change: more memory, 4 bit, another draft, several texts, packed KV entries.

It says which of the first three helps most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from offspec.loaders.machine.hardware import Rates
from offspec.scheduler.params import MOST_STATE_NODES

from ..checkpoints.model_files import ModelFiles
from ..checkpoints.opening import DTYPES, model_to_plan
from ..drafts.base import OpenedDraft
from ..drafts.weighing import Prospect
from ..errors import MemoryLimitError, OffspecError
from ..model.memory.kv_formats import KV_FORMATS
from ..planning.draft_forecast import Drafting, RatesOf, predict_drafting
from ..planning.plan import Plan

GAIN_STEP_BYTES, MAX_GAIN_STEPS = 8 * 2**30, 4
GAIN_WIDTH = 64  # rows of the pass that gains are predicted for
FOUR_BIT = "nf4"  # the default format of `offspec quantize`
LEAST_TIMES_AS_FAST = 1.1  # by a change that is worth advising
NUMBERS = (1, 2, 4, 8, 16)  # of texts under way
TIMES_WITHOUT_BUYING = 1.5  # by a change that is advised although more memory would bring more


@dataclass(frozen=True)
class Gain:
    """The effect of one change: `value` more bytes of "RAM" or "VRAM" (`kind`), or another "format".

    plan: the new one. pass_s: seconds of its pass of GAIN_WIDTH rows. tokens_per_s: with the planned draft, at
    temperature 0.
    """

    kind: str
    value: str | int
    plan: Plan
    pass_s: float
    tokens_per_s: float

    def as_dict(self) -> dict[str, Any]:
        p, rates = self.plan.placement, {"pass_s": self.pass_s, "tokens_per_s": self.tokens_per_s}
        if self.kind == "format":
            return {"format": self.value, "stream_bytes_per_pass": self.plan.stream_bytes, **rates}
        layers = {"resident": len(p.resident), "in_ram": len(p.in_ram), "on_disk": len(p.on_disk)}
        return {"memory": self.kind, "more_bytes": self.value, "num_layers": layers, **rates}


@dataclass(frozen=True)
class Improvement:
    """One change. kind: "draft", "format", "RAM" or "VRAM". value: the draft, the format, or the bytes of more memory.

    tokens_per_s: at temperature 0. times: as many as without the change. download_bytes: of a draft that is not here.
    """

    kind: str
    value: str | int
    tokens_per_s: float
    times: float
    download_bytes: int = 0


@dataclass(frozen=True)
class Improvements:
    """Predictions for changes of `plan`. draft: the planned one. rates: of the target's products, as it is planned."""

    plan: Plan
    draft: OpenedDraft
    rates: Rates
    rates_of: RatesOf

    def gains(self) -> list[Gain]:
        """More VRAM, then more RAM, in steps of GAIN_STEP_BYTES, as long as a step changes the placement."""
        possible = list[Gain]()
        for memory in ("RAM",) if self.plan.placement.limits.device is None else ("VRAM", "RAM"):
            before = self.plan
            for step in range(1, MAX_GAIN_STEPS + 1):
                more = step * GAIN_STEP_BYTES
                after = self.plan.with_more(**{memory.lower(): more})
                if _layers_and_experts(after) == _layers_and_experts(before):
                    break
                possible.append(self._gain(memory, more, after))
                before = after
        return possible

    def four_bit(self) -> Gain | None:
        """The same model in 4 bit, in the same memory; None if nothing is streamed, or it is quantised already."""
        target = self.plan.inputs.target
        is_quantised = target.packed_form is not None and not target.stored.has_two_forms
        if is_quantised or self.plan.placement.is_resident:
            return None
        dtype = next(name for name, plan in DTYPES.items() if plan == target.dtype)
        try:
            packed = model_to_plan(target.checkpoint.path, FOUR_BIT, dtype, [])
            plan = self.plan.with_target(packed)
        except OffspecError:  # the format does not support this shape
            return None
        return self._gain("format", FOUR_BIT, plan)

    def _gain(self, kind: str, value: str | int, plan: Plan) -> Gain:
        """A target in another format has the rates of the planned one."""

        def rates_of(model: ModelFiles) -> Rates:
            return self.rates if model is plan.inputs.target else self.rates_of(model)

        drafting = predict_drafting(plan, self.draft.guessing(plan.placement), rates_of, greedy=True)
        return Gain(kind, value, plan, plan.predict_pass_s(self.rates, GAIN_WIDTH), drafting.tokens_per_s)


def _layers_and_experts(plan: Plan) -> tuple[object, ...]:
    """What is on the device, and what is in RAM."""
    return plan.placement.resident, plan.placement.in_ram, plan.placement.experts


def best_improvement(
    planned: Prospect, prospects: Sequence[Prospect], gains: Sequence[Gain], four_bit: Gain | None
) -> Improvement | None:
    """The change to advise; None if no change brings LEAST_TIMES_AS_FAST times as many tokens/s.

    It is the draft or the format with the most tokens/s, which cost nothing, if it brings TIMES_WITHOUT_BUYING times as
    many; otherwise the change with the most tokens/s. Of more memory of a kind, the amount counts that brings the most
    tokens/s per byte.
    """
    now = planned.tokens_per_s

    def change(kind: str, value: str | int, rate: float, download_bytes: int = 0) -> Improvement:
        return Improvement(kind, value, rate, rate / now, download_bytes)

    free = [
        change("draft", each.name, each.tokens_per_s, each.download_bytes) for each in prospects if not each.why_not
    ]
    if four_bit is not None:
        free.append(change(four_bit.kind, four_bit.value, four_bit.tokens_per_s))
    bought = list[Improvement]()
    for memory in dict.fromkeys(gain.kind for gain in gains):
        steps = [gain for gain in gains if gain.kind == memory]
        step = max(steps, key=lambda gain: (gain.tokens_per_s - now) / int(gain.value))
        bought.append(change(memory, step.value, step.tokens_per_s))
    best = max(free, key=lambda each: each.times, default=None)
    if best is None or best.times < TIMES_WITHOUT_BUYING:
        best = max((*free, *bought), key=lambda each: each.times, default=None)
    return best if best is not None and best.times >= LEAST_TIMES_AS_FAST else None


# ------------------------------------------------------------------------------------------------ other settings


@dataclass(frozen=True)
class TextsProspect:
    """What passes that `num_texts` texts share are expected to bring, prompts excluded.

    plan: with KV entries for these texts; None if that does not fit in memory. greedy, sampled: the fastest drafting at
    temperature 0 and 1.
    """

    num_texts: int
    plan: Plan | None = None
    greedy: Drafting | None = None
    sampled: Drafting | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of all texts together, at temperature 0; 0 if they do not fit."""
        return self.greedy.tokens_per_s if self.greedy else 0.0

    @property
    def each_tokens_per_s(self) -> float:
        return self.tokens_per_s / self.num_texts

    @property
    def tokens_each(self) -> int:
        """Tokens that a text has KV entries for if all are equally long; longer ones make others wait."""
        return self.plan.reservation.num_tokens // self.num_texts if self.plan else 0

    def as_dict(self) -> dict[str, Any]:
        if self.plan is None or self.greedy is None or self.sampled is None:
            return {"num_texts": self.num_texts, "why_not": "the KV entries do not fit in memory"}
        return {
            "num_texts": self.num_texts,
            "tokens_per_s": self.tokens_per_s,
            "each_tokens_per_s": self.each_tokens_per_s,
            "tokens_each": self.tokens_each,
            "num_resident_layers": len(self.plan.placement.resident),
            "greedy": vars(self.greedy),
            "sampled": vars(self.sampled),
        }


def predict_texts(plan: Plan, draft: OpenedDraft, rates_of: RatesOf, numbers: Iterable[int]) -> list[TextsProspect]:
    """What each number of texts is expected to bring with this draft, in the memory of `plan`."""
    prospects = list[TextsProspect]()
    for number in numbers:
        try:
            with_texts = plan if number == plan.reservation.texts else plan.with_texts(number)
        except MemoryLimitError:
            prospects.append(TextsProspect(number))
            continue
        guessing = draft.guessing(with_texts.placement)
        draftings = [
            predict_drafting(with_texts, guessing, rates_of, greedy=greedy, num_texts=number)
            for greedy in (True, False)
        ]
        prospects.append(TextsProspect(number, with_texts, *draftings))
    return prospects


@dataclass(frozen=True)
class CacheProspect:
    """A plan with a format of the target's KV entries; without one if it does not fit in memory.

    stored_as: the dtype of the entries, or their bits. token_bytes: of one token's entries in all layers.
    context_bytes: of the context's. short_s, full_s: of the forecast's pass, behind a short text and behind one as
    long as the context.
    """

    name: str
    stored_as: str
    token_bytes: int
    context_bytes: int
    plan: Plan | None = None
    short_s: float | None = None
    full_s: float | None = None

    @property
    def ram_bytes(self) -> int:
        """Of the context's entries, those that are in RAM although a GPU computes."""
        return 0 if self.plan is None else self.plan.entry_stream_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            "kv_cache": self.name,
            "stored_as": self.stored_as,
            "token_bytes": self.token_bytes,
            "context_bytes": self.context_bytes,
            "num_resident_layers": None if self.plan is None else len(self.plan.placement.resident),
            "ram_bytes": self.ram_bytes,
            "pass_s": self.short_s,
            "full_pass_s": self.full_s,
        }


def predict_caches(plan: Plan, rates: Rates, width: int) -> list[CacheProspect]:
    """The formats in the memory and with the context of `plan`. width: rows of the pass."""
    prospects = list[CacheProspect]()
    dtype = next(name for name, each in DTYPES.items() if each == plan.inputs.target.dtype)
    some = MOST_STATE_NODES  # more entries do not change what recurrent layers keep
    for name, kv in KV_FORMATS.items():
        target = plan.inputs.target.with_kv(kv)
        token_bytes = (target.kv_bytes(2 * some) - target.kv_bytes(some)) // some
        stored_as = dtype if kv.is_plain else f"{name} bit"
        prospect = CacheProspect(name, stored_as, token_bytes, target.kv_bytes(plan.context))
        with suppress(MemoryLimitError):
            with_kv = plan if kv == plan.inputs.target.kv else plan.with_kv(kv)
            short_s, full_s = (with_kv.predict_pass_s(rates, width, num_tokens) for num_tokens in (0, plan.context))
            prospect = replace(prospect, plan=with_kv, short_s=short_s, full_s=full_s)
        prospects.append(prospect)
    return prospects
