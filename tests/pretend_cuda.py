"""A CUDA device that is only pretended, so that what would fail on a real one fails here: tensors that say they lie on
`cuda:0`, lie in host memory, and refuse whatever CUDA refuses, above all tensors of the host among them.

`pretended_cuda` yields its `Machine` (`pretend_streams`), which knows what is ordered and what the host waits for.
What it does not show: time; CUDA's kernels, because they are the CPU's; and what numpy or a file writes to memory that
the device reads, except by the bytes that a late copy then brings.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offspec.backends import expert_table, gpu
from offspec.backends.weights import ALIGNMENT
from offspec.backends.x86.processor import using
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.accelerators.cuda import Cuda
from offspec.loaders.streaming import small_transfers

from . import pretended_rows
from .happens_before import place_here
from .machines import AVX2, PROCESSORS, THIS
from .pretend_capture import CheckingRecorder
from .pretend_streams import Event, Machine, Stream

CUDA = torch.device("cuda:0")
TOTAL_BYTES = 24 * 2**30
aten = torch.ops.aten
# What may be given tensors of both: copies, and indices, which are moved to the indexed tensor's device.
BETWEEN = {aten.copy_.default, aten._to_copy.default, aten._copy_from.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default}
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
# Their results, or the sizes of these, are the host's to know.
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
machine = Machine()  # of the process; `pretended_cuda` makes a new one


class Pretended(Tensor):
    """A tensor that says it is on CUDA. `held`: the one on the host that it stands for."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        with torch.inference_mode(False):  # torch will not have views of other tensors that are inference tensors
            made: Pretended = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=CUDA,
            )
        made.held = held
        return made

    def __repr__(self, **options: Any) -> str:
        return f"Pretended({self.held!r})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def held(value: Any) -> Any:
    return value.held if isinstance(value, Pretended) else value


def tensors_in(value: Any) -> list[Tensor]:
    """Those among an operation's arguments, lists and tuples of which may be nested."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, (list, tuple)) else []


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An operation's arguments or results, each of them changed."""
    return type(value)(mapped(change, each) for each in value) if type(value) in (list, tuple) else change(value)


name_of = cache(str)  # of an operation
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """Its operations, if it consists of others on every device: in C++ as on CUDA, for torch's in Python take 2 s to
    import what they ask of its compiler.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
        return partial(func._op_dk, COMPOSITE)
    return func.py_kernels.get(COMPOSITE)  # type: ignore[no-any-return]


@cache
def writes(func: Any) -> tuple[bool, dict[str, bool]]:
    """Whether an operation only makes views, and which of its arguments it writes to."""
    arguments = {each.name: each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments}
    makes_views = any(each.alias_info is not None for each in func._schema.returns) and not any(arguments.values())
    return makes_views, arguments


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """As CUDA's kernel would do it, or refuse to."""
    tensors = tensors_in((args, *kwargs.values()))
    there = [value for value in tensors if isinstance(value, Pretended)]
    wanted = kwargs.get("device")
    goes_there = torch.device(wanted).type == "cuda" if wanted is not None else bool(there)
    if there:
        if (parts := decomposition(func)) is not None:  # in inference mode torch leaves it to us
            with Pretence():
                return parts(*args, **kwargs)
        strangers = [value for value in tensors if not isinstance(value, Pretended) and value.dim()]
        may_mix = func in BETWEEN or (func in INDEXING and isinstance(args[0], Pretended))
        if strangers and not may_mix:
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {func} of {[t.device for t in tensors]}"
            )
    if func is aten._fused_sdp_choice.default:
        return 0  # by plain products, which every device can
    if func is aten.copy_.default:
        goes_there = isinstance(args[0], Pretended)
    operation = Operation(func, args, kwargs, tensors, goes_there)
    if func is aten.copy_.default and operation.comes_later:
        return operation.copy_later()
    operation.begin()
    if goes_there and (error := machine.last_error()):
        raise RuntimeError(f"CUDA error {error} of an earlier call")
    kwargs = {
        name: torch.device("cpu") if name == "device" and value is not None else value for name, value in kwargs.items()
    }
    kwargs.pop("pin_memory", None)
    if name_of(func) == "bitsandbytes.dequantize_4bit.out":  # which there is for CUDA only
        out = dequantise(*args, **kwargs)
    elif name_of(func) == "aten.mm.dtype":  # which there is for CUDA only
        out = held(args[0]).to(args[2]) @ held(args[1]).to(args[2])
    else:
        out = func(*mapped(held, args), **{name: mapped(held, value) for name, value in kwargs.items()})
    operation.end(out)
    known = {id(value.held): value for value in there}  # what is written to is given back itself

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Pretended):
            return value
        if id(value) in known:
            return known[id(value)]
        return Pretended(value) if goes_there else value

    return mapped(wrap, out)


