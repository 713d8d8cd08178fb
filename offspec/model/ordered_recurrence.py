"""The recurrences of `recurrence` on a CPU: one row after the other along each path, from state to state.

A row's output, and the state after it, have the same bits whatever rows share its pass, in a chain and in a tree. It
takes less time than products of many rows (docs/results/hybrid.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.backends.x86.state_steps import StepRows, Walk, walk_states

from .recurrence import DeltaInputs, Inputs, PathRows, SumInputs

_chain_walk = lru_cache(maxsize=64)(Walk.of_chain)
_tree_walk = lru_cache(maxsize=64)(Walk.of_tree)


class OrderedRows(PathRows):
    """Rows below a root, as the kernel takes them. decays [R, heads]: exp(g) of each row alone."""

    def below(self, row: int, kept: Tensor | Sequence[int]) -> PathRows:
        return self.at(kept)

    def after(self, state: Tensor) -> Tensor:
        if not len(self):
            return state
        after, rows = torch.empty_like(state), StepRows(*(each.contiguous() for each in vars(self).values()))
        walk_states(state, rows, _chain_walk(len(self)), None, after)
        return after


def chain_in_order(state: Tensor, inputs: Inputs, backend: Backend) -> tuple[Tensor, Tensor]:
    """As `chain_step`."""
    rows, outputs, after = (
        _step_rows(inputs, None, backend),
        inputs.values.new_empty(inputs.values.shape),
        torch.empty_like(state),
    )
    walk_states(state, rows, _chain_walk(len(outputs)), outputs, after)
    return _with_skips(outputs, inputs), after


def tree_in_order(
    state: Tensor, inputs: Inputs, parents: Tensor, earlier: PathRows | None, backend: Backend
) -> tuple[Tensor, PathRows]:
    """As `tree_step`. parents [P + R]: of earlier rows and of these, among them, or ROOT."""
    rows, outputs = _step_rows(inputs, earlier, backend), inputs.values.new_empty(inputs.values.shape)
    num_earlier = len(rows.keys) - len(outputs)
    walk_states(state, rows, _tree_walk(tuple(parents.tolist()), num_earlier), outputs, None)
    new = (each[num_earlier:] for each in (rows.keys, rows.updates, rows.factors))
    return _with_skips(outputs, inputs), OrderedRows(*new)


def _step_rows(inputs: Inputs, earlier: PathRows | None, backend: Backend) -> StepRows:
    """Earlier rows, then those of the inputs. Updates are a copy, because the kernel replaces some."""
    new = (inputs.keys, inputs.values, backend.each(torch.exp, inputs.decays))
    old = [each[:0] for each in new] if earlier is None else vars(earlier).values()
    keys, updates, factors = (torch.cat(pair) for pair in zip(old, new, strict=True))
    rates = inputs.rates.contiguous() if isinstance(inputs, DeltaInputs) else None
    return StepRows(keys, updates, factors, inputs.queries.contiguous(), rates)


def _with_skips(outputs: Tensor, inputs: Inputs) -> Tensor:
    return outputs.add_(inputs.skips) if isinstance(inputs, SumInputs) else outputs
