"""Weights are what bitsandbytes and transformers make of the same bytes, bit for bit; whatever lies is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offspec.backends import gpu
from offspec.backends.choice import linear
from offspec.backends.cpu import CpuBackend
from offspec.backends.on_gpu import FusedRows
from offspec.backends.weights import Weight, dense
from offspec.errors import CheckpointError, OffspecError
from offspec.loaders.files.checkpoint import TensorInfo
from offspec.loaders.files.safetensors_folder import read_header
from offspec.loaders.formats import StoredWeight, four_bit, stored_weights
from offspec.loaders.formats.four_bit import Matrix4bit, pack_4bit
from offspec.loaders.formats.process_state import bitsandbytes_functional, has_bitsandbytes
from offspec.loaders.formats.quant_state import BLOCKSIZES

from ...examples import examples
from ...machines import NO_VECTORS, by_processor
from ...refusals import refused, tells

Tensors = dict[str, Tensor]
KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)]  # quant_type, nested
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAME = "mlp.up_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
# A machine with a card may lack it (`docs/developing/card.md`); everywhere else it is installed.
packs = pytest.mark.skipif(not has_bitsandbytes(), reason="bitsandbytes packs what is compared")


@pytest.fixture(autouse=True)
def _no_compiler() -> Iterator[None]:
    """bitsandbytes compiles what it computes for odd shapes; that takes a minute and changes nothing."""
    with torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
        yield


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Rows of very different size, as in real matrices."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)).to(dtype)


def named(parts: Mapping[str, Tensor], name: str = NAME) -> Tensors:
    return {f"{name}{suffix}": tensor for suffix, tensor in parts.items()}


def open_with(folder: Path, tensors: Tensors) -> dict[str, StoredWeight]:
    save_file(tensors, folder / "model.safetensors")
    return stored_weights(read_header(folder / "model.safetensors"))


def read_raw(info: TensorInfo) -> Tensor:
    """uint8 [nbytes]"""
    content = info.path.read_bytes()[info.offset : info.offset + info.nbytes]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def bound(weight: StoredWeight) -> Weight:
    return weight.bind([read_raw(info) for info in weight.streamed])


def bitsandbytes_dequantized(tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """What bitsandbytes makes of one weight's tensors, in the dtype asked for."""
    functional = bitsandbytes_functional()
    quant_state = functional.QuantState.from_dict(
        {key.removeprefix(f"{NAME}."): tensor for key, tensor in tensors.items() if key != NAME}, torch.device("cpu")
    )
    quant_state.dtype = dtype
    return functional.dequantize_4bit(tensors[NAME], quant_state)  # type: ignore[no-any-return]


def equal(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


# ------------------------------------------------------------------------------------------- as bitsandbytes has it

SHAPES = [(64, 64), (3, 128), (5, 30), (4, 17), (7, 33), (100, 100), (1, 6), (6, 1), (1, 1), (520, 256)]


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("quant_type", "nested"), KINDS)
def test_dequantised_as_bitsandbytes_does(
    quant_type: str, nested: bool, shape: tuple[int, int], tmp_path: Path
) -> None:
    for dtype in DTYPES:
        tensors = named(pack_4bit(noise(*shape, dtype=dtype), quant_type, nested=nested))
        weight = open_with(tmp_path, tensors)[NAME]
        assert (weight.name, weight.shape, weight.dtype) == (NAME, shape, quant_type)
        matrix = bound(weight)
        assert isinstance(matrix, Matrix4bit)
        assert matrix.shape == shape
        for asked in DTYPES:
            expected = bitsandbytes_dequantized(tensors, asked)
            assert equal(matrix.dequantize(asked), expected)
            out = torch.full(shape, torch.nan, dtype=asked)
            assert matrix.dequantize(asked, out) is out
            assert equal(out, expected)
            reference = torch.empty(math.prod(shape), dtype=asked)
            scales = matrix.layout.nested.expand(matrix.absmax) if matrix.layout.nested else matrix.absmax
            four_bit.dequantize_reference(matrix.codes, scales, matrix.layout, reference)
            assert equal(reference.view(shape), expected)


