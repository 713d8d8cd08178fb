"""Families whose layers differ, by a recurrent state or by entries of other layers: the text is plain decoding's.

A family is data, as any other: an entry of `FAMILIES` that names the parts of each layer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offspec import Constraint, ConvertParams, Engine, PromptCache, SamplingParams, SpeculationParams, convert
from offspec.backends.arithmetic import EXACT
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import open_model
from offspec.drafts.base import DraftOptions, OpenRequest
from offspec.drafts.kinds import open_draft
from offspec.drafts.model_draft import ModelDraft
from offspec.drafts.without_model import LookupDraft, NoDraft
from offspec.loaded_target import LoadedTarget
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of
from offspec.model.config import read_config
from offspec.model.decoder import Decoder, wanted_shapes
from offspec.model.exactness import reason_against_exactness
from offspec.model.families.dense import llama
from offspec.model.families.registry import FAMILIES
from offspec.model.parts.kinds import PARTS
from offspec.planning.plan import all_resident
from offspec.text.tokenizer import Tokenizer

from ..fuzz.quantised import FORMS, Stored, read_tensors, write_tensors
from ..machines import needs_kernels
from ..pair import build_pair
from .model.averages import Average

CPU = torch.device("cpu")
LAYERS = (("average", "mlp"), ("attention", "mlp"), ("average", "mlp"), ("attention", "mlp"))
GREEDY, SAMPLED = SamplingParams(7, ignore_eos=True), SamplingParams(7, temperature=0.9, seed=3, ignore_eos=True)
PLAIN = SpeculationParams(budget=0)
PROMPT = "def area("


@pytest.fixture(scope="module", autouse=True)
def family() -> Iterator[None]:
    PARTS["average"] = Average
    FAMILIES["averaging"] = lambda config, num_layers: llama(config, num_layers) | {"parts": LAYERS}
    yield
    del PARTS["average"], FAMILIES["averaging"]


DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 24,
}
OF_HYBRIDS = {  # by model_type: what its config.json says beside Llama's
    "qwen3_5_text": DELTA_NETS,
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_rms_norm": True,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-*M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "olmo_hybrid": {**DELTA_NETS, "linear_num_key_heads": 4, "rope_parameters": {"rope_theta": None}},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 2048,
        "rope_parameters": None,
        "tie_word_embeddings": False,
    },
}


NIGHTLY = [
    pytest.param(model_type, marks=pytest.mark.nightly)
    for model_type in ("olmo_hybrid", "granitemoehybrid", "nemotron_h")
]


@pytest.fixture(scope="module", params=["averaging", "qwen3_5_text", "lfm2", "falcon_h1", "gemma4_text", *NIGHTLY])
def folder(family: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each hybrid family, and of one whose layers share entries, with random weights."""
    return build(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid whose matrices have whole groups of each format."""
    size = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "linear_key_head_dim": 16}
    return build("qwen3_5_text", tmp_path_factory, **size)


def build(model_type: str, tmp_path_factory: pytest.TempPathFactory, **settings: int) -> Path:
    pair, folder = build_pair(tmp_path_factory.mktemp("pair")), tmp_path_factory.mktemp(model_type)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair.target / name, folder)
    config = json.loads((pair.target / "config.json").read_text())
    config |= {"model_type": model_type, "num_hidden_layers": len(LAYERS)}
    config |= OF_HYBRIDS.get(model_type, {}) | settings
    (folder / "config.json").write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, shape in wanted_shapes(read_config(config)).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else 1.5 * noise / shape[-1] ** 0.5
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(folder: Path, *resident: int, dtype: str = "fp32") -> Decoder:
    """All layers stay, or these alone, and the others come from disk."""
    files = open_model(folder, dtype, [])
    if not resident:
        return load_decoder(files, all_resident(files), CPU)
    others = tuple(layer for layer in range(len(LAYERS)) if layer not in resident)
    slot = max(layer.cost(files.dtype).slot_bytes for layer in files.stored.layers)
    places = places_of(resident=resident, on_disk=others)
    placement = Placement(places, Slots(2, 0, slot), (), Limits(None, 0), 0, 0)
    return load_decoder(files, placement, CPU, WeightSettings(has_far_embedding=True))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(str(folder), draft="lookup", device="cpu", dtype="fp32") as found:
        yield found


def text_of(
    engine: Engine, params: SamplingParams, speculation: SpeculationParams | None = None, prompt: str = PROMPT
) -> list[int]:
    steps = engine.generate(prompt, params, speculation or SpeculationParams(budget=12))
    return [token for step in steps for token in step.token_ids]


@pytest.mark.each_value
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_plain_decodings(engine: Engine, folder: Path, params: SamplingParams) -> None:
    """With lookup; with itself as its draft, whose trees live on from pass to pass; and with layers from disk."""
    expected = text_of(engine, params, PLAIN)
    assert len(set(expected)) > 3
    assert text_of(engine, params) == expected
    target, streamed = loaded(folder), loaded(folder, 1)
    drafted = Engine(LoadedTarget(target), engine.tokenizer, ModelDraft(loaded(folder), "itself"))
    steps = list(drafted.generate(PROMPT, params, SpeculationParams(budget=12)))
    assert [token for step in steps for token in step.token_ids] == expected
    assert steps[-1].stats.tokens_per_pass > 2
    assert text_of(Engine(LoadedTarget(streamed), engine.tokenizer, LookupDraft()), params) == expected
    streamed.weights.close()


@needs_kernels
def test_the_text_is_exactly_plain_decodings(folder: Path) -> None:
    """With large and small trees, streamed and resident, in passes that texts share."""
    dtype = "bf16"
    with Engine.load(str(folder), draft="lookup", device="cpu", dtype=dtype, arithmetic="exact") as engine:
        assert reason_against_exactness(engine.target.config, engine.target.dtype, CPU) is None
        streamed = loaded(folder, 1, dtype=dtype)
        engine.target.arithmetic = streamed.arithmetic = EXACT
        drafted = Engine(LoadedTarget(streamed), engine.tokenizer, ModelDraft(loaded(folder, dtype=dtype), "itself"))
        asked = [(PROMPT, GREEDY), ("x = 1\ny =", SAMPLED)]
        expected = [text_of(engine, params, PLAIN, prompt) for prompt, params in asked]
        for (prompt, params), budget, plain in zip(asked, (64, 5), expected, strict=True):
            assert text_of(drafted, params, SpeculationParams(budget=budget), prompt) == plain
        together: list[list[int]] = [[], []]
        for number, step in engine.generate_many(*zip(*asked, strict=True)):
            together[number] += step.token_ids
        assert together == expected
        streamed.weights.close()


@pytest.mark.each_value
@pytest.mark.parametrize("draft", ["shadow", "self"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_of_the_targets_own_layers(engine: Engine, folder: Path, draft: str, params: SamplingParams) -> None:
    """Shadows of the streamed layers, the resident ones, and the first ones, which go on from the target's states."""
    if folder.name.startswith(("averaging", "gemma4")):
        pytest.skip("drafts know no layers of this kind")
    files = open_model(folder, "fp32", [])
    options = DraftOptions(draft, exit_layer=2 if draft == "self" else None)
    opened = open_draft("target", OpenRequest(options, files, engine.tokenizer, "fp32", []))
    target = loaded(folder, 0, 1)
    drafted = Engine(LoadedTarget(target), engine.tokenizer, opened.load(CPU)(target))
    assert text_of(drafted, params) == text_of(engine, params, PLAIN)
    target.weights.close()


def packed_by(form: str, folder: Path, copy: Path) -> Path:
    """A copy in this format: by `convert`, or with the codes that another program might have written."""
    if form not in FORMS:
        return convert(folder, copy, ConvertParams(form)).path
    pack, settings = FORMS[form]
    shutil.copytree(folder, copy)
    tensors = dict[str, Stored]()
    for name, tensor in read_tensors(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_packed = len(tensor.shape) == 2 and tensor.shape[0] >= 32 and "layers" in name  # rates and decays stay plain
        tensors |= pack(module, *tensor.shape) if is_packed else {name: tensor}
    write_tensors(copy / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return copy


@pytest.mark.parametrize("form", ["awq", "nf4", "q4_k"])
def test_packed_weights_are_streamed(wide: Path, form: str, tmp_path: Path) -> None:
    """Half of the layers come from disk; the text is that of plain decoding with all of them resident."""
    path = packed_by(form, wide, tmp_path / "packed")
    plain, streamed, tokenizer = loaded(path), loaded(path, 0, 3), Tokenizer.load(wide)
    expected = text_of(Engine(LoadedTarget(plain), tokenizer, NoDraft()), SAMPLED, PLAIN)
    assert text_of(Engine(LoadedTarget(streamed), tokenizer, LookupDraft()), SAMPLED) == expected
    streamed.weights.close()


def test_constraints_logprobs_and_packed_entries(wide: Path) -> None:
    """`--kv-cache` concerns the layers that attend."""
    params = SamplingParams(8, temperature=0.7, seed=1, logprobs=2, constraint=Constraint.regex("[a-z]{4}[0-9]+"))
    with Engine.load(str(wide), draft="lookup", device="cpu", dtype="fp32", kv_cache="8") as engine:
        found, expected = (
            list(engine.generate(PROMPT, params, speculation)) for speculation in (SpeculationParams(budget=12), PLAIN)
        )
    assert "".join(step.text for step in found) == "".join(step.text for step in expected)
    assert "".join(step.text for step in found)[:4].isalpha()


def test_a_text_that_was_changed_is_scored_again_from_an_earlier_state(engine: Engine) -> None:
    caches, text = engine.new_caches(), engine.encode(PROMPT)
    for _ in engine.generate(text, GREEDY, caches=caches):
        pass
    changed = [*text, *caches.text[len(text) : len(text) + 5], 7, 8]
    found = [token for step in engine.generate(changed, GREEDY, caches=caches) for token in step.token_ids]
    assert found == [token for step in engine.generate(changed, GREEDY, PLAIN) for token in step.token_ids]


def test_a_prompts_states_are_kept_in_a_file(engine: Engine, folder: Path, tmp_path: Path) -> None:
    """Those before its last token: for the same prompt, and for one that begins with all of it."""
    prompt, told, params = "x = [" + "1, " * 30, list[str](), SamplingParams(3, ignore_eos=True)
    for text in (prompt, prompt, prompt + "2, 3", "y" + prompt):
        steps = PromptCache(engine, tmp_path / "prompt.kv", told.append).generate(text, params)
        assert [token for step in steps for token in step.token_ids] == text_of(engine, params, PLAIN, text)
    number = len(engine.encode(prompt)) - 1
    if "averaging" in folder.name:
        assert not told  # no state of averages is kept there
    elif "gemma4" in folder.name:
        assert told  # entries, which serve a prompt that begins with some of them, too
    else:
        assert [line.startswith(f"{number} of the prompt's") for line in told] == [False, True, True, False, False]
