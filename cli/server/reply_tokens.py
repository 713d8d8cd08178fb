"""The original token ids of the last replies, for their clients' next turns. It knows no model and no engine.

A client that sends a conversation back gets the ids of its earlier replies again, because the KV caches contain these.
Another client, or another conversation that has the same reply, does not: its prompt would have other tokens than
alone, and would tell it of the first one.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

MOST_REPLIES = 256


class ReplyTokens:
    """Token ids by client, the messages before the reply, and its text. The last used ones are kept."""

    def __init__(self, most: int = MOST_REPLIES) -> None:
        self._most, self._ids = most, OrderedDict[bytes, list[int]]()

    def add(self, client: str, messages: Sequence[Mapping[str, Any]], text: str, ids: list[int]) -> None:
        """Remember a reply to these messages."""
        key = _digests(client, [*messages, {"role": "assistant", "content": text}])[-1]
        self._ids[key] = ids
        self._ids.move_to_end(key)
        while len(self._ids) > self._most:
            self._ids.popitem(last=False)

    def of(self, client: str, messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The token ids of each reply among the messages, in order; none for those that are not remembered."""
        digests = _digests(client, messages)
        return [self._ids.get(key, []) for key, m in zip(digests, messages, strict=True) if m["role"] == "assistant"]


def _digests(client: str, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """For each message, a digest of the client and of all messages up to it."""
    running, digests = hashlib.sha256(json.dumps(client).encode()), list[bytes]()
    for message in messages:
        running.update(json.dumps([message["role"], message["content"]]).encode())
        digests.append(running.digest())
    return digests
