"""A line of requests in which clients take turns, so that one with many does not hold up the others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import zip_longest
from typing import Generic, Protocol, TypeVar


class OfClient(Protocol):
    @property
    def client(self) -> str:
        """Whose request it is."""


T = TypeVar("T", bound=OfClient)


class WaitingLine(Generic[T]):
    """Not thread-safe. Iteration is in the order of turns."""

    def __init__(self) -> None:
        self._by_client = OrderedDict[str, deque[T]]()

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def __iter__(self) -> Iterator[T]:
        """Each client's first request, then each one's second, and so on."""
        for turn in zip_longest(*self._by_client.values()):
            yield from (request for request in turn if request is not None)

    def append(self, request: T) -> None:
        self._by_client.setdefault(request.client, deque()).append(request)

    def take(self, request: T) -> None:
        """Remove a request whose turn it is; its client's next turn is after all others'."""
        if self.discard(request) and request.client in self._by_client:
            self._by_client.move_to_end(request.client)

    def discard(self, request: T) -> bool:
        """Remove a request; False if it does not wait."""
        requests = self._by_client.get(request.client, deque())
        if request not in requests:
            return False
        requests.remove(request)
        if not requests:
            del self._by_client[request.client]
        return True

    def clear(self) -> None:
        self._by_client.clear()
