"""The benchmark's fixed depths are as deep as they say, and its seconds are those of its cost models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.drafts.early_exit import Bench, FixedDepth, copy_of
from benchmarks.scheduling.replay import record
from offspec import Engine, SamplingParams
from offspec.model.early_exit import EarlyExit

from ..pair import build_pair


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pair = build_pair(tmp_path_factory.mktemp("deep"), num_layers=4)
    return Engine.load(str(pair.target), draft="none", device="cpu", dtype="fp32")


@pytest.mark.slow
def test_a_depth_is_so_many_rounds(engine: Engine, tmp_path: Path) -> None:
    target = engine.target
    params = SamplingParams(24, seed=0, ignore_eos=True)
    bench = Bench(target, record(engine, ["def area("], params, tmp_path))
    good = EarlyExit(target, 3, copy_of(target, 3))
    for depth in (1, 2, 5):
        row = bench.row("good", good, "fixed", 40, lambda _, depth=depth: FixedDepth(40, depth))
        assert row.tokens_per_pass > 0.8 * (depth + 1), "this exit is the rest of the target"
        assert depth * 0.6 < row.rounds_per_pass <= depth, "the last passes have no room for all of it"
        passes = 24 / row.tokens_per_pass
        rounds = passes * row.rounds_per_pass
        assert row.tokens_per_s["resident"] == pytest.approx(24 / (rounds * 4 + passes * 4))
        assert row.tokens_per_s["streamed"] == pytest.approx(24 / (rounds * 4 + passes * (3 + 40)))


def test_a_copy_is_the_layer(engine: Engine) -> None:
    with engine.target.weights.layer(1) as layer:
        found = copy_of(engine.target, 1)
        assert all(torch.equal(found[name], layer[name]) for name in layer)  # type: ignore[arg-type]
