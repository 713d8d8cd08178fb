"""Compares the device with the CPU in fp32: logits of a tree, and texts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.streaming import star
from offspec import SpeculationParams
from offspec.loaders.streaming.placement import Limits
from offspec.model.decoder import CachedDecoder

from .bench import CPU, Bench
from .jobs import JOBS
from .memory import ENDLESS, plan_for, plan_within
from .results import Figures
from .running import loaded
from .texts import num_equal, said


def exact(bench: Bench) -> Iterator[Figures]:
    """Compare a small streamed NF4 target on this device and on the CPU, in fp32: logits of a tree, and texts."""
    target, draft = (grown.in_dtype(torch.float32) for grown in bench.grown("tiny"))
    job, found = JOBS["tiny"], list[tuple[Tensor, list[list[int]]]]()
    streamed = plan_within(job, None, target.files, draft.files, bench.device)
    plain = plan_for(target.files, draft.files, Limits(None, ENDLESS))
    for device, plan in ((bench.device, streamed), (CPU, plain)):
        with loaded(target, draft, plan, bench.rates(), device, max(job.widths)) as running:
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
