"""Matrices of codes with a scale per rectangle, as in fp8 and compressed-tensors checkpoints.

    w[n, k] = (code[n, k] - zero[n // a, k // b]) · scale[n // a, k // b]

A rectangle of a outputs and b inputs is a block (128 by 128), a group (1 by 128), a row, or the whole matrix. Only
asymmetric schemes have zeros. Codes are stored row by row:
    fp8     e4m3, one byte each
    int8    one byte each
    fp4     e2m1, two per byte, low half first
    packed  integers of 2 to 8 bit plus half their range, without gaps in int32 words, lowest bits first
Differences and products are computed in fp32 and rounded once, to the requested dtype. The results equal those of
compressed-tensors, which computes in the dtype of its scales, because codes, zeros and their products with 16-bit
scales are exact in fp32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.choice import backend_of
from offspec.backends.x86.encodings import Blocks, Int8
from offspec.backends.x86.processor import num_lanes
from offspec.backends.x86.row_product import RowProduct
from offspec.backends.x86.scaled import Fp8, LowFirst, MxFp4
from offspec.backends.x86.unpack import Unpacker

from ..files.checkpoint import TensorInfo
from ..files.records import FLOAT_DTYPES, typed
from ..params import MXFP4
from .core import Allocate, PackedStored, StoredWeight, WeightFormat, any_bytes
from .plain import PlainWeight
from .unpacked import UnpackedMatrix

_FP4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without its sign, the highest bit
FP4_NUMBERS = (*_FP4_SIZES, *(-size for size in _FP4_SIZES))  # by their codes
# Dtypes of scales and zeros. E8M0 is only an exponent: 2^(code - 127); files also name it U8.
SCALE_DTYPES = {
    **FLOAT_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I32": torch.int32,
}
EXPONENTS = ("F8_E8M0", "U8")
_WORD_BITS, _BYTE_BITS = 32, 8
_UNPACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SPREAD_GROUP = 128  # inputs per scale in a kernel, for a matrix with one scale per row

Block: TypeAlias = tuple[int, int]  # outputs and inputs that share a scale


def grid(shape: tuple[int, int], block: Block) -> tuple[int, int]:
    """The number of rectangles along outputs and inputs; those at the ends may be smaller."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


# ---------------------------------------------------------------------------------------------------------------- codes


MX_BLOCK = (1, 32)  # of a scale that is only an exponent (OCP Microscaling Formats)


@dataclass(frozen=True)
class Codes:
    """The encoding of a matrix's codes. kind: fp8, int8, fp4 or packed."""

    kind: str
    bits: int

    def row_bytes(self, num_columns: int) -> int:
        bits = num_columns * self.bits
        return -(-bits // _WORD_BITS) * 4 if self.kind == "packed" else -(-bits // _BYTE_BITS)

    def unpack(self, raw: Tensor) -> Tensor:
        """uint8 [R, row bytes] → fp32 [R, at least K], in new memory."""
        if self.kind == "fp8":
            return _fp8(raw)
        if self.kind == "int8":
            return raw.view(torch.int8).float()
        if self.bits == _BYTE_BITS:
            return raw.float().sub_(1 << (self.bits - 1))
        if _BYTE_BITS % self.bits:
            return _across_bytes(raw, self.bits)
        table = _byte_values(self.kind, self.bits, raw.device)
        return table.index_select(0, raw.reshape(-1).int()).view(torch.float32).view(raw.shape[0], -1)


FP4 = Codes("fp4", 4)


def _fp8(raw: Tensor) -> Tensor:
    """fp8 codes → fp32. Shifted to fp16's places of sign, exponent and fraction, a code is 1/256 of its value, also for
    denormals. Where torch's own conversion takes eight times as long, only NaN needs it.
    """
    if backend_of(raw.device).converts_fp8 or not raw.numel() or int((raw & 0x7F).amax()) == 0x7F:
        return raw.view(torch.float8_e4m3fn).float()
    wide = raw.view(torch.int8).to(torch.int16)  # sign-extended
    return wide.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256)