class Operation:
    """What the machine has to know of an operation on the current stream, or on the host."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], goes_there: bool) -> None:
        """tensors: all of the arguments'. goes_there: whether its results are on the device."""
        self.func, self.name, self._args, self._kwargs = func, name_of(func), args, kwargs
        self._tensors, self._goes_there = tensors, goes_there
        self._of_host = [value for value in tensors if not isinstance(value, Pretended)]
        self.is_on_device = goes_there or len(self._of_host) < len(tensors)
        self._stream = machine.current

    @cached_property
    def _is_between(self) -> bool:
        """Whether it copies between the host and the device, indices among them."""
        if not any(value.numel() for value in self._tensors):
            return False
        if self.func in BETWEEN:
            source = self._args[1 if self.func is aten.copy_.default else 0]
            return self._goes_there != isinstance(source, Pretended)
        return self.func in INDEXING and self.is_on_device and bool(self._of_host)

    @property
    def comes_later(self) -> bool:
        """Whether neither the host nor the device waits for this copy: between page-locked memory and the device."""
        is_asked = self._kwargs.get("non_blocking", len(self._args) > 2 and self._args[2])
        return bool(is_asked) and self._is_between and all(machine.is_locked(value) for value in self._of_host)

    @cached_property
    def _waits(self) -> bool:
        if not self.is_on_device:
            return False
        if self.func in (aten.index.Tensor, aten.index_put_.default) and self._by_mask:
            return True
        return self._is_between or (self.func in WAITING)

    @property
    def _by_mask(self) -> bool:
        """Whether it has to count where an index is true. One value for all such places is another kernel's."""
        if self.func is aten.index_put_.default and self._args[2].numel() == 1:
            return False
        return any(value is not None and value.dtype in (torch.bool, torch.uint8) for value in self._args[1])

    def begin(self) -> None:
        """Before it is done: what has to be over by then, and what is forbidden now."""
        if self._stream.late and self.is_on_device:
            machine.before([held(value) for value in self._tensors])
        if machine.recording.forbid is not None and self.is_on_device:
            self._check_recorded()
        if self.func in PRODUCTS and any(value.data_ptr() % ALIGNMENT for value in self._tensors if value.numel()):
            machine.misaligned.add(place_here(1).function)

    def _check_recorded(self) -> None:
        assert machine.recording.forbid is not None
        if self._of_host:
            machine.recording.forbid(f"{self.name} takes data of the host")
        if self._waits:
            machine.recording.forbid(f"the host waits ({self.name})")

    def end(self, out: Any) -> None:
        """After it is done, and before anyone else sees the results."""
        touched = self._touched(out)
        if not self.is_on_device:
            for value, is_write in touched:
                if machine.is_locked(value):
                    machine.order.host_access(self.name, value, is_write=is_write)
            return
        if touched:
            machine.order.access(self._stream.number, self.name, touched)
        if machine.recording.note is not None:
            machine.recording.note(self.name, self._args, self._kwargs, tensors_in(out))
        if self._goes_there and self._is_between:
            machine.count_copy()
        if self._waits:
            machine.host_waits(self.name, self._stream.clock)

    def copy_later(self) -> Tensor:
        target, source = self._args[:2]
        if machine.recording.forbid is not None:
            machine.recording.forbid(f"{self.name} copies between the host and the device")
        self.begin()
        machine.order.access(self._stream.number, self.name, self._touched(None))
        if self._goes_there:
            machine.count_copy()
            machine.copy_later(target.held, source)
        else:  # as it is now: what the stream does to it later does not come before
            machine.copy_later(target, source.held.clone())
        return target  # type: ignore[no-any-return]

    def _touched(self, out: Any) -> list[tuple[Tensor, bool]]:
        """Tensors of the host that stand for what is read (False) and written (True)."""
        makes_views, written = writes(self.func)
        if makes_views:
            return []
        named = [*zip(written, self._args, strict=False), *self._kwargs.items()]
        given = [(value, written[name]) for name, values in named for value in tensors_in(values)]
        if self._is_between:
            for value in self._of_host:
                machine.order.memory(value)  # before a stream is taken for the one that allocated it
        elif self.is_on_device:  # a kernel is given a number of the host's by its value
            given = [(value, is_write) for value, is_write in given if isinstance(value, Pretended)]
        views = [(held(value), is_write) for value, is_write in given]
        if self.func is aten.index_copy_.default:
            views[0] = self._indexed(views[0][0]), True
        before = {value.untyped_storage()._cdata for value, _ in views}
        made = [value for value in map(held, tensors_in(out)) if value.untyped_storage()._cdata not in before]
        if not self._goes_there:
            return views
        if self.func in EMPTY:
            for value in made:
                machine.order.memory(value, self._stream.number)
            return []
        return views + [(value, True) for value in made]

    def _indexed(self, table: Tensor) -> Tensor:
        """What `index_copy_` writes of a table, where its indices follow each other; otherwise the table."""
        dim, indices = self._args[1], held(self._args[2])
        first, number = int(indices[0]), len(indices)
        is_range = torch.equal(indices, torch.arange(first, first + number))
        return table.narrow(dim, first, number) if is_range else table


