"""Addresses after `--batch ray:`, and what nodes of a cluster say that they have, by seeds. No cluster is started."""

from __future__ import annotations

import os
import random
import socket
from typing import NoReturn

import pytest

from offspec.cli.ray_batch import _check_address, shares_of
from offspec.errors import UsageError

from ..refusals import check_message

NUM_CASES = int(os.environ.get("FUZZ_CASES", "200"))
PIECES = (
    "127.0.0.1",
    "::1",
    "[::1]",
    "..",
    ":",
    "-1",
    "0",
    "99999999999",
    "auto",
    "ray://",
    "ab\u00e9",
    "\u0663",
    "\0",
    "x" * 64,
    " ",
)


def address(chance: random.Random) -> str:
    return "".join(chance.choice(PIECES) for _ in range(chance.randint(0, 5)))


def resources(chance: random.Random) -> dict[str, float]:
    """A node's, as Ray counts them: any of them may be missing, a fraction, or 0."""
    values = (0.0, 0.5, 1.0, 3.0, 64.0, 1e12)
    return {name: chance.choice(values) for name in ("CPU", "GPU", "memory", "node:10.0.0.1") if chance.random() < 0.7}


def test_any_address_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens anywhere; names of hosts are checked as the system checks them, without asking a network."""

    def nobody(host_and_port: tuple[str, int], timeout: float) -> NoReturn:
        host, port = host_and_port
        socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", nobody)
    for seed in range(NUM_CASES):
        given = address(random.Random(seed))
        if given != "auto":
            with pytest.raises(UsageError) as refused:  # noqa: PT012 (to tell the case)
                _check_address(given)
                pytest.fail(f"case {seed}: {given!r} was taken")
            check_message(str(refused.value), "Ray")


def test_a_node_is_shared_out_whole_or_left_out() -> None:
    for seed in range(NUM_CASES):
        chance = random.Random(seed)
        node, device = resources(chance), chance.choice(("auto", "cpu", "cuda"))
        if node.get("GPU", 0.0) > 64:
            continue
        shares = shares_of(node, device)
        assert sum(share.num_cpus for share in shares) <= node.get("CPU", 0.0), f"case {seed}"
        assert sum(share.num_gpus for share in shares) in (0, int(node.get("GPU", 0.0))), f"case {seed}"
        assert sum(share.ram or 0 for share in shares) <= node.get("memory", 0.0), f"case {seed}"
        is_shared = node.get("CPU", 0.0) > 0 or (device != "cpu" and node.get("GPU", 0.0) >= 1)
        assert bool(shares) == is_shared, f"case {seed}"
