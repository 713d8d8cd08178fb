"""Measures the scheduler's share of an iteration: everything except the forwards of draft and target.

    python -m benchmarks.scheduling.overhead [--model builtin] [--budgets 64,512] [--temperatures 0,1]

Work inside `CachedDecoder` and `RecallingText` (scoring, logits, corrections, keeping entries) counts for the models.
The rest of an iteration counts for the scheduler: selecting nodes, trees and masks, the walk, calibration, text. Its
part `vocabulary` is the work over whole rows of the draft's logits: noise, normalisers, best candidates. On a CPU,
seconds are processor time of the only thread, independent of other load. On a GPU they are wall time, with
synchronisation after each call of a model. There is no overlap, so that times add up. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.recall import RecallingText
from offspec.model.decoder import CachedDecoder
from offspec.model.row_logits import RowLogits
from offspec.scheduler.drafting.child_scores import ChildScorer


@dataclass(frozen=True)
class Row:
    """One setting over all prompts: milliseconds of a mean iteration, without the first pass of each prompt."""

    temperature: float
    budget: int | None
    nodes_per_pass: float
    iteration_ms: float
    draft_ms: float
    target_ms: float
    scheduler_ms: float
    vocabulary_ms: float

    @property
    def share(self) -> float:
        return self.scheduler_ms / self.iteration_ms


class Stopwatch:
    """Seconds in calls of the draft, in calls of the target, and in scoring the draft's logits."""

    CALLS = (
        (RecallingText, "score"),
        (CachedDecoder, "score_rows"),
        (CachedDecoder, "keep"),
        (RowLogits, "__getitem__"),
        (ChildScorer, "score"),
    )

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_cuda = engine.target.device.type == "cuda"
        self.draft_s = self.target_s = self.vocabulary_s = 0.0
        self._depth = 0

    def now(self) -> float:
        if not self._is_cuda:
            return time.thread_time()
        torch.cuda.synchronize(self._engine.target.device)
        return time.perf_counter()

    def watch(self, stack: ExitStack) -> None:
        for owner, name in self.CALLS:
            stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name))))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth:  # inside another model's call
                return call(model, *args, **kwargs)
            began, self._depth = self.now(), 1
            try:
                return call(model, *args, **kwargs)
            finally:
                self._depth, seconds = 0, self.now() - began
                text = getattr(model, "_text", model)
                decoder = getattr(text, "decoder", None) or getattr(text, "_decoder", None)
                if decoder is None:
                    self.vocabulary_s += seconds
                elif decoder is self._engine.draft.decoder:
                    self.draft_s += seconds
                else:
                    self.target_s += seconds

        return timed


def measure(engine: Engine, prompts: list[str], params: SamplingParams, speculation: SpeculationParams) -> Row:
    fresh = engine.with_draft(engine.draft)
    watch, total_s, num_passes, num_nodes = Stopwatch(fresh), 0.0, 0, 0
    for prompt in prompts:
        steps = fresh.generate(prompt, params, speculation)
        first = next(steps).stats
        with ExitStack() as stack:
            watch.watch(stack)
            began, last = watch.now(), first
            for step in steps:
                last = step.stats
            total_s += watch.now() - began
        num_passes += last.num_passes - first.num_passes
        num_nodes += last.num_drafted_tokens - first.num_drafted_tokens
    draft_s, target_s = watch.draft_s, watch.target_s
    ms = 1e3 / num_passes
    return Row(
        params.temperature,
        speculation.budget,
        num_nodes / num_passes,
        total_s * ms,
        draft_s * ms,
        target_s * ms,
        (total_s - draft_s - target_s) * ms,
        watch.vocabulary_s * ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budgets", default="64,512", help="numbers of nodes, or auto")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompts", type=int, default=3)
    args = parser.parse_args()
    engine = Engine.load(args.model, draft=args.draft, device=args.device, threads=1)
    if engine.draft.decoder is None:
        sys.exit("Error: no draft to measure; give --draft PATH")
    prompts = builtin.prompts()[: args.max_prompts]
    rows: list[Row] = []
    print("milliseconds per iteration")
    print(
        f"{'temperature':>11}  {'budget':>6}  {'nodes':>6}  {'all':>8}  {'draft':>8}  {'target':>8}  {'scheduler':>9} "
        " share  (of it vocabulary)"
    )
    for temperature in map(float, args.temperatures.split(",")):
        for budget in args.budgets.split(","):
            speculation = SpeculationParams(None if budget == "auto" else int(budget), overlap=False)
            params = SamplingParams(args.max_new_tokens, temperature, top_p=args.top_p, seed=1, ignore_eos=True)
            row = measure(engine, prompts, params, speculation)
            rows.append(row)
            print(
                f"{row.temperature:>11g}  {budget:>6}  {row.nodes_per_pass:>6.0f}  {row.iteration_ms:>8.1f}  "
                f"{row.draft_ms:>8.1f}"
                f"  {row.target_ms:>8.1f}  {row.scheduler_ms:>9.1f}  {row.share:>5.1%}  ({row.vocabulary_ms:.1f})",
                flush=True,
            )
    print(
        json.dumps(
            {
                "model": engine.name,
                "draft": engine.draft_name,
                "rows": [asdict(row) | {"share": row.share} for row in rows],
            }
        )
    )


if __name__ == "__main__":
    main()
