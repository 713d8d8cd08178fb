"""AWQ's and GPTQ's matrices are what their own definitions make of the same bytes, bit for bit; lies are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import dense
from offspec.errors import CheckpointError, UnsupportedModelError
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.formats import StoredWeight, blank_tensors, grouped
from offspec.loaders.formats.grouped import GroupedMatrix

from ...examples import examples
from ...machines import NO_VECTORS, by_processor
from ...refusals import refused
from ..fakes import stored_with as open_with
from .test_formats import bound, equal, noise, read_raw, without

Tensors = dict[str, Tensor]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU = torch.device("cpu")
NAME = "mlp.up_proj.weight"
FORMS = ("awq", "gptq", "gptq_v2", "act order")  # the last one is v1
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, in the order in which a word has them from its lowest bits on


# ------------------------------------------------------------------------------------------- the formats, by definition


@dataclass(frozen=True)
class Quantised:
    """A matrix [N, K] of integers: codes [K, N], zeros [G, N], scales fp16 [G, N], and the group of each input, [K]."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    @property
    def exact(self) -> Tensor:
        """fp64 [N, K]"""
        scales = self.scales.astype(np.float64)
        return torch.from_numpy(((self.codes - self.zeros[self.groups]) * scales[self.groups]).T)

    @property
    def fp16(self) -> Tensor:
        """What the formats' own kernels compute, [N, K]."""
        centred = (self.codes - self.zeros[self.groups]).astype(np.float16)
        return torch.from_numpy((centred * self.scales[self.groups]).T)

    def tensors(self, form: str, module: str = NAME.removesuffix(".weight")) -> Tensors:
        """As a checkpoint has it."""
        if form == "awq":
            parts = {"qweight": words(self.codes, AWQ_OUTPUTS), "qzeros": words(self.zeros, AWQ_OUTPUTS)}
        else:
            kept = self.zeros if form == "gptq_v2" else (self.zeros - 1) % 16
            parts = {"qweight": words(self.codes.T, range(8)).T, "qzeros": words(kept, range(8)), "g_idx": self.groups}
        parts["scales"] = self.scales
        return {f"{module}.{part}": torch.from_numpy(np.ascontiguousarray(array)) for part, array in parts.items()}


