"""Linear recurrences on a CPU, row after row along each path of a tree: a row has the same bits whatever rows share it.

A state S [Dk, Dv] maps keys to values: S_r = a_r S_p + k_r u_r^T, o_r = S_r^T q_r, where p is the row's parent. The
update u_r is given (Mamba2), or u_r = b_r (v_r - a_r S_p^T k_r) (the gated delta rule).

Columns of a state do not depend on each other. A thread takes some columns of one head through all rows, so they stay
in its core's first cache. All sums are by ascending places of keys: vectors of any length give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compiler import Emitter, Kernel, run_on_threads
from .encodings import splat
from .loops import counted, taken
from .processor import num_lanes, per_processor

MOST_VECTORS = 4  # of a block of columns; as many as hide the time that a sum takes
LEAST_NUMBERS = 2**16  # of states that a thread reads: a call of another one takes as long

_POINTERS = ("state", "after", "steps", "keys", "queries", "updates", "factors", "rates", "outputs", "scratch")
_NUMBERS = ("num_steps", "num_earlier", "num_slots", "key_size", "num_heads", "group", "blocks")
# A job is 64-bit words: units; the next unit and the next thread's number, which threads count up; then those above.
_JOB = ("units", "next_unit", "next_thread")


def can_step_states() -> bool:
    """Whether there are such kernels for this CPU."""
    return num_lanes() > 0


@dataclass(frozen=True)
class Walk:
    """The order of rows: int64 [steps, 3], each a row, its parent's slot, and the slot of the row's state.

    Slot 0 has the root's state. num_slots: states that are in memory at once.
    """

    steps: Tensor
    num_slots: int

    @classmethod
    def of_chain(cls, num_rows: int) -> Walk:
        steps = torch.zeros(num_rows, 3, dtype=torch.int64)
        steps[:, 0] = torch.arange(num_rows)
        return cls(steps, 1)

    @classmethod
    def of_tree(cls, parents: Sequence[int], num_earlier: int) -> Walk:
        """All rows behind the `num_earlier` first ones, and those of these that are above them.

        parents: of each row, a row before it, or -1. A row's largest subtree comes last and takes over the row's slot:
        the others are at most half as large, so slots are no more than log2(rows) + 2.
        """
        sizes, below = [0] * len(parents), [list[int]() for _ in range(len(parents) + 1)]  # the last: the root's
        for row, parent in reversed(list(enumerate(parents))):
            if row < num_earlier and not sizes[row]:
                continue
            sizes[row] += 1
            below[parent].append(row)
            if parent >= 0:
                sizes[parent] += sizes[row]
        steps, left = list[tuple[int, int, int]](), [(-1, 0, 0)]
        while left:
            row, slot = left[-1][0], left[-1][2]
            steps.append(left.pop())
            children = sorted(below[row], key=lambda child: (-sizes[child], child))
            left += [(child, slot, slot + (place > 0)) for place, child in enumerate(children)]
        table = torch.tensor(steps[1:], dtype=torch.int64).view(-1, 3)  # the first one is the root's
        return cls(table, 1 + max(slot for _, _, slot in steps))


@dataclass(frozen=True)
class StepRows:
    """What rows bring, in fp32 and contiguous: E earlier ones, whose updates are given, then R others.

    keys [E + R, key heads, Dk]. updates [E + R, heads, Dv]: u; v for the others if there are rates, replaced by u.
    factors [E + R, heads]: a. queries [R, key heads, Dk]. rates [R, heads]: b.
    """

    keys: Tensor
    updates: Tensor
    factors: Tensor
    queries: Tensor | None = None
    rates: Tensor | None = None


def walk_states(state: Tensor, rows: StepRows, walk: Walk, outputs: Tensor | None, after: Tensor | None) -> None:
    """Take a state [heads, Dk, Dv] through rows. outputs [R, heads, Dv]: of those that are not earlier ones.

    after: where the state after the last step is written, if that is a step from and to slot 0.
    """
    num_heads, key_size, value_size = state.shape
    num_others = 0 if rows.queries is None else len(rows.queries)
    width = math.gcd(value_size, MOST_VECTORS * num_lanes())
    blocks = value_size // width
    num_threads = min(
        torch.get_num_threads(), num_heads * blocks, max(1, len(walk.steps) * state.numel() // LEAST_NUMBERS)
    )
    scratch = torch.empty(num_threads, walk.num_slots, key_size, width)
    tensors = (
        state,
        after,
        walk.steps,
        rows.keys,
        rows.queries,
        rows.updates,
        rows.factors,
        rows.rates,
        outputs,
        scratch,
    )
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    numbers = (
        len(walk.steps),
        len(rows.keys) - num_others,
        walk.num_slots,
        key_size,
        num_heads,
        num_heads // rows.keys.shape[1],
        blocks,
    )
    words = [num_heads * blocks, 0, 0, *(0 if tensor is None else tensor.data_ptr() for tensor in tensors), *numbers]
    run_on_threads(steps_of(width, rows.rates is not None).prepare(), words, num_threads)


@per_processor
def steps_of(width: int, corrects: bool) -> StateSteps:
    return StateSteps(width, corrects)


class StateSteps(Kernel):
    """The kernel for blocks of `width` columns; corrects: whether updates follow the delta rule."""

    def __init__(self, width: int, corrects: bool) -> None:
        super().__init__()
        self.width, self.corrects, self.vector = width, corrects, f"<{width} x float>"

    @property
    def source(self) -> str:
        e, worker = Emitter(), Emitter()
        self._emit(e, e.words(e.address("%job", str(len(_JOB)), "i64"), (*_POINTERS, *_NUMBERS), _POINTERS))
        worker.words("%job", _JOB, counted=_JOB[1:])
        call = f"call void @columns(ptr %job, i64 {worker.op('atomicrmw add ptr %next_thread, i64 1 seq_cst')}, i64 "
        taken(worker, "%next_unit", 1, "%units", lambda unit, _: worker.do(f"{call}{unit})"))
        columns = e.function("define internal void @columns(ptr %job, i64 %thread, i64 %unit)")
        return columns + worker.function("define void @worker(ptr %job)")

    def _emit(self, e: Emitter, w: dict[str, str]) -> None:
        """Copy the root's columns to slot 0, take all steps, and copy slot 0 back."""
        w["head"], block = e.op(f"udiv i64 %unit, {w['blocks']}"), e.op(f"urem i64 %unit, {w['blocks']}")
        w["key_head"] = e.op(f"udiv i64 {w['head']}, {w['group']}")
        w["key_heads"] = e.op(f"udiv i64 {w['num_heads']}, {w['group']}")
        w["column"] = e.op(f"mul i64 {block}, {self.width}")
        w["value_size"] = e.op(f"mul i64 {w['blocks']}, {self.width}")
        w["slot_size"] = e.op(f"mul i64 {w['key_size']}, {self.width}")
        num_before = e.op(f"mul i64 %thread, {w['num_slots']}")
        w["slots"] = self._row(e, w["scratch"], num_before, w["slot_size"])
        first_key = e.op(f"mul i64 {w['head']}, {w['key_size']}")

        def place(start: str) -> str:
            return e.address(self._row(e, start, first_key, w["value_size"]), w["column"], "float")

        self._copy(e, w, "begin", (place(w["state"]), w["value_size"]), (w["slots"], str(self.width)))
        counted(e, "step", "0", w["num_steps"], 1, lambda step: self._step(e, w, step))
        is_over = e.op(f"icmp eq ptr {w['after']}, null")
        e.do(f"br i1 {is_over}, label %end, label %keep")
        e.label("keep")
        self._copy(e, w, "last", (w["slots"], str(self.width)), (place(w["after"]), w["value_size"]))
        e.do("br label %end")
        e.label("end")
        e.do("ret void")

    def _copy(self, e: Emitter, w: dict[str, str], name: str, source: tuple[str, str], target: tuple[str, str]) -> None:
        """Copy a block of columns. source, target: where its first row is, and the numbers from a row to the next."""

        def row(key: str) -> None:
            self._store(e, self._load(e, source[0], key, source[1]), target[0], key, target[1])

        counted(e, name, "0", w["key_size"], 1, row)

    def _step(self, e: Emitter, w: dict[str, str], step: str) -> None:
        """The state after a row, and the row's output if it is not an earlier one."""
        width, at = str(self.width), e.address(w["steps"], e.op(f"mul i64 {step}, 3"), "i64")
        row, *slots = (e.op(f"load i64, ptr {e.address(at, str(i), 'i64')}, align 8") for i in range(3))
        source, target = (self._row(e, w["slots"], slot, w["slot_size"]) for slot in slots)
        other = e.op(f"sub i64 {row}, {w['num_earlier']}")

        def of_head(number: str) -> str:
            return e.op(f"add i64 {e.op(f'mul i64 {number}, {heads}')}, {head}")

        heads, head = w["key_heads"], w["key_head"]
        keys = self._row(e, w["keys"], of_head(row), w["key_size"])
        queries = self._row(e, w["queries"], of_head(other), w["key_size"])
        heads, head = w["num_heads"], w["head"]
        factor, other_head = self._number(e, w["factors"], of_head(row)), of_head(other)
        at_update = e.address(self._row(e, w["updates"], of_head(row), w["value_size"]), w["column"], "float")
        given = e.op(f"load {self.vector}, ptr {at_update}, align 4")

        def advance(key: str, update: str) -> str:
            kept = e.op(f"fmul {self.vector} {factor}, {self._load(e, source, key, width)}")
            new = e.fma(self.vector, self._number(e, keys, key), update, kept)
            self._store(e, new, target, key, width)
            return new

        is_earlier = e.op(f"icmp slt i64 {other}, 0")
        e.do(f"br i1 {is_earlier}, label %earlier, label %other")
        e.label("earlier")
        counted(e, "again", "0", w["key_size"], 1, lambda key: advance(key, given) and None)
        e.do("br label %stepped")

        e.label("other")
        update = given
        if self.corrects:
            answer = self._sum(e, w, "answer", keys, lambda key: self._load(e, source, key, width))
            missing = e.fma(self.vector, e.op(f"fneg {self.vector} {factor}"), answer, given)
            update = e.op(f"fmul {self.vector} {self._number(e, w['rates'], other_head)}, {missing}")
            e.do(f"store {self.vector} {update}, ptr {at_update}, align 4")
        output = self._sum(e, w, "output", queries, lambda key: advance(key, update))
        at_output = e.address(self._row(e, w["outputs"], other_head, w["value_size"]), w["column"], "float")
        e.do(f"store {self.vector} {output}, ptr {at_output}, align 4")
        e.do("br label %stepped")
        e.label("stepped")

    def _sum(self, e: Emitter, w: dict[str, str], name: str, factors: str, rows: Callable[[str], str]) -> str:
        """The sum of the state's rows, times a number each, by ascending keys."""

        def add(key: str, sums: list[str]) -> list[str]:
            return [e.fma(self.vector, self._number(e, factors, key), rows(key), sums[0])]

        (total,) = counted(e, name, "0", w["key_size"], 1, add, [(self.vector, "zeroinitializer")])
        return total

    def _row(self, e: Emitter, start: str, row: str, width: str) -> str:
        return e.address(start, e.op(f"mul i64 {row}, {width}"), "float")

    def _number(self, e: Emitter, start: str, place: str) -> str:
        """A vector of one number."""
        return splat(e, e.op(f"load float, ptr {e.address(start, place, 'float')}, align 4"), self.width)

    def _load(self, e: Emitter, start: str, key: str, width: str) -> str:
        return e.op(f"load {self.vector}, ptr {self._row(e, start, key, width)}, align 4")

    def _store(self, e: Emitter, numbers: str, start: str, key: str, width: str) -> None:
        e.do(f"store {self.vector} {numbers}, ptr {self._row(e, start, key, width)}, align 4")
