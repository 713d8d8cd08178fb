"""Plans for llama.cpp's mixtures have the sizes of published files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import model_to_plan
from offspec.errors import UnsupportedModelError

from ...llama_configs import LLAMA_8B, LLAMA_70B, write_config
from ...refusals import refused

QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}

MIXTRAL_8X22B = {
    "model_type": "mixtral",
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_hidden_layers": 56,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "sliding_window": None,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def planned(folder: Path, config: dict[str, Any], form: str) -> ModelFiles:
    write_config(folder, config)
    return model_to_plan(folder, form, "bf16", [])


def types_of(files: ModelFiles) -> dict[str, str]:
    return {name: weight.dtype for name, weight in files.stored.by_name.items()}


@pytest.mark.parametrize(
    ("config", "form", "gigabytes"),
    [
        *((LLAMA_8B, "q2_k", 3.18), (LLAMA_8B, "q3_k_s", 3.66), (LLAMA_8B, "q3_k_m", 4.02), (LLAMA_8B, "q3_k_l", 4.32)),
        *((LLAMA_8B, "q4_k_s", 4.69), (LLAMA_8B, "q4_k_m", 4.92), (LLAMA_8B, "q4_0", 4.66), (LLAMA_8B, "q5_k_s", 5.60)),
        *((LLAMA_8B, "q5_k_m", 5.73), (LLAMA_8B, "q6_k", 6.60), (LLAMA_8B, "q8_0", 8.54)),
        *((LLAMA_70B, "q4_k_m", 42.52), (MIXTRAL_8X22B, "q2_k", 52.10), (MIXTRAL_8X22B, "q4_k_m", 85.58)),
        (QWEN3_30B_A3B, "q5_k_m", 21.74),
    ],
)
def test_files_are_as_large_as_published(tmp_path: Path, config: dict[str, Any], form: str, gigabytes: float) -> None:
    """The sizes of bartowski's and lmstudio-community's files, which have tokenizers of 8 MB in addition."""
    nbytes = planned(tmp_path, config, form).weight_bytes
    assert nbytes / 1e9 == pytest.approx(gigabytes, rel=5e-3 if config is LLAMA_8B else 2e-3)


def test_layers_have_the_types_of_published_files(tmp_path: Path) -> None:
    types = types_of(planned(tmp_path, LLAMA_70B, "q4_k_m"))
    values = Counter(types[f"model.layers.{i}.self_attn.v_proj.weight"] for i in range(80))
    assert values == {"Q6_K": 40, "Q5_K": 40}
    types = types_of(planned(tmp_path, QWEN3_30B_A3B, "q5_k_m"))
    downs = Counter(types[f"model.layers.{i}.mlp.experts.127.down_proj.weight"] for i in range(48))
    assert downs == {"Q6_K": 24, "Q5_K": 24}
    assert {types[f"model.layers.{i}.mlp.gate.weight"] for i in range(48)} == {"F32"}


def test_rows_that_are_no_whole_blocks_have_smaller_ones(tmp_path: Path) -> None:
    """The types of Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf, whose head is a tensor of its own."""
    types = types_of(planned(tmp_path, QWEN_05B | {"tie_word_embeddings": False}, "q4_k_m"))
    assert (types["lm_head.weight"], types["model.embed_tokens.weight"]) == ("Q8_0", "Q5_0")
    first = {name.removeprefix("model.layers.0."): kind for name, kind in types.items() if ".layers.0." in name}
    assert first["self_attn.v_proj.weight"] == "Q8_0"
    assert first["mlp.down_proj.weight"] == "Q6_K"
    assert {first[f"self_attn.{name}_proj.weight"] for name in "qko"} == {"Q5_0"}
    assert {first["self_attn.q_proj.bias"], first["input_layernorm.weight"]} == {"F32"}
    downs = Counter(types[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(24))
    assert downs == {"Q6_K": 12, "Q4_K": 12}


def test_a_tied_embedding_has_the_heads_type(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    for form, kind in (("q4_k_m", "Q6_K"), ("q8_0", "Q8_0")):
        files = planned(tmp_path, LLAMA_8B | tied, form)
        assert "lm_head.weight" not in files.stored.shared
        assert files.stored.shared["model.embed_tokens.weight"].dtype == kind


def test_models_that_gguf_files_cannot_have_here_are_refused(tmp_path: Path) -> None:
    with refused(UnsupportedModelError, "stablelm", "`format`", "nf4"):
        planned(tmp_path, LLAMA_8B | {"model_type": "stablelm", "num_hidden_layers": 1}, "q4_k_m")