@cache
def _byte_values(kind: str, bits: int, device: torch.device) -> Tensor:
    """[256]: the two or four fp32 values of a byte as one number, so that a look-up moves one number."""
    numbers = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1)).float()
    if kind == "fp4":
        numbers = torch.tensor(FP4_NUMBERS)
    byte = torch.arange(256)
    values = [numbers[(byte >> first) % (1 << bits)] for first in range(0, _BYTE_BITS, bits)]
    wide = torch.int64 if len(values) == 2 else torch.complex128
    return torch.stack(values, dim=1).view(wide)[:, 0].to(device)


def _across_bytes(raw: Tensor, bits: int) -> Tensor:
    """Codes of 3, 5, 6 or 7 bit, which may cross bytes: eight codes occupy `bits` bytes."""
    eights = F.pad(raw, (0, -raw.shape[1] % bits)).view(raw.shape[0], -1, bits).to(torch.int16)
    values = torch.empty(*eights.shape[:2], _BYTE_BITS, device=raw.device)
    for i in range(_BYTE_BITS):
        first, place = divmod(i * bits, _BYTE_BITS)
        codes = eights[..., first] >> place
        if place + bits > _BYTE_BITS:
            codes |= eights[..., first + 1] << (_BYTE_BITS - place)
        values[..., i] = codes & ((1 << bits) - 1)
    return values.view(raw.shape[0], -1).sub_(1 << (bits - 1))


# --------------------------------------------------------------------------------------------------------- the matrix


@dataclass(frozen=True)
class ScaledLayout:
    """The layout of one matrix [N, K].

    form: its name in notes, plans and costs of products. packed_zeros: zeros are packed like the codes, along the
    outputs. groups: int64 [K], each input's column of scales, if inputs of a group are not contiguous.
    """

    shape: tuple[int, int]
    form: str
    codes: Codes
    block: Block
    packed_zeros: bool = False
    groups: Tensor | None = None

    @property
    def grid(self) -> tuple[int, int]:
        return grid(self.shape, self.block)


