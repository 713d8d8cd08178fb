"""Engines whose residents lie in oneDNN's order: the same text, and a draft that learns is left as it is."""

from __future__ import annotations

import pytest

from offspec import Engine, SamplingParams, SpeculationParams, planning
from offspec.loaders.blocked import BlockedMatrix

from ..pair import Pair, build_pair

PARAMS = SamplingParams(24, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def _wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a layer of these models were worth it."""
    monkeypatch.setattr(planning, "LEAST_BLOCKED_BYTES", 0)
    monkeypatch.setattr(planning, "LEAST_BLOCKING_GAIN", 0.0)
    if planning.measure_blocking(planning.BLOCKED_DTYPES[0], shape=(64, 64), seconds=0.01) == 0.0:
        pytest.skip("this torch or processor has no such order")


def load(pair: Pair, dtype: str = "bf16", **options: bool) -> Engine:
    return Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype=dtype, **options)


def is_blocked(engine: Engine) -> tuple[bool, bool]:
    """Target and draft."""
    assert engine.draft is not None
    found = []
    for decoder in (engine.target, engine.draft):
        with decoder.weights.layer(0) as layer:
            found.append(isinstance(layer["mlp.up_proj.weight"], BlockedMatrix))
    return found[0], found[1]


def text(engine: Engine, budget: int | None) -> list[int]:
    steps = engine.generate("def area(", PARAMS, SpeculationParams(budget))
    return [token for step in steps for token in step.token_ids]


@pytest.mark.usefixtures("_wanted")
def test_text_is_plain_decodings(pair: Pair) -> None:
    engine = load(pair)
    assert is_blocked(engine) == (True, True)
    assert any("oneDNN" in note.text for note in engine.notes)
    assert text(engine, 16) == text(engine, 0)


@pytest.mark.usefixtures("_wanted")
def test_a_draft_that_learns_stays_as_it_is(pair: Pair) -> None:
    engine = load(pair, learn=True)
    assert is_blocked(engine) == (True, False)
    *_, last = engine.generate("def area(", PARAMS)
    engine.learn(last.stats)
    assert last.stats.learn_steps > 0


@pytest.mark.usefixtures("_wanted")
def test_other_arithmetic_has_no_such_order(pair: Pair) -> None:
    assert is_blocked(load(pair, "fp32")) == (False, False)


def test_a_small_model_is_left_as_it_is(pair: Pair) -> None:
    assert is_blocked(load(pair)) == (False, False)
