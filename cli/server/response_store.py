"""The conversations of the last responses, for `previous_response_id`: in memory alone, and not for long.

An id is a random number of 96 bits that only the client of the response gets, so another one cannot name it.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offspec.errors import UsageError

from .request_parts import Json

KEPT_S = 3600.0
MOST_BYTES = 64 * 2**20  # of messages as JSON; each response's are counted whole


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat, with the response as the last one."""

    messages: Sequence[Json]
    num_bytes: int
    ends_s: float


class StoredResponses:
    """Conversations by their responses' ids. The oldest are dropped."""

    def __init__(self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes, self._clock = most_bytes, clock
        self._stored, self._num_bytes = OrderedDict[str, Conversation](), 0

    def add(self, response_id: str, messages: Sequence[Json]) -> None:
        size = len(json.dumps(messages))
        self._stored[response_id] = Conversation(messages, size, self._clock() + KEPT_S)
        self._num_bytes += size
        while self._stored and (self._num_bytes > self._most_bytes or self._oldest.ends_s <= self._clock()):
            self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def messages(self, response_id: str) -> Sequence[Json]:
        """Raises UsageError for an id that is not known, or no longer."""
        response = self._stored.get(response_id)
        if response is None or response.ends_s <= self._clock():
            raise UsageError(
                "previous_response_id names no response that is stored here; the server keeps the last ones for an "
                "hour, and those with store false not at all: send the conversation as input"
            )
        return response.messages

    @property
    def _oldest(self) -> Conversation:
        return next(iter(self._stored.values()))
