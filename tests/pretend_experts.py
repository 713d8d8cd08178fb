"""What takes the place of `backends.triton.experts` on the pretended device: it reads the matrices at the addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from offspec.backends import expert_table

from .pretend_cuda import held
from .pretend_streams import Machine


class PretendedKernels:
    """For plain fp32 matrices. launches: so far."""

    ALIGNED, PLAIN_FORMS = 16, {torch.float32: "fp32"}

    def __init__(self, machine: Machine) -> None:
        self._machine, self.launches = machine, 0
        self._matrices = dict[int, Tensor]()  # by their addresses

    def note(self, matrix: Tensor) -> None:
        self._matrices[matrix.data_ptr()] = held(matrix)

    def can_multiply(self, form: str, num_inputs: int) -> bool:
        return form == "fp32"

    def tile_of(self, form: str, dtype: torch.dtype, rows: float) -> Any:
        return SimpleNamespace(rows=4)

    def multiply(
        self, form: str, tile: Any, x: Tensor, choice: Any, addresses: Tensor, out: Tensor, *, step: int, **_: int
    ) -> None:
        self.launches += 1
        with _disable_current_modes(), torch.inference_mode():
            x, out, table = held(x), held(out), held(addresses).flatten().tolist()
            order, experts, starts, firsts = (held(each).tolist() for each in choice)
            used, touched = out.shape[1] // len(x), [(x, False), (out, True)]
            for name in range(len(out)):
                for first in dict.fromkeys(firsts):
                    address = table[name * step + experts[first]]
                    if (first - starts[first]) % tile.rows or not address:
                        continue
                    matrix = self._matrices[address]
                    touched.append((matrix, False))
                    for place, expert in zip(order[first : first + tile.rows], experts[first:], strict=False):
                        if expert == experts[first]:
                            out[name, place] = x[place // used] @ matrix.T
        self._machine.order.access(self._machine.current.number, "experts", touched)


@contextmanager
def pretended_experts(machine: Machine) -> Iterator[PretendedKernels]:
    """While it lasts, chosen experts are multiplied at once."""
    kernels, place = PretendedKernels(machine), expert_table._form_and_address

    def noted(matrix: Any, *args: Any) -> Any:
        kernels.note(matrix)
        return place(matrix, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_table, "expert_kernels", lambda: kernels)
        patch.setattr(expert_table, "_form_and_address", noted)
        yield kernels
