"""Compares seconds per pass of a streamed target with the raw disk, with computing alone, and with the prediction.

    python benchmarks/streaming.py make DIR                      # 13 GB: random weights in the shape of Llama 2 7B
    offspec quantize DIR DIR-nf4                                 # the same in 4 bit, to compare
    python benchmarks/streaming.py measure DIR --limits 4GiB,6GiB,10GiB --widths 1,8,64,128

All figures of a row come from one process: raw O_DIRECT reads of exactly the bytes that a pass streams (the best of 1
to 4 threads; the median of reads before and between the passes), passes, and the same passes over one resident layer
(computing alone). Each limit runs in its own process; as root on Linux also in a memory control group of the limit +
300 MiB, with an empty page cache. A pass has one token of text and width - 1 tree nodes, and the head for the first
rows, as in the engine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offspec.backends.weights import Weight
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import DTYPES, open_model
from offspec.loaders.files.readers import READ_BYTES, FileReader, HostBuffer
from offspec.loaders.files.records import Extent
from offspec.loaders.machine.hardware import read_hardware
from offspec.loaders.machine.measure import measure_rates
from offspec.loaders.streaming.stream import Unit
from offspec.loaders.streaming.tiers import TieredWeights
from offspec.loaders.streaming.weights import WeightSource
from offspec.loaders.units import format_size, parse_size
from offspec.model.block import layer_shapes
from offspec.model.config import read_config
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.names import in_layer
from offspec.planning.memory import MemoryOptions
from offspec.planning.probe import plan_here
from offspec.scheduler.trees.token_tree import ROOT
from offspec.stats import peak_host_bytes

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SLACK_BYTES = 300 * 2**20
CONTEXT = 512
CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------ make


def make(folder: Path, num_layers: int) -> None:
    """Write a checkpoint of random weights, two bytes each, from random places of a pool."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPE | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    config = read_config(shape)
    rng = np.random.default_rng(0)
    pool = torch.from_numpy(rng.standard_normal(2**26, dtype=np.float32) * 0.02).to(torch.bfloat16).view(torch.uint8)
    layers = [{in_layer(i, name): shape for name, shape in layer_shapes(config).items()} for i in range(num_layers)]
    index = {}
    for number, shapes in enumerate([config.shared_shapes(), *layers]):
        file = f"model-{number:05}.safetensors"
        index |= dict.fromkeys(shapes, file)
        write(folder / file, shapes, pool.numpy(), rng)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write(file: Path, shapes: Mapping[str, tuple[int, ...]], pool: np.ndarray, rng: np.random.Generator) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(said)) + said)
        for shape in shapes.values():
            left = 2 * math.prod(shape)
            while left:
                start = 2 * int(rng.integers(0, len(pool) // 4))
                left -= out.write(pool[start : start + left])


# ------------------------------------------------------------------------------------------------ one limit


class OneLayer(WeightSource):
    """A source for computing alone: every layer is the same resident one."""

    def __init__(self, source: WeightSource, layer: Mapping[str, Weight]) -> None:
        self._source, self._layer = source, layer

    @property
    def num_layers(self) -> int:
        return self._source.num_layers

    @property
    def bytes_streamed(self) -> int:
        return 0

    @property
    def is_resident(self) -> bool:
        return False

    @property
    def scratch(self) -> torch.Tensor | None:
        return self._source.scratch

    def lend(self, unit: Unit) -> AbstractContextManager[Mapping[str, Weight]]:
        return nullcontext(self._layer)

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return self.lend(index)

    def shared(self, name: str) -> Weight:
        return self._source.shared(name)

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        return self._source.rows(name, indices)

    def close(self) -> None: ...


def run_one(folder: Path, ram: int, widths: list[int], repeats: int, dtype: str) -> dict[str, Any]:
    """All measurements within one RAM limit."""
    files = open_model(folder, dtype, [])
    largest = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    plan = plan_here(files, [], read_hardware(CPU), MemoryOptions(ram=ram, context=CONTEXT))
    rates = measure_rates(
        CPU,
        files.dtype,
        largest,
        widths=widths,
        form=files.packed_form,
        beside_reads=bool(plan.placement.on_disk),
        seconds=1.5,
    )
    began = time.perf_counter()
    decoder = load_decoder(files, plan.placement, CPU, WeightSettings(has_far_embedding=True))
    load_s = time.perf_counter() - began
    assert isinstance(decoder.weights, TieredWeights)
    pieces = [piece for i in plan.placement.streamed for piece in files.stored.layers[i].record.reads]
    raw = [best_raw(pieces)]
    passes = {}
    for width in widths:
        passes[width] = timed(decoder, width, repeats)
        raw.append(best_raw(pieces))
    rates = replace(rates, disk_bytes_per_s=statistics.median(raw))
    with decoder.weights.layer(0) as layer:
        alone = Decoder(files.config, OneLayer(decoder.weights, layer), dtype=files.dtype, device=CPU)
        compute = {width: timed(alone, width, repeats) for width in widths}
    result = {
        "ram": ram,
        "resident_layers": len(plan.placement.resident),
        "stream_bytes": plan.stream_bytes,
        "planned_bytes": plan.placement.ram_bytes,
        "raw_disk_bytes_per_s": statistics.median(raw),
        "raw_disk_samples": raw,
        "load_s": load_s,
        "pass_s": passes,
        "compute_s": compute,
        "predicted_s": {width: plan.predict_pass_s(rates, width) for width in widths},
        "peak_rss_bytes": peak_host_bytes(),
    }
    decoder.weights.close()
    return result


def best_raw(pieces: Sequence[Extent]) -> float:
    """Bytes/s of reading exactly the bytes that a pass streams: the best of 1 to 4 threads."""
    return max(raw_bytes_per_s(pieces, num_threads) for num_threads in (1, 2, 3, 4)) if pieces else math.nan


def raw_bytes_per_s(pieces: Sequence[Extent], num_threads: int) -> float:
    reader, work = FileReader(), iter(pieces)
    lock = threading.Lock()

    def run() -> None:
        buffer = HostBuffer(READ_BYTES)
        while True:
            with lock:
                piece = next(work, None)
            if piece is None:
                return
            reader.read(piece.path, piece.offset, buffer.view[: piece.nbytes], piece.least)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    reader.close()
    return sum(piece.least for piece in pieces) / seconds


def timed(decoder: Decoder, width: int, repeats: int) -> float:
    """Median seconds of a pass over one token of text and width - 1 nodes, without the first pass."""
    text = CachedDecoder(decoder, 16 + (repeats + 1) + width)
    text.score_rows(list(range(5, 21)), *star(0))[0]
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        text.score_rows([7], *star(width - 1))[0]
        seconds.append(time.perf_counter() - began)
        text.keep([])
    return statistics.median(seconds[1:])


def star(num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes that are all children of the root: tokens, depths, parents."""
    return np.arange(3, num_nodes + 3), np.ones(num_nodes, dtype=np.int64), np.full(num_nodes, ROOT)


# ------------------------------------------------------------------------------------------------ all limits


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A memory control group (v1 or v2) of `limit` bytes; None without permission."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    folder = root / f"offspec-bench-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(limit))
    except OSError as exc:
        print(f"no memory control group ({exc.strerror}): peaks are the process's own", file=sys.stderr)
        yield None
        return
    try:
        yield folder
    finally:
        time.sleep(0.2)  # a group can be removed only after its last process
        folder.rmdir()


def drop_page_cache() -> None:
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="utf-8")
    except OSError as exc:
        print(f"cannot drop the page cache ({exc.strerror}); reads bypass it anyway", file=sys.stderr)


def in_a_group(folder: Path, ram: int, widths: str, repeats: int, dtype: str) -> dict[str, Any]:
    """`run_one` in its own process and control group."""
    drop_page_cache()
    with memory_group(ram + SLACK_BYTES) as group:
        command = [sys.executable, __file__, "one", str(folder), "--ram", f"{ram}B", "--widths", widths]
        enter = None if group is None else (lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
        done = subprocess.run(
            [*command, "--repeats", str(repeats), "--dtype", dtype],
            preexec_fn=enter,
            stdout=subprocess.PIPE,
            check=True,
        )
        result: dict[str, Any] = json.loads(done.stdout)
        if group is not None:
            peak = next(f for f in ("memory.max_usage_in_bytes", "memory.peak") if (group / f).exists())
            result["peak_group_bytes"] = int((group / peak).read_text())
    return result


def show(result: dict[str, Any]) -> None:
    raw, streamed = result["raw_disk_bytes_per_s"], result["stream_bytes"]
    link_s = streamed / raw
    peak = result.get("peak_group_bytes", result["peak_rss_bytes"])
    print(
        f"\n--ram {format_size(result['ram'])}: {result['resident_layers']} resident layers, {format_size(streamed)} "
        f"streamed per pass; raw disk {raw / 1e9:.2f} GB/s, so {link_s:.2f} s; peak {format_size(peak)} "
        f"(planned {format_size(result['planned_bytes'])})"
    )
    print("tokens   pass s   / link   / max(link, compute)   compute s   predicted s   / predicted")
    for width, seconds in result["pass_s"].items():
        compute, predicted = result["compute_s"][width], result["predicted_s"][width]
        print(
            f"{width:>6} {seconds:8.2f} {seconds / link_s:8.2f} {seconds / max(link_s, compute):22.2f} "
            f"{compute:11.2f} {predicted:13.2f} {seconds / predicted:13.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["make", "measure", "one"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--limits", default="4GiB,6GiB,10GiB")
    parser.add_argument("--ram", type=parse_size, default=6 * 2**30)
    parser.add_argument("--widths", default="1,8,64,128")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="of the arithmetic")
    args = parser.parse_args()
    widths = [int(width) for width in args.widths.split(",")]
    if args.stage == "make":
        make(args.folder, args.layers)
    elif args.stage == "one":
        print(json.dumps(run_one(args.folder, args.ram, widths, args.repeats, args.dtype)))
    else:
        limits = [parse_size(limit) for limit in args.limits.split(",")]
        results = [in_a_group(args.folder, limit, args.widths, args.repeats, args.dtype) for limit in limits]
        for result in results:
            show(result)
        print(json.dumps(results))


if __name__ == "__main__":
    main()