def words(values: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """[R, 8 · W] of 0 .. 15 → int32 [R, W]"""
    packed = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for place, column in enumerate(order):
        packed |= values[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return packed.view(np.int32)


def random_matrix(form: str, num_outputs: int, num_inputs: int, size: int = -1, seed: int = 0) -> Quantised:
    """Any codes and zeros, scales from denormal to large."""
    rng = np.random.default_rng(seed)
    size = num_inputs if size == -1 else size
    groups = (rng.permutation(num_inputs) if form == "act order" else np.arange(num_inputs)) // size
    num_groups = -(-num_inputs // size)
    scales = (10 ** rng.uniform(-7, 3, (num_groups, num_outputs))).astype(np.float16)
    codes, zeros = (rng.integers(0, 16, (rows, num_outputs)) for rows in (num_inputs, num_groups))
    return Quantised(codes, zeros, scales, groups.astype(np.int32))


def said_by(form: str, group_size: Any = -1, **more: Any) -> dict[str, Any]:
    """The quantization_config of a checkpoint."""
    shared = {"bits": 4, "group_size": group_size}
    if form == "awq":
        return shared | {"quant_method": "awq", "version": "gemm", "zero_point": True} | more
    layout = {"checkpoint_format": "gptq_v2"} if form == "gptq_v2" else {}
    return shared | {"quant_method": "gptq", "desc_act": form == "act order", **layout} | more


def part(name: str) -> str:
    return NAME.replace("weight", name)


def opened(folder: Path, form: str, matrix: Quantised, group_size: int = -1) -> StoredWeight:
    return open_with(folder, matrix.tensors(form), said_by(form, group_size))[NAME]


# ----------------------------------------------------------------------------------------------------------- matrices


def assert_right(weight: StoredWeight, matrix: Quantised) -> None:
    """Its numbers, by every way to have them."""
    packed, shape = bound(weight), matrix.exact.shape
    assert weight.shape == packed.shape == shape
    for dtype in DTYPES:
        expected = matrix.fp16 if dtype is torch.float16 else matrix.exact.to(dtype)
        assert equal(dense(packed, dtype), expected)
        memory = torch.full((shape.numel() + 5,), torch.nan, dtype=dtype)
        made = dense(packed, dtype, memory)
        assert equal(made, expected)
        assert made.data_ptr() == memory.data_ptr()
        assert memory[shape.numel() :].isnan().all()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """form, N, K, group size; AWQ has whole groups only."""
    form, num_inputs = draw(st.sampled_from(FORMS)), 8 * draw(st.integers(1, 50))
    sizes = [n for n in range(1, num_inputs + 1) if num_inputs % n == 0]
    size = st.sampled_from(sizes) if form == "awq" else st.integers(1, 450)
    num_outputs = draw(st.integers(1, 20) | st.sampled_from((255, 256, 257, 300)))
    return form, 8 * num_outputs, num_inputs, draw(st.just(-1) | size)


@given(layout=layouts(), seed=st.integers(0, 2**32 - 1))
@examples(80)
def test_dequantised_as_the_formats_say(
    layout: tuple[str, int, int, int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    form, num_outputs, num_inputs, size = layout
    matrix = random_matrix(form, num_outputs, num_inputs, size, seed)
    weight = opened(tmp_path_factory.mktemp("any"), form, matrix, size)
    assert weight.dtype == ("awq" if form == "awq" else "gptq")
    assert_right(weight, matrix)


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [32, 128, 192, -1])
def test_several_tiles(form: str, size: int, tmp_path: Path) -> None:
    matrix = random_matrix(form, 2056, 768, size)
    assert_right(opened(tmp_path, form, matrix, size), matrix)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_scales_of_other_dtypes(form: str, stored: torch.dtype, tmp_path: Path) -> None:
    matrix = random_matrix(form, 40, 96, 32)
    scales = torch.from_numpy(matrix.scales).to(stored)
    weight = bound(open_with(tmp_path, matrix.tensors(form) | {part("scales"): scales}, said_by(form, 32))[NAME])
    expected = replace(matrix, scales=scales.double().numpy()).exact
    for dtype in DTYPES:
        assert equal(dense(weight, dtype), expected.to(dtype))


@by_processor("processor", NO_VECTORS)
@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_scratch", [False, True])
def test_linear(form: str, dtype: torch.dtype, with_scratch: bool, tmp_path: Path) -> None:
    matrix = random_matrix(form, 32, 48, 16)
    weight = bound(opened(tmp_path, form, replace(matrix, scales=matrix.scales % 1), 16))
    x, bias = noise(5, 48, dtype=dtype, seed=1), noise(1, 32, seed=2)[0]
    scratch = torch.full((2000,), torch.nan, dtype=dtype) if with_scratch else None
    plain = dense(weight, dtype)
    assert equal(linear(x, weight, None, scratch), torch.nn.functional.linear(x, plain))
    assert equal(linear(x, weight, bias, scratch), torch.nn.functional.linear(x, plain, bias.to(dtype)))


@pytest.mark.parametrize("form", FORMS)
def test_parts_that_are_not_aligned_and_parts_that_change(form: str, tmp_path: Path) -> None:
    matrix = random_matrix(form, 16, 64, 32)
    weight = opened(tmp_path, form, matrix, 32)
    raw = [read_raw(info) for info in weight.streamed]
    shifted = [torch.cat((torch.zeros(1, dtype=torch.uint8), part))[1:] for part in raw]
    assert equal(dense(weight.bind(shifted), torch.float16), matrix.fp16)
    packed = weight.bind(raw)
    for part in raw:
        part.zero_()  # as the stream does when the next layer comes
    assert not dense(packed, torch.float32).any()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("form", FORMS)
def test_cuda_equals_the_cpu_and_is_not_waited_for(form: str, tmp_path: Path) -> None:
    for shape in ((16, 64), (8200, 640), (2056, 1664)):
        weight = opened(tmp_path, form, random_matrix(form, *shape, 32), 32)
        packed = weight.to("cuda").bind([read_raw(info).cuda() for info in weight.streamed])
        for dtype in DTYPES:
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = dense(packed, dtype)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert equal(found.cpu(), dense(bound(weight), dtype))


def test_order_costs_memory_only_where_it_matters_and_fp16_lies_as_a_cpu_multiplies_it(tmp_path: Path) -> None:
    for form in FORMS:
        packed = bound(opened(tmp_path, form, random_matrix(form, 16, 64, 32), 32))
        assert isinstance(packed, GroupedMatrix)
        assert (packed.layout.groups is not None) == (form == "act order")
        # With a transposed matrix of fp16 torch computes, but 70 times as long.
        assert dense(packed, torch.float16).is_contiguous(), form


# ---------------------------------------------------------------------------------------------------------------- lies


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("missing", ["qweight", "qzeros", "scales"])
def test_a_part_that_is_missing(form: str, missing: str, tmp_path: Path) -> None:
    tensors = random_matrix(form, 16, 64, 32).tensors(form)
    with refused(CheckpointError, tmp_path, missing):
        open_with(tmp_path, without(tensors, part(missing)), said_by(form, 32))


def test_gptq_without_an_order_is_in_order(tmp_path: Path) -> None:
    matrix = random_matrix("gptq", 16, 64, 32)
    tensors = without(matrix.tensors("gptq"), part("g_idx"))
    assert_right(open_with(tmp_path, tensors, said_by("gptq", 32))[NAME], matrix)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shorter": lambda t: t[:-1].clone(),
    "narrower": lambda t: t[..., :-1].clone(),
    "a column": lambda t: t.reshape(-1, 1),
    "of three dimensions": lambda t: t[None],
    "empty": lambda t: t[:0].clone(),
    "int64": lambda t: t.long(),
    "fp64": lambda t: t.double(),
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("form", "name"), [*product(FORMS, ["qweight", "qzeros", "scales"]), *product(FORMS[1:], ["g_idx"])]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_does_not_fit(form: str, name: str, change: str, tmp_path: Path) -> None:
    tensors = random_matrix(form, 24, 64, 32).tensors(form)
    with refused(CheckpointError, tmp_path):
        open_with(tmp_path, tensors | {part(name): CHANGES[change](tensors[part(name)])}, said_by(form, 32))


@pytest.mark.parametrize("group", [-1, 2, 2**31 - 1, -(2**31)])
def test_an_order_that_names_other_groups(group: int, tmp_path: Path) -> None:
    tensors = random_matrix("act order", 16, 64, 32).tensors("act order")
    tensors[part("g_idx")][5] = group
    with refused(CheckpointError, tmp_path, group):
        open_with(tmp_path, tensors, said_by("act order", 32))


def test_an_order_longer_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "MAX_ORDER_BYTES", 128)
    tensors = random_matrix("gptq", 16, 64, 32).tensors("gptq")
    with refused(CheckpointError, tmp_path, "64 inputs"):
        open_with(tmp_path, tensors, said_by("gptq", 32))


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [16, 31, 64, 2**70, -1])
def test_a_group_size_that_contradicts_the_scales(form: str, size: int, tmp_path: Path) -> None:
    tensors = random_matrix(form, 16, 64, 32).tensors(form)
    with refused(CheckpointError, tmp_path, "2 groups"):
        open_with(tmp_path, tensors, said_by(form, size))


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [65, 2**40, 2**70])
def test_a_group_larger_than_the_matrix_is_all_of_it(form: str, size: int, tmp_path: Path) -> None:
    matrix = random_matrix(form, 16, 64, -1)
    assert_right(open_with(tmp_path, matrix.tensors(form), said_by(form, size))[NAME], matrix)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_that_fill_no_words(form: str, tmp_path: Path) -> None:
    tensors = random_matrix(form, 16, 64, 32).tensors(form)
    with refused(CheckpointError, tmp_path, 12, 8):
        open_with(tmp_path, tensors | {part("scales"): torch.ones(2, 12).half()}, said_by(form, 32))


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_belong_beside_it(form: str, tmp_path: Path) -> None:
    tensors = random_matrix(form, 16, 64, 32).tensors(form)
    for name in (NAME, f"{NAME}.absmax", part("SCB")):
        with refused(CheckpointError, tmp_path):
            open_with(tmp_path, tensors | {name: torch.ones(16, 64)}, said_by(form, 32))


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 8},
        {"bits": "4"},
        {"bits": [4] * 10_000},
        {"group_size": "x\n" * 1000},
        {"group_size": 0},
        {"group_size": 32.0},
        {"group_size": None},
        {"version": "gemv", "checkpoint_format": "marlin"},
        {"version": "marlin", "checkpoint_format": "gptq_v3"},
        {"version": ["gemm"], "checkpoint_format": 7},
        {"version": "x\n" * 1000, "checkpoint_format": "x\n" * 1000},
    ],
    ids=lambda changes: repr(changes)[:40],
)
def test_a_config_that_is_not_read(form: str, changes: dict[str, Any], tmp_path: Path) -> None:
    error, word = (CheckpointError, "group_size") if "group_size" in changes else (UnsupportedModelError, "only")
    with refused(error, tmp_path, word):
        open_with(tmp_path, random_matrix(form, 16, 64, 32).tensors(form), said_by(form, 32) | changes)


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ({"format": "gptq_v2"}, "gptq_v2"),
        ({"format": "GPTQ_V2", "checkpoint_format": None}, "gptq_v2"),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, "gptq"),
        ({"format": "marlin", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"format": "gptq"}, "gptq"),
        ({}, "gptq"),
    ],
    ids=str,
)
def test_the_layout_by_whatever_key_transformers_takes(layout: dict[str, Any], form: str, tmp_path: Path) -> None:
    matrix = random_matrix(form, 16, 64, 32)
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32} | layout
    assert_right(open_with(tmp_path, matrix.tensors(form), said)[NAME], matrix)


