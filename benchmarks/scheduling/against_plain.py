"""Compares `auto` with plain decoding and with fixed tree sizes, on the same prompts.

    python -m benchmarks.scheduling.against_plain [--model builtin] [--draft auto] [--budgets 16,64] [--prompts 4]
        [--temperatures 0,1] [--tokens 128] [--repeats 2] [--clock cpu|wall] [--ram SIZE] [--set mt_bench] [--threads 1]

A request of each setting for the same prompt run by turns, pass by pass, in one process, so that other load on the
machine slows all alike. With `--clock cpu`, the default, seconds are processor time, for the scheduler's decisions
too; with `wall` they are real time, which needs a quiet machine. Each setting learns from prompt to prompt, as one
process does. `ratio` is the rate of `auto` over that of a setting, with the first pass: of all prompts, of the first
prompt, of the last one; the median over repeats, with their range. `decode` is without the first pass. Milliseconds are
those of a mean pass with a tree, and without. `--set` takes prompts that `scripts/fetch_prompts` fetches. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

from benchmarks.real.models import PROMPTS
from benchmarks.real.prompts import read_set
from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.running.steps import Step
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.text.prompt import Prompt
from offspec.tools.benchmark import WORKLOADS

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}
DRAFTER_MODULES = ("offspec.drafts.base", "offspec.drafts.model_draft")
AUTO = None  # the budget that is compared with the others


@dataclass
class Passes:
    """The passes of one request or several: seconds with and without the first ones, tokens likewise."""

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

    @staticmethod
    def joined(parts: Sequence[Passes]) -> Passes:
        whole = Passes()
        for part in parts:
            whole.first_s += part.first_s
            whole.first_tokens += part.first_tokens
            whole.tree_s += part.tree_s
            whole.plain_s += part.plain_s
            whole.num_tokens += part.num_tokens
        return whole

    @property
    def num_passes(self) -> int:
        """Without the first ones."""
        return len(self.tree_s) + len(self.plain_s)

    @property
    def decode_rate(self) -> float:
        return self.num_tokens / (sum(self.tree_s) + sum(self.plain_s))

    @property
    def rate(self) -> float:
        return (self.num_tokens + self.first_tokens) / (self.first_s + sum(self.tree_s) + sum(self.plain_s))


class Turns:
    """One request that advances by one pass at a time, and the time of each."""

    def __init__(self, steps: Iterator[Step], clock: Callable[[], float]) -> None:
        self._steps, self._clock, self.passes = steps, clock, Passes()
        self._num_drafted = 0
        self.tokens: list[int] = []

    def advance(self) -> bool:
        """Run one pass. Returns whether there was one left."""
        began = self._clock()
        step = next(self._steps, None)
        seconds = self._clock() - began
        if step is None:
            return False
        self.passes.add(seconds, step, step.stats.num_drafted_tokens - self._num_drafted)
        self._num_drafted = step.stats.num_drafted_tokens
        self.tokens += step.token_ids
        return True


def by_turns(requests: Sequence[Turns]) -> None:
    """Run all to the end; in proportion to their tokens, so that all see the same load."""
    left = set(requests)
    while left:
        turn = min(left, key=lambda each: len(each.tokens))
        if not turn.advance():
            left.remove(turn)


def name_of(budget: int | None) -> str:
    return "auto" if budget is AUTO else "plain" if budget == 0 else f"{budget} nodes"


@dataclass(frozen=True)
class Round:
    """The passes of each setting, by prompt."""

    passes: dict[int | None, list[Passes]]

    def ratio(self, budget: int | None, prompts: slice = slice(None)) -> float:
        """The rate of `auto` over that of a setting."""
        return self._of(AUTO, prompts).rate / self._of(budget, prompts).rate

    def decode_ratio(self, budget: int | None) -> float:
        return self._of(AUTO).decode_rate / self._of(budget).decode_rate

    def _of(self, budget: int | None, prompts: slice = slice(None)) -> Passes:
        return Passes.joined(self.passes[budget][prompts])


def warm_up(engine: Engine, budgets: Sequence[int | None], prompt: Prompt, params: SamplingParams) -> None:
    """Run what the first call of each function costs once in a process."""
    for budget in budgets:
        fresh = engine.with_draft(engine.draft)
        for _ in fresh.generate(prompt, replace(params, max_new_tokens=16), SpeculationParams(budget)):
            pass


def measure(
    engine: Engine,
    budgets: Sequence[int | None],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    clock: Callable[[], float],
) -> Round:
    """One round: nothing is learnt before it."""
    engines = {budget: engine.with_draft(engine.draft) for budget in budgets}
    passes: dict[int | None, list[Passes]] = {budget: [] for budget in budgets}
    for number, prompt in enumerate(prompts):
        own = replace(params, seed=(params.seed or 0) + number)
        requests = {
            budget: Turns(each.generate(prompt, own, SpeculationParams(budget)), clock)
            for budget, each in engines.items()
        }
        by_turns(list(requests.values()))
        assert all(each.tokens == requests[AUTO].tokens for each in requests.values()), "a setting has changed the text"
        for budget, request in requests.items():
            passes[budget].append(request.passes)
    return Round(passes)


def described(rounds: Sequence[Round], budget: int | None) -> dict[str, object]:
    """A row of the table."""
    whole = Passes.joined([part for one in rounds for part in one.passes[budget]])

    def ms(seconds: list[float]) -> float | None:
        return 1e3 * statistics.fmean(seconds) if seconds else None

    return {
        "setting": name_of(budget),
        "tokens_per_s": whole.rate,
        "tokens_per_pass": whole.num_tokens / whole.num_passes,
        "tree_share": len(whole.tree_s) / whole.num_passes,
        "plain_ms": ms(whole.plain_s),
        "tree_ms": ms(whole.tree_s),
        "ratio": [one.ratio(budget) for one in rounds],
        "decode": [one.decode_ratio(budget) for one in rounds],
        "first": [one.ratio(budget, slice(1)) for one in rounds],
        "last": [one.ratio(budget, slice(-1, None)) for one in rounds],
    }


def shown(value: object) -> str:
    """A figure, or the median and the range of several."""
    if isinstance(value, list):
        return f"{statistics.median(value):.3f} ({min(value):.3f} .. {max(value):.3f})"
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="builtin")
    made.add_argument("--draft", default="auto")
    made.add_argument("--budgets", default="", help="fixed tree sizes beside plain decoding, e.g. 16,64")
    made.add_argument("--temperatures", default="0,1")
    made.add_argument("--prompts", type=int, default=4)
    made.add_argument("--tokens", type=int, default=128)
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    made.add_argument("--ram", help="a limit of RAM, so that the target is streamed")
    made.add_argument("--context", type=int)
    made.add_argument("--set", help="prompts of the field: mt_bench, humaneval, gsm8k")
    made.add_argument("--threads", type=int, default=1)
    return made


def main() -> None:
    args = parser().parse_args()
    clock = CLOCKS[args.clock]
    engine = Engine.load(
        args.model, draft=args.draft, device="cpu", threads=args.threads, ram=args.ram, context=args.context
    )
    prompts: list[Prompt] = [*builtin.prompts()[: args.prompts]]
    if args.set:
        prompts = [each.messages for each in read_set(args.set, PROMPTS)[: args.prompts]]
    elif args.model != "builtin":
        prompts = [workload.for_model(engine) for workload in WORKLOADS[: args.prompts]]
    budgets = [0, *(int(each) for each in args.budgets.split(",") if each), AUTO]
    print(f"{engine.name}, draft {engine.draft_name}, {len(prompts)} prompts, {args.clock} seconds")
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(args.tokens, temperature=temperature, seed=1, ignore_eos=True)
        with ExitStack() as stack:
            for module in DRAFTER_MODULES:
                stack.enter_context(patch(f"{module}.ModelDrafter", partial(ModelDrafter, clock=clock)))
            warm_up(engine, budgets, prompts[0], params)
            rounds = [measure(engine, budgets, prompts, params, clock) for _ in range(args.repeats)]
        for budget in budgets:
            rows.append({"temperature": temperature, **described(rounds, budget)})
            print("; ".join(f"{name} {shown(value)}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": rows}))


if __name__ == "__main__":
    main()
