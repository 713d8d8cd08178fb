"""bf16 matrices in about 12 bits a weight (`bf16_bits`), in files, in memory and in products, all with the same bits.

X.weight.bf16_low, .bf16_codes, .bf16_groups: its parts, uint8. Products are computed in the way that is chosen for the
plain matrix, so that a packed model's logits are those of the unpacked one, bit for bit: by torch with the matrix
unpacked first, or by a kernel that makes the same vectors of fp32 as that for plain bf16, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from offspec.backends.on_gpu import triton_kernels
from offspec.backends.weights import Kernel
from offspec.backends.x86.bf16_bits import Bf16Bits
from offspec.backends.x86.processor import num_lanes, per_processor
from offspec.backends.x86.row_product import RowProduct
from offspec.backends.x86.unpack import Unpacker
from offspec.errors import CheckpointError

from ..files.checkpoint import TensorInfo
from ..params import LOSSLESS_FORMAT, ConvertParams
from .bf16_bits import (
    BLOCK,
    MOST_EXCEPTIONS,
    TABLE_BYTES,
    PackedBits,
    group_rows,
    pack,
    part_shapes,
    unpack,
)
from .core import DAMAGED, Allocate, PackedStored, Packer, StoredWeight, TensorGroup, WeightFormat, any_bytes
from .plain import PlainWeight
from .unpacked import UnpackedMatrix

LOW, CODES, GROUPS = PARTS = ("bf16_low", "bf16_codes", "bf16_groups")
PLANNED_VALUES = 32  # a group: more than matrices of published models need
_UNPACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PackedBf16Matrix(UnpackedMatrix):
    """A packed bf16 matrix [N, K]."""

    bits: PackedBits
    form = LOSSLESS_FORMAT
    unpacked_dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def device(self) -> torch.device:
        return self.bits.low.device

    @property
    def kernel(self) -> tuple[RowProduct, list[Tensor]] | None:
        product = _product()
        if product is None or not product.encoding.can_read(self.shape[1]):
            return None
        return product, self.kernel_parts

    @property
    def kernel_parts(self) -> list[Tensor]:
        """What the kernels' encoding reads: its parts and settings."""
        bits = self.bits
        return [bits.low, bits.codes, bits.groups, _settings(self.shape[1], bits.groups.shape[1])]

    def kernel_for(self, dtype: torch.dtype) -> Kernel | None:
        """None for rows of fp16: a resident matrix was rounded to fp16, whose least numbers are larger than bf16's."""
        return None if dtype == torch.float16 else super().kernel_for(dtype)

    def unpack(self, out: Tensor) -> None:
        unpack(self.bits, out)

    def compiled_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        unpacker = _unpacker(out.dtype) if self.shape[1] % BLOCK == 0 else None
        if unpacker is None or not unpacker.is_worthwhile(out.numel()):
            return None
        return partial(unpacker, self.kernel_parts, out)

    def launched_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        if (kernels := triton_kernels()) is None:
            return None
        parts = self.bits.low, self.bits.codes, self.bits.groups
        return partial(kernels.unpack_bf16_bits, *parts, group_rows(self.shape[1]), out)


@per_processor
def _product() -> RowProduct | None:
    lanes = num_lanes()
    return RowProduct(Bf16Bits(lanes)) if lanes else None


@per_processor
def _unpacker(dtype: torch.dtype) -> Unpacker | None:
    """Its steps are of 32 weights on every CPU, a block of codes."""
    return Unpacker(Bf16Bits(8), dtype) if num_lanes() and dtype in _UNPACKED_DTYPES else None


