"""compressed-tensors' matrices are what that library makes of its own files, bit for bit; lies are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import PackedMatrix, as_table, dense, take_rows
from offspec.errors import CheckpointError, OffspecError, UnsupportedModelError
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.formats import blank_tensors, format_named, format_notes
from offspec.loaders.machine.product_rates import of_no_file

from ...examples import examples
from ...machines import NO_VECTORS, by_processor, each_choice, lanes, needs_kernels
from ...refusals import refused
from ..fakes import stored_with as open_with
from .test_formats import bound, equal, read_raw, without

oracle = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which writes the checkpoints")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.utils import (  # noqa: E402
    calculate_qparams,
    generate_gparam,
    maybe_pad_tensor_for_block_quant,
)

Tensors = dict[str, Tensor]
Json = dict[str, Any]
MODULE = "mlp.up_proj"
NAME = f"{MODULE}.weight"


@dataclass(frozen=True)
class Case:
    """One scheme. form: what offspec calls it. shape: of the matrix. args: of `QuantizationArgs`."""

    form: str
    format: str
    shape: tuple[int, int]
    args: Json = field(default_factory=dict)

    @property
    def scheme(self) -> QuantizationScheme:
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**self.args), format=self.format)

    @property
    def config(self) -> Json:
        """As the library writes it to config.json."""
        return said_of(self)


def said_of(*cases: Case, ignore: tuple[str, ...] = ("lm_head",), **more: Any) -> Json:
    """The quantization_config of several groups."""
    groups = {f"group_{i}": case.scheme for i, case in enumerate(cases)}
    layout = cases[0].format if len(cases) == 1 else "mixed-precision"
    config = QuantizationConfig(config_groups=groups, format=layout, ignore=list(ignore))
    return json.loads(config.model_dump_json()) | {"quant_method": "compressed-tensors", "sparsity_config": {}} | more


def integers(bits: int, **args: Any) -> Json:
    return {"num_bits": bits, "type": "int"} | args


def floats(bits: int, **args: Any) -> Json:
    return {"num_bits": bits, "type": "float"} | args


GROUPS = {"strategy": "group", "group_size": 32}
MX = GROUPS | {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
NVFP4 = floats(4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
PACK, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
CASES = {
    "w4a16": Case("w4a16", PACK, (40, 96), integers(4, **GROUPS)),
    "w4a16, asymmetric": Case("w4a16", PACK, (40, 96), integers(4, symmetric=False, **GROUPS)),
    "w4a16, asymmetric, no whole words": Case(
        "w4a16", PACK, (41, 102), integers(4, strategy="channel", symmetric=False)
    ),
    "w4a16, one scale": Case("w4a16", PACK, (9, 40), integers(4, strategy="tensor")),
    "w4a16, one scale and zero": Case("w4a16", PACK, (9, 40), integers(4, strategy="tensor", symmetric=False)),
    "w4a16, a row": Case("w4a16", PACK, (1, 35), integers(4, strategy="channel")),
    "w8a16": Case("w8a16", PACK, (40, 96), integers(8, **GROUPS)),
    "w8a16, rows": Case("w8a16", PACK, (12, 39), integers(8, strategy="channel")),
    "w8a16, asymmetric": Case("w8a16", PACK, (41, 96), integers(8, symmetric=False, **GROUPS)),
    **{
        f"w{bits}a16": Case(f"w{bits}a16", PACK, (11, 100), integers(bits, strategy="channel"))
        for bits in (2, 3, 5, 6, 7)
    },
    "w3a16, asymmetric": Case("w3a16", PACK, (37, 96), integers(3, symmetric=False, **GROUPS)),
    "int8": Case("int8", INT, (40, 96), integers(8, strategy="channel")),
    "int8, groups, asymmetric": Case("int8", "naive-quantized", (40, 96), integers(8, symmetric=False, **GROUPS)),
    "fp8": Case("fp8", FLOAT, (40, 96), floats(8, strategy="tensor")),
    "fp8, rows": Case("fp8", FLOAT, (40, 97), floats(8, strategy="channel")),
    "fp8, groups": Case("fp8", "naive-quantized", (40, 96), floats(8, **GROUPS)),
    "fp8, blocks": Case("fp8", FLOAT, (40, 97), floats(8, strategy="block", block_structure=[16, 32])),
    "fp8, one block": Case("fp8", FLOAT, (40, 97), floats(8, strategy="block", block_structure=[128, 128])),
    "mxfp8": Case("mxfp8", "mxfp8-quantized", (40, 96), floats(8, **MX)),
    "nvfp4": Case("nvfp4", "nvfp4-pack-quantized", (40, 96), NVFP4),
    "mxfp4": Case("mxfp4", "mxfp4-pack-quantized", (40, 96), floats(4, **MX)),
}


# ----------------------------------------------------------------------------------------------- written by the oracle


def noise(*shape: int, seed: int = 0) -> Tensor:
    """fp32"""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each rectangle that shares a scale, as the scales lie."""
    if args.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        height, width = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, (height, width))
        blocks = padded.view(padded.shape[0] // height, height, -1, width)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.view(weight.shape[0], -1, args.group_size)
    return groups.amin(-1), groups.amax(-1)


def calibrated(weight: Tensor, case: Case) -> Tensors:
    """The scales and zeros of a module."""
    scheme, state = case.scheme, dict[str, Tensor]()
    low, high = extremes(weight, scheme.weights)
    if case.form == "nvfp4":
        state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    state["weight_scale"], state["weight_zero_point"] = calculate_qparams(
        low, high, scheme.weights, state.get("weight_global_scale")
    )
    return state


def compressed(weight: Tensor, case: Case) -> tuple[Tensors, Tensor]:
    """A module's tensors as the library stores them, and what it makes of them again."""
    scheme, state = case.scheme, {"weight": weight} | calibrated(weight, case)
    library = BaseCompressor.get_value_from_registry(case.format)
    stored = library.compress(state, scheme)
    return {name: tensor.contiguous() for name, tensor in stored.items()}, library.decompress(stored, scheme)["weight"]


def named(tensors: Tensors, module: str = MODULE) -> Tensors:
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


# ------------------------------------------------------------------------------------------------------------ matrices


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matrices_are_the_librarys(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, expected = compressed(noise(*case.shape).to(dtype), case)
    weight = open_with(tmp_path, named(tensors), case.config)[NAME]
    matrix = bound(weight)
    assert (weight.dtype, weight.shape, matrix.shape) == (case.form, case.shape, case.shape)
    assert equal(dense(matrix, expected.dtype), expected)
    memory = torch.full((expected.numel() + 5,), torch.nan)
    made = dense(matrix, torch.float32, memory)
    assert made.data_ptr() == memory.data_ptr()
    assert memory[expected.numel() :].isnan().all()
    assert equal(made.to(expected.dtype), expected), "rounded once"
    wanted = torch.tensor([case.shape[0] - 1, 0, 0])  # as of an embedding
    assert equal(take_rows(as_table(matrix), wanted, torch.float32), dense(matrix, torch.float32)[wanted])


def test_several_tiles(tmp_path: Path) -> None:
    case = Case("w4a16", PACK, (1100, 2048), integers(4, symmetric=False, strategy="group", group_size=128))
    tensors, expected = compressed(noise(*case.shape), case)
    assert equal(dense(bound(open_with(tmp_path, named(tensors), case.config)[NAME]), torch.float32), expected)


@pytest.mark.parametrize("name", ["w4a16", "w4a16, asymmetric"])
def test_inputs_in_another_order(name: str, tmp_path: Path) -> None:
    """`actorder: group`, which the library wrote until 2026: input k has the scales of group g_idx[k]."""
    case = CASES[name]
    tensors, _ = compressed(noise(*case.shape), case)
    order = torch.randperm(case.shape[1], generator=torch.Generator().manual_seed(0))
    groups = (order // 32).to(torch.int32)
    weight = open_with(tmp_path, named(tensors | {"weight_g_idx": groups}), case.config)[NAME]
    library = BaseCompressor.get_value_from_registry(case.format)
    codes = library.decompress(tensors | {"weight_scale": torch.ones(40, 3)}, case.scheme)
    zeros = codes.get("weight_zero_point", torch.zeros(40, 3))
    plain = codes["weight"] + zeros.repeat_interleave(32, 1)  # without scales and zeros
    scales, shifts = (part[:, groups.long()] for part in (tensors["weight_scale"], zeros))
    assert equal(dense(bound(weight.to("cpu")), torch.float32), (plain - shifts) * scales)


@by_processor("processor", NO_VECTORS)
@pytest.mark.parametrize("name", ["w4a16, asymmetric", "w3a16, asymmetric", "int8", "fp8, blocks", "nvfp4", "mxfp4"])
def test_linear(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tensors, _ = compressed(noise(*case.shape), case)
    weight = bound(open_with(tmp_path, named(tensors), case.config)[NAME])
    x, bias = noise(5, case.shape[1], seed=1), noise(1, case.shape[0], seed=2)[0]
    assert equal(linear(x, weight, bias), torch.nn.functional.linear(x, dense(weight, torch.float32), bias))


WIDE = {
    "w4a16": Case("w4a16", PACK, (40, 256), integers(4, strategy="group", group_size=128)),
    "w4a16, rows": Case("w4a16", PACK, (40, 256), integers(4, strategy="channel")),
    "w4a16, one scale": Case("w4a16", PACK, (40, 192), integers(4, strategy="tensor")),
    "w4a16, asymmetric": Case("w4a16", PACK, (40, 256), integers(4, symmetric=False, strategy="group", group_size=128)),
    "int8": Case("int8", INT, (40, 256), integers(8, strategy="channel")),
    "fp8": Case("fp8", FLOAT, (40, 256), floats(8, strategy="tensor")),
    "fp8, blocks": Case("fp8", FLOAT, (150, 192), floats(8, strategy="block", block_structure=[128, 128])),
    "fp8, groups": Case("fp8", "naive-quantized", (40, 256), floats(8, strategy="group", group_size=64)),
}


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE)
def test_kernels(case: Case, tmp_path: Path) -> None:
    """Of rows that are whole steps for one; scales may be 16 bit."""
    tensors, _ = compressed(noise(*case.shape).bfloat16(), case)
    weight = bound(open_with(tmp_path, named(tensors), case.config)[NAME])
    assert isinstance(weight, PackedMatrix)
    assert (weight.kernel is not None) == case.args.get("symmetric", True)
    x = noise(3, case.shape[1], seed=1)
    expected = x.double() @ dense(weight, torch.float32).double().T
    torch.testing.assert_close(linear(x, weight), expected.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_that_are_not_aligned_and_parts_that_change(case: Case, tmp_path: Path) -> None:
    tensors, expected = compressed(noise(*case.shape), case)
    weight = open_with(tmp_path, named(tensors), case.config)[NAME]
    raw = [read_raw(info) for info in weight.streamed]
    shifted = [torch.cat((torch.zeros(1, dtype=torch.uint8), part))[1:] for part in raw]
    assert equal(dense(weight.bind(shifted), expected.dtype), expected)
    packed = weight.bind(raw)
    before = dense(packed, torch.float32)
    for part in raw[:2]:
        part.fill_(56)  # as the stream does when the next layer comes
    assert not equal(dense(packed, torch.float32), before)


def test_groups_of_modules_are_told_apart_by_their_tensors(tmp_path: Path) -> None:
    cases = [CASES[name] for name in ("w4a16", "w4a16, asymmetric", "w8a16, rows", "fp8, rows", "nvfp4", "int8")]
    made = {f"layers.{i}.a": compressed(noise(*case.shape, seed=i), case) for i, case in enumerate(cases)}
    tensors = {name: tensor for module, (parts, _) in made.items() for name, tensor in named(parts, module).items()}
    weights = open_with(tmp_path, tensors | {"lm_head.weight": noise(4, 8)}, said_of(*cases))
    assert weights.keys() == {f"{module}.weight" for module in made} | {"lm_head.weight"}
    for case, (module, (_, expected)) in zip(cases, made.items(), strict=True):
        weight = weights[f"{module}.weight"]
        assert weight.dtype == case.form
        assert equal(dense(bound(weight), expected.dtype), expected)
    assert not weights["lm_head.weight"].is_packed


def test_what_belongs_to_activations_and_kv_caches_is_not_read(tmp_path: Path) -> None:
    tensors, expected = compressed(noise(40, 96), case := CASES["fp8"])
    beside = {f"{MODULE}.input_scale": torch.ones(1), f"{MODULE}.output_scale": torch.ones(1)}
    plain = {"lm_head.weight": noise(4, 8), "lm_head.input_scale": torch.ones(1)}
    said = case.config | {"kv_cache_scheme": floats(8, strategy="tensor")}
    weights = open_with(tmp_path, named(tensors) | beside | plain, said)
    assert equal(dense(bound(weights[NAME]), torch.float32), expected)
    assert [info.name for info in weights[NAME].streamed] == [NAME, f"{NAME}_scale"]
    assert not weights["lm_head.weight"].is_packed
    infos = open_checkpoint(tmp_path).tensors
    scale = {"layers.0.self_attn.k_scale": infos[NAME], "layers.0.self_attn.kv_scale": infos[NAME]}
    assert blank_tensors({**infos, **scale}, {NAME}) == set(scale)
    (told,) = format_notes(open_checkpoint(tmp_path))
    assert "KV entries" in told


@each_choice
def test_sizes_without_a_checkpoint() -> None:
    """What plans and measurements are made of."""
    for form in sorted({case.form for case in CASES.values()}):
        sized = format_named(form).sized(form, "weight", (256, 512), of_no_file)
        assert sized is not None, form
        made = sized.sample(torch.device("cpu"))
        assert isinstance(made, PackedMatrix), form
        has_kernel = form in ("w4a16", "fp8", "int8", "mxfp4", "mxfp8") and lanes()
        assert (made.kernel is not None) == bool(has_kernel and (form != "mxfp8" or lanes() == 8)), form
        assert dense(made, torch.float32).shape == (256, 512), form
        assert sized.dtype == form


# ------------------------------------------------------------------------------------------------------------ refusals


def changed(**settings: Any) -> Callable[[Json], Json]:
    """Of the first group's weights."""

    def change(said: Json) -> Json:
        said["config_groups"]["group_0"]["weights"] |= settings
        return said

    return change


CONFIGS: dict[str, tuple[Callable[[Json], Any], str]] = {
    "marlin": (lambda said: deep(said, "format", "marlin-24"), "'marlin-24'"),
    "mixed without a format": (lambda said: deep(said, "format", "mixed-precision"), "mixed-precision"),
    "bits": (changed(num_bits=16), "16 bits"),
    "a type": (changed(type="float"), "'float'"),
    "a strategy": (changed(strategy="token"), "'token'"),
    "no group": (changed(group_size=None), "group_size None"),
    "a group that does not divide": (changed(group_size=36), "36"),
    "channels": (changed(strategy="channel"), "channel"),
    "blocks of text": (changed(strategy="block", block_structure="16xa"), "block_structure"),
    "other blocks": (changed(strategy="block", block_structure="16x64"), "(16, 64)"),
    "asymmetric": (changed(symmetric=False), "weight_zero_point"),
    "symmetric perhaps": (changed(symmetric="yes"), "symmetric 'yes'"),
    "more bits": (changed(num_bits=8), "weight_shape"),
    "weights of text": (lambda said: deep(said, "config_groups", {"a": {"weights": "w"}}), "'w'"),
    "a group of modules that is none": (lambda said: deep(said, "config_groups", {"W4A16": ["Linear"]}), "W4A16"),
    "no groups": (lambda said: deep(said, "config_groups", {}), "config_groups"),
    "only activations": (lambda said: deep(said, "config_groups", {"a": {"weights": None}}), "quantization_config"),
    "sparse": (lambda said: said | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "transforms": (lambda said: said | {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
    "no config": (lambda said: None, "quantization_config"),
    "another method": (lambda said: said | {"quant_method": "bitsandbytes"}, "quantization_config"),
}
NOT_READ = {  # the others lie
    *("marlin", "mixed without a format", "bits", "a type", "a strategy", "symmetric perhaps", "sparse", "transforms")
}


def deep(said: Json, key: str, value: Any) -> Json:
    """A format is that of its group, too."""
    if key == "format":
        said["config_groups"]["group_0"][key] = None if value is not None else value
    return said | {key: value}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_not_read_or_lies(name: str, tmp_path: Path) -> None:
    change, word = CONFIGS[name]
    tensors, _ = compressed(noise(40, 96), case := CASES["w4a16"])
    with refused(UnsupportedModelError if name in NOT_READ else CheckpointError, tmp_path, word):
        open_with(tmp_path, named(tensors), change(case.config))


def shape_of(*sizes: int) -> Tensors:
    return {"weight_shape": torch.tensor(sizes)}


DAMAGED_PARTS: dict[str, tuple[str, Tensors, str]] = {
    "negative columns": ("w4a16", shape_of(40, -96), "weight_shape"),
    "other rows": ("w4a16", shape_of(41, 96), "weight_shape"),
    "more columns than words": ("w4a16", shape_of(40, 97), "weight_shape"),
    "sizes of 32 bits": ("w4a16", {"weight_shape": torch.tensor([40, 96], dtype=torch.int32)}, "I32"),
    "words that are bytes": ("w4a16", {"weight_packed": torch.zeros(40, 12, dtype=torch.uint8)}, "U8"),
    "fewer scales": ("w4a16", {"weight_scale": torch.ones(40, 2)}, "F32 [40, 2]"),
    "integer scales": ("w4a16", {"weight_scale": torch.ones(40, 3, dtype=torch.int32)}, "I32 [40, 3]"),
    "fewer zeros": (
        "w4a16, asymmetric",
        {"weight_zero_point": torch.ones(4, 3, dtype=torch.int32)},
        "weight_zero_point",
    ),
    "zeros of another dtype": (
        "int8, groups, asymmetric",
        {"weight_zero_point": torch.ones(40, 3)},
        "weight_zero_point",
    ),
    "zeros that should not be there": (
        "w4a16",
        {"weight_zero_point": torch.ones(5, 3, dtype=torch.int32)},
        "symmetric",
    ),
    "an order of other inputs": ("w4a16", {"weight_g_idx": torch.zeros(95, dtype=torch.int32)}, "weight_g_idx"),
    "an order of other groups": ("w4a16", {"weight_g_idx": torch.full((96,), 3, dtype=torch.int32)}, "3 to 3 of 3"),
    "an order without groups": ("w8a16, rows", {"weight_g_idx": torch.zeros(39, dtype=torch.int32)}, "weight_g_idx"),
    "plain codes": ("fp8", {"weight": torch.ones(40, 96)}, "F32 [40, 96]"),
    "scales of the blocks turned": ("fp8, blocks", {"weight_scale": torch.ones(4, 3)}, "F32 [4, 3]"),
    "scales of 16 bit": ("nvfp4", {"weight_scale": torch.ones(40, 6)}, "F32 [40, 6]"),
    "two global scales": ("nvfp4", {"weight_global_scale": torch.ones(2)}, "weight_global_scale"),
    "scales that are no exponents": ("mxfp4", {"weight_scale": torch.ones(40, 3)}, "F32 [40, 3]"),
}


@pytest.mark.parametrize(("name", "parts", "word"), DAMAGED_PARTS.values(), ids=DAMAGED_PARTS)
def test_parts_that_do_not_fit(name: str, parts: Tensors, word: str, tmp_path: Path) -> None:
    tensors, _ = compressed(noise(*CASES[name].shape), CASES[name])
    with refused(CheckpointError, tmp_path, word):
        open_with(tmp_path, named(tensors | parts), CASES[name].config)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_part_that_is_missing(case: Case, tmp_path: Path) -> None:
    tensors, _ = compressed(noise(*case.shape), case)
    for part in tensors:
        with refused(CheckpointError, tmp_path, MODULE):
            open_with(tmp_path, without(named(tensors), f"{MODULE}.{part}"), case.config)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.text()
    | st.sampled_from(("group", "channel", "int", "4x4")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
SETTINGS = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "dynamic")


@given(
    weights=st.none() | st.dictionaries(st.sampled_from(SETTINGS), JSON),
    whole=st.dictionaries(
        st.sampled_from(("format", "config_groups", "sparsity_config", "ignore", "quant_method")), JSON
    ),
)
@examples(150)
def test_any_config(weights: Json | None, whole: Json, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Either it says what these tensors are, or it is refused."""
    tensors, expected = compressed(noise(40, 96), case := CASES["w4a16"])
    said = case.config
    said["config_groups"]["group_0"]["weights"] |= weights or {}
    said |= whole
    try:
        weight = open_with(tmp_path_factory.mktemp("any"), named(tensors), said)[NAME]
    except OffspecError:
        return
    assert equal(dense(bound(weight), torch.float32), expected)
