"""Gemma 4's assistant as the draft: transformers' logits over the target's entries, and plain decoding's text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.head_files import HeadFiles
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import open_model
from offspec.errors import CheckpointError, UnsupportedModelError
from offspec.model.decoder import CachedDecoder
from offspec.model.heads.text import HeadText
from offspec.planning.plan import all_resident

from ...fakes import CPU, FAMILIES, Family, build, config_json, randomise
from ...pair import CONFIG, build_pair
from ...refusals import refused
from ..model.heads.test_kinds_of_head import told

KINDS = ["full_attention", "sliding_attention"]
SIZES = {
    "vocab_size": CONFIG["vocab_size"],
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "max_position_embeddings": 256,
}
OF_LAYERS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", *KINDS[::-1]]}
NONE = np.empty(0, dtype=np.int64)


@pytest.fixture(scope="module", params=["gemma4", "gemma4-layer-inputs"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers all have entries, and one whose last layers attend to others'."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("target") / request.param
    inputs = family.settings["hidden_size_per_layer_input"]
    settings = {**family.settings, **SIZES, "vocab_size_per_layer_input": CONFIG["vocab_size"] if inputs else 0}
    build(Family(family.model_type, settings, rope=family.rope), folder)
    tokenizer = build_pair(tmp_path_factory.mktemp("pair")).target
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


@pytest.fixture(scope="module")
def assistant(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_assistant(target, tmp_path_factory.mktemp("assistant"))


@torch.no_grad()
def build_assistant(target: Path, folder: Path, **settings: Any) -> Any:
    """transformers' module with random weights, which writes them to `folder`."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    given = config_json(FAMILIES[target.name])
    backbone = given["hidden_size"]
    given |= {**SIZES, **OF_LAYERS, "hidden_size": 24, "hidden_size_per_layer_input": 0}
    given |= {"vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3, "use_double_wide_mlp": False}
    del given["model_type"]
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**given), backbone_hidden_size=backbone, **settings)
    module = Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(5)
    randomise(module.model, generator)
    module.lm_head.weight.mul_(4)
    for matrix in (module.pre_projection.weight, module.post_projection.weight):
        matrix.copy_(0.5 * torch.randn(matrix.shape, generator=generator) / matrix.shape[1] ** 0.5)
    if module.masked_embedding is not None:
        module.masked_embedding.token_ordering.copy_(torch.randperm(CONFIG["vocab_size"], generator=generator))
    module.save_pretrained(folder)
    module.folder = folder
    return module


def load(target: Path, folder: Path) -> tuple[CachedDecoder, HeadText]:
    files = open_model(target, "fp32", [])
    decoder = load_decoder(files, all_resident(files), CPU)
    head_files = HeadFiles.open(folder, files.config)
    head, text = head_files.spec.make(head_files.load(torch.float32, CPU), decoder), CachedDecoder(decoder)
    return text, HeadText(head, cache=head.cache_beside(text))


def references(module: Any, text: CachedDecoder, path: list[int], state: Tensor) -> list[Tensor]:
    """The module's logits after each token of a path behind the text, from the state before it.

    The entries of layers with a window are the ones that the next token sees.
    """
    config, shared = text.decoder.config, dict[str, tuple[Tensor, Tensor]]()
    for layer, shape in enumerate(config.shapes):
        if shape.entries_of is None:
            window = config.windows[layer]
            begin = 0 if window is None else max(0, text.length - window + 1)
            keys, values = text.cache.read(layer, text.length, begin)
            shared[KINDS[window is not None]] = (keys[None].clone(), values[None].clone())
    results = []
    for token in path:
        embedded = text.decoder.embed(torch.tensor([token]))
        inputs = torch.cat((embedded, state), -1)[None]
        position = torch.tensor([[text.length]])
        out = module(inputs_embeds=inputs, position_ids=position, shared_kv_states=shared)
        results.append(out.logits[0])
        state = out.last_hidden_state[0]
    return results


@torch.no_grad()
@pytest.mark.parametrize("length", [4, 30], ids=["within the window", "beyond it"])
def test_logits_are_those_of_transformers(length: int, target: Path, assistant: Any) -> None:
    """After the text, and at the nodes of a tree in two rounds."""
    text, drafted = load(target, assistant.folder)
    tokens = torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    states = text.states(tokens, NONE, NONE, NONE)
    drafted.feed(told(tokens, states, (), [], [7]))
    nodes, depths, parents = np.array([11, 12, 13]), np.array([1, 1, 2]), [-1, -1, 1]
    rounds = [drafted.score([7], NONE, NONE, NONE)]
    rounds.append(drafted.score([], nodes[:2], depths[:2], np.array(parents[:2])))
    rounds.append(drafted.score([], nodes[2:], depths[2:], np.array(parents)))
    first, second, third = references(assistant, text, [7, 12, 13], states)
    expected = torch.cat((first, references(assistant, text, [7, 11], states)[1], second, third))
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat(rounds), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_centroids_leave_logits_as_they_are(target: Path, tmp_path: Path) -> None:
    """Those of the tokens that the centroids choose; transformers gives others less than the least of these."""
    ordered = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2}
    module = build_assistant(target, tmp_path / "ordered", **ordered)
    text, drafted = load(target, module.folder)
    states = text.states([5, 6, 7, 8], NONE, NONE, NONE)
    drafted.feed(told([5, 6, 7, 8], states, (), [], [7]))
    (logits,) = drafted.score([7], NONE, NONE, NONE)
    ((expected,),) = references(module, text, [7], states)
    is_chosen = expected > expected.min()
    assert is_chosen.sum() == CONFIG["vocab_size"] // 4
    torch.testing.assert_close(logits[is_chosen], expected[is_chosen], atol=1e-4, rtol=1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_plain_decodings(temperature: float, target: Path, assistant: Any) -> None:
    params = SamplingParams(9, temperature=temperature, seed=3, ignore_eos=True)
    texts = list[list[int]]()
    for draft, budget in (("none", 0), (str(assistant.folder), 8)):
        with Engine.load(str(target), draft=draft, device="cpu", dtype="fp32") as engine:
            steps = list(engine.generate("def area(", params, SpeculationParams(budget, lookup=False)))
            texts.append([token for step in steps for token in step.token_ids])
    assert texts[0] == texts[1]
    assert steps[-1].stats.num_drafted_tokens > 10


def test_an_assistant_of_another_target_is_refused(target: Path, assistant: Any, tmp_path: Path) -> None:
    files = open_model(target, "fp32", [])
    folder = shutil.copytree(assistant.folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["sliding_window"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    with refused(CheckpointError, "window 5"):
        HeadFiles.open(folder, files.config)
    other = open_model(build_pair(tmp_path).target, "fp32", [])
    with refused(UnsupportedModelError, "own decoder"):
        HeadFiles.open(assistant.folder, other.config)
