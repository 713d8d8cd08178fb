"""Measures answers to one long prompt whose texts share its KV entries, against texts with copies of them.

    python -m benchmarks.shared_beginnings --model smollm2 [--tokens 2000] [--answers 8] [--new 32]
    python -m benchmarks.shared_beginnings --model smollm2 --draft lookup --dtype bf16 --kv-cache 8

Both ways run in one process and take turns pass by pass, so that other load on the machine concerns both. Printed are
the most bytes of the KV cache; how many answers had room at once; seconds of the prompt's pass, of all further ones,
and the median of those with the most answers; and whether the texts are equal. Seconds are the process's CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import numpy as np

from offspec import Engine, SamplingParams, Step
from offspec.model.memory.text_memory import total_bytes
from offspec.running.batch import Batch

MIB = 2**20


def copying() -> AbstractContextManager[mock.Mock]:
    """Inside it, texts copy what they could share."""
    return mock.patch("offspec.model.memory.text_memory.most_shared", return_value=0)


class Way:
    """A batch of answers. passes: seconds of each, and how many answers shared it."""

    def __init__(self, engine: Engine, prompt: list[int], num_answers: int, num_new: int, *, shares: bool) -> None:
        self.shares = shares
        self.batch = Batch(engine.models, num_answers)
        params = [SamplingParams(num_new, temperature=1.0, seed=i, ignore_eos=True) for i in range(num_answers)]
        self.tickets = [self.batch.add(engine.check_request(prompt, own)) for own in params]
        self.texts: list[list[int]] = [[] for _ in self.tickets]
        self.passes = list[tuple[float, int]]()
        self.most_bytes = 0

    def step(self) -> None:
        began = time.process_time()
        with nullcontext() if self.shares else copying():
            outcomes = self.batch.step()
        self.passes.append((time.process_time() - began, len(outcomes)))
        caches = [ticket.caches.target.cache for ticket in self.tickets if ticket.caches is not None]
        self.most_bytes = max(self.most_bytes, total_bytes(caches))
        for ticket, outcome in outcomes:
            assert isinstance(outcome, Step), outcome
            self.texts[self.tickets.index(ticket)] += outcome.token_ids

    def report(self) -> str:
        (prompt_s, _), *later = self.passes
        most = max(number for _, number in later)
        full = [seconds for seconds, number in later if number == most]
        return (
            f"{'shared' if self.shares else 'copied'}: {self.most_bytes / MIB:.1f} MiB of KV entries, {most} answers "
            f"at once, prompt {prompt_s:.2f} s, {len(later)} passes in {sum(seconds for seconds, _ in later):.2f} s, "
            f"{len(full)} full ones of {statistics.median(full):.4f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache", default="16")
    flags = parser.parse_args()
    engine = Engine.load(
        flags.model,
        draft=flags.draft,
        device="cpu",
        dtype=flags.dtype,
        context=flags.context,
        texts=flags.answers,
        kv_cache=flags.kv_cache,
    )
    prompt = np.random.default_rng(0).integers(0, engine.target.config.vocab_size, flags.tokens).tolist()
    ways = [Way(engine, prompt, flags.answers, flags.new, shares=shares) for shares in (False, True)]
    while any(not way.batch.is_idle for way in ways):
        for way in ways:
            if not way.batch.is_idle:
                way.step()
    for way in ways:
        print(way.report())
    print("equal texts" if ways[0].texts == ways[1].texts else "DIFFERENT TEXTS")


if __name__ == "__main__":
    main()
