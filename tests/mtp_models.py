"""Tiny checkpoints with an MTP layer, in each published layout, and the layer's reference.

Qwen3.5's layer is transformers' own, as vLLM and SGLang have it (qwen3_5_mtp.py); DeepSeek's layout is that of GLM and
DeepSeek-V3 (deepseek_nextn.py of SGLang), around a layer of Llama's, or around DeepSeek-V3's own with experts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from offspec.model.config import read_config
from offspec.model.decoder import Decoder, wanted_shapes

from .pair import build_pair

NUM_LAYERS = 4
HYBRID = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "mtp_num_hidden_layers": 1,
}
LATENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": NUM_LAYERS - 1,
    "num_nextn_predict_layers": 1,
}
NEXTN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
    "layers.0.": "",
}
KINDS = ("qwen", "nextn")
EXPERTS = "deepseek"  # the kind whose layer has experts


def write_model(folder: Path, kind: str) -> Path:
    """A checkpoint of the layout `kind` of KINDS, or EXPERTS, with a tokenizer."""
    pair = build_pair(folder, num_layers=NUM_LAYERS)
    config = json.loads((pair.target / "config.json").read_text())
    tensors = load_file(pair.target / "model.safetensors")
    if kind != "nextn":
        config |= HYBRID if kind == "qwen" else LATENT
        tensors = _random(wanted_shapes(read_config(config)), 1) | {"lm_head.weight": tensors["lm_head.weight"]}
    else:
        config["num_nextn_predict_layers"] = 1
    layer = {f"mtp.{name}": tensor for name, tensor in _own_tensors(config, kind).items()}
    if kind != "qwen":
        layer = {_nextn_name(name.removeprefix("mtp.")): tensor for name, tensor in layer.items()}
        copies = {"shared_head.head": "lm_head", "embed_tokens": "model.embed_tokens"}
        layer |= {
            f"model.layers.{NUM_LAYERS}.{own}.weight": tensors[f"{name}.weight"].clone() for own, name in copies.items()
        }
    path = folder / "model"
    shutil.copytree(pair.target, path)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.bfloat16() for name, tensor in (tensors | layer).items()}, path / "model.safetensors")
    return path


def _random(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}
    return {n: 1 + 0.1 * each if each.dim() == 1 else 1.2 * each / each.shape[-1] ** 0.5 for n, each in noise.items()}


def _own_tensors(config: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    shapes = {name: tensor.shape for name, tensor in Twin(config, kind).state_dict().items()}
    return {
        part: each for name, tensor in _random(shapes, 2).items() for part, each in _by_expert(name, tensor).items()
    }


def random_layer(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of an MTP layer around a layer of Llama's, by an `MtpHead`'s names."""
    return _own_tensors(config, "nextn")


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors in a checkpoint of one of a layer of transformers, which has all experts in one."""
    prefix, _, matrix = name.rpartition(".experts.")
    if not prefix:
        return {name: tensor}
    names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    return {
        f"{prefix}.experts.{number}.{own}.weight": part.clone()
        for number, expert in enumerate(tensor)
        for own, part in zip(names, expert.chunk(len(names)), strict=True)
    }


def _joined(name: str, shape: Sequence[int], stored: Mapping[str, Tensor]) -> Tensor:
    """A tensor of a layer of transformers, of those in a checkpoint by their names there."""
    parts = [stored[part] for part in _by_expert(name, torch.empty(tuple(shape)))]
    return torch.cat(parts).view(tuple(shape))


def _nextn_name(name: str) -> str:
    old = next(old for old in NEXTN if name.startswith(old))
    return f"model.layers.{NUM_LAYERS}.{NEXTN[old]}{name.removeprefix(old)}"


def _own_name(name: str, mark: str) -> str:
    """The inverse of `_nextn_name`, and of Qwen's prefix. mark: the layer's prefix."""
    if not name.startswith(mark):
        return name.removeprefix("mtp.")
    short = name.removeprefix(mark)
    own = next(own for own, nextn in NEXTN.items() if short.startswith(f"{nextn}." if nextn else ""))
    return f"{own}{short.removeprefix(NEXTN[own])}"


class Twin(nn.Module):
    """An MTP layer by transformers' own decoder layer, one path at a time, without a cache."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        super().__init__()
        shape = AutoConfig.for_model(**config)
        shape._attn_implementation = "eager"
        hidden = shape.hidden_size
        norm = Qwen3_5RMSNorm if kind == "qwen" else LlamaRMSNorm
        layer, rotary, index = {
            "qwen": (Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding, 1),
            "nextn": (LlamaDecoderLayer, LlamaRotaryEmbedding, 0),
            EXPERTS: (DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding, NUM_LAYERS - 1),
        }[kind]
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm(hidden, eps=shape.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=shape.rms_norm_eps)
        self.norm = norm(hidden, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList([layer(shape, index)])
        self._rotary = rotary(shape)
        self._target: list[Decoder] = []

    @classmethod
    def of(cls, model: Path, kind: str, target: Decoder) -> Twin:
        """With the weights of a checkpoint."""
        config = json.loads((model / "config.json").read_text())
        twin = cls(config, kind)
        stored = load_file(model / "model.safetensors")
        mark = f"model.layers.{NUM_LAYERS}."
        own = {_own_name(name, mark): tensor for name, tensor in stored.items() if name.startswith((mark, "mtp."))}
        twin.load_state_dict({name: _joined(name, each.shape, own).float() for name, each in twin.state_dict().items()})
        twin._target = [target]
        return twin

    def fused(self, states: Tensor) -> Tensor:
        return states

    @torch.no_grad()
    def logits(self, features: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [1, vocab] and features [1, hidden] after the last of a path's tokens, given T features before."""
        target, length = self._target[0], len(tokens)
        embedded = target.embedding_rows(torch.tensor(list(tokens))).float()
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features)), -1))[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        places = torch.arange(length)[None]
        x = self.layers[0](x, position_embeddings=self._rotary(x, places), attention_mask=mask, position_ids=places)
        states = self.norm(x[0] if isinstance(x, tuple) else x)
        states = states.view(length, -1)[-1:]
        return target.linear_logits(states), states
