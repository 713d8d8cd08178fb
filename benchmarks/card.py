"""What a CUDA card makes of offspec, in one go of under ten minutes on a machine with nothing but PyTorch.

    python -m benchmarks.card /tmp/card [--minutes 9] [--device cuda:0]
    python -m benchmarks.card /tmp/card --device cpu --shape tiny        # the same code without a card: only that it runs

The card and its link are measured; the built-in target is grown on the spot (benchmarks/grow.py) to 70B in NF4 and 7B in bf16,
with the built-in draft grown to 1B beside it; the memory that torch may take is cut to what cards of 24, 16 and 12 GB leave;
passes, drafts and texts are timed, and what is computed is compared with the CPU. docs/card.md says what each figure means.

Layers to which the small model has nothing to say share one file, but each is held and moved on its own. The work comes in
parts, most telling first; each writes lines of `results.jsonl` as its figures come. The same command leaves out what is there,
so that a run that was cut goes on; what there is no time left for is told. `card.json` has all of it in the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.grow import SHAPES, Layout, Shape, grow
from benchmarks.streaming import OneLayer, star
from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.checkpoints.opening import ModelFiles, Note, choose_device
from offspec.engine import load_decoder
from offspec.errors import UsageError
from offspec.loaders.checkpoint import Checkpoint, TensorInfo, read_config_json, read_header
from offspec.loaders.cuda import device_bytes, limit_memory, pin, release_memory, unpin
from offspec.loaders.formats.four_bit import CODES, pack_4bit
from offspec.loaders.formats.process_state import FUSED_ROWS, has_bitsandbytes
from offspec.loaders.gpus import CONTEXT_BYTES, USABLE_SHARE, find_gpu
from offspec.loaders.hardware import Rates, read_gpu, read_memory
from offspec.loaders.measure import measure_dequantise, measure_matmul, measure_memory
from offspec.loaders.placement import Limits
from offspec.loaders.readers import HostBuffer
from offspec.loaders.small_transfers import to_device
from offspec.loaders.tiers import StoredModel, TieredWeights
from offspec.loaders.units import GIB, format_size, parse_size
from offspec.loaders.weights import LAYER_PREFIX
from offspec.model.attention import attend
from offspec.model.config import read_config
from offspec.model.cuda_graphs import WIDTHS, TreeGraphs
from offspec.model.decoder import EMBEDDING, CachedDecoder, Decoder
from offspec.planning.out_of_memory import Loading, with_fewer_residents
from offspec.planning.plan import MemoryOptions, Plan, all_resident, make_plan, settle_fused, with_more
from offspec.scheduler.draft import log_normalisers
from offspec.scheduler.params import MAX_NODES
from offspec.scheduler.sampling import gumbel
from offspec.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
CONTEXT = 1024
TRANSLATED_TO, TOKENS_PER_PASS = (
    "rtx4090",
    12,
)  # the card of the figures that are published, and what is assumed for them
LEAST_S = 45.0  # a part is not begun with less time left, nor with less than one like it took
ENDLESS = 2**45  # bytes
Figures = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A target's shape and its draft's, memory to run it in (GiB of a card; None: half of the layers stay), and how much is run.

    widths: tokens of a timed pass, the last one of text included. vocabulary: tokens of the pair that it stands for: what its
    matrices would take beyond the grown ones' is left free.
    """

    target: Shape
    draft: Shape
    caps: tuple[int | None, ...]
    widths: tuple[int, ...] = (1, 64, 256, 512, 1024)
    repeats: int = 5
    num_prompts: int = 4
    num_tokens: int = 64
    num_plain_tokens: int = 8
    vocabulary: int = 0

    def vocabulary_bytes(self, target: ModelFiles, draft: ModelFiles) -> int:
        """Of the target's head, and of the draft's, which is its embedding too."""
        widths = target.config.hidden_size + draft.config.hidden_size
        return 2 * widths * max(0, self.vocabulary - target.config.vocab_size)


JOBS = {
    "70b": Job(SHAPES["70b"], SHAPES["1b"], (24, 16, 12), vocabulary=128_256),  # Llama 3's
    "7b": Job(SHAPES["7b"], SHAPES["1b"], (12, 16, 24)),  # whose shape has a layer for a larger vocabulary
    "tiny": Job(
        Shape(512, 800, 10, 16, 4, 128, format="nf4"),
        Shape(128, 352, 3, 4, 2, 32),
        (None,),
        widths=(1, 16),
        repeats=2,
        num_prompts=1,
        num_tokens=12,
        num_plain_tokens=6,
    ),
}


# ------------------------------------------------------------------------------------------------ models


