"""Who waits, and whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass

from offspec.running.waiting_line import WaitingLine


@dataclass(eq=False)
class Asker:
    client: str


def test_clients_take_turns() -> None:
    line, requests = WaitingLine[Asker](), [Asker(client) for client in "aaabcb"]
    for request in requests:
        line.append(request)
    a1, a2, a3, b1, c1, b2 = requests
    assert list(line) == [a1, b1, c1, a2, b2, a3]
    taken = []
    while line:
        taken.append(next(iter(line)))
        line.take(taken[-1])
    assert taken == [a1, b1, c1, a2, b2, a3]
