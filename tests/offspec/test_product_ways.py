"""In fp32 the text of a streamed model is the same, whether kernels or torch multiply its matrices on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec import Engine, SamplingParams, convert
from offspec.backends.x86.processor import using
from offspec.backends.x86.row_product import RowProduct
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import open_model
from offspec.loaded_target import LoadedTarget
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of
from offspec.model.decoder import Decoder

from ..machines import needs_kernels
from ..pair import Pair, build_pair

CPU = torch.device("cpu")
REQUESTS = [SamplingParams(10, seed=0, ignore_eos=True), SamplingParams(10, temperature=1.0, top_p=0.9, seed=1)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With rows of matrices that are whole steps of kernels. The target's weights are bf16."""
    found = build_pair(tmp_path_factory.mktemp("pair"), hidden_size=64, intermediate_size=128)
    file = found.target / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file)
    return found


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    loaded = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="fp32")
    yield loaded
    loaded.close()


@pytest.fixture(scope="module", params=["bf16", "nf4"])
def folder(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bf16":
        return pair.target
    packed = tmp_path_factory.mktemp("packed") / "nf4"
    convert(pair.target, packed)
    return packed


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Products of kernels, and torch's."""
    counted, run, torch_linear = Counter[str](), RowProduct.__call__, F.linear

    def count_kernel(product: RowProduct, *args: Any) -> Tensor:
        counted["kernel"] += 1
        return run(product, *args)

    def count_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        counted["torch"] += 1
        return torch_linear(x, weight, bias)

    monkeypatch.setattr(RowProduct, "__call__", count_kernel)
    monkeypatch.setattr(F, "linear", count_torch)
    return counted


def stream(folder: Path) -> Decoder:
    """All layers from disk."""
    files = open_model(folder, "fp32", [])
    layers = files.stored.layers
    slot = max(layer.cost(files.dtype).slot_bytes for layer in layers)
    placement = Placement(places_of(on_disk=range(len(layers))), Slots(2, 0, slot), (), Limits(None, 0), 0, 0)
    return load_decoder(files, placement, CPU, WeightSettings(has_far_embedding=True))


@pytest.mark.slow
@needs_kernels
def test_the_text_is_the_same_whichever_way(engine: Engine, folder: Path, multiplied: Counter[str]) -> None:
    target = stream(folder)
    streamed = Engine(LoadedTarget(target), engine.tokenizer, engine.draft)
    for params in REQUESTS:
        texts = []
        for way in (using(()), nullcontext()):
            multiplied.clear()
            with way:
                texts.append([token for step in streamed.generate("def area(", params) for token in step.token_ids])
            assert len(multiplied) == 1, "all products, of heads and drafts too, by kernels or by torch"
        assert len(set(texts[0])) > 5
        assert texts[0] == texts[1]
    target.weights.close()
