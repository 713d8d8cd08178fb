"""Errors of other libraries that say that the system gave no memory, and others that do not."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from offspec.planning import system_memory
from offspec.planning.system_memory import memory_error

from ...refusals import check_message


def failed_allocation() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("exc", "words"),
    [
        (MemoryError(), ("MemoryError",)),
        (MemoryError("cannot map 4096 bytes"), (4096,)),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), (os.strerror(errno.ENOMEM),)),
        (RuntimeError("can't start new thread"), ("thread",)),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ("libtorch_cpu.so",)),
        (failed_allocation(), (2**60,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_lack_of_memory_is_told_with_the_remedy(
    exc: Exception, words: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, remedy in ((None, "close"), (5 * 2**30, "ulimit -v")):
        monkeypatch.setattr(system_memory, "address_space_limit", lambda limit=limit: limit)
        check_message(str(memory_error(exc)), "memory", "`context`", remedy, *words)


@pytest.mark.parametrize(
    "exc", [RuntimeError("shapes differ"), OSError(errno.ENOENT, "gone"), ValueError("bad_alloc"), ImportError("gone")]
)
def test_other_errors_are_not_taken_for_it(exc: Exception) -> None:
    assert memory_error(exc) is None
