"""Runs work during a pass of the target: on a thread, and on a GPU in a separate stream."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Event, Thread

import torch

Work = Callable[[Callable[[], bool]], None]


@contextmanager
def in_background(work: Work, device: torch.device) -> Generator[None, None, None]:
    """Run `work(is_over)` while the body runs; at the end wait for it, and raise its exception, if any.

    `is_over()` becomes true when the body has ended; the work should return soon after. On a GPU the body must wait for
    its own kernels, and must not use tensors of the work before the end.
    """
    over = Event()
    errors: list[BaseException] = []
    stream = _stream(device)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))

    def run() -> None:
        try:
            if stream is None:
                work(over.is_set)
            else:
                with torch.cuda.stream(stream):
                    work(over.is_set)
        except BaseException as exc:  # noqa: BLE001 - raised after the body
            errors.append(exc)

    thread = Thread(target=run, name="offspec-draft", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)
    if errors:
        raise errors[0]


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """One stream per device; the work and the main stream use the work's tensors alternately.

    Its kernels come first: they are small, and would otherwise wait behind each of the pass's.
    """
    if device.type != "cuda":
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return _streams[device]
