"""Kernels of recurrences: the order of a tree's rows, and bits that neither vectors nor threads change."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offspec.backends.x86 import state_steps
from offspec.backends.x86.state_steps import StepRows, Walk, walk_states

from ...machines import needs_kernels

HEADS, KEY_SIZE, VALUE_SIZE = 6, 24, 64


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> None:
    set_threads(request.param)


@pytest.mark.parametrize("seed", range(6))
def test_steps_begin_at_their_parents_state(seed: int) -> None:
    """All rows that are not earlier ones, and those above them, once each; few states at a time."""
    chance = random.Random(seed)
    parents = [chance.randint(max(-1, row - chance.choice((1, 9))), row - 1) for row in range(chance.randint(1, 90))]
    num_earlier = chance.randint(0, len(parents))
    walk, needed, slots = Walk.of_tree(parents, num_earlier), set[int](), dict[int, int]({0: -1})
    for row in range(num_earlier, len(parents)):
        while row >= 0:
            needed.add(row)
            row = parents[row]
    assert sorted(walk.steps[:, 0].tolist()) == sorted(needed)
    for row, source, target in walk.steps.tolist():
        assert slots[source] == parents[row]
        slots[target] = row
    assert set(slots) == set(range(walk.num_slots))
    assert walk.num_slots <= math.log2(len(parents)) + 2


def random_rows(num_rows: int, corrects: bool) -> StepRows:
    made = torch.Generator().manual_seed(num_rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    keys, queries = (torch.nn.functional.normalize(normal(num_rows, 2, KEY_SIZE), dim=-1) for _ in range(2))
    factors, rates = normal(num_rows, HEADS).sigmoid(), normal(num_rows, HEADS).sigmoid()
    return StepRows(keys, normal(num_rows, HEADS, VALUE_SIZE), factors, queries, rates if corrects else None)


@needs_kernels
@pytest.mark.parametrize("corrects", [False, True])
def test_vectors_and_threads_change_no_bit(corrects: bool, num_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_steps, "LEAST_NUMBERS", 1)
    state, results = torch.randn(HEADS, KEY_SIZE, VALUE_SIZE, generator=torch.Generator().manual_seed(1)), []
    for most in (4, 8, 16, 64):  # numbers of a vector
        monkeypatch.setattr(state_steps, "num_lanes", lambda most=most: most // 4)
        rows, outputs, after = random_rows(9, corrects), torch.empty(9, HEADS, VALUE_SIZE), torch.empty_like(state)
        walk_states(state, rows, Walk.of_chain(9), outputs, after)
        results.append((outputs, after, rows.updates))
    for result in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))
    rows, expected = random_rows(9, corrects), state.double()
    keys, queries = (each.double().repeat_interleave(HEADS // 2, 1) for each in (rows.keys, rows.queries))
    for row in range(9):
        expected = rows.factors[row, :, None, None] * expected
        update = rows.updates[row].double()
        if corrects:
            update = rows.rates[row, :, None] * (update - torch.einsum("hkv,hk->hv", expected, keys[row]))
        expected = expected + torch.einsum("hk,hv->hkv", keys[row], update)
        answer = torch.einsum("hkv,hk->hv", expected, queries[row])
        torch.testing.assert_close(results[0][0][row].double(), answer, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0][1].double(), expected, atol=1e-5, rtol=1e-5)
