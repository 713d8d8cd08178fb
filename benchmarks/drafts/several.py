"""A draft with and without smaller ones that guess for it (`--draft B --draft C`): tokens per pass, rounds, tokens/s.

    python -m benchmarks.drafts.several [--model builtin] [--drafts shadow:4,builtin] [--dtype bf16]
        [--round-s 0.1] [--guess-share 0.12] [--budgets 64,auto] [--prompts 6] [--tokens 64]

Drafts are replayed along recorded texts of plain decoding. A virtual clock counts a pass as the card's (0.9 s up to 500
rows, or `--pass-s`), a round of the first draft as `--round-s`, and one of the others as `--guess-share` of that.
`rounds`: of the first draft, per pass, those during the pass included; `drafting`: the share of the time in which the
target waits for drafts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.lab.several import SeveralDrafts

from ..methods import Method, replayed
from ..scheduling.replay import Costs, Recording, record


@dataclass(frozen=True)
class Row:
    """One draft, or several, over all prompts."""

    draft: str
    temperature: float
    budget: int | None
    tokens_per_pass: float
    rounds_per_pass: float
    draft_share: float
    tokens_per_s: float

    def __str__(self) -> str:
        budget = "auto" if self.budget is None else str(self.budget)
        return (
            f"{self.temperature:>11g}  {budget:>6}  {self.tokens_per_pass:>8.2f}  {self.rounds_per_pass:>6.1f}  "
            f"{self.draft_share:>8.1%}  "
            f"{self.tokens_per_s:>8.3f}  {self.draft}"
        )


def measure(
    engine: Engine, speculation: SpeculationParams, recordings: Sequence[Recording], costs: Costs, guess_share: float
) -> Row:
    name, budget = str(engine.draft_name), speculation.budget
    method = Method(name, True, speculation)
    found = replayed(engine, method, recordings, costs, guess_share)
    temperature, rounds = recordings[0].params.temperature, found.num_rounds / found.num_passes
    share = found.draft_s / found.total_s
    return Row(name, temperature, budget, found.tokens_per_pass, rounds, share, found.tokens_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafts", default="shadow:4,builtin", help="the first scores what the others guess")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--budgets", default="64,auto")
    parser.add_argument("--pass-s", type=float, default=Costs.stream_s)
    parser.add_argument("--round-s", type=float, default=Costs.round_launch_s)
    parser.add_argument("--guess-share", type=float, default=0.3)
    parser.add_argument("--no-overlap", action="store_true", help="do not draft during the pass")
    parser.add_argument("--folder", type=Path, default=Path("build/recordings"), help="folder for recorded texts")
    args = parser.parse_args()
    engine, rows = Engine.load(args.model, draft=args.drafts.split(","), device="cpu", dtype=args.dtype), list[Row]()
    several = engine.draft
    if not isinstance(several, SeveralDrafts):
        parser.error("give several drafts: --drafts B,C")
    costs = Costs(args.pass_s, pass_row_s=args.pass_s / 500, round_launch_s=args.round_s)
    budgets = [None if word == "auto" else int(word) for word in args.budgets.split(",")]
    print("temperature  budget  tok/pass  rounds  drafting     tok/s  draft")
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(args.tokens, temperature, seed=0, ignore_eos=True)
        recordings = record(engine, builtin.prompts()[: args.prompts], params, args.folder)
        for budget in budgets:
            for draft in (several.first, *several.others, several):
                share = args.guess_share if draft in several.others else 1.0
                own = replace(costs, round_launch_s=share * args.round_s)
                speculation = SpeculationParams(budget, overlap=not args.no_overlap)
                found = measure(engine.with_draft(draft), speculation, recordings, own, args.guess_share)
                rows.append(found)
                print(found, flush=True)
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
