"""Of every family: trees say what plain decoding says, and so does a target that comes from disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offspec import Engine, SamplingParams, SpeculationParams, convert
from offspec.checkpoints.load import WeightSettings, load_decoder, load_weights
from offspec.checkpoints.opening import open_model
from offspec.drafts.model_draft import ModelDraft
from offspec.loaded_target import LoadedTarget, PlannedMemory
from offspec.loaders.params import ConvertParams
from offspec.loaders.streaming.placement import ExpertSlots, Limits, Placement, Slots, places_of
from offspec.loaders.streaming.weights import RamWeights
from offspec.model.block import matrix_shapes
from offspec.model.decoder import Decoder, activation_bytes
from offspec.model.names import LAYER_PREFIX, in_layer
from offspec.planning.plan import all_resident
from offspec.text.tokenizer import Tokenizer
from offspec.tools.verification import settings_of, verify

from ....fakes import ALIKE, CPU, FAMILIES, VARIANTS, TinyModel
from ....pair import build_pair
from ..test_decoder import assert_close, chain_logits, random_tokens

GetModel = Callable[[str], TinyModel]
# Variants of a layout of another family below; logits are compared with transformers' in every run.
NIGHTLY = {
    *VARIANTS,
    *ALIKE,
    *("bamba", "falcon-h1-norm-first", "granite-h", "qwen3.5-moe", "deepseek-v2", "glm4-moe-lite", "exaone4"),
    *("olmo2", "gemma3", "qwen2-moe", "cohere-qk-norm", "ministral3", "mistral4", "youtu", "olmo-hybrid"),
    *("helium", "hunyuan", "smollm3", "glm4-moe", "granite-h-moe", "arcee", "granite", "gemma4", "olmo3"),
    *("phi3-longrope", "starcoder2", "glm4"),
}
# One of every layout; the families of this program's beginning have tests of their own.
NEW = list(FAMILIES)[list(FAMILIES).index("gemma") :]
PROMPT, TREES, PLAIN = random_tokens(12, seed=4), SpeculationParams(8), SpeculationParams(0)
SAMPLED = SamplingParams(8, temperature=1.0, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(build_pair(tmp_path_factory.mktemp("pair")).target)


def streamed(folder: Path) -> Decoder:
    """All layers but one come from disk, by way of a ring of two slots."""
    files = open_model(folder, "fp32", [])
    costs = [layer.cost(files.dtype) for layer in files.stored.layers]
    on_disk = tuple(i for i in range(len(costs)) if i != 1)
    slots = Slots(2, 0, max(cost.slot_bytes for cost in costs))
    places, experts = places_of(resident=(1,), on_disk=on_disk), ExpertSlots(2 if files.stored.experts else 0)
    placement = Placement(places, slots, (), Limits(None, 0), 0, 0, experts=experts)
    return load_decoder(files, placement, CPU, WeightSettings(has_far_embedding=True))


def perturbed(decoder: Decoder) -> Decoder:
    """A draft that often guesses right: the same with some noise on its matrices."""
    noise = torch.Generator().manual_seed(0)
    tensors = dict[str, Tensor]()
    for index in range(decoder.config.num_layers):
        with decoder.weights.layer(index) as layer:
            tensors |= {in_layer(index, name): weight for name, weight in layer.items()}  # type: ignore[misc]
        tensors |= of_experts(decoder, index)
    tensors |= {name: decoder.weights.shared(name) for name in decoder.config.shared_shapes()}  # type: ignore[misc]
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensors[name] = tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=noise)
    return Decoder(decoder.config, RamWeights.from_tensors(tensors, LAYER_PREFIX), dtype=decoder.dtype, device=CPU)


def of_experts(decoder: Decoder, layer: int) -> dict[str, Tensor]:
    """The tensors of a layer's experts by full name."""
    shape = decoder.config.experts
    if shape is None or "experts" not in decoder.config.parts_of(layer):
        return {}
    lent = decoder.weights.experts(layer, dict.fromkeys(range(shape.num), 1))
    return {
        in_layer(layer, f"{shape.prefix}.{number}.{name}"): weight.clone()  # type: ignore[union-attr]
        for group in lent
        for number, weights in group.items()
        for name, weight in weights.items()
    }