class CountedKernels(TorchDispatchMode):
    """Names of the operations of a `with` block that compute something: no views, and no memory without content."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def nested_scales(num_blocks: int, blocksize: int) -> tuple[four_bit.Nested, Tensor]:
    """Some scales, and codes uint8 [num_blocks]."""
    generator = torch.Generator().manual_seed(num_blocks)
    codes = torch.randint(0, 256, (num_blocks,), generator=generator, dtype=torch.uint8)
    scales = torch.rand(-(-num_blocks // blocksize), generator=generator)
    return four_bit.Nested(torch.randn(256, generator=generator), scales, 0.1234, blocksize), codes


@pytest.mark.parametrize("num_blocks", [1, 256, 257, 1000])
def test_nested_scales_are_unpacked_by_few_kernels(num_blocks: int) -> None:
    """One rounding for the product, and one for the sum, whatever computes them."""
    for blocksize in (64, 256):
        nested, codes = nested_scales(num_blocks, blocksize)
        factors = nested.scales[torch.arange(num_blocks) // blocksize]
        expected = nested.values[codes.long()] * factors + torch.tensor(nested.offset)
        with CountedKernels() as counted:
            found = nested.expand(codes)
        assert equal(found, expected)
        assert len(counted.names) <= 4 + (num_blocks > blocksize and num_blocks % blocksize > 0), counted.names


@packs
@pytest.mark.parametrize("num_blocks", [1, 257])
def test_bitsandbytes_unpacks_nested_scales_by_two_kernels(num_blocks: int) -> None:
    nested, codes = nested_scales(num_blocks, 256)
    with CountedKernels() as counted:
        found = nested.expand_by_bitsandbytes(codes)
    assert equal(found, nested.expand(codes))
    assert counted.names == ["bitsandbytes::dequantize_blockwise", "aten::add_.Tensor"]


@pytest.mark.gpu
@packs
@pytest.mark.parametrize("num_blocks", [1, 257, 1000])
def test_nested_scales_on_cuda_are_those_of_the_cpu(num_blocks: int) -> None:
    """Wherever their codes begin in a streamed layer."""
    nested, codes = nested_scales(num_blocks, 256)
    there = four_bit.Nested(nested.values.cuda(), nested.scales.cuda(), nested.offset, nested.blocksize)
    for shift in range(4):
        moved = torch.empty(num_blocks + shift, dtype=torch.uint8, device="cuda")[shift:].copy_(codes)
        assert equal(there.expand(moved).cpu(), nested.expand(codes))


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_every_blocksize_and_several_tiles(blocksize: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack_4bit(noise(70, 200), blocksize=blocksize)
    monkeypatch.setattr(CpuBackend, "tile", 4096)
    monkeypatch.setattr(four_bit, "TILE", 4096)
    parts = pack_4bit(noise(70, 200), blocksize=blocksize)
    assert all(equal(parts[suffix], whole[suffix]) for suffix in whole)
    weight = open_with(tmp_path, named(parts))[NAME]
    expected = bitsandbytes_dequantized(named(parts), torch.bfloat16)
    assert equal(dense(bound(weight), torch.bfloat16), expected)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_any_storage_dtype(storage: torch.dtype, tmp_path: Path) -> None:
    functional = bitsandbytes_functional()
    codes, state = functional.quantize_4bit(noise(12, 64), quant_type="nf4", quant_storage=storage)
    tensors = {NAME: codes} | {f"{NAME}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    weight = open_with(tmp_path, tensors)[NAME]
    assert equal(dense(bound(weight), torch.bfloat16), bitsandbytes_dequantized(tensors, torch.bfloat16))


def test_where_there_is_no_kernel(tmp_path: Path) -> None:
    """fp64 is nobody's kernel: what the reference computes, as for a device that bitsandbytes does not know."""
    weight = bound(open_with(tmp_path, named(pack_4bit(noise(9, 70))))[NAME])
    assert equal(dense(weight, torch.float64), dense(weight, torch.float32).double())