class Remembered:
    """A `Reader` over files that are read once and then lie in memory: what is measured is the link, not this machine's disk."""

    def __init__(self) -> None:
        self._files: dict[Path, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def remember(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._files[path] = np.fromfile(path, dtype=np.uint8)

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        part = self._files[path][offset : offset + len(out)]
        np.frombuffer(out, dtype=np.uint8)[: len(part)] = part

    def close(self) -> None: ...


@dataclass(frozen=True)
class Grown:
    """A grown model, of which only layers that differ lie in files."""

    files: ModelFiles
    reader: Remembered

    @classmethod
    def make(cls, source: Path, folder: Path, shape: Shape, device: torch.device) -> Grown:
        config = read_config_json(source)
        speaking = Layout(read_config(config), shape).layers
        idle = next((layer for layer in range(shape.num_layers) if layer not in speaking), None)
        written = sorted({*speaking, *([] if idle is None else [idle])})
        num_threads = max(1, min(4, (os.cpu_count() or 1) // 2, read_memory().available_bytes // (12 * GIB)))
        has_bitsandbytes()  # imported by one thread before there are several
        of_torch = torch.get_num_threads()
        grow(source, folder, shape, layers=written, pack=partial(pack, device=device), num_threads=num_threads, say=say)
        torch.set_num_threads(of_torch)  # packing sets it, each thread for itself
        paths = sorted(folder.glob("model-*.safetensors"))
        infos = {name: info for path in paths for name, info in read_header(path).items()}
        for layer in range(shape.num_layers):
            if layer not in written:
                infos |= _alias(infos, f"{LAYER_PREFIX}{idle}.", f"{LAYER_PREFIX}{layer}.")
        checkpoint = Checkpoint(folder, read_config_json(folder), {}, infos)
        stored = StoredModel.of(checkpoint, layer_prefix=LAYER_PREFIX)
        reader = Remembered()
        reader.remember(paths)
        return cls(ModelFiles(checkpoint, read_config(checkpoint.config), stored, torch.bfloat16), reader)

    def in_dtype(self, dtype: torch.dtype) -> Grown:
        return Grown(replace(self.files, dtype=dtype), self.reader)


def _alias(infos: Mapping[str, TensorInfo], prefix: str, name: str) -> dict[str, TensorInfo]:
    """The tensors that begin with `prefix` under another name."""
    found = {name + key.removeprefix(prefix): info for key, info in infos.items() if key.startswith(prefix)}
    return {key: replace(info, name=key) for key, info in found.items()}


def pack(matrix: Tensor, quant_type: str, device: torch.device) -> Mapping[str, Tensor]:
    """`pack_4bit` on the device; without bitsandbytes in plain torch, the scales in 32 bit instead of 8."""
    packer = pack_4bit if has_bitsandbytes() else pack_plainly
    return packer(matrix.to(device), quant_type)


def pack_plainly(matrix: Tensor, quant_type: str, blocksize: int = 64) -> dict[str, Tensor]:
    """As `pack_4bit(nested=False)`, but for NF4's nearest value where two are equally near; K has to be whole blocks."""
    values, order = torch.tensor(CODES[quant_type], device=matrix.device).sort()
    middles, codes, absmax = (values[1:] + values[:-1]) / 2, list[Tensor](), list[Tensor]()
    for rows in matrix.split(max(1, 2**26 // matrix.shape[1])):
        blocks = rows.reshape(-1, blocksize).float()
        absmax.append(blocks.abs().amax(1))
        near = order[torch.bucketize(blocks / absmax[-1].clamp_min(1e-30)[:, None], middles)].view(-1, 2)
        codes.append((near[:, 0] << 4 | near[:, 1]).to(torch.uint8))
    shape, dtype = list(matrix.shape), str(matrix.dtype).removeprefix("torch.")
    state = {"quant_type": quant_type, "blocksize": blocksize, "dtype": dtype, "shape": shape}
    said = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        "": torch.cat(codes)[:, None].cpu(),
        ".absmax": torch.cat(absmax).cpu(),
        ".quant_map": torch.tensor(CODES[quant_type]),
        f".quant_state.bitsandbytes__{quant_type}": said,
    }


# ------------------------------------------------------------------------------------------------ engines


def plan_within(
    job: Job, cap: int | None, target: ModelFiles, draft: ModelFiles, device: torch.device, ram: int | None = None
) -> Plan:
    """In what a card of `cap` GiB leaves to torch, and in `ram` bytes or what is free; None: with half of the layers staying,
    wherever they are computed.
    """
    if cap is not None:
        ram = (
            ram or read_memory().available_bytes + psutil.Process().memory_info().rss
        )  # what is held is planned for, too
        usable = int(cap * GIB * USABLE_SHARE) - CONTEXT_BYTES - job.vocabulary_bytes(target, draft)
        return plan_for(target, draft, Limits(usable, ram))
    plan = plan_for(target, draft, Limits(None if device.type == "cpu" else ENDLESS, ENDLESS))
    p, step = plan.placement, max(layer.slot_bytes for layer in plan.layers)
    if p.limits.device is None:
        tighten = partial(with_more, target=target, draft=draft, ram=-step)
        plan = with_more(plan, target, draft, ram=p.ram_bytes - ENDLESS)
    else:
        tighten = partial(with_more, target=target, draft=draft, vram=-step)
        plan = with_more(plan, target, draft, vram=p.device_bytes - ENDLESS)
    while 2 * len(plan.placement.resident) > job.target.num_layers:
        plan = tighten(plan)
    return plan


def plan_for(target: ModelFiles, draft: ModelFiles | None, limits: Limits) -> Plan:
    return make_plan(target, draft, limits, MemoryOptions(context=CONTEXT), psutil.Process().memory_info().rss)


def without_residents(plan: Plan) -> Plan:
    """Every layer is streamed in every pass."""
    p = plan.placement
    everything = tuple(range(len(plan.layers)))
    in_ram, on_disk = ((), everything) if p.limits.device is None else (everything, ())
    placement = replace(p, resident=(), in_ram=in_ram, on_disk=on_disk, num_slots=max(2, p.num_slots))
    return replace(plan, placement=placement, stream_bytes=sum(layer.read_bytes for layer in plan.layers))


@dataclass(frozen=True)
class Running:
    """An engine, the plan it was loaded for in the end, what was said about it, and the seconds that loading took."""

    engine: Engine
    plan: Plan
    notes: list[Note]
    load_s: float
    held_bytes: int  # of the device before; what is granted is beyond that

    def peak_bytes(self) -> int:
        """The most of the device that torch held for it so far."""
        return device_bytes(self.engine.target.device)[1] - self.held_bytes


@contextmanager
def loaded(
    target: Grown, draft: Grown, plan: Plan, rates: Rates, device: torch.device, width: int
) -> Iterator[Running]:
    """An engine for `plan`, held to it by torch's allocator; for a leaner one where a pass of `width` finds it too little."""
    release_memory(device)
    held = device_bytes(device)[0]
    if device.type == "cuda":
        limit_memory(plan.placement.limits.device, device)
    began, files, notes = time.perf_counter(), target.files, list[Note]()
    settle_fused([files], device)

    def load(plan: Plan) -> tuple[Decoder, Decoder]:
        """Both models, and the largest pass there will be: if anything is scarce, it shows here."""
        pair = (draft, all_resident(draft.files), None), (target, plan.placement, EMBEDDING)
        guesser, decoder = (
            Decoder(
                grown.files.config,
                TieredWeights(
                    grown.files.stored,
                    placement,
                    dtype=files.dtype,
                    device=device,
                    embedding=embedding,
                    reader=grown.reader,
                ),
                dtype=files.dtype,
                device=device,
            )
            for grown, placement, embedding in pair
        )
        try:
            CachedDecoder(decoder, CONTEXT + MAX_NODES).score_rows(list(range(5, 21)), *star(width - 1))[0]
        except BaseException:
            decoder.weights.close()
            raise
        return decoder, guesser

    leaner = partial(with_fewer_residents, target=files, draft=draft.files)
    plan, (decoder, guesser) = Loading(load, leaner, device).within_memory(plan, notes)
    tokenizer = Tokenizer.load(files.checkpoint.path)
    engine = Engine(decoder, tokenizer, guesser, name="grown", draft_name="grown", max_context=plan.context)
    engine.follow(plan, rates, rates.host_to_device_bytes_per_s)
    try:
        yield Running(engine, plan, notes, time.perf_counter() - began, held)
    finally:
        engine.close()
        del engine, decoder, guesser
        release_memory(device)
        if device.type == "cuda":
            limit_memory(None, device)


# ------------------------------------------------------------------------------------------------ figures


def link_bytes_per_s(device: torch.device, nbytes: int, seconds: float = 1.0) -> float:
    """The ceiling: copies of `nbytes`, a layer's, from memory registered as a target's is, one after the other."""
    sources = [HostBuffer(nbytes) for _ in range(2)]
    for source in sources:
        source.tensor.fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    pinned = [source for source in sources if device.type == "cuda" and pin(source, device)]

    def copied(count: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for i in range(count):
            target.copy_(sources[i % 2].tensor, non_blocking=True)
        synchronize(device)
        return time.perf_counter() - began

    count = max(4, min(1000, int(seconds / max(copied(4) / 4, 1e-6) / 3)))
    rate = count * nbytes / statistics.median(copied(count) for _ in range(3))
    for source in pinned:
        unpin(source, device)
    return rate


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Waits for the current stream alone."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextmanager
def copying(device: torch.device, num_copies: int = 40) -> Iterator[None]:
    """While layers are on their way to the device: copies of 256 MiB, all of them queued, and waited for at the end."""
    if device.type != "cuda":
        yield
        return
    source = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True)
    out, stream = torch.empty_like(source, device=device), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(num_copies):
            out.copy_(source, non_blocking=True)
    try:
        yield
    finally:
        stream.synchronize()


def builtin_vocabulary() -> int:
    return read_config(read_config_json(builtin.path("target"))).vocab_size


def pass_s(decoder: Decoder, width: int, repeats: int) -> float:
    """Median seconds of passes over one token of text and width - 1 nodes, one after the other; the first does not count."""
    text = CachedDecoder(decoder, CONTEXT + MAX_NODES)  # what was planned for, whatever the width
    text.score_rows(list(range(5, 21)), *star(0))[0]
    one = partial(text.score_rows, [7], *star(width - 1))
    return median_s(lambda: one()[0], text.synchronize, repeats, warm_ups=1, after=partial(text.keep, []))


def round_s(text: CachedDecoder, width: int) -> float:
    """Median seconds of a draft's round over `width` nodes, its logits waited for."""
    return median_s(partial(text.score, [], *star(width)), text.synchronize, after=partial(text.keep, []))


def median_s(
    work: Callable[[], object],
    wait: Callable[[], object],
    repeats: int = 20,
    *,
    warm_ups: int = 3,
    after: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds of `work` up to the end of `wait`; what is done `after` it is not timed, the first ones do not count."""
    seconds = []
    for _ in range(warm_ups + repeats):
        wait()
        began = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - began)
        after()
    return statistics.median(seconds[warm_ups:])


def said(
    engine: Engine, job: Job, temperature: float, speculation: SpeculationParams, num_tokens: int, num_prompts: int
) -> dict[str, Any]:
    """What some held-out prompts come to, the first pass of each with its prompt left out of the rate."""
    params = SamplingParams(num_tokens, temperature=temperature, seed=1, ignore_eos=True)
    total: dict[str, float] = dict.fromkeys(("num_tokens", "num_passes", "decode_s", "draft_s", "target_s"), 0)
    after_first, ids, peak = 0, list[list[int]](), 0
    for prompt in builtin.prompts()[:num_prompts]:
        steps = list(engine.generate(prompt, params, speculation))
        stats = steps[-1].stats
        ids.append([token for step in steps for token in step.token_ids])
        after_first += stats.num_tokens - stats.num_first_pass_tokens
        peak = max(peak, stats.peak_device_bytes)
        for name in total:
            total[name] += getattr(stats, name)
    return {
        "tokens_per_s": after_first / total["decode_s"] if total["decode_s"] else 0.0,
        "tokens_per_pass": total["num_tokens"] / total["num_passes"],
        "target_s_per_pass": total["target_s"] / total["num_passes"],
        "draft_s_per_pass": total["draft_s"] / total["num_passes"],
        "draft_share": total["draft_s"] / (total["draft_s"] + total["target_s"]),
        "peak_device_bytes": peak,
        "token_ids": ids,
    }


def flex_attention_over(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Callable[[], Tensor]:
    """`attend` by FlexAttention (2412.05496): compiled on a GPU, and everywhere with a block mask made of `mask` at each call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compute = torch.compile(flex_attention, dynamic=False) if queries.device.type == "cuda" else flex_attention
    q, k, v = queries.transpose(0, 1)[None], keys[None], values[None]

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask[row, key]

    def run() -> Tensor:
        blocks = create_block_mask(sees, None, None, *mask.shape, device=mask.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a CPU that it is not compiled
            out = compute(q, k, v, block_mask=blocks, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out[0].transpose(0, 1)

    return run


def alloc_retries(device: torch.device) -> int:
    """How often torch had to give back its cache, and wait for the device, before it found room."""
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else 0


def fused_widths(files: ModelFiles, device: torch.device) -> dict[str, int]:
    """Of each shape of 4-bit matrices: up to how many rows it is multiplied without being dequantised."""
    packed = {w.shape for w in files.stored.layers[0].weights.values() if w.fused_kind is not None}
    return {f"{n}x{k}": FUSED_ROWS.get((n, k), files.dtype, device) for n, k in sorted(packed)}


def num_equal(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> list[int]:
    """Of each text: how many tokens from its beginning are the same."""
    pairs = (zip(a, b, strict=False) for a, b in zip(found, expected, strict=False))
    return [next((i for i, (x, y) in enumerate(both) if x != y), -1) for both in map(list, pairs)]


# ------------------------------------------------------------------------------------------------ parts


class Bench:
    """One run: what it makes once, and the parts, each of which returns its figures."""

    def __init__(self, folder: Path, device: torch.device, ram: int | None = None) -> None:
        self.folder, self.device, self.ram = folder, device, ram
        self._grown: dict[str, Grown] = {}
        self._rates: Rates | None = None

    def grown(self, name: str) -> tuple[Grown, Grown]:
        """Target and draft of a job; those of one shape are made once."""
        job, made = JOBS[name], list[Grown]()
        for role, shape in (("target", job.target), ("draft", job.draft)):
            key = f"{role}-{shape.hidden_size}x{shape.num_layers}-{shape.format}"
            if key not in self._grown:
                self._grown[key] = Grown.make(builtin.path(role), self.folder / key, shape, self.device)
            made.append(self._grown[key])
        return made[0], made[1]

    def rates(self) -> Rates:
        if self._rates is None:
            device, dtype = self.device, torch.bfloat16
            widths = (1, 64, 256, 1024) if device.type == "cuda" else (1, 16)
            shape = (8192, 8192) if device.type == "cuda" else (512, 512)
            dequantised = None
            with suppress(Exception):
                dequantised = measure_dequantise(device, dtype, shape=shape, seconds=0.3)
            self._rates = Rates(
                disk_bytes_per_s=link_bytes_per_s(CPU, 2**24, 0.1),
                host_to_device_bytes_per_s=link_bytes_per_s(device, 2**28 if device.type == "cuda" else 2**24, 1.0),
                memory_bytes_per_s=measure_memory(device, seconds=0.2),
                matmul_flops=measure_matmul(device, dtype, widths, shape=shape, seconds=0.5),
                dequantise_elements_per_s=dequantised,
            )
            release_memory(device)
        return self._rates

    def machine(self) -> Iterator[Figures]:
        """The card, its link and its rates."""
        found: dict[str, Any] = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": sys.version.split()[0],
        }
        if has_bitsandbytes():
            found["bitsandbytes"] = sys.modules["bitsandbytes"].__version__
        if self.device.type == "cuda":
            gpu = read_gpu(self.device)
            found |= {"card": gpu.name, "total_bytes": gpu.total_bytes, "capability": gpu.capability}
            buffer = HostBuffer(2**28)
            if can_pin := pin(buffer, self.device):
                unpin(buffer, self.device)
            found["can_pin"] = can_pin
        rates = self.rates()
        yield found | {
            "ram_bytes": read_memory().available_bytes,
            "link_bytes_per_s": rates.host_to_device_bytes_per_s,
            "memory_bytes_per_s": rates.memory_bytes_per_s,
            "matmul_flops": dict(rates.matmul_flops),
            "dequantise_elements_per_s": rates.dequantise_elements_per_s,
        }

    def exact(self) -> Iterator[Figures]:
        """A small streamed NF4 target here and on the CPU, in fp32: logits of a tree, and texts."""
        target, draft = (grown.in_dtype(torch.float32) for grown in self.grown("tiny"))
        job, found = JOBS["tiny"], list[tuple[Tensor, list[list[int]]]]()
        streamed = plan_within(job, None, target.files, draft.files, self.device)
        plain = plan_for(target.files, draft.files, Limits(None, ENDLESS))
        for device, plan in ((self.device, streamed), (CPU, plain)):
            with loaded(target, draft, plan, self.rates(), device, max(job.widths)) as running:
                engine = running.engine
                rows = CachedDecoder(engine.target).score(list(range(5, 40)), *star(20)).cpu()
                texts = [said(engine, job, t, SpeculationParams(budget=32), 24, 2)["token_ids"] for t in (0.0, 1.0)]
                found.append((rows, [ids for each in texts for ids in each]))
        (rows, texts), (expected_rows, expected) = found
        yield {
            "num_resident_layers": len(streamed.placement.resident),
            "largest_logit_difference": (rows - expected_rows).abs().max().item(),
            "spread_of_logits": expected_rows.std().item(),
            "texts_equal": texts == expected,
            "first_difference": num_equal(texts, expected),
        }

    def draft(self, name: str) -> Iterator[Figures]:
        """A round of the draft: launched kernel by kernel, and as a CUDA graph; the built-in one, and as it was grown."""
        _, grown = self.grown(name)
        files = ModelFiles.open(builtin.path("draft"), "bf16", self.device.type, [])
        small = load_decoder(files, all_resident(files), self.device)
        weights = TieredWeights(
            grown.files.stored, all_resident(grown.files), dtype=torch.bfloat16, device=self.device, reader=grown.reader
        )
        big = Decoder(grown.files.config, weights, dtype=torch.bfloat16, device=self.device)
        found: dict[str, Any] = {}
        for kind, decoder in (("builtin", small), ("grown", big)):
            graphs, found[kind] = TreeGraphs(decoder, CONTEXT), {}
            for way, text in (("eager", CachedDecoder(decoder, CONTEXT)), ("graph", graphs.text(CONTEXT))):
                text.score(list(range(5, 133)), *star(0))
                found[kind][way] = {width: round_s(text, width) for width in WIDTHS}
            found[kind]["graph_over_eager"] = {
                width: found[kind]["graph"][width] / found[kind]["eager"][width] for width in WIDTHS
            }
            graphs.close()
            decoder.weights.close()
        yield found

    def vocabulary(self, name: str) -> Iterator[Figures]:
        """What a large vocabulary costs a round of WIDTHS[-1] rows at temperature 1, which the grown pair's small one does not show."""
        job, rows = JOBS[name], WIDTHS[-1]
        size = job.vocabulary or builtin_vocabulary()
        wait = partial(synchronize, self.device)
        logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(self.device)
        states, head = (
            torch.ones(n, job.target.hidden_size, dtype=torch.bfloat16, device=self.device) for n in (rows, size)
        )
        positions = count()
        yield {
            "vocabulary": size,
            "rows": rows,
            "noise_s_per_position": median_s(lambda: gumbel(0, next(positions), size, self.device), wait),
            "normalisers_s": median_s(lambda: log_normalisers(logits), wait),
            "best_s": median_s(lambda: logits.topk(SpeculationParams.children), wait),
            "target_head_s": median_s(lambda: F.linear(states, head), wait),
        }

    def small(self) -> Iterator[Figures]:
        """How long 64 KB take to the device, alone and while layers are copied, by the small_transfers and by a copy."""
        values = torch.zeros(2**16, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        out, wait = torch.empty_like(values, device=self.device), partial(synchronize_stream, self.device)
        ways = {
            "small_transfers": lambda: to_device(values, self.device),
            "copy": lambda: out.copy_(values, non_blocking=True),
        }
        found = {f"{way}_s": median_s(send, wait) for way, send in ways.items()}
        for way, send in ways.items():
            with copying(self.device):
                found[f"{way}_beside_layers_s"] = median_s(send, wait, 1, warm_ups=0)
        yield found

    def attention(self, name: str) -> Iterator[Figures]:
        """One layer's attention of a tree, as it is computed and as FlexAttention, whose mask is made anew as in each pass."""
        found, sizes = Figures(), ((CONTEXT, 64), (CONTEXT, 512), (4 * CONTEXT, 512))
        for num_keys, num_nodes in sizes if self.device.type == "cuda" else ((64, 8),):
            found[f"{num_nodes} nodes, {num_keys} keys"] = self._attention(JOBS[name].target, num_nodes, num_keys)
            yield found

    def _attention(self, shape: Shape, num_nodes: int, num_keys: int) -> dict[str, Any]:
        generator, kv = torch.Generator().manual_seed(0), (shape.num_kv_heads, num_keys + num_nodes)
        queries, keys, values = (
            torch.randn(*rows, shape.head_dim, generator=generator).to(self.device, torch.bfloat16)
            for rows in ((num_nodes, shape.num_heads), kv, kv)
        )
        mask = torch.ones(num_nodes, num_keys + num_nodes, dtype=torch.bool, device=self.device)
        mask[:, num_keys:] = torch.eye(num_nodes, dtype=torch.bool, device=self.device)
        sdpa, wait = partial(attend, queries, keys, values, mask), partial(synchronize, self.device)
        found: dict[str, Any] = {"sdpa_s": median_s(sdpa, wait)}
        began = time.perf_counter()
        try:
            flex = flex_attention_over(queries, keys, values, mask)
            apart = (flex().float() - sdpa().float()).abs().max().item()
        except Exception as exc:  # noqa: BLE001 - it needs a compiler, which few machines have
            return found | {"flex_error": (str(exc).splitlines() or [type(exc).__name__])[0]}
        found["flex_first_s"] = time.perf_counter() - began
        return found | {"flex_s": median_s(flex, wait), "largest_difference": apart}

    def passes(self, name: str, cap: int | None) -> Iterator[Figures]:
        """Seconds of passes against link and arithmetic, then texts, within the memory of one card."""
        job, (target, draft) = JOBS[name], self.grown(name)
        plan = plan_within(job, cap, target.files, draft.files, self.device, self.ram)
        rates, found = self.rates(), Figures()
        link = link_bytes_per_s(self.device, max(layer.slot_bytes for layer in plan.layers), 0.5)
        with loaded(target, draft, plan, rates, self.device, max(job.widths)) as running:
            engine, plan = running.engine, running.plan
            found |= self._told(plan) | {"load_s": running.load_s, "notes": [note.text for note in running.notes]}
            found["fused_rows"] = fused_widths(target.files, self.device)
            found["passes"] = self._passes(engine.target, plan, job, link)
            found["peak_device_bytes"] = running.peak_bytes()
            yield found
            found["texts"] = self._texts(engine, job, is_brief=cap != job.caps[0])
            found["peak_device_bytes"] = running.peak_bytes()
            found["alloc_retries"] = alloc_retries(self.device)
        found["translation"] = translate(plan, found["texts"]["greedy"], rates)
        yield found

    def _told(self, plan: Plan) -> dict[str, Any]:
        p = plan.placement
        return {
            "granted_bytes": p.limits.ram if p.limits.device is None else p.limits.device,
            "planned_bytes": p.ram_bytes if p.limits.device is None else p.device_bytes,
            "num_resident": len(p.resident),
            "num_on_disk": len(p.on_disk) if p.limits.device is not None else 0,
            "num_layers": len(plan.layers),
            "stream_bytes": plan.stream_bytes,
        }

    def _passes(self, decoder: Decoder, plan: Plan, job: Job, link: float) -> dict[int, Any]:
        """Of each width: seconds, of the link alone, of the arithmetic alone, and how far the link was used."""
        link_s = plan.stream_bytes / link
        streamed, taken = plan.placement.streamed, {width: pass_s(decoder, width, job.repeats) for width in job.widths}
        with decoder.weights.layer(streamed[0] if streamed else 0) as layer:  # one layer, over and over, nothing moved
            alone = Decoder(
                decoder.config, OneLayer(decoder.weights, layer), dtype=decoder.dtype, device=decoder.device
            )
            compute = {width: pass_s(alone, width, job.repeats) for width in job.widths}
        return {
            width: {
                "seconds": seconds,
                "link_s": link_s,
                "compute_s": compute[width],
                "over_bound": seconds / max(link_s, compute[width]),
                "link_share": link_s / seconds,
            }
            for width, seconds in taken.items()
        }

    def _texts(self, engine: Engine, job: Job, *, is_brief: bool) -> dict[str, Any]:
        """Greedy and sampled, plain and guessed; and with drafting that waits for the pass, to see what overlap brings.

        is_brief: greedy alone, and half as many prompts.
        """
        ours, plain = SpeculationParams(), SpeculationParams(budget=0)
        ask = partial(said, engine, job)
        ask(0.0, ours, job.num_tokens, 1)  # calibrates, and captures what graphs there are
        few = max(1, job.num_prompts // 2)
        found = {
            "greedy": ask(0.0, ours, job.num_tokens, few if is_brief else job.num_prompts),
            "greedy, plain": ask(0.0, plain, job.num_plain_tokens, 1),
        }
        if not is_brief:
            found |= {
                "sampled": ask(1.0, ours, job.num_tokens, job.num_prompts),
                "sampled, plain": ask(1.0, plain, job.num_plain_tokens, 1),
                "greedy, no overlap": ask(0.0, replace(ours, overlap=False), job.num_tokens, few),
            }
        for kind in ("greedy",) if is_brief else ("greedy", "sampled"):
            same = num_equal(found[f"{kind}, plain"]["token_ids"], found[kind]["token_ids"])
            found[f"{kind}, plain"]["first_difference"] = same[0]
        for figures in found.values():
            del figures["token_ids"]
        return found

    def baseline(self, name: str, cap: int | None) -> Iterator[Figures]:
        """As SpecExec does it, with our own code: nothing stays, nothing overlaps, its scores, a budget that is given."""
        job, (target, draft) = JOBS[name], self.grown(name)
        ours = plan_within(job, cap, target.files, draft.files, self.device, self.ram)
        p, plan = ours.placement, without_residents(ours)
        if p.limits.device is not None and p.ram_bytes + len(p.resident) * p.slot_bytes > p.limits.ram:
            raise UsageError("its layers do not all fit in RAM; give --ram more")
        specexec = SpeculationParams(
            budget=256, scoring="specexec", lookup=False, recall=False, reuse=False, overlap=False
        )
        with loaded(target, draft, plan, self.rates(), self.device, max(job.widths)) as running:
            found = {
                kind: said(
                    running.engine, job, temperature, specexec, job.num_tokens // 2, max(1, job.num_prompts // 2)
                )
                for kind, temperature in (("greedy", 0.0), ("sampled", 1.0))
            }
        for figures in found.values():
            del figures["token_ids"]
        yield self._told(plan) | {"texts": found}


def translate(plan: Plan, greedy: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    """What this plan would come to on another card: its data sheet's link and arithmetic, drafts as slow as its memory.

    Not a measurement. Drafting that a pass hides here is taken to be hidden there too, where a pass lasts longer.
    """
    card = find_gpu(TRANSLATED_TO)
    there = card.rates()
    assert there.memory_bytes_per_s is not None
    slower = max(1.0, (rates.memory_bytes_per_s or there.memory_bytes_per_s) / there.memory_bytes_per_s)
    pass_s = {width: plan.predict_pass_s(there, width) for width in (1, 64, 256, 512)}
    iteration_s = pass_s[256] + slower * greedy["draft_s_per_pass"]
    return {
        "card": card.name,
        "link_bytes_per_s": there.host_to_device_bytes_per_s,
        "pass_s": pass_s,
        "draft_s": slower * greedy["draft_s_per_pass"],
        "tokens_per_s": greedy["tokens_per_pass"] / iteration_s,
        f"tokens_per_s_at_{TOKENS_PER_PASS}": TOKENS_PER_PASS / iteration_s,
        "plain_tokens_per_s": 1 / pass_s[1],
    }


# ------------------------------------------------------------------------------------------------ a run


def parts_of(bench: Bench, names: Sequence[str]) -> dict[str, Callable[[], Iterator[Figures]]]:
    """All parts in the order of what they tell, by their names; each yields its figures, as they grow."""
    parts = {"machine": bench.machine, "small copies": bench.small, "exact": bench.exact}
    parts[f"draft {names[0]}"] = partial(bench.draft, names[0])
    parts[f"vocabulary {names[0]}"] = partial(bench.vocabulary, names[0])
    rounds = zip_longest(*([(name, cap) for cap in JOBS[name].caps] for name in names))
    for i, (name, cap) in enumerate(one for each in rounds for one in each if one is not None):
        where = f"{name} half" if cap is None else f"{name} {cap}GB"
        parts[where] = partial(bench.passes, name, cap)
        if i == 0:
            parts[f"{where} as SpecExec"] = partial(bench.baseline, name, cap)
    parts[f"attention {names[0]}"] = partial(bench.attention, names[0])
    return parts


def run(bench: Bench, names: Sequence[str], minutes: float) -> dict[str, Any]:
    """Do the parts that are not there yet, for as long as there is time; all results by name."""
    began, file = time.monotonic(), bench.folder / "results.jsonl"
    about = f"{bench.device} {'+'.join(names)}"
    results = {line["part"]: line for line in _lines(file) if line["about"] == about}
    parts = parts_of(bench, names)
    for part in sorted(
        parts, key=lambda part: "error" in results.get(part, {})
    ):  # what failed may fail again, or end us
        if results.get(part, {}).get("is_done"):
            continue
        left_s = 60 * minutes - (time.monotonic() - began)
        if left_s < max(
            LEAST_S, *(line["seconds"] for line in results.values() if _kind(line["part"]) == _kind(part)), 0
        ):
            say(f"{part}: no time left; the same command goes on with it")
            continue
        say(f"{part} ({left_s:.0f} s left)")
        for line in _measured(part, parts[part]):
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"about": about, **line}) + "\n")
            results[part] = json.loads(json.dumps(line))  # as a run that goes on would find it
            (bench.folder / "card.json").write_text(json.dumps(list(results.values()), indent=1), encoding="utf-8")
            (bench.folder / "card.txt").write_text(
                tell(results), encoding="utf-8"
            )  # there, should the next one not end
        with suppress(RuntimeError):  # a device that a part has left in error is told by the parts after it
            release_memory(bench.device)
    return results


def _kind(part: str) -> str:
    return part.split()[0]


def _measured(part: str, measure: Callable[[], Iterator[Figures]]) -> Iterator[dict[str, Any]]:
    """A part's figures as they come, then as they are; or why there are none."""
    began, line = time.monotonic(), dict[str, Any](part=part, is_done=False, figures={}, seconds=0.0)
    begun = {"error": "it was begun, and the process ended in it"}
    yield line | begun
    try:
        for figures in measure():
            line |= {"figures": figures, "seconds": time.monotonic() - began}
            yield line | begun
    except Exception as exc:  # noqa: BLE001 - one part that fails must not cost the others
        traceback.print_exc()
        line["error"] = (str(exc).splitlines() or [type(exc).__name__])[0]
    yield line | {"is_done": "error" not in line, "seconds": time.monotonic() - began}


def _lines(file: Path) -> list[dict[str, Any]]:
    """What is there, but for a line that was cut off when the run was; the next begins on a line of its own."""
    content, whole = file.read_text(encoding="utf-8") if file.exists() else "", []
    for line in content.splitlines():
        with suppress(ValueError):
            whole.append(json.loads(line))
    if content and not content.endswith("\n"):
        file.write_text(content + "\n", encoding="utf-8")
    return whole


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ telling


def tell(results: Mapping[str, Any]) -> str:
    """The table, and what had to show."""
    lines = list[str]()
    for part, line in results.items():
        figures = line["figures"]
        if "error" in line:
            lines.append(f"{part}: failed: {line['error']}")
        if not figures:
            continue
        teller = _tell_passes if "passes" in figures else _tell_texts if "texts" in figures else _tell_plain
        lines += [f"{part} ({line['seconds']:.0f} s)", *teller(figures), ""]
    return "\n".join([*lines, *verdicts(results)])


def _tell_plain(figures: Mapping[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{key}: {shown(each)}" for key, each in value.items())
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return [f"  {name}: {shown(value)}" for name, value in figures.items()]


def _tell_passes(figures: Mapping[str, Any]) -> list[str]:
    lines = [
        f"  {figures['num_resident']} of {figures['num_layers']} layers stay, {format_size(figures['stream_bytes'])} a pass; "
        f"granted {format_size(figures['granted_bytes'])}, peak {format_size(figures['peak_device_bytes'])}; loaded in "
        f"{figures['load_s']:.0f} s",
        "  tokens   pass s   link s   compute s   / max(link, compute)   link used",
    ]
    for width, p in figures["passes"].items():
        lines.append(
            f"  {width:>6} {p['seconds']:8.3f} {p['link_s']:8.3f} {p['compute_s']:11.3f} {p['over_bound']:22.2f} "
            f"{p['link_share']:10.0%}"
        )
    if "texts" not in figures:  # cut off before
        return lines
    there, assumed = figures["translation"], f"tokens_per_s_at_{TOKENS_PER_PASS}"
    return [
        *lines,
        *_tell_texts(figures),
        f"  translated to an {there['card']} (not measured: its data sheet, {there['link_bytes_per_s'] / 1e9:.0f} GB/s): "
        f"{there['pass_s']['256']:.2f} s a pass, {there['tokens_per_s']:.1f} tokens/s at this text's tokens per pass, "
        f"{there[assumed]:.1f} at {TOKENS_PER_PASS}, {there['plain_tokens_per_s']:.1f} plain",
    ]


def _tell_texts(figures: Mapping[str, Any]) -> list[str]:
    return ["  text                   tokens/s   tokens/pass   target s   draft s   draft share"] + [
        f"  {kind:<20} {t['tokens_per_s']:10.2f} {t['tokens_per_pass']:13.2f} {t['target_s_per_pass']:10.3f} "
        f"{t['draft_s_per_pass']:9.4f} {t['draft_share']:13.0%}"
        for kind, t in figures["texts"].items()
    ]


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """What had to show (issue "On the card"), and whether it did."""
    found = list[tuple[str, bool, str]]()
    for part, line in results.items():
        figures = line.get("figures", {})
        if "texts_equal" in figures:
            found.append(("fp32 text is the CPU's", figures["texts_equal"], part))
        for kind in ("builtin", "grown"):
            if kind in figures:
                worst = max(figures[kind]["graph_over_eager"].values())
                found.append(
                    (f"a graph's round ≤ 1/3 of the eager one: at worst {worst:.2f} ({kind})", worst <= 1 / 3, part)
                )
        if "passes" not in figures:
            continue
        found.append(("peak ≤ granted", figures["peak_device_bytes"] <= figures["granted_bytes"], part))
        if "texts" in figures:
            for kind in ("greedy", "sampled"):
                if kind in figures["texts"]:
                    share = figures["texts"][kind]["draft_share"]
                    found.append((f"drafting not hidden ≤ 20 %: {share:.0%} ({kind})", share <= 0.2, part))
        for width, p in figures["passes"].items():
            if figures["stream_bytes"] and int(width) <= 256 and p["compute_s"] < p["link_s"]:
                found.append(
                    (f"{width} tokens use ≥ 95 % of the link: {p['link_share']:.0%}", p["link_share"] >= 0.95, part)
                )
            elif int(width) <= 512:
                found.append(
                    (f"{width} tokens ≤ 1.1 times the bound: {p['over_bound']:.2f}", p["over_bound"] <= 1.1, part)
                )
        if part == "70b 24GB" and "translation" in figures:
            rate = figures["translation"][f"tokens_per_s_at_{TOKENS_PER_PASS}"]
            found.append((f"translated ≥ 10 tokens/s: {rate:.1f}", rate >= 10, part))
    return [f"{'yes' if good else 'NO '}  {part}: {what}" for what, good, part in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for grown models (10 GB for 70b and 7b) and results")
    parser.add_argument("--shape", choices=JOBS, action="append", help="only this one; may be repeated (70b, then 7b)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ram", help="for weights, e.g. 100GiB; without it what is free now")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part is begun after these")
    args = parser.parse_args(arguments)
    try:
        device, ram = choose_device(args.device, []), args.ram and parse_size(args.ram)
    except UsageError as exc:
        sys.exit(f"Error: {exc}; --device cpu --shape tiny runs the same code")
    args.folder.mkdir(parents=True, exist_ok=True)
    # A part that hangs says where, and ends.
    faulthandler.dump_traceback_later(60 * args.minutes + 50, exit=True, file=sys.__stderr__)
    try:
        print(tell(run(Bench(args.folder, device, ram), args.shape or ["70b", "7b"], args.minutes)))
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
