"""Matrices in the quantised types of GGUF (llama.cpp's Q4_K, Q8_0, IQ4_XS, ...): each row consists of blocks.

A row of K weights has K / 32 or K / 256 consecutive blocks, each with its own scales; `gguf_blocks` decodes them. The
numbers equal those of the `gguf` package bit for bit, rounded once to the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType

import torch
from torch import Tensor

from offspec.backends.choice import backend_of
from offspec.backends.on_gpu import WORKING_KERNELS, gguf_kernels, on_device
from offspec.backends.weights import Product
from offspec.backends.x86.byte_product import byte_product
from offspec.backends.x86.gguf_encodings import block_encoding
from offspec.backends.x86.processor import num_lanes, per_processor
from offspec.backends.x86.row_product import RowProduct
from offspec.backends.x86.unpack import Unpacker

from ..files.checkpoint import TensorInfo, show
from ..files.gguf_types import GGUF_TYPES, GgufType
from ..params import MADE_MIXTURES, SHADOW_FORMATS, ConvertParams
from .core import DAMAGED, Allocate, PackedStored, Packer, StoredWeight, TensorGroup, WeightFormat, any_bytes
from .gguf_blocks import HALVES, UNPACK, VALUES, check_grid
from .gguf_pack import PACK, GgufPacker, suffix
from .gguf_search import QUANTISE, search_rows
from .plain import PlainWeight
from .unpacked import UnpackedMatrix

QUANTISED: Mapping[str, GgufType] = {kind.name: kind for kind in GGUF_TYPES.values() if kind.name in UNPACK}
# Suffix of a tensor of blocks → their type.
IN_FOLDERS = {suffix(name).removeprefix("."): name for name in (*PACK, *QUANTISE)}
MOST_AT_ONCE = 1 << 22  # weights at a time in plain torch; temporary memory on a GPU is then some 100 MB
_ORDINARY_EXPONENT = 124  # MXFP4's of 1/16
_ORDINARY_HALF = 0x2C  # the upper byte of an fp16 number between 1/16 and 1/8


@dataclass(frozen=True)
class GgufMatrix(UnpackedMatrix):
    """blocks uint8 [N, bytes of a row], each row contiguous."""

    kind: GgufType
    blocks: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        num_rows, row_bytes = self.blocks.shape
        return num_rows, row_bytes // self.kind.num_bytes * self.kind.num_weights

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @cached_property
    def form(self) -> str:  # type: ignore[override]
        return self.kind.name

    @property
    def address(self) -> int | None:
        return self.blocks.data_ptr() if self.blocks.is_contiguous() else None

    def take(self, indices: Tensor) -> GgufMatrix:
        """The matrix [T, K] of these rows; indices: int64 [T], on its device."""
        return GgufMatrix(self.kind, self.blocks.index_select(0, indices))

    def unpack(self, out: Tensor) -> None:
        kind, unpack = self.kind, UNPACK[self.form]
        blocks, numbers = self.blocks.reshape(-1, kind.num_bytes), out.view(-1, kind.num_weights)
        step = max(1, min(backend_of(self.device).tile, MOST_AT_ONCE) // kind.num_weights)
        for first in range(0, len(blocks), step):
            numbers[first : first + step] = unpack(blocks[first : first + step])

    def compiled_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        unpacker = _unpacker(self.kind.name, out.dtype)
        if unpacker is None or not unpacker.is_worthwhile(out.numel()):
            return None
        return partial(unpacker, [self.blocks], out)

    def launched_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        kernels = _gpu_kernels(self.form)
        return None if kernels is None else partial(kernels.unpack, self.form, self.blocks, out)

    @cached_property
    def kernel(self) -> tuple[RowProduct, list[Tensor]] | None:
        product = _product(self.kind.name)
        return None if product is None else (product, [self.blocks])

    @property
    def fused_linear(self) -> Product | None:
        return self.multiplied if backend_of(self.device).fuses and _gpu_kernels(self.form) else None

    def multiplied(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """`linear` by the kernel that reads the blocks; there has to be one for the type."""
        kernels = _gpu_kernels(self.form)
        assert kernels is not None
        with on_device(self.device):
            product: Tensor = kernels.multiply(self.form, x, self.blocks)
        return product if bias is None else product.add_(bias)

    def is_recordable(self, dtype: torch.dtype) -> bool:
        return WORKING_KERNELS.has((self.form, dtype), self.device) is True


@per_processor
def _product(name: str) -> RowProduct | None:
    encoding = block_encoding(name, lanes, VALUES.get(name, ())) if (lanes := num_lanes()) else None
    if encoding is None:
        return None
    product = RowProduct(encoding)
    product.in_bytes = byte_product(name, encoding, VALUES.get(name, ()))
    return product


def _gpu_kernels(form: str) -> ModuleType | None:
    """Triton's kernels, if they know the type."""
    kernels = gguf_kernels()
    return kernels if kernels is not None and form in kernels.LAYOUTS else None


@per_processor
def _unpacker(name: str, dtype: torch.dtype) -> Unpacker | None:
    product = _product(name) if dtype in (torch.float32, torch.bfloat16, torch.float16) else None
    return None if product is None else Unpacker(product.encoding, dtype)


