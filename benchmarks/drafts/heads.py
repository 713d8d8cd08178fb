"""Tokens per pass of drafts on held-out prompts, and how often a guess is right by its depth in the tree.

    python -m benchmarks.drafts.heads [--model builtin] --draft head:eagle3 --draft head:medusa --draft self
    python -m benchmarks.drafts.heads --draft head:eagle3 --depths 1,2,4,6,8,10

Every text is compared with plain decoding's. Tokens per pass do not depend on the machine's speed, unless a budget is
`auto`. Guessers are off, unless the draft is `lookup`; recall is on without `--no-recall`. `levels` is how deep the
trees are on average. The shares say how many of the walks that came to depth 0, 1, ... went on to the next one. MB is
the memory that the plan counts for the draft, its KV entries included.

With `--depths`, instead of budgets: chains of so many tokens, and trees of 64 nodes that are at most so deep.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.tools.draft_gain import Walks

DEPTHS_BUDGET = 64  # nodes of the trees of `--depths`
OF_THE_TARGET = {"program", "KV cache", "activations", "head", "unpacking", "embedding"}


class Texts:
    """Plain decoding's texts, each computed once."""

    def __init__(self, max_new_tokens: int) -> None:
        self._count, self._known = max_new_tokens, dict[tuple[str, float], list[int]]()

    def params(self, temperature: float, seed: int) -> SamplingParams:
        return SamplingParams(self._count, temperature=temperature, seed=seed, ignore_eos=True)

    def plain(self, engine: Engine, prompt: str, params: SamplingParams) -> list[int]:
        key = (prompt, params.temperature)
        if key not in self._known:
            steps = engine.generate(prompt, params, SpeculationParams(budget=0))
            self._known[key] = [token for step in steps for token in step.token_ids]
        return self._known[key]


def measure(
    engine: Engine, prompts: Sequence[str], texts: Texts, temperature: float, speculation: SpeculationParams
) -> tuple[float, Walks]:
    """Tokens per pass, with calibration and recall from scratch. Asserts that each text is plain decoding's."""
    fresh, walks, num_tokens, num_passes = engine.with_draft(engine.draft), Walks(), 0, 0
    for seed, prompt in enumerate(prompts):
        params = texts.params(temperature, seed)
        steps = list(fresh.generate(prompt, params, speculation, observer=walks.observe))
        found = [token for step in steps for token in step.token_ids]
        assert found == texts.plain(engine, prompt, params), "the text differs from plain decoding's"
        num_tokens, num_passes = num_tokens + len(found), num_passes + len(steps)
    return num_tokens / num_passes, walks


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--budgets", default="16,64", help="numbers of nodes, or auto")
    parser.add_argument("--depths", default="", help="measure chains and trees of these depths instead of budgets")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--no-recall", action="store_true", help="measure drafts without corrections by recall")
    parser.add_argument("--max-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    asked = parser.parse_args(args)
    prompts, texts = builtin.prompts()[: asked.max_prompts], Texts(asked.max_new_tokens)
    for name in asked.draft:
        engine = Engine.load(asked.model, draft=name, device="cpu", dtype="fp32")
        print(f"{name}: {draft_bytes(engine) / 1e6:.1f} MB", flush=True)
        for temperature in map(float, asked.temperatures.split(",")):
            for shape, speculation in shapes(asked):
                speculation = replace(speculation, lookup=name == "lookup", recall=not asked.no_recall)
                tokens, walks = measure(engine, prompts, texts, temperature, speculation)
                shares = " ".join(f"{share:.0%}" for share in walks.shares())
                said = f"{tokens:6.2f}   levels {walks.mean_levels:4.1f}   went on: {shares}"
                print(f"{name:<24} T {temperature:g} {shape:>11} {said}", flush=True)
        engine.close()


def shapes(asked: argparse.Namespace) -> Iterator[tuple[str, SpeculationParams]]:
    """The trees to measure, by their names."""
    if not asked.depths:
        for budget in asked.budgets.split(","):
            yield f"{budget} nodes", SpeculationParams(None if budget == "auto" else int(budget))
        return
    depths = [int(depth) for depth in asked.depths.split(",")]
    for depth in depths:
        yield f"chain of {depth}", SpeculationParams(depth, width=1, children=1, max_depth=depth)
    for depth in depths:
        yield f"tree, {depth} deep", SpeculationParams(DEPTHS_BUDGET, max_depth=depth)


def draft_bytes(engine: Engine) -> int:
    """What the plan counts beside the target's own needs."""
    assert engine.plan is not None
    return sum(item.on_device for item in engine.plan.placement.items if item.name not in OF_THE_TARGET)


if __name__ == "__main__":
    main()
