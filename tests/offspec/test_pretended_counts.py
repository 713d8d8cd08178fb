"""How often the host waits for a GPU, and what the copy engine brings, in a request whose layers are streamed.

Between its first and its last kernel a pass waits for nothing but its layers. Whatever else the host waits for, it
waits for once a pass, once a token, or once a round of the draft. The copy engine brings layers and nothing else:
a few bytes would wait behind them for tens of milliseconds.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from offspec import Constraint, Engine, SamplingParams, SpeculationParams
from offspec.model.cuda_graphs import MIN_KEYS
from offspec.model.decoder import Decoder
from offspec.scheduler.drafting.child_scores import ChildScorer

from ..pretend_cuda import in_own_process, pretended_cuda
from ..pretend_streams import Machine
from .test_pretended_cuda import build, in_ram, load, slow_passes

NUM_TOKENS, NUM_LAYERS, NUM_SLOTS = 6, 3, 2
REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(NUM_TOKENS, ignore_eos=True),
    "top-p": SamplingParams(NUM_TOKENS, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True),
    "repetition": SamplingParams(NUM_TOKENS, repetition_penalty=1.2, ignore_eos=True),
    "JSON": SamplingParams(NUM_TOKENS, constraint=Constraint.json_object()),
}
WITH_PATHS = ("repetition", "JSON")  # what a row's distribution depends on, beside its logits
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
    """Of the second text, because the first one measures."""
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

    list(engine.generate("def area(", replace(params, max_new_tokens=2), speculation))
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


def main(folder: Path) -> None:
    """What each of REQUESTS takes, as JSON."""
    build(folder, ["plain"], NUM_LAYERS)
    guard = folder / "guard.so"
    with pretended_cuda(guard) as machine, slow_passes(), load(folder, "plain", "cuda:0", in_ram, MIN_KEYS) as engine:
        found = {name: vars(counted(engine, machine, params)) for name, params in REQUESTS.items()}
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    """Of each of REQUESTS."""
    results = in_own_process("tests.offspec.test_pretended_counts", tmp_path_factory.mktemp("counts"))
    return {name: Counted(**values) for name, values in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_the_host_waits_once_for_each_result(found: dict[str, Counted], name: str) -> None:
    counts = found[name]
    passes, tokens, rounds = counts.passes, counts.tokens, counts.rounds
    assert rounds >= passes > 1
    assert {place: counts.waits[place] for place in (LAYER, PASS, TOKEN, ROUND)} == {
        LAYER: NUM_LAYERS * passes,
        PASS: passes,
        TOKEN: tokens,
        ROUND: rounds,
    }
    assert counts.waits.get(NUCLEUS, 0) <= (2 * (tokens + rounds) if name == "top-p" else 0)
    assert counts.waits.get(STATIC_ROUND, 0) <= rounds
    num_transfers = PER_PASS * passes + PER_ROUND * rounds
    if name in WITH_PATHS:
        num_transfers += PER_PATH * (passes + tokens + rounds)
    assert counts.waits.get(TRANSFER, 0) <= num_transfers
    assert counts.waits.keys() <= {LAYER, PASS, TOKEN, ROUND, NUCLEUS, STATIC_ROUND, TRANSFER}
    assert counts.waits_inside == {LAYER: NUM_LAYERS * passes}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_the_copy_engine_brings_layers_only(found: dict[str, Counted], name: str) -> None:
    counts = found[name]
    assert counts.copies.keys() == {LAYERS}
    assert NUM_LAYERS * counts.passes - NUM_SLOTS <= counts.copies[LAYERS] <= NUM_LAYERS * counts.passes + NUM_SLOTS


if __name__ == "__main__":
    main(Path(sys.argv[1]))
