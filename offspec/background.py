"""Runs work during a pass of the target: on a thread, and on a GPU in `Accelerator.urgent_stream`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Event, Thread

import torch

from offspec.loaders.accelerators.accelerator import accelerator_of

Work = Callable[[Callable[[], bool]], None]


@contextmanager
def in_background(work: Work, device: torch.device) -> Generator[None, None, None]:
    """Run `work(is_over)` while the body runs; at the end wait for it, and raise its exception, if any.

    `is_over()` becomes true when the body has ended; the work should return soon after. On a GPU the body must wait for
    its own kernels, and must not use tensors of the work before the end.
    """
    over = Event()
    errors: list[BaseException] = []
    accelerator = accelerator_of(device)
    stream = accelerator.urgent_stream
    stream.wait_stream(accelerator.current_stream)

    def run() -> None:
        try:
            with accelerator.on(stream):
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
        accelerator.current_stream.wait_stream(stream)
    if errors:
        raise errors[0]
