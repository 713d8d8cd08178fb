"""Triton's kernels are compiled for cards, with the compiler that Triton brings; no GPU is needed.

Registers that do not fit are spilled to the card's memory, which a kernel that is bound by memory pays for.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.backends.on_gpu import expert_kernels, gguf_kernels, row_kernels, triton_kernels

from .test_gguf import SOME, TYPES

pytestmark = pytest.mark.slow
RTX_2080_TI, A100, RTX_3090, RTX_4090, H100, RTX_5090 = 75, 80, 86, 89, 90, 120  # compute capabilities
CARDS = (RTX_2080_TI, A100, RTX_3090, RTX_4090, H100, RTX_5090)
# Bytes of shared memory that a program may have (CUDA C++ Programming Guide, technical specifications).
MOST_SHARED = {
    RTX_2080_TI: 64 << 10,
    A100: 163 << 10,
    RTX_3090: 99 << 10,
    RTX_4090: 99 << 10,
    H100: 227 << 10,
    RTX_5090: 99 << 10,
}
# Bytes of a thread: 32 registers. How few are spilled below that differs between versions of Triton and ptxas; kernels
# whose tile is too large spill hundreds to thousands.
MOST_SPILLED = 128

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Arguments of the kernels that unpack.
UNPACKED = {"blocks": "*u8", "out": "*bf16", "num_blocks": "i32"}
GROUPED = {"codes": "*i32", "zeros": "*i32", "scales": "*fp16", "groups": "*i64", "out": "*bf16"}
GROUPED |= {"num_inputs": "i32", "num_outputs": "i32"}
BITS = {"low": "*u8", "codes": "*u8", "groups": "*u8", "out": "*bf16"}
BITS |= dict.fromkeys(("num_columns", "code_bytes", "height", "group_bytes"), "i32")


@dataclass(frozen=True)
class Compiled:
    """stack_bytes: of a thread, which is what it spills, because no kernel here has arrays or calls functions."""

    ptx: str
    shared_bytes: int
    stack_bytes: int

    @property
    def has_tensor_cores(self) -> bool:
        return "mma.sync" in self.ptx or "wgmma" in self.ptx


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # in place of the home folder


def compiled(
    kernel: Any, card: int, arguments: Mapping[str, str], constants: Mapping[str, Any], folder: Path, **options: int
) -> Compiled:
    """arguments: their types. Addresses are multiples of 16, as torch's are."""
    triton = pytest.importorskip("triton", reason="Triton is not installed; it comes with torch's CUDA wheels")
    from triton.backends.compiler import GPUTarget

    places = {name: (kernel.arg_names.index(name),) for name in (*arguments, *constants)}
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={**arguments, **dict.fromkeys(constants, "constexpr")},
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name, kind in arguments.items() if kind.startswith("*")},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    return Compiled(made.asm["ptx"], made.metadata.shared, stack_bytes(made.asm["cubin"], folder))


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Of a thread, by the tool that Triton brings; its metadata has them only where there is a GPU."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [Path(nvidia.__path__[0]) / "bin" / "cuobjdump", "--dump-resource-usage", file]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", shown)
    return int(found)


def products() -> list[Any]:
    """A type, a card, the rows' dtype, how many tiles; in the default run one of those on a 4090."""
    kinds = itertools.product(TYPES, CARDS, DTYPES)
    all_tiles = [pytest.param(*kind, None, marks=pytest.mark.nightly) for kind in kinds]
    return [pytest.param("Q4_K", RTX_4090, "bf16", 1), *all_tiles]


@pytest.mark.parametrize(("name", "card", "dtype", "num_tiles"), products())
def test_products(name: str, card: int, dtype: str, num_tiles: int | None, tmp_path: Path) -> None:
    """Of the smallest tile, nightly of every tile."""
    kernels = gguf_kernels()
    if kernels is None:
        pytest.skip("Triton is not installed; it comes with torch's CUDA wheels")
    arguments = {"x": f"*{dtype}", "blocks": "*u8", "out": f"*{dtype}"}
    arguments |= dict.fromkeys(("num_rows", "num_outputs", "row_blocks", "steps"), "i32")
    for tile in kernels.tiles_of(name, DTYPES[dtype])[:num_tiles]:
        constants = kernels.LAYOUTS[name].constants | tile.constants
        made = compiled(kernels.multiply_kernel, card, arguments, constants, tmp_path, **tile.options)
        assert made.shared_bytes <= MOST_SHARED[card]
        if card == RTX_2080_TI and dtype != "fp32":  # Triton has no tensor cores for it, and these spill kilobytes:
            continue  # where rows are measured, unpacking is faster and chosen
        assert made.has_tensor_cores == (dtype != "fp32")
        assert made.stack_bytes <= MOST_SPILLED
        if tile.rows == 16:
            assert made.shared_bytes <= 32 << 10, "several programs fit a multiprocessor"


