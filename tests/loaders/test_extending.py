"""A container and a weight format of one's own are registered; no other file changes (docs/developing/extending.md).

The container is one file: a line of JSON (config, tensors), then the tensors. The format is fp32 with its bytes
reversed, so that what is computed has to be equal to the last bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offspec import Engine, SamplingParams
from offspec.backends.weights import PackedMatrix
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import model_to_plan, open_model, open_target
from offspec.errors import CheckpointError
from offspec.loaders.files.checkpoint import TensorInfo, fault
from offspec.loaders.files.containers import CONTAINERS, largest_weight_file, open_checkpoint
from offspec.loaders.formats import FORMATS, StoredWeight, WeightFormat, stored_weights
from offspec.loaders.formats.core import PackedStored, TensorGroup
from offspec.loaders.machine.measure import measure_dequantise
from offspec.loaders.streaming.placement import Placement, Slots, places_of
from offspec.notes import Note
from offspec.planning.plan import all_resident

from ..pair import Pair, build_pair
from ..refusals import refused

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------------- the container


@dataclass(frozen=True)
class OneFile:
    """A checkpoint in one file; its tokenizer lies beside it."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    notes: tuple[str, ...] = ("weights are read from one file",)
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def tokenizer_path(self) -> Path:
        return self.path.parent

    def companions(self) -> dict[str, Path]:
        return {}

    def config_json(self) -> bytes:
        return json.dumps(self.config).encode()


class OneFileContainer:
    def recognises(self, path: Path) -> bool:
        return path.suffix == ".one"

    def open(self, path: Path, *, headers_only: bool = False) -> OneFile:
        with path.open("rb") as file:
            said = json.loads(file.readline())
            start = file.tell()
        tensors = {
            name: TensorInfo(name, dtype, tuple(shape), path, start + offset, nbytes)
            for name, (dtype, shape, offset, nbytes) in said["tensors"].items()
        }
        if not headers_only and path.stat().st_size < start + sum(info.nbytes for info in tensors.values()):
            raise fault(path, "ends within its tensors")
        return OneFile(path, said["config"], tensors)

    def open_config(self, path: Path) -> OneFile:
        return replace(self.open(path, headers_only=True), tensors={})

    def weight_files(self, path: Path) -> list[Path]:
        return [path]


# ---------------------------------------------------------------------------------------------------- the weight format


@dataclass(frozen=True)
class ReversedMatrix(PackedMatrix):
    """uint8 [N, K, 4], the highest byte first."""

    content: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.content.shape[:2])

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        matrix = self.content.flip(-1).contiguous().view(torch.float32)[..., 0].to(dtype)
        return matrix if out is None else out.copy_(matrix)


@dataclass(frozen=True)
class ReversedWeight(PackedStored):
    name: str
    info: TensorInfo
    dtype = "reversed"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        return (self.info,)

    def bind(self, parts: Sequence[Tensor]) -> ReversedMatrix:
        return ReversedMatrix(parts[0].view(*self.shape, 4))


class ReversedFormat(WeightFormat):
    names = ("reversed",)

    def recognises(self, group: TensorGroup) -> bool:
        return "" in group.parts and group.parts[""].dtype == "REVERSED"

    def read(self, group: TensorGroup) -> StoredWeight:
        if len(group.weight.shape) != 2:
            group.refuse(group.weight, "is no matrix")
        return ReversedWeight(group.name, group.weight)


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture
def _registered() -> Iterator[None]:
    container, known = OneFileContainer(), ReversedFormat()
    CONTAINERS.add(container)
    FORMATS.add(known)
    yield
    CONTAINERS.remove(container)
    FORMATS.remove(known)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = build_pair(tmp_path_factory.mktemp("pair"), 3)
    write(pair.target, pair.target / "model.one")
    return pair


def write(folder: Path, path: Path) -> None:
    """The checkpoint `folder` in one file, its matrices reversed but for the embedding."""
    tensors, content = dict[str, tuple[str, list[int], int, int]](), b""
    for name, tensor in load_file(folder / "model.safetensors").items():
        raw = tensor.contiguous().view(torch.uint8).reshape(*tensor.shape, 4)
        is_reversed = tensor.dim() == 2 and "embed" not in name
        tensors[name] = ("REVERSED" if is_reversed else "F32", list(tensor.shape), len(content), tensor.nbytes)
        content += (raw.flip(-1) if is_reversed else raw).contiguous().numpy().tobytes()
    config = json.loads((folder / "config.json").read_text())
    path.write_bytes(json.dumps({"config": config, "tensors": tensors}).encode() + b"\n" + content)


def on_disk(files: ModelFiles) -> Placement:
    """Every layer streamed."""
    slot_bytes = max(layer.record.nbytes for layer in files.stored.layers)
    layers = tuple(range(len(files.stored.layers)))
    return replace(all_resident(files), places=places_of(on_disk=layers), slots=Slots(2, 0, slot_bytes))


def states(files: ModelFiles, placement: Placement) -> Tensor:
    """Logits of one pass over 20 tokens."""
    decoder = load_decoder(files, placement, CPU)
    tokens = torch.arange(20)
    out = decoder.logits(decoder.forward(tokens, tokens.clone(), decoder.new_cache()))
    decoder.weights.close()
    return out


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_pass_is_that_of_the_same_weights_in_safetensors(pair: Pair, is_streamed: bool) -> None:
    notes = list[Note]()
    plain = open_model(pair.target, "fp32", [])
    files = open_model(pair.target / "model.one", "fp32", notes)
    assert (plain.packed_form, files.packed_form) == (None, "reversed")
    assert [note.text for note in notes] == ["weights are read from one file"]
    assert files.num_parameters == plain.num_parameters
    where = on_disk if is_streamed else all_resident
    assert torch.equal(states(files, where(files)), states(plain, all_resident(plain)))


def text_of(model: Path, draft: Path) -> str:
    engine = Engine.load(str(model), draft=str(draft), device="cpu", dtype="fp32")
    try:
        return "".join(step.text for step in engine.generate("def area(", SamplingParams(max_new_tokens=8)))
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("_registered")
def test_it_is_a_model_like_any_other(pair: Pair) -> None:
    """Found by its path, with a tokenizer, beside a draft in another container, and planned for without its weights."""
    path = pair.target / "model.one"
    assert text_of(path, pair.draft) == text_of(pair.target, pair.draft) != ""
    assert largest_weight_file(path) == path
    files, planned = (
        open_target(str(path), None, "fp32"),
        model_to_plan(path, "bf16", "bf16", []),
    )
    assert planned.num_parameters == files.num_parameters
    assert planned.stored.layers[0].record.nbytes < files.stored.layers[0].record.nbytes


@pytest.mark.usefixtures("_registered")
def test_what_is_wrong_is_said_by_the_format(tmp_path: Path) -> None:
    info = TensorInfo("a.weight", "REVERSED", (3,), tmp_path / "model.one", 0, 12)
    with refused(CheckpointError, "'a.weight'", "matrix"):
        stored_weights({"a.weight": info})


@pytest.mark.usefixtures("_registered")
def test_without_sizes_of_its_own_it_is_measured_as_nf4(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    assert math.isfinite(measure_dequantise(CPU, torch.float32, "reversed", shape=(256, 256), seconds=0.01))


def test_unregistered_it_is_refused(pair: Pair) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(pair.target / "model.one")
    with refused(CheckpointError, pair.target / "model.one", "GGUF", "folder"):
        open_target(str(pair.target / "model.one"), None, "fp32")
