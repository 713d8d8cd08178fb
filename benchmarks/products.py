"""Measures ways to multiply rows with a matrix on this CPU, in turn: milliseconds, and the ratio to torch's own.

    python benchmarks/products.py [--form bf16] [--dtype bf16] [--shape 11008x4096] [--rows 1,8,64,256]

torch's own way is the fallback without kernels. `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` before the command
disables instructions that a desktop CPU may lack.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from offspec.checkpoints.opening import DTYPES
from offspec.loaders.formats import linear
from offspec.loaders.formats.products import COSTS
from offspec.loaders.kernels.processor import describe_instructions
from offspec.loaders.machine.product_costs import sample, ways_of

CACHE_BYTES, TURNS = 256 * 2**20, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", default="bf16", help="bf16, fp16, nf4, fp4, int8")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="dtype of the rows")
    parser.add_argument("--shape", default="11008x4096", help="outputs x inputs")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    args = parser.parse_args()
    num_outputs, num_inputs = map(int, args.shape.split("x"))
    dtype, widths = DTYPES[args.dtype], [int(width) for width in args.rows.split(",")]
    count = max(2, CACHE_BYTES // (2 * num_outputs * num_inputs))
    matrices = [matrix for _ in range(count) if (matrix := sample(args.form, (num_outputs, num_inputs))) is not None]
    scratch = torch.empty(num_outputs * num_inputs, dtype=dtype)
    ways = ways_of(args.form)
    print(f"{describe_instructions()}; {torch.get_num_threads()} threads; torch {torch.__version__}")
    print(f"{args.form} {args.shape} x {args.dtype}, ms (GFLOP/s, times torch's)")
    print("| rows | " + " | ".join(ways) + " |\n|---|" + "---|" * len(ways))
    for width in widths:
        rows = torch.randn(width, num_inputs).to(dtype)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(TURNS + 1):
            for way in ways:
                COSTS.forced = way
                began = time.perf_counter()
                linear(rows, matrices[turn % count], None, scratch)
                if turn:  # the first turn compiles and maps memory
                    seconds[way].append(time.perf_counter() - began)
        each = {way: median(taken) for way, taken in seconds.items()}
        flop = 2e-9 * width * num_outputs * num_inputs
        print(f"| {width} | " + " | ".join(_cell(each[way], flop, each["torch"]) for way in ways) + " |", flush=True)
    COSTS.forced = None


def _cell(seconds: float, flop: float, before: float) -> str:
    return f"{1e3 * seconds:.2f} ({flop / seconds:.0f}, {before / seconds:.2f})"


if __name__ == "__main__":
    main()