def test_int8_as_bitsandbytes_has_it(tmp_path: Path) -> None:
    functional = bitsandbytes_functional()
    codes, scales, _ = functional.int8_vectorwise_quant(noise(33, 40, dtype=torch.float16))
    module = NAME.removesuffix(".weight")
    extra = {f"{module}.SCB": scales, f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    for tensors in ({NAME: codes, **extra}, {NAME: codes, f"{module}.SCB": scales}):
        (weight,) = open_with(tmp_path, tensors).values()
        assert (weight.name, weight.shape, weight.dtype) == (NAME, (33, 40), "int8")
        for dtype in DTYPES:
            expected = functional.int8_vectorwise_dequant(codes, scales).to(dtype)
            assert equal(dense(bound(weight), dtype), expected)
            assert equal(dense(bound(weight), dtype, torch.empty(2000, dtype=dtype)), expected)


# ------------------------------------------------------------------------------------------------ as in transformers


@pytest.fixture(scope="module")
def tiny_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from ...fakes import FAMILIES, config_json

    disable_progress_bar()
    # Two layers alike would not show whether their parts are mixed up, so the sizes are odd and all differ.
    config = config_json(FAMILIES["llama-biased"]) | {"intermediate_size": 90}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("bf16")
    model.save_pretrained(folder)
    return folder


def quantized_by_transformers(source: Path, folder: Path, **options: Any) -> Any:
    bitsandbytes_functional()  # its import is noisy, and warnings are errors here
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=BitsAndBytesConfig(**options), device_map="cpu", dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
        {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", "down_proj"]},
        {"load_in_8bit": True},
    ],
    ids=["nf4-nested", "nf4-bf16-storage", "fp4-skips", "int8"],
)
def test_a_checkpoint_of_transformers(options: dict[str, Any], tiny_bf16: Path, tmp_path: Path) -> None:
    model = quantized_by_transformers(tiny_bf16, tmp_path, **options)
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    weights = stored_weights(read_header(tmp_path / "model.safetensors"))
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    assert weights.keys() == parameters.keys()
    for name, parameter in parameters.items():
        owner = modules[name.rpartition(".")[0]]
        expected = dequantize_bnb_weight(parameter, getattr(owner, "state", None)).to(torch.bfloat16)
        assert weights[name].shape == expected.shape
        assert equal(dense(bound(weights[name]), torch.bfloat16), expected.detach())
    kinds = {weight.dtype for weight in weights.values()}
    assert len(kinds) == 2
    assert weights["model.layers.1.mlp.down_proj.weight"].dtype != (
        "fp4" if "llm_int8_skip_modules" in options else "BF16"
    )


@pytest.mark.parametrize(("quant_type", "nested"), KINDS)
def test_packed_as_transformers_saves(quant_type: str, nested: bool, tiny_bf16: Path, tmp_path: Path) -> None:
    quantized_by_transformers(
        tiny_bf16, tmp_path, load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=nested
    )
    source, saved = (read_header(folder / "model.safetensors") for folder in (tiny_bf16, tmp_path))
    packed = 0
    for name, info in source.items():
        if f"{name}.absmax" not in saved:
            continue
        parts = named(pack_4bit(read_raw(info).view(torch.bfloat16).view(info.shape), quant_type, nested=nested), name)
        assert parts.keys() == {other for other in saved if other.startswith(name)}
        for part, tensor in parts.items():
            assert saved[part].shape == tuple(tensor.shape), part
            assert equal(read_raw(saved[part]), tensor.reshape(-1).view(torch.uint8)), part
        packed += 1
    assert packed == 3 * 7


# ------------------------------------------------------------------------------------------------- floats, bind, linear


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_floats_are_what_was_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = {"norm.weight": noise(5, 1, dtype=dtype)[:, 0].clone(), "proj.weight": noise(3, 4, dtype=dtype)}
    for name, weight in open_with(tmp_path, saved).items():
        assert weight.shape == tuple(saved[name].shape)
        assert equal(dense(bound(weight), dtype), saved[name])


def test_bind_makes_views(tmp_path: Path) -> None:
    for tensors in (named(pack_4bit(noise(8, 64))), named(pack_4bit(noise(8, 64), nested=False)), {NAME: noise(8, 64)}):
        weight = open_with(tmp_path, tensors)[NAME]
        raw = [read_raw(info) for info in weight.streamed]
        matrix = weight.bind(raw)
        before = dense(matrix, torch.float32)
        for part in raw:
            part.zero_()  # as the stream does when the next layer comes
        assert not equal(dense(matrix, torch.float32), before)


