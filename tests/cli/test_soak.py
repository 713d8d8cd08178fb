"""A small soak; `scripts/soak` is the large one."""

from __future__ import annotations

from ..pair import Pair
from .soak import soak


def test_many_clients_get_right_answers_from_a_server_of_few_files(pair: Pair) -> None:
    found = soak(pair.target, pair.draft, 30, 8)
    assert found.wrong == []
    assert found.num_answers + found.num_left == 30
    assert found.num_healthy > 0
    assert found.bytes_after - found.bytes_before < 50 * 2**20
