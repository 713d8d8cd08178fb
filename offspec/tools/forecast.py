"""Predicts memory and seconds per pass of a model, here or with another card, without its weights: `offspec plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from offspec.loaders.files.containers import largest_weight_file
from offspec.loaders.formats import plan_form
from offspec.loaders.machine.cpus import DESKTOP, KNOWN_CPUS
from offspec.loaders.machine.gpus import NVME_BYTES_PER_S, NVME_SOURCE, KnownGpu, find_gpu
from offspec.loaders.machine.hardware import Hardware, Rates, read_hardware
from offspec.loaders.machine.measure import measure_memory, measure_rates
from offspec.loaders.streaming.placement import EXPERTS_ITEM, Item
from offspec.loaders.units import format_count, format_quantity, format_size

from .. import builtin
from ..checkpoints.gguf import gguf_labels
from ..checkpoints.model_files import ModelFiles
from ..checkpoints.opening import choose_device, dtype_on, locate, model_to_plan
from ..drafts.base import OpenRequest
from ..drafts.weighing import NO_DRAFT, Scales, by_rate
from ..drafts.weighing import Prospect as Prospect
from ..errors import OffspecError, UsageError
from ..load_options import LoadOptions
from ..loading import draft_options, memory_options
from ..notes import Note
from ..planning.draft_forecast import Drafting as Drafting
from ..planning.other_programs import READ_SHARE, llama_cpp_tokens_per_s
from ..planning.parked_texts import ParkedTexts
from ..planning.plan import Plan, with_faster_residents
from ..planning.probe import ProductRates, host_flops, planner_here, ram_beside_program
from ..planning.report import explain_packing, explain_plan, tell_tiers
from .improvements import (
    GAIN_WIDTH,
    NUMBERS,
    CacheProspect,
    Gain,
    Improvement,
    Improvements,
    TextsProspect,
    best_improvement,
    predict_caches,
    predict_texts,
)

LLAMA_CPP_SOURCE = (
    f"reads {READ_SHARE:g} of the data sheet's rate of the card's memory, and the rest at RAM's rate; others' reports "
    "are up to a third higher or lower (docs/results/gpu.md)"
)
MIXTURES_SOURCE = (
    "not measured on a card since all chosen ones share a launch; before, 12 of 48 layers of Qwen3-30B-A3B had 26 "
    "tokens/s on an H200 (docs/results/gpu.md)"
)
LEAST_USEFUL = 2.0  # tokens/s: people read about 5; less than this is not worth waiting for (docs/which-model.md)
PROMPT_TOKENS = 2000  # the prompt's length in the prediction of the time to first token


@dataclass(frozen=True)
class Forecast:
    """A plan, predicted seconds of a pass at some widths (rows → seconds), and possible improvements.

    model: the name as given; title: its size and format. gains, four_bit: as `Improvements` predicts them.
    max_context: the largest context that fits, in tokens. prospects: what drafts would bring, as asked for and then
    others. planned: the one of `plan`, the fastest of those that were asked for. texts: what several texts that share
    passes would bring with it.
    parked_bytes: RAM in which a server keeps the KV caches of earlier conversations by default; 0 if they are planned.
    caches: what the formats of the KV cache would bring. entries_in_ram_from: the shortest context for which KV entries
    are in RAM although a GPU computes; None if there is none. busy: why the measured rates are too low; "" if they are
    not.
    """

    model: str
    title: str
    device_name: str
    plan: Plan
    rates: Rates
    pass_s: dict[int, float]
    notes: list[Note]
    gains: list[Gain]
    four_bit: Gain | None
    max_context: int
    planned: Prospect
    prospects: list[Prospect]
    texts: list[TextsProspect]
    parked_bytes: int
    caches: list[CacheProspect]
    entries_in_ram_from: int | None
    busy: str

    @property
    def fastest_first(self) -> list[Prospect]:
        """The drafts that can be used, by predicted tokens/s."""
        return [each for each in by_rate(self.prospects) if not each.why_not]

    @property
    def is_resident(self) -> bool:
        """Whether the device has all of the model, its experts included."""
        return self.plan.placement.is_resident

    @property
    def llama_cpp_tokens_per_s(self) -> float | None:
        """About what llama.cpp would bring without a draft; None if nothing is known about it."""
        return llama_cpp_tokens_per_s(self._plain_plan, self.rates)

    @property
    def compared_tokens_per_s(self) -> float:
        """What llama.cpp is compared with: plain decoding, unless a draft saves passes over streamed layers."""
        return self._best_without_buying if self.plan.placement.streamed else self.plain_tokens_per_s

    @property
    def is_too_slow(self) -> bool:
        """Whether neither this plan nor what would help most without buying is worth waiting for."""
        return self._best_without_buying < LEAST_USEFUL

    @property
    def _best_without_buying(self) -> float:
        """Tokens/s of this plan, or of another draft or format if that would help most."""
        best = self.improvement
        is_free = best is not None and not isinstance(best.value, int)
        return best.tokens_per_s if best is not None and is_free else self.planned.tokens_per_s

    @property
    def improvement(self) -> Improvement | None:
        """The one change that brings the most."""
        return best_improvement(self.planned, self.prospects, self.gains, self.four_bit)

    @property
    def tree_pass_s(self) -> float:
        """Seconds of a pass of GAIN_WIDTH rows."""
        return self.plan.predict_pass_s(self.rates, GAIN_WIDTH)

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens/s of plain decoding: without the memory of a draft, if that was predicted, too."""
        return 1 / self._plain_plan.predict_pass_s(self.rates, 1)

    @property
    def _plain_plan(self) -> Plan:
        return next((each.plan for each in self.prospects if each.name == NO_DRAFT and each.plan), self.plan)

    @property
    def prompt_s(self) -> float | None:
        """Seconds to the first token of a prompt of PROMPT_TOKENS; None if it does not fit the context."""
        return self.plan.predict_pass_s(self.rates, PROMPT_TOKENS, 0) if self.plan.context > PROMPT_TOKENS else None

    @property
    def where(self) -> str:
        """A sentence with the number of layers in each tier."""
        text = tell_tiers(self.plan)
        return f"{text[0].upper()}{text[1:]}."

    @property
    def has_card(self) -> bool:
        return self.plan.placement.limits.device is not None

    def rows(self) -> list[tuple[str, int, int]]:
        """(name, bytes of VRAM, bytes of RAM) of each planned item, and their total; without a card all is RAM."""
        p, layers = self.plan.placement, self.plan.layers
        rows = [(self._item_name(item), item.on_device, item.on_host) for item in p.items]
        kept = sum(layers[i].resident_bytes for i in p.resident)
        waiting = sum(layers[i].slot_bytes for i in p.in_ram)
        rows.append((f"resident layers ({len(p.resident)})", kept, 0))
        if p.in_ram:
            rows.append((f"layers in RAM ({len(p.in_ram)})", 0, waiting))
        if p.streamed:
            rows.append(("streaming buffers", p.slots.num * p.slots.nbytes, p.slots.num_host * p.slots.nbytes))
        if not self.has_card:
            rows = [(name, 0, device + ram) for name, device, ram in rows]
        return [*rows, ("total", sum(row[1] for row in rows), sum(row[2] for row in rows))]

    def _item_name(self, item: Item) -> str:
        experts, slots = self.plan.experts, self.plan.placement.experts
        if item.name != EXPERTS_ITEM or experts is None:
            return item.name
        counts = dict.fromkeys(
            [slots.device, slots.host] if self.has_card and not slots.are_resident else [slots.device]
        )
        return f"{item.name} ({' and '.join(map(str, counts))} of {experts.num})"

    def assumptions(self) -> list[tuple[str, str]]:
        """(name, figure and its source) of what the prediction rests on: memory, links, and measured drafts."""
        limits, ram = self.plan.placement.limits, self.plan.inputs.options.ram
        sizes = [
            f"{format_size(limits.ram)} of RAM ({'free here; `ram` sets another limit' if ram is None else 'given'})"
        ]
        if limits.device is not None:
            sizes.insert(0, f"{format_size(limits.device)} of {self.device_name}")
        lines = [("memory", ", ".join(sizes)), *self._links()]
        if self.has_card and self.plan.experts is not None:
            lines.append(("experts", MIXTURES_SOURCE))
        best = self.improvement
        named = [each for each in self.prospects if best is not None and each.name == best.value]
        for each in dict.fromkeys((self.planned.name, *(other.name for other in named))):
            draft = next(other for other in self.prospects if other.name == each)
            if draft.greedy is not None and draft.greedy.num_nodes:
                lines.append((f"tokens per pass of {each}", draft.source))
                lines.append(("their range over prompts", draft.range_source))
        if self.llama_cpp_tokens_per_s is not None:
            lines.append(("llama.cpp", LLAMA_CPP_SOURCE))
        return lines

    def _links(self) -> list[tuple[str, str]]:
        """(name, rate and its source) of each link that the prediction uses."""
        p, rates = self.plan.placement, self.rates
        experts, slots = self.plan.experts, p.experts
        num_near = max(slots.device, slots.host)  # of experts; passes read others from disk
        reads = bool(p.on_disk) or (experts is not None and not slots.are_resident and num_near < experts.num)
        uses_ram = not self.is_resident and rates.ram_bytes_per_s is not None
        links = [("disk", rates.disk_bytes_per_s, "disk_bytes_per_s", reads)]
        links.append(("memory of the card", rates.memory_bytes_per_s, "memory_bytes_per_s", self.has_card))
        links.append(("link", rates.host_to_device_bytes_per_s, "host_to_device_bytes_per_s", self.has_card))
        links.append(("RAM", rates.ram_bytes_per_s, "ram_bytes_per_s", uses_ram))
        return [
            (name, f"{format_quantity(rate, 'B/s')} ({rates.sources.get(key, 'given')})")
            for name, rate, key, is_used in links
            if is_used and rate
        ]

    def as_dict(self) -> dict[str, Any]:
        p, experts = self.plan.placement, self.plan.experts
        return {
            "model": self.model,
            "title": self.title,
            "context": self.plan.context,
            "num_texts": self.plan.reservation.texts,
            "limits": {"device_bytes": p.limits.device, "ram_bytes": p.limits.ram},
            "memory": [{"what": item, "device_bytes": device, "ram_bytes": ram} for item, device, ram in self.rows()],
            "resident_layers": list(p.resident),
            "ram_layers": list(p.in_ram),
            "disk_layers": list(p.on_disk),
            "experts": experts and {"num": experts.num, "device": p.experts.device, "ram": p.experts.host},
            "stream_bytes_per_pass": self.plan.stream_bytes,
            "pass_s": self.pass_s,
            "prompt_tokens": PROMPT_TOKENS,
            "prompt_s": self.prompt_s,
            "max_context": self.max_context,
            "four_bit": self.four_bit and self.four_bit.as_dict(),
            "gain_pass_tokens": GAIN_WIDTH,
            "gains": [gain.as_dict() for gain in self.gains],
            "draft": self.planned.name,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "llama_cpp_tokens_per_s": self.llama_cpp_tokens_per_s,
            "is_too_slow": self.is_too_slow,
            "improvement": self.improvement and vars(self.improvement),
            "busy": self.busy or None,
            "drafts": [prospect.as_dict() for prospect in self.prospects],
            "texts": [each.as_dict() for each in self.texts],
            "parked_bytes": self.parked_bytes,
            "kv_cache": self.plan.inputs.target.kv.name,
            "kv_caches": [each.as_dict() for each in self.caches],
            "entries_in_ram_layers": list(p.entries_in_ram),
            "entries_in_ram_from": self.entries_in_ram_from,
            "rates": asdict(self.rates),
        }


