"""RoPE's frequencies where there are none; what they are is compared with transformers' in test_model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from offspec.errors import CheckpointError
from offspec.model.rope import RotaryEmbedding, rotation
from offspec.model.rope_config import RopeConfig

from ...refusals import refused


@pytest.mark.parametrize(("theta", "more"), [(1.0, {}), (1e4, {"beta_fast": 1e308}), (1e4, {"beta_fast": 1e-320})])
def test_yarn_of_numbers_that_no_model_has_is_refused(theta: float, more: dict[str, float]) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64, **more}
    with refused(CheckpointError, "config.json", "'yarn'", theta):
        rotation(RopeConfig(theta, "yarn", scaling), 16)


LONG_SCALINGS: list[dict[str, Any]] = [
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
]


@pytest.mark.parametrize("scaling", LONG_SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("length", [32_768, 131_072])
def test_long_texts_turn_as_in_transformers(scaling: dict[str, Any], length: int) -> None:
    """Around the original context, and at the end of the extended one: Llama 3.x, and Qwen with YaRN.

    A frequency's last bit may differ, and counts as often as the position.
    """
    theta = {"llama3": 500_000.0, "yarn": 1e6}[scaling["rope_type"]]
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    given = {name: value for name, value in scaling.items() if name != "rope_type"}
    ours = RotaryEmbedding(
        RopeConfig(theta, scaling["rope_type"], given), 128, dtype=torch.float32, device=torch.device("cpu")
    )
    positions = torch.tensor([0, 1, 8191, 8192, length - 2, length - 1])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 128), positions[None])  # type: ignore[no-untyped-call]
    for found, wanted in zip(ours.at(positions), expected, strict=True):
        torch.testing.assert_close(found[:, 0], wanted[0], rtol=0, atol=length * 1e-9)
