"""Measures unpacking of quantised matrices on this CPU: with a compiled kernel, with torch, and with gguf's numpy.

    python benchmarks/unpack.py [--types Q4_K,Q6_K,fp8,w4a16] [--dtype bf16] [--shape 4096x4096] [--rows 1,16]

The ways take turns, and the table shows the minimum of each, to exclude the load of other programs. As in a pass, the
matrices fit no cache. The last columns are products of that many rows with the packed matrix. NF4, unpacked by
bitsandbytes, is included for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from offspec.checkpoints.opening import DTYPES
from offspec.loaders.formats.core import PackedMatrix
from offspec.loaders.formats.gguf import QUANTISED, GgufMatrix, unpack_reference
from offspec.loaders.formats.scaled import ScaledMatrix
from offspec.loaders.kernels.processor import describe_instructions
from offspec.loaders.machine.product_costs import sample

SCALED = ("fp8", "w4a16", "w8a16", "nvfp4", "mxfp4", "w3a16")
CACHE_BYTES, TURNS = 64 * 2**20, 15
NUMPY_ROWS = 256  # rows for the slow gguf package, instead of a whole matrix
Ways = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join([*QUANTISED, *SCALED, "nf4"]))
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="of the unpacked matrix and the rows")
    parser.add_argument("--shape", default="4096x4096", help="outputs x inputs")
    parser.add_argument("--rows", default="1,16", help="numbers of rows for products with the packed matrix")
    args = parser.parse_args()
    num_outputs, num_inputs = map(int, args.shape.split("x"))
    dtype, widths = DTYPES[args.dtype], [int(width) for width in args.rows.split(",")]
    print(f"{_processor()}; {describe_instructions()}; {torch.get_num_threads()} threads; torch {torch.__version__}")
    print(f"{args.shape} to {args.dtype}, G weights/s")
    columns = ["kernel", "torch", "numpy", *(f"product of {width}" for width in widths)]
    print("| type | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for name in args.types.split(","):
        rates = _rates(name, (num_outputs, num_inputs), dtype, widths)
        print(f"| {name} | " + " | ".join(f"{rates[way]:.2f}" if way in rates else "" for way in columns) + " |")


def _rates(name: str, shape: tuple[int, int], dtype: torch.dtype, widths: Sequence[int]) -> dict[str, float]:
    """G weights/s of each available way for a type."""
    matrices, out = _matrices(name, shape), torch.empty(shape, dtype=dtype)
    first, turns, part = matrices[0], itertools.cycle(matrices), torch.arange(min(NUMPY_ROWS, shape[0]))
    ways: Ways = {}
    if isinstance(first, ScaledMatrix) or first.kernel is not None:
        is_compiled = first.kernel is not None and first.kernel[0].encoding.interleave == 1
        way = "torch" if isinstance(first, ScaledMatrix) and not is_compiled else "kernel"
        ways[way] = lambda: next(turns).dequantize(dtype, out)  # type: ignore[attr-defined]
    if first.kernel is not None:
        ways |= {f"product of {width}": _product(turns, width, shape, dtype) for width in widths}
    if isinstance(first, GgufMatrix):
        few = first.take(part)
        ways["torch"] = lambda: unpack_reference(first, out)
        ways["numpy"] = lambda: _by_numpy(few)
    seconds = _seconds(ways)
    seconds["numpy"] = seconds.get("numpy", 0.0) * shape[0] / len(part)
    return {way: shape[0] * shape[1] / taken / 1e9 for way, taken in seconds.items() if taken}


def _matrices(name: str, shape: tuple[int, int]) -> list[PackedMatrix]:
    count = max(2, 2 * CACHE_BYTES // (shape[0] * shape[1]))
    found = [sample(name, shape) for _ in range(count)]
    return [matrix for matrix in found if isinstance(matrix, PackedMatrix)]


def _product(
    turns: Iterator[PackedMatrix], width: int, shape: tuple[int, int], dtype: torch.dtype
) -> Callable[[], Tensor]:
    x = torch.randn(width, shape[1]).to(dtype)

    def multiply() -> Tensor:
        found = next(turns).kernel
        assert found is not None
        product, parts = found
        return product(x, parts, shape[0])

    return multiply


def _by_numpy(matrix: GgufMatrix) -> object:
    from gguf import GGMLQuantizationType, quants

    return quants.dequantize(matrix.blocks.numpy(), GGMLQuantizationType[matrix.kind.name])


def _seconds(ways: Ways) -> dict[str, float]:
    """Minimum seconds of each way; the ways take turns."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 1):
        for way, work in ways.items():
            began = time.perf_counter()
            work()
            if turn:  # the first turn compiles and maps memory
                taken[way].append(time.perf_counter() - began)
    return {way: min(times) for way, times in taken.items()}


def _processor() -> str:
    """The CPU's name on Linux."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text(encoding="utf-8")) if info.is_file() else None
    return found[1] if found else "a CPU without a name"


if __name__ == "__main__":
    main()
