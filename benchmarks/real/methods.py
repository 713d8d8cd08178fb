"""Offspec's own methods along recorded texts of the target, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from benchmarks.scheduling.replay import Costs, Recording, Replayed, VirtualClock, replay
from benchmarks.scheduling.schedulers import MISPREDICTED
from offspec import Engine, SpeculationParams
from offspec.drafts.base import Draft, DraftTask
from offspec.drafts.model_draft import ModelDraft
from offspec.drafts.recall import RecallingText
from offspec.drafts.without_model import LookupDraft
from offspec.model.memory.request_caches import DraftText
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.pace.costs import Costs as LearntCosts


@dataclass(frozen=True)
class Method:
    """A method: its name, whether the draft model drafts, and its settings."""

    name: str
    has_model: bool
    speculation: SpeculationParams

    def fresh(self, engine: Engine) -> Engine:
        """An engine with this method's draft, which has learnt nothing yet."""
        return engine.with_draft(engine.draft if self.has_model else LookupDraft())


class ClockedDraft:
    """Counts the forwards of drafts, each of which takes `seconds(rows)` on a clock."""

    def __init__(self, clock: VirtualClock, seconds: Callable[[int], float]) -> None:
        self._clock, self._seconds, self.num_calls = clock, seconds, 0

    def observe(self, text: DraftText) -> None:
        """Count those of this text."""
        inner: Any = text.states

        def states(chain: Sequence[int], tokens: np.ndarray, *rest: Any, **options: Any) -> Tensor:
            self.num_calls += 1
            self._clock.advance(self._seconds(len(chain) + len(tokens)))
            found: Tensor = inner(chain, tokens, *rest, **options)
            return found

        text.states = states  # type: ignore[method-assign]

    @contextmanager
    def corrections(self) -> Iterator[None]:
        """Count recall's corrections of nodes that remain as rounds."""
        inner = RecallingText.corrected

        def corrected(text: RecallingText, rows: np.ndarray) -> Tensor:
            self._clock.advance(self._seconds(len(rows)))
            return inner(text, rows)

        with patch.object(RecallingText, "corrected", corrected):
            yield


def telling_time(clock: VirtualClock) -> AbstractContextManager[Any]:
    """Drafters measure by this clock."""
    return patch.dict(ModelDrafter.__init__.__kwdefaults__, clock=clock.now)


def replayed_texts(engine: Engine, method: Method, recordings: Sequence[Recording], costs: Costs) -> list[Replayed]:
    """An exact method along recorded texts; its estimates are kept from text to text."""
    fresh, parts = method.fresh(engine), list[Replayed]()
    fresh.draft_stats.overlap_switch = None  # the clock simulates overlap
    fresh.draft_stats.costs = LearntCosts(lambda rows: MISPREDICTED * costs.pass_s(rows))
    for recording in recordings:
        clock = VirtualClock()
        rounds, caches = ClockedDraft(clock, costs.round_s), fresh.new_caches()
        if caches.draft is not None:
            rounds.observe(caches.draft)
        sampler = recording.sampler(fresh.target.config.vocab_size)
        text, num_unscored = caches.draft, len(recording.prompt_ids)
        task = DraftTask(sampler, (), num_unscored, text=text, target=fresh.target, speculation=method.speculation)
        with telling_time(clock), rounds.corrections():
            drafter = fresh.draft.drafter(task, fresh.draft_stats)
            target = caches.target if needs_target(fresh.draft, method.speculation) else None
            layers = fresh.draft.target_layers
            parts.append(replay(recording, drafter, sampler, clock, costs, rounds, target, layers))
    return parts


def needs_target(draft: Draft, speculation: SpeculationParams) -> bool:
    """Whether drafting draws on the target's states or predictions, beside the text; a replay may spare them if not."""
    return type(draft) is not ModelDraft or speculation.recall or speculation.recycling