@pytest.mark.parametrize("layout", [{"format": "gemm"}, {"format": "gemv", "version": "GEMM"}, {}], ids=str)
def test_awq_by_whatever_key_transformers_takes(layout: dict[str, Any], tmp_path: Path) -> None:
    matrix = random_matrix("awq", 16, 64, 32)
    said = {"quant_method": "awq", "bits": 4, "group_size": 32} | layout
    assert_right(open_with(tmp_path, matrix.tensors("awq"), said)[NAME], matrix)


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "dynamic",
    [
        {"+:.*down.*": {"bits": 8}},
        {".*down.*": {"group_size": 32}},
        {"-:.*head.*": {}, "x\n" * 1000: {"bits": 2}},
        ["+:.*down.*"],
        7,
    ],
    ids=lambda dynamic: repr(dynamic)[:40],
)
def test_modules_with_settings_of_their_own(form: str, dynamic: object, tmp_path: Path) -> None:
    said = said_by(form, 32, dynamic=dynamic)
    with refused(UnsupportedModelError, tmp_path, "modules", "dynamic") as caught:
        open_with(tmp_path, random_matrix(form, 16, 64, 32).tensors(form), said)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("dynamic", [None, {}, {"-:.*lm_head.*": {}}])
def test_modules_that_are_left_out_are_plain(dynamic: object, tmp_path: Path) -> None:
    matrix, plain = random_matrix("gptq", 16, 64, 32), {"lm_head.weight": noise(16, 64)}
    weights = open_with(tmp_path, matrix.tensors("gptq") | plain, said_by("gptq", 32, dynamic=dynamic))
    assert_right(weights[NAME], matrix)
    assert equal(dense(bound(weights["lm_head.weight"]), torch.bfloat16), plain["lm_head.weight"])


