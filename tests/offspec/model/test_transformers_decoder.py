"""Models that offspec has no code for, through transformers' modules: the text is the one that transformers writes."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.conversion import convert
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.drafts.head_draft import HeadDraft
from offspec.drafts.without_model import LookupDraft
from offspec.errors import CheckpointError, UnsupportedModelError, UsageError
from offspec.loaded_target import LoadedTarget
from offspec.loaders.params import ConvertParams
from offspec.model import pass_rows
from offspec.model.decoder import Decoder
from offspec.model.transformers_decoder import ForeignDecoder
from offspec.planning.plan import all_resident

from ...pair import VOCAB_SIZE, Pair, build_pair, variant
from ...refusals import check_message, refused
from ..drafts.test_head_draft import HEADS
from .families.test_families import streamed
from .heads.head_twins import write_folder

CPU = torch.device("cpu")
PROMPT = [5, 9, 33, 70, 71, 72, 40, 41, 9, 33, 70, 71, 72, 40, 41, 9, 33]
NUM_TOKENS = 8
GREEDY = SamplingParams(NUM_TOKENS, seed=0, ignore_eos=True)
SAMPLED = SamplingParams(8, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
PLAIN = SpeculationParams(budget=0)

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2}
OLD_SHAPE = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "falcon-multi-query": SHAPE | {"model_type": "falcon", "multi_query": True, "bias": True},
    "falcon-new": SHAPE | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "stablelm": GROUPED | {"model_type": "stablelm", "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "dots1": GROUPED | EXPERTS | {"model_type": "dots1"},
    "granitemoeshared": GROUPED
    | {"model_type": "granitemoeshared", "num_local_experts": 4, "shared_intermediate_size": 24},
    "gpt_neox": SHAPE | {"model_type": "gpt_neox", "intermediate_size": 64, "rotary_pct": 0.5},
    "phi": SHAPE | {"model_type": "phi", "intermediate_size": 64, "partial_rotary_factor": 0.5},
    "gpt2": OLD_SHAPE | {"model_type": "gpt2"},
    "gptj": OLD_SHAPE | {"model_type": "gptj", "rotary_dim": 4},
    "opt": SHAPE | {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32},
    "minicpm3": GROUPED | LATENT | {"model_type": "minicpm3"},
}
# Windows with experts, joined experts, learnt positions, latent entries. The others run nightly.
DAILY = ("dots1", "granitemoeshared", "gpt2", "minicpm3")


@dataclass(frozen=True)
class Foreign:
    """A tiny random checkpoint that transformers wrote, and what it makes of it."""

    folder: Path
    reference: PreTrainedModel

    @property
    def text(self) -> list[int]:
        """Greedy."""
        ids = torch.tensor([PROMPT])
        limits = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
        out: Any = self.reference.generate(ids, attention_mask=torch.ones_like(ids), **limits)  # type: ignore[operator]
        return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    loaded = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu")
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def models(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Foreign]:
    """Those that were asked for, each built once."""
    disable_progress_bar()

    class Built(dict[str, Foreign]):
        def __missing__(self, name: str) -> Foreign:
            self[name] = build(MODELS[name], tmp_path_factory.mktemp(name), pair)
            return self[name]

    return Built()


@torch.no_grad()
def build(config: dict[str, Any], folder: Path, pair: Pair) -> Foreign:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else 1.2 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair.target / name, folder)
    return Foreign(folder, reference(folder))


def reference(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model.eval()


def resident(folder: Path) -> Decoder:
    files = open_model(folder, "fp32", [])
    return load_decoder(files, all_resident(files), CPU)


def text_of(engine: Engine, params: SamplingParams, speculation: SpeculationParams | None = None) -> list[int]:
    steps = engine.generate(PROMPT, params, speculation or SpeculationParams(budget=12))
    return [token for step in steps for token in step.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in MODELS]
)
def test_text_is_transformers_whatever_guesses_and_wherever_layers_lie(
    name: str, models: dict[str, Foreign], engine: Engine
) -> None:
    model = models[name]
    here, there = resident(model.folder), streamed(model.folder)
    assert isinstance(here, ForeignDecoder)
    drafted = Engine(LoadedTarget(here), engine.tokenizer, engine.draft)
    looked_up = Engine(LoadedTarget(there), engine.tokenizer, LookupDraft())
    assert text_of(drafted, GREEDY) == model.text
    assert text_of(looked_up, SAMPLED) == text_of(drafted, SAMPLED, PLAIN)
    there.weights.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dots1", pytest.param("opt", marks=pytest.mark.nightly)])
def test_texts_that_share_passes_are_plain_decodings(name: str, models: dict[str, Foreign], engine: Engine) -> None:
    """Prompts of different lengths; their windows and positions are each text's own."""
    drafted = Engine(LoadedTarget(resident(models[name].folder)), engine.tokenizer, engine.draft)
    prompts = [PROMPT, PROMPT * 2, PROMPT[:2]]
    found: list[list[int]] = [[] for _ in prompts]
    for index, step in drafted.generate_many(prompts, SAMPLED, SpeculationParams(budget=6)):
        found[index] += step.token_ids
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == [token for step in drafted.generate(prompt, SAMPLED, PLAIN) for token in step.token_ids]


