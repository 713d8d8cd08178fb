"""Counts a request's passes: seconds, nodes, bytes that were streamed, and whether the draft rests."""

from __future__ import annotations

import time

import numpy as np

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.scheduler.drafting.drafter import Drafter
from offspec.scheduler.pace.controllers import PLAIN_ROWS
from offspec.scheduler.pace.costs import CostCurve

from ..loaded_target import LoadedTarget
from ..stats import Stats, peak_host_bytes

SHORT_REST = 8  # passes without a draft after which statistics tell of them


class PassCounter:
    """Writes the statistics of one text, all but those of its answer's tokens."""

    def __init__(self, loaded: LoadedTarget, stats: Stats, began: float, pass_s: CostCurve) -> None:
        """began: the start time, by `perf_counter`. pass_s: seconds of the target's passes by number of rows."""
        self._loaded, self.stats, self._began, self._bytes_before = loaded, stats, began, loaded.bytes_streamed
        self._pass_s, self._speedup = pass_s, loaded.plain_speedup_without_draft()
        self._resting_since: int | None = None  # the number of a pass

    @property
    def bytes_streamed(self) -> int:
        """Since the request began."""
        return self._loaded.bytes_streamed - self._bytes_before

    def count(self, draft_s: float, target_s: float, total_s: float) -> None:
        """Record the seconds of a pass: of drafting, of the pass with its verdicts, and of everything."""
        stats = self.stats
        stats.draft_s += draft_s
        stats.target_s += target_s
        if stats.num_passes == 0:
            stats.first_draft_s, stats.first_target_s = stats.draft_s, stats.target_s
            stats.prefill_s, stats.ttft_s = stats.prefill_s + total_s, time.perf_counter() - self._began
        else:
            stats.decode_s += total_s

    def count_tree(self, num_nodes: int, drafter: Drafter) -> None:
        """Record, after `count`, that the pass had a tree; a part of a prompt has none."""
        stats, link = self.stats, self._loaded.link_bytes_per_s
        stats.num_passes += 1
        stats.num_drafted_tokens += num_nodes
        # Since when the draft is switched off, and why, if it is for more than some passes.
        rest = drafter.rest
        self._resting_since = None if rest is None else self._resting_since or stats.num_passes
        stats.draft_off_since = stats.draft_round_s = stats.plain_pass_s = None
        if rest is not None and self._resting_since and stats.num_passes - self._resting_since >= SHORT_REST:
            stats.draft_off_since = self._resting_since
            stats.draft_round_s, stats.plain_pass_s = rest.round_s, rest.plain_s
        if self._speedup is not None:
            plain_s = float(self._pass_s.seconds(np.array([PLAIN_ROWS]))[0])
            stats.plain_without_draft_tokens_per_s = self._speedup / plain_s
        if num_bytes := self.bytes_streamed:
            stats.stream_bytes_per_pass = num_bytes // stats.num_passes
            stats.stream_gb_per_s = num_bytes / stats.target_s / 1e9
            stats.link_gb_per_s = link and link / 1e9
        stats.peak_host_bytes = peak_host_bytes()
        stats.peak_device_bytes = accelerator_of(self._loaded.decoder.device).held_bytes()[1]