@by_processor("processor", NO_VECTORS)
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_scratch", [False, True])
def test_linear(dtype: torch.dtype, with_scratch: bool, tmp_path: Path) -> None:
    x, bias = noise(5, 48, dtype=dtype, seed=1), noise(1, 32, dtype=torch.bfloat16, seed=2)[0]
    scratch = torch.full((2000,), torch.nan, dtype=dtype) if with_scratch else None
    for tensors in (named(pack_4bit(noise(32, 48))), {NAME: noise(32, 48)}):
        weight = bound(open_with(tmp_path, tensors)[NAME])
        matrix = dense(weight, dtype)
        assert equal(linear(x, weight, None, scratch), torch.nn.functional.linear(x, matrix))
        assert equal(linear(x, weight, bias, scratch), torch.nn.functional.linear(x, matrix, bias.to(dtype)))


@pytest.mark.gpu
@packs
@pytest.mark.parametrize(("quant_type", "nested"), KINDS)
def test_cuda_equals_the_cpu(quant_type: str, nested: bool, tmp_path: Path) -> None:
    for shape in SHAPES:
        weight = open_with(tmp_path, named(pack_4bit(noise(*shape), quant_type, nested=nested)))[NAME]
        matrix = weight.to("cuda").bind([read_raw(info).cuda() for info in weight.streamed])
        for dtype in DTYPES:
            assert equal(dense(matrix, dtype).cpu(), dense(bound(weight), dtype))


@pytest.mark.gpu
def test_int8_on_cuda_equals_the_cpu(tmp_path: Path) -> None:
    scales = torch.rand(33) + 0.1
    codes = torch.arange(33 * 40, dtype=torch.int8).view(33, 40)
    (weight,) = open_with(tmp_path, {NAME: codes, f"{NAME.removesuffix('.weight')}.SCB": scales}).values()
    matrix = weight.to("cuda").bind([read_raw(info).cuda() for info in weight.streamed])
    for dtype in DTYPES:
        assert equal(dense(matrix, dtype).cpu(), dense(bound(weight), dtype))


@pytest.mark.gpu
def test_a_bias_may_lie_anywhere_on_cuda() -> None:
    """cuBLASLt has kernels that fault on one that is not aligned."""
    x, weight = noise(3, 64).cuda(), noise(48, 64, seed=1).cuda()
    bias = torch.empty(49, dtype=torch.bfloat16, device="cuda")[1:].copy_(noise(1, 48, seed=2)[0])
    expected = linear(x.cpu().float(), weight.cpu().float(), bias.cpu().float())
    torch.testing.assert_close(linear(x, weight, bias).cpu().float(), expected, rtol=0.02, atol=0.05)


def packed(shape: tuple[int, int], quant_type: str, nested: bool, folder: Path, device: str = "cpu") -> Matrix4bit:
    weight = open_with(folder, named(pack_4bit(noise(*shape), quant_type, nested=nested)))[NAME]
    matrix = weight.to(device).bind([read_raw(info).to(device) for info in weight.streamed])
    assert isinstance(matrix, Matrix4bit)
    return matrix


def misaligned(matrix: Matrix4bit) -> Matrix4bit:
    """The same, a byte beyond where kernels could read many at once."""
    buffer = torch.empty(matrix.codes.shape[0] + 1, dtype=torch.uint8, device=matrix.codes.device)
    codes = buffer[1:].copy_(matrix.codes)
    return Matrix4bit(matrix.layout, codes, matrix.absmax)


