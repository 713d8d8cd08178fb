"""Families in GGUF: the same weights say what transformers says of them, and what llama.cpp says of the same file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec import ConvertParams, convert
from offspec.checkpoints.gguf import gguf_labels, translated
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.errors import CheckpointError, MissingWeightsError
from offspec.loaders.files.checkpoint import Change, CheckpointView
from offspec.loaders.files.gguf_file import read_model
from offspec.model.decoder import Decoder
from offspec.notes import Note
from offspec.planning.plan import all_resident

from ... import fakes
from ...fakes import VOCAB_SIZE, Family, TinyModel, build
from ...gguf_models import write_model
from ...llama_cpp import LlamaCpp
from ...refusals import refused

GetModel = Callable[[str], TinyModel]
GetDecoder = Callable[[str], Decoder]
TOLERANCE = 2e-4  # fp32; frequencies of RoPE and norms' weights were rounded once more
PROMPT = torch.randint(VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(5)).tolist()
NUM_TOKENS = 16
NEAR_TIE = 0.02  # of logits that lie some units apart: llama.cpp computes RoPE and activations with tables
SLIDING, FULL = "sliding_attention", "full_attention"
EVERY_FOURTH = {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]}
EVERY_SIXTH = {"num_hidden_layers": 6, "sliding_window": 8, "layer_types": [SLIDING] * 5 + [FULL]}
GEMMA = {
    "head_dim": 24,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
}  # which llama.cpp takes from the head
LOCAL_AND_GLOBAL = {
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    FULL: {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
}


def settings_of(family: str) -> Mapping[str, Any]:
    return fakes.FAMILIES[family].settings


# What llama.cpp reads otherwise than transformers writes it: it knows some numbers by heart, and no others.
OWN = {
    "gemma2": Family(
        "gemma2", {**GEMMA, "sliding_window": 8, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
    ),
    "gemma3": Family("gemma3_text", {**GEMMA, **EVERY_SIXTH}, rope=LOCAL_AND_GLOBAL),
    "phi3": Family("phi3", {"sliding_window": None}),
    "phi3-longrope": Family(
        "phi3",
        {"max_position_embeddings": 1024, "original_max_position_embeddings": 256, "tie_word_embeddings": True},
        rope={**fakes.FAMILIES["phi3-longrope"].rope},
    ),
    "olmo3": Family("olmo3", EVERY_FOURTH),
    "cohere": Family("cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "cohere2": Family("cohere2", {**EVERY_FOURTH, "logit_scale": 2.0, "tie_word_embeddings": True}),
    "smollm3": Family("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3.5": Family(
        "qwen3_5_text",
        {**settings_of("qwen3.5"), "linear_key_head_dim": 16, "linear_num_value_heads": 6},
        rope=fakes.FAMILIES["qwen3.5"].rope,
    ),
    "granite-h": Family("granitemoehybrid", {**settings_of("granite-h"), "position_embedding_type": "nope"}),
    "falcon-h1": Family(
        "falcon_h1", {**settings_of("falcon-h1"), "mamba_proj_bias": False, "time_step_limit": [0.0, math.inf]}
    ),
    "nemotron-h": Family("nemotron_h", {**settings_of("nemotron-h"), "use_bias": False}),
    "qwen3-moe": Family("qwen3_moe", {**settings_of("qwen3-moe"), "mlp_only_layers": []}),
    "olmoe": Family("olmoe", {**settings_of("olmoe"), "norm_topk_prob": False, "num_key_value_heads": 4}),
    "gpt-oss": Family("gpt_oss", {**settings_of("gpt-oss"), "sliding_window": 8}),
    "granite-h-moe": Family("granitemoehybrid", {**settings_of("granite-h-moe"), "position_embedding_type": "nope"}),
    "qwen3.5-moe": Family(
        "qwen3_5_moe_text",
        {**settings_of("qwen3.5-moe"), "linear_key_head_dim": 16, "linear_num_value_heads": 6},
        rope=fakes.FAMILIES["qwen3.5-moe"].rope,
    ),
    "qwen3-next": Family(
        "qwen3_next",
        {**settings_of("qwen3-next"), "linear_key_head_dim": 16, "mlp_only_layers": []},
        rope=fakes.FAMILIES["qwen3-next"].rope,
    ),
    "deepseek-v2": Family(
        "deepseek_v2",
        {**settings_of("deepseek-v2"), "topk_method": "greedy", "attention_bias": False},
        rope=fakes.FAMILIES["deepseek-v2-lite"].rope,
    ),
    "starcoder2": Family("starcoder2", {"sliding_window": None, "tie_word_embeddings": True}, seed=4),
}
FAMILIES = (
    *("llama-gqa", "llama-tied", "llama-llama3", "llama-linear", "llama-yarn"),
    *("llama-yarn-attention-factor", "ministral3", "qwen2", "qwen3"),
    *("mixtral", "qwen2-moe", "glm4-moe", "minimax-m2", "granite-moe", "deepseek-v3"),
    *("gemma4", "gemma4-layer-inputs", "glm4", "lfm2", "granite", "olmo2", "nemotron", "exaone4-full", *OWN),
)


@pytest.fixture(scope="module")
def gguf_model(tiny_model: GetModel, tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    made = cache(lambda name: build(OWN[name], tmp_path_factory.mktemp(name)))
    return lambda name: made(name) if name in OWN else tiny_model(name)


@pytest.fixture(scope="module")
def gguf_file(gguf_model: GetModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's file, which tests do not change."""
    return cache(lambda name: gguf_of(gguf_model(name), tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def gguf_decoder(gguf_file: Callable[[str], Path]) -> GetDecoder:
    return cache(lambda name: decoder_of(gguf_file(name)))


def gguf_of(model: TinyModel, folder: Path, kinds: dict[str, str] | None = None) -> Path:
    tensors = dict(model.reference.state_dict())
    return write_model(folder / "model.gguf", model.reference.config.to_dict(), tensors, kinds or {})


def decoder_of(path: Path, notes: list[Note] | None = None) -> Decoder:
    files = open_model(path, "fp32", [] if notes is None else notes)
    return load_decoder(files, all_resident(files), torch.device("cpu"))


def logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    return decoder.logits(decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), decoder.new_cache()))


