"""What a server counts: figures for Prometheus, and lines of log for each answer, without its text.

The figures are counters and histograms of Prometheus' client library, in a registry of each server's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from offspec import Stats

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


class Metrics:
    """The figures of all answers so far. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._outcomes = self._counter("requests", "Answers by how they ended.", ["outcome"])
        self._totals = {name: self._counter(name, help_text) for name, help_text in TOTALS.items()}
        self._queue = self._histogram("queue", "Seconds that answers waited for their turn.")
        self._first = self._histogram("time_to_first_token", "Seconds from a request to its first token.")
        self._whole = self._histogram("request", "Seconds from a request to the end of its answer.")
        self._lock, self._busy_s, self._num_answers = Lock(), 0.0, 0

    def _counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"offspec_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"offspec_{name}_seconds", help_text, registry=self._registry, buckets=BOUNDS_S)

    def ended(self, outcome: str, stats: Stats | None, times: Times) -> None:
        """Count an answer. outcome: a finish reason, or left, failed, stopped. stats: None if it had no pass."""
        self._outcomes.labels(outcome).inc()
        if stats is None:
            return
        self._totals["prompt_tokens"].inc(stats.num_prompt_tokens)
        self._totals["cached_tokens"].inc(stats.num_prompt_tokens - stats.num_prefilled_tokens)
        self._totals["generated_tokens"].inc(stats.num_tokens)
        self._totals["passes"].inc(stats.num_passes)
        self._queue.observe(times.queue_s)
        self._whole.observe(times.total_s)
        if times.first_token_s is not None:
            self._first.observe(times.first_token_s)
        with self._lock:
            self._busy_s += times.total_s - times.queue_s
            self._num_answers += 1

    def refused(self) -> None:
        """Count a request that the full queue refused."""
        self._outcomes.labels("refused").inc()

    @property
    def usual_answer_s(self) -> float:
        """Mean seconds of an answer, without its wait."""
        with self._lock:
            return self._busy_s / self._num_answers if self._num_answers else USUAL_ANSWER_S

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """In Prometheus' text format. gauges: present values and their descriptions, by name."""
        present = CollectorRegistry()
        for name, (help_text, value) in gauges.items():
            Gauge(f"offspec_{name}", help_text, registry=present).set(value)
        return (generate_latest(present) + generate_latest(self._registry)).decode()


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