@packs
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("with_scratch", [False, True])
@pytest.mark.parametrize(("quant_type", "nested"), KINDS)
def test_the_fused_product_is_the_plain_one(
    quant_type: str, nested: bool, with_scratch: bool, device: str, tmp_path: Path
) -> None:
    """On the CPU bitsandbytes' operation has another kernel, but takes the same arguments."""
    matrix = packed((192, 128), quant_type, nested, tmp_path, device)
    for dtype, num_rows in ((torch.float32, 3), (torch.float32, 1), (torch.bfloat16, 16)):
        x, bias = noise(num_rows, 128, dtype=dtype).to(device), noise(1, 192, dtype=dtype)[0].to(device)
        scratch = torch.empty(192 * 128, dtype=dtype, device=device) if with_scratch else None
        expected = linear(x, matrix, bias, scratch)
        for each in (matrix, misaligned(matrix)):
            found = four_bit.fused_linear(x, each, bias, scratch)
            assert found.dtype == dtype
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_few_rows_are_multiplied_packed_where_that_was_measured_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, asked = packed((64, 128), "nf4", True, tmp_path), list[int]()

    def fused(x: Tensor, weight: Matrix4bit, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
        asked.append(x.shape[0])
        return x.new_zeros(x.shape[0], 64)

    monkeypatch.setattr(four_bit, "fused_linear", fused)
    monkeypatch.setattr(four_bit, "can_be_fused", lambda matrix: True)
    monkeypatch.setattr(gpu, "FUSED_ROWS", rows := FusedRows())
    rows.set("nf4", (64, 128), torch.float32, torch.device("cpu"), 8)
    for backend in (gpu.ExactGpuBackend(), gpu.GpuBackend()):
        monkeypatch.setattr(gpu, "exact_product", lambda x, weight, dtype=None: x @ weight.T)
        for num_rows in (1, 8, 9):
            backend.linear(noise(num_rows, 128, dtype=torch.float32), matrix)
        assert asked == ([] if backend.is_exact else [1, 8])
    gpu.GpuBackend().linear(noise(1, 128, dtype=torch.bfloat16), matrix)  # measured for another dtype only
    assert asked == [1, 8]


@pytest.mark.gpu
@packs
def test_what_the_fused_kernel_takes(tmp_path: Path) -> None:
    assert packed((64, 128), "nf4", True, tmp_path, "cuda").fused_linear
    assert not packed((64, 128), "nf4", True, tmp_path).fused_linear
    assert not packed((64, 96), "nf4", True, tmp_path, "cuda").fused_linear  # a block and a half a row


@pytest.mark.gpu
@packs
@pytest.mark.parametrize(("quant_type", "nested"), KINDS)
def test_a_gpu_needs_no_bitsandbytes(
    quant_type: str, nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = packed((520, 256), quant_type, nested, tmp_path, "cuda")
    expected = dense(matrix, torch.bfloat16)
    monkeypatch.setattr(four_bit, "has_kernels", lambda device: False)
    assert equal(dense(matrix, torch.bfloat16), expected)


# ------------------------------------------------------------------------------------------------------------- packing


@pytest.mark.slow
def test_packing_does_not_depend_on_threads(set_threads: Callable[[int], None]) -> None:
    weight = noise(2048, 2048)  # 65,536 scales: torch would share out their sum
    set_threads(1)
    alone = pack_4bit(weight)
    set_threads(2)
    shared = pack_4bit(weight)
    assert all(equal(shared[suffix], alone[suffix]) for suffix in alone)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_packed(value: float) -> None:
    weight = noise(4, 64)
    weight[2, 3] = value
    with refused(CheckpointError, "finite"):
        pack_4bit(weight)


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weight = open_with(tmp_path, named(pack_4bit(noise(8, 64))))[NAME]
    bitsandbytes_functional.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with refused(OffspecError, "bitsandbytes", "pip install"):
        dense(bound(weight), torch.float32)


# ---------------------------------------------------------------------------------------------------------------- lies


def refused_file(folder: Path, *words: object) -> AbstractContextManager[pytest.ExceptionInfo[CheckpointError]]:
    return refused(CheckpointError, folder / "model.safetensors", *words)


def said(tensors: Tensors) -> dict[str, Any]:
    return json.loads(bytes(tensors[STATE].tolist()))  # type: ignore[no-any-return]


def saying(tensors: Tensors, **changes: Any) -> Tensors:
    """The weight with another quant_state; a value of `...` leaves the key out."""
    state = {key: value for key, value in (said(tensors) | changes).items() if value is not ...}
    return tensors | {STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize("part", ["", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state"])
def test_a_part_that_is_missing(part: str, tmp_path: Path) -> None:
    tensors = named(pack_4bit(noise(8, 64)))
    (name,) = [n for n in tensors if (n.startswith(f"{NAME}.{part}") if part else n == NAME)]
    with refused_file(tmp_path, part or "missing"):
        open_with(tmp_path, without(tensors, name))


@pytest.mark.each_value
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [8, 65]},
        {"shape": [512]},
        {"shape": [-8, -64]},
        {"shape": [True, 512]},
        {"shape": [2**40, 2**40]},
        {"shape": None},
        {"blocksize": 128},
        {"blocksize": 0},
        {"blocksize": True},
        {"quant_type": "fp4"},
        {"quant_type": ["nf4"]},
        {"dtype": "int8"},
        {"dtype": {}},
    ],
    ids=str,
)
def test_a_quant_state_that_lies(changes: dict[str, Any], nested: bool, tmp_path: Path) -> None:
    with refused_file(tmp_path) as caught:
        open_with(tmp_path, saying(named(pack_4bit(noise(8, 64), nested=nested)), **changes))
    assert tells(str(caught.value), "quant_state") or tells(str(caught.value), "absmax")


@pytest.mark.parametrize(
    "changes",
    [
        {"nested_blocksize": 0},
        {"nested_offset": "0"},
        {"nested_offset": math.nan},
        {"nested_offset": 10**400},
        {"nested_dtype": "float16"},
        {"nested_offset": ..., "nested_blocksize": ..., "nested_dtype": ...},
    ],
    ids=lambda changes: ",".join(f"{key}={str(value)[:12]}" for key, value in changes.items()),
)
def test_a_nesting_that_lies(changes: dict[str, Any], tmp_path: Path) -> None:
    with refused_file(tmp_path) as caught:
        open_with(tmp_path, saying(named(pack_4bit(noise(8, 64))), **changes))
    assert tells(str(caught.value), "quant_state") or tells(str(caught.value), "absmax")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 60_000], ids=lambda c: repr(c[:4]))
