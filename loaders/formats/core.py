"""Interfaces of stored weights and weight formats.

A *stored* weight lists the bytes to read for each use. `bind` creates a *resident* weight as views of these bytes, with
which a `Backend` multiplies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from offspec.backends.weights import Weight

from ..files.checkpoint import Checkpoint, TensorInfo, fault, reading, show
from ..params import ConvertParams

DAMAGED = "the checkpoint is damaged, download it again"
REMEDY = "use the 16-bit checkpoint, a bitsandbytes 4-bit one, or make one with `offspec quantize`"

# ------------------------------------------------------------------------------------------------------ stored weights


class StoredWeight(Protocol):
    """One logical weight of a checkpoint: the tensors to read for each use, and their conversion to a matrix."""

    @property
    def name(self) -> str:
        """Its key, with or without a layer's prefix: "mlp.up_proj.weight"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: [N, K] even if it is stored as [N·K/2, 1]."""
        ...

    @property
    def dtype(self) -> str:
        """The stored dtype, for notes and plans: "F64", "F32", "F16", "BF16", or its format's name: "nf4", "awq"."""
        ...

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        """The parts to read for each use; constants are already in memory."""
        ...

    @property
    def is_packed(self) -> bool:
        """Whether it must be dequantised for each use."""
        ...

    @property
    def plain_dtype(self) -> str | None:
        """The stored dtype of the plain tensor with the same bits, "BF16"; None if it is quantised."""
        ...

    @property
    def fused_kind(self) -> Hashable | None:
        """A key for the speed of its `fused_linear`, besides the dtype of x; None if its format has none."""
        ...

    def is_kept_as_read(self, dtype: torch.dtype) -> bool:
        """Whether a resident weight for computing in `dtype` consists of the bytes read."""
        ...

    def bind(self, parts: Sequence[Tensor]) -> Weight:
        """The weight over raw bytes: one uint8 [nbytes] for each of `streamed`, in that order, all on one device.

        Returns views of `parts`; a copy only if a part is not aligned to its dtype.
        """
        ...

    def sample(self, device: torch.device) -> Weight:
        """A weight of this shape and layout over arbitrary bytes, for measurements."""
        ...

    def to(self, device: torch.device | str) -> StoredWeight:
        """The same weight with its constants on `device`, where the parts will be bound."""
        ...


@runtime_checkable
class StoredTable(StoredWeight, Protocol):
    """A stored weight with consecutive rows in its only part, so that single rows can be read."""

    def bind_rows(self, rows: Tensor) -> Weight:
        """The weight [T, K] over the bytes of T of its rows: uint8 [T, bytes of a row], contiguous."""
        ...


