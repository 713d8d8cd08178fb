"""Tokens per pass on held-out prompts: both scorings, over temperatures and budgets.

    python benchmarks/acceptance.py [--model builtin] [--budgets 16,64,128,256] [--temperatures 0,0.6,1] [--no-recall]
    python benchmarks/acceptance.py --draft shadow:3 --resident 3    # a shadow of all layers but three

Tokens per pass do not depend on the machine's speed, so one run is enough. Every pass counts, including the first. Each
row starts with an uncalibrated draft and fits its sharpness at run time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.checkpoints.shadows import find_shadow
from offspec.drafts.layer_drafts import DEFAULT_BITS, load_shadow
from offspec.loaders.streaming.placement import spread
from offspec.scheduler.params import Scoring


@dataclass(frozen=True)
class Row:
    """One setting over all prompts. sharpness: the value fitted at the end (1 for specexec, by definition)."""

    temperature: float
    scoring: Scoring
    budget: int
    tokens_per_pass: float
    worst_prompt: float
    best_prompt: float
    sharpness: float


def measure(
    engine: Engine, prompts: list[str], temperature: float, speculation: SpeculationParams, max_new_tokens: int
) -> Row:
    """Run every prompt, seeded by its number."""
    fresh = engine.with_draft(engine.draft)
    ratios: list[float] = []
    num_tokens = num_passes = 0
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens, temperature=temperature, seed=index, ignore_eos=True)
        *_, last = fresh.generate(prompt, params, speculation)
        num_tokens, num_passes = num_tokens + last.stats.num_tokens, num_passes + last.stats.num_passes
        ratios.append(last.stats.tokens_per_pass)
    fitted = fresh.sharpness(greedy=temperature == 0) if speculation.scoring == "coupled" else 1.0
    return Row(
        temperature,
        speculation.scoring,
        speculation.budget,
        num_tokens / num_passes,
        min(ratios),
        max(ratios),
        fitted,
    )


def with_residents(engine: Engine, bits: int, count: int) -> Engine:
    """The same target with a shadow of all layers but `count`, as if these alone stayed in memory."""
    assert engine.plan is not None
    shadow = find_shadow(engine.plan.inputs.target, bits)
    assert shadow is not None, "loading the engine has made it"
    layers = range(engine.target.config.num_layers)
    return engine.with_draft(load_shadow(shadow, engine.target, set(layers) - set(spread(len(layers), count))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--budgets", default="16,64,128,256")
    parser.add_argument("--temperatures", default="0,0.6,1")
    parser.add_argument("--scorings", default="specexec,coupled")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-prompts", type=int, default=None)
    parser.add_argument("--width", type=int, default=SpeculationParams.width)
    parser.add_argument("--children", type=int, default=SpeculationParams.children)
    parser.add_argument("--max-depth", type=int, default=SpeculationParams.max_depth)
    parser.add_argument("--recall", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--reuse", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--resident", type=int, default=0, metavar="N", help="layers without a shadow")
    args = parser.parse_args()
    engine = Engine.load(args.model, draft=args.draft, dtype=args.dtype)
    if args.resident:
        engine = with_residents(engine, int(args.draft.partition(":")[2] or DEFAULT_BITS), args.resident)
    if engine.draft.decoder is None:
        sys.exit("Error: no draft to measure; give --draft PATH")
    prompts = builtin.prompts()[: args.max_prompts]
    rows: list[Row] = []
    print(f"{len(prompts)} held-out prompts x {args.max_new_tokens} tokens")
    print(f"{'temperature':>11}  {'scoring':<8}  {'budget':>6}  tokens per pass (worst, best prompt)  sharpness")
    for temperature in map(float, args.temperatures.split(",")):
        for scoring in args.scorings.split(","):
            for budget in map(int, args.budgets.split(",")):
                speculation = SpeculationParams(
                    budget,
                    scoring=scoring,
                    width=args.width,
                    children=args.children,
                    max_depth=args.max_depth,
                    lookup=False,  # only the model drafts
                    reuse=args.reuse,
                    recall=args.recall and scoring == "coupled",  # SpecExec does not correct the draft
                )
                row = measure(engine, prompts, temperature, speculation, args.max_new_tokens)
                rows.append(row)
                spread = f"({row.worst_prompt:.2f}, {row.best_prompt:.2f})"
                print(
                    f"{row.temperature:>11g}  {row.scoring:<8}  {row.budget:>6}  {row.tokens_per_pass:>15.2f} "
                    f"{spread:<21}"
                    f"  {row.sharpness:>9.2f}",
                    flush=True,
                )
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