@pytest.mark.parametrize(
    "card", [pytest.param(card, marks=() if card == RTX_4090 else pytest.mark.nightly) for card in CARDS]
)
def test_kernels_that_unpack(card: int, tmp_path: Path) -> None:
    """None of them spills much."""
    gguf, others = gguf_kernels(), triton_kernels()
    if gguf is None or others is None:
        pytest.skip("Triton is not installed; it comes with torch's CUDA wheels")
    make = partial(compiled, folder=tmp_path)
    made = [
        make(gguf.unpack_kernel, card, UNPACKED, gguf.LAYOUTS[name].constants | {"steps": gguf.UNPACKED_STEPS})
        for name in (SOME if card == RTX_4090 else TYPES)
    ]
    made += [make(others._awq, card, GROUPED, {}), make(others._gptq, card, {**GROUPED, "zero_offset": "i32"}, {})]
    made.append(make(others._bf16_bits, card, BITS, {}))
    assert max(each.stack_bytes for each in made) <= MOST_SPILLED


PRODUCT = dict.fromkeys(("num_rows", "num_outputs", "num_inputs"), "i32")
ATTENTION = {"rows": "*i64", "slots": "*i64", "head_dim": "i32", "scale": "fp32", "cap": "fp32"}
ATTENTION |= dict.fromkeys(("key_head", "key_slot", "value_head", "value_slot"), "i32")


@pytest.mark.parametrize(
    ("card", "dtype"),
    [
        pytest.param(card, dtype, marks=() if (card, dtype) == (RTX_4090, "bf16") else pytest.mark.nightly)
        for card in CARDS
        for dtype in DTYPES
    ],
)
def test_rows_with_equal_bits(card: int, dtype: str, tmp_path: Path) -> None:
    """A product, and attention with heads of 128 numbers: none of them spills much, and 16 bits take tensor cores."""
    kernels = row_kernels()
    if kernels is None:
        pytest.skip("Triton is not installed; it comes with torch's CUDA wheels")
    make, kind = partial(compiled, card=card, folder=tmp_path), f"*{dtype}"
    size = DTYPES[dtype].itemsize
    arguments = {**dict.fromkeys(("x", "matrix", "out"), kind), **PRODUCT}
    products = [
        make(kernels.product_kernel, arguments=arguments, constants=tile.constants, **tile.options)
        for tile in (kernels.TILES[size], *kernels.TILES_OF_MANY[size])
    ]
    arguments = {**dict.fromkeys(("queries", "keys", "values", "out"), kind), "sinks": "*fp32", **ATTENTION}
    constants = {**kernels.constants(4, 128), "is_capped": False, "has_sinks": True}
    attention = make(kernels.attention_kernel, arguments=arguments, constants=constants, num_warps=4, num_stages=1)
    for each in (*products, attention):
        assert each.shared_bytes <= MOST_SHARED[card]
        if card != RTX_2080_TI:
            assert each.has_tensor_cores == (dtype != "fp32")
            assert each.stack_bytes <= MOST_SPILLED


CHOICE = dict.fromkeys(("order", "experts", "starts", "firsts", "addresses"), "*i64")
CHOICE |= dict.fromkeys(("num_places", "num_experts", "num_outputs", "row_blocks", "used", "step"), "i32")


def experts() -> list[Any]:
    """A form, a card, the rows' dtype, the first tile; by default one on a 4090, of the other kind of blocks."""
    kinds = [*itertools.product(TYPES, CARDS, DTYPES), *((name, card, name) for name in DTYPES for card in CARDS)]
    all_tiles = [pytest.param(*kind, 0, marks=pytest.mark.nightly) for kind in kinds]
    return [pytest.param("Q4_0", RTX_4090, "bf16", -1), *all_tiles]


@pytest.mark.parametrize(("form", "card", "dtype", "first"), experts())
def test_chosen_experts(form: str, card: int, dtype: str, first: int, tmp_path: Path) -> None:
    """Of the largest tile, nightly of every tile, with biases, at addresses that are multiples of 16."""
    kernels = expert_kernels()
    if kernels is None:
        pytest.skip("Triton is not installed; it comes with torch's CUDA wheels")
    arguments = {"x": f"*{dtype}", "out": f"*{dtype}", **CHOICE}
    options = {"alignment": kernels.ALIGNED, "has_bias": True}
    for tile in kernels.tiles_for(form, DTYPES[dtype])[first:]:
        constants = kernels.layout_of(form).constants | tile.constants | options
        made = compiled(kernels.experts_kernel, card, arguments, constants, tmp_path, **tile.options)
        assert made.shared_bytes <= MOST_SHARED[card]
        if card == RTX_2080_TI and dtype != "fp32":
            continue
        assert made.has_tensor_cores == (dtype != "fp32")
        assert made.stack_bytes <= MOST_SPILLED
