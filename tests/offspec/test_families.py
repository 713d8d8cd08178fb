"""Of every family: trees say what plain decoding says, and so does a target that comes from disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.load import LoadSettings, load_decoder
from offspec.checkpoints.opening import ModelFiles
from offspec.drafts.model_draft import ModelDraft
from offspec.loaders.placement import Limits, Placement, Slots
from offspec.loaders.weights import RamWeights
from offspec.loading import LoadedTarget
from offspec.model.decoder import Decoder, random_decoder
from offspec.model.names import LAYER_PREFIX, in_layer
from offspec.text.tokenizer import Tokenizer

from ..fakes import CPU, FAMILIES, TinyModel
from ..pair import build_pair
from .model.test_decoder import random_tokens

GetModel = Callable[[str], TinyModel]
# One of every layout; the families of this program's beginning have tests of their own.
NEW = list(FAMILIES)[list(FAMILIES).index("gemma") :]
PROMPT, TREES, PLAIN = random_tokens(12, seed=4), SpeculationParams(24), SpeculationParams(0)
REQUESTS = [SamplingParams(24, seed=0, ignore_eos=True), SamplingParams(24, temperature=1.0, seed=1, ignore_eos=True)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(build_pair(tmp_path_factory.mktemp("pair")).target)


def streamed(folder: Path) -> Decoder:
    """All layers but one come from disk, by way of a ring of two slots."""
    files = ModelFiles.open(folder, "fp32", "cpu", [])
    costs = [layer.cost(files.dtype) for layer in files.stored.layers]
    on_disk = tuple(i for i in range(len(costs)) if i != 1)
    slots = Slots(2, 0, max(cost.slot_bytes for cost in costs))
    placement = Placement((1,), (), on_disk, slots, (), Limits(None, 0), 0, 0)
    return load_decoder(files, placement, CPU, LoadSettings(has_far_embedding=True))


def perturbed(decoder: Decoder) -> Decoder:
    """A draft that often guesses right: the same with some noise on its matrices."""
    noise = torch.Generator().manual_seed(0)
    tensors = dict[str, Tensor]()
    for index in range(decoder.config.num_layers):
        with decoder.weights.layer(index) as layer:
            tensors |= {in_layer(index, name): weight for name, weight in layer.items()}  # type: ignore[misc]
    tensors |= {name: decoder.weights.shared(name) for name in decoder.config.shared_shapes()}  # type: ignore[misc]
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensors[name] = tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=noise)
    return Decoder(decoder.config, RamWeights.from_tensors(tensors, LAYER_PREFIX), dtype=decoder.dtype, device=CPU)


def says(engine: Engine, params: SamplingParams, speculation: SpeculationParams) -> tuple[list[int], int]:
    """Tokens of a text, and in how many passes."""
    *steps, last = engine.generate(PROMPT, params, speculation)
    return [token for step in (*steps, last) for token in step.token_ids], last.stats.num_passes


@pytest.mark.parametrize("family", NEW)
def test_plain_trees_and_streamed_are_one_text(tiny_model: GetModel, tokenizer: Tokenizer, family: str) -> None:
    model = tiny_model(family)
    resident = model.decoder()
    draft = ModelDraft(perturbed(resident), "draft")
    engine = Engine(LoadedTarget(resident), tokenizer, draft)
    with closing(LoadedTarget(streamed(model.folder))) as from_disk:
        far = Engine(from_disk, tokenizer, draft)
        for params in REQUESTS:
            plain, num_tokens = says(engine, params, PLAIN)
            found, num_passes = says(engine, params, TREES)
            assert found == plain
            assert num_passes < num_tokens
            assert says(far, params, TREES)[0] == plain


@pytest.mark.parametrize("family", ["gemma2", "phi3-longrope", "cohere2", "starcoder2", "olmo2", "glm"])
def test_a_random_draft_of_the_same_family_moves_nothing(
    tiny_model: GetModel, tokenizer: Tokenizer, family: str
) -> None:
    engine = Engine(LoadedTarget(tiny_model(family).decoder()), tokenizer)
    config = replace(engine.target.config.only_layer(0), tied_head=True)
    draft = ModelDraft(random_decoder(config, 0, dtype=torch.float32, device=CPU), "random")
    for params in REQUESTS:
        assert says(engine.with_draft(draft), params, TREES)[0] == says(engine, params, PLAIN)[0]
