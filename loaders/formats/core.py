"""What a weight is, stored and resident, and what a format of weights has to say; no format is named here.

A *stored* weight says which bytes are read for each use; `bind` puts these bytes under a *resident* weight, as views,
and `linear` multiplies with it. Quantised matrices are dequantised for each use, unless their format knows a faster
way. Knows nothing of layers, or of when a weight is needed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, BinaryIO, NoReturn, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint import Checkpoint, TensorInfo, fault, reading, show
from ..kernels.row_product import RowProduct
from ..params import ConvertParams
from ..records import ALIGNMENT
from . import products

DAMAGED = "the checkpoint is damaged, download it again"
REMEDY = "use the 16-bit checkpoint, a bitsandbytes 4-bit one, or make one with `offspec quantize`"

# Elements dequantised at once. The kernel allocates its result: 2 MiB come from the allocator's pool, where a whole
# matrix of 117 MB is fresh pages each time: 16 ms of CPU against 64.
TILE = 1 << 20
TILE_ON_CUDA = 1 << 24  # there it is the launching that takes the time


# ---------------------------------------------------------------------------------------------------- resident weights


class Product(Protocol):
    """x [..., K], bias [N] in x's dtype, scratch (see `linear`) → [..., N]."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor: ...


class PackedWeight(Protocol):
    """A matrix that does not lie as torch multiplies it: quantised, in its stored parts, or reordered (`blocked`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]: outputs, inputs."""
        ...

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K] in `dtype`; in the memory of `out` (contiguous, of that shape and dtype) where given."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """x [..., K] times the matrix, plus bias [N] (in x's dtype) → [..., N]; scratch as for `linear` below."""
        ...

    @property
    def fused_linear(self) -> Product | None:
        """`linear` without dequantising, which is faster for few rows; None where there is no such kernel."""
        ...


Weight: TypeAlias = Tensor | PackedWeight


@runtime_checkable
class PackedTable(PackedWeight, Protocol):
    """A packed matrix whose rows can be had without the others: an embedding."""

    @property
    def device(self) -> torch.device: ...

    def take(self, indices: Tensor) -> PackedWeight:
        """The matrix [T, K] of these rows; indices: int64 [T], on its device."""
        ...


Table: TypeAlias = Tensor | PackedTable


class PackedMatrix:
    """What most packed weights do: dequantise for each product, unless a kernel was measured to be faster.

    form: what its product's cost is kept under (`products.ProductKind`).
    """

    form = ""

    @property
    def fused_linear(self) -> Product | None:
        return None

    @property
    def kernel(self) -> tuple[RowProduct, list[Tensor]] | None:
        """The kernel that multiplies with it as it lies on a CPU, and its parts; None where there is none."""
        return None

    def linear(self: PackedWeight, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        if (found := _chosen_kernel(self, x)) is not None:
            product, parts = found
            return products.plus(product(x, parts, self.shape[0]), bias)
        return linear(x, dense(self, x.dtype, scratch), bias)


def _chosen_kernel(matrix: Any, x: Tensor) -> tuple[RowProduct, list[Tensor]] | None:
    """Where it takes less than dequantising does."""
    if (
        x.device.type != "cpu"
        or not x.numel()
        or x.shape[-1] != matrix.shape[1]
        or (torch.is_grad_enabled() and x.requires_grad)
    ):
        return None
    kind = products.ProductKind.of(matrix.form, x.dtype, math.prod(matrix.shape))
    if products.COSTS.way(kind, products.rows_of(x)) != products.KERNEL:
        return None
    found: tuple[RowProduct, list[Tensor]] | None = matrix.kernel
    return found


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], plus bias [N] → [..., N] in x's dtype.

    scratch: at least N·K elements of x's dtype, 1-D, where a matrix is put that first has to be dequantised or
    converted; without it memory is allocated each time.
    """
    bias = bias if bias is None else bias.to(x.dtype)
    if bias is not None and bias.is_cuda and bias.data_ptr() % ALIGNMENT:
        bias = bias.clone()  # cuBLASLt may take a kernel for aligned ones (pytorch#194497)
    if not isinstance(weight, Tensor):
        return weight.linear(x, bias, scratch)
    if weight.device.type == "cpu":
        return products.multiply(x, weight, bias, scratch)
    if weight.dtype != x.dtype:
        weight = dense(weight, x.dtype, scratch)
    return F.linear(x, weight, bias)


def dense(weight: Weight, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
    """The weight as a plain tensor of `dtype`; where it has to be made, in `scratch` (1-D, of that dtype) if given."""
    if isinstance(weight, Tensor) and (scratch is None or weight.dtype == dtype):
        return weight.to(dtype)
    out = None if scratch is None else scratch[: math.prod(weight.shape)].view(weight.shape)
    if not isinstance(weight, Tensor):
        return weight.dequantize(dtype, out)
    assert out is not None
    return out.copy_(weight)


def as_table(weight: Weight) -> Table:
    """A weight whose rows are asked for alone."""
    assert isinstance(weight, Tensor | PackedTable), "a format whose rows cannot be had alone"
    return weight


def take_rows(table: Table, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, K] of a table [N, K], in `dtype`; indices: int64 [T], on its device."""
    if isinstance(table, Tensor):
        return F.embedding(indices, table).to(dtype)
    return table.take(indices).dequantize(dtype)


def tile(device: torch.device) -> int:
    """Elements that are dequantised at a time."""
    return TILE_ON_CUDA if device.type == "cuda" else TILE


# ------------------------------------------------------------------------------------------------------ stored weights


class StoredWeight(Protocol):
    """One logical weight of a checkpoint: what is to be read for each use, and how it then becomes a matrix."""

    @property
    def name(self) -> str:
        """The key it was found under, with or without a layer's prefix: "mlp.up_proj.weight"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: [N, K] also where it lies as [N·K/2, 1]."""
        ...

    @property
    def dtype(self) -> str:
        """As stored, for notes and plans: "F64", "F32", "F16", "BF16", or what its format calls it: "nf4", "awq"."""
        ...

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        """The parts to be brought for each use; constants were read before and are held."""
        ...

    @property
    def is_packed(self) -> bool:
        """Whether it has to be dequantised for each use."""
        ...

    @property
    def fused_kind(self) -> Hashable | None:
        """What the speed of its `fused_linear` depends on beside the dtype of x; None where its format has none."""
        ...

    def is_kept_as_read(self, dtype: torch.dtype) -> bool:
        """Whether what stays in memory for arithmetic in `dtype` is the bytes that were read."""
        ...

    def bind(self, parts: Sequence[Tensor]) -> Weight:
        """The weight over raw bytes: one uint8 [nbytes] for each of `streamed`, in that order, all on one device.

        Views of `parts`; a copy only where a part is not aligned to its own dtype.
        """
        ...

    def sample(self, device: torch.device) -> Weight:
        """A weight of this shape and layout over arbitrary bytes, to measure with; nothing is read."""
        ...

    def to(self, device: torch.device | str) -> StoredWeight:
        """The same, its constants on `device`, where the parts will be bound."""
        ...


@runtime_checkable
class StoredTable(StoredWeight, Protocol):
    """One whose rows lie one behind the other in its only part, so that some of them can be read alone."""

    def bind_rows(self, rows: Tensor) -> Weight:
        """The weight [T, K] over the bytes of T of its rows: uint8 [T, bytes of a row], contiguous."""
        ...


class PackedStored:
    """What most packed stored weights say: all that is needed lies in `streamed`, and is kept as it was read."""

    is_packed = True

    @property
    def fused_kind(self) -> Hashable | None:
        return None

    def is_kept_as_read(self, dtype: torch.dtype) -> bool:
        return True

    def sample(self: StoredWeight, device: torch.device) -> Weight:
        return self.to(device).bind([any_bytes(info.nbytes, device) for info in self.streamed])

    def to(self: StoredWeight, device: torch.device | str) -> StoredWeight:
        return self


def any_bytes(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes], none of them special."""
    return torch.arange(256, dtype=torch.uint8).mul_(37).repeat(-(-nbytes // 256))[:nbytes].to(device)


# ------------------------------------------------------------------------------------------------------------- formats


@dataclass
class TensorGroup:
    """The tensors of one logical weight by their part's name ("" is the weight itself), and what the small ones hold.

    contents: of the parts that the format's `constant_bytes` asks for.
    """

    name: str
    parts: dict[str, TensorInfo] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def weight(self) -> TensorInfo:
        """The part "". Raises CheckpointError where it is missing."""
        if "" not in self.parts:
            part, info = next(iter(self.parts.items()))
            self.refuse(info, f"is missing, but its {show(part)} is there; {DAMAGED}")
        return self.parts[""]

    def refuse(self, info: TensorInfo, what: str) -> NoReturn:
        raise fault(info.path, f"weight {show(self.name)} {what}")

    def companion(self, part: str) -> TensorInfo:
        """Raises CheckpointError where it is missing."""
        if part not in self.parts:
            self.refuse(self.weight, f"lacks its {part}; {DAMAGED}")
        return self.parts[part]

    def expect(self, part: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError for a part of another dtype or shape."""
        info = self.parts[part]
        if (info.dtype, info.shape) != (dtype, shape):
            found, wanted = f"{info.dtype} {list(info.shape)}", f"{dtype} {list(shape)}"
            self.refuse(info, f"has a {part} that is {found}, where {wanted} belongs; {DAMAGED}")


Allocate: TypeAlias = Callable[[str, str, tuple[int, ...]], TensorInfo]  # name, dtype, shape → its place in a file


class Packer(Protocol):
    """How `offspec quantize` writes a format, with the settings of one run."""

    def prepare(self) -> None:
        """Raises OffspecError where something that packing needs is not installed."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What is added to a weight's name for each tensor of it; "" is the weight's own."""
        ...

    def num_bytes(self, elements: int) -> int:
        """Bytes that a matrix of so many elements will take in a file, or a little more."""
        ...

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """weight [N, K] (bf16, fp16 or fp32, on the CPU) → suffix → tensor. Raises CheckpointError where it cannot."""
        ...

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """What config.json says of it, where the weights were `dtype` ("BF16")."""
        ...

    @property
    def versions(self) -> dict[str, str]:
        """Of what the result's bits depend on, by name."""
        ...


class WeightFormat(ABC):
    """One way in which weights are stored. An instance is registered once, in `registry.FORMATS`.

    names: what its stored weights call themselves (`StoredWeight.dtype`). plan_forms: which of `params.PLAN_FORMATS` it
    sizes. outside_layers: the form of what lies outside the layers in a plan; None is the same. notes: what somebody
    who loads a checkpoint in it should be told, a sentence each.
    """

    names: tuple[str, ...] = ()
    plan_forms: tuple[str, ...] = ()
    outside_layers: str | None = None
    notes: tuple[str, ...] = ()

    def in_checkpoint(self, checkpoint: Checkpoint) -> WeightFormat | None:
        """The format as this checkpoint's config sets it; None where the config says that it is not this one.

        Raises UnsupportedModelError, CheckpointError.
        """
        return self

    def companion(self, key: str) -> tuple[str, str] | None:
        """(weight's name, part) of a tensor that, by its name, belongs to a weight of this format, or None."""
        return None

    @abstractmethod
    def recognises(self, group: TensorGroup) -> bool:
        """Whether these tensors, whose contents are not known yet, are a weight of this format, sound or not."""

    def constant_bytes(self, part: str) -> int:
        """How many bytes of this part are read at most when a checkpoint is opened; 0: it is not."""
        return 0

    @abstractmethod
    def read(self, group: TensorGroup) -> StoredWeight:
        """The weight that these tensors are, each disbelieved first. Raises CheckpointError."""

    def blank_tensors(self, infos: Mapping[str, TensorInfo], wanted: Collection[str]) -> set[str]:
        """Names of tensors that are not `wanted` and that tools of this format write although they hold nothing."""
        return set()

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        """The form of `params.PLAN_FORMATS` by which a checkpoint with this config.json is sized, or None."""
        return None

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight | None:
        """A weight as it would be stored in this format (as `form`, one of its names or plan_forms); None: not known.

        It is never read: for plans from config.json alone, and to measure with (`StoredWeight.sample`).
        """
        return None

    def prepare(self) -> None:  # noqa: B027 (most formats need nothing)
        """Import what its arithmetic needs on a CPU. Raises OffspecError where that is not installed."""

    def packer(self, params: ConvertParams) -> Packer | None:
        """What writes `params.format`; None where that is not this format's."""
        return None


# ------------------------------------------------------------------------------------------------------- small contents


def read_small(most: Mapping[TensorInfo, int]) -> dict[TensorInfo, bytes]:
    """The contents of tensors, of each at most so many bytes, file by file in the order of their bytes.

    Raises CheckpointError. A part that is far too long is refused by its shape, or as JSON; it need not be read to be.
    """
    wanted = sorted(most, key=lambda info: (info.path, info.offset))
    contents: dict[TensorInfo, bytes] = {}
    for path, pieces in groupby(wanted, key=lambda info: info.path):
        with reading(path), path.open("rb") as file:
            for info in pieces:
                contents[info] = _read_start(file, info, min(info.nbytes, most[info]))
    return contents


def _read_start(file: BinaryIO, info: TensorInfo, nbytes: int) -> bytes:
    file.seek(info.offset)
    content = file.read(nbytes)
    if len(content) < nbytes:
        what = f"ends before tensor {show(info.name)} does; something changed it, download it again"
        raise fault(info.path, what)
    return content
