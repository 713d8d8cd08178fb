"""What a model's authors recommend of sampling, as their files say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec import RECOMMENDED, Engine, SamplingParams, with_recommended
from offspec.checkpoints.recommended_sampling import USUAL, recommended_sampling
from offspec.notes import Note

from ...pair import build_pair

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3, SamplingParams(temperature=0.6, top_k=20, top_p=0.95)),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, SamplingParams(temperature=1, top_k=64, top_p=0.95)),
        ({"temperature": 0.3, "min_p": 0.15}, SamplingParams(temperature=0.3, min_p=0.15)),
        ({"repetition_penalty": 1.05}, replace(USUAL, repetition_penalty=1.05)),
        ({"do_sample": False, "temperature": 0.6, "top_p": None}, SamplingParams()),
        ({"eos_token_id": 2, "_from_model_config": True}, USUAL),
    ],
)
def test_what_the_authors_say_is_taken(config: dict[str, Any], expected: SamplingParams) -> None:
    notes = list[Note]()
    assert recommended_sampling(config, notes) == expected
    assert not notes


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 1.5}])
def test_an_invalid_value_is_left_out_and_told(bad: dict[str, Any]) -> None:
    notes = list[Note]()
    found = recommended_sampling({**QWEN3, **bad}, notes)
    (name,) = bad
    assert found == replace(recommended_sampling(QWEN3, []), **{name: getattr(SamplingParams(temperature=1), name)})
    assert [(name in note.text, note.advice) for note in notes] == [(True, True)]


def test_what_is_given_stays_and_a_temperature_of_zero_is_greedy_decoding() -> None:
    model = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    ours = SamplingParams(5, top_k=3, seed=1)
    assert with_recommended(ours, model, ()) == replace(model, max_new_tokens=5, seed=1)
    assert with_recommended(ours, model, ["top_k"]) == replace(model, max_new_tokens=5, seed=1, top_k=3)
    assert with_recommended(ours, model, ["temperature"]) == ours
    warm = replace(ours, temperature=0.2)
    assert with_recommended(warm, model, ["temperature"]) == replace(model, max_new_tokens=5, seed=1, temperature=0.2)
    assert with_recommended(ours, model, RECOMMENDED) == ours


def test_an_engine_has_its_models(tmp_path: Path) -> None:
    folder = build_pair(tmp_path).target
    (folder / "generation_config.json").write_text(json.dumps({**QWEN3, "top_p": "all"}))
    with Engine.load(folder, draft="none", device="cpu") as engine:
        assert engine.recommended_sampling == SamplingParams(temperature=0.6, top_k=20)
        assert any("top_p" in note.text for note in engine.notes)
