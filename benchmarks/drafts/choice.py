"""What a choice among prepared drafts could bring: the best draft of all texts, and the best one of each text.

    python -m benchmarks.drafts.choice [--model builtin] [--draft builtin] [--tokens 96] [--pass-s 2.5,0.35] [--texts 9]

Texts of three kinds (code, prose, JSON); greedy, 64 nodes, a small model, lookup, and the target's own layers.
Seconds are calculated: passes, and the rounds of each draft at what `offspec plan` predicts for a 32B model in bf16 on
a 4090. All drafts are in memory, so a pass takes as long with each of them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from unittest.mock import patch

from benchmarks.drafts.own_layers import draft_of
from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.recall import RecallingText

BUDGET, EXIT_LAYER, NUM_CODE = 64, 4, 3
ROUND_S = {"small model": 0.012, "shadow:4": 0.046, "exit": 0.0144, "lookup": 0.0}
PROSE = (
    "# This module keeps the history of a conversation. The first part describes how messages are stored, and why\n# ",
    '"""The following text explains the rules of the game. Each player',
    "# Once upon a time there was a small village near the sea, where people",
)
JSON = (
    'CONFIG = {\n    "name": "example",\n    "version": "1.0.0",\n    "items": [\n'
    '        {"id": 1, "name": "first", "value": 10},\n        {"id": 2, "name": "second", "value": 20},\n',
    '{"users": [{"id": 1, "email": "a@example.com", "roles": ["admin"]}, {"id": 2, "email": "b@example.com",',
    'DATA = [{"x": 0, "y": 0}, {"x": 1, "y": 1}, {"x": 2, "y": 4},',
)


def passes_and_rounds(engine: Engine, prompt: str, num_tokens: int, *, recycling: bool) -> tuple[int, int]:
    """Passes of the target and rounds of the draft for one text."""
    rounds, score = list[int](), RecallingText.score

    def counted(self: RecallingText, *args: object) -> object:
        rounds.append(1)
        return score(self, *args)  # type: ignore[arg-type]

    speculation = SpeculationParams(BUDGET, overlap=False, recycling=recycling)
    with patch.object(RecallingText, "score", counted):
        params = SamplingParams(num_tokens, seed=0, ignore_eos=True)
        *_, last = engine.generate(prompt, params, speculation)
    return last.stats.num_passes, len(rounds)


def gain(counts: Sequence[Mapping[str, tuple[int, int]]], names: Sequence[str], pass_s: float) -> tuple[str, float]:
    """The draft that is fastest over all texts, and how much faster the fastest one of each text is: 0.1 is 10 %."""
    seconds = [{name: count[name][0] * pass_s + count[name][1] * ROUND_S[name] for name in names} for count in counts]
    totals = {name: sum(each[name] for each in seconds) for name in names}
    best = min(totals, key=lambda name: totals[name])
    return best, totals[best] / sum(min(each.values()) for each in seconds) - 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="builtin", help="the small model")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pass-s", default="2.5,0.35", help="seconds of a pass")
    parser.add_argument("--texts", type=int, default=9)
    args = parser.parse_args(arguments)
    base = Engine.load(args.model, draft=args.draft, dtype="fp32", device="cpu")
    engines = {name: base.with_draft(draft_of(base, name, (), EXIT_LAYER)) for name in ROUND_S if name != "small model"}
    engines = {"small model": base, **engines}
    counts = list[dict[str, tuple[int, int]]]()
    for prompt in [*builtin.prompts()[:NUM_CODE], *PROSE, *JSON][: args.texts]:
        each = {
            name: passes_and_rounds(engine, prompt, args.tokens, recycling=name == "lookup")
            for name, engine in engines.items()
        }
        counts.append(each)
        print(prompt[:24].encode(), *(f"{name} {p} passes, {r} rounds;" for name, (p, r) in each.items()), flush=True)
    gains = []
    for pass_s in map(float, args.pass_s.split(",")):
        for names in (list(ROUND_S), [name for name in ROUND_S if name != "lookup"]):
            best, share = gain(counts, names, pass_s)
            gains.append({"pass_s": pass_s, "drafts": names, "best": best, "gain": share})
            print(f"{pass_s} s a pass, {', '.join(names)}: best {best}, the best of each text +{share:.1%}")
    print(json.dumps({"counts": counts, "gains": gains}))


if __name__ == "__main__":
    main()