THIS_CPU = "this"  # of `Assumptions.cpu`: measured here


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about another machine, or another format of the model.

    gpu: the name of a card that is not in this machine, or its description (`find_gpu`). form: the format to assume
    (`PLAN_FORMATS`). disk_bytes_per_s: the disk's assumed rate. cpu: the CPU beside such a card, of KNOWN_CPUS or
    THIS_CPU; None is DESKTOP. ram_bytes_per_s: the rate at which that CPU reads RAM; None is its own.
    """

    gpu: str | None = None
    form: str | None = None
    disk_bytes_per_s: float | None = None
    cpu: str | None = None
    ram_bytes_per_s: float | None = None

    def check(self) -> None:
        """Raises UsageError for a rate that is not positive, an unknown CPU, or one of no assumed card's machine."""
        for name, rate, example in (("disk", self.disk_bytes_per_s, "7GB"), ("ram_rate", self.ram_bytes_per_s, "60GB")):
            if rate is not None and not rate > 0:
                raise UsageError(f"`{name}={rate:g}` must be above 0 bytes per second; for example {example}")
        given = f"`cpu={self.cpu}`" if self.cpu is not None else "`ram_rate`"
        if self.gpu is None and (self.cpu is not None or self.ram_bytes_per_s is not None):
            raise UsageError(f"{given} is of a machine that is not here: name its card with `gpu`, or omit it")
        if self.cpu not in (None, THIS_CPU, *KNOWN_CPUS):
            raise UsageError(f"{given} is unknown; use {', '.join((*KNOWN_CPUS, THIS_CPU))}")