def worst_gap(decoder: Decoder, prompt: list[int], said: list[int]) -> float:
    """By how much of a logit some token said after the prompt is below the best one; 0 where all are."""
    found = logits(decoder, [*prompt, *said[:-1]])[len(prompt) - 1 :]
    return float((found.amax(-1) - found[torch.arange(len(said)), said]).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(gguf_model: GetModel, gguf_decoder: GetDecoder, family: str) -> None:
    with torch.no_grad():
        expected = gguf_model(family).reference(torch.tensor([PROMPT])).logits[0]
    assert (logits(gguf_decoder(family), PROMPT) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_llama_cpps(
    gguf_file: Callable[[str], Path], gguf_decoder: GetDecoder, family: str, llama_cpp: LlamaCpp
) -> None:
    said = llama_cpp.greedy(gguf_file(family), PROMPT, NUM_TOKENS)
    assert said  # the end of a text among them, which comes early or not
    assert worst_gap(gguf_decoder(family), PROMPT, said) < NEAR_TIE


@pytest.mark.parametrize("family", ["gemma3", "gemma4-layer-inputs", "phi3", "qwen3.5", "nemotron-h", "qwen2-moe"])
def test_a_plain_copy_is_a_checkpoint_of_transformers(
    gguf_model: GetModel, gguf_file: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    """Names, rows and norms are Hugging Face's again, and its config.json says what the original's did."""
    from transformers import AutoModelForCausalLM

    convert(gguf_file(family), tmp_path / "copy", ConvertParams("fp32"))
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", attn_implementation="eager", dtype=torch.float32)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        assert (copy.eval()(tokens).logits - gguf_model(family).reference(tokens).logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama-tied", "qwen3.5"])
def test_quantised_tensors_say_what_their_plain_copy_says(gguf_model: GetModel, family: str, tmp_path: Path) -> None:
    """A tied embedding, which is the head as well, is quantised, too; and a delta net's sorted heads."""
    kinds = {"attn_": "Q8_0", "ssm_out": "Q8_0", "ffn_": "Q4_0", "token_embd": "Q8_0", "norm": "F32"}
    path = gguf_of(gguf_model(family), tmp_path, kinds)
    convert(path, tmp_path / "copy", ConvertParams("fp32"))
    found, expected = (logits(decoder_of(file), PROMPT) for file in (path, tmp_path / "copy"))
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("size", "number", "told"),
    [("128x2.4B", 30, ("128x2.4B", "IQ4_XS")), ("30B-A3B", 7, ("30B-A3B", "Q8_0")), ("\x1b[2J", 9999, (None, None))],
)
def test_a_file_names_its_size_and_its_mixture(
    size: str | None, number: int | None, told: tuple[str | None, str | None], gguf_file: Callable[[str], Path]
) -> None:
    """Its tensors have several types, and a tied head may be stored twice; other text than a size is not shown."""
    opened = translated(read_model(gguf_file("smollm3")))
    metadata = {**opened.model.metadata, "general.size_label": size, "general.file_type": number}
    named = replace(opened, model=replace(opened.model, metadata=metadata))
    assert gguf_labels(CheckpointView(named, named.tensors)) == told


def test_a_layer_of_multi_token_prediction_is_named_and_not_loaded(gguf_model: GetModel, tmp_path: Path) -> None:
    """The layer behind the model's last one; its norms have 1 added, as the others have."""
    reference = gguf_model("qwen3.5").reference
    config, tensors = reference.config.to_dict() | {"mtp_num_hidden_layers": 1}, dict(reference.state_dict())
    for name in ("nextn.enorm", "attn_k_norm", "nextn.eh_proj", "nextn.shared_head_head"):
        tensors[f"blk.4.{name}.weight"] = torch.ones(32)
    path = write_model(tmp_path / "model.gguf", config, tensors)
    opened = translated(read_model(path))
    changes = {name: info.change for name, info in opened.tensors.items() if name.startswith("mtp.")}
    added = Change(added=1.0)
    assert changes == {
        "mtp.pre_fc_norm_embedding.weight": added,
        "mtp.layers.0.self_attn.k_norm.weight": added,
        "mtp.fc.weight": None,
        "mtp.lm_head.weight": None,
    }
    assert decoder_of(path).config.num_layers == 4


