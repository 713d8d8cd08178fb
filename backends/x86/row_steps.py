"""Steps between products for rows of numbers on a CPU, each in one call: RMSNorm, rotations, SwiGLU, sums.

torch takes several operations for each, and after a product its code is no longer in a CPU's caches. A row's numbers
have the same bits however many rows there are: a row's sum has one vector, and threads take whole rows. `add_rows` and
`turn_heads` have the bits of torch's operations, so that recordings may use them where other passes do not.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .compiler import Emitter, Kernel, run_on_threads
from .encodings import ITEMS, bf16_bits, of_bf16_bits, of_items, splat, stored
from .loops import counted, taken
from .powers import at_least, at_most, of_all, sigmoid_divisor
from .processor import num_lanes, per_processor

SHARPNESS, LARGEST = 1.702, 7.0  # of gpt-oss's activation: S and L of `ClampedGate`
CHUNK_NUMBERS = 2**14  # numbers of rows that a thread takes at a time

# A job is 64-bit words: those below, of which threads count up the next row; and what the step needs, pointers before
# numbers.
_JOB = ("rows", "chunk", "next_row")


def can_step(dtype: torch.dtype, num_columns: int) -> bool:
    """Whether there are kernels for rows of `num_columns` numbers of a dtype on this CPU."""
    return num_lanes() > 0 and dtype in ITEMS and num_columns % num_lanes() == 0


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., N] over N, times weight [N] → [..., N] in x's dtype."""
    x, weight = x.contiguous(), weight.to(x.dtype).contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    eps_bits = int.from_bytes(struct.pack("<f", eps), "little")
    kernel_of(Norm, x.dtype)(x.numel() // width, width, (x, weight, out), (width, eps_bits))
    return out


def add_rows(x: Tensor, other: Tensor) -> Tensor:
    """x [..., N] plus `other` [..., N] or [N] in x's dtype."""
    x, other = x.contiguous(), other.contiguous()
    out, width, is_one = torch.empty_like(x), x.shape[-1], other.dim() == 1
    kernel_of(Add, x.dtype)(x.numel() // width, 2 * width, (x, other, out), (width, 0 if is_one else width))
    return out


def turn_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [T, heads, D], rotated by cos, sin [T, 1, D] in x's dtype; pairs are made of a head's halves."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out, (num_rows, heads, width) = torch.empty_like(x), x.shape
    kernel_of(Rotation, x.dtype)(num_rows * heads, width, (x, cos, sin, out), (width, heads))
    return out


def gate_rows(gate: Tensor, up: Tensor, *, is_clamped: bool = False) -> Tensor:
    """SwiGLU's inner numbers [T, N]: silu(gate) · up; is_clamped: gpt-oss's, of clamped numbers and `up` + 1."""
    gate, up = gate.contiguous(), up.contiguous()
    out, width = torch.empty_like(gate), gate.shape[-1]
    kernel_of(ClampedGate if is_clamped else Gate, gate.dtype)(len(gate), 2 * width, (gate, up, out), (width,))
    return out


def silu_rows(x: Tensor) -> Tensor:
    """silu of each number of x [T, N]."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    kernel_of(Silu, x.dtype)(len(x), width, (x, out), (width,))
    return out


def lay_rows(x: Tensor, apart: int) -> Tensor:
    """Rows [R, K] as fp32; of each apart · lanes numbers (apart is 1 or 2) every apart-th ones side by side."""
    x = x.contiguous()
    out, (num_rows, width) = torch.empty(x.shape), x.shape
    kernel_of(Apart if apart == 2 else Wide, x.dtype)(num_rows, width, (x, out), (width,))
    return out


def mix_rows(x: Tensor, scales: Tensor) -> Tensor:
    """Sums [T, N] in x's dtype of rows x [T·M, N] times scales, fp32 [T, M], by ascending places among M."""
    (num_rows, num_summed), width = scales.shape, x.shape[-1]
    x, scales, out = x.contiguous(), scales.contiguous(), x.new_empty(num_rows, width)
    kernel_of(Mix, x.dtype)(num_rows, num_summed * width, (x, scales, out), (width, num_summed))
    return out


@per_processor
def kernel_of(kind: type[RowStep], dtype: torch.dtype) -> RowStep:
    return kind(dtype, num_lanes())


class RowStep(Kernel):
    """A step for rows of a dtype.

    names: of its job's words; pointers: how many of them are.
    """

    names: Sequence[str]
    pointers = 3

    def __init__(self, dtype: torch.dtype, lanes: int) -> None:
        super().__init__()
        self.lanes, self.vector, self.item = lanes, f"<{lanes} x float>", ITEMS[dtype]

    def __call__(self, num_rows: int, row_numbers: int, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """row_numbers: that a row reads. tensors, numbers: the words `names`."""
        chunk = max(1, CHUNK_NUMBERS // max(1, row_numbers))
        num_threads = max(1, min(torch.get_num_threads(), num_rows // chunk))
        words = [num_rows, chunk, 0, *[tensor.data_ptr() for tensor in tensors], *numbers]
        run_on_threads(self.prepare(), words, num_threads)

    @property
    def source(self) -> str:
        e, worker = Emitter(), Emitter()
        self.emit(e, e.words(e.address("%job", str(len(_JOB)), "i64"), self.names, self.names[: self.pointers]))
        e.do("ret void")

        def rows(first: str, last: str) -> None:
            counted(worker, "row", first, last, 1, lambda row: worker.do(f"call void @step(ptr %job, i64 {row})"))

        worker.words("%job", _JOB, counted=("next_row",))
        taken(worker, "%next_row", "%chunk", "%rows", rows)
        step = e.function("define internal void @step(ptr %job, i64 %index)")
        return step + worker.function("define void @worker(ptr %job)")

    @abstractmethod
    def emit(self, e: Emitter, words: dict[str, str]) -> None:
        """The step for row `%index`. words: the job's, by their names."""

    def row(self, e: Emitter, start: str, width: str, index: str = "%index") -> str:
        """The address of a row of `width` numbers."""
        return e.address(start, e.op(f"mul i64 {index}, {width}"), self.item)

    def load(self, e: Emitter, row: str, column: str) -> str:
        """A vector of a row's numbers as fp32."""
        n = self.lanes
        loaded = e.op(f"load <{n} x {self.item}>, ptr {e.address(row, column, self.item)}, align 2")
        return of_items(e, loaded, self.item, n)

    def store(self, e: Emitter, numbers: str, row: str, column: str) -> None:
        """Store a vector of fp32 numbers in the rows' dtype."""
        kept = stored(e, numbers, self.item, self.lanes)
        e.do(f"store {kept}, ptr {e.address(row, column, self.item)}, align 2")

    def rounded(self, e: Emitter, numbers: str) -> str:
        """A vector of fp32 numbers, rounded to the rows' dtype."""
        n = self.lanes
        if self.item == "float":
            return numbers
        if self.item == "half":
            half = e.op(f"fptrunc {self.vector} {numbers} to <{n} x half>")
            return e.op(f"fpext <{n} x half> {half} to {self.vector}")
        return of_bf16_bits(e, bf16_bits(e, numbers, n), n)


class Norm(RowStep):
    """RMSNorm."""

    names = ("x", "weight", "out", "width", "eps")

    def emit(self, e: Emitter, words: dict[str, str]) -> None:
        width, vector = words["width"], self.vector
        x, out = (self.row(e, words[name], width) for name in ("x", "out"))

        def add_square(column: str, sums: Sequence[str]) -> list[str]:
            numbers = self.load(e, x, column)
            return [e.fma(vector, numbers, numbers, sums[0])]

        (squares,) = counted(e, "squares", "0", width, self.lanes, add_square, [(vector, "zeroinitializer")])
        total = e.op(f"call reassoc float @llvm.vector.reduce.fadd.v{self.lanes}f32(float -0.0, {vector} {squares})")
        mean = e.op(f"fdiv float {total}, {e.op(f'sitofp i64 {width} to float')}")
        eps = e.op(f"trunc i64 {words['eps']} to i32")
        kept = e.op(f"fadd float {mean}, {e.op(f'bitcast i32 {eps} to float')}")
        factor = splat(e, e.op(f"fdiv float 1.0, {e.op(f'call float @llvm.sqrt.f32(float {kept})')}"), self.lanes)

        def scale(column: str) -> None:
            normed = e.op(f"fmul {vector} {self.load(e, x, column)}, {factor}")
            weight = self.load(e, words["weight"], column)
            self.store(e, e.op(f"fmul {vector} {normed}, {weight}"), out, column)

        counted(e, "scaled", "0", width, self.lanes, scale)


class Wide(RowStep):
    """A row as fp32."""

    names, pointers, apart = ("x", "out", "width"), 2, 1

    def emit(self, e: Emitter, words: dict[str, str]) -> None:
        x = self.row(e, words["x"], words["width"])
        out = e.address(words["out"], e.op(f"mul i64 %index, {words['width']}"), "float")
        n = self.lanes

        def some(column: str) -> None:
            places = [e.op(f"add i64 {column}, {n * i}") for i in range(self.apart)]
            vectors = [self.load(e, x, place) for place in places]
            if self.apart == 2:
                vectors = [e.shuffle(self.vector, range(first, 2 * n, 2), *vectors) for first in range(2)]
            for place, vector in zip(places, vectors, strict=True):
                e.do(f"store {self.vector} {vector}, ptr {e.address(out, place, 'float')}, align 4")

        counted(e, "columns", "0", words["width"], n * self.apart, some)


class Apart(Wide):
    """A row as fp32, by twos: first every number with an even place, then the others."""

    apart = 2


class Mix(RowStep):
    """Sums of rows times scales."""

    names = ("x", "scales", "out", "width", "summed")

    def emit(self, e: Emitter, words: dict[str, str]) -> None:
        width, summed = words["width"], words["summed"]
        first, out = e.op(f"mul i64 %index, {summed}"), self.row(e, words["out"], width)

        def columns(column: str) -> None:
            def add(place: str, sums: Sequence[str]) -> list[str]:
                index = e.op(f"add i64 {first}, {place}")
                scale = e.op(f"load float, ptr {e.address(words['scales'], index, 'float')}, align 4")
                numbers = self.load(e, self.row(e, words["x"], width, index), column)
                return [e.fma(self.vector, numbers, splat(e, scale, self.lanes), sums[0])]

            (total,) = counted(e, "add", "0", summed, 1, add, [(self.vector, "zeroinitializer")])
            self.store(e, total, out, column)

        counted(e, "columns", "0", width, self.lanes, columns)


class EachNumber(RowStep):
    """A row whose numbers are made of those at their places in other rows. names: these rows, `out`, and widths."""

    def emit(self, e: Emitter, words: dict[str, str]) -> None:
        apart = words.get("apart", words["width"])
        *inputs, out = (
            self.row(e, words[name], apart if name == "other" else words["width"])
            for name in self.names[: self.pointers]
        )

        def column(place: str) -> None:
            self.store(e, self.made(e, *(self.load(e, row, place) for row in inputs)), out, place)

        counted(e, "columns", "0", words["width"], self.lanes, column)

    @abstractmethod
    def made(self, e: Emitter, *numbers: str) -> str:
        """A vector, of one of each row."""


class Add(EachNumber):
    """Sums of two rows; the other one is that at `index` · `apart` numbers."""

    names = ("x", "other", "out", "width", "apart")

    def made(self, e: Emitter, *numbers: str) -> str:
        return e.op(f"fadd {self.vector} {', '.join(numbers)}")


class Rotation(RowStep):
    """The rotation of a head."""

    names = ("x", "cos", "sin", "out", "width", "heads")
    pointers = 4

    def emit(self, e: Emitter, words: dict[str, str]) -> None:
        width, vector = words["width"], self.vector
        half, row = e.op(f"lshr i64 {width}, 1"), e.op(f"udiv i64 %index, {words['heads']}")
        x, out = (self.row(e, words[name], width) for name in ("x", "out"))
        cos, sin = (self.row(e, words[name], width, row) for name in ("cos", "sin"))

        def pair(column: str) -> None:
            behind = e.op(f"add i64 {column}, {half}")
            first, second = (self.load(e, x, place) for place in (column, behind))
            for place, value, other in ((column, first, e.op(f"fneg {vector} {second}")), (behind, second, first)):
                turned = self.rounded(e, e.op(f"fmul {vector} {value}, {self.load(e, cos, place)}"))
                across = self.rounded(e, e.op(f"fmul {vector} {other}, {self.load(e, sin, place)}"))
                self.store(e, e.op(f"fadd {vector} {turned}, {across}"), out, place)

        counted(e, "pairs", "0", half, self.lanes, pair)


class Silu(EachNumber):
    """silu of each number."""

    names: tuple[str, ...] = ("x", "out", "width")
    pointers = 2

    def made(self, e: Emitter, *numbers: str) -> str:
        return e.op(f"fdiv {self.vector} {numbers[0]}, {sigmoid_divisor(e, numbers[0], self.lanes)}")


class Gate(Silu):
    """silu(gate) · up."""

    names, pointers = ("gate", "up", "out", "width"), 3

    def made(self, e: Emitter, *numbers: str) -> str:
        return e.op(f"fmul {self.vector} {super().made(e, numbers[0])}, {numbers[1]}")


class ClampedGate(Gate):
    """gpt-oss's: min(gate, L) · sigmoid(S · min(gate, L)) · (up + 1), where `up` is between -L and L."""

    def made(self, e: Emitter, *numbers: str) -> str:
        (gate, up), vector, n = numbers, self.vector, self.lanes
        gate = at_most(e, gate, LARGEST, n)
        up = at_least(e, at_most(e, up, LARGEST, n), -LARGEST, n)
        divisor = sigmoid_divisor(e, e.op(f"fmul {vector} {gate}, {of_all(SHARPNESS)}"), n)
        raised = e.op(f"fadd {vector} {up}, {of_all(1.0)}")
        return e.op(f"fmul {vector} {e.op(f'fdiv {vector} {gate}, {divisor}')}, {raised}")
