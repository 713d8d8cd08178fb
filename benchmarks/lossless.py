"""Measures bf16 in 12 bits a weight: its size beside other codes, unpacking, and passes by turns with plain bf16.

    python -m benchmarks.lossless weigh                          # sizes and CPU time of 4-bit, 3-bit and Huffman codes
    python -m benchmarks.lossless unpack                         # G weights/s with all threads
    python -m benchmarks.grow DIR --shape 7b
    python -m offspec quantize DIR DIR-packed --format bf16-packed
    python -m benchmarks.lossless passes DIR DIR-packed --ram 6GiB [--links 0.5GB,1GB,2GB] [--widths 1,16]

`passes` loads both models in one process, each within its own limit, and lets passes take turns. `--links` slows reads
down to these rates, one after the other, and then reads as fast as the disk does. It prints the median seconds of both,
and their ratio: above 1 the packed model is faster. `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` before a command
hides newer instructions.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.streaming import CONTEXT, star
from offspec import builtin
from offspec.checkpoints.opening import ModelFiles
from offspec.loaders.convert import read_whole
from offspec.loaders.files.readers import FileReader
from offspec.loaders.formats import StoredWeight, bf16_bits
from offspec.loaders.formats.bf16_packed import PackedBf16Matrix
from offspec.loaders.kernels.processor import describe_instructions
from offspec.loaders.machine.hardware import read_hardware
from offspec.loaders.streaming.tiers import TieredWeights, TierOptions
from offspec.loaders.units import parse_size
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import Plan, with_faster_residents
from offspec.planning.probe import choose_products, measure_link, measure_quick_rates, plan_here

CPU = torch.device("cpu")
NORMAL_7B, SPREAD = (11008, 4096), 0.02
RUNS, REPEATS = 9, 5


# ------------------------------------------------------------------------------------------------ codes


def weigh() -> None:
    """Bits a weight and CPU time of three codes for exponents, on the built-in target and a normal matrix of 7B."""
    _rate([bf16_matrix(_normal((512, 1024)))])  # compiles, as a model of large matrices does
    print(f"{describe_instructions()}; CPU time of one thread\n")
    print("| matrices | code | bits a weight | unpacked, G weights/s |\n|---|---|---:|---:|")
    for name, matrices in (("built-in target", _builtin()), ("normal, 11008 x 4096", [_normal(NORMAL_7B)])):
        for code, (bits, rate) in {
            "4 bits": _fixed(matrices),
            "3 bits": _three(matrices),
            **_huffman(matrices),
        }.items():
            print(f"| {name} | {code} | {bits:.2f} | {rate:.2f} |")


def _is_bf16_matrix(stored: StoredWeight) -> bool:
    """Whether it is a bf16 matrix, plain or packed; norms of heads are none."""
    is_product = len(stored.shape) == 2 and not stored.name.endswith("norm.weight")
    return is_product and stored.plain_dtype == "BF16" and stored.is_kept_as_read(torch.bfloat16)


def _builtin() -> list[Tensor]:
    files = ModelFiles.open(builtin.path("target"), "bf16", "cpu", [])
    stored = [weight for layer in files.stored.layers for weight in layer.weights.values() if _is_bf16_matrix(weight)]
    return [read_whole(weight) for weight in stored]


def _normal(shape: tuple[int, int]) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * SPREAD).bfloat16()


def _fixed(matrices: Sequence[Tensor]) -> tuple[float, float]:
    """As offspec packs them."""
    held = [bf16_matrix(matrix) for matrix in matrices]
    bits = sum(8 * matrix.bits.num_bytes for matrix in held) / sum(math.prod(matrix.shape) for matrix in held)
    return bits, _rate(held)


def _three(matrices: Sequence[Tensor]) -> tuple[float, float]:
    """Codes of 3 bits: the 7 commonest exponents of each group, and the others as exceptions of 16 bits.

    The size is computed. The time is that of the kernel for 4 bits with as many exceptions, in groups of as many rows
    as can list them.
    """
    kept = bf16_bits.NUM_CODES, bf16_bits.GROUP_WEIGHTS
    try:
        bf16_bits.NUM_CODES, bf16_bits.GROUP_WEIGHTS = 7, 1 << 12
        held = [bf16_matrix(matrix) for matrix in matrices]
        num_weights = sum(math.prod(matrix.shape) for matrix in held)
        lists = sum(8 * matrix.bits.groups.numel() for matrix in held)
        return (11 * num_weights + lists) / num_weights, _rate(held)
    finally:
        bf16_bits.NUM_CODES, bf16_bits.GROUP_WEIGHTS = kept


def _huffman(matrices: Sequence[Tensor]) -> dict[str, tuple[float, float]]:
    """Huffman's code for exponents by zlib, which writes and reads it in C; and the least bits that any code needs."""
    exponents = torch.cat([(matrix.view(torch.int16) >> 7).to(torch.uint8).flatten() for matrix in matrices])
    shares = torch.bincount(exponents.int(), minlength=256) / exponents.numel()
    least = 8 - float((shares[shares > 0] * shares[shares > 0].log2()).sum())
    some = exponents[: 1 << 24].numpy().tobytes()
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(some) + coder.flush()
    seconds = _cpu_s(lambda: zlib.decompress(coded))
    bits = 8 + 8 * len(coded) / len(some)
    return {"Huffman (zlib; exponents only)": (bits, len(some) / seconds / 1e9), "entropy": (least, math.nan)}


