"""What a test leaves in its process is told, and set back where that can be done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from . import leftovers
from .leftovers import ProcessState

Leave = Callable[[ExitStack, Path], object]


def leave_thread(after: ExitStack, folder: Path) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="offspec-left")
    thread.start()
    after.callback(thread.join)
    after.callback(end.set)


def leave_process(after: ExitStack, folder: Path) -> None:
    process = after.enter_context(subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE))
    after.callback(process.kill)


def drop(after: ExitStack, folder: Path) -> None:
    """What nobody refers to is no leftover; nor is a thread that ends soon."""
    (folder / "dropped.bin").open("w")
    threading.Thread(target=threading.Event().wait, args=(0.1,)).start()


LEFT: dict[str, Leave] = {
    "thread 'offspec-left'": leave_thread,
    "left.bin": lambda after, folder: after.enter_context((folder / "left.bin").open("w")),
    "environment: changed LEFT_BEHIND": lambda *_: os.environ.update(LEFT_BEHIND="1"),
    "input()": leave_process,
    "working directory": lambda after, folder: os.chdir(folder),
    "torch's threads: was 1, is 3": lambda *_: torch.set_num_threads(3),
    "torch.float64": lambda *_: torch.set_default_dtype(torch.float64),
}


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_what_is_left_is_told_and_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessState.now()
    drop(ExitStack(), tmp_path)
    assert before.leftovers(tmp_path) == []
    monkeypatch.setattr(leftovers, "WAIT_S", 0.05)
    for told, leave in LEFT.items():
        with ExitStack() as after:
            leave(after, tmp_path)
            (found,) = before.leftovers(tmp_path)
            assert told in found
        assert before.leftovers(tmp_path) == [], told