def dequantise(
    codes: Tensor, scales: Tensor, blocksize: int, quant_type: str, shape: Any, dtype: torch.dtype, out: Pretended
) -> None:
    """By the CPU's kernel, for which, unlike CUDA's, rows have to be whole blocks."""
    blocks = (scales.numel(), blocksize)
    values = torch.ops.bitsandbytes.dequantize_4bit(held(codes), held(scales), blocksize, quant_type, blocks, dtype)
    out.held.copy_(values.view(-1)[: out.numel()].view(out.shape))


class Pretence(TorchDispatchMode):
    """For what makes tensors of nothing; of one thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's compiler, which takes 2 s to import, is not asked to leave `__torch_dispatch__` alone."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


def build_guard(library: Path) -> None:
    """What switches between devices, and a build of torch for CPUs lacks; it does nothing.

    Raises OSError without a compiler.
    """
    torch_folder, made = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
    source = made.with_suffix(".cpp")
    source.write_text(GUARD, encoding="utf-8")
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(made), f"-I{torch_folder / 'include'}"]
    subprocess.run([*command, f"-L{torch_folder / 'lib'}", "-lc10"], check=True, capture_output=True)
    made.replace(library)  # another process may be building it, too


def in_own_process(module: str, folder: Path) -> Any:
    """What `python -m module folder` prints as JSON, with the guard in the folder. Skips where that cannot be built."""
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("pretending takes a C++ compiler, and Linux")
    library = Path(os.environ["KERNELS_OF_TESTS"]).with_name("guard.so")
    if not library.exists():
        build_guard(library)
    (folder / library.name).symlink_to(library)
    command = [sys.executable, "-m", module, str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def pretended_cuda(guard: Path, *, late: bool = True) -> Iterator[Machine]:
    """While it lasts there is a CUDA device; the process is spoilt for others afterwards.

    guard: from `build_guard`. late: whether copies come as late as they may. The host has vectors of 8, which divide
    the models' rows: a kernel of the host that is taken for the device's rows cannot hide behind their size.
    """
    global machine
    torch.ops.load_library(guard)
    gc.collect()
    gc.freeze()  # the engine collects garbage at each start, and would look at all that is imported
    made = machine = Machine(late=late)
    properties = SimpleNamespace(name="Pretended", total_memory=TOTAL_BYTES, major=9, minor=0)
    changes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "Stream": partial(Stream, machine=made),
        "Event": partial(Event, machine=made),
        "current_stream": lambda device=None: made.current,
        "default_stream": lambda device=None: made.default,
        "stream": made.on,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: made.synchronize(),
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (TOTAL_BYTES, TOTAL_BYTES),
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "memory_stats": lambda device=None: {"num_alloc_retries": 0},
        "reset_peak_memory_stats": lambda device=None: None,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: properties.name,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=made.lock_memory, cudaHostUnregister=made.unlock_memory),
    }
    run_thread, make_tensor = threading.Thread.run, torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        """Which asks no mode where it is to lie."""
        return make_tensor(data, **options).to(device or "cpu")

    def run_pretending(thread: threading.Thread) -> None:
        with Pretence():
            run_thread(thread)

    def page_locked(cuda: Cuda, nbytes: int) -> Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        made.lock_memory(memory.data_ptr(), nbytes)
        made.order.memory(memory)
        finalize(memory.untyped_storage(), made.locked.pop, memory.data_ptr(), None).atexit = False
        return memory

    with pytest.MonkeyPatch.context() as patch, Pretence(), using(PROCESSORS[AVX2] & PROCESSORS[THIS]):
        for name, value in changes.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(threading.Thread, "run", run_pretending)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(Cuda, "page_locked", page_locked)
        patch.setattr(Cuda, "view_of", lambda cuda, host: Pretended(host))
        patch.setattr(Cuda, "recorder", lambda cuda: CheckingRecorder(made))
        patch.setattr(small_transfers, "_transfers", {})
        patch.setattr(gpu, "row_kernels", lambda: pretended_rows)
        patch.setattr(
            expert_table, "expert_kernels", lambda: None
        )  # Triton's need a real device; see `pretend_experts`
        accelerator_of.cache_clear()  # their streams are another machine's
        patch.setattr(torch.cuda.nvtx, "range", lambda name: nullcontext())
        yield made