@pytest.mark.parametrize("name", ["falcon-new"])
def test_long_rows_go_through_a_layer_in_chunks(
    name: str, models: dict[str, Foreign], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[name]
    tokens, cache = torch.tensor(PROMPT), (decoder := resident(model.folder)).new_cache()
    expected = model.reference(tokens[None]).logits[0]
    whole = decoder.logits(decoder.forward(tokens, torch.arange(len(PROMPT)), decoder.new_cache()))
    monkeypatch.setattr(pass_rows, "CHUNK_ROWS", 5)
    chunked = decoder.logits(decoder.forward(tokens, torch.arange(len(PROMPT)), cache))
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-4)


def test_four_bit_experts_are_unpacked_one_by_one(models: dict[str, Foreign], tmp_path: Path) -> None:
    source, packed, plain = models["dots1"].folder, tmp_path / "packed", tmp_path / "plain"
    convert(source, packed, ConvertParams(format="nf4"))
    decoder, tensors = resident(packed), load_file(source / "model.safetensors")
    for index in range(decoder.config.num_layers):
        with decoder.weights.layer(index) as layer:
            for short, weight in layer.items():
                if not isinstance(weight, torch.Tensor):
                    tensors[f"model.layers.{index}.{short}"] = weight.dequantize(torch.float32)
    shutil.copytree(source, plain)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    expected = reference(plain)(torch.tensor([PROMPT])).logits[0]
    found = decoder.logits(decoder.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), decoder.new_cache()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_base_models_names_are_found(models: dict[str, Foreign], tmp_path: Path) -> None:
    """As gpt2 itself has them: "h.0.ln_1.weight", where its modules say "transformer.h.0.ln_1.weight"."""
    model = models["gpt2"]
    folder = shutil.copytree(model.folder, tmp_path / "short")
    tensors = load_file(folder / "model.safetensors")
    save_file({n.removeprefix("transformer."): t for n, t in tensors.items()}, folder / "model.safetensors")
    tokens, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    found = [d.logits(d.forward(tokens, positions, d.new_cache())) for d in map(resident, (folder, model.folder))]
    assert torch.equal(*found)


def test_sizes_are_planned_from_config_json_alone(models: dict[str, Foreign]) -> None:
    for name in ("dots1", "gpt2"):
        there = open_model(models[name].folder, "fp32", [])
        alone = model_to_plan(models[name].folder, "fp32", "fp32", [])
        assert alone.num_parameters == there.num_parameters
        assert model_to_plan(models[name].folder, "nf4", "fp32", []).num_parameters


