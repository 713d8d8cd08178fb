"""What a server counts: figures for Prometheus, and lines of log for each answer, without its text.

The text format is Prometheus' 0.0.4. It is a few lines, so there is no dependency on its client library, whose registry
would be common to all servers of a process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offspec import Stats

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
USUAL_ANSWER_S = 5.0  # what an answer is thought to take before there was one
TOTALS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that a KV cache already held.",
    "generated_tokens": "Tokens of answers.",
    "passes": "Passes of the target, summed over answers.",
}


@dataclass(frozen=True)
class Times:
    """The seconds of one answer: waiting for its turn, until its first token since it was asked, and in all."""

    queue_s: float
    first_token_s: float | None
    total_s: float


class Histogram:
    """How many values are at most each of BOUNDS_S, their sum and their number."""

    def __init__(self, name: str, help_text: str) -> None:
        self._name, self._help = name, help_text
        self._counts, self.sum = [0] * (len(BOUNDS_S) + 1), 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(BOUNDS_S, value)] += 1
        self.sum += value

    def lines(self) -> Iterator[str]:
        yield from _head(self._name, "histogram", self._help)
        below = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._counts, strict=True):
            below += count
            yield f'{self._name}_bucket{{le="{bound}"}} {below}'
        yield f"{self._name}_sum {self.sum:g}"
        yield f"{self._name}_count {below}"


class Metrics:
    """The figures of all answers so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._outcomes, self._totals = Counter[str](), Counter[str]()
        self._queue = Histogram("offspec_queue_seconds", "Seconds that answers waited for their turn.")
        self._first = Histogram("offspec_time_to_first_token_seconds", "Seconds from a request to its first token.")
        self._whole = Histogram("offspec_request_seconds", "Seconds from a request to the end of its answer.")
        self._busy_s = 0.0

    def ended(self, outcome: str, stats: Stats | None, times: Times) -> None:
        """Count an answer. outcome: a finish reason, or left, failed, stopped. stats: None if it had no pass."""
        with self._lock:
            self._outcomes[outcome] += 1
            if stats is None:
                return
            self._totals["prompt_tokens"] += stats.num_prompt_tokens
            self._totals["cached_tokens"] += stats.num_prompt_tokens - stats.num_prefilled_tokens
            self._totals["generated_tokens"] += stats.num_tokens
            self._totals["passes"] += stats.num_passes
            self._queue.observe(times.queue_s)
            self._whole.observe(times.total_s)
            self._busy_s += times.total_s - times.queue_s
            if times.first_token_s is not None:
                self._first.observe(times.first_token_s)

    def refused(self) -> None:
        """Count a request that the full queue refused."""
        with self._lock:
            self._outcomes["refused"] += 1

    @property
    def usual_answer_s(self) -> float:
        """Mean seconds of an answer, without its wait."""
        with self._lock:
            return self._busy_s / self._whole.count if self._whole.count else USUAL_ANSWER_S

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """In Prometheus' text format. gauges: present values and their descriptions, by name."""
        with self._lock:
            return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[str]:
        for name, (help_text, value) in gauges.items():
            yield from _head(f"offspec_{name}", "gauge", help_text)
            yield f"offspec_{name} {value:g}"
        yield from _head("offspec_requests_total", "counter", "Answers by how they ended.")
        for outcome, count in sorted(self._outcomes.items()):
            yield f'offspec_requests_total{{outcome="{outcome}"}} {count}'
        for name, help_text in TOTALS.items():
            yield from _head(f"offspec_{name}_total", "counter", help_text)
            yield f"offspec_{name}_total {self._totals[name]}"
        for histogram in (self._queue, self._first, self._whole):
            yield from histogram.lines()


def _head(name: str, kind: str, help_text: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"


def first_line(name: str, num_prompt_tokens: int, times: Times) -> str:
    """One line about an answer that begins. name: its kind and number."""
    return f"{name}: begins, prompt {num_prompt_tokens} tokens, waited {times.queue_s:.1f} s"


def progress_line(name: str, stats: Stats | None, times: Times) -> str:
    """One line about an answer under way."""
    seconds = times.total_s - times.queue_s
    if stats is None:
        return f"{name}: running for {seconds:.0f} s, no token yet"
    rate = stats.num_tokens / max(seconds, 1e-9)
    return f"{name}: running for {seconds:.0f} s, answer {stats.num_tokens} tokens so far at {rate:.2f} tokens/s"


def log_line(name: str, outcome: str, stats: Stats | None, times: Times) -> str:
    """One line about an answer that has ended."""
    parts = [f"{name}: {outcome}"]
    if stats is not None:
        cached = stats.num_prompt_tokens - stats.num_prefilled_tokens
        rate = stats.num_tokens / max(times.total_s - times.queue_s, 1e-9)
        parts.append(f"prompt {stats.num_prompt_tokens} tokens ({cached} cached)")
        parts.append(f"answer {stats.num_tokens} tokens at {rate:.2f} tokens/s")
        parts.append(f"{stats.tokens_per_pass:.2f} tokens/pass")
    parts.append(f"waited {times.queue_s:.1f} s")
    if times.first_token_s is not None:
        parts.append(f"first token after {times.first_token_s:.1f} s")
    parts.append(f"{times.total_s:.1f} s in all")
    return ", ".join(parts)


def one_line(text: str, most: int = 200) -> str:
    """A text from a client for a log: one line without control characters."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= most else f"{shown[:most]}…"
