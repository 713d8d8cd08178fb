"""Predicts what would make a planned model faster: more memory, 4 bit, another draft; and which one helps most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offspec.loaders.machine.hardware import Rates

from ..checkpoints.opening import DTYPES, ModelFiles
from ..drafts.base import OpenedDraft
from ..drafts.weighing import Prospect
from ..errors import OffspecError
from ..planning.draft_forecast import RatesOf, predict_drafting
from ..planning.plan import Plan

GAIN_STEP_BYTES, MAX_GAIN_STEPS = 8 * 2**30, 4
GAIN_WIDTH = 64  # rows of the pass that gains are predicted for
FOUR_BIT = "nf4"  # the default format of `offspec quantize`
LEAST_TIMES_AS_FAST = 1.1  # by a change that is worth advising
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
        device_type = "cpu" if self.plan.placement.limits.device is None else "cuda"
        try:
            packed = ModelFiles.from_config(target.checkpoint.path, FOUR_BIT, dtype, device_type, [])
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
