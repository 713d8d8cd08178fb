"""Compares `auto` with plain decoding where speculation may not pay: a small target in memory.

    python -m benchmarks.scheduling.against_plain [--model builtin] [--draft auto] [--temperatures 0,1] [--prompts 4]
        [--tokens 128] [--repeats 2] [--clock cpu|wall]

Two requests for the same prompt run by turns, pass by pass, in one process with one thread, so that other load on the
machine slows both alike. With `--clock cpu`, the default, seconds are processor time, for the scheduler's decisions
too; with `wall` they are real time, which needs a quiet machine. `ratio` is the rate of `auto` over the plain one, with
the first pass, as the median over repeats with their range; `decode` is without the first pass. Passes of `auto` with a
tree and without one are shown beside plain ones. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from unittest.mock import patch

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.engine import Prompt
from offspec.running.steps import Step
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.tools.benchmark import WORKLOADS

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}
DRAFTER_MODULES = ("offspec.drafts.base", "offspec.drafts.model_draft")


@dataclass
class Passes:
    """The passes of several requests: seconds with and without the first ones, tokens likewise."""

    first_s: float = 0.0
    first_tokens: int = 0
    tree_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, seconds: float, step: Step, num_drafted: int) -> None:
        """Record one pass. num_drafted: nodes of its tree."""
        if step.stats.num_passes == 1:
            self.first_s += seconds
            self.first_tokens += len(step.token_ids)
            return
        (self.tree_s if num_drafted else self.plain_s).append(seconds)
        self.num_tokens += len(step.token_ids)

    @property
    def decode_rate(self) -> float:
        return self.num_tokens / (sum(self.tree_s) + sum(self.plain_s))

    @property
    def rate(self) -> float:
        return (self.num_tokens + self.first_tokens) / (self.first_s + sum(self.tree_s) + sum(self.plain_s))


class Turns:
    """One request that advances by one pass at a time, and the time of each."""

    def __init__(self, steps: Iterator[Step], clock: Callable[[], float], passes: Passes) -> None:
        self._steps, self._clock, self._passes = steps, clock, passes
        self._num_drafted = 0
        self.tokens: list[int] = []

    def advance(self) -> bool:
        """Run one pass. Returns whether there was one left."""
        began = self._clock()
        step = next(self._steps, None)
        seconds = self._clock() - began
        if step is None:
            return False
        self._passes.add(seconds, step, step.stats.num_drafted_tokens - self._num_drafted)
        self._num_drafted = step.stats.num_drafted_tokens
        self.tokens += step.token_ids
        return True


def by_turns(plain: Turns, auto: Turns) -> None:
    """Run both to the end; in proportion to their tokens, so that both see the same load."""
    left = {plain, auto}
    while left:
        turn = min(left, key=lambda each: len(each.tokens))
        if not turn.advance():
            left.remove(turn)


@dataclass(frozen=True)
class Row:
    """One temperature: `auto` over plain, and milliseconds of a mean pass by kind."""

    temperature: float
    ratios: list[float]
    decode_ratios: list[float]
    tokens_per_pass: float
    tree_share: float
    plain_ms: float
    no_tree_ms: float | None
    tree_ms: float | None


def pair_of(engine: Engine) -> tuple[tuple[Engine, int | None], ...]:
    """An engine and a number of nodes for plain decoding, and for `auto`, with nothing learnt yet."""
    return (engine.with_draft(engine.draft), 0), (engine.with_draft(engine.draft), None)


def warm_up(engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    """Run what the first call of each function costs once in a process."""
    for each, budget in pair_of(engine):
        for _ in each.generate(prompt, replace(params, max_new_tokens=16), SpeculationParams(budget)):
            pass


def measure(
    engine: Engine, prompts: list[Prompt], params: SamplingParams, repeats: int, clock: Callable[[], float]
) -> Row:
    ratios, decode_ratios, all_plain, all_auto = [], [], Passes(), Passes()
    warm_up(engine, prompts[0], params)
    for _ in range(repeats):
        (reference, none), (fresh, found) = pair_of(engine)
        plain, auto = Passes(), Passes()
        for number, prompt in enumerate(prompts):
            own = replace(params, seed=(params.seed or 0) + number)
            turns = [
                Turns(each.generate(prompt, own, SpeculationParams(budget)), clock, passes)
                for each, budget, passes in ((reference, none, plain), (fresh, found, auto))
            ]
            by_turns(*turns)
            assert turns[0].tokens == turns[1].tokens, "auto has changed the text"
        ratios.append(auto.rate / plain.rate)
        decode_ratios.append(auto.decode_rate / plain.decode_rate)
        for whole, part in ((all_plain, plain), (all_auto, auto)):
            whole.tree_s += part.tree_s
            whole.plain_s += part.plain_s
            whole.num_tokens += part.num_tokens
    num_passes = len(all_auto.tree_s) + len(all_auto.plain_s)

    def ms(seconds: list[float]) -> float | None:
        return 1e3 * statistics.fmean(seconds) if seconds else None

    return Row(
        params.temperature,
        ratios,
        decode_ratios,
        all_auto.num_tokens / num_passes,
        len(all_auto.tree_s) / num_passes,
        ms(all_plain.plain_s) or 0.0,
        ms(all_auto.plain_s),
        ms(all_auto.tree_s),
    )


def shown(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    args = parser.parse_args()
    engine, clock = Engine.load(args.model, draft=args.draft, device="cpu", threads=1), CLOCKS[args.clock]
    prompts: list[Prompt] = [*builtin.prompts()[: args.prompts]]
    if args.model != "builtin":
        prompts = [workload.for_model(engine) for workload in WORKLOADS[: args.prompts]]
    rows: list[Row] = []
    print(f"{engine.name}, draft {engine.draft_name}: auto over plain decoding, {args.clock} seconds")
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(args.tokens, temperature=temperature, seed=1, ignore_eos=True)
        with ExitStack() as stack:
            for module in DRAFTER_MODULES:
                stack.enter_context(patch(f"{module}.ModelDrafter", partial(ModelDrafter, clock=clock)))
            row = measure(engine, prompts, params, args.repeats, clock)
        rows.append(row)
        times = [f"{name} {value:.2f}" for name, value in (("no tree", row.no_tree_ms), ("tree", row.tree_ms)) if value]
        print(
            f"temperature {temperature:g}: ratio {shown(row.ratios)}, decode {shown(row.decode_ratios)}; "
            f"{row.tokens_per_pass:.2f} tokens per pass, {row.tree_share:.0%} of passes with a tree; "
            f"ms per pass: plain {row.plain_ms:.2f}, auto {', '.join(times)}",
            flush=True,
        )
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
