"""Tokens per pass of drafts on held-out prompts, and how often a guess is right by its depth in the tree.

    python -m benchmarks.drafts.heads [--model builtin] --draft head:eagle3 --draft head:medusa --draft self

Every text is compared with plain decoding's. Tokens per pass do not depend on the machine's speed. Guessers are off,
unless the draft is `lookup`; recall is on. The last line of each draft says, at the largest budget, what share of the
walks that came to a depth went on to the next one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.scheduler.tree import TokenTree
from offspec.scheduler.verify import Verdict

DEEPEST = 10


def ids_of(engine: Engine, prompt: str, params: SamplingParams, speculation: SpeculationParams) -> list[int]:
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


class Measured:
    """Passes, tokens, and the lengths of accepted paths."""

    def __init__(self) -> None:
        self.lengths = Counter[int]()

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        if len(tree):
            self.lengths[len(verdict.path)] += 1

    def shares(self) -> list[float]:
        """Of the walks that came to depth d, how many went on; for d from 0."""
        reached = [sum(n for length, n in self.lengths.items() if length >= d) for d in range(DEEPEST + 1)]
        return [after / before for before, after in pairwise(reached) if before >= 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--budgets", default="16,64")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--max-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    prompts, plain = builtin.prompts()[: args.max_prompts], SpeculationParams(budget=0)
    for name in args.draft:
        engine = Engine.load(args.model, draft=name, device="cpu", dtype="fp32")
        for temperature in map(float, args.temperatures.split(",")):
            for budget in map(int, args.budgets.split(",")):
                speculation = SpeculationParams(budget, lookup=name == "lookup")
                fresh, measured, num_tokens, num_passes = engine.with_draft(engine.draft), Measured(), 0, 0
                for seed, prompt in enumerate(prompts):
                    params = SamplingParams(args.max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True)
                    steps = list(fresh.generate(prompt, params, speculation, observer=measured.observe))
                    found = [token for step in steps for token in step.token_ids]
                    assert found == ids_of(engine, prompt, params, plain), f"{name}: the text differs"
                    num_tokens, num_passes = num_tokens + len(found), num_passes + len(steps)
                print(f"{name:<40} T {temperature:g}  {budget:>3} nodes  {num_tokens / num_passes:.2f}", flush=True)
            shares = " ".join(f"{share:.0%}" for share in measured.shares())
            print(
                f"{name:<40} T {temperature:g}  {budget:>3} nodes  went on from depth 0, 1, ...: {shares}", flush=True
            )


if __name__ == "__main__":
    main()
