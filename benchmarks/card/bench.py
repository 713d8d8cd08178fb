"""What the parts of a run share: the device, grown models, measured rates;
and the part that says what machine this is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from offspec import builtin
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.files.readers import HostBuffer
from offspec.loaders.formats.process_state import has_bitsandbytes
from offspec.loaders.machine.hardware import Rates, read_gpu, read_memory
from offspec.loaders.machine.measure import measure_dequantise, measure_matmul, measure_memory, measure_packed_product

from .energy import energy_meter
from .jobs import JOBS
from .link import link_bytes_per_s
from .models import Grown
from .results import Figures

CPU = torch.device("cpu")


class Bench:
    """What parts share. folder: for grown models and rates, on this machine. out: for results that are files."""

    def __init__(self, folder: Path, device: torch.device, ram: int | None = None, out: Path | None = None) -> None:
        self.folder, self.device, self.ram = folder, device, ram
        self.out = out or folder
        self._grown: dict[str, Grown] = {}
        self._rates: Rates | None = None

    def grown(self, name: str) -> tuple[Grown, Grown]:
        """Target and draft of a job; those of one shape are made once."""
        return self.grown_one("target", name), self.grown_one("draft", name)

    def grown_one(self, role: str, name: str) -> Grown:
        job = JOBS[name]
        shape = {"target": job.target, "draft": job.draft}[role]
        key = f"{role}-{shape.hidden_size}x{shape.num_layers}-{shape.format}"
        if key not in self._grown:
            self._grown[key] = Grown.make(builtin.path(role), self.folder / key, shape, self.device)
        return self._grown[key]

    def rates(self) -> Rates:
        """Of this machine, measured by the first part that needs them."""
        file = self.folder / f"rates-{self.device.type}.json"
        if self._rates is None and file.exists():
            self._rates = rates_from(json.loads(file.read_text()))
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
                packed_bytes_per_s=measure_packed_product(device, dtype),
            )
            accelerator_of(device).release_memory()
            file.write_text(json.dumps(asdict(self._rates)))
        return self._rates


def rates_from(stored: Mapping[str, Any]) -> Rates:
    """The rates that were stored as JSON, whose keys are text."""
    return Rates(**{**stored, "matmul_flops": {int(rows): rate for rows, rate in stored["matmul_flops"].items()}})


def grow(bench: Bench, role: str, name: str) -> Iterator[Figures]:
    """Grow one model of a job, for the parts that need it; files that exist are kept."""
    files = bench.grown_one(role, name).files
    num_bytes = sum(file.stat().st_size for file in files.checkpoint.path.glob("model-*"))
    yield {"num_layers": len(files.stored.layers), "file_bytes": num_bytes}


def machine(bench: Bench) -> Iterator[Figures]:
    """The card, its link and its rates."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    if has_bitsandbytes():
        found["bitsandbytes"] = sys.modules["bitsandbytes"].__version__
    if bench.device.type == "cuda":
        gpu = read_gpu(bench.device)
        found |= {"card": gpu.name, "total_bytes": gpu.total_bytes, "capability": gpu.capability}
        buffer = HostBuffer(2**28)
        if can_pin := accelerator_of(bench.device).pin(buffer):
            accelerator_of(bench.device).unpin(buffer)
        found["can_pin"] = can_pin
    found["energy_counter"] = "not readable here" if energy_meter(bench.device) is None else "NVML"
    rates = bench.rates()
    yield found | {
        "ram_bytes": read_memory().available_bytes,
        "link_bytes_per_s": rates.host_to_device_bytes_per_s,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "matmul_flops": dict(rates.matmul_flops),
        "dequantise_elements_per_s": rates.dequantise_elements_per_s,
        "packed_bytes_per_s": rates.packed_bytes_per_s,
    }
