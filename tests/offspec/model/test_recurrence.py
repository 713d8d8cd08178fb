"""Recurrences over chains and trees beside a loop over each path: the delta rule beside transformers' own.

In two ways: by products of many rows, and row by row, which is exact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT
from offspec.backends.cpu import ExactCpuBackend
from offspec.model.ordered_recurrence import chain_in_order, tree_in_order
from offspec.model.recurrence import ROOT, DeltaInputs, Inputs, PathRows, SumInputs, chain_step, tree_step

from ...machines import needs_kernels

HEADS, KEY_HEADS, KEY_SIZE, VALUE_SIZE = 4, 2, 16, 8


def inputs_of(kind: type[Inputs], num_rows: int, seed: int, more_decay: float = 0.0) -> Inputs:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    queries, keys = (torch.nn.functional.normalize(normal(num_rows, KEY_HEADS, KEY_SIZE), dim=-1) for _ in range(2))
    values, decays = normal(num_rows, HEADS, VALUE_SIZE), -normal(num_rows, HEADS).exp() - more_decay
    if kind is SumInputs:
        return SumInputs(queries, keys, values, decays, normal(num_rows, HEADS, VALUE_SIZE))
    return DeltaInputs(queries, keys, values, decays, normal(num_rows, HEADS).sigmoid())


def some(inputs: Inputs, rows: list[int] | slice) -> Inputs:
    return type(inputs)(*(each[rows] for each in vars(inputs).values()))


def step_by_step(state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """A loop over a text; the delta rule's is transformers'."""
    if isinstance(inputs, SumInputs):
        return summed(state, inputs)
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


def summed(state: Tensor, inputs: SumInputs) -> tuple[Tensor, Tensor]:
    outputs = []
    for queries, keys, updates, decays, skips in zip(*vars(inputs).values(), strict=True):
        keys, queries = (each.repeat_interleave(HEADS // KEY_HEADS, 0) for each in (keys, queries))
        state = state * decays.exp()[:, None, None] + keys[:, :, None] * updates[:, None, :]
        outputs.append((state * queries[:, :, None]).sum(1) + skips)
    return torch.stack(outputs), state


def first_state(seed: int) -> Tensor:
    return torch.randn(HEADS, KEY_SIZE, VALUE_SIZE, generator=torch.Generator().manual_seed(seed))


def paths_of(parents: list[int]) -> list[list[int]]:
    """The rows from the root's child to each row."""
    paths = list[list[int]]()
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def random_parents(chance: random.Random) -> list[int]:
    """Of the rows of a tree: each an earlier row, or ROOT."""
    return [chance.randint(ROOT, row - 1) for row in range(chance.randint(2, 40))]


def mask_of(paths: list[list[int]], first: int = 0) -> Tensor:
    """bool [rows from `first` on, all rows]."""
    mask = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for row, path in enumerate(paths):
        mask[row, path] = True
    return mask[first:]


KINDS = pytest.mark.parametrize("kind", [DeltaInputs, SumInputs])
PRODUCTS, IN_ORDER = "by products", "in order"
WAYS = pytest.mark.parametrize("way", [PRODUCTS, pytest.param(IN_ORDER, marks=needs_kernels)])
CHAIN_STEPS = {PRODUCTS: chain_step, IN_ORDER: partial(chain_in_order, backend=ExactCpuBackend(EXACT))}


def tree_rows(
    way: str, state: Tensor, inputs: Inputs, parents: Sequence[int], earlier: PathRows | None = None
) -> tuple[Tensor, PathRows]:
    """Outputs of the inputs' rows, which are the last ones of those with the given parents, and what they bring."""
    if way == IN_ORDER:
        return tree_in_order(state, inputs, torch.tensor(parents, dtype=torch.int64), earlier, ExactCpuBackend(EXACT))
    return tree_step(state, inputs, mask_of(paths_of(list(parents)), len(parents) - len(inputs.keys)), earlier)


def assert_close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-4)


