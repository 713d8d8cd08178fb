"""`deterministic`: the same passes, whatever clocks show; without it, clocks change the size of trees."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.backends.on_gpu import FUSED_ROWS, FusedRows
from offspec.errors import UsageError
from offspec.loaders.formats import four_bit
from offspec.loaders.machine import card_choices
from offspec.loaders.machine.card_choices import FIXED_ROWS, fused_rows
from offspec.planning import probe
from offspec.process import fix_choices
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import Verdict

from ..fixed_choices import end_with_test

Pass = tuple[list[int], list[int], list[int]]  # a tree's tokens and parents, and the tokens that the pass brought
Clock = Callable[[], float]
PROMPTS = ["def area(", "class Stack:\n    def push(self, "]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fixed_until_the_test_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    end_with_test(monkeypatch)


def steady(seconds: float) -> Clock:
    """A clock that shows the same seconds between any two looks at it."""
    ticks = itertools.count()
    return lambda: next(ticks) * seconds


def unsteady(seed: int) -> Clock:
    """A clock that shows from a microsecond to an hour between looks."""
    chance, shown = random.Random(seed), [0.0]

    def look() -> float:
        shown[0] += 10 ** chance.uniform(-6, 3.5)
        return shown[0]

    return look


def passes_of(engine: Engine, prompt: str, params: SamplingParams) -> list[Pass]:
    """The passes of one request."""
    done = list[Pass]()

    def observe(tree: TokenTree, verdict: Verdict) -> None:
        done.append((tree.tokens.tolist(), tree.parents.tolist(), list(verdict.tokens)))

    list(engine.generate(prompt, params, observer=observe))
    return done


def passes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """All passes of some requests in bf16, in an engine that was loaded under this clock."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", clock)
        patch.setitem(ModelDrafter.__init__.__kwdefaults__, "clock", clock)
        patch.setattr(probe, "LEAST_MEASURED_WEIGHTS", 0)  # else nothing is measured for so small a model
        with Engine.load("builtin", device="cpu", dtype="bf16", deterministic=True) as engine:
            each = (
                passes_of(engine, prompt, SamplingParams(8, temperature=temperature, seed=7))
                for prompt, temperature in zip(PROMPTS, (0.0, 0.7), strict=True)
            )
            return list(itertools.chain.from_iterable(each))


@pytest.mark.slow
def test_clocks_do_not_change_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (passes(clock, monkeypatch) for clock in (steady(1e-3), unsteady(1)))
    assert first == second
    assert max(len(tokens) for tokens, _, _ in first) == 64


@pytest.mark.slow
def test_a_text_does_not_depend_on_earlier_requests() -> None:
    """What was learnt about the draft is forgotten."""
    params = SamplingParams(8, seed=3)
    with Engine.load("builtin", device="cpu", dtype="bf16", deterministic=True) as engine:
        alone = passes_of(engine, PROMPTS[0], params)
        for prompt in PROMPTS[1:]:
            passes_of(engine, prompt, params)
        assert passes_of(engine, PROMPTS[0], params) == alone


def test_texts_do_not_share_passes() -> None:
    with Engine.load("builtin", device="cpu", dtype="bf16", deterministic=True) as engine:
        params = SamplingParams(4, temperature=1.0, seed=5)
        together = dict.fromkeys(range(3), "")
        order = list[int]()
        for index, step in engine.generate_answers(PROMPTS[0], 3, params):
            together[index] += step.text
            order.append(index)
        assert order == sorted(order), "one after the other"
        for index, step in engine.generate_many([PROMPTS[0]] * 2, [params, SamplingParams(4, temperature=1.0, seed=6)]):
            assert step.stats.num_prefilled_tokens == len(engine.encode(PROMPTS[0])), "nothing is taken over"
            together[index] = together[index].removeprefix(step.text)
        assert [together[0], together[1]] == ["", ""], "and the same texts"


# ------------------------------------------------------------------------------------------------ settings


def test_times_are_taken_out_of_the_settings() -> None:
    assert SpeculationParams().without_timing() == SpeculationParams(budget=64, overlap=False)
    assert SpeculationParams(budget=8).without_timing() == SpeculationParams(budget=8, overlap=False)
    lossy = SpeculationParams(accept="joint")
    assert lossy.without_timing() == SpeculationParams(accept="joint", overlap=False)


def test_learning_takes_as_long_as_texts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`learn`"):
        Engine.load("builtin", deterministic=True, learn=True, learn_file=tmp_path / "learnt")


# ------------------------------------------------------------------------------------------------ kernels


def test_fused_products_have_a_fixed_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = four_bit.Weight4bit("weight", four_bit.Layout4bit((64, 128), "nf4", 64), ())
    rows = FusedRows()
    rows.is_fixed = True
    monkeypatch.setattr(card_choices, "FUSED_ROWS", rows)
    monkeypatch.setattr(card_choices, "measure_fused_rows", lambda *_: pytest.fail("is measured"))
    assert fused_rows(stored, CPU, torch.bfloat16) == 0, "a CPU has no fused product"
    monkeypatch.setattr(card_choices, "_has_fused", lambda *_: True)
    assert fused_rows(stored, CPU, torch.bfloat16) == FIXED_ROWS
    assert rows.get("nf4", (64, 128), torch.bfloat16, CPU) == FIXED_ROWS


def test_choices_are_fixed_for_the_process() -> None:
    fix_choices()
    assert FUSED_ROWS.is_fixed
