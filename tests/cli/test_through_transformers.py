"""Commands on a model that transformers' modules compute: they work as on others, and say which path it takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from offspec.loaders.machine.hardware import Rates

from ..pair import VOCAB_SIZE, Pair
from ..refusals import tells
from .conftest import Offspec

SMALL = ("--device", "cpu", "--max-new-tokens", 8)


@pytest.fixture(scope="module")
def foreign(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random dots.llm1 with the pair's tokenizer."""
    import torch
    from transformers import Dots1Config, Dots1ForCausalLM

    folder = tmp_path_factory.mktemp("dots1")
    torch.manual_seed(0)
    config = Dots1Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    Dots1ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair.target / name, folder)
    return folder


def test_plan_says_what_computes_and_what_a_pass_costs(
    foreign: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Rates(disk_bytes_per_s=2e9, matmul_flops={1: 1e10})
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: rates)
    result = offspec("plan", foreign, "--device", "cpu", "--draft", "none")
    assert result.code == 0, result
    assert tells(result.out + result.err, "transformers", "dots1", "llama.cpp")


def test_it_drafts_for_a_model_of_offspecs_own(foreign: Path, pair: Pair, offspec: Offspec) -> None:
    texts = []
    for draft in ("none", foreign):
        result = offspec("run", pair.target, "def area(", "--draft", draft, "--raw", "--json", "-q", *SMALL)
        assert result.code == 0, result
        texts.append(json.loads(result.out)["token_ids"])
    assert texts[0] == texts[1]


def test_distilling_is_refused_before_anything_is_trained(foreign: Path, tmp_path: Path, offspec: Offspec) -> None:
    result = offspec("distill", foreign, "--exit-layer", 1, "--out", tmp_path / "exit", "--device", "cpu", "-q")
    result.refusal(2, "exit layer", "decoder")
