"""A driver that keeps device memory in RAM is noticed by slow passes of a resident target, and told once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams, loaded_target
from offspec.planning import spilling
from offspec.planning.spilling import LAUNCHES_S, NUM_PASSES, SpillWatch, spill_watch

from ...refusals import tells

NUM_LAYERS = 10


def plan(num_streamed: int = 0) -> Any:
    return SimpleNamespace(layers=[None] * NUM_LAYERS, placement=SimpleNamespace(is_resident=not num_streamed))


def told(seconds: list[float], num_streamed: int = 0) -> list[str]:
    """What is said of passes of these seconds, each predicted to take 0.1 s."""
    watch = SpillWatch()
    notes = [watch.observe(plan(num_streamed), 0.1, each) for each in seconds]
    return [note.text for note in notes if note is not None and note.advice]


def test_slow_passes_are_told_once_with_the_remedy() -> None:
    (text,) = told([0.45 + LAUNCHES_S * NUM_LAYERS] * 5 * NUM_PASSES)
    assert tells(text, "4 times", "Prefer No Sysmem Fallback", "`vram`")
    assert "\n" not in text


@pytest.mark.parametrize(
    "seconds",
    [
        [0.29 + LAUNCHES_S * NUM_LAYERS] * 9,
        [1.0] * (NUM_PASSES - 1),
        [*[1.0] * (NUM_PASSES - 1), 0.1] * 3,  # captures and other programs slow some passes down, spilling all
    ],
    ids=["not slow enough", "too few", "one is quick"],
)
def test_other_slow_passes_are_not_told(seconds: list[float]) -> None:
    assert told(seconds) == []


def test_streamed_layers_are_not_judged() -> None:
    assert told([1.0] * 9, num_streamed=1) == []


def test_only_a_windows_driver_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for spills, device, is_watched in ((True, "cuda", True), (True, "cpu", False), (False, "cuda", False)):
        monkeypatch.setattr(spilling, "may_spill", lambda spills=spills: spills)
        assert (spill_watch(torch.device(device)) is not None) == is_watched


@pytest.mark.slow
def test_an_engine_watches_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = list[tuple[int, int]]()

    def predict(self: Any, rates: Any, num_rows: int, num_tokens: int) -> float:
        watched.append((num_rows, num_tokens))
        return 1e-9

    monkeypatch.setattr(loaded_target, "spill_watch", lambda device: SpillWatch())
    monkeypatch.setattr(spilling, "LAUNCHES_S", 0.0)
    with Engine.load("builtin", draft="none", device="cpu", context=512) as engine:
        monkeypatch.setattr(type(engine.plan), "predict_pass_s", predict)
        for _ in range(2):
            engine.complete("def area(", SamplingParams(2 * NUM_PASSES, ignore_eos=True), SpeculationParams(budget=0))
        assert len([note for note in engine.notes if "Sysmem" in note.text]) == 1
    (_, before), (num_rows, after), *_ = watched
    assert (num_rows, after - before) == (1, 1)
