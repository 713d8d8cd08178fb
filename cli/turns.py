"""Requests that take turns: one pass of each, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offspec import Engine, SamplingParams, SpeculationParams
    from offspec.model.text_caches import TextCaches
    from offspec.request import Step


class Ticket:
    """Stands for a request that was added."""


class Turns:
    """Requests of one engine, in the order of their next passes. All methods are called by one thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: deque[tuple[Ticket, Generator[Step, None, None]]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        speculation: SpeculationParams,
        *,
        caches: TextCaches,
    ) -> Ticket:
        """Begin a request. Raises the errors of `Engine.generate`."""
        ticket = Ticket()
        self._requests.append((ticket, self._engine.generate(prompt, params, speculation, caches=caches)))
        return ticket

    def step(self) -> list[tuple[Ticket, Step | Exception]]:
        """One pass of the request whose turn it is; its last step, or its error, ends it."""
        ticket, steps = self._requests[0]
        try:
            step = next(steps)
        except Exception as exc:  # noqa: BLE001 (it is the request's result)
            self.cancel(ticket)
            return [(ticket, exc)]
        self._requests.rotate(-1)
        if step.finish_reason is not None:
            self.cancel(ticket)
        return [(ticket, step)]

    def cancel(self, ticket: Ticket) -> None:
        """End a request; does nothing if it has ended."""
        for found, steps in self._requests:
            if found is ticket:
                steps.close()
        self._requests = deque(request for request in self._requests if request[0] is not ticket)
