"""A CUDA device that is only pretended, so that what would fail on a real one fails here: tensors that say they lie on
`cuda:0`, lie in host memory, and refuse whatever CUDA refuses, above all tensors of the host among them.

What it does not show: order. Everything is done at once, whatever its stream; and kernels are the CPU's.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offspec.loaders import small_transfers
from offspec.model import cuda_graphs as graphs

CUDA = torch.device("cuda:0")
TOTAL_BYTES = 24 * 2**30
aten = torch.ops.aten
# What may be given tensors of both: copies, and indices, which are moved to the indexed tensor's device.
BETWEEN = {aten.copy_.default, aten._to_copy.default, aten._copy_from.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default}


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
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def held(value: Any) -> Any:
    return value.held if isinstance(value, Pretended) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those among an operation's arguments, lists and tuples of which may be nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An operation's arguments or results, each of them changed."""
    return type(value)(mapped(change, each) for each in value) if type(value) in (list, tuple) else change(value)


@cache
def is_composite(func: Any) -> bool:
    """Whether it consists of other operations, on every device."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """As CUDA's kernel would do it, or refuse to."""
    tensors = list(tensors_in((args, *kwargs.values())))
    there = [value for value in tensors if isinstance(value, Pretended)]
    wanted = kwargs.get("device")
    goes_there = torch.device(wanted).type == "cuda" if wanted is not None else bool(there)
    if there:
        if is_composite(func):  # in inference mode torch leaves it to us
            with Pretence():
                return func.decompose(*args, **kwargs)
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
    kwargs = {
        name: torch.device("cpu") if name == "device" and value is not None else value for name, value in kwargs.items()
    }
    kwargs.pop("pin_memory", None)
    if str(func) == "bitsandbytes.dequantize_4bit.out":  # which there is for CUDA only
        return dequantise(*args, **kwargs)
    if str(func) == "aten.mm.dtype":  # which there is for CUDA only
        return Pretended(held(args[0]).to(args[2]) @ held(args[1]).to(args[2]))
    out = func(*mapped(held, args), **{name: mapped(held, value) for name, value in kwargs.items()})
    known = {id(value.held): value for value in there}  # what is written to is given back itself

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Pretended):
            return value
        if id(value) in known:
            return known[id(value)]
        return Pretended(value) if goes_there else value

    return mapped(wrap, out)


def dequantise(
    codes: Tensor, scales: Tensor, blocksize: int, quant_type: str, shape: Any, dtype: torch.dtype, out: Pretended
) -> None:
    """By the CPU's kernel, for which, unlike CUDA's, rows have to be whole blocks."""
    blocks = (scales.numel(), blocksize)
    values = torch.ops.bitsandbytes.dequantize_4bit(held(codes), held(scales), blocksize, quant_type, blocks, dtype)
    out.held.copy_(values.view(-1)[: out.numel()].view(out.shape))


class Pretence(TorchDispatchMode):
    """For what makes tensors of nothing; of one thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Stream:
    def __init__(self, device: Any = None, **options: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)

    def synchronize(self) -> None: ...


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


def build_guard(folder: Path) -> Path:
    """What switches between devices, and a build of torch for CPUs lacks; it does nothing.

    Raises OSError without a compiler.
    """
    source, library, torch_folder = folder / "guard.cpp", folder / "guard.so", Path(torch.__file__).parent
    source.write_text(GUARD, encoding="utf-8")
    command = [
        *("g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)),
        f"-I{torch_folder / 'include'}",
    ]
    subprocess.run([*command, f"-L{torch_folder / 'lib'}", "-lc10"], check=True, capture_output=True)
    return library


@contextmanager
def pretended_cuda(guard: Path) -> Iterator[None]:
    """While it lasts there is a CUDA device; the process is spoilt for others afterwards. guard: from `build_guard`."""
    torch.ops.load_library(guard)
    main, properties = Stream(), SimpleNamespace(name="Pretended", total_memory=TOTAL_BYTES, major=9, minor=0)
    registered = SimpleNamespace(cudaHostRegister=lambda *args: 0, cudaHostUnregister=lambda *args: 0)
    changes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: main,
        "default_stream": lambda device=None: main,
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: None,
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
        "cudart": lambda: registered,
    }
    run_thread, make_tensor = threading.Thread.run, torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        """Which asks no mode where it is to lie."""
        return make_tensor(data, **options).to(device or "cpu")

    def run_pretending(thread: threading.Thread) -> None:
        with Pretence():
            run_thread(thread)

    with pytest.MonkeyPatch.context() as patch, Pretence():
        for name, value in changes.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(threading.Thread, "run", run_pretending)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(small_transfers, "page_locked", lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
        patch.setattr(
            small_transfers, "seen_by", lambda device, host: Pretended(host) if device.type == "cuda" else host
        )
        patch.setattr(graphs, "page_locked", small_transfers.page_locked)
        patch.setattr(graphs, "seen_by", small_transfers.seen_by)
        patch.setattr(graphs, "CudaRecorder", lambda device: graphs.as_it_is)
        patch.setattr(small_transfers, "_transfers", {})
        patch.setattr(torch.cuda.nvtx, "range", lambda name: nullcontext())
        yield
