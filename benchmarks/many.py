"""Tokens/s of several texts that share the target's passes, against one text after the other.

    python -m benchmarks.many MODEL --ram 6GiB [--draft DRAFT] [--texts 8] [--temperature 1]    # wall-clock seconds
    python -m benchmarks.many builtin --clock card                                              # simulated seconds

The texts are held-out prompts of the built-in pair. Both ways run in one process, by turns, with `auto`; their texts
are compared. MODEL is for example the 7B shape of `python -m benchmarks.grow`. With `--clock card`, passes and draft
rounds take the seconds of a card (`benchmarks.scheduling.replay.Costs`: 70B in NF4 streamed to an RTX 4090, 0.9 s up to
500 rows), and everything else takes none; trees and texts are real, and nothing is drafted during passes. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median_high
from typing import Any
from unittest import mock

from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.model.decoder import Decoder
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.params import MAX_NODES
from offspec.tools.texts_benchmark import TextsRun, answer_together, num_different

from .scheduling.replay import Costs, VirtualClock


def simulate(engine: Engine, clock: VirtualClock, costs: Costs) -> list[Any]:
    """Patches that make passes and rounds take `costs` on the clock."""
    through = Decoder.through

    def timed(self: Decoder, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = len(hidden)
        clock.advance(costs.pass_s(rows) if self is engine.target else costs.round_s(rows))
        return through(self, hidden, *args, **kwargs)

    defaults = dict(ModelDrafter.__init__.__kwdefaults__ or {}) | {"clock": clock.now}
    engine.loaded.rates = None  # this machine's
    return [
        mock.patch("offspec.scheduler.params.CPU_MAX_NODES", MAX_NODES),
        mock.patch.object(Decoder, "through", timed),
        mock.patch.object(ModelDrafter.__init__, "__kwdefaults__", defaults),
        *(
            mock.patch(f"offspec.{module}.time", mock.Mock(perf_counter=clock.now))
            for module in (
                "running.passes",
                "running.pass_counter",
                "drafts.shared_rounds",
                "scheduler.pace.shared_pass",
            )
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--ram", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--texts", default="1,8", help="texts under way, one row each; the first is the base")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "card"), default="wall")
    args = parser.parse_args()
    numbers = [int(number) for number in args.texts.split(",")]
    options = {"draft": args.draft, "dtype": args.dtype, "ram": args.ram, "context": args.context}
    tree = MAX_NODES if args.clock == "card" else None
    engine = Engine.load(args.model, texts=max(numbers), tree=tree, **options)
    prompts = builtin.prompts()[: args.prompts]
    params = [
        SamplingParams(args.max_new_tokens, temperature=args.temperature, seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    clock: Callable[[], float] = time.perf_counter
    speculation = SpeculationParams(overlap=args.clock == "wall")
    if args.clock == "card":
        virtual = VirtualClock()
        clock = virtual.now
        for patch in simulate(engine, virtual, Costs()):
            patch.start()
    print(f"{len(prompts)} held-out prompts x {args.max_new_tokens} tokens, temperature {args.temperature:g}")
    print("texts  tokens/s together   each  tokens per pass  seconds   gain  texts that differ")
    runs = list[TextsRun]()
    for _ in range(args.repeats):
        for number in numbers:
            fresh = engine.with_draft(engine.draft)  # without estimates of earlier runs
            runs.append(answer_together(fresh, prompts, params, number, speculation, clock=clock))
            print(line_of(runs[-1], runs[0]), flush=True)
    print(json.dumps({"settings": vars(args), "rows": [record_of(run) for run in runs]}))


def line_of(run: TextsRun, base: TextsRun) -> str:
    each, per_pass = median_high(run.each_tokens_per_s), run.num_tokens / run.num_passes
    return (
        f"{run.num_texts:>5}  {run.tokens_per_s:>17.2f}  {each:>5.2f}  {per_pass:>15.2f}  {run.seconds:>7.1f}  "
        f"{run.tokens_per_s / base.tokens_per_s:>4.2f}x  {num_different(run, base):>17}"
    )


def record_of(run: TextsRun) -> dict[str, Any]:
    figures = {"num_tokens": run.num_tokens, "num_passes": run.num_passes, "seconds": run.seconds}
    return {"max_texts": run.num_texts, **figures, "each_tokens_per_s": median_high(run.each_tokens_per_s)}


if __name__ == "__main__":
    main()
