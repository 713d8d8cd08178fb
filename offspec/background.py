"""Work that goes on beside a pass of the target: on a thread, and on a GPU on a stream of its own.

Knows nothing of what the work is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Event, Thread

import torch

Work = Callable[[Callable[[], bool]], None]


@contextmanager
def in_background(work: Work, device: torch.device) -> Generator[None, None, None]:
    """Run `work(is_over)` while the body runs, and wait for it at the end; what it raised is raised there.

    `is_over()` turns true when the body has ended; the work should return soon after. On a GPU the body has to wait for
    its own kernels, and nothing that the work makes may be touched before the end.
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
        except BaseException as exc:  # noqa: BLE001 - raised where the body ends
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
    """One for each device; tensors that the work leaves behind are used on it and on the main stream by turns."""
    if device.type != "cuda":
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
