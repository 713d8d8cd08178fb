"""Checkpoints in Mistral's own layout: the same weights say what transformers says of them in Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from offspec import ConvertParams, convert
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.errors import CheckpointError, MissingWeightsError, UnsupportedModelError
from offspec.text.tokenizer import Tokenizer

from ...fakes import TinyModel
from ...refusals import refused
from ..model.test_decoder import assert_close, chain_logits, random_tokens
from ..text.test_tekken import write_tekken
from .test_gguf_models import decoder_of

GetModel = Callable[[str], TinyModel]
TOKENS = random_tokens(40)
NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "weight_scale": "qscale_weight",
    "model.": "",
}


def params_of(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": rope["rope_theta"],
        "max_position_embeddings": config["max_position_embeddings"],
        "tied_embeddings": config["tie_word_embeddings"],
        "sliding_window": config["sliding_window"],
        "q_lora_rank": None,
    }
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        yarn = {"factor": rope["factor"], "beta": 32, "alpha": 1, "apply_scale": False}
        params["yarn"] = yarn | {"original_max_position_embeddings": original}
        beta = rope["llama_4_scaling_beta"]
        params["llama_4_scaling"] = {"beta": beta, "original_max_position_embeddings": original}
    return params


def mistral_of(model: TinyModel, folder: Path, tensors: Mapping[str, Tensor] = {}, **more: Any) -> Path:
    """tensors: beside the model's. more: of params.json."""
    config, weights = model.reference.config.to_dict(), model.reference.state_dict()
    return write_mistral(folder / "own", config, {**weights, **tensors}, **more)


def mistral_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def in_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Rows i and i + head_dim / 2 of each head side by side."""
    halves = rows.view(num_heads, 2, len(rows) // num_heads // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def write_mistral(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], **more: Any) -> Path:
    """more: of params.json."""
    folder.mkdir()
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    written = {}
    for name, tensor in tensors.items():
        count = next((count for ending, count in heads.items() if name.endswith(ending)), None)
        rows = tensor if count is None else in_pairs(tensor.view(torch.uint8).view(len(tensor), -1), count)
        written[mistral_name(name)] = rows.view(torch.uint8).view(tensor.dtype).view(tensor.shape).clone()
    save_file(written, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(params_of(config) | more))
    write_tekken(folder)
    return folder


@pytest.mark.parametrize("family", ["ministral3", "mistral-window"])
def test_logits_equal_transformers(tiny_model: GetModel, family: str, tmp_path: Path) -> None:
    """Of the folder, and of a copy of it in Hugging Face's layout by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model(family)
    path = mistral_of(model, tmp_path)
    with torch.no_grad():
        expected = model.reference(torch.tensor([TOKENS])).logits[0]
    assert_close(chain_logits(decoder_of(path), TOKENS), expected)
    convert(path, tmp_path / "copy", ConvertParams("fp32"))
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        assert_close(copy.eval()(torch.tensor([TOKENS])).logits[0], expected)
    text = "The 1st [INST] test</s>"
    ids = Tokenizer.load(path / "tekken.json").encode(text)
    assert Tokenizer.load(tmp_path / "copy").encode(text) == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "copy")(text)["input_ids"] == ids


def test_fp8_says_what_it_says_in_the_other_layout(tiny_model: GetModel, tmp_path: Path) -> None:
    model = tiny_model("ministral3")
    tensors = dict[str, Tensor]()
    for name, tensor in model.reference.state_dict().items():
        if "_proj." in name:
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale.reshape(1)
        else:
            tensors[name] = tensor.contiguous()
    config, theirs = model.reference.config.to_dict(), tmp_path / "theirs"
    fp8 = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    own = write_mistral(tmp_path / "own", config, tensors, **fp8)
    theirs.mkdir()
    save_file(tensors, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert torch.equal(chain_logits(decoder_of(own), TOKENS), chain_logits(decoder_of(theirs), TOKENS))


def test_the_language_model_of_one_that_reads_images(tiny_model: GetModel, tmp_path: Path) -> None:
    model, notes = tiny_model("ministral3"), list[Any]()
    path = mistral_of(model, tmp_path, {"vision_encoder.conv.weight": torch.ones(2, 2)}, vision_encoder={"dim": 2})
    files = open_model(path, "fp32", notes)
    assert "reads no images" in notes[0].text
    planned = model_to_plan(path, "nf4", "bf16", [])
    assert planned.stored.by_name.keys() == files.stored.by_name.keys()


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"moe": {"num_experts": 4}}, UnsupportedModelError, ["'moe'"]),
        ({"sliding_window": [8, 9]}, CheckpointError, ["sliding_window"]),
        ({"quantization": {"qformat_weight": "int3"}}, UnsupportedModelError, ["int3"]),
        (
            {"yarn": {"factor": 2.0, "original_max_position_embeddings": 8}},
            CheckpointError,
            ["yarn", "llama_4_scaling"],
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    tiny_model: GetModel, more: dict[str, Any], kind: type[CheckpointError], words: list[str], tmp_path: Path
) -> None:
    path = mistral_of(tiny_model("ministral3"), tmp_path, **more)
    with refused(kind, path, *words):
        open_model(path, "fp32", [])


def test_a_missing_shard_is_named(tiny_model: GetModel, tmp_path: Path) -> None:
    path = mistral_of(tiny_model("ministral3"), tmp_path)
    (path / "consolidated.safetensors").rename(path / "consolidated-00001-of-00002.safetensors")
    with refused(MissingWeightsError, path, "consolidated.safetensors"):
        open_model(path, "fp32", [])
    index = {"weight_map": {"norm.weight": "consolidated-00002-of-00002.safetensors"}}
    (path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    with refused(MissingWeightsError, path, "consolidated-00002-of-00002.safetensors"):
        open_model(path, "fp32", [])
