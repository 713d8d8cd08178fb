"""Predicts the seconds of attention behind a text, from a model's shapes and a machine's rates. Pure functions.

A product with the keys and values as matrices, at the rate measured for matrices; unpacking of packed entries; merging
of parts; and scores in memory where no operator of torch computes attention (`model.parts.split_attention`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from offspec.backends.device_kinds import DeviceKind
from offspec.loaders.machine.hardware import Rates

from ..checkpoints.model_files import ModelFiles
from ..model.block import kv_layouts
from ..model.memory.kv_cache import KVLayout
from ..model.memory.kv_formats import KVFormat, most_unpacked
from ..model.parts.split_attention import most_scored_keys, reason_for_formula
from ..model.pass_rows import MASK_ELEMENTS

# Bytes that are read and written: for each score by formula (product, scale, logsumexp, softmax, product) and, if it is
# capped, two quotients more and tanh; for each number of a part's result, merged into the total.
SCORE_TRAFFIC, CAP_TRAFFIC, MERGE_TRAFFIC = 56, 24, 28
# A GPU's operations: of a layer (cache, queries, mask, result), of packing a pass's entries, of a part by formula (one
# by an operator), and of merging a part.
LAYER_OPERATIONS, PACK_OPERATIONS, FORMULA_OPERATIONS, MERGE_OPERATIONS = 7, 32, 18, 9


@dataclass(frozen=True)
class AttentionShape:
    """Attention of `width` rows in one layer.

    cap: of scores, or None. itemsize: bytes of a number. is_whole: a foreign module computes it, with all keys at once.
    """

    width: int
    num_heads: int
    layout: KVLayout
    cap: float | None
    itemsize: int
    kv: KVFormat
    device: DeviceKind
    is_whole: bool = False

    @property
    def rows(self) -> int:
        """Rows of all heads together."""
        return self.width * self.num_heads

    @property
    def stacked_rows(self) -> int:
        """Rows that multiply the keys of one head: those of the heads that share it."""
        return max(1, self.rows // self.layout.num_heads)

    @property
    def reason_for_formula(self) -> str | None:
        if self.is_whole:
            return None
        return reason_for_formula(self.layout.head_dim, self.itemsize, self.cap, self.device)

    def is_at_once(self, num_keys: int) -> bool:
        """Whether all keys are one part, see `AppendedRows.attend`."""
        if self.is_whole:
            return True
        return self.kv.is_plain and self.stacked_rows * (num_keys + self.width) <= MASK_ELEMENTS

    def num_parts(self, num_keys: int) -> int:
        """Parts of the text's keys."""
        limits = []
        if self.reason_for_formula is not None:
            limits.append(most_scored_keys(self.rows))
        if not self.kv.is_plain:
            limits.append(most_unpacked(self.layout, self.device))
        return -(-num_keys // min(limits, default=num_keys))

    def num_operations(self, num_keys: int) -> int:
        """Kernels of a layer on a GPU, by parts."""
        num_parts = self.num_parts(num_keys) + 1  # the pass's own rows are a part
        each = 1 if self.reason_for_formula is None else FORMULA_OPERATIONS
        each += self.kv.unpacking(self.device).operations
        once = LAYER_OPERATIONS + (0 if self.kv.is_plain else PACK_OPERATIONS)
        return once + num_parts * each + (num_parts - 1) * MERGE_OPERATIONS

    def seconds(self, num_keys: int, rates: Rates) -> float:
        """Seconds of attention to so many keys before the pass."""
        least = min(rates.matmul_flops)
        # Bytes/s of memory; if not measured, as a product with few rows reads a matrix.
        memory = rates.memory_bytes_per_s or rates.matmul_flops[least] / least * self.itemsize / 2
        numbers = 2 * num_keys * self.layout.num_heads * self.layout.head_dim
        product_s = numbers * seconds_per_element(rates.matmul_flops, self.stacked_rows)
        is_scored, at_once = self.reason_for_formula is not None, self.is_at_once(num_keys)
        traffic = num_keys * self.layout.numbers * self.kv.unpacking(self.device).traffic
        if is_scored:
            cap_traffic = 0 if at_once or self.cap is None else CAP_TRAFFIC
            traffic += self.rows * num_keys * (SCORE_TRAFFIC + cap_traffic)
        if at_once:
            return product_s + traffic / memory
        if is_scored and self.itemsize == 2:
            product_s /= self.device.fp32_share
        traffic += self.num_parts(num_keys) * self.rows * self.layout.head_dim * MERGE_TRAFFIC
        return max(product_s + traffic / memory, self.num_operations(num_keys) * self.device.launch_s)


def seconds_of_attention(target: ModelFiles, rates: Rates, width: int, num_keys: int, kind: DeviceKind) -> list[float]:
    """Seconds of attention of `width` rows to so many keys in each layer."""
    config = target.config
    if not num_keys or not rates.matmul_flops:
        return [0.0] * config.num_layers
    shapes = attention_shapes(target, width, kind)
    return [
        0.0 if shape is None else shape.seconds(num_keys if window is None else min(num_keys, window), rates)
        for shape, window in zip(shapes, config.windows, strict=True)
    ]


def attention_shapes(target: ModelFiles, width: int, kind: DeviceKind) -> list[AttentionShape | None]:
    """Of each layer; None for one that does not attend."""
    config, itemsize, is_whole = target.config, target.dtype.itemsize, target.config.has_whole_attention
    make = partial(AttentionShape, width, config.num_heads)
    layouts = kv_layouts(config)
    for layer, shape in enumerate(config.shapes):
        layouts[layer] = layouts[layer if shape.entries_of is None else shape.entries_of]
    return [
        None if layout is None else make(layout, config.attention_cap, itemsize, target.kv, kind, is_whole)
        for layout in layouts
    ]


def seconds_per_element(flops: Mapping[int, float], width: int) -> float:
    """Seconds for one weight and `width` rows: linear between measured widths, at the last rate beyond them."""
    if not flops:
        return 0.0
    widths = sorted(flops)
    seconds = [2 * w / flops[w] for w in widths]
    if width >= widths[-1]:
        return seconds[-1] * width / widths[-1]
    right = max(1, bisect_left(widths, width))
    low, high = widths[right - 1], widths[right]
    return seconds[right - 1] + (seconds[right] - seconds[right - 1]) * (width - low) / (high - low)
