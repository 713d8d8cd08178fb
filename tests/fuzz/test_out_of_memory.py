"""Memory that runs out in the middle of a batch, by seeds: each text is whole, or ends in one line; nothing is lost."""

from __future__ import annotations

import os
import random
from contextlib import closing
from typing import Any

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.drafts import model_draft
from offspec.errors import MemoryLimitError, OffspecError
from offspec.model.memory.sequence_cache import SequenceCache
from offspec.running import passes
from offspec.running.batch import Batch
from offspec.running.sequence import Sequence

from ..assumed_rates import assumed_rates  # noqa: F401 (for this module)
from ..offspec.planning.test_out_of_memory import Scarce
from ..pair import Pair, build_pair

NUM_CASES = int(os.environ.get("FUZZ_CASES", "2"))
PLAIN, SPECULATION = SpeculationParams(budget=0), SpeculationParams(budget=8)
PROMPTS = ("def area(", "class Tree:\n    def", "import", "for i in range(10):\n    print(i)\n" * 2)
SAMPLING = [SamplingParams(10, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))]
PLACES: tuple[tuple[Any, str], ...] = (
    (passes, "score_together"),
    (SequenceCache, "keep"),
    (SequenceCache, "reserve"),
    (model_draft, "CachedDecoder"),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), 4, max_position_embeddings=256)


def load(pair: Pair, draft: str) -> Engine:
    return Engine.load(str(pair.target), draft=draft, device="cpu", texts=4)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    with load(pair, "none") as engine:
        return [
            [token for step in engine.generate(prompt, params, PLAIN) for token in step.token_ids]
            for prompt, params in zip(PROMPTS, SAMPLING, strict=True)
        ]


def outcomes(engine: Engine, chance: random.Random) -> list[list[int] | OffspecError]:
    """Of all texts, some of which join in the middle: the tokens, or the error."""
    found, tickets = dict[Sequence, list[int]](), list[Sequence]()
    errors = dict[Sequence, OffspecError]()
    with closing(Batch(engine.models)) as batch:
        while len(tickets) < len(PROMPTS) or not batch.is_idle:
            if (number := len(tickets)) < len(PROMPTS) and (batch.is_idle or chance.random() < 0.6):
                tickets.append(batch.add(engine.check_request(PROMPTS[number], SAMPLING[number], SPECULATION)))
                found[tickets[-1]] = []
            for ticket, outcome in batch.step():
                if isinstance(outcome, OffspecError):
                    errors[ticket] = outcome
                else:
                    found[ticket] += outcome.token_ids
    return [errors.get(ticket, found[ticket]) for ticket in tickets]


@pytest.mark.slow
def test_a_batch_outlives_memory_that_runs_out(pair: Pair, expected: list[list[int]]) -> None:
    num_refused = num_whole = 0
    for seed in range(NUM_CASES):
        chance = random.Random(seed)
        with load(pair, str(pair.draft) if chance.random() < 0.7 else "lookup") as engine:
            owner, name = chance.choice(PLACES)
            failing = {chance.randint(1, 12)} | ({chance.randint(1, 12)} if chance.random() < 0.4 else set())
            case = f"case {seed}: {name} fails at {sorted(failing)}"
            with pytest.MonkeyPatch.context() as patch:
                Scarce(patch, owner, name, failing)
                try:
                    found = outcomes(engine, chance)
                except MemoryLimitError as exc:  # of caches that are made before anything runs
                    found = [exc] * len(PROMPTS)
                except Exception as exc:
                    raise AssertionError(case) from exc
            for text, right in zip(found, expected, strict=True):
                if isinstance(text, list):
                    assert text == right, case
                    num_whole += 1
                else:
                    assert isinstance(text, MemoryLimitError), (case, text)
                    assert len(str(text).splitlines()) == 1, (case, text)
                    num_refused += 1
            _check_that_it_goes_on(engine, chance, expected, case)
    assert num_whole > num_refused


def _check_that_it_goes_on(engine: Engine, chance: random.Random, expected: list[list[int]], case: str) -> None:
    """With the right texts, unless the weights could not be loaded again, which is then said."""
    try:
        engine.loaded.check()
    except MemoryLimitError:
        return
    assert outcomes(engine, chance) == expected, case
