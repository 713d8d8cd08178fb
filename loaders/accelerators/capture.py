"""Records a small model's round, so that its kernels are launched at once, on the same memory; on CUDA, as a graph."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

Work = Callable[[], None]
Recorder = Callable[[Work], Work | None]  # gives what repeats the work; None if it cannot be recorded now


class CudaRecorder:
    """Records work as a CUDA graph, which launches all its kernels at once, on the same memory.

    All graphs share one pool of memory for intermediate tensors, so only one may run at a time.

    `torch.cuda.graph` would first wait for the whole device, with all layers that are being copied, and give back the
    memory that torch has cached, which is soon needed again. Neither is necessary: streams order the work.
    """

    TRIES = 2  # the second one with all memory that torch has cached: during a capture it gives none back

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Recorded kernels keep this priority: before those of a pass, see `Accelerator.urgent_stream`.
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # Keeps the pool alive: a pool without graphs cannot be used again.
        self._first: torch.cuda.CUDAGraph | None = None
        self._has_warned = False

    def __call__(self, work: Work) -> Work | None:
        """The recorded work, or the work itself, with a warning, if it cannot be captured.

        None outside the default stream, because recording would block the other streams.
        """
        main = torch.cuda.current_stream(self._device)
        if main != torch.cuda.default_stream(self._device):
            return None
        self._side.wait_stream(main)
        try:
            with torch.cuda.stream(self._side):  # it also makes the stream's device the current one
                work()  # libraries load kernels, choose among them and allocate workspaces, which cannot be captured
                graph = self._graph_of(work)
        finally:
            main.wait_stream(self._side)
        return work if graph is None else graph.replay

    def _graph_of(self, work: Work) -> torch.cuda.CUDAGraph | None:
        message = ""
        for _ in range(self.TRIES):
            try:
                return self._captured(work)
            except RuntimeError as exc:
                message = str(exc.__context__ or exc)  # the work's error comes before the capture's
            torch.cuda.empty_cache()  # outside the handler, whose traceback keeps the work's tensors alive
        if not self._has_warned:
            self._has_warned = True
            why = message.strip().partition("\n")[0]
            warnings.warn(f"CUDA cannot capture rounds of the draft, which are slower now: {why}", stacklevel=2)
        return None

    def _captured(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_garbage_collection():
                # thread_local: other threads may copy weights meanwhile, which is forbidden in a capture.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except BaseException:
            self._leave_pool()
            raise
        self._first = self._first or graph
        return graph

    def _leave_pool(self) -> None:
        """Tell torch's allocator that a capture has ended, if CUDA ended it: else it never gives memory back again."""
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        end = end or getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool")  # noqa: B009 - before torch 2.8
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # the capture was ended in good order
            end(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        if self._first is None:
            self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection may destroy events and graphs, which ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def as_it_is(work: Work) -> Work:
    """A `Recorder` that records nothing: the plain twin."""
    return work
