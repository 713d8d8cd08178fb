"""gpt-oss's MXFP4: the numbers that transformers unpacks, kernels, sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import PackedMatrix, dense
from offspec.errors import CheckpointError
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.formats import StoredWeight, format_named, formats_in, stored_weights
from offspec.loaders.machine.product_rates import of_no_file
from offspec.loaders.streaming.stored_model import StoredUnit

from ...machines import needs_kernels
from ...refusals import refused

NAME = "mlp.experts.0.down_proj.weight"
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def random_parts(rows: int, columns: int, *, least: int = 110) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8, generator=chance)
    scales = torch.randint(least, 140, blocks.shape[:2], dtype=torch.uint8, generator=chance)
    return {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}


def opened(folder: Path, tensors: dict[str, Tensor]) -> StoredWeight:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    return stored_weights(checkpoint.tensors, formats_in(checkpoint))[NAME]


def test_numbers_are_those_that_transformers_unpacks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the reference: pip install transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts = random_parts(6, 96, least=0)
    stored = opened(tmp_path, parts)
    assert (stored.dtype, stored.shape, stored.is_packed) == ("mxfp4", (6, 96), True)
    given = [each[None] for each in parts.values()]
    expected = convert_moe_packed_tensors(*given, dtype=torch.float32)[0].T
    raw = [tensor.reshape(-1) for tensor in parts.values()]
    assert torch.equal(dense(stored.bind(raw), torch.float32), expected)
    assert StoredUnit({NAME: stored}).cost(torch.bfloat16).resident_bytes >= 6 * (96 // 2 + 96 // 32)


@needs_kernels
def test_a_kernel_multiplies(tmp_path: Path) -> None:
    parts = random_parts(40, 96)
    matrix = opened(tmp_path, parts).bind([tensor.reshape(-1) for tensor in parts.values()])
    assert isinstance(matrix, PackedMatrix)
    assert matrix.kernel is not None
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ dense(matrix, torch.float32).double().T
    torch.testing.assert_close(linear(x, matrix), expected.float(), rtol=1e-5, atol=1e-2)


def test_sizes_of_gpt_oss() -> None:
    """Attention and routers are plain in it."""
    sized = format_named("mxfp4").sized
    packed = sized("mxfp4", f"model.layers.0.{NAME}", (64, 96), of_no_file)
    plain = sized("mxfp4", "model.layers.0.self_attn.q_proj.weight", (64, 96), of_no_file)
    assert packed is not None
    assert plain is not None
    assert sum(info.nbytes for info in packed.streamed) == 64 * (48 + 3)
    assert (plain.dtype, packed.dtype) == ("BF16", "mxfp4")


@pytest.mark.parametrize(
    ("part", "other", "word"),
    [
        ("_scales", None, "lacks its weight_scales"),
        ("_blocks", torch.zeros(6, 3, 8, dtype=torch.uint8), "[6, 3, 8]"),
        ("_blocks", torch.zeros(6, 3, 16), "F32"),
        ("_scales", torch.zeros(6, 4, dtype=torch.uint8), "[6, 4]"),
    ],
)
def test_damaged_parts_are_refused(part: str, other: Tensor | None, word: str, tmp_path: Path) -> None:
    tensors = random_parts(6, 96) | ({} if other is None else {f"{NAME}{part}": other})
    if other is None:
        del tensors[f"{NAME}{part}"]
    with refused(CheckpointError, tmp_path, word):
        opened(tmp_path, tensors)
