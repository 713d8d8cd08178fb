"""What the program says if memory runs out outside a plan, as it does under `ulimit -v`. It imports no torch."""

from __future__ import annotations

import errno
import re

from offspec.loaders.machine.hardware import address_space_limit
from offspec.loaders.units import format_size

from ..errors import MemoryLimitError

REMEDY = "use a smaller `context`, a lower `ram` or a smaller model"
# torch's allocator on CPUs, C++, Python's threads, and the loader of shared libraries.
_MESSAGES = re.compile(
    r"DefaultCPUAllocator|bad_alloc|can't start new thread|failed to map segment|cannot allocate memory", re.IGNORECASE
)


def memory_error(exc: Exception) -> MemoryLimitError | None:
    """The error to show if `exc` says that the system gave no memory; None for any other."""
    is_lack = isinstance(exc, OSError) and exc.errno == errno.ENOMEM
    is_told = isinstance(exc, (RuntimeError, ImportError)) and _MESSAGES.search(str(exc)) is not None
    if not (is_lack or is_told or isinstance(exc, MemoryError)):
        return None
    *_, reason = str(exc).strip().partition("DefaultCPUAllocator: ")
    reason = " ".join((reason or str(exc) or type(exc).__name__).split())
    limit = address_space_limit()
    where = "close other programs" if limit is None else f"ulimit -v allows {format_size(limit)} of addresses: raise it"
    return MemoryLimitError(f"the system gives no more memory ({reason}); {where}, or {REMEDY}")
