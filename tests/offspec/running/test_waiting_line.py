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


def test_one_that_goes_before_the_first_costs_its_client_a_turn() -> None:
    line, (a1, a2, b1) = WaitingLine[Asker](), (Asker("a"), Asker("a"), Asker("b"))
    for request in (a1, a2, b1):
        line.append(request)
    line.take(a2)
    assert list(line) == [b1, a1]


def test_who_leaves_is_forgotten() -> None:
    line, (a1, a2, b1) = WaitingLine[Asker](), (Asker("a"), Asker("a"), Asker("b"))
    for request in (a1, a2, b1):
        line.append(request)
    assert [line.discard(request) for request in (a1, a1, b1)] == [True, False, True]
    assert list(line) == [a2]
    line.clear()
    assert not line
