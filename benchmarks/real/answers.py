"""Answers of one way of decoding: measured one by one, with exact and plain decoding beside them.

Each text begins with an empty recall and an empty table of recycled tokens, as the first request does, because the same
prompts are answered many times. Calibration and costs are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offspec import Engine, SamplingParams, SpeculationParams

Meter = Callable[[], float | None]


@dataclass(frozen=True)
class Way:
    """A way of decoding: a row of the table. engine: with its draft, for this way alone."""

    name: str
    engine: Engine
    speculation: SpeculationParams


@dataclass(frozen=True)
class Rate:
    """Tokens, and the seconds that they took, prompt included."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Run:
    """One text. joules: of this machine's processors or its card meanwhile; None if they cannot be read."""

    token_ids: tuple[int, ...]
    text: str
    num_passes: int
    seconds: float
    joules: float | None
    is_cut: bool

    @property
    def rate(self) -> Rate:
        return Rate(len(self.token_ids), self.seconds)


@dataclass(frozen=True)
class AnswerKey:
    """Which answer. way: of decoding. num_tokens: at most."""

    model: str
    draft: str
    dtype: str
    way: str
    set: str
    prompt: str
    num_tokens: int


@dataclass(frozen=True)
class Answer:
    """One way's answer to one prompt, judged.

    log_likelihood: of the whole text under the target, in nats. rouge_l: against the set's reference answer. failure:
    why it does not solve the task; "" if it does. is_cut: it reached num_tokens. exact, plain: the default engine and
    plain decoding on the same prompt, measured shortly before.
    """

    key: AnswerKey
    text: str
    num_tokens: int
    num_passes: int
    seconds: float
    joules: float | None
    log_likelihood: float
    rouge_l: float
    failure: str
    is_cut: bool
    exact: Rate
    plain: Rate

    @property
    def is_solved(self) -> bool:
        return not self.failure

    @classmethod
    def read(cls, line: dict[str, Any]) -> Answer:
        """From its fields. Raises KeyError or TypeError for others."""
        key, exact, plain = (line.pop(name) for name in ("key", "exact", "plain"))
        return cls(AnswerKey(**key), exact=Rate(**exact), plain=Rate(**plain), **line)


def measure(way: Way, prompt: list[int], params: SamplingParams, meter: Meter) -> Run:
    """Decode one prompt."""
    _forget_texts(way.engine)
    began_j, began = meter(), time.perf_counter()
    steps = list(way.engine.generate(prompt, params, way.speculation))
    seconds, ended_j = time.perf_counter() - began, meter()
    joules = None if began_j is None or ended_j is None or ended_j < began_j else ended_j - began_j  # RAPL wraps around
    return Run(
        tuple(token for step in steps for token in step.token_ids),
        "".join(step.text for step in steps),
        steps[-1].stats.num_passes,
        seconds,
        joules,
        steps[-1].finish_reason == "length",
    )


def _forget_texts(engine: Engine) -> None:
    fresh = engine.draft.new_stats(engine.target)
    engine.models.stats = replace(engine.draft_stats, recall=fresh.recall, recycling=fresh.recycling)


class Beside:
    """The reference ways on one prompt, measured again when they are asked for later than `max_age_s` afterwards."""

    def __init__(
        self,
        ways: Mapping[str, Way],
        run: Callable[[Way], Run],
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """run: decodes the prompt."""
        self._ways, self._run, self._max_age_s, self._clock = ways, run, max_age_s, clock
        self._runs: dict[str, Run] = {}
        self._measured_s = 0.0

    def runs(self) -> Mapping[str, Run]:
        """A run of each reference way, by its name."""
        if not self._runs or self._clock() - self._measured_s > self._max_age_s:
            self._runs = {name: self._run(way) for name, way in self._ways.items()}
            self._measured_s = self._clock()
        return self._runs
