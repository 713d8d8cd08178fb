"""The outputs of the experts that rows chose: on a GPU all at once by their addresses, elsewhere group by group.

At once takes two launches for a layer, and no look at the choice, if all experts are there. Otherwise the host reads
the choice once and borrows groups of experts (`WeightSource.experts`), each of which is computed at once, one expert
after another, or on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor

from offspec.backends.choice import CPU, backend_of
from offspec.backends.device_kinds import kind_of
from offspec.backends.expert_table import Chosen, ExpertTable
from offspec.backends.on_gpu import WORKING_KERNELS
from offspec.loaders.streaming.small_transfers import to_device
from offspec.loaders.streaming.weights import HostExperts, LentExperts

from ..recorded_steps import RecordedSteps
from ..shapes import ExpertsShape
from .mlp import inner_of, output_of
from .part import LayerWeights, WeightsOfChosen, WeightsOfExperts

MOST_ROWS = 512  # of several experts at a time, so that what they make of their rows stays in a cache
MOST_AT_ONCE = 64  # rows of an expert, on average over all; for more, unpacking its matrices once takes less time
MOST_FETCHED = 1 << 18  # bytes of rows that the host reads together with their choice


class ChosenExperts:
    """`outputs` [R, hidden]: of T rows' experts, R = T·used places, row after row."""

    def __init__(self, x: Tensor, numbers: Tensor, shape: ExpertsShape, activation: str, steps: RecordedSteps) -> None:
        """x [T, hidden]: normed states. numbers int64 [T, used]: each row's experts, ascending. steps: of the part."""
        self._x, self._numbers = x, numbers
        self._shape, self._activation, self._steps = shape, activation, steps
        self._chosen = Chosen(numbers, shape.num)
        self._num_used = numbers.shape[1]
        self.outputs = x.new_empty(numbers.numel(), x.shape[1])

    def compute(self, weights: LayerWeights) -> None:
        """weights: of the layer, which lends its experts."""
        at_once = self._may_be_at_once(weights)
        if at_once and (table := weights.expert_table()) is not None:
            self._by_kernel(table, weights, partial(self._by_groups, weights, at_once=False))
        else:
            self._by_groups(weights, at_once=at_once)

    # ---------------------------------------------------------------------------------------- at once

    def _may_be_at_once(self, weights: LayerWeights) -> bool:
        """Gradients need plain products."""
        if not weights.backend.chooses_at_once or self._needs_gradients:
            return False
        return self._chosen.rows_of_each <= MOST_AT_ONCE

    @property
    def _needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and self._x.requires_grad

    def _by_kernel(self, table: ExpertTable, weights: LayerWeights, plain: Callable[[], None]) -> None:
        """At once, or by `plain` where the kernel does not run."""
        kind = table.kind(self._x.dtype, self._chosen.rows_of_each)
        WORKING_KERNELS.run(kind, self._x.device, partial(self._at_once, table, weights), plain)

    def _at_once(self, table: ExpertTable, layer: LayerWeights) -> None:
        """Outputs of places whose experts are in the table; the inner numbers of the others mean nothing."""
        weights = WeightsOfChosen(table.on(partial(to_device, device=self._x.device)), self._chosen, layer.backend)
        inner = inner_of(self._x, weights, self._shape.names, self._activation)
        weights.multiply_to(self.outputs[None], [self._shape.names.down], inner)

    # ---------------------------------------------------------------------------------------- by groups

    def _by_groups(self, weights: LayerWeights, *, at_once: bool) -> None:
        """at_once: whether to try it for each group."""
        for group in weights.experts(self._places.counts):
            is_on_host = isinstance(group, HostExperts)
            plain = partial(self._one_by_one, group, weights, is_on_host=is_on_host)
            table = ExpertTable.of(group, self._shape.num, self._x.dtype) if at_once and not is_on_host else None
            if table is None:
                plain()
            else:
                self._by_kernel(table, weights, plain)

    def _one_by_one(self, group: LentExperts, weights: LayerWeights, *, is_on_host: bool) -> None:
        scratch, backend = (None, backend_of(CPU)) if is_on_host else (weights.scratch, weights.backend)
        if len(self._x) == 1 and not is_on_host and list(group) == list(self._places.counts):
            experts = WeightsOfExperts(list(group.values()), [1] * len(group), backend, scratch)
            compute = partial(self._output_of, experts)
            (self.outputs,) = self._steps.run(backend, "experts", compute, (self._x,), {}, experts.matrices)
            return
        for some in _in_parts(group, self._places.counts):
            counts = [self._places.counts[number] for number in some]
            experts = WeightsOfExperts([group[number] for number in some], counts, backend, scratch)
            places = self._places.of(some)
            states, there = self._states(places, is_on_host=is_on_host)
            self.outputs[there] = to_device(*self._output_of(experts, states), self._x.device)

    def _output_of(self, experts: WeightsOfExperts, states: Tensor) -> tuple[Tensor]:
        return (output_of(states, experts, self._shape.names, self._activation),)

    def _states(self, places: Tensor, *, is_on_host: bool) -> tuple[Tensor, Tensor]:
        """The rows of these places, or the only row, where they are computed; and the places on the device of x."""
        device, is_one = self._x.device, len(self._x) == 1
        rows = places if is_one else places // self._num_used
        if is_on_host:
            return self._rows_on_host if is_one else self._rows_on_host[rows], to_device(places, device)
        places, rows = to_device(torch.stack((places, rows)), device).unbind()  # in one transfer
        return self._x if is_one else self._x[rows], places

    @cached_property
    def _places(self) -> PlacesByExpert:
        """On the host."""
        return PlacesByExpert(self._on_host[0])

    @property
    def _rows_on_host(self) -> Tensor:
        rows = self._on_host[1]
        return self._x.cpu() if rows is None else rows

    @cached_property
    def _on_host(self) -> tuple[Tensor, Tensor | None]:
        """The numbers, and the rows unless they are many, in one transfer.

        The device has just computed both. Later the host would wait for experts that the device computes, too.
        """
        numbers, x = self._numbers, self._x
        if not kind_of(x.device).has_own_memory:
            return numbers, x
        if self._needs_gradients or x.nbytes > MOST_FETCHED:
            return numbers.cpu(), None
        both = torch.cat([each.reshape(-1).view(torch.uint8) for each in (numbers, x)]).cpu()
        first, second = torch.split(both, [numbers.nbytes, x.nbytes])
        return first.view(numbers.dtype).view(numbers.shape), second.view(x.dtype).view(x.shape)


