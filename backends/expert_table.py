"""Where the matrices of a layer's experts lie on a GPU, for products with all that rows chose in one launch.

The kernel (`backends.triton.experts`) finds an expert's matrix by its address, so a table of addresses takes the place
of weights. What it does not know (other formats, other dtypes, no Triton) has no table, and is multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from .on_gpu import expert_kernels, on_device
from .weights import PackedMatrix, Weight

WEIGHT, BIAS = ".weight", ".bias"
MANY_PLACES = 4  # times as many places as tiles: then the tiles' first places are gathered before the launch


@dataclass(frozen=True)
class MatrixKind:
    """What a matrix of all experts has in common: its form, its shape [N, K], and whether there is a bias [N]."""

    form: str
    shape: tuple[int, ...]
    has_bias: bool


Places = tuple[dict[str, MatrixKind], list[int]]  # by name; the addresses of each one's matrix and bias, or 0


class PlacedExpert(dict[str, Weight]):
    """An expert's weights by short name, which stay where they are: their addresses are read once."""

    def __init__(self, weights: Mapping[str, Weight], dtype: torch.dtype) -> None:
        """dtype: of the rows that are multiplied."""
        super().__init__(weights)
        self._dtype = dtype

    @cached_property
    def places(self) -> Places | None:
        kernels = expert_kernels()
        return None if kernels is None else _places(self, self._dtype, kernels)


def _places(weights: Mapping[str, Weight], dtype: torch.dtype, kernels: ModuleType) -> Places | None:
    """None if the kernel does not know one of the weights."""
    kinds, addresses = dict[str, MatrixKind](), list[int]()
    for name in sorted(name.removesuffix(WEIGHT) for name in weights if name.endswith(WEIGHT)):
        matrix, bias = weights[name + WEIGHT], weights.get(name + BIAS)
        form, address = _form_and_address(matrix, dtype, kernels)
        if address is None or not kernels.can_multiply(form, matrix.shape[1]):
            return None
        if bias is not None and not (isinstance(bias, Tensor) and bias.dtype == dtype and bias.is_contiguous()):
            return None
        kinds[name] = MatrixKind(form, tuple(matrix.shape), bias is not None)
        addresses += [address, bias.data_ptr() if isinstance(bias, Tensor) else 0]
    return kinds, addresses


def _form_and_address(matrix: Weight, dtype: torch.dtype, kernels: ModuleType) -> tuple[str, int | None]:
    if isinstance(matrix, Tensor):
        is_usable = matrix.dtype == dtype in kernels.PLAIN_FORMS and matrix.is_contiguous()
        return kernels.PLAIN_FORMS.get(dtype, ""), matrix.data_ptr() if is_usable else None
    return (matrix.form, matrix.address) if isinstance(matrix, PackedMatrix) else ("", None)


@dataclass(frozen=True)
class ExpertTable:
    """addresses: int64 [2·names, experts], for each name those of the matrices and of the biases; 0 where none is.

    alignment: a divisor of all of them. Of a part of a layer's experts, the others have 0 everywhere. The memory must
    stay as it is while the table is used.
    """

    kinds: Mapping[str, MatrixKind]
    addresses: Tensor
    alignment: int

    @classmethod
    def of(
        cls, experts: Mapping[int, Mapping[str, Weight]], num_experts: int, dtype: torch.dtype
    ) -> ExpertTable | None:
        """A table on the host of some of a layer's experts, by number; None if the kernel cannot multiply them."""
        if (kernels := expert_kernels()) is None:
            return None
        columns, kinds = list[list[int]](), None
        for expert in experts.values():
            placed = expert if isinstance(expert, PlacedExpert) else PlacedExpert(expert, dtype)
            if placed.places is None or kinds not in (None, placed.places[0]):
                return None
            kinds = placed.places[0]
            columns.append(placed.places[1])
        if not kinds:
            return None
        addresses = torch.zeros(2 * len(kinds), num_experts, dtype=torch.int64)
        addresses[:, torch.tensor(list(experts))] = torch.tensor(columns).T
        is_aligned = all(number % kernels.ALIGNED == 0 for each in columns for number in each)
        return cls(kinds, addresses, kernels.ALIGNED if is_aligned else 1)

    def on(self, send: Callable[[Tensor], Tensor]) -> ExpertTable:
        """The table on a device, to which `send` sends what is not there."""
        return replace(self, addresses=send(self.addresses))

    def kind(self, dtype: torch.dtype, rows: float) -> Hashable:
        """A key for the speed of products of about so many rows of an expert."""
        kernels = expert_kernels()
        assert kernels is not None
        forms = "+".join(kind.form for kind in self.kinds.values())
        tiles = {kernels.tile_of(kind.form, dtype, rows).rows for kind in self.kinds.values()}
        return f"experts of {forms}, {max(tiles)} rows", dtype

    def multiply(self, names: Sequence[str], x: Tensor, chosen: Chosen, out: Tensor) -> None:
        """x [T, K], or [R, K] by place, times the matrices `names` of one kind of each place → out [names, R, N].

        Places of experts that the table lacks are left as they are.
        """
        kernels, kind = expert_kernels(), self.kinds[names[0]]
        assert kernels is not None
        rows = [2 * list(self.kinds).index(name) for name in names]
        tile = kernels.tile_of(kind.form, x.dtype, chosen.rows_of_each)
        with on_device(x.device):
            kernels.multiply(
                kind.form,
                tile,
                x.contiguous(),
                chosen.tiles(tile.rows),
                self.addresses[rows[0] :],
                out,
                step=(rows[-1] - rows[0]) * self.addresses.shape[1],
                alignment=self.alignment,
                has_bias=kind.has_bias,
            )


class Chosen:
    """The experts that rows chose, in the order of experts: R places, one for each expert of each row."""

    def __init__(self, numbers: Tensor, num_experts: int) -> None:
        """numbers: int64 [T, used], on the device; each row's ascending."""
        self._numbers, self.num_experts = numbers, num_experts
        self._firsts = dict[int, Tensor]()

    @property
    def num_places(self) -> int:
        return self._numbers.numel()

    @property
    def rows_of_each(self) -> float:
        """Rows of an expert, on average over all experts."""
        return self.num_places / self.num_experts

    def tiles(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`triton.experts.multiply`'s choice, for tiles of so many rows."""
        if rows not in self._firsts:
            self._firsts[rows] = self._first_places(rows)
        return (*self._sorted, self._firsts[rows])

    @cached_property
    def _every_place(self) -> Tensor:
        return torch.arange(self.num_places, device=self._numbers.device)

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        """The places in the order of their experts, their experts, and where in this order each one's expert begins."""
        if len(self._numbers) == 1:
            return self._every_place, self._numbers[0], self._every_place
        experts, order = self._numbers.flatten().sort(stable=True)
        return order, experts, torch.searchsorted(experts, experts)

    def _first_places(self, rows: int) -> Tensor:
        """Among them each place in the order where a tile begins: all places, if these are few."""
        most = self.num_places // rows + min(self.num_experts, self.num_places)
        if self.num_places < MANY_PLACES * most:
            return self._every_place
        is_inside = (self._every_place - self._sorted[2]) % rows != 0
        return is_inside.sort(stable=True).indices[:most]
