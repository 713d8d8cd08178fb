"""bf16 in 12 bits a weight on the card: the kernel's rate, and a streamed pass beside one over plain bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.grow import SHAPES, Shape
from offspec import builtin
from offspec.backends.on_gpu import WORKING_KERNELS
from offspec.loaders.formats.bf16_bits import PackedBits, pack
from offspec.loaders.formats.bf16_packed import PackedBf16Matrix
from offspec.loaders.params import LOSSLESS_FORMAT
from offspec.loaders.streaming.placement import Limits
from offspec.loaders.streaming.tiers import TieredWeights, TierOptions
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import Plan, make_plan

from .bench import Bench
from .jobs import CONTEXT, JOBS
from .memory import ENDLESS
from .models import Grown
from .passes import pass_s
from .results import Figures
from .timing import median_s, synchronize

WIDTHS = (1, 64)
CARD_MATRIX, SMALL_MATRIX = (11008, 4096), (512, 512)
NO_NODES = np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0), bool)


def packed_bf16(bench: Bench, name: str) -> Iterator[Figures]:
    """Unpacking one matrix, then passes with the memory that holds half of the plain layers: 7B's shape on a card."""
    is_card = bench.device.type == "cuda"
    found: Figures = {"kernel": _kernel(bench, CARD_MATRIX if is_card else SMALL_MATRIX)}
    yield found
    shape = replace(SHAPES["7b"] if is_card else JOBS[name].target, format="bf16")
    logits = list[Tensor]()
    room: int | None = None
    for kind, form in (("plain", "bf16"), ("packed", LOSSLESS_FORMAT)):
        grown = _grown(bench, replace(shape, format=form))
        plan = _plan(bench, grown, room)
        room = plan.placement.limits.ram if plan.placement.limits.device is None else plan.placement.limits.device
        figures, last = _passes(bench, grown, plan)
        found[kind] = figures
        logits.append(last)
        yield found
    yield found | {"logits_are_equal": torch.equal(logits[0], logits[1])}


def _kernel(bench: Bench, shape: tuple[int, int]) -> dict[str, Any]:
    """Seconds to unpack one matrix of normal numbers, by Triton where it is faster, and bytes read and written."""
    plain = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    bits = pack(plain)
    assert bits is not None, "normal numbers shrink"
    parts = (part.to(bench.device) for part in (bits.low, bits.codes, bits.groups))
    matrix, out = PackedBf16Matrix(PackedBits(shape, *parts)), torch.empty_like(plain, device=bench.device)
    seconds = median_s(partial(matrix.dequantize, torch.bfloat16, out), partial(synchronize, bench.device))
    return {
        "seconds": seconds,
        "bytes_per_s": (matrix.bits.num_bytes + out.nbytes) / seconds,
        "weights_per_s": plain.numel() / seconds,
        "bits_per_weight": 8 * matrix.bits.num_bytes / plain.numel(),
        "is_triton": WORKING_KERNELS.has((matrix.form, torch.bfloat16), bench.device),
        "is_equal": torch.equal(out.cpu().view(torch.int16), plain.view(torch.int16)),
    }


def _grown(bench: Bench, shape: Shape) -> Grown:
    folder = bench.folder / f"target-{shape.hidden_size}x{shape.num_layers}-{shape.format}"
    return Grown.make(builtin.path("target"), folder, shape, bench.device)


def _plan(bench: Bench, grown: Grown, room: int | None) -> Plan:
    """Within `room` bytes of the device; None: as many as leave half of the layers resident."""
    is_cpu = bench.device.type == "cpu"
    if room is not None:
        return _planned(grown, Limits(None, room) if is_cpu else Limits(room, ENDLESS))
    plan = _planned(grown, Limits(None if is_cpu else ENDLESS, ENDLESS))
    step = max(layer.slot_bytes for layer in plan.layers)
    taken = plan.placement.ram_bytes if is_cpu else plan.placement.device_bytes
    plan = plan.with_more(**{"ram" if is_cpu else "vram": taken - ENDLESS})
    while 2 * len(plan.placement.resident) > len(plan.layers):
        plan = plan.with_more(**{"ram" if is_cpu else "vram": -step})
    return plan


def _planned(grown: Grown, limits: Limits) -> Plan:
    """Without what this process already holds, which is not the same for both."""
    return make_plan(grown.files, [], limits, MemoryOptions(context=CONTEXT), 0)


def _passes(bench: Bench, grown: Grown, plan: Plan) -> tuple[dict[str, Any], Tensor]:
    """Seconds of passes, and the logits of one."""
    files = plan.inputs.target
    weights = TieredWeights(
        files.stored,
        plan.placement,
        dtype=files.dtype,
        device=bench.device,
        row_tables=(files.config.embedding_name,),
        options=TierOptions(reader=grown.reader),
    )
    try:
        decoder = Decoder(files.config, weights, dtype=files.dtype, device=bench.device)
        logits = CachedDecoder(decoder, CONTEXT).score(list(range(5, 21)), *NO_NODES)
        seconds = {width: pass_s(decoder, width, 3) for width in WIDTHS}
        p = plan.placement
        return {
            "num_resident": len(p.resident),
            "num_layers": len(plan.layers),
            "stream_bytes": plan.stream_bytes,
            "pass_s": seconds,
        }, logits.cpu()
    finally:
        weights.close()
