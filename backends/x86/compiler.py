"""LLVM's intermediate representation (IR) as text → functions of this process, and threads to run them on.

llvmlite brings LLVM and needs no compiler on the user's machine. Threads are those of torch's own OpenMP, where torch
has it under GNU's interface (Linux), since a second set of threads would wait for the first; else they are our own.
"""

from __future__ import annotations

import ctypes
import re
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from .kept_code import kept_code
from .processor import instructions

Worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CALL = re.compile(r"call (?:reassoc )?(<[^>]*>|\w+) @(llvm\.[\w.]+)\((.*)\)$", re.MULTILINE)
_CONSTANT = re.compile(r"splat \([^)]*\)|<(?:i\d+|float) [^>]*>")


class Emitter:
    """Lines of one IR function; each `op` defines a new name."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._count = 0

    def op(self, text: str) -> str:
        """An instruction with a result; returns the result's name."""
        self._count += 1
        self._lines.append(f"  %v{self._count} = {text}")
        return f"%v{self._count}"

    def do(self, text: str) -> None:
        """An instruction without a result, or with a name of its own."""
        self._lines.append(f"  {text}")

    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")

    def address(self, base: str, offset: str, item: str = "i8") -> str:
        """The address of item number `offset` behind `base`."""
        return self.op(f"getelementptr {item}, ptr {base}, i64 {offset}")

    def i64(self, operation: str, left: str, right: str | int) -> str:
        """An operation on two 64-bit numbers, such as addresses."""
        return self.op(f"{operation} i64 {left}, {right}")

    def least(self, left: str, right: str) -> str:
        """The smaller one of two 64-bit numbers."""
        return self.op(f"call i64 @llvm.smin.i64(i64 {left}, i64 {right})")

    def fma(self, vector: str, one: str, other: str, total: str) -> str:
        """total + one · other, rounded once. vector: LLVM's type of these fp32 numbers."""
        lanes = vector[1:].split()[0]
        return self.op(f"call {vector} @llvm.fma.v{lanes}f32({vector} {one}, {vector} {other}, {vector} {total})")

    def shuffle(self, kind: str, places: Iterable[int], one: str, other: str = "poison") -> str:
        """Numbers at these places of two vectors of a kind; those of the second one follow the first one's."""
        lanes = [f"i32 {place}" for place in places]
        return self.op(f"shufflevector {kind} {one}, {kind} {other}, <{len(lanes)} x i32> <{', '.join(lanes)}>")

    def words(
        self, start: str, names: Sequence[str], pointers: Collection[str] = (), counted: Collection[str] = ()
    ) -> dict[str, str]:
        """The 64-bit words from `start` on as %name each; of those that threads count up, the addresses."""
        for index, name in enumerate(names):
            place = f"getelementptr i64, ptr {start}, i64 {index}"
            if name in counted:
                self.do(f"%{name} = {place}")
            else:
                self.do(f"%{name} = load {'ptr' if name in pointers else 'i64'}, ptr {self.op(place)}, align 8")
        return {name: f"%{name}" for name in names}

    def function(self, head: str) -> str:
        """The whole function; head: its define without the body.

        LLVM would copy internal functions to where they are called, which only takes time: they are long.
        """
        attribute = " noinline" if head.startswith("define internal") else ""
        return f"{head}{attribute} {{\n" + "\n".join(self._lines) + "\n}\n"


class Kernel(ABC):
    """A function `worker` of one address; compiled at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: Callable[..., None] | None = None

    @property
    @abstractmethod
    def source(self) -> str:
        """The module that is compiled."""

    def prepare(self) -> Callable[..., None]:
        """The function; compile it, if it is not compiled yet."""
        with self._lock:
            if self._compiled is None:
                self._compiled = compile_ir(self.source, "worker")
            return self._compiled


def compile_ir(text: str, name: str) -> Callable[..., None]:
    """The function `name` (of one address: a `Worker`) of a module, for `instructions()` only.

    text: without declarations of LLVM's own functions. LLVM takes tenths of a second, unless the user's cache has the
    code. Raises RuntimeError where LLVM does not accept the text.
    """
    from llvmlite import __version__, binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features()
    if "avx512" not in instructions():
        features.update({feature: False for feature in features if feature.startswith("avx512")})
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features.flatten(), opt=3, jit=True
    )

    def compiled() -> bytes:
        module = binding.parse_assembly(text)
        module.verify()
        # All of -O2 would take twice as long, for kernels that are no faster: loops are unrolled and vectors already.
        passes = binding.create_new_function_pass_manager()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options())
        for function in module.functions:
            if not function.is_declaration:
                passes.run(function, builder)
        code: bytes = machine.emit_object(module)
        return code

    text += declarations(text)
    key = "\n".join((__version__, str(binding.llvm_version_info), cpu, features.flatten(), text))
    code = binding.ObjectFileRef.from_data(kept_code(key, compiled))
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(code)
    engine.finalize_object()
    worker = Worker(engine.get_function_address(name))
    worker.engine = engine  # type: ignore[attr-defined]  # lives as long as the function
    return worker


def declarations(text: str) -> str:
    """Of LLVM's functions that a module calls."""
    declared = dict[str, str]()
    for result, function, operands in _CALL.findall(text):
        kinds = [each.rsplit(" ", 1)[0] for each in _CONSTANT.sub("constant", operands).split(", ")]
        declared[function] = f"declare {result} @{function}({', '.join(kinds)})\n"
    return "".join(declared.values())


class Launch(NamedTuple):
    """What `run_on_threads` was told; words: before threads changed them."""

    worker: Callable[..., None]
    words: array[int]
    num_threads: int


class _Launches(threading.local):
    """kept: this thread's launches, while somebody wants to know them."""

    kept: list[Launch] | None = None


LAUNCHES = _Launches()


def is_recording() -> bool:
    """Whether this thread's launches are kept, so that kernels should do what torch would do else."""
    return LAUNCHES.kept is not None


def run_on_threads(worker: Callable[..., None], words: Sequence[int], num_threads: int) -> None:
    """Run `worker` on the address of 64-bit `words`, on `num_threads` threads at a time, torch's if possible.

    The threads share the words, which are a copy.
    """
    copied, openmp = array("q", words), gnu_openmp()
    if LAUNCHES.kept is not None:
        LAUNCHES.kept.append(Launch(worker, array("q", copied), num_threads))
    job, _ = copied.buffer_info()
    if num_threads == 1:
        worker(job)
    elif openmp is not None:
        openmp.parallel(worker, job, num_threads, 0)
    else:
        list(_pool(num_threads).map(worker, [job] * num_threads))


@dataclass(frozen=True)
class OpenMP:
    """Functions of an OpenMP library. number_of, wait: addresses of those that give a thread's number in its team, and
    wait for all of the team.
    """

    parallel: Callable[..., None]
    number_of: int
    wait: int


@cache
def gnu_openmp() -> OpenMP | None:
    """The OpenMP library that torch loaded; None where there is none of GNU's interface."""
    try:
        library = ctypes.CDLL(None)
        parallel, others = library.GOMP_parallel, (library.omp_get_thread_num, library.GOMP_barrier)
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = (Worker, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return OpenMP(parallel, *map(address_of, others))


def address_of(function: Any) -> int:
    """Of a function's code."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernel")
