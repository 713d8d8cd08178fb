"""How often the host waits for a GPU, and what the copy engine brings, in a request whose layers are streamed.

Between its first and its last kernel a pass waits for nothing but its layers. Whatever else the host waits for, it
waits for once a pass, once a token, or once a round of the draft. The copy engine brings layers and nothing else:
a few bytes would wait behind them for tens of milliseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from offspec import Constraint, Engine, SamplingParams, SpeculationParams
from offspec.model.decoder import Decoder
from offspec.scheduler.drafting.child_scores import ChildScorer

from ..pretend_streams import Machine

NUM_TOKENS, NUM_SLOTS = 5, 2
REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(NUM_TOKENS, ignore_eos=True),
    # A row's distribution depends on its path, too.
    "paths": SamplingParams(
        NUM_TOKENS,
        temperature=1.0,
        top_p=0.9,
        repetition_penalty=1.2,
        seed=3,
        constraint=Constraint.json_object(),
    ),
}
LAYERS = "loaders/streaming/link.py _copy"
# Waits by where they are. A layer is waited for when the next one's kernels are about to be queued.
LAYER, PASS, TOKEN, ROUND, NUCLEUS = (
    "loaders/streaming/link.py leave",
    "offspec/model/decoder.py synchronize",
    "scheduler/trees/sampling.py choose",
    "scheduler/drafting/child_scores.py score",
    "scheduler/trees/sampling.py _nucleus",
)
# For kernels that have read earlier data from page-locked memory, which are long over.
TRANSFER, STATIC_ROUND = "loaders/streaming/small_transfers.py _send", "offspec/model/cuda_graphs.py put"
PER_PASS, PER_ROUND = 6, 2  # of the former, at most
PER_PATH = 2  # of penalties and constraints, for each token and each round, and each pass


@dataclass(frozen=True)
class Counted:
    """A request's passes, tokens and rounds of the draft, and by functions of the project its waits and copies.

    waits_inside: those while the target's layers are queued.
    """

    passes: int
    tokens: int
    rounds: int
    waits: dict[str, int]
    waits_inside: dict[str, int]
    copies: dict[str, int]


def counted(engine: Engine, machine: Machine, params: SamplingParams) -> Counted:
    """Of an engine's second text or a later one, because the first one measures."""
    speculation, counts = SpeculationParams(8), machine.counts
    rounds, inside = list[int](), Counter[str]()
    score, through = ChildScorer.score, Decoder.through

    def counting(self: ChildScorer, *args: Any) -> Any:
        rounds.append(1)
        return score(self, *args)

    def watching(self: Decoder, *args: Any) -> Any:
        before = counts.waits.copy()
        hidden = through(self, *args)
        if self is engine.target:
            inside.update({place: number for (place, stream), number in (counts.waits - before).items() if not stream})
        return hidden

    counts.waits.clear()
    counts.copies.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChildScorer, "score", counting)
        patch.setattr(Decoder, "through", watching)
        *_, last = engine.generate("for item in", params, speculation)
    waits = Counter[str]()
    for (place, _), number in counts.waits.items():
        waits[place] += number
    stats = last.stats
    return Counted(stats.num_passes, stats.num_tokens, len(rounds), waits, inside, dict(counts.copies))


def check(counts: Counted, name: str, num_layers: int) -> None:
    """Of one of REQUESTS, with all layers in RAM."""
    passes, tokens, rounds = counts.passes, counts.tokens, counts.rounds
    assert rounds >= passes > 1
    assert {place: counts.waits[place] for place in (LAYER, PASS, TOKEN, ROUND)} == {
        LAYER: num_layers * passes,
        PASS: passes,
        TOKEN: tokens,
        ROUND: rounds,
    }
    assert counts.waits.get(NUCLEUS, 0) <= (2 * (tokens + rounds) if name == "paths" else 0)
    assert counts.waits.get(STATIC_ROUND, 0) <= rounds
    num_transfers = PER_PASS * passes + PER_ROUND * rounds
    if name == "paths":
        num_transfers += 2 * PER_PATH * (passes + tokens + rounds)  # of penalties and of constraints
    assert counts.waits.get(TRANSFER, 0) <= num_transfers
    assert counts.waits.keys() <= {LAYER, PASS, TOKEN, ROUND, NUCLEUS, STATIC_ROUND, TRANSFER}
    assert counts.waits_inside == {LAYER: num_layers * passes}
    assert counts.copies.keys() == {LAYERS}
    assert num_layers * passes - NUM_SLOTS <= counts.copies[LAYERS] <= num_layers * passes + NUM_SLOTS
