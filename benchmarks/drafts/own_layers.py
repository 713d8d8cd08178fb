"""Tokens per pass of drafts that need no other model: shadows, resident layers, early exits, lookup.

    python -m benchmarks.drafts.own_layers [--model builtin] [--resident 3] [--exit-layer 2] [--dtype bf16]
        [--drafts shadow:4,shadow:3,shadow:2,resident,exit,lookup] [--budgets 64,256] [--temperatures 0,1]
        [--prompts 27] [--tokens 128]

The whole target is in memory. A shadow copies all layers but `--resident` of them; `resident` drafts with these layers
alone, and `exit` with the first layers. Only the draft proposes: a model without lookup, lookup without a model.
Tokens per pass do not depend on the machine's speed, so one run is enough. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.acceptance import measure
from offspec import Engine, SpeculationParams, builtin
from offspec.checkpoints.opening import ModelFiles
from offspec.checkpoints.shadows import Shadow, find_shadow, make_shadow
from offspec.drafts.base import Draft
from offspec.drafts.layer_drafts import SHADOW, LayersOfTarget, load_shadow
from offspec.drafts.self_draft import SelfDraft
from offspec.drafts.without_model import LookupDraft
from offspec.loaders.streaming.placement import spread
from offspec.loaders.streaming.weights import LayerView
from offspec.model.early_exit import EarlyExit
from offspec.model.layer_draft import LayerDraft

RESIDENT = "resident"  # the layers that have no shadow, alone
DRAFTS = ("shadow:4", "shadow:3", "shadow:2", RESIDENT, "exit", LookupDraft.NAME)


@dataclass(frozen=True)
class Row:
    """One draft over all prompts, with trees of `budget` nodes. layers: as the draft's name says."""

    draft: str
    temperature: float
    budget: int
    tokens_per_pass: float
    worst_prompt: float
    best_prompt: float


def draft_of(engine: Engine, kind: str, resident: Sequence[int], exit_layer: int) -> Draft:
    """A draft of the engine's target, all of whose layers are in memory."""
    assert engine.plan is not None
    files, target = engine.plan.demand.target, engine.target
    layers = range(target.config.num_layers)
    if kind.startswith(SHADOW):
        shadow = _shadow(files, int(kind.partition(":")[2]))
        return load_shadow(shadow, target, set(layers) - set(resident))
    if kind == LookupDraft.NAME:
        return LookupDraft()
    if kind == RESIDENT:
        view = LayerView(target.weights, resident, target.weights.scratch)
        return LayersOfTarget(LayerDraft(target, resident, view), f"{kind} ({len(resident)} of {len(layers)} layers)")
    return SelfDraft(EarlyExit(target, exit_layer, None), f"{kind} ({exit_layer} of {len(layers)} layers)")


def _shadow(files: ModelFiles, bits: int) -> Shadow:
    found = find_shadow(files, bits)
    if found is None:
        make_shadow(files, bits)
        found = find_shadow(files, bits)
    assert found is not None
    return found


def rows(engine: Engine, kind: str, draft: Draft, args: argparse.Namespace) -> Iterator[Row]:
    """One draft at all temperatures and budgets."""
    drafting, is_lookup = engine.with_draft(draft), kind == LookupDraft.NAME
    prompts = builtin.prompts()[: args.prompts]
    for temperature in map(float, args.temperatures.split(",")):
        for budget in map(int, args.budgets.split(",")):
            speculation = SpeculationParams(budget, lookup=is_lookup, recycling=is_lookup)
            found = measure(drafting, prompts, temperature, speculation, args.tokens)
            name = draft.name or kind
            yield Row(name, temperature, budget, found.tokens_per_pass, found.worst_prompt, found.best_prompt)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--resident", type=int, default=0, metavar="N", help="layers without a shadow")
    parser.add_argument("--exit-layer", type=int, default=2, metavar="N")
    parser.add_argument("--budgets", default="64,256")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--prompts", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16"))
    args = parser.parse_args(arguments)
    engine = Engine.load(args.model, draft="none", dtype=args.dtype)
    resident = spread(engine.target.config.num_layers, args.resident)
    found: list[Row] = []
    print(f"{engine.name}, {args.tokens} tokens per prompt")
    print(f"{'draft':<32}  temperature  budget  tokens per pass (worst, best prompt)")
    for kind in args.drafts.split(","):
        for row in rows(engine, kind, draft_of(engine, kind, resident, args.exit_layer), args):
            found.append(row)
            spans = f"({row.worst_prompt:.2f}, {row.best_prompt:.2f})"
            line = f"{row.draft:<32}  {row.temperature:>11g}  {row.budget:>6}  {row.tokens_per_pass:>15.2f} {spans}"
            print(line, flush=True)
    print(json.dumps({"model": engine.name, "rows": [asdict(row) for row in found]}))


if __name__ == "__main__":
    main()
