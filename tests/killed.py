"""A process that is killed in the middle of its work: a fork of this one, which has imported all that there is."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

import torch


def kill() -> None:
    """End the process that calls this as `kill -9` would."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(act: Callable[[], object]) -> None:
    """Run `act`, which calls `kill`, in a process of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # none of this process's threads is needed there
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(300)
            torch.set_num_threads(1)
            act()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it came to its end"
    assert os.WTERMSIG(status) == signal.SIGKILL
