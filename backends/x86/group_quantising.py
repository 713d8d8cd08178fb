"""Quantises weights in groups of neighbours: the scale and minimum of each group by least squares, then its codes.

`formats.gguf_pack` describes the method and has the same in plain torch, with equal bits: sums are taken by halves,
every operation rounds once, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .compiler import Emitter, compile_ir, run_on_threads
from .encodings import splat
from .loops import counted, taken
from .processor import num_lanes, per_processor

ROUNDS = 2  # of least squares; a third one takes 0.5 to 1.7 % off the squared error of normal weights
TINY = 2.0**-100  # a scale below is 0: its inverse would not be finite
CHUNK_GROUPS = 2**11  # that a thread takes at a time
# A job is 64-bit words: addresses; the number of groups; the next one, which threads count up.
_JOB = ("weights", "scales", "lows", "codes", "count", "next_group")


@dataclass(frozen=True)
class Groups:
    """Groups of `size` weights, a power of two, with codes from `least` to `most`.

    least 0: weight ≈ scale * code - minimum, of which neither is below 0. Otherwise weight ≈ scale * code, with a scale
    of either sign.
    """

    size: int
    least: int
    most: int

    @property
    def has_minimum(self) -> bool:
        return self.least == 0

    def fit(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and minima fp32 [B, K / size] of weights fp32 [B, K], contiguous."""
        scales, lows = torch.zeros(2, len(weights), weights.shape[1] // self.size).unbind()
        fit = _fit_affine if self.has_minimum else _fit_symmetric
        _run(_worker(self, fit), weights, scales, lows, weights)
        return scales, lows

    def codes(self, weights: Tensor, scales: Tensor, lows: Tensor) -> Tensor:
        """Codes - `least`, uint8 [B, K], of contiguous weights fp32 [B, K], for scales and minima [B, K / size]."""
        codes = torch.empty(weights.shape, dtype=torch.uint8)
        _run(_worker(self, _store_codes), weights, scales.contiguous(), lows.contiguous(), codes)
        return codes


def can_run() -> bool:
    """Whether there are kernels for this CPU."""
    return num_lanes() > 0


def _run(worker: Callable[..., None], weights: Tensor, scales: Tensor, lows: Tensor, codes: Tensor) -> None:
    count = scales.numel()
    places = [tensor.data_ptr() for tensor in (weights, scales, lows, codes)]
    run_on_threads(worker, [*places, count, 0], min(torch.get_num_threads(), max(1, -(-count // CHUNK_GROUPS))))


# ---------------------------------------------------------------------------------------------------------- the text


class _Group:
    """The code of one group: its weights as one vector, which LLVM splits into registers."""

    def __init__(self, e: Emitter, groups: Groups, places: list[str]) -> None:
        """places: of the group's weights, scale, minimum and codes."""
        self.e, self.groups, self.places = e, groups, places
        self.vector = f"<{groups.size} x float>"
        self.weights = e.op(f"load {self.vector}, ptr {places[0]}, align 4")

    def halved(self, vector: str, operation: Callable[[str, str, str], str]) -> str:
        """All numbers of a vector as one: `operation(type, one half, the other half)`, again and again."""
        size = self.groups.size
        while size > 1:
            half, kind = size // 2, f"<{size} x float>"
            parts = [self.e.shuffle(kind, range(first, first + half), vector) for first in (0, half)]
            vector, size = operation(f"<{half} x float>", *parts), half
        return self.e.op(f"extractelement <1 x float> {vector}, i64 0")

    def total(self, vector: str) -> str:
        return self.halved(vector, lambda kind, a, b: self.e.op(f"fadd {kind} {a}, {b}"))

    def extreme(self, comparison: str) -> str:
        """The smallest weight (olt) or the largest one (ogt)."""
        return self.halved(self.weights, lambda kind, a, b: self.chosen(kind, comparison, a, b))

    def chosen(self, kind: str, comparison: str, a: str, b: str) -> str:
        """a where it compares to b like this, else b."""
        bits = kind.replace("float", "i1")
        return self.e.op(f"select {bits} {self.e.op(f'fcmp {comparison} {kind} {a}, {b}')}, {kind} {a}, {kind} {b}")

    def at_least_zero(self, number: str) -> str:
        return self.e.op(f"fadd float {self.chosen('float', 'ogt', number, '0.0')}, 0.0")

    def inverse(self, scale: str) -> str:
        size = self.e.op(f"call float @llvm.fabs.f32(float {scale})")
        is_tiny = self.e.op(f"fcmp olt float {size}, {_number(TINY)}")
        return self.e.op(f"select i1 {is_tiny}, float 0.0, float {self.e.op(f'fdiv float 1.0, {scale}')}")

    def codes(self, scale: str, low: str) -> str:
        """The nearest codes, as a vector of floats."""
        e, vector = self.e, self.vector
        raised = self.weights
        if self.groups.has_minimum:
            raised = e.op(f"fadd {vector} {raised}, {splat(e, low, self.groups.size)}")
        exact = e.op(f"fmul {vector} {raised}, {splat(e, self.inverse(scale), self.groups.size)}")
        code = e.op(f"call {vector} @llvm.roundeven.v{self.groups.size}f32({vector} {exact})")
        code = self.chosen(vector, "ogt", code, f"splat (float {_number(self.groups.least)})")
        return self.chosen(vector, "olt", code, f"splat (float {_number(self.groups.most)})")

    def product(self, a: str, b: str) -> str:
        return self.total(self.e.op(f"fmul {self.vector} {a}, {b}"))


def _fit_affine(group: _Group) -> None:
    e, num = group.e, _number(group.groups.size)
    total = group.total(group.weights)
    low = e.op(f"fneg float {group.chosen('float', 'olt', group.extreme('olt'), '0.0')}")
    width = group.at_least_zero(e.op(f"fadd float {group.extreme('ogt')}, {low}"))
    scale = e.op(f"fdiv float {width}, {_number(group.groups.most)}")
    for _ in range(ROUNDS):
        codes = group.codes(scale, low)
        first, second, mixed = group.total(codes), group.product(codes, codes), group.product(codes, group.weights)
        of_codes = e.op(f"fsub float {e.op(f'fmul float {num}, {second}')}, {e.op(f'fmul float {first}, {first}')}")
        of_both = e.op(f"fsub float {e.op(f'fmul float {num}, {mixed}')}, {e.op(f'fmul float {first}, {total}')}")
        varies = e.op(f"fcmp ogt float {of_codes}, 0.0")
        fitted = e.op(f"select i1 {varies}, float {e.op(f'fdiv float {of_both}, {of_codes}')}, float {scale}")
        of_codes_alone = e.op(f"fmul float {fitted}, {first}")
        shift = e.op(f"fdiv float {e.op(f'fsub float {of_codes_alone}, {total}')}, {num}")
        is_below = e.op(f"fcmp olt float {shift}, 0.0")  # no minimum can be above 0: the best scale without one
        alone = e.op(f"fmul float {mixed}, {group.inverse(second)}")
        low = group.at_least_zero(shift)
        scale = group.at_least_zero(e.op(f"select i1 {is_below}, float {alone}, float {fitted}"))
    e.do(f"store float {scale}, ptr {group.places[1]}, align 4")
    e.do(f"store float {low}, ptr {group.places[2]}, align 4")


def _fit_symmetric(group: _Group) -> None:
    e = group.e
    low, high = group.extreme("olt"), group.extreme("ogt")
    is_low = e.op(f"fcmp ogt float {e.op(f'fneg float {low}')}, {high}")
    largest = e.op(f"select i1 {is_low}, float {low}, float {high}")
    scale = e.op(f"fdiv float {largest}, {_number(group.groups.least)}")
    for _ in range(ROUNDS):
        codes = group.codes(scale, "0.0")
        mixed, second = group.product(codes, group.weights), group.product(codes, codes)
        scale = e.op(f"fmul float {mixed}, {group.inverse(second)}")
    e.do(f"store float {scale}, ptr {group.places[1]}, align 4")


def _store_codes(group: _Group) -> None:
    e, vector = group.e, group.vector
    scale, low = (e.op(f"load float, ptr {place}, align 4") for place in group.places[1:3])
    codes = e.op(f"fsub {vector} {group.codes(scale, low)}, splat (float {_number(group.groups.least)})")
    bits = vector.replace("float", "i8")
    e.do(f"store {bits} {e.op(f'fptoui {vector} {codes} to {bits}')}, ptr {group.places[3]}, align 1")


@per_processor
def _worker(groups: Groups, body: Callable[[_Group], None]) -> Callable[..., None]:
    """The function that does `body` for all groups."""
    e = Emitter()
    e.words("%job", _JOB, _JOB[:4], ("next_group",))

    def group(index: str) -> None:
        weight = e.i64("mul", index, groups.size)
        numbers = [
            e.address("%weights", weight, "float"),
            *(e.address(f"%{name}", index, "float") for name in _JOB[1:3]),
        ]
        body(_Group(e, groups, [*numbers, e.address("%codes", weight)]))

    taken(e, "%next_group", CHUNK_GROUPS, "%count", lambda first, last: counted(e, "group", first, last, 1, group))
    return compile_ir(e.function("define void @worker(ptr %job)"), "worker")


def _number(value: float) -> str:
    """A number that fp32 holds exactly, as IR writes it."""
    return f"{value:.17e}" if value else "0.0"
