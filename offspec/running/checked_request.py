"""A request that was checked, so that it can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.constraint import TokenConstraint
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import Verdict

Observer = Callable[[TokenTree, Verdict], None]


@dataclass(frozen=True)
class CheckedRequest:
    """What `Engine.check_request` returns.

    prompt: its token ids, which fit the context together with `sampling.max_new_tokens`. seed: the sampling seed, never
    None. began: the start time, by `perf_counter`. constraint: of the answer, compiled. ends: tokens that end the
    answer beside EOS. continues: whether the answer continues the prompt's last text, inside a message.
    """

    prompt: list[int]
    sampling: SamplingParams
    seed: int
    speculation: SpeculationParams
    observer: Observer | None
    began: float
    constraint: TokenConstraint | None = None
    ends: frozenset[int] = frozenset()
    continues: bool = False

    @property
    def constraint_s(self) -> float:
        """Seconds of CPU time that slow steps of the constraint have taken so far."""
        slow = getattr(self.constraint, "slow", None)
        return 0.0 if slow is None else float(slow.seconds)