@cache
def _settings(num_columns: int, group_bytes: int) -> Tensor:
    """What kernels need besides the parts: log2 of a group's rows, its bytes, and the number of its last value."""
    shift = group_rows(num_columns).bit_length() - 1
    return torch.tensor([shift, group_bytes, (group_bytes - TABLE_BYTES) // 2 - 1])


# -------------------------------------------------------------------------------------------------- the stored weight


@dataclass(frozen=True)
class PackedBf16Weight(PackedStored):
    """A stored weight: its three parts are streamed."""

    name: str
    shape: tuple[int, ...]
    streamed: tuple[TensorInfo, ...]
    dtype: str = LOSSLESS_FORMAT
    plain_dtype = "BF16"

    def is_kept_as_read(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    def bind(self, parts: Sequence[Tensor]) -> PackedBf16Matrix:
        low, codes, groups = (part.view(info.shape) for part, info in zip(parts, self.streamed, strict=True))
        return PackedBf16Matrix(PackedBits((self.shape[0], self.shape[1]), low, codes, groups))

    def sample(self, device: torch.device) -> PackedBf16Matrix:
        """A sample with normal numbers, and without exceptions."""
        low, codes, groups = (any_bytes(info.nbytes, device) for info in self.streamed)
        tables = groups.view(self.streamed[2].shape)
        tables[:, :TABLE_BYTES] = torch.arange(127 - TABLE_BYTES, 127, dtype=torch.uint8, device=device)
        return self.bind([low, codes & 0x77, groups])


class PackedBf16Format(WeightFormat):
    """Recognised by the names of its parts."""

    names = (LOSSLESS_FORMAT,)
    plan_forms = (LOSSLESS_FORMAT,)
    outside_layers = "bf16"

    def companion(self, key: str) -> tuple[str, str] | None:
        base, _, part = key.rpartition(".")
        return (base, part) if part in PARTS else None

    def recognises(self, group: TensorGroup) -> bool:
        return any(part in group.parts for part in PARTS)

    def read(self, group: TensorGroup) -> PackedBf16Weight:
        first = next(group.parts[part] for part in (*PARTS, *group.parts) if part in group.parts)
        for part in group.parts:
            if part not in PARTS:
                group.refuse(first, f"is there twice, plain and as {LOSSLESS_FORMAT}; {DAMAGED}")
        for part in PARTS:
            if part not in group.parts:
                group.refuse(first, f"lacks its {part}; {DAMAGED}")
        low, groups = group.parts[LOW], group.parts[GROUPS]
        if len(low.shape) != 2 or 0 in low.shape:
            group.refuse(low, f"has a {LOW} that is {list(low.shape)}, not a matrix [N, K]; {DAMAGED}")
        width = groups.shape[1] if len(groups.shape) == 2 else 0
        num_values = min(MOST_EXCEPTIONS, max(1, (width - TABLE_BYTES) // 2))
        shape = (low.shape[0], low.shape[1])
        for part, wanted in zip(PARTS, part_shapes(shape, num_values), strict=True):
            group.expect(part, "U8", wanted)
        return PackedBf16Weight(group.name, shape, tuple(group.parts[part] for part in PARTS))

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight:
        if len(shape) != 2:
            return PlainWeight(name, allocate(name, "BF16", shape))
        wanted = part_shapes((shape[0], shape[1]), PLANNED_VALUES)
        parts = (
            allocate(f"{name}.{part}", "U8", shape_of_part) for part, shape_of_part in zip(PARTS, wanted, strict=True)
        )
        return PackedBf16Weight(name, shape, tuple(parts))

    def packer(self, params: ConvertParams) -> Packer | None:
        return Bf16Packer() if params.format == LOSSLESS_FORMAT else None


@dataclass(frozen=True)
class Bf16Packer:
    """Packs bf16 matrices. Each is unpacked again and compared with the source, bit for bit; one that would not shrink
    stays plain.
    """

    suffixes = tuple(f".{part}" for part in PARTS)
    is_lossless = True

    def prepare(self) -> None:
        pass

    def for_shape(self, shape: tuple[int, ...]) -> Bf16Packer:
        return self

    def num_bytes(self, elements: int) -> int:
        return 2 * elements

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        weight = weight.contiguous()
        packed = pack(weight)
        if packed is None:
            return {"": weight}
        unpacked = PackedBf16Matrix(packed).dequantize(torch.bfloat16)
        if not torch.equal(unpacked.view(torch.int16), weight.view(torch.int16)):
            raise CheckpointError(
                "came back with other bits after packing, which tells of faulty memory in this machine"
            )
        return dict(zip(self.suffixes, (packed.low, packed.codes, packed.groups), strict=True))

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        return {}

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}
