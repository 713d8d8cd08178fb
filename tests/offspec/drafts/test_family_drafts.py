"""Drafts that a plan knows by their families: their sizes are those published, and they fit their targets alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import model_to_plan
from offspec.drafts.family_drafts import DRAFTS, family_draft

from ...llama_configs import LLAMA_8B_IN_BF16, write_config

# Bytes of the files on the hub, in GB.
PUBLISHED = {
    "meta-llama/Llama-3.2-1B-Instruct": 2.47,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.99,
    "Qwen/Qwen3-0.6B": 1.19,
    "Qwen/Qwen3.5-0.8B": 1.5,
    "google/gemma-3-1b-it": 2.0,
    "google/gemma-2-2b-it": 5.23,
    "allenai/OLMo-2-0425-1B-Instruct": 2.97,
}


def target_of(folder: Path, **changes: Any) -> ModelFiles:
    return model_to_plan(write_config(folder, LLAMA_8B_IN_BF16 | changes), None, "bf16", [])


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_has_the_published_size(name: str, tmp_path: Path) -> None:
    config = DRAFTS[name]
    same = {"model_type": config["model_type"], "vocab_size": config["vocab_size"], "num_hidden_layers": 64}
    found = family_draft(target_of(tmp_path, **same, head_dim=config["head_dim"]), "bf16")
    assert found is not None
    assert found.name == name
    assert found.num_bytes / 1e9 == pytest.approx(PUBLISHED[name], rel=0.03)


def test_another_family_another_vocabulary_or_a_small_target_has_none(tmp_path: Path) -> None:
    for changes in ({"model_type": "mistral"}, {"vocab_size": 32000}, {"num_hidden_layers": 4}):
        assert family_draft(target_of(tmp_path, **changes), "bf16") is None
    assert family_draft(target_of(tmp_path, vocab_size=128512), "bf16") is not None  # padded otherwise
