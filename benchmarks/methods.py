"""Tokens per pass of the methods that a run can choose, with one target: greedy and at temperature 1.

    python -m benchmarks.methods [--model builtin] [--draft auto] [--prompts 8] [--tokens 64] [--budget 64]

Every pass counts, including the first. Tokens per pass do not depend on the machine's speed. Texts are those of plain
decoding, but in lossy rows. All trees have `--budget` nodes, lossy ones a beam of 8 times 8. Prints a Markdown table;
the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.without_model import LookupDraft
from offspec.scheduler.blend import WAYS

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Method:
    """A method: its name, whether the draft model drafts, and its settings."""

    name: str
    has_model: bool
    speculation: SpeculationParams


@dataclass(frozen=True)
class Row:
    """A method's tokens per pass at each temperature; None where it is refused."""

    name: str
    tokens_per_pass: list[float | None]

    def __str__(self) -> str:
        return f"| {self.name} | " + " | ".join(
            "\N{EN DASH}" if each is None else f"{each:.2f}" for each in self.tokens_per_pass
        )


def methods(budget: int) -> Iterator[Method]:
    """Exact ones first. Each draws on what the ones above it have, where that makes sense."""
    alone = {"lookup": False, "recall": False}
    yield Method("plain decoding", False, SpeculationParams(0))
    yield Method("lookup and token recycling, no draft model", False, SpeculationParams(budget))
    for tree in ("sequoia", "opt-tree"):
        params = SpeculationParams(budget, scoring="specexec", tree=tree, **alone)
        yield Method(f"draft model, `--tree {tree}`", True, params)
    yield Method("draft model, SpecExec's scoring", True, SpeculationParams(budget, scoring="specexec", **alone))
    yield Method("draft model, shared noise and sharpness", True, SpeculationParams(budget, **alone))
    yield Method("the same, with recall", True, SpeculationParams(budget, lookup=False))
    yield Method("the same, with recall and lookup (the default)", True, SpeculationParams(budget))
    yield Method("the same, with token recycling too", True, SpeculationParams(budget, recycling=True))
    for accept in ("joint", *WAYS):
        yield Method(f"`--accept {accept}`, lossy", True, SpeculationParams(accept=accept, beam=8, gamma=8))


def measure(
    engine: Engine, method: Method, prompts: Sequence[str], num_tokens: int, temperature: float
) -> float | None:
    """Tokens per pass over all prompts, prompt i with seed i; None for joint acceptance with a temperature."""
    if method.speculation.accept == "joint" and temperature > 0:
        return None
    fresh = engine.with_draft(engine.draft if method.has_model else LookupDraft())
    tokens = passes = 0
    for index, prompt in enumerate(prompts):
        params = SamplingParams(num_tokens, temperature, seed=index, ignore_eos=True)
        *_, last = fresh.generate(prompt, params, method.speculation)
        tokens, passes = tokens + last.stats.num_tokens, passes + last.stats.num_passes
    return tokens / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--only", default="", help="methods whose name contains this")
    args = parser.parse_args()
    engine, rows = Engine.load(args.model, draft=args.draft, device="cpu", dtype="fp32"), list[Row]()
    prompts = builtin.prompts()[: args.prompts]
    print(f"{engine.name}, draft {engine.draft_name}: {len(prompts)} prompts x {args.tokens} tokens\n")
    print("| | greedy | temperature 1 |\n|---|---|---|", flush=True)
    for method in methods(args.budget):
        if args.only in method.name and (not method.has_model or engine.draft.decoder is not None):
            found = [measure(engine, method, prompts, args.tokens, temperature) for temperature in TEMPERATURES]
            rows.append(Row(method.name, found))
            print(f"{rows[-1]} |", flush=True)
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
