"""Seconds of passes compared with link and arithmetic within one card's memory, and the speed of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.streaming import OneLayer, star
from offspec import SpeculationParams
from offspec.backends.arithmetic import EXACT, FAST
from offspec.backends.on_gpu import FUSED_ROWS
from offspec.checkpoints.model_files import ModelFiles
from offspec.errors import UsageError
from offspec.loaders.machine.gpus import find_gpu
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.link import DeviceFiller, DeviceSlot
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.exactness import reason_against_exactness
from offspec.planning.plan import Plan
from offspec.scheduler.params import MAX_NODES

from .bench import Bench
from .calls import BRIEF, FULL
from .jobs import CONTEXT, JOBS, Job
from .link import link_bytes_per_s
from .memory import cap_of, plan_within, without_residents
from .report import TOKENS_PER_PASS
from .results import Figures
from .running import loaded
from .texts import said, texts_of
from .timing import median_s
from .trace import write_trace

EXACT_ROWS = 256  # of the widest pass that is also timed with exact rows
TRANSLATED_TO = "rtx4090"  # the card of the published figures


def passes(bench: Bench, name: str, memory: str, texts: str) -> Iterator[Figures]:
    """Seconds of passes compared with link and arithmetic, then texts and a trace, within the memory of one card.

    texts: FULL, or BRIEF, which leaves out sampled ones and the trace.
    """
    job, (target, draft) = JOBS[name], bench.grown(name)
    plan = plan_within(job, cap_of(memory), target.files, draft.files, bench.device, bench.ram)
    rates, found = bench.rates(), Figures()
    link = link_bytes_per_s(bench.device, max(layer.slot_bytes for layer in plan.layers), 0.5)
    with loaded(target, draft, plan, rates, bench.device, max(job.widths)) as running:
        engine, plan = running.engine, running.plan
        found |= _described(plan) | {"load_s": running.load_s, "notes": [note.text for note in running.notes]}
        found["fused_rows"] = fused_widths(target.files, bench.device)
        found["passes"] = _seconds_by_width(engine.target, plan, job, link)
        found["peak_device_bytes"] = running.peak_bytes()
        found["outside_torch_bytes"] = outside_torch(bench.device)
        yield found
        found["texts"] = texts_of(engine, job, is_brief=texts == BRIEF)
        found["peak_device_bytes"] = running.peak_bytes()
        found["outside_torch_bytes"] = outside_torch(bench.device)  # with the graphs' memory
        found["alloc_retries"] = alloc_retries(bench.device)
        found["translation"] = translate(plan, found["texts"]["greedy"], rates)
        yield found
        if texts == FULL:
            found["trace"] = write_trace(engine, bench.out / f"trace-{name}.json.gz")
            yield found


def halved_link(bench: Bench, name: str, memory: str) -> Iterator[Figures]:
    """The same memory with each layer copied twice: passes and a text at half of the link's rate, measured.

    The link of a card with PCIe 5 then has the rate of PCIe 4.
    """
    job, (target, draft) = JOBS[name], bench.grown(name)
    plan = plan_within(job, cap_of(memory), target.files, draft.files, bench.device, bench.ram)
    link = link_bytes_per_s(bench.device, max(layer.slot_bytes for layer in plan.layers), 0.5) / 2
    rates = replace(bench.rates(), host_to_device_bytes_per_s=link)
    brief = replace(job, widths=job.widths[:3], repeats=min(3, job.repeats))
    with (
        each_layer_copied_twice(),
        loaded(target, draft, plan, rates, bench.device, max(job.widths)) as running,
    ):
        found = _described(running.plan) | {"load_s": running.load_s, "link_bytes_per_s": link}
        found["passes"] = _seconds_by_width(running.engine.target, running.plan, brief, link)
        found["peak_device_bytes"] = running.peak_bytes()
        yield found
        found["texts"] = texts_of(running.engine, job, is_brief=True)
        yield found


@contextmanager
def each_layer_copied_twice() -> Iterator[None]:
    """Layers take twice their bytes over the link to the device. On a CPU no layer is copied."""
    copy = DeviceFiller._copy

    def twice(self: DeviceFiller, slot: DeviceSlot, source: torch.Tensor) -> None:
        copy(self, slot, source)
        copy(self, slot, source)

    DeviceFiller._copy = twice  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceFiller._copy = copy  # type: ignore[method-assign]


def baseline(bench: Bench, name: str, memory: str) -> Iterator[Figures]:
    """SpecExec's method with offspec's code: no resident layers, no overlap, its scoring, a given budget."""
    job, (target, draft) = JOBS[name], bench.grown(name)
    ours = plan_within(job, cap_of(memory), target.files, draft.files, bench.device, bench.ram)
    p, plan = ours.placement, without_residents(ours)
    if p.limits.device is not None and p.ram_bytes + len(p.resident) * p.slots.nbytes > p.limits.ram:
        raise UsageError("the layers do not all fit in RAM; increase --ram")
    specexec = SpeculationParams(budget=256, scoring="specexec", lookup=False, recall=False, reuse=False, overlap=False)
    with loaded(target, draft, plan, bench.rates(), bench.device, max(job.widths)) as running:
        found = {
            kind: said(running.engine, job, temperature, specexec, job.num_tokens // 2, max(1, job.num_prompts // 2))
            for kind, temperature in (("greedy", 0.0), ("sampled", 1.0))
        }
    for figures in found.values():
        del figures["token_ids"]
    yield _described(plan) | {"texts": found}


def _described(plan: Plan) -> dict[str, Any]:
    p = plan.placement
    return {
        "allowed_bytes": p.limits.ram if p.limits.device is None else p.limits.device,
        "planned_bytes": p.ram_bytes if p.limits.device is None else p.device_bytes,
        "num_resident": len(p.resident),
        "num_on_disk": len(p.on_disk) if p.limits.device is not None else 0,
        "num_layers": len(plan.layers),
        "stream_bytes": plan.stream_bytes,
    }


def _seconds_by_width(decoder: Decoder, plan: Plan, job: Job, link: float) -> dict[int, Any]:
    """For each width: seconds of the pass, of the link alone and of arithmetic alone, and the link's utilisation.

    The passes are of fast arithmetic; those of exact rows stand beside them.
    """
    link_s, arithmetic = plan.stream_bytes / link, decoder.arithmetic
    decoder.arithmetic = FAST
    streamed, taken = plan.placement.streamed, {width: pass_s(decoder, width, job.repeats) for width in job.widths}
    with decoder.weights.layer(streamed[0] if streamed else 0) as layer:  # the same layer repeatedly, without transfers
        alone = Decoder(decoder.config, OneLayer(decoder.weights, layer), dtype=decoder.dtype, device=decoder.device)
        compute = {width: pass_s(alone, width, job.repeats) for width in job.widths}
        reason = reason_against_exactness(decoder.config, decoder.dtype, decoder.device)
        alone.arithmetic = decoder.arithmetic = FAST if reason else EXACT
        narrow = [width for width in job.widths if width <= EXACT_ROWS and decoder.is_exact]
        exact = {width: {"exact_compute_s": pass_s(alone, width, job.repeats)} for width in narrow}
    for width in narrow:
        exact[width]["exact_s"] = pass_s(decoder, width, job.repeats)
    decoder.arithmetic = arithmetic
    return {
        width: {
            "seconds": seconds,
            "link_s": link_s,
            "compute_s": compute[width],
            "over_bound": seconds / max(link_s, compute[width]),
            "link_share": link_s / seconds,
            **exact.get(width, {}),
        }
        for width, seconds in taken.items()
    }


def pass_s(decoder: Decoder, width: int, repeats: int) -> float:
    """Median seconds of consecutive passes over one token of text and width - 1 nodes, without the first pass."""
    text = CachedDecoder(decoder, CONTEXT + MAX_NODES)  # as planned, for every width
    text.score_rows(list(range(5, 21)), *star(0))[0]
    one = partial(text.score_rows, [7], *star(width - 1))
    return median_s(lambda: one()[0], text.synchronize, repeats, warm_ups=1, after=partial(text.keep, []))


def outside_torch(device: torch.device) -> int:
    """Bytes of the device that are used, but not by torch's allocator: the CUDA context, kernels, other processes."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def alloc_retries(device: torch.device) -> int:
    """The number of times that torch had to free its cache and synchronise to allocate."""
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else 0


def fused_widths(files: ModelFiles, device: torch.device) -> dict[str, int]:
    """For each kind and shape of packed matrices, the number of rows up to which the fused product is used."""
    weights = [weight for layer in files.stored.layers for weight in layer.weights.values()]
    packed = {(weight.dtype, weight.shape) for weight in weights if weight.fused_kind is not None}
    return {f"{form} {n}x{k}": FUSED_ROWS.get(form, (n, k), files.dtype, device) for form, (n, k) in sorted(packed)}


def translate(plan: Plan, greedy: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    """Predict this plan on another card, from its data sheet's link and arithmetic; drafts scale with its memory rate.

    This is not a measurement. Drafting hidden by a pass here counts as hidden there, where passes take longer.
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