@pytest.mark.each_value
@KINDS
@WAYS
@pytest.mark.parametrize("num_rows", [1, 63, 64, 65])
def test_a_chain_is_the_loop_over_its_rows(kind: type[Inputs], way: str, num_rows: int) -> None:
    state, inputs = first_state(1), inputs_of(kind, num_rows, num_rows)
    for found, expected in zip(CHAIN_STEPS[way](state, inputs), step_by_step(state, inputs), strict=True):
        assert_close(found, expected)


@pytest.mark.each_value
@KINDS
@WAYS
@pytest.mark.parametrize("seed", range(4))
def test_each_node_of_a_tree_continues_its_own_path(kind: type[Inputs], way: str, seed: int) -> None:
    """Outputs, and the state after each path, in one round and in two."""
    chance, state = random.Random(seed), first_state(seed)
    parents = random_parents(chance)
    paths, inputs = paths_of(parents), inputs_of(kind, len(parents), seed)
    outputs, rows = tree_rows(way, state, inputs, parents)
    cut = chance.randint(0, len(parents))
    _, early = tree_rows(way, state, some(inputs, slice(0, cut)), parents[:cut])
    late_outputs, late = tree_rows(way, state, some(inputs, slice(cut, None)), parents, early)
    assert_close(late_outputs, outputs[cut:])
    grown = early.with_more(late)
    for row, path in enumerate(paths):
        expected, after = step_by_step(state, some(inputs, path))
        assert_close(outputs[row], expected[-1])
        for kept in (rows, grown):
            assert_close(kept.at(path).after(state), after)


@KINDS
@WAYS
@pytest.mark.parametrize("seed", range(4))
def test_a_row_becomes_the_root_and_what_is_below_it_stays(kind: type[Inputs], way: str, seed: int) -> None:
    chance, state = random.Random(seed), first_state(seed)
    parents = [ROOT, *(max(0, parent) for parent in random_parents(chance))]
    paths, inputs = paths_of(parents), inputs_of(kind, len(parents), seed)
    _, rows = tree_rows(way, state, inputs, parents)
    below = rows.below(0, range(1, len(parents)))
    root = rows.at([0]).after(state)
    for path in paths[1:]:
        assert_close(below.at([row - 1 for row in path[1:]]).after(root), rows.at(path).after(state))


@KINDS
@WAYS
def test_strong_decay_forgets_and_stays_finite(kind: type[Inputs], way: str) -> None:
    state, inputs = first_state(0), inputs_of(kind, 100, 0, more_decay=60.0)
    for found, expected in zip(CHAIN_STEPS[way](state, inputs), step_by_step(state, inputs), strict=True):
        assert_close(found, expected)


@needs_kernels
@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_rows_in_order_do_not_depend_on_other_rows(kind: type[Inputs], seed: int) -> None:
    """A node's output, and the state after it, have the bits of its path's rows alone, one by one."""
    chance, state = random.Random(seed), first_state(seed)
    parents = random_parents(chance)
    inputs, cut = inputs_of(kind, len(parents), seed), chance.randint(0, len(parents))
    early_outputs, early = tree_rows(IN_ORDER, state, some(inputs, slice(0, cut)), parents[:cut])
    late_outputs, late = tree_rows(IN_ORDER, state, some(inputs, slice(cut, None)), parents, early)
    outputs, rows = torch.cat((early_outputs, late_outputs)), early.with_more(late)
    for row, path in enumerate(paths_of(parents)):
        expected, after = CHAIN_STEPS[IN_ORDER](state, some(inputs, path))
        alone = state
        for each, number in enumerate(path):
            output, alone = CHAIN_STEPS[IN_ORDER](alone, some(inputs, [number]))
            assert torch.equal(output[0], expected[each])
        assert torch.equal(outputs[row], expected[-1])
        for place in range(len(path)):
            root = rows.at(path[:place]).after(state)
            below = rows.below(path[place - 1], path[place:]) if place else rows.at(path)
            assert torch.equal(below.after(root), after)
        assert torch.equal(alone, after)
