"""Of a checkpoint of text and images the language model is loaded, and says what transformers says of the text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec import convert
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.errors import CheckpointError, UnsupportedModelError
from offspec.loaders.params import ConvertParams
from offspec.notes import Note

from ...fakes import FAMILIES, Family, TinyModel, config_json, randomise
from ...refusals import refused, tells
from ..model.test_decoder import assert_close, chain_logits, random_tokens
from .test_gguf_models import decoder_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA = {"vision_config": {"model_type": "siglip_vision_model", **VISION}, "mm_tokens_per_image": 4}
PIXTRAL = {"vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION}, "tie_word_embeddings": False}
QWEN = {
    "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
}
# No Gemma 3 caps its logits, and where config.json says so transformers does it without images only.
UNCAPPED = replace(FAMILIES["gemma3"], settings={**FAMILIES["gemma3"].settings, "final_logit_softcapping": None})
MODELS: dict[str, tuple[str, Family, dict[str, Any]]] = {
    "gemma3": ("gemma3", UNCAPPED, GEMMA),
    "qwen3.5": ("qwen3_5", FAMILIES["qwen3.5"], QWEN),
    "lfm2-vl": ("lfm2_vl", FAMILIES["lfm2"], {"vision_config": {"model_type": "siglip2_vision_model", **VISION}}),
    "mistral3-ministral": ("mistral3", FAMILIES["ministral3"], PIXTRAL),
}
GetModel = Callable[[str], TinyModel]


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    """A tiny random checkpoint of text and images, written by transformers, by its name in MODELS."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    @cache
    def built(name: str) -> TinyModel:
        model_type, text, settings = MODELS[name]
        config = AutoConfig.for_model(model_type, text_config=config_json(text), **settings)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        randomise(model, torch.Generator().manual_seed(0))
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return TinyModel(folder, model)

    return built


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(multimodal: GetModel, name: str) -> None:
    model, tokens, notes = multimodal(name), random_tokens(40), list[Note]()
    decoder = decoder_of(model.folder, notes)
    assert any(tells(note.text, "language model", "images") for note in notes)
    with torch.no_grad():
        assert_close(chain_logits(decoder, tokens), model.reference(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize("beginning", ["model.language_model.", "language_model.model."])
def test_both_ways_to_name_its_tensors(multimodal: GetModel, tmp_path: Path, beginning: str) -> None:
    """As files have them, and as transformers 5 has them in memory."""
    folder, tokens = multimodal("gemma3").folder, random_tokens(20)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", beginning).replace("vision_tower.", "model.vision_tower."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, other / "model.safetensors")
    found, expected = (chain_logits(decoder_of(each), tokens) for each in (other, folder))
    assert torch.equal(found, expected)


def test_olmo_hybrid_as_released(tiny_model: GetModel, tmp_path: Path) -> None:
    """Other names of norms than transformers writes, and kernels that are cut between queries, keys and values."""
    model, tokens = tiny_model("olmo-hybrid"), random_tokens(20)
    other = Path(shutil.copytree(model.folder, tmp_path / "other"))
    tensors = dict(model.reference.state_dict())
    for name in [name for name in tensors if "conv1d" in name]:
        parts = torch.split(tensors.pop(name), [96, 96, 64])
        tensors |= {name.replace("conv1d", f"{kind}_conv1d"): part for kind, part in zip("qkv", parts, strict=True)}
    assert tensors.keys() != load_file(other / "model.safetensors").keys()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, other / "model.safetensors")
    found, expected = (chain_logits(decoder_of(each), tokens) for each in (other, model.folder))
    assert torch.equal(found, expected)


def test_a_tensor_under_both_names_is_refused(multimodal: GetModel, tmp_path: Path) -> None:
    other = Path(shutil.copytree(multimodal("gemma3").folder, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.zeros(64)}, other / "model.safetensors")
    with refused(CheckpointError, "model.norm.weight", "another name"):
        decoder_of(other)


@pytest.mark.parametrize("form", ["keep", "nf4"])
def test_a_copy_is_the_language_model_alone(multimodal: GetModel, tmp_path: Path, form: str) -> None:
    """An ordinary checkpoint of text, for transformers, too."""
    from transformers import AutoConfig

    source, tokens = multimodal("mistral3-ministral").folder, random_tokens(20)
    convert(source, tmp_path / "copy", ConvertParams(form))
    said = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert (said["model_type"], said["architectures"]) == ("ministral3", ["Ministral3ForCausalLM"])
    assert AutoConfig.from_pretrained(tmp_path / "copy").num_hidden_layers == 3
    notes = list[Note]()
    found, expected = (
        chain_logits(decoder_of(tmp_path / "copy", notes), tokens),
        chain_logits(decoder_of(source), tokens),
    )
    assert not any("images" in note.text for note in notes)
    if form == "keep":
        assert torch.equal(found, expected)
    else:
        assert np.corrcoef(found.flatten(), expected.flatten())[0, 1] > 0.8


def test_it_is_planned_from_config_json_alone(multimodal: GetModel, tmp_path: Path) -> None:
    shutil.copy(multimodal("gemma3").folder / "config.json", tmp_path)
    notes = list[Note]()
    planned = model_to_plan(tmp_path, "bf16", "bf16", notes)
    opened = open_model(multimodal("gemma3").folder, "bf16", [])
    assert planned.config == opened.config
    assert planned.num_parameters == opened.num_parameters
    assert any(tells(note.text, "language model", "images") for note in notes)


@pytest.mark.parametrize(
    ("config", "error", "told"),
    [
        ({"model_type": "gemma3", "text_config": [1]}, CheckpointError, "text_config object"),
        ({"model_type": "gemma3"}, CheckpointError, "hidden_size"),
        ({"model_type": "mistral3", "text_config": {"model_type": "blip"}}, UnsupportedModelError, "'blip'"),
    ],
)
def test_what_does_not_say_what_it_is_is_refused(
    tmp_path: Path, config: dict[str, Any], error: type[Exception], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(error, *told.split()):
        model_to_plan(tmp_path, "bf16", "auto", [])