class PlacesByExpert:
    """The places of the experts chosen [T, used], ascending in each row.

    order: all places, expert after expert and row after row. counts: expert → the number of its places.
    """

    def __init__(self, chosen: Tensor) -> None:
        if len(chosen) == 1:
            self.order = torch.arange(chosen.shape[1])
            self.counts = dict.fromkeys(chosen[0].tolist(), 1)
        else:
            by_expert = chosen.flatten().sort(stable=True)
            numbers, counts = torch.unique_consecutive(by_expert.values, return_counts=True)
            self.order = by_expert.indices
            self.counts = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        self._starts = dict(zip(self.counts, accumulate(self.counts.values(), initial=0), strict=False))

    def of(self, numbers: list[int]) -> Tensor:
        """The places of these experts, expert after expert and row after row."""
        if numbers == list(self.counts):
            return self.order
        return torch.cat([self.order[(first := self._starts[each]) : first + self.counts[each]] for each in numbers])


def _in_parts(numbers: Iterable[int], counts: Mapping[int, int]) -> Iterator[list[int]]:
    """Experts whose products are computed together: as many as have MOST_ROWS rows, at least one."""
    part, num_rows = list[int](), 0
    for number in numbers:
        if part and num_rows + counts[number] > MOST_ROWS:
            yield part
            part, num_rows = [], 0
        part.append(number)
        num_rows += counts[number]
    if part:
        yield part