@dataclass(frozen=True)
class GgufWeight(PackedStored):
    """A stored weight [N, K] in blocks of `kind`, without other data."""

    name: str
    kind: GgufType
    shape: tuple[int, ...]
    streamed: tuple[TensorInfo, ...]

    @property
    def dtype(self) -> str:
        return self.kind.name

    @property
    def fused_kind(self) -> Hashable | None:
        return None if _gpu_kernels(self.kind.name) is None else (self.kind.name, self.shape)

    def bind(self, parts: Sequence[Tensor]) -> GgufMatrix:
        return self.bind_rows(parts[0].view(self.shape[0], -1))

    def bind_rows(self, rows: Tensor) -> GgufMatrix:
        return GgufMatrix(self.kind, rows)

    def sample(self, device: torch.device) -> GgufMatrix:
        """A sample with normal numbers as scales."""
        blocks = any_bytes(self.streamed[0].nbytes, device).view(-1, self.kind.num_bytes)
        for place in HALVES[self.kind.name]:
            blocks[:, place + 1] = _ORDINARY_HALF
        if self.kind.name == "MXFP4":
            blocks[:, 0] = _ORDINARY_EXPONENT
        return self.bind([blocks.view(-1)])


class GgufFormat(WeightFormat):
    """GGUF's quantised types, recognised by the container's dtype, or by the tensor's name in a safetensors folder."""

    names = tuple(QUANTISED)
    plan_forms = tuple(SHADOW_FORMATS.values())

    def companion(self, key: str) -> tuple[str, str] | None:
        base, _, part = key.rpartition(".")
        return (base, part) if part in IN_FOLDERS else None

    def recognises(self, group: TensorGroup) -> bool:
        return bool(IN_FOLDERS.keys() & group.parts) or ("" in group.parts and group.parts[""].dtype in QUANTISED)

    def read(self, group: TensorGroup) -> GgufWeight:
        if part := next((part for part in group.parts if part in IN_FOLDERS), None):
            return _read_bytes(group, part)
        info = group.weight
        kind = QUANTISED[info.dtype]
        if len(info.shape) != 2 or 0 in info.shape:
            group.refuse(info, f"is {kind.name} {list(info.shape)}, which should be a matrix [N, K]; {DAMAGED}")
        if info.shape[1] % kind.num_weights:
            description = f"is {kind.name} with {info.shape[1]} inputs, not a multiple of {kind.num_weights}"
            group.refuse(info, f"{description}; {DAMAGED}")
        if info.nbytes != (wanted := _num_bytes(kind, info.shape)):
            description = f"is {kind.name} {list(info.shape)} in {info.nbytes} bytes, but needs {wanted}"
            group.refuse(info, f"{description}; {DAMAGED}")
        check_grid(kind.name)
        return GgufWeight(group.name, kind, info.shape, (info,))

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight | None:
        if form in IN_FOLDERS:
            return _as_packed(IN_FOLDERS[form], name, shape, allocate)
        kind = QUANTISED[form]
        if len(shape) != 2 or shape[1] % kind.num_weights:
            return None
        check_grid(form)
        info = allocate(name, "U8", (shape[0], _num_bytes(kind, shape) // shape[0]))
        return GgufWeight(name, kind, shape, (info,))

    def packer(self, params: ConvertParams) -> Packer | None:
        if params.format in MADE_MIXTURES:
            return GgufPacker("Q8_0", search_rows)  # the conversion names each matrix's type
        return GgufPacker(IN_FOLDERS[params.format]) if params.format in SHADOW_FORMATS.values() else None


def _as_packed(kind: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight:
    """A weight as `GgufPacker` would leave it."""
    packer = GgufPacker(kind).for_shape(shape) if len(shape) == 2 else None
    if packer is None:
        return PlainWeight(name, allocate(name, "BF16", shape))
    info = allocate(name + packer.suffixes[0], "U8", (shape[0], packer.num_bytes(shape[0] * shape[1]) // shape[0]))
    return GgufWeight(name, QUANTISED[packer.name], shape, (info,))


def _read_bytes(group: TensorGroup, part: str) -> GgufWeight:
    """A matrix stored as bytes [N, bytes per row] under a name with the type's suffix. Raises CheckpointError."""
    info, kind = group.parts[part], QUANTISED[IN_FOLDERS[part]]
    if len(group.parts) > 1:
        group.refuse(info, f"is there twice, as {' and '.join(map(show, group.parts))}; {DAMAGED}")
    if info.dtype != "U8" or len(info.shape) != 2 or 0 in info.shape or info.shape[1] % kind.num_bytes:
        group.refuse(info, f"is {info.dtype} {list(info.shape)}, not rows of {kind.name}; {DAMAGED}")
    num_rows, row_bytes = info.shape
    return GgufWeight(group.name, kind, (num_rows, row_bytes // kind.num_bytes * kind.num_weights), (info,))


def _num_bytes(kind: GgufType, shape: tuple[int, ...]) -> int:
    return math.prod(shape) // kind.num_weights * kind.num_bytes
