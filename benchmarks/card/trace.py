"""A profiler's trace of some passes and rounds of a running engine, no larger than a lent machine gives back."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from offspec import Engine, SamplingParams, builtin

from .results import MAX_FILE_BYTES

NUM_TOKENS, NUM_TOLD = 4, 12


def write_trace(engine: Engine, file: Path) -> dict[str, Any]:
    """Write Chrome's format, compressed, of a short greedy text; the operations that took longest are returned.

    Where the profiler fails, the reason is returned: the other figures of the part are good without it.
    """
    try:
        return _write_trace(engine, file)
    except (OSError, RuntimeError) as exc:
        return {"file": f"none: {exc}"}


def _write_trace(engine: Engine, file: Path) -> dict[str, Any]:
    device = engine.target.device
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    params = SamplingParams(NUM_TOKENS, temperature=0.0, seed=1, ignore_eos=True)
    with profile(activities=activities) as profiler:
        for _ in engine.generate(builtin.prompts()[0], params):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(plain := Path(folder) / "trace.json"))
        small = Path(folder) / "trace.gz"
        with plain.open("rb") as source, gzip.open(small, "wb") as packed:
            shutil.copyfileobj(source, packed)
        if is_small := small.stat().st_size <= MAX_FILE_BYTES:
            shutil.copyfile(small, file)
    kind = "device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    longest = sorted(profiler.key_averages(), key=lambda each: getattr(each, kind, 0.0), reverse=True)[:NUM_TOLD]
    return {
        "file": file.name if is_small else "larger than 16 MiB; left out",
        "longest_us": {each.key[:80]: getattr(each, kind, 0.0) for each in longest},
    }
