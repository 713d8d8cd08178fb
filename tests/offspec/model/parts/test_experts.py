"""Mixtures of experts: what a checkpoint stores for them, and the precision in which they choose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec.checkpoints.conversion import convert
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.drafts.base import DraftOptions, OpenRequest
from offspec.drafts.kinds import automatic_names
from offspec.drafts.without_model import LookupDraft
from offspec.errors import CheckpointError
from offspec.loaders.formats.scaled import FP4, MX_BLOCK, ScaledLayout, ScaledMatrix
from offspec.loaders.params import ConvertParams
from offspec.model.decoder import Decoder
from offspec.planning.plan import all_resident

from ....fakes import CPU, TinyModel
from ....pair import variant
from ....refusals import refused
from ..families.test_families import streamed

GetModel = Callable[[str], TinyModel]


@pytest.mark.parametrize("family", ["glm4-moe", "minimax-m2"])
def test_a_correction_is_added_in_fp32(tiny_model: GetModel, family: str) -> None:
    """In bf16, corrections of many experts would be equal."""
    decoder = tiny_model(family).decoder(torch.bfloat16)
    shape = decoder.config.experts
    assert shape is not None
    assert shape.correction is not None
    with decoder.weights.layer(1) as layer:
        assert layer[shape.correction].dtype is torch.float32  # type: ignore[union-attr]
        assert layer["input_layernorm.weight"].dtype is torch.bfloat16  # type: ignore[union-attr]


def opened(folder: Path) -> Decoder:
    files = open_model(folder, "fp32", [])
    return load_decoder(files, all_resident(files), CPU)


def test_experts_stored_together_are_those_stored_apart(tiny_model: GetModel, tmp_path: Path) -> None:
    """As Qwen3.5-MoE's releases have them; transformers writes each expert's matrices."""
    model, apart = tiny_model("qwen3.5-moe"), tiny_model("qwen3.5-moe").decoder()
    folder = variant(model.folder, tmp_path / "joined")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(apart.config.num_layers):
        prefix, numbers = f"model.layers.{layer}.mlp.experts", range(6)
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{number}.{name}_proj.weight") for number in numbers])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    save_file(tensors, folder / "model.safetensors")
    joined = opened(folder)
    torch.testing.assert_close(logits_of(joined), logits_of(apart))
    assert joined.config.experts is not None
    assert joined.config.experts.names.is_fused


def with_mxfp4(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a gpt-oss with random MXFP4 experts, as released, and the same with plain ones."""
    chance, plain = torch.Generator().manual_seed(0), load_file(folder / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, inputs, outputs = packed.pop(name).shape
        blocks = torch.randint(0, 256, (num, outputs, inputs // 32, 16), dtype=torch.uint8, generator=chance)
        scales = torch.randint(121, 124, blocks.shape[:3], dtype=torch.uint8, generator=chance)
        layout = ScaledLayout((num * outputs, inputs), "mxfp4", FP4, MX_BLOCK)
        exponents = scales.flatten(0, 1).view(torch.float8_e8m0fnu)
        numbers = ScaledMatrix(layout, blocks.view(num * outputs, -1), exponents).dequantize(torch.float32)
        plain[name] = numbers.view(num, outputs, inputs).transpose(1, 2).contiguous()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed, plain


@pytest.fixture(scope="module")
def gpt_oss(tiny_model: GetModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model with experts in MXFP4, and plain."""
    source, folder = tiny_model("gpt-oss").folder, tmp_path_factory.mktemp("gpt-oss")
    packed, plain = with_mxfp4(source)
    folders = variant(source, folder / "packed", quantization_config={"quant_method": "mxfp4"}), folder / "plain"
    variant(source, folders[1])
    for path, tensors in zip(folders, (packed, plain), strict=True):
        save_file(tensors, path / "model.safetensors")
    return folders


def logits_of(decoder: Decoder) -> Tensor:
    tokens = torch.arange(1, 20)
    return decoder.logits(decoder.forward(tokens, torch.arange(len(tokens)), decoder.new_cache()))


def test_gpt_oss_as_it_is_released(gpt_oss: tuple[Path, Path]) -> None:
    """Experts in MXFP4, resident and from disk, compute what plain ones do."""
    packed, plain = gpt_oss
    files = open_model(packed, "fp32", [])
    expected = logits_of(load_decoder(files, all_resident(files), CPU))
    torch.testing.assert_close(logits_of(opened(plain)), expected, rtol=1e-4, atol=1e-4)
    assert {weight.dtype for weight in files.stored.experts[0][0].weights.values()} == {"mxfp4", "F32"}
    for folder in gpt_oss:
        with closing(streamed(folder).weights) as weights:
            found = logits_of(Decoder(files.config, weights, dtype=torch.float32, device=CPU))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    planned = model_to_plan(packed, "mxfp4", "fp32", [])
    assert {weight.dtype for weight in planned.stored.experts[0][0].weights.values()} == {"mxfp4", "BF16"}
    assert {weight.dtype for weight in planned.stored.layers[0].weights.values()} == {"BF16"}


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "granite-moe", "gpt-oss"])
def test_a_copy_in_4_bits(tiny_model: GetModel, tmp_path: Path, family: str) -> None:
    """Of experts stored apart, joined, and transposed; what chooses them and weighs them stays plain."""
    model = tiny_model(family)
    convert(model.folder, tmp_path / "copy", ConvertParams("nf4"))
    files = open_model(tmp_path / "copy", "fp32", [])
    units = (files.stored.layers[0], files.stored.experts[0][1])
    dtypes = {name: weight.dtype for unit in units for name, weight in unit.weights.items() if len(weight.shape) == 2}
    shape = files.config.experts
    assert shape is not None
    plain = {f"{name}.weight" for name in (shape.router, shape.shared_gate) if name is not None}
    assert {name for name, dtype in dtypes.items() if dtype != "nf4"} == plain
    found, expected = logits_of(load_decoder(files, all_resident(files), CPU)), logits_of(model.decoder())
    assert torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1] > 0.8


def test_mxfp4_is_kept_or_unpacked(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    packed, _ = gpt_oss
    expected = logits_of(opened(packed))
    for form in ("keep", "fp32"):
        convert(packed, tmp_path / form, ConvertParams(form))
        torch.testing.assert_close(logits_of(opened(tmp_path / form)), expected, rtol=1e-4, atol=1e-4)
    with refused(CheckpointError, packed, "mxfp4", "keep"):
        convert(packed, tmp_path / "nf4", ConvertParams("nf4"))


def test_a_layer_behind_the_others_is_ignored(tiny_model: GetModel, tmp_path: Path) -> None:
    """GLM-4.5 comes with an MTP layer, which is a mixture, too: no draft by default."""
    source = tiny_model("glm4-moe").folder
    folder = variant(source, tmp_path / "with-mtp", num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    behind = {name.replace(".2.", ".3.", 1): tensor for name, tensor in tensors.items() if ".layers.2." in name}
    behind |= {"model.layers.3.eh_proj.weight": torch.zeros(64, 128), "model.layers.3.enorm.weight": torch.ones(64)}
    save_file({**tensors, **{name: each.clone() for name, each in behind.items()}}, folder / "model.safetensors")
    torch.testing.assert_close(logits_of(opened(folder)), logits_of(opened(source)), rtol=1e-4, atol=1e-5)
    target = open_model(folder, "fp32", [])
    assert "model.layers.3.eh_proj.weight" in target.mtp_names
    request = OpenRequest(DraftOptions("auto"), target, None, "fp32", [])
    assert automatic_names("glm", request) == [LookupDraft.NAME]