# ------------------------------------------------------------------------------------------------ refusals


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "recurrent layers": ({"model_type": "mamba", "hidden_size": 32}, "recurrent"),
    "bloom": ({"model_type": "bloom", "hidden_size": 32, "n_head": 4, "n_layer": 2}, "positions"),
    "masks inside": (
        {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "masks",
    ),
    "tables": (
        GROUPED
        | {"model_type": "gemma3n_text", "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0}
        | {"num_hidden_layers": 2, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
        "tables",
    ),
    "encoder": ({"model_type": "bart", "is_encoder_decoder": True}, "encoder"),
    "unknown": ({"model_type": "no_such_model"}, "transformers"),
    "own code": ({"model_type": "no_such_model", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
    "no text": (SHAPE | {"model_type": "gpt_neox", "architectures": ["GPTNeoXModel"]}, "GPTNeoXModel"),
    "dynamic RoPE": (
        SHAPE
        | {"model_type": "gpt_neox", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic",
    ),
    "no window": (GROUPED | EXPERTS | {"model_type": "dots1", "sliding_window": 0}, "mask"),
    "method": (SHAPE | {"model_type": "gpt_neox", "quantization_config": {"quant_method": "hqq"}}, "hqq"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_hold_a_tree_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    config, told = REFUSED[what]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(UnsupportedModelError, tmp_path, told):
        model_to_plan(tmp_path, "bf16", "auto", [])


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**30},
        {"hidden_act": "none"},
        {"rope_parameters": 7},
        {"head_dim": 2**31 - 1, "hidden_size": 2**30},
    ],
    ids=str,
)
def test_a_lying_config_is_refused_in_one_line(
    settings: dict[str, Any], models: dict[str, Foreign], tmp_path: Path
) -> None:
    folder = variant(models["stablelm"].folder, tmp_path / "lying", **settings)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        open_model(folder, "auto", [])
    check_message(str(caught.value), folder)
    assert len(str(caught.value)) < 800  # some name all families


def test_tensors_that_do_not_fit_are_refused(models: dict[str, Foreign], tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], type[Exception], tuple[str, ...]], ...] = (
        ({"model.layers.1.mlp.experts.2.gate_proj.weight": None}, CheckpointError, ("experts",)),
        ({"model.norm.weight": None}, CheckpointError, ("missing",)),
        ({"model.layers.0.mlp.experts.1.down_proj.weight": torch.zeros(3, 3)}, CheckpointError, ("[3, 3]",)),
        ({"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}, CheckpointError, ("[3, 3]",)),
        ({"model.layers.0.self_attn.surprise.weight": torch.zeros(3)}, UnsupportedModelError, ("surprise",)),
    )
    for number, (change, error, words) in enumerate(cases):
        folder = shutil.copytree(models["dots1"].folder, tmp_path / str(number))
        tensors = load_file(folder / "model.safetensors") | change
        save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")
        with refused(error, folder, *words):
            open_model(folder, "auto", [])


def test_without_transformers_the_remedy_is_named(models: dict[str, Foreign], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    with refused(UnsupportedModelError, models["stablelm"].folder, "pip install 'offspec[transformers]'"):
        open_model(models["stablelm"].folder, "auto", [])


def test_heads_draft_for_them(models: dict[str, Foreign], tmp_path: Path) -> None:
    """They read the states of these layers, and use the model's own embedding and head."""
    config, tensors = HEADS["EAGLE-3"]
    head = write_folder(tmp_path, config | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, tensors())
    with Engine.load(str(models["stablelm"].folder), draft=str(head), device="cpu", dtype="fp32") as engine:
        assert isinstance(engine.draft, HeadDraft)
        steps = list(engine.generate(PROMPT, GREEDY, SpeculationParams(budget=12, lookup=False)))
        assert [token for step in steps for token in step.token_ids] == models["stablelm"].text
        assert steps[-1].stats.num_drafted_tokens > 12
        assert text_of(engine, SAMPLED) == text_of(engine, SAMPLED, PLAIN)


def test_what_needs_our_own_decoder_is_refused(models: dict[str, Foreign], pair: Pair) -> None:
    foreign = str(models["stablelm"].folder)
    with refused(UsageError, "exit layer", "decoder"):
        Engine.load(foreign, draft="self")
    with refused(UsageError, "learn", "`learn`"):
        Engine.load(str(pair.target), draft=foreign, learn=True)
