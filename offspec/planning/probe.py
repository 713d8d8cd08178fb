"""Measures this machine for planning: memory in use, and rates of links and arithmetic, half a second each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import psutil
import torch

from offspec.backends.arithmetic import BYTE_FORMS, FAST, INT8
from offspec.backends.backend import Backend
from offspec.backends.choice import CPU
from offspec.backends.device_kinds import DeviceKind, kind_of
from offspec.backends.weights import PLAIN_FORMS
from offspec.backends.x86.processor import num_lanes
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.formats import StoredWeight
from offspec.loaders.machine.card_choices import fused_rows
from offspec.loaders.machine.hardware import Hardware, Rates
from offspec.loaders.machine.measure import (
    measure_dequantise,
    measure_disk,
    measure_host_to_device,
    measure_matmul,
    measure_packed_product,
)
from offspec.loaders.machine.product_rates import forms_of, kernels_of, product_flops

from ..checkpoints.model_files import ModelFiles
from ..notes import Note
from .memory import MemoryOptions, MemoryUser
from .plan import Plan, limits_of, make_plan

LEAST_MEASURED_WEIGHTS = 2**26  # of layers; smaller models are not measured, because their passes are short


def plan_here(target: ModelFiles, features: Sequence[MemoryUser], hardware: Hardware, options: MemoryOptions) -> Plan:
    """`make_plan` for this process and its memory in use, on `hardware`."""
    return planner_here(target, hardware, options)(features)


def planner_here(
    target: ModelFiles, hardware: Hardware, options: MemoryOptions
) -> Callable[[Sequence[MemoryUser]], Plan]:
    """`plan_here` for any features, with the memory in use now: measurements that follow take memory of their own."""
    held, own_bytes = _held_bytes()
    return lambda features: make_plan(target, features, limits_of(hardware, options, own_bytes), options, held)


def ram_beside_program(hardware: Hardware, options: MemoryOptions) -> int:
    """Bytes of RAM that may be used in addition to this process's memory in use."""
    held, own_bytes = _held_bytes()
    return limits_of(hardware, options, own_bytes).ram - held


def _held_bytes() -> tuple[int, int]:
    """RAM in use by this process, and the part of it that is not shared.

    The kernel counts the shared part, mapped libraries, as available: it could read them again.
    """
    memory = psutil.Process().memory_info()
    return memory.rss, memory.rss - getattr(memory, "shared", 0)


def measure_link(plan: Plan, device: torch.device) -> float | None:
    """Bytes/s at which the links can move the streamed layers; None if nothing is streamed.

    Measures each link in use for at most half a second.
    """
    disk = link = None
    if plan.placement.on_disk:
        layer = plan.inputs.target.stored.layers[plan.placement.on_disk[0]]
        disk = measure_disk(layer.record.extents[0].path, seconds=0.5).bytes_per_s
    if plan.placement.streamed:
        link = measure_host_to_device(device, seconds=0.3)
    seconds = plan.link_s(Rates(disk_bytes_per_s=disk, host_to_device_bytes_per_s=link))
    return plan.stream_bytes / seconds if seconds else None


def with_expert_rates(rates: Rates, plan: Plan, device: torch.device) -> Rates:
    """With the rates at which experts come that are not on the device, and of the CPU beside a GPU.

    Measures what `measure_link` has not, each for at most half a second.
    """
    target, experts = plan.inputs.target, plan.experts
    if experts is None or plan.placement.experts.are_resident:
        return rates
    slots = plan.placement.experts
    if rates.disk_bytes_per_s is None and (slots.host or slots.device) < experts.num:
        extent = next(iter(target.stored.experts.values()))[0].record.extents[0]
        rates = replace(rates, disk_bytes_per_s=measure_disk(extent.path, seconds=0.5).bytes_per_s)
    if not slots.host:  # the device computes in RAM
        return rates
    link = rates.host_to_device_bytes_per_s or measure_host_to_device(device, seconds=0.3)
    return replace(rates, host_to_device_bytes_per_s=link, host_matmul_flops=host_flops(target))


def host_flops(target: ModelFiles) -> Mapping[int, float]:
    """Rows → FLOP/s of this CPU with a target's experts; measured once."""
    form = target.packed_form or PLAIN_FORMS.get(target.dtype, "")
    return product_flops(form, target.dtype) or _quick_flops(CPU, target.dtype, seconds=0.1)


def prepare_kernels(models: Iterable[ModelFiles], backend: Backend) -> None:
    """Compile the kernels of large models for the backend while weights are read."""
    for model in filter(_is_large, models):
        layers = [weight for unit in model.stored.units for weight in unit.weights.values()]
        packed = [weight for weight in model.stored.shared.values() if weight.is_packed]
        backend.prepare(kernels_of(forms_of([*layers, *packed]), model.dtype), model.dtype)


def has_byte_products(model: ModelFiles) -> bool:
    """Whether a model has matrices whose products take rows in 8 bits on this CPU (`backends.x86.byte_product`)."""
    units = (*model.stored.units, *(experts[0] for experts in model.stored.experts.values()))
    stored = [*(weight for unit in units for weight in unit.weights.values()), *model.stored.shared.values()]
    return num_lanes() > 0 and any(weight.dtype in BYTE_FORMS for weight in stored)