def make_forecast(
    options: LoadOptions,
    assumptions: Assumptions | None = None,
    *,
    drafts: Sequence[str] = (),
    widths: Sequence[int] = (1,),
    progress: Callable[[str], None] = lambda step: None,
) -> Forecast:
    """Predict a model, which need not be downloaded, on this machine or with another card. options: `Engine.load`'s.

    drafts: compare these, and plan for the fastest; none is `options.draft`. widths: rows of a pass. This machine's
    rates are measured, on the disk with the model. With another card, all rates come from data sheets. Raises
    MemoryLimitError if the model does not fit.
    """
    assumed = assumptions or Assumptions()
    assumed.check()
    notes: list[Note] = []
    machine = Machine.of(options, assumed, notes)
    options = replace(options, dtype=dtype_on(options.dtype, machine.hardware.gpu))
    request = _open_to_plan(machine, options, notes)
    place = planner_here(request.target, machine.hardware, memory_options(options))
    free_bytes = ram_beside_program(machine.hardware, memory_options(options))
    kept = [ParkedTexts(options.cache_ram, free_bytes)] if options.cache_ram != 0 else []
    scales = Scales(options.model, request, lambda draft: place([draft, *kept]))
    names = scales.names(drafts or (options.draft,))
    first = scales.first_plan(names)
    busy = machine.busy()  # before the measurements, which are work, too
    rates = machine.measure(request.target, first, widths, progress)
    rates_of = ProductRates(request.target, rates, first.placement.limits.kind)
    prospects = scales.compare(names, rates_of, first)
    chosen = by_rate(prospects[: len(names)])[0]
    plan = with_faster_residents(chosen.plan or first, rates)
    notes += [*explain_plan(plan), *explain_packing(plan)]
    draft = scales.open(chosen.name, [])
    improvements = Improvements(plan, draft, rates, rates_of)
    # With experts, many rows share what is moved.
    numbers = {*NUMBERS, options.texts} if plan.experts is None else {*NUMBERS, 64, options.texts}
    return Forecast(
        options.model,
        _title(request.target, assumed.form, plan),
        machine.hardware.gpu.name if machine.hardware.gpu else "RAM",
        plan,
        rates,
        {w: plan.predict_pass_s(rates, w) for w in widths},
        notes,
        improvements.gains(),
        improvements.four_bit(),
        plan.largest_context,
        chosen,
        prospects,
        predict_texts(plan, draft, rates_of, sorted(numbers)),
        0 if kept else max(0, ParkedTexts(None, free_bytes).most_bytes(plan.inputs.target, plan.reservation)),
        predict_caches(plan, rates, GAIN_WIDTH),
        plan.first_context_with_entries_in_ram(),
        busy,
    )


