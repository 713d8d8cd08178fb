"""How the parts of a streamed answer are sent: as server-sent events, or as lines of JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamFormat:
    """How parts are sent. waiting, running: signs of life, which clients skip; the first comes at once, if it may.

    error: around an error that is known only after such a sign.
    """

    media_type: str
    begins_with_sign: bool
    waiting: str
    running: str
    error: str


EVENTS = StreamFormat("text/event-stream", True, ": waiting\n\n", ": running\n\n", "event: error\ndata: {}\n\n")
# White space before the next line's JSON; clients that take each chunk for a line should seldom get one.
LINES = StreamFormat("application/x-ndjson", False, " ", " ", "{}\n")
