"""Texts that repeat their prompt do, and lookup finds it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from benchmarks.scheduling.repetition import KINDS, recordings
from benchmarks.scheduling.schedulers import Bench
from offspec import Engine, SpeculationParams


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("builtin", dtype="fp32", device="cpu") as loaded:
        yield loaded


@pytest.mark.slow
def test_an_edit_renames_one_name_and_nothing_else() -> None:
    for prompt, answer in islice(KINDS["edit"](), 4):
        source, asked = prompt.split("\n\n# The same with ")
        old, new = asked.removesuffix(".\n\n").split(" renamed to ")
        assert answer != source
        assert answer.replace(new, old) == source


@pytest.mark.slow
def test_an_outline_quotes() -> None:
    for prompt, answer in islice(KINDS["outline"](), 4):
        for line in answer.splitlines():
            assert line.split('): "', 1)[1].rstrip('"') in prompt


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_lookup_in_the_tree_gains_where_text_repeats(engine: Engine, kind: str) -> None:
    made = recordings(engine, kind, 1, 16)
    assert made[0].limit == len(made[0].token_ids) <= 16
    bench = Bench(engine, made)
    alone, merged = (
        bench.row("", SpeculationParams(16, lookup=lookup, overlap=False), "card") for lookup in (False, True)
    )
    assert merged.tokens_per_pass > 1.2 * alone.tokens_per_pass
