"""Layers streamed from the disk: the rate of reads, and seconds of passes whose layers are all read from files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offspec.loaders.machine.measure import measure_disk
from offspec.loaders.streaming.placement import Limits, places_of
from offspec.loaders.streaming.tiers import TieredWeights
from offspec.model.decoder import Decoder
from offspec.planning.plan import Plan

from .bench import Bench
from .memory import ENDLESS, plan_for
from .passes import pass_s
from .results import Figures

NUM_SLOTS, WIDTHS = 2, (1, 64)


def disk(bench: Bench, name: str) -> Iterator[Figures]:
    """The disk's rate, seconds of passes that read every layer, and the share of the disk's rate that they reach.

    Layers that the model's growth added are one file, which is read for each of them, past the page cache.
    """
    target = bench.grown_one("target", name)
    rate = measure_disk(target.files.checkpoint.path)
    found = Figures(bytes_per_s=rate.bytes_per_s, threads=rate.num_threads, through_page_cache=rate.reason)
    yield found
    is_cpu = bench.device.type == "cpu"
    plan = plan_for(target.files, None, Limits(None if is_cpu else ENDLESS, ENDLESS))
    plan = with_all_on_disk(plan, 0 if is_cpu else NUM_SLOTS)
    files = target.files
    weights = TieredWeights(
        files.stored, plan.placement, dtype=files.dtype, device=bench.device, row_tables=(files.config.embedding_name,)
    )
    try:
        decoder = Decoder(files.config, weights, dtype=files.dtype, device=bench.device)
        seconds = {width: pass_s(decoder, width, 2) for width in WIDTHS}
    finally:
        weights.close()
    read_s = plan.stream_bytes / rate.bytes_per_s
    yield found | {
        "stream_bytes": plan.stream_bytes,
        "pass_s": seconds,
        "disk_share": {width: read_s / each for width, each in seconds.items()},
    }


def with_all_on_disk(plan: Plan, num_host_slots: int) -> Plan:
    placement = plan.placement
    slots = replace(placement.slots, num=NUM_SLOTS, num_host=num_host_slots)
    everything = tuple(range(len(plan.layers)))
    return replace(plan, placement=replace(placement, places=places_of(on_disk=everything), slots=slots))