def _is_large(model: ModelFiles) -> bool:
    return sum(unit.num_weights for unit in model.stored.units) >= LEAST_MEASURED_WEIGHTS


def measure_quick_rates(target: ModelFiles, device: torch.device, link_bytes_per_s: float | None) -> Rates:
    """Rates for `Plan.predict_pass_s`, measured in a quarter of a second: good for a first estimate.

    Takes 32 MiB of weights on a CPU; on a GPU 128 MiB, or four times its L2 cache if that is more. Beside a streamed
    target, packed matrices may draft; on a GPU their products take 0.1 s and as much memory more.
    """
    products = product_flops(_rate_form(target), target.dtype, device=kind_of(device))
    form = target.packed_form if target.stored.has_two_forms or not products else None
    return Rates(
        disk_bytes_per_s=link_bytes_per_s,
        host_to_device_bytes_per_s=link_bytes_per_s,
        matmul_flops=products or _quick_flops(device, target.dtype),
        dequantise_elements_per_s=measure_dequantise(device, target.dtype, form, seconds=0.05) if form else None,
        packed_bytes_per_s=measure_packed_product(device, target.dtype) if link_bytes_per_s is not None else None,
    )


def with_arithmetic(rates: Rates, target: ModelFiles, device: torch.device, arithmetic: str) -> Rates:
    """`rates` with those of a large target's products in another arithmetic than the fastest, measured in 0.2 seconds.

    arithmetic: of `backends.arithmetic.ARITHMETIC`. Kernels of a CPU are exact, so only rows in 8 bits differ there.
    """
    kind = kind_of(device)
    is_same = arithmetic == FAST or (kind.multiplies_stored and arithmetic != INT8)
    if is_same or not _is_large(target):
        return rates
    products = product_flops(_rate_form(target), target.dtype, arithmetic=arithmetic, device=kind)
    return replace(rates, matmul_flops=products or _quick_flops(device, target.dtype, arithmetic))


def _rate_form(target: ModelFiles) -> str:
    """The form of the matrices that products are measured with."""
    is_unpacked_first = target.stored.has_two_forms  # its resident layers may be plain, so products are measured apart
    form = None if is_unpacked_first else target.packed_form
    return form or PLAIN_FORMS.get(target.dtype, "")


def _quick_flops(
    device: torch.device, dtype: torch.dtype, arithmetic: str = FAST, seconds: float = 0.2
) -> dict[int, float]:
    shape = (kind_of(device).timed_side,) * 2
    return measure_matmul(device, dtype, (1, 16, 128), shape=shape, seconds=seconds, arithmetic=arithmetic)


class ProductRates:
    """Rates of products with the matrices of a target and of drafts. `rates` are the target's, as measured or assumed.

    On a CPU, the rate depends on the format of a matrix; each format is measured once. Small models are not measured,
    and have the target's rates.
    """

    def __init__(self, target: ModelFiles, rates: Rates, device: DeviceKind, drafts: Rates | None = None) -> None:
        """drafts: rates of products by the fastest method; None: the target's are."""
        self._target, self._of_target = target, rates
        self._rates, self._device = drafts or rates, device
        self._known = {self._kind(target): self._rates}

    def __call__(self, model: ModelFiles) -> Rates:
        if model is self._target:
            return self._of_target
        kind = self._kind(model)
        if kind not in self._known:
            products = product_flops(*kind, device=self._device) if _is_large(model) else {}
            rates = replace(self._rates, matmul_flops=products, dequantise_elements_per_s=None)
            self._known[kind] = rates if products else self._rates
        return self._known[kind]

    @staticmethod
    def _kind(model: ModelFiles) -> tuple[str, torch.dtype]:
        return model.packed_form or PLAIN_FORMS.get(model.dtype, ""), model.dtype


def measure_fused_limits(models: Sequence[ModelFiles], device: torch.device) -> list[Note]:
    """On a GPU, measure the number of rows up to which each kind and shape of packed matrix is multiplied packed.

    Takes 0.1 s for each, once on a card (`card_choices`); Triton's kernels are compiled before, for some seconds. The
    limits hold for the process (`loaders.formats`). Returns notes with the result, for each format.
    """
    kinds = {
        (weight.fused_kind, model.dtype): weight
        for model in models
        for layer in model.stored.layers
        for weight in layer.weights.values()
        if weight.fused_kind is not None
    }
    if not kind_of(device).has_own_memory or not kinds:
        return []
    forms = {weight.dtype: [kind for kind in kinds if kinds[kind].dtype == weight.dtype] for weight in kinds.values()}
    notes = [
        _fused_note(form, [(kinds[kind], kind[1]) for kind in sorted(forms[form], key=str)], device)
        for form in sorted(forms)
    ]
    accelerator_of(device).release_memory()
    return notes


def _fused_note(form: str, kinds: Sequence[tuple[StoredWeight, torch.dtype]], device: torch.device) -> Note:
    try:
        rows = [fused_rows(weight, device, dtype) for weight, dtype in kinds]
    except Exception as exc:  # noqa: BLE001 (Triton's compilers raise many kinds, as a missing bitsandbytes, or memory)
        return Note(f"{form} matrices are dequantised for each use (the fused kernel raised {type(exc).__name__})")
    limits = f"{min(rows)} to {max(rows)} rows"
    return Note(f"{form} matrices are multiplied packed up to {limits}, depending on the shape (measured)")
