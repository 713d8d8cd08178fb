"""Every family on a CUDA device: logits and texts are the CPU's, wherever layers and experts lie."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import open_model
from offspec.loaded_target import LoadedTarget
from offspec.loaders.streaming.placement import ExpertSlots, Limits, Placement, Slots, places_of
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.text.tokenizer import Tokenizer

from ....fakes import CPU, FAMILIES, TinyModel
from ....pair import build_pair
from ..test_decoder import NO_NODES, Tree, random_tokens

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
PROMPT, TREES, PLAIN = random_tokens(12, seed=4), SpeculationParams(16), SpeculationParams(0)
GREEDY = SamplingParams(12, ignore_eos=True)
SAMPLED = SamplingParams(12, temperature=1.0, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(build_pair(tmp_path_factory.mktemp("pair")).target)


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    try:
        return tiny_model(request.param)
    except (ImportError, ValueError, KeyError) as exc:  # the machine's transformers may be older
        pytest.skip(f"transformers cannot build it: {exc}")


def test_logits_are_the_cpus(model: TinyModel) -> None:
    """Of a tree after a text, and after a path of it was kept."""
    tree = Tree(random_tokens(14, seed=3), [-1, -1, *range(12)])
    found, expected = (CachedDecoder(model.decoder(device=device)) for device in (GPU, CPU))
    for tokens, nodes in ((random_tokens(30), tree.round(0, 14)), ([5], NO_NODES)):
        logits = found.score(tokens, *nodes).cpu()
        torch.testing.assert_close(logits, expected.score(tokens, *nodes), rtol=0, atol=2e-3)
        if nodes is not NO_NODES:
            for text in (found, expected):
                text.keep(tree.path(13))


@pytest.mark.parametrize("place", ["RAM", "disk"])
def test_streamed_texts_are_the_cpus(model: TinyModel, tokenizer: Tokenizer, place: str) -> None:
    """By plain decoding and with trees; two experts of a layer have slots on the device, three in RAM."""
    with closing(LoadedTarget(model.decoder())) as resident:
        expected = [says(Engine(resident, tokenizer), params, PLAIN) for params in (GREEDY, SAMPLED)]
    with closing(LoadedTarget(streamed(model.folder, place))) as target:
        engine = Engine(target, tokenizer)
        for speculation in (PLAIN, TREES):
            assert [says(engine, params, speculation) for params in (GREEDY, SAMPLED)] == expected


def streamed(folder: Path, place: str) -> Decoder:
    """On the device is one layer; the others come through two slots."""
    files = open_model(folder, "fp32", [])
    costs = [layer.cost(files.dtype) for layer in files.stored.layers]
    others = tuple(i for i in range(len(costs)) if i != 1)
    places = places_of(resident=(1,), **{"in_ram" if place == "RAM" else "on_disk": others})
    slots = Slots(2, 2 if place == "disk" else 0, max(cost.slot_bytes for cost in costs))
    experts = ExpertSlots(2, 3) if files.stored.experts else ExpertSlots(0)
    placement = Placement(places, slots, (), Limits(2**30, 2**30), 0, 0, experts=experts)
    return load_decoder(files, placement, GPU, WeightSettings(has_far_embedding=True))


def says(engine: Engine, params: SamplingParams, speculation: SpeculationParams) -> list[int]:
    return [token for step in engine.generate(PROMPT, params, speculation) for token in step.token_ids]
