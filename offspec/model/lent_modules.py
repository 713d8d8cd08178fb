"""Modules of transformers with borrowed parameters: they have weights only while their layer is computed.

A `Lender` removes the parameters of a module tree, and temporarily puts borrowed weights in their place. offspec
multiplies the matrices of linear modules, in any weight format. Other parameters become tensors in the arithmetic's
dtype. Experts are dequantised one at a time, on use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offspec.backends.choice import linear
from offspec.backends.weights import Weight, dense

from .transformers_config import Source


class LentLinear(nn.Module):
    """A linear module over a borrowed matrix [N, K] in any format."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.in_features = module.in_features
        self.out_features = module.out_features
        self.weight: Any = None
        self.bias: Any = None
        self.scratch: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] → [..., N]."""
        return linear(x, self.weight, self.bias, self.scratch)


@dataclass(frozen=True)
class LentExperts:
    """The parameter [E, N, K] of E experts that are stored as separate matrices; each is made on use."""

    parts: tuple[tuple[Weight, ...], ...]
    dtype: torch.dtype

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        """Expert `expert`'s matrix [N, K]."""
        matrices = [dense(weights[int(expert)], self.dtype) for weights in self.parts]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def __len__(self) -> int:
        return len(self.parts[0])


@dataclass(frozen=True)
class ParameterPlace:
    """A parameter's place, attribute `name` of `module`, and its source."""

    module: nn.Module
    name: str
    source: Source

    def fill(self, weights: Mapping[str, Weight], dtype: torch.dtype) -> None:
        """Set the parameter from `weights`."""
        names = self.source.names
        value: Any
        if self.source.is_experts:
            value = LentExperts(tuple(tuple(weights[name] for name in part) for part in names), dtype)
        elif isinstance(self.module, LentLinear) and self.name == "weight":
            value = weights[names[0][0]]
        else:
            value = dense(weights[names[0][0]], dtype)
        object.__setattr__(self.module, self.name, value)

    def empty(self) -> None:
        object.__setattr__(self.module, self.name, None)


class Lender:
    """Lends one module tree all its parameters at once."""

    def __init__(self, root: nn.Module, sources: Mapping[str, Source], dtype: torch.dtype) -> None:
        """sources: by a parameter's path below `root`; removes these parameters. dtype: of the arithmetic."""
        self._dtype = dtype
        self._slots = [_take(root, path, source) for path, source in sources.items()]
        self._linears = [slot.module for slot in self._slots if isinstance(slot.module, LentLinear)]

    @contextmanager
    def lend(self, weights: Mapping[str, Weight], scratch: Tensor | None) -> Iterator[None]:
        """weights: by the sources' names. scratch: see `Backend.linear`."""
        try:
            for slot in self._slots:
                slot.fill(weights, self._dtype)
            for module in self._linears:
                module.scratch = scratch
            yield
        finally:
            for slot in self._slots:
                slot.empty()
            for module in self._linears:
                module.scratch = None


def _take(root: nn.Module, path: str, source: Source) -> ParameterPlace:
    """Remove the parameter or buffer at `path` from its module; replace the module if it is linear."""
    above, _, name = path.rpartition(".")
    module: Any = root.get_submodule(above)
    if type(module).forward is nn.Linear.forward:
        linear = LentLinear(module)
        parent, _, attribute = above.rpartition(".")
        root.get_submodule(parent)._modules[attribute] = linear
        module = linear
    for kept in (module._parameters, module._buffers):
        kept.pop(name, None)
    object.__setattr__(module, name, None)
    return ParameterPlace(module, name, source)