class PackedStored:
    """Base of most packed stored weights: all data are in `streamed`, and are kept as read."""

    is_packed = True
    plain_dtype: str | None = None

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
    """uint8 [nbytes] of arbitrary values."""
    return torch.arange(256, dtype=torch.uint8).mul_(37).to(device).repeat(-(-nbytes // 256))[:nbytes]


# ------------------------------------------------------------------------------------------------------------- formats


@dataclass
class TensorGroup:
    """The tensors of one logical weight by part name ("" is the weight itself), and the contents of small ones.

    contents: of the parts that the format's `constant_bytes` requests.
    """

    name: str
    parts: dict[str, TensorInfo] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def weight(self) -> TensorInfo:
        """The part "". Raises CheckpointError if it is missing."""
        if "" not in self.parts:
            part, info = next(iter(self.parts.items()))
            self.refuse(info, f"is missing, but its {show(part)} exists; {DAMAGED}")
        return self.parts[""]

    def refuse(self, info: TensorInfo, problem: str) -> NoReturn:
        raise fault(info.path, f"weight {show(self.name)} {problem}")

    def companion(self, part: str) -> TensorInfo:
        """A part. Raises CheckpointError if it is missing."""
        if part not in self.parts:
            self.refuse(self.weight, f"lacks its {part}; {DAMAGED}")
        return self.parts[part]

    def expect(self, part: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError for a part of another dtype or shape."""
        info = self.parts[part]
        if (info.dtype, info.shape) != (dtype, shape):
            stored, wanted = f"{info.dtype} {list(info.shape)}", f"{dtype} {list(shape)}"
            self.refuse(info, f"has a {part} that is {stored}, not {wanted}; {DAMAGED}")


Allocate: TypeAlias = Callable[[str, str, tuple[int, ...]], TensorInfo]  # name, dtype, shape → its place in a file


class Packer(Protocol):
    """Writes a format for `offspec quantize`, with the settings of one run."""

    @property
    def is_lossless(self) -> bool:
        """Whether it packs bf16 matrices alone, keeps their bits, and returns those that would not shrink as they are,
        under the weight's own name.
        """
        ...

    def prepare(self) -> None:
        """Raises OffspecError if a package that packing needs is missing."""
        ...

    def for_shape(self, shape: tuple[int, ...]) -> Packer | None:
        """The packer for a matrix of this shape; None if the matrix is kept unchanged."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The name suffix of each tensor of a weight; "" for the weight itself."""
        ...

    def num_bytes(self, elements: int) -> int:
        """Bytes of a matrix with this number of elements in a file, or an upper bound of them."""
        ...

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """weight [N, K] (bf16, fp16 or fp32, on the CPU) → suffix → tensor. Raises CheckpointError if it cannot."""
        ...

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """The quantization_config for config.json, for source weights of `dtype` ("BF16")."""
        ...

    @property
    def versions(self) -> dict[str, str]:
        """Versions, by name, of the packages that the result's bits depend on."""
        ...


class WeightFormat(ABC):
    """One way to store weights. Each is registered once, in `registry.FORMATS`.

    names: the values of `StoredWeight.dtype` of its weights. plan_forms: the `params.PLAN_FORMATS` that it sizes.
    outside_layers: the form of weights outside the layers in a plan; None is the same form. notes: for the user who
    loads such a checkpoint, one sentence each.
    """

    names: tuple[str, ...] = ()
    plan_forms: tuple[str, ...] = ()
    outside_layers: str | None = None
    notes: tuple[str, ...] = ()

    def in_checkpoint(self, checkpoint: Checkpoint) -> WeightFormat | None:
        """The format with the settings of this checkpoint's config; None if the config excludes this format.

        Raises UnsupportedModelError, CheckpointError.
        """
        return self

    def companion(self, key: str) -> tuple[str, str] | None:
        """(weight's name, part) of a tensor whose name belongs to a weight of this format, or None."""
        return None

    @abstractmethod
    def recognises(self, group: TensorGroup) -> bool:
        """Whether these tensors are a weight of this format, valid or not, before their contents are read."""

    def constant_bytes(self, part: str) -> int:
        """The maximum number of bytes of this part to read when a checkpoint is opened; 0: none."""
        return 0

    @abstractmethod
    def read(self, group: TensorGroup) -> StoredWeight:
        """Check the tensors and build the weight. Raises CheckpointError."""

    def blank_tensors(self, infos: Mapping[str, TensorInfo], wanted: Collection[str]) -> set[str]:
        """Names of tensors without content that tools of this format write, except those in `wanted`."""
        return set()

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        """The form of `params.PLAN_FORMATS` for a plan of a checkpoint with this config.json, or None."""
        return None

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight | None:
        """A weight as this format would store it (as `form`, one of its names or plan_forms); None if unknown.

        It is never read. It serves plans from config.json alone, and measurements (`StoredWeight.sample`).
        """
        return None

    def prepare(self) -> None:  # noqa: B027 (most formats need nothing)
        """Import the packages for its arithmetic on a CPU. Raises OffspecError if one is missing."""

    def packer(self, params: ConvertParams) -> Packer | None:
        """The packer for `params.format`; None if another format writes it."""
        return None


# ------------------------------------------------------------------------------------------------------- small contents


def read_small(most: Mapping[TensorInfo, int]) -> dict[TensorInfo, bytes]:
    """The contents of tensors, up to the given number of bytes each, read in file order.

    Raises CheckpointError. The format refuses a part that is too long by its shape, or as JSON.
    """
    wanted = sorted(most, key=lambda info: (info.path, info.offset))
    contents: dict[TensorInfo, bytes] = {}
    for path, pieces in groupby(wanted, key=lambda info: info.path):
        with reading(path), path.open("rb") as file:
            for info in pieces:
                nbytes = min(info.nbytes, most[info])
                file.seek(info.offset)
                content = file.read(nbytes)
                if len(content) < nbytes:
                    description = f"ends inside tensor {show(info.name)}: the file was changed; download it again"
                    raise fault(info.path, description)
                contents[info] = content
    return contents
