"""Predicts what each format of the KV cache would bring: its bytes, resident layers, and the time of a pass."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from offspec.loaders.machine.hardware import Rates
from offspec.scheduler.params import MOST_STATE_NODES

from ..checkpoints.opening import DTYPES
from ..errors import MemoryLimitError
from ..model.memory.kv_formats import KV_FORMATS
from ..planning.plan import Plan


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
