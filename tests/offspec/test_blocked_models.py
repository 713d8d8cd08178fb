"""Engines whose residents lie in oneDNN's order: the same text, and a draft that learns is left as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints import load as loading
from offspec.loaders.formats.blocked import BlockedMatrix
from offspec.model.decoder import CachedDecoder

from ..machines import needs_blocked_order, needs_kernels
from ..pair import Pair

PARAMS = SamplingParams(24, ignore_eos=True)


@pytest.fixture
def _wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these models were large enough."""
    monkeypatch.setattr(loading, "LEAST_BLOCKED_BYTES", 0)


def load(pair: Pair, dtype: str = "bf16", **options: bool) -> Engine:
    """Exact targets keep the usual order, so these are fast ones."""
    draft = str(pair.draft)
    return Engine.load(str(pair.target), draft=draft, device="cpu", dtype=dtype, arithmetic="fast", **options)


def is_blocked(engine: Engine) -> tuple[bool, bool]:
    """Target and draft."""
    assert engine.draft.decoder is not None
    found = []
    for decoder in (engine.target, engine.draft.decoder):
        with decoder.weights.layer(0) as layer:
            found.append(isinstance(layer["mlp.up_proj.weight"], BlockedMatrix))
    return found[0], found[1]


def is_draft_exact(engine: Engine) -> bool:
    assert engine.draft.decoder is not None
    return engine.draft.decoder.is_exact


def scores(engine: Engine) -> torch.Tensor:
    """Logits after each of some tokens, and of a node beside them."""
    cached, root = CachedDecoder(engine.target), np.ones(1, dtype=np.int64)
    return cached.score([70, 71, 72, 73], root, root, np.ones((1, 1), dtype=np.bool_))


@needs_blocked_order
@pytest.mark.usefixtures("_wanted")
def test_exact_targets_keep_the_usual_order(pair: Pair) -> None:
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="bf16") as engine:
        assert engine.is_exact
        assert is_blocked(engine) == (False, True)
        assert not is_draft_exact(engine)


@needs_blocked_order
@pytest.mark.usefixtures("_wanted")
def test_logits_are_those_of_plain_matrices(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(pair)
    assert is_blocked(engine) == (True, True)
    monkeypatch.setattr(loading, "LEAST_BLOCKED_BYTES", 2**40)
    plain = load(pair)
    assert is_blocked(plain) == (False, False)
    torch.testing.assert_close(scores(engine), scores(plain), rtol=2e-2, atol=2e-2)
    for steps in (engine.generate("def area(", PARAMS), engine.generate("def area(", PARAMS, SpeculationParams(0))):
        assert sum(len(step.token_ids) for step in steps) == 24


@needs_blocked_order
@pytest.mark.usefixtures("_wanted", "learning_takes_no_time")
def test_a_draft_that_learns_stays_as_it_is(pair: Pair) -> None:
    engine = load(pair, learn=True)
    assert is_blocked(engine) == (True, False)
    *_, last = engine.generate("def area(", PARAMS)
    engine.learn(last.stats)
    assert last.stats.learn_steps > 0


@needs_blocked_order
@pytest.mark.usefixtures("_wanted")
def test_other_arithmetic_has_no_such_order(pair: Pair) -> None:
    assert is_blocked(load(pair, "fp32")) == (False, False)


@needs_kernels
@pytest.mark.parametrize("arithmetic", ["auto", "fast"])
def test_other_large_drafts_are_exact_because_that_is_faster(
    pair: Pair, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(pair) as engine:
        assert not is_draft_exact(engine)
    monkeypatch.setattr(loading, "LEAST_EXACT_WEIGHTS", 0)
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", arithmetic=arithmetic) as engine:
        assert engine.is_exact == (arithmetic == "auto")
        assert is_draft_exact(engine)


def test_a_small_model_is_left_as_it_is(pair: Pair) -> None:
    assert is_blocked(load(pair)) == (False, False)