def test_early_files_of_qwen3_next_have_one_matrix_of_inputs(gguf_model: GetModel, tmp_path: Path) -> None:
    reference = gguf_model("qwen3-next").reference
    tensors = {
        re.sub(r"model\.layers\.(\d)\.linear_attn\.in_proj_qkvz", r"blk.\1.ssm_in", name): tensor
        for name, tensor in reference.state_dict().items()
    }
    decoder = decoder_of(write_model(tmp_path / "model.gguf", reference.config.to_dict(), tensors))
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (logits(decoder, PROMPT) - expected).abs().max() < TOLERANCE


def test_gpt_oss_has_the_borders_of_yarn_that_its_authors_gave_it(gguf_model: GetModel, tmp_path: Path) -> None:
    """llama.cpp rounds them; files do not name them."""
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 64}
    scaling = config_of(gguf_of(gguf_model("gpt-oss"), tmp_path), {f"gpt-oss.{key}": yarn[key] for key in yarn})
    assert scaling["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    }


def test_two_tensors_of_one_name_are_refused(gguf_model: GetModel, tmp_path: Path) -> None:
    """Not the one that stands later is taken, silently."""
    model = read_model(gguf_of(gguf_model("qwen3"), tmp_path))
    twice = replace(model.tensors["blk.0.ffn_up.weight"], name="blk.00.ffn_up.weight")
    with refused(CheckpointError, "model.layers.0.mlp.up_proj.weight", "twice", "blk.00.ffn_up.weight"):
        translated(replace(model, tensors={**model.tensors, twice.name: twice}))


def config_of(path: Path, other: dict[str, Any]) -> Mapping[str, Any]:
    """What config.json would say of the file with other metadata; None takes a key away."""
    model = read_model(path)
    metadata = {**model.metadata, **other}
    return translated(replace(model, metadata={k: v for k, v in metadata.items() if v is not None})).config


def test_what_early_files_do_not_name_is_as_llama_cpp_knows_it(gguf_model: GetModel, tmp_path: Path) -> None:
    """llama.cpp, src/models/gemma2.cpp and load_hparams: windows of 4096, and a factor that scales linearly."""
    gemma = gguf_of(gguf_model("gemma2"), tmp_path)
    said = config_of(gemma, {"gemma2.attention.sliding_window": None})
    assert said["sliding_window"] == 4096
    assert said["layer_types"][:2] == [SLIDING, FULL]
    llama = gguf_of(gguf_model("llama-gqa"), tmp_path)
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        assert config_of(llama, {key: 4.0})["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
        assert config_of(llama, {key: 4.0, "llama.rope.scaling.type": "none"})["rope_scaling"] is None
        assert config_of(llama, {key: 0.0})["rope_scaling"] is None
    with refused(CheckpointError, "llama.rope.scaling.attn_factor"):
        config_of(llama, {"llama.rope.scaling.attn_factor": 1.5})


def test_the_recommended_sampling_is_in_the_metadata(gguf_model: GetModel, tmp_path: Path) -> None:
    """In 32 bits: 0.6 is 0.6 again, also in a folder made of the file."""
    model = read_model(gguf_of(gguf_model("qwen3"), tmp_path))
    names = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 2}
    stored = {f"general.sampling.{name}": _in_32_bits(value) for name, value in names.items()}
    opened = translated(replace(model, metadata={**model.metadata, **stored}))
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    assert opened.generation_config == expected
    written = json.loads(opened.companions()["generation_config.json"])
    assert {name: value for name, value in written.items() if name != "eos_token_id"} == expected
    assert translated(model).generation_config == {}


def _in_32_bits(value: float) -> float:
    return float(np.float32(value)) if isinstance(value, float) else value


def test_it_is_planned_in_another_format_as_its_folder_is(gguf_model: GetModel, tmp_path: Path) -> None:
    """A head of its own, norms of heads and biases are in no metadata: the names of tensors tell."""
    for family in ("llama-gqa", "qwen2"):
        model = gguf_model(family)
        found, expected = (
            model_to_plan(path, "nf4", "bf16", []).stored.by_name for path in (gguf_of(model, tmp_path), model.folder)
        )
        assert {name: weight.shape for name, weight in found.items()} == {n: w.shape for n, w in expected.items()}


def test_a_split_set_that_is_not_all_there_is_not_planned_as_bf16(gguf_model: GetModel, tmp_path: Path) -> None:
    part = gguf_of(gguf_model("qwen3"), tmp_path).rename(tmp_path / "m-00001-of-00002.gguf")
    with refused(MissingWeightsError, part, "1 of 2", "missing"):
        model_to_plan(part, "nf4", "bf16", [])