def test_a_quant_state_that_is_no_json_object(content: bytes, tmp_path: Path) -> None:
    tensors = named(pack_4bit(noise(8, 64)))
    with refused_file(tmp_path, "JSON object"):
        open_with(tmp_path, tensors | {STATE: torch.tensor(list(content), dtype=torch.uint8)})


WRONG_PARTS: dict[str, Callable[[Tensors], Tensors]] = {
    "absmax too short": lambda t: {f"{NAME}.absmax": t[f"{NAME}.absmax"][:-1].clone()},
    "absmax not nested": lambda t: {f"{NAME}.absmax": t[f"{NAME}.absmax"].float()},
    "codes too short": lambda t: {NAME: t[NAME][:-1].clone()},
    "codes in a row": lambda t: {NAME: t[NAME].T.contiguous()},
    "codes of another size": lambda t: {NAME: t[NAME].to(torch.bfloat16)},
    "quant_map of another type": lambda t: {f"{NAME}.quant_map": t[f"{NAME}.quant_map"].flip(0)},
    "quant_map not a number": lambda t: {f"{NAME}.quant_map": t[f"{NAME}.quant_map"] * math.nan},
    "quant_map too short": lambda t: {f"{NAME}.quant_map": t[f"{NAME}.quant_map"][:8].clone()},
    "nested_absmax too long": lambda t: {f"{NAME}.nested_absmax": torch.ones(2)},
    "nested_absmax not finite": lambda t: {f"{NAME}.nested_absmax": torch.tensor([math.inf])},
    "nested_quant_map too short": lambda t: {f"{NAME}.nested_quant_map": torch.ones(255)},
    "nested_quant_map not finite": lambda t: {f"{NAME}.nested_quant_map": torch.full((256,), math.nan)},
    "two quant_states": lambda t: {STATE.replace("nf4", "fp4"): t[STATE].clone()},
    "an SCB as well": lambda t: {NAME.replace("weight", "SCB"): torch.ones(8)},
}