def bf16_matrix(plain: Tensor) -> PackedBf16Matrix:
    """A plain matrix, packed; it must be one that shrinks."""
    bits = bf16_bits.pack(plain)
    assert bits is not None, "the matrix would not shrink"
    return PackedBf16Matrix(bits)


def _rate(held: Sequence[PackedBf16Matrix]) -> float:
    """G weights/s of unpacking all of them in turn."""
    outs = [torch.empty(matrix.shape, dtype=torch.bfloat16) for matrix in held]

    def run() -> None:
        for matrix, out in zip(held, outs, strict=True):
            matrix.dequantize(torch.bfloat16, out)

    return sum(out.numel() for out in outs) / _cpu_s(run) / 1e9


def _cpu_s(work: Callable[[], object]) -> float:
    """The least CPU seconds of some runs of this thread."""
    torch.set_num_threads(1)
    work()
    taken = []
    for _ in range(RUNS):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return min(taken)


def unpack(threads: int | None) -> None:
    """G weights/s of matrices that fit no cache, by all threads."""
    if threads is not None:
        torch.set_num_threads(threads)
    held = [bf16_matrix(_normal((4096, 4096))) for _ in range(4)]
    out = torch.empty(4096, 4096, dtype=torch.bfloat16)
    seconds = []
    for turn in range(4 * RUNS):
        began = time.perf_counter()
        held[turn % 4].dequantize(torch.bfloat16, out)
        seconds.append(time.perf_counter() - began)
    rate = out.numel() / statistics.median(seconds[4:]) / 1e9
    print(f"{describe_instructions()}; {torch.get_num_threads()} threads: {rate:.1f} G weights/s unpacked to bf16")


# ------------------------------------------------------------------------------------------------ passes


class SlowReader(FileReader):
    """Reads no faster than `bytes_per_s`, all threads together; 0 is the disk's own rate."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_per_s, self._free, self._turn = 0.0, 0.0, threading.Lock()

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        super().read(path, offset, out, least)
        if self.bytes_per_s:
            with self._turn:
                self._free = max(self._free, time.perf_counter()) + len(out) / self.bytes_per_s
                wait = self._free - time.perf_counter()
            time.sleep(max(0.0, wait))


class Streamed:
    """A model in its own memory, whose passes are timed."""

    def __init__(self, plan: Plan) -> None:
        files = plan.demand.target
        link = measure_link(plan, CPU)
        choose_products([(files, not plan.placement.streamed)], CPU)
        plan = with_faster_residents(plan, measure_quick_rates(files, CPU, link))
        files, self.plan, self.reader = plan.demand.target, plan, SlowReader()
        row_tables = () if files.config.tied_head else (files.config.embedding_name,)
        weights = TieredWeights(
            files.stored,
            plan.placement,
            dtype=files.dtype,
            device=CPU,
            row_tables=row_tables,
            options=TierOptions(reader=self.reader),
        )
        self.text = CachedDecoder(Decoder(files.config, weights, dtype=files.dtype, device=CPU), CONTEXT)
        self.text.score_rows(list(range(5, 21)), *star(0))[0]

    def pass_s(self, width: int) -> float:
        """Seconds of one pass over one token of text and width - 1 nodes."""
        began = time.perf_counter()
        self.text.score_rows([7], *star(width - 1))[0]
        seconds = time.perf_counter() - began
        self.text.keep([])
        return seconds


def passes(folders: Sequence[Path], ram: int, links: Sequence[float], widths: Sequence[int]) -> None:
    """A table of seconds a pass, plain and packed by turns."""
    options, hardware = MemoryOptions(ram=ram, context=CONTEXT), read_hardware(CPU)
    opened = [ModelFiles.open(folder, "bf16", "cpu", []) for folder in folders]
    plans = [plan_here(files, [], hardware, options) for files in opened]  # both before the first takes memory
    models = [Streamed(plan) for plan in plans]
    for folder, model in zip(folders, models, strict=True):
        print(f"{folder.name}: {model.plan.tiers}, {model.plan.stream_bytes / 1e9:.2f} GB a pass")
    print("\n| link | tokens in the pass | plain, s | packed, s | plain ÷ packed |\n|---:|---:|---:|---:|---:|")
    for link in (*links, 0.0):
        for model in models:
            model.reader.bytes_per_s = link
        for width in widths:
            taken: list[list[float]] = [[], []]
            for turn in range(REPEATS + 1):
                for i, model in enumerate(models):
                    seconds = model.pass_s(width)
                    if turn:  # the first turn fills the slots at the new rate
                        taken[i].append(seconds)
            plain, packed = map(statistics.median, taken)
            name = f"{link / 1e9:g} GB/s" if link else "the disk's"
            print(f"| {name} | {width} | {plain:.2f} | {packed:.2f} | {plain / packed:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["weigh", "unpack", "passes"])
    parser.add_argument("folders", type=Path, nargs="*", help="plain and packed, for passes")
    parser.add_argument("--ram", type=parse_size, default=6 * 2**30, help="for each model")
    parser.add_argument("--links", default="", help="bytes per second to slow reads down to")
    parser.add_argument("--widths", default="1,16")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    stages = {
        "weigh": weigh,
        "unpack": partial(unpack, args.threads),
        "passes": partial(
            passes,
            args.folders,
            args.ram,
            [float(parse_size(link)) for link in args.links.split(",") if link],
            [int(width) for width in args.widths.split(",")],
        ),
    }
    if args.stage == "passes" and len(args.folders) != 2:
        parser.error("passes needs two folders: plain and packed")
    stages[args.stage]()


if __name__ == "__main__":
    main()