@dataclass(frozen=True)
class ScaledMatrix(UnpackedMatrix):
    """codes uint8 [N, row bytes]; scales [grid] of some dtype; zeros of that shape, or packed int32 [W, columns of the
    grid]; divisor fp32 [1] of all scales.
    """

    layout: ScaledLayout
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    divisor: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def form(self) -> str:  # type: ignore[override]
        return self.layout.form

    @property
    def kernel(self) -> tuple[RowProduct, list[Tensor]] | None:
        product_and_tile = None if self.zeros is not None or self.layout.groups is not None else _product(self.layout)
        if product_and_tile is None or not product_and_tile[0].encoding.can_read(self.shape[1]):
            return None
        product, (height, width) = product_and_tile
        if isinstance(product.encoding, MxFp4):
            return product, [self.codes, self.scales.view(torch.uint8)]
        scales = self._fp32_scales()
        if height != self.layout.block[0]:
            scales = scales.repeat_interleave(self.layout.block[0], 0)[: self.shape[0]]
        if width and width != self.layout.block[1]:
            scales = scales.repeat_interleave(self.shape[1] // width, 1)
        return product, [self.codes, scales.contiguous()]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def take(self, indices: Tensor) -> ScaledMatrix:
        """The matrix [T, K] of these rows, for an embedding."""
        height, width = self.layout.block
        scales, zeros = self._fp32_scales(), self._fp32_zeros()
        shape = (indices.shape[0], self.layout.shape[1])
        layout = replace(self.layout, shape=shape, block=(1, width), packed_zeros=False)
        own_zeros = None if zeros is None else zeros[indices // height]
        return ScaledMatrix(layout, self.codes[indices], scales[indices // height], own_zeros)

    def unpack(self, out: Tensor) -> None:
        num_rows, num_columns = self.layout.shape
        scales, zeros = self._fp32_scales(), self._fp32_zeros()
        step = max(1, backend_of(self.device).tile // num_columns)
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            values = self.layout.codes.unpack(self.codes[rows])[:, :num_columns]
            if zeros is not None:
                self._spread(torch.Tensor.sub_, values, zeros, rows)
            self._spread(torch.Tensor.mul_, values, scales, rows)
            out[rows] = values

    def compiled_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        kernel = self.kernel if out.dtype in _UNPACKED_DTYPES else None
        if kernel is None or kernel[0].encoding.interleave > 1:
            return None
        unpacker = _unpacker(kernel[0], out.dtype)
        return partial(unpacker, kernel[1], out) if unpacker.is_worthwhile(out.numel()) else None

    def _fp32_scales(self) -> Tensor:
        scales = self.scales.float()
        return scales if self.divisor is None else scales / self.divisor

    def _fp32_zeros(self) -> Tensor | None:
        if self.zeros is None or not self.layout.packed_zeros:
            return None if self.zeros is None else self.zeros.float()
        words = self.zeros.t().contiguous().view(torch.uint8)
        return self.layout.codes.unpack(words)[:, : self.layout.grid[0]].t().contiguous()

    def _spread(self, change: Callable[[Tensor, Tensor], Tensor], values: Tensor, numbers: Tensor, rows: slice) -> None:
        """Apply `change` to values [R, K], the matrix's `rows`, with the number of each rectangle, fp32 [grid]."""
        (height, width), num_columns = self.layout.block, values.shape[1]
        if height == 1:
            numbers = numbers[rows]
        elif numbers.shape[0] > 1:
            numbers = numbers.index_select(0, torch.arange(rows.start, rows.stop, device=values.device) // height)
        if self.layout.groups is not None:
            change(values, numbers.index_select(1, self.layout.groups))
        elif numbers.shape[1] == 1:
            change(values, numbers)
        else:
            whole = num_columns // width
            change(values[:, : whole * width].view(-1, whole, width), numbers[:, :whole, None])
            if whole * width < num_columns:
                change(values[:, whole * width :], numbers[:, whole:])


def _product(layout: ScaledLayout) -> tuple[RowProduct, Block] | None:
    """A kernel, and the block of its scales (inputs 0: all); None if there is none."""
    lanes, codes, (height, width) = num_lanes(), layout.codes, layout.block
    is_row = width == layout.shape[1]
    block = (1, 0) if is_row else (height, width)
    if not lanes:
        return None
    if codes.kind == "fp8":
        return _fp8_product(lanes, *block), block
    if codes.kind == "int8" and is_row:
        return _int8_product(lanes), (1, 0)
    if codes == FP4 and layout.form == MXFP4:
        return _mxfp4_product(lanes), layout.block
    if codes.kind == "packed" and codes.bits == 4:
        size = _SPREAD_GROUP if is_row and width % _SPREAD_GROUP == 0 else width
        return (_four_bit_product(lanes, size), (1, size)) if height == 1 or is_row else None
    return None


@cache
def _unpacker(product: RowProduct, dtype: torch.dtype) -> Unpacker:
    return Unpacker(product.encoding, dtype)


@cache
def _fp8_product(lanes: int, height: int, width: int) -> RowProduct:
    return RowProduct(Fp8(lanes, height, width))


@cache
def _int8_product(lanes: int) -> RowProduct:
    return RowProduct(Int8(lanes, 1.0))


@cache
def _mxfp4_product(lanes: int) -> RowProduct:
    return RowProduct(MxFp4(lanes, FP4_NUMBERS))


@cache
def _four_bit_product(lanes: int, group_size: int) -> RowProduct:
    return RowProduct(LowFirst(lanes, [float(code) for code in range(-8, 8)], Blocks(group_size)))


# -------------------------------------------------------------------------------------------------- the stored weight


@dataclass(frozen=True)
class ScaledParts:
    """The tensors of a `ScaledMatrix`, in the order of `streamed`."""

    codes: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None = None
    divisor: TensorInfo | None = None


@dataclass(frozen=True)
class ScaledWeight(PackedStored):
    """A stored weight: codes, scales, and optional zeros and divisor are streamed; `layout` contains the rest."""

    name: str
    layout: ScaledLayout
    parts: ScaledParts

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> str:
        return self.layout.form

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        infos = (self.parts.codes, self.parts.scales, self.parts.zeros, self.parts.divisor)
        return tuple(info for info in infos if info is not None)

    def bind(self, parts: Sequence[Tensor]) -> ScaledMatrix:
        layout, rest = self.layout, list(parts[2:])
        zeros = None if self.parts.zeros is None else _numbers(self.parts.zeros, rest.pop(0))
        divisor = None if self.parts.divisor is None else _numbers(self.parts.divisor, rest.pop(0))
        if zeros is not None:
            zeros = zeros.view(-1, layout.grid[1])
        codes = typed(parts[0], torch.int32).view(torch.uint8) if layout.codes.kind == "packed" else parts[0]
        scales = _numbers(self.parts.scales, parts[1]).view(layout.grid)
        return ScaledMatrix(layout, codes.view(layout.shape[0], -1), scales, zeros, divisor)

    def sample(self, device: torch.device) -> ScaledMatrix:
        """A sample with normal numbers: NaN and denormals take longer."""
        ones = [torch.ones(math.prod(info.shape)).to(SCALE_DTYPES[info.dtype]) for info in self.streamed[1:]]
        raw = [part.view(torch.uint8).to(device) for part in ones]
        codes = any_bytes(self.parts.codes.nbytes, device)
        return self.to(device).bind([codes & 0x7E if self.layout.codes.kind == "fp8" else codes, *raw])

    def to(self, device: torch.device | str) -> ScaledWeight:
        if self.layout.groups is None:
            return self
        return replace(self, layout=replace(self.layout, groups=self.layout.groups.to(device)))


def _numbers(info: TensorInfo, raw: Tensor) -> Tensor:
    return typed(raw, SCALE_DTYPES[info.dtype])


# ------------------------------------------------------------------------------------------------------------ formats

# Tensors for quantised activations of a module; a weight does not depend on them.
ACTIVATIONS = r"(?:in|out)put_(?:scale|scale_ub|zero_point|global_scale)|activation_scale"
_KV_CACHE = re.compile(r".+\.(?:[qkv]|kv)_(?:scale|zero_point|global_scale)", re.DOTALL)


class ScaledFormat(WeightFormat):
    """Base of formats with such matrices. companions: pattern of tensor names, module name and part."""

    outside_layers = "bf16"
    companions: re.Pattern[str]
    is_set = False  # whether a checkpoint's config names this method; otherwise the format recognises nothing

    def companion(self, key: str) -> tuple[str, str] | None:
        match = self.companions.fullmatch(key) if self.is_set else None
        return (f"{match[1]}.weight", match[2]) if match else None

    def blank_tensors(self, infos: Mapping[str, TensorInfo], wanted: Collection[str]) -> set[str]:
        """Scales of an 8-bit KV cache, which offspec does not use."""
        return {name for name in infos if name not in wanted and _KV_CACHE.fullmatch(name)}


def sized_scaled(
    layout: ScaledLayout, name: str, allocate: Allocate, dtypes: tuple[str, str], divisor: bool = False
) -> StoredWeight:
    """A matrix of this layout without a file, for `WeightFormat.sized`. dtypes: of codes and scales."""
    num_rows, row_bytes = layout.shape[0], layout.codes.row_bytes(layout.shape[1])
    columns = row_bytes // 4 if dtypes[0] == "I32" else row_bytes
    codes = allocate(name, dtypes[0], (num_rows, columns))
    scales = allocate(f"{name}_scale", dtypes[1], layout.grid)
    last = allocate(f"{name}_global_scale", "F32", (1,)) if divisor else None
    return ScaledWeight(name, layout, ScaledParts(codes, scales, None, last))


def sized_vector(name: str, shape: tuple[int, ...], allocate: Allocate) -> PlainWeight:
    """A plain vector: only matrices are quantised."""
    return PlainWeight(name, allocate(name, "BF16", shape))