@pytest.mark.parametrize("change", WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_a_part_that_does_not_fit(change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    tensors = named(pack_4bit(noise(8, 64)))
    with refused_file(tmp_path, NAME.removesuffix(".weight")):
        open_with(tmp_path, tensors | change(tensors))


@pytest.mark.parametrize("name", ["nf5", "fp8", ""])
def test_an_unknown_type(name: str, tmp_path: Path) -> None:
    tensors = named(pack_4bit(noise(8, 64)))
    renamed = without(tensors, STATE) | {f"{STATE.removesuffix('nf4')}{name}": tensors[STATE]}
    with refused_file(tmp_path, "unknown", "nf4"):
        open_with(tmp_path, renamed)


INT8 = {NAME: torch.ones(4, 8, dtype=torch.int8), "mlp.up_proj.SCB": torch.ones(4)}


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({NAME: INT8[NAME]}, "I8"),
        ({"mlp.up_proj.SCB": torch.ones(4)}, "missing"),
        (INT8 | {"mlp.up_proj.SCB": torch.ones(5)}, "SCB"),
        (INT8 | {"mlp.up_proj.SCB": torch.ones(4).half()}, "SCB"),
        (INT8 | {NAME: torch.ones(4, 8)}, "I8"),
        (INT8 | {"mlp.up_proj.weight_format": torch.tensor(1, dtype=torch.uint8)}, "weight_format 1"),
        (INT8 | {"mlp.up_proj.weight_format": torch.zeros(2, dtype=torch.uint8)}, "weight_format"),
        ({NAME: INT8[NAME], "mlp.up_proj.weight_format": torch.tensor(0, dtype=torch.uint8)}, "SCB"),
        ({NAME: torch.ones(4, 8, dtype=torch.uint8)}, "U8"),
        ({NAME: torch.ones(4, 8).to(torch.float8_e4m3fn)}, "fp8"),
        ({NAME: torch.ones(4, 8), f"{NAME}_scale_inv": torch.ones(1)}, "fp8"),
        ({"q_proj.qweight": torch.ones(4, 8, dtype=torch.int32)}, "AWQ or GPTQ"),
        ({"q_proj.weight_packed": torch.ones(4, 8, dtype=torch.int32)}, "compressed-tensors"),
    ],
)
def test_int8_that_lies_and_formats_that_are_not_read(tensors: Tensors, word: str, tmp_path: Path) -> None:
    with refused_file(tmp_path, word):
        open_with(tmp_path, tensors)


def test_a_file_that_shrank_since(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(named(pack_4bit(noise(8, 64))), file)
    infos = read_header(file)
    file.write_bytes(file.read_bytes()[:-300])
    with refused(CheckpointError, file, "download"):
        stored_weights(infos)
    file.unlink()
    with refused(CheckpointError, file, "No such file"):
        stored_weights(infos)


@given(
    state=st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists), data=st.data()
)
@examples(100)
def test_no_quant_state_is_a_traceback(
    state: Any, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands in the JSON: it is understood as bitsandbytes would, or refused."""
    nested = data.draw(st.booleans())
    tensors = named(pack_4bit(noise(8, 64), nested=nested))
    key = data.draw(st.sampled_from([*said(tensors), "nested_offset", "other"]))
    changed, folder = saying(tensors, **{key: state}), tmp_path_factory.mktemp("lie")
    is_offset = key == "nested_offset" and nested and type(state) in (int, float) and abs(state) < 3e38
    is_true = json.dumps({key: state}) == json.dumps({key: said(tensors).get(key, "nothing")})
    if key == "other" or is_offset or is_true:
        assert open_with(folder, changed)[NAME].shape == (8, 64)
    else:
        with refused_file(folder):
            open_with(folder, changed)


@pytest.mark.slow
def test_bitsandbytes_is_imported_without_the_compiler() -> None:
    """Of a process of its own: what it would be wrapped in takes seconds to import, and is left as it was."""
    code = (
        "import sys, torch; before = torch.compile, torch._disable_dynamo; "
        "from offspec.loaders.formats.process_state import bitsandbytes_functional as f; "
        "f().dequantize_4bit(*f().quantize_4bit(torch.ones(64), blocksize=64, quant_type='nf4')); "
        "print((torch.compile, torch._disable_dynamo) == before, "
        "[name for name in ('torch._inductor.compile_fx', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True []\n", "")
