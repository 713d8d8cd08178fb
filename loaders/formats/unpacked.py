"""`UnpackedMatrix`: a packed matrix that kernels, or plain torch, unpack as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from offspec.backends.choice import backend_of
from offspec.backends.weights import PackedMatrix


class UnpackedMatrix(PackedMatrix, ABC):
    """Base of packed weights with `unpack`, and maybe kernels that give the same numbers in less time."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def unpack(self, out: Tensor) -> None:
        """The matrix → out, contiguous [N, K], in plain torch: the reference for kernels."""

    def compiled_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        """`unpack` on a CPU by a kernel that is compiled, or worth compiling; None: there is none."""
        return None

    def launched_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        """`unpack` on a GPU by a kernel; None: there is none."""
        return None

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        matrix = torch.empty(self.shape, dtype=dtype, device=self.device) if out is None else out
        backend_of(self.device).unpack(self, matrix)
        return matrix