@dataclass(frozen=True)
class Machine:
    """The machine that a forecast is for: this one, or another one with a card by its data sheet (`known`)."""

    place: torch.device
    known_gpu: KnownGpu | None
    hardware: Hardware
    assumed: Assumptions

    @classmethod
    def of(cls, options: LoadOptions, assumed: Assumptions, notes: list[Note]) -> Machine:
        gpu = find_gpu(assumed.gpu) if assumed.gpu is not None else None
        place = torch.device("cpu") if gpu else choose_device(options.device, notes)
        hardware = read_hardware(place)
        if gpu is not None:  # beside an assumed card, RAM is at least what the options say
            available = max(options.ram or 0, hardware.ram.available_bytes)
            hardware = replace(hardware, gpu=gpu.gpu(), ram=replace(hardware.ram, available_bytes=available))
        return cls(place, gpu, hardware, assumed)

    def measure(self, target: ModelFiles, plan: Plan, widths: Sequence[int], progress: Callable[[str], None]) -> Rates:
        """Rates of products with the target's matrices, and of the links; of an assumed card, from its data sheet."""
        if self.known_gpu is not None:
            packed_bytes = _packed_bytes(target)
            of_card = self.known_gpu.rates() if packed_bytes is None else self.known_gpu.rates(packed_bytes)
            rates = _with_disk(of_card, NVME_BYTES_PER_S, NVME_SOURCE)
        else:
            rates = measure_rates(
                self.place,
                target.dtype,
                largest_weight_file(target.checkpoint.path) or target.checkpoint.path,
                widths=widths,
                form=target.packed_form,
                beside_reads=bool(plan.placement.on_disk) and plan.placement.limits.device is None,
                progress=progress,
            )
        if plan.placement.limits.device is not None:
            rates = self._with_cpu(rates, target, plan)
        disk = self.assumed.disk_bytes_per_s
        return rates if disk is None else _with_disk(rates, disk, "given")

    def _with_cpu(self, rates: Rates, target: ModelFiles, plan: Plan) -> Rates:
        """With those of the CPU beside the card: of a kind of computers if the card is assumed, else measured."""
        name, ram = self.assumed.cpu or DESKTOP, self.assumed.ram_bytes_per_s
        if self.known_gpu is None or name == THIS_CPU:
            flops = {} if plan.experts is None else host_flops(target)
            source, num_cores, ram_rate = "measured here", self.hardware.num_cores, ram
            with suppress(RuntimeError, MemoryError):  # there may be no room to measure it
                ram_rate = ram or measure_memory(torch.device("cpu"), seconds=0.1)
        else:
            cpu = KNOWN_CPUS[name]
            ram_rate, source, num_cores = ram or cpu.ram_bytes_per_s, f"assumed: {cpu.name}", cpu.num_cores
            flops = cpu.flops(_packed_bytes(target) or target.dtype.itemsize, ram)
        source = f"{num_cores} cores; {source}; `cpu` and `ram_rate` set others" if self.known_gpu else source
        sources = {**rates.sources, "ram_bytes_per_s": source}
        return replace(rates, host_matmul_flops=flops, ram_bytes_per_s=ram_rate, sources=sources)

    def busy(self) -> str:
        """Why rates that are measured now are too low; "" if they are not, or if they come from a data sheet."""
        if self.known_gpu is not None or (load := psutil.getloadavg()[0]) <= self.hardware.num_cores:
            return ""
        return f"this machine is busy: {load:.1f} processes share {self.hardware.num_cores} cores"


