"""A Ray cluster whose nodes are processes of this machine, as small as Ray allows."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar
from unittest.mock import patch

import psutil
import pytest

Found = TypeVar("Found")
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
LONG_S = 300.0  # what is waited for at most, where a test would else hang


class Nodes:
    """The nodes of a cluster. The first one is the head, without CPUs: it gets no engine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        self.nodes = list[psutil.Process]()  # without the head

    @property
    def address(self) -> str:
        found: str = self._cluster.address
        return found

    def add(self, num_gpus: int = 0, **env: str) -> psutil.Process:
        """The main process of a new node with one CPU. env: its environment, where it is not this process's.

        num_gpus: the node has none, but Ray starts what needs one.
        """
        with unchanged_process():
            node = self._cluster.add_node(**NODE, num_cpus=1, num_gpus=num_gpus, env_vars=env, wait=False)
        self._cluster._wait_for_node(node, timeout=LONG_S)  # 30 s by default, too short for a busy machine
        self.nodes.append(psutil.Process(node.all_processes["raylet"][0].process.pid))
        return self.nodes[-1]

    def kill(self, node: psutil.Process) -> None:
        """End a node by its process ids, the engine's too; Ray is not told."""
        self.nodes.remove(node)
        ended = [node, *node.children(recursive=True)]
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ended, LONG_S)

    def kill_head(self) -> None:
        for processes in self._cluster.head_node.all_processes.values():
            for each in processes:
                each.process.kill()

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Takes back what Ray changes in the process: its search path, its environment, its handler of SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    with patch.dict(os.environ), patch.object(sys, "path", [*sys.path]):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def nodes() -> Iterator[Nodes]:
    """Ray leaves some files open, and warns of its own future."""
    with unchanged_process(), warnings.catch_warnings():
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'offspec[ray]'")
        warnings.simplefilter("ignore")
        cluster = Nodes()
        try:
            yield cluster
        finally:
            cluster.close()


def calls_of(node: psutil.Process, name: str) -> list[psutil.Process]:
    """The processes of a node that carry out a call, by Ray's name for it: `ray::Class.method`."""
    found = []
    for process in node.children(recursive=True):
        try:
            words: list[str] = process.cmdline()
        except psutil.Error:  # it has ended
            continue
        if words and words[0].startswith(f"ray::{name}"):
            found.append(process)
    return found


def wait_for(condition: Callable[[], Found]) -> Found:
    """Wait until `condition()` is true, and return it; fails after LONG_S."""
    end = time.monotonic() + LONG_S
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {LONG_S} s"
        time.sleep(0.05)
    return found
