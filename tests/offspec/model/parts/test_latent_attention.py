"""Latent attention: what it keeps of a text, and its training. Other tests compare its texts and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offspec.errors import CheckpointError, UnsupportedModelError
from offspec.model.block import kv_layouts, memory_bytes
from offspec.model.config import read_config
from offspec.model.decoder import CachedDecoder, random_decoder
from offspec.model.memory.kv_cache import KVLayout
from offspec.model.memory.kv_formats import EIGHT_BIT
from offspec.research.lora import Adapter, TreeRows, hidden_states

from ....fakes import CPU, FAMILIES, TinyModel, config_json
from ....refusals import refused
from ..test_decoder import NO_NODES, assert_close, chain_logits, random_tokens

GetModel = Callable[[str], TinyModel]
# As published, without what sizes do not need.
V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


def test_a_layer_keeps_576_numbers_of_a_token() -> None:
    """DeepSeek-V3: a latent of 512 and a rotated key of 64, instead of 128 heads' keys of 192 and values of 128."""
    config = read_config(V3)
    assert set(kv_layouts(config)) == {KVLayout(1, 576, has_values=False)}
    assert memory_bytes(config, 1000, 2) == 1000 * 61 * 576 * 2
    assert memory_bytes(config, 1000, 2, kv=EIGHT_BIT) == 1000 * 61 * (576 + 2 * 576 // 32)
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)


def test_values_are_the_keys_in_memory(tiny_model: GetModel) -> None:
    text = CachedDecoder(tiny_model("deepseek-v3").decoder())
    text.score(random_tokens(5), *NO_NODES)
    keys, values = text.cache.read(1, 5)
    assert keys.shape == (1, 5, 40)
    assert keys.data_ptr() == values.data_ptr()


def test_additions_to_the_heads_matrices_learn() -> None:
    """They are multiplied into queries and results, not into rows; merged, they are what was trained."""
    decoder = random_decoder(read_config(config_json(FAMILIES["youtu"])), 0, dtype=torch.float32, device=CPU)
    adapter, tokens = Adapter(decoder, 2), random_tokens(6)
    with torch.no_grad():
        for _, b in adapter.pairs.values():
            b.normal_(generator=torch.Generator().manual_seed(1))
    trainee = adapter.trainee()
    states = trainee.normed(hidden_states(trainee, torch.tensor(tokens), TreeRows(trainee, np.arange(6) - 1)))
    (states.sum()).backward()
    gradients = [b.grad for name, (_, b) in adapter.pairs.items() if "kv_b_proj" in name]
    assert len(gradients) == 2
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    logits = trainee.head(states).detach()
    adapter.merge()
    assert_close(chain_logits(decoder, tokens), logits)


@pytest.mark.parametrize(
    ("family", "settings", "error", "word"),
    [
        ("deepseek-v2", {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method"),
        ("deepseek-v2", {"topk_group": 1, "num_experts_per_tok": 3}, CheckpointError, "topk_group"),
        ("deepseek-v3", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func"),
        ("deepseek-v3", {"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq"),
        ("deepseek-v3", {"qk_rope_head_dim": 7}, CheckpointError, "RoPE"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, CheckpointError, "mlp_layer_types"),
    ],
)
def test_what_is_not_computed_is_refused(
    family: str, settings: dict[str, Any], error: type[Exception], word: str
) -> None:
    with refused(error, word):
        read_config(config_json(FAMILIES[family]) | settings)
