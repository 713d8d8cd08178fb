"""The delta rule over chains and trees beside transformers' step by step, on every path."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from offspec.model.delta_rule import DeltaInputs, DeltaRows, chain_step, state_after, tree_step

HEADS, KEY_HEADS, KEY_SIZE, VALUE_SIZE = 4, 2, 16, 8


def inputs_of(num_rows: int, seed: int) -> DeltaInputs:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    queries, keys = (torch.nn.functional.normalize(normal(num_rows, KEY_HEADS, KEY_SIZE), dim=-1) for _ in range(2))
    return DeltaInputs(
        queries,
        keys,
        normal(num_rows, HEADS, VALUE_SIZE),
        -normal(num_rows, HEADS).exp(),
        normal(num_rows, HEADS).sigmoid(),
    )


def rows_of(inputs: DeltaInputs, rows: list[int]) -> DeltaInputs:
    return DeltaInputs(*(each[rows] for each in vars(inputs).values()))


def step_by_step(state: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """transformers' loop over a text."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    outputs, after = modeling.torch_recurrent_gated_delta_rule(
        inputs.queries[None] * KEY_SIZE**0.5,  # it scales queries itself
        inputs.keys[None],
        inputs.values[None],
        inputs.decays[None],
        inputs.rates[None],
        initial_state=state[None],
        output_final_state=True,
    )
    return outputs[0], after[0]


def first_state(seed: int) -> Tensor:
    return torch.randn(HEADS, KEY_SIZE, VALUE_SIZE, generator=torch.Generator().manual_seed(seed))


def paths_of(parents: list[int]) -> list[list[int]]:
    """The rows from the root's child to each row."""
    paths = list[list[int]]()
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def mask_of(paths: list[list[int]], first: int = 0) -> Tensor:
    """bool [rows from `first` on, all rows]."""
    mask = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for row, path in enumerate(paths):
        mask[row, path] = True
    return mask[first:]


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 200])
def test_a_chain_is_the_loop_over_its_rows(num_rows: int) -> None:
    state, inputs = first_state(1), inputs_of(num_rows, num_rows)
    outputs, after = chain_step(state, inputs)
    expected, expected_after = step_by_step(state, inputs)
    torch.testing.assert_close(outputs, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, expected_after, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_each_node_of_a_tree_continues_its_own_path(seed: int) -> None:
    """Outputs, and the state after each path, in one round and in two."""
    chance, state = random.Random(seed), first_state(seed)
    parents = [chance.randint(-1, row - 1) for row in range(chance.randint(2, 40))]
    paths, inputs = paths_of(parents), inputs_of(len(parents), seed)
    outputs, rows = tree_step(state, inputs, mask_of(paths))
    cut = chance.randint(0, len(parents))
    _, early = tree_step(state, inputs.slice(0, cut), mask_of(paths[:cut]))
    late_outputs, late = tree_step(state, inputs.slice(cut, len(parents)), mask_of(paths, cut), early)
    torch.testing.assert_close(late_outputs, outputs[cut:], atol=2e-5, rtol=1e-4)
    grown = early.with_more(late)
    for row, path in enumerate(paths):
        expected, after = step_by_step(state, rows_of(inputs, path))
        torch.testing.assert_close(outputs[row], expected[-1], atol=2e-5, rtol=1e-4)
        for kept in (rows, grown):
            torch.testing.assert_close(state_after(state, kept.at(path)), after, atol=2e-5, rtol=1e-4)


def test_strong_decay_forgets_and_stays_finite() -> None:
    inputs = inputs_of(100, 0)
    gone = DeltaInputs(inputs.queries, inputs.keys, inputs.values, inputs.decays - 60.0, inputs.rates)
    outputs, after = chain_step(first_state(0), gone)
    expected, expected_after = step_by_step(first_state(0), gone)
    torch.testing.assert_close(outputs, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, expected_after, atol=2e-5, rtol=1e-4)


def test_no_rows_leave_the_state() -> None:
    state, inputs = first_state(0), inputs_of(3, 0)
    assert state_after(state, DeltaRows.none(inputs)) is state
    outputs, rows = tree_step(state, inputs.slice(0, 0), torch.zeros(0, 0, dtype=torch.bool))
    assert len(outputs) == len(rows) == 0