def _packed_bytes(target: ModelFiles) -> float | None:
    """Bytes per weight of the target's packed matrices; None if it has none."""
    units = target.stored.first_layer
    packed = [weight for unit in units for weight in unit.weights.values() if weight.is_packed]
    if not packed:
        return None
    num_bytes = sum(info.nbytes for weight in packed for info in weight.streamed)
    return num_bytes / sum(math.prod(weight.shape) for weight in packed)


def _with_disk(rates: Rates, bytes_per_s: float, source: str) -> Rates:
    return replace(rates, disk_bytes_per_s=bytes_per_s, sources={**rates.sources, "disk_bytes_per_s": source})


def _open_to_plan(machine: Machine, options: LoadOptions, notes: list[Note]) -> OpenRequest:
    """Open the target, for drafts that are only planned for; for hub ids, only config.json is downloaded."""
    path, form = locate(options.model, options.revision, "target", weights=False), machine.assumed.form
    target = model_to_plan(path, form, options.dtype, notes)
    if form is not None:
        with suppress(OffspecError):  # the format in which it is here may be one that does not run
            here = model_to_plan(path, None, options.dtype, [])
            if here.packed_form is not None and target.weight_bytes > here.weight_bytes:
                text = f"the weights of {path.name} would be larger in {form} than in {here.packed_form}, as they are"
                notes.append(Note(f"{text}, and rounded twice", advice=True))
    device = torch.device("cuda") if machine.known_gpu else machine.place
    return OpenRequest(draft_options(options), target, None, options.dtype, notes, device=device)


def _title(target: ModelFiles, form: str | None, plan: Plan) -> str:
    size, mixture = gguf_labels(target.checkpoint)
    parts = (
        f"{size or format_count(target.num_parameters)} parameters",
        form or mixture or target.packed_form or plan_form(target.checkpoint.config),
        f"{format_size(target.weight_bytes)}; context {plan.context}",
    )
    path = target.checkpoint.path
    return f"{'builtin' if path == builtin.path('target') else path.name}: {', '.join(parts)}"
