"""An AWQ or GPTQ checkpoint says what the same numbers in plain matrices say, and commands take it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec import Engine
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import open_model
from offspec.cli.main import run
from offspec.errors import UnsupportedModelError
from offspec.loaders.machine.hardware import Rates
from offspec.model.decoder import CachedDecoder
from offspec.planning.plan import all_resident

from ...loaders.formats.test_grouped import Quantised, said_by
from ...pair import Pair, build_pair, variant
from ...refusals import refused

CPU = torch.device("cpu")
NO_NODES = np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0), bool)
RATES = Rates(matmul_flops={1: 1e10}, dequantise_elements_per_s=1e9)  # to measure them takes longer than all else


@dataclass(frozen=True)
class Model:
    """A target in `packed` form, and the same numbers in `plain` matrices."""

    packed: Path
    plain: Path


@dataclass(frozen=True)
class Case:
    """How a checkpoint is quantised. suffixes: of the names of what is."""

    form: str
    group_size: int
    suffixes: tuple[str, ...] = ("_proj.weight",)
    blank_biases: bool = False
    is_sharded: bool = False


CASES = {
    "awq": Case("awq", 16, is_sharded=True),
    "awq, head too": Case("awq", -1, suffixes=("_proj.weight", "lm_head.weight")),
    "gptq of old": Case("gptq", 16, blank_biases=True),
    "gptq, act order": Case("act order", 16, is_sharded=True),
    "gptq v2, half a group": Case("gptq_v2", 32),
}


def quantised(weight: Tensor, case: Case) -> Quantised:
    """Rounded to the nearest of 16 numbers between the least and the largest of each group; weight [N, K]."""
    num_inputs = weight.shape[1]
    size = num_inputs if case.group_size == -1 else case.group_size
    order = np.random.default_rng(0).permutation(num_inputs) if case.form == "act order" else np.arange(num_inputs)
    groups, inputs = (order // size).astype(np.int32), weight.double().numpy().T  # [K], [K, N]
    each = [inputs[groups == group] for group in range(groups.max() + 1)]
    low, high = (np.stack([end(rows, 0, initial=0) for rows in each]) for end in (np.min, np.max))
    scales = ((high - low) / 15).clip(1e-4).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 0, 15).astype(np.int64)
    codes = np.clip(np.rint(inputs / scales[groups]) + zeros[groups], 0, 15).astype(np.int64)
    return Quantised(codes, zeros, scales, groups)


def write(source: Path, folder: Path, tensors: dict[str, Tensor], *, is_sharded: bool = False, **config: Any) -> Path:
    """`source` with other tensors and another config.json, in one file or two."""
    variant(source, folder, **config)
    file = folder / "model.safetensors"
    if not is_sharded:
        save_file(tensors, file)
        return folder
    file.unlink()
    names = sorted(tensors)
    shards = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)
    }  # matrices torn apart
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in names if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


def build(pair: Pair, folder: Path, case: Case) -> Model:
    packed, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(pair.target / "model.safetensors").items():
        plain[name] = packed[name] = tensor
        if name.endswith(case.suffixes):
            module, matrix = name.removesuffix(".weight"), quantised(tensor, case)
            plain[name] = matrix.exact.float().contiguous()
            del packed[name]
            packed |= matrix.tensors(case.form, module)
            if case.blank_biases:
                packed[f"{module}.bias"] = torch.zeros(tensor.shape[0]).half()
    said = said_by(case.form, case.group_size)
    write(pair.target, folder / "packed", packed, is_sharded=case.is_sharded, quantization_config=said)
    return Model(folder / "packed", write(pair.target, folder / "plain", plain))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), num_layers=4)


# Commands and texts with one of each method, whose logits are compared in all forms; nightly they take all forms.
DAILY = ("gptq, act order",)
one_of_each = pytest.mark.parametrize(
    "model",
    [pytest.param(case, id=name, marks=() if name in DAILY else pytest.mark.nightly) for name, case in CASES.items()],
    indirect=True,
)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def model(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build(pair, tmp_path_factory.mktemp("grouped"), request.param)


def logits(folder: Path) -> Tensor:
    files = open_model(folder, "fp32", [])
    decoder = load_decoder(files, all_resident(files), CPU, WeightSettings(has_far_embedding=True))
    found = CachedDecoder(decoder).score([(7 * i) % 300 for i in range(40)], *NO_NODES)
    decoder.weights.close()
    return found


def assert_alike(one: Path, other: Path) -> None:
    """But for the last bits: fp32 products depend on where a matrix begins, and on whether it lies transposed."""
    torch.testing.assert_close(logits(one), logits(other), rtol=1e-5, atol=1e-5)


def test_logits_are_those_of_plain_matrices(model: Model) -> None:
    assert_alike(model.packed, model.plain)


def test_a_bias_that_holds_something_is_refused(pair: Pair, tmp_path: Path) -> None:
    model = build(pair, tmp_path, CASES["gptq of old"])
    file, name = model.packed / "model.safetensors", "model.layers.2.mlp.up_proj.bias"
    tensors = load_file(file)
    tensors[name][3] = 0.5
    save_file(tensors, file)
    with refused(UnsupportedModelError, model.packed, name):
        Engine.load(str(model.packed), draft="none", device="cpu")


# ------------------------------------------------------------------------------------------------------------ commands


def offspec(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    return run([str(arg) for arg in args]), *capsys.readouterr()


@one_of_each
def test_it_can_be_planned(model: Model, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: RATES)
    code, out, err = offspec(capsys, "plan", model.packed, "--draft", "none", "--device", "cpu", "-q", "--json")
    assert code == 0, err
    assert json.loads(out)["resident_layers"] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["fp32", "keep"])
@one_of_each
def test_a_copy_says_the_same(
    model: Model, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # or it would be read, too
    code, _, err = offspec(capsys, "quantize", model.packed, tmp_path / "copy", "--format", form)
    assert (code, err) == (0, "")
    assert_alike(tmp_path / "copy", model.packed)