def says(engine: Engine, speculation: SpeculationParams) -> tuple[list[int], int]:
    """Tokens of a text, and in how many passes."""
    *steps, last = engine.generate(PROMPT, SAMPLED, speculation)
    return [token for step in (*steps, last) for token in step.token_ids], last.stats.num_passes


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in NEW]
)
def test_plain_trees_and_streamed_are_one_text(tiny_model: GetModel, tokenizer: Tokenizer, family: str) -> None:
    model = tiny_model(family)
    resident = model.decoder()
    draft = ModelDraft(perturbed(resident), "draft")
    engine = Engine(LoadedTarget(resident), tokenizer, draft)
    plain, num_tokens = says(engine, PLAIN)
    with closing(LoadedTarget(streamed(model.folder))) as from_disk:
        found, num_passes = says(Engine(from_disk, tokenizer, draft), TREES)
    assert found == plain
    assert num_passes < num_tokens


def test_verifying_with_random_drafts(tiny_model: GetModel, tokenizer: Tokenizer) -> None:
    """A small draft of the target's own layout is made for it."""
    engine = Engine(LoadedTarget(tiny_model("qwen3.5").decoder()), tokenizer)
    settings = settings_of([1.0], 0.9, [8], ["coupled"], ["random"])
    report = verify(engine, ["XQZW"], settings, max_new_tokens=6)
    assert not report.differences
    assert report.num_tokens > 0


@pytest.mark.parametrize("family", ["gemma4-layer-inputs", "phi3", "qwen3.5", "nemotron-h", "deepseek-v2"])
def test_a_copy_in_4_bits_is_the_same_family(tiny_model: GetModel, tmp_path: Path, family: str) -> None:
    """Fused matrices are quantised as they lie; norms, of two dimensions, too, are left alone."""
    model, tokens = tiny_model(family), random_tokens(30)
    convert(model.folder, tmp_path / "copy", ConvertParams("nf4"))
    files = open_model(tmp_path / "copy", "fp32", [])
    packed = {name for name, weight in files.stored.layers[0].weights.items() if weight.is_packed}
    assert packed == {f"{name}.weight" for name in matrix_shapes(files.config)}
    found = chain_logits(load_decoder(files, all_resident(files), CPU), tokens)
    plain = chain_logits(model.decoder(), tokens)
    least = 0.5 if family == "gemma4-layer-inputs" else 0.8  # its matrices are small, and follow each other
    assert torch.corrcoef(torch.stack((found.flatten(), plain.flatten())))[0, 1] > least


@pytest.mark.parametrize(("context", "length"), [(128, 100), (129, 200)])
def test_longrope_serves_the_context_that_was_planned(tiny_model: GetModel, context: int, length: int) -> None:
    """Its original context is of 128 tokens: transformers takes other factors for longer texts."""
    model, tokens = tiny_model("phi3-longrope"), random_tokens(length)
    files = open_model(model.folder, "fp32", [])
    on_device = SimpleNamespace(entries_in_ram=())
    plan = SimpleNamespace(context=context, inputs=SimpleNamespace(target=files), placement=on_device)
    weights = load_weights(files, all_resident(files), CPU)
    decoder = PlannedMemory(plan, CPU, [], lambda plan: weights).load_decoder()  # type: ignore[arg-type]
    with torch.no_grad():
        expected = model.reference(torch.tensor([tokens])).logits[0]
    assert_close(chain_logits(decoder, tokens), expected)


@pytest.mark.parametrize(
    "family",
    ["gemma2", "gemma4-layer-inputs", "phi3", "nemotron", "deepseek-v3", "qwen3.5", "falcon-h1", "nemotron-h", "lfm2"],
)
def test_a_pass_allocates_no_more_than_is_planned(tiny_model: GetModel, family: str) -> None:
    """Of a long chain, in the dtype in which fp32 copies count most."""
    decoder, tokens = tiny_model(family).decoder(torch.bfloat16), torch.tensor(random_tokens(256))
    cache = decoder.new_cache()
    cache.reserve(256)
    with AllocatedPeak() as peak:
        decoder.logits(decoder.forward(tokens, torch.arange(256), cache)[-64:])
    assert 0 < peak.nbytes <= activation_bytes(decoder.config, 256, 256, 2)


class AllocatedPeak(TorchDispatchMode):
    """The most bytes that tensors made in its scope take at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self._now = 0, 0
        self._holders: dict[int, int] = {}  # how many tensors lie in a piece of memory, by its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                self._hold(tensor)
        return made

    def _hold(self, tensor: Tensor) -> None:
        address, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if address not in self._holders:
            self._now += nbytes
            self.nbytes = max(self.nbytes, self._now)
        self._holders[address] = self._holders.get(address, 0) + 1
        weakref.finalize(tensor, self._let_go, address, nbytes)

    def _let_go(self, address: int, nbytes: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self._now -= nbytes
