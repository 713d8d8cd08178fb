"""Mixtures of experts: what a checkpoint stores for them, and the precision in which they choose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import ModelFiles
from offspec.planning.plan import all_resident

from ....fakes import CPU, TinyModel
from ....pair import variant

GetModel = Callable[[str], TinyModel]


@pytest.mark.parametrize("family", ["glm4-moe", "minimax-m2"])
def test_a_correction_is_added_in_fp32(tiny_model: GetModel, family: str) -> None:
    """In bf16, corrections of many experts would be equal."""
    decoder = tiny_model(family).decoder(torch.bfloat16)
    shape = decoder.config.experts
    assert shape is not None
    assert shape.correction is not None
    with decoder.weights.layer(1) as layer:
        assert layer[shape.correction].dtype is torch.float32  # type: ignore[union-attr]
        assert layer["input_layernorm.weight"].dtype is torch.bfloat16  # type: ignore[union-attr]


def test_experts_stored_together_are_those_stored_apart(tiny_model: GetModel, tmp_path: Path) -> None:
    """As Qwen3.5-MoE's releases have them; transformers writes each expert's matrices."""
    model, apart = tiny_model("qwen3.5-moe"), tiny_model("qwen3.5-moe").decoder()
    folder = variant(model.folder, tmp_path / "joined")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(apart.config.num_layers):
        prefix, numbers = f"model.layers.{layer}.mlp.experts", range(6)
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{number}.{name}_proj.weight") for number in numbers])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    save_file(tensors, folder / "model.safetensors")
    files = ModelFiles.open(folder, "fp32", "cpu", [])
    joined, tokens = load_decoder(files, all_resident(files), CPU), torch.arange(1, 20)
    found, expected = (each.forward(tokens, torch.arange(19), each.new_cache()) for each in (joined, apart))
    torch.testing.assert_close(found, expected)
    assert files.config.experts is not None
    assert files.config.experts.names.is_fused
