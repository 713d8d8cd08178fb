"""Launches of kernels by a function of tensors, recorded once and repeated in one call.

What a layer does with one row takes less time than torch and Python need to ask for it. A recording keeps what each
launch was told (`run_on_threads`), and all memory that it named. To repeat it, threads go through the launches
themselves, and wait for each other behind each one, by the barrier of torch's own OpenMP.

This is right only if nothing but kernels computes on what the function was given. A recorder looks at each of torch's
operations meanwhile, and gives no recording if one of them does more than to allocate memory, or to view it. What an
operation makes of other tensors alone, such as a norm's weight in another dtype, is kept as it is, unless it is put
into memory that others use, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .compiler import LAUNCHES, Launch, address_of, compile_ir, gnu_openmp, run_on_threads

MOST_BYTES = 2**22  # that a recording keeps: more than one row of any model needs, and less than unpacked matrices take
Function = Callable[..., Sequence[Tensor]]

# A program is 64-bit words: the addresses of OpenMP's functions that give a thread's number and wait for all threads,
# and the number of launches. Then of each launch its function, the address of its words, and the number of its threads.
_PROGRAM_WORDS, _LAUNCH_WORDS = 3, 3
_RUN = f"""
define void @worker(ptr %program) {{
entry:
  %number_of = load ptr, ptr %program
  %at_wait = getelementptr i64, ptr %program, i64 1
  %wait = load ptr, ptr %at_wait
  %at_count = getelementptr i64, ptr %program, i64 2
  %count = load i64, ptr %at_count
  %number = call i32 %number_of()
  %thread = sext i32 %number to i64
  br label %launch
launch:
  %index = phi i64 [ 0, %entry ], [ %next, %done ]
  %before = mul i64 %index, {_LAUNCH_WORDS}
  %place = add i64 %before, {_PROGRAM_WORDS}
  %at_kernel = getelementptr i64, ptr %program, i64 %place
  %kernel = load ptr, ptr %at_kernel
  %at_words = getelementptr i64, ptr %at_kernel, i64 1
  %words = load ptr, ptr %at_words
  %at_threads = getelementptr i64, ptr %at_kernel, i64 2
  %threads = load i64, ptr %at_threads
  %takes_part = icmp slt i64 %thread, %threads
  br i1 %takes_part, label %run, label %done
run:
  call void %kernel(ptr %words)
  br label %done
done:
  call void %wait()
  %next = add i64 %index, 1
  %is_more = icmp slt i64 %next, %count
  br i1 %is_more, label %launch, label %end
end:
  ret void
}}
"""


@cache
def _runner() -> Callable[..., None]:
    return compile_ir(_RUN, "worker")


def can_record() -> bool:
    """Whether threads can wait for each other: where torch's OpenMP has GNU's interface."""
    return gnu_openmp() is not None


class Recording:
    """A function's launches. It repeats them for other numbers in tensors of the same shapes.

    addresses: of matrices that may be others of the same shape and format in each call.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        kept: Iterable[Tensor],
        addresses: Sequence[int] = (),
    ) -> None:
        self._inputs, self._outputs, self._kept = inputs, outputs, list(kept)
        starts, words = list[int](), array("q")
        for launch in launches:
            starts.append(len(words))
            words += launch.words
        self._original, self._words = words, array("q", words)
        places: dict[int, list[int]] = {address: [] for address in addresses}
        for at, word in enumerate(words):
            if word in places:
                places[word].append(at)
        self._patches = list(places.values())
        begin, _ = self._words.buffer_info()
        size, openmp = self._words.itemsize, gnu_openmp()
        assert openmp is not None
        program = [openmp.number_of, openmp.wait, len(launches)]
        for launch, start in zip(launches, starts, strict=True):
            program += (address_of(launch.worker), begin + size * start, launch.num_threads)
        self._program, self._workers = array("q", program), [launch.worker for launch in launches]
        self._num_threads = max(launch.num_threads for launch in launches)

    @property
    def nbytes(self) -> int:
        """Of the memory that it keeps."""
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self._kept}.values())

    def __call__(self, inputs: Sequence[Tensor], addresses: Sequence[int] = ()) -> list[Tensor]:
        """New tensors, as the function would return. addresses: of the matrices, in place of the first ones."""
        for buffer, given in zip(self._inputs, inputs, strict=True):
            buffer.copy_(given)
        for places, address in zip(self._patches, addresses, strict=True):
            for place in places:
                self._original[place] = address
        self._words[:] = self._original
        run_on_threads(_runner(), self._program, self._num_threads)
        return [each.clone() for each in self._outputs]


def record(
    function: Function, inputs: Sequence[Tensor], addresses: Sequence[int] = ()
) -> tuple[list[Tensor], Recording | None]:
    """What the function returns, and its recording; None if it cannot be recorded."""
    buffers = [each.clone() for each in inputs]
    watch = _Watch(buffers)
    before, LAUNCHES.kept = LAUNCHES.kept, []
    try:
        with watch:
            outputs = function(*buffers)
        launches = LAUNCHES.kept
    finally:
        LAUNCHES.kept = before
    results = [each.clone() for each in outputs]
    if watch.others or not launches or (addresses and watch.has_constants) or len(set(addresses)) < len(addresses):
        return results, None
    recording = Recording(launches, buffers, outputs, watch.kept, addresses)
    return results, recording if recording.nbytes <= MOST_BYTES else None


class _Watch(TorchDispatchMode):
    """Sees torch's operations. others: names of those that compute with what the function was given. has_constants:
    whether there were some that did not. kept: what was allocated or computed.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others, self.kept, self.has_constants = list[str](), list(inputs), False
        self._own = set(map(_memory, inputs))  # what depends on the inputs

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled by torch, whose compiler takes a second to import for this question."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = list(_tensors((*args, *(kwargs or {}).values())))
        made = list(_tensors((result,)))
        others = set(map(_memory, given))
        self.kept += [each for each in made if _memory(each) not in others]  # views of weights would keep these
        if "empty" in func.name():
            self._own.update(map(_memory, made))
        elif func._schema.is_mutable:
            self.others.append(func.name())
        elif any(_memory(each) in self._own for each in given):
            if not made or not all(_memory(each) in self._own for each in made):
                self.others.append(func.name())
        else:
            self.has_constants = True
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
