"""Steps of a layer's parts on a CPU that repeat what they recorded (`backends.x86.recording`).

One row takes a layer's kernels less time than Python needs to launch them. A step is recorded at the second use of the
same weights, as streamed ones are others in each pass. A step that torch computes in part cannot be recorded, and goes
on as it is: families need no cases here.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.backends.weights import Launched, PackedMatrix, Weight
from offspec.backends.x86.recording import Function, Recording, can_record, record

MOST_KNOWN = 16  # of a part: its steps, for each of some threads


class _Known:
    """What is known of a step with some weights, which it does not keep in memory.

    recording: None before the second use, and if there cannot be one.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights, self.is_tried = list(map(ref, weights)), False
        self.recording: Recording | None = None

    def is_of(self, weights: Sequence[Weight]) -> bool:
        if len(weights) != len(self._weights):
            return False
        return all(reference() is each for reference, each in zip(self._weights, weights, strict=True))


class RecordedSteps:
    """The steps of one part, for one row of a text at a time."""

    def __init__(self) -> None:
        self._known = dict[tuple[str, Hashable], _Known]()

    @property
    def recorded(self) -> list[str]:
        """The names of steps that have recordings."""
        return [name for (name, _), step in self._known.items() if step.recording is not None]

    def run(
        self,
        backend: Backend,
        name: str,
        function: Function,
        inputs: Sequence[Tensor],
        weights: Mapping[str, Weight],
        matrices: Sequence[Weight] = (),
    ) -> Sequence[Tensor]:
        """function(*inputs), maybe repeated.

        name: of the step. weights: all that it uses, beside `matrices`, which may be others in each call.
        """
        x = inputs[0]
        if len(x) != 1 or not backend.records_rows or not can_record():
            return function(*inputs)
        launched = [launched_of(each) for each in matrices]
        arithmetic = x.dtype, backend.takes_bytes, torch.get_num_threads(), threading.get_ident()
        key = name, (*[kind for kind, _ in launched], *arithmetic)
        if not all(parts for _, parts in launched):
            return function(*inputs)
        present, step = list(weights.values()), self._known.get(key)
        if step is None or not step.is_of(present):
            if len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = _Known(present)
            return function(*inputs)
        if step.is_tried and step.recording is None:
            return function(*inputs)
        addresses = [address for _, parts in launched for address in parts]
        if step.recording is not None:
            return step.recording(inputs, addresses)
        step.is_tried = True
        results, step.recording = record(function, inputs, addresses)
        return results


def launched_of(weight: Weight) -> Launched:
    if isinstance(weight, PackedMatrix):
        return weight.launched
    if isinstance(weight, Tensor):
        return Launched((weight.dtype, weight.shape), (weight.data_ptr(),))
    return Launched(type(weight), ())
