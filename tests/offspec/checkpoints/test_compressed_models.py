"""Checkpoints in fp8 and in compressed-tensors' formats say what their own libraries say, resident and streamed, and
commands take them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec import Engine
from offspec.checkpoints.opening import open_model
from offspec.errors import CheckpointError

from ...loaders.formats.test_compressed_tensors import Case, calibrated, floats, integers
from ...pair import Pair, build_pair, variant
from ...refusals import refused
from .test_grouped_models import RATES, logits, offspec

transformers = pytest.importorskip("transformers")
ct = pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import ModelCompressor  # noqa: E402
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize  # noqa: E402

IDS = [(7 * i) % 300 for i in range(40)]  # as `logits` asks for
GROUPS = {"strategy": "group", "group_size": 16}
NVFP4 = floats(4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
PACK, FLOAT = "pack-quantized", "float-quantized"
CASES = {
    "w4a16": Case("w4a16", PACK, (0, 0), integers(4, **GROUPS)),
    "w4a16, asymmetric": Case("w4a16", PACK, (0, 0), integers(4, symmetric=False, **GROUPS)),
    "w8a16": Case("w8a16", PACK, (0, 0), integers(8, strategy="channel")),
    "int8": Case("int8", "int-quantized", (0, 0), integers(8, strategy="channel")),
    "fp8": Case("fp8", FLOAT, (0, 0), floats(8, strategy="tensor")),
    "fp8, blocks": Case("fp8", FLOAT, (0, 0), floats(8, strategy="block", block_structure=[16, 32])),
    "nvfp4": Case("nvfp4", "nvfp4-pack-quantized", (0, 0), NVFP4),
}


@dataclass(frozen=True)
class Model:
    """A checkpoint in `packed` form, the same numbers in `plain` matrices, and their library's logits for IDS."""

    packed: Path
    plain: Path
    form: str
    logits: Tensor


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), num_layers=4)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([IDS])).logits[0, -1:]
    return found


def compress(pair: Pair, folder: Path, case: Case) -> Model:
    """By the library, as llm-compressor does it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    config = QuantizationConfig(config_groups={"group_0": case.scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            for name, tensor in calibrated(module.weight.data, case).items():
                if hasattr(module, name):
                    getattr(module, name).data = tensor
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    shutil.copytree(pair.target, folder / "packed")
    (folder / "packed" / "model.safetensors").unlink()
    model.save_pretrained(folder / "packed")
    compressor.update_config(folder / "packed")
    compressor.decompress_model(model)
    if case.form == "nvfp4":  # the library rounds to bf16 in the end
        for name, matrix in nvfp4_matrices(load_file(folder / "packed" / "model.safetensors"), case).items():
            model.get_submodule(name).weight.data = matrix
    plain = {
        name: model.state_dict()[name].float().contiguous() for name in load_file(pair.target / "model.safetensors")
    }
    shutil.copytree(pair.target, folder / "plain")
    save_file(plain, folder / "plain" / "model.safetensors")
    return Model(folder / "packed", folder / "plain", case.form, logits_of(model))


def nvfp4_matrices(tensors: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Module → fp32 [N, K], by the library's functions."""
    made = dict[str, Tensor]()
    for name in (key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")):
        packed, scales, divisor = (tensors[f"{name}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float32)
        made[name] = dequantize(codes, scales.float(), args=case.scheme.weights, global_scale=divisor)
    return made


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return compress(pair, tmp_path_factory.mktemp("compressed"), CASES[request.param])


def test_logits_are_the_librarys(model: Model) -> None:
    files = open_model(model.packed, "fp32", [])
    assert files.packed_form == model.form
    torch.testing.assert_close(logits(model.packed), model.logits, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- DeepSeek's


BLOCK = 16


@pytest.fixture(scope="module", params=["fp32", "ue8m0"])
def fp8(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """As DeepSeek and Qwen write it, with smaller blocks; the embedding and the head stay plain."""
    folder = tmp_path_factory.mktemp(f"fp8-{request.param}")
    packed, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(pair.target / "model.safetensors").items():
        plain[name] = packed[name] = tensor
        if name.endswith("_proj.weight"):
            height, width = (size // BLOCK for size in tensor.shape)
            blocks = tensor.float().view(height, BLOCK, width, BLOCK)
            scales = blocks.abs().amax((1, 3)) / 448
            if request.param == "ue8m0":
                scales = scales.log2().ceil().exp2()
            spread = scales[:, None, :, None]
            codes = (blocks / spread).to(torch.float8_e4m3fn)
            plain[name] = (codes.float() * spread).view(tensor.shape)
            packed[name] = codes.view(tensor.shape)
            kept = scales.to(torch.float8_e8m0fnu) if request.param == "ue8m0" else scales
            packed |= {f"{name}_scale_inv": kept, f"{name.removesuffix('weight')}input_scale": torch.ones(1)}
            layer = name.split("self_attn")[0]
            packed |= {f"{layer}self_attn.k_scale": torch.ones(1)} if "self_attn" in name else {}
    said = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    }
    variant(pair.target, folder / "packed", quantization_config=said)
    save_file(packed, folder / "packed" / "model.safetensors")
    variant(pair.target, folder / "plain")
    save_file(plain, folder / "plain" / "model.safetensors")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32)
    return Model(folder / "packed", folder / "plain", "fp8", logits_of(reference))


def test_fp8_says_what_plain_matrices_say(fp8: Model) -> None:
    test_logits_are_the_librarys(fp8)


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["nf4", "keep", "fp32"])
def test_fp8_is_a_source_of_others(form: str, fp8: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 bit of it are those of the same numbers in plain matrices."""
    code, _, err = offspec(capsys, "quantize", fp8.packed, tmp_path / "made", "--format", form, "-q")
    assert (code, err) == (0, "")
    source = fp8.plain
    if form == "nf4":
        assert offspec(capsys, "quantize", fp8.plain, tmp_path / "4bit")[0] == 0
        source = tmp_path / "4bit"
    torch.testing.assert_close(logits(tmp_path / "made"), logits(source), rtol=1e-5, atol=1e-5)
    said = json.loads((tmp_path / "made" / "config.json").read_text()).get("quantization_config", {})
    assert said.get("quant_method") == {"nf4": "bitsandbytes", "keep": "fp8", "fp32": None}[form]


@pytest.mark.parametrize("model", ["w4a16", "fp8, blocks"], indirect=True)
def test_without_its_weights_it_can_be_planned(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: RATES)
    shutil.copy(model.packed / "config.json", tmp_path)
    code, out, err = offspec(capsys, "plan", tmp_path, "--draft", "none", "--device", "cpu")
    assert code == 0, err
    assert ("w4a16" if model.form == "w4a16" else "fp8") in out


def test_a_damaged_one_is_refused_in_one_line(fp8: Model, tmp_path: Path) -> None:
    shutil.copytree(fp8.packed, tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, file)
    with refused(CheckpointError, tmp_path / "damaged", "model.layers.2.mlp.up_proj.weight"):
        Engine.load(str(tmp_path / "damaged"), draft="none", device="cpu")