def test_what_only_autogptqs_own_file_tells(tmp_path: Path) -> None:
    matrix, said = random_matrix("gptq", 16, 64, 32), {"bits": 4, "group_size": 32, "desc_act": False}
    (tmp_path / "quantize_config.json").write_text(json.dumps(said))
    for nothing in (None, {}):
        with refused(CheckpointError, tmp_path, "quantize_config.json", '"quant_method": "gptq"'):
            open_with(tmp_path, matrix.tensors("gptq"), nothing)
    assert_right(open_with(tmp_path, matrix.tensors("gptq"), said | {"quant_method": "gptq"})[NAME], matrix)
    plain = {NAME: noise(16, 64)}  # to which that file says nothing
    assert equal(dense(bound(open_with(tmp_path, plain, None)[NAME]), torch.bfloat16), plain[NAME])


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("said", [None, "4bit", {"bits": 4}, {"quant_method": ["awq"]}, {"quant_method": "hqq"}])
def test_where_nothing_says_what_it_is(form: str, said: object, tmp_path: Path) -> None:
    with refused(CheckpointError, tmp_path, "AWQ or GPTQ"):
        open_with(tmp_path, random_matrix(form, 16, 64, 32).tensors(form), said)


def test_biases_that_hold_nothing(tmp_path: Path) -> None:
    biases = {"a.bias": torch.zeros(16), "b.bias": torch.ones(16), "c.bias": torch.zeros(16), "d.bias": torch.zeros(16)}
    beside = {f"{module}.qweight": torch.ones(8, 16, dtype=torch.int32) for module in "abc"}
    save_file(biases | beside, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert blank_tensors(open_checkpoint(tmp_path).tensors, {"c.bias"}) == {"a.bias"}
