"""How a weight lies in bytes and becomes a matrix: 16- and 32-bit floats, bitsandbytes' NF4 and FP4, LLM.int8, AWQ, GPTQ.

`stored_weights` groups the tensors of a checkpoint into logical weights and disbelieves all of them first; `bind` puts a
weight's freshly read bytes under it, as views; `linear` multiplies with it. `pack_4bit` is the way back. Quantised
matrices are dequantised for each use: for 4 bit that is what bitsandbytes computes, bit for bit. For int8 it is not:
LLM.int8 also rounds the *activations* to 8 bit (all but outlier columns), here only the weights are rounded.
Knows nothing of layers, of files beyond the few bytes of constants that it reads, or of when a weight is needed.

The 4-bit layout, per weight [N, K] with blocks of `blocksize` (QLoRA, https://arxiv.org/abs/2305.14314):
    X                                two codes a byte, row-major, high nibble first, in any storage dtype
    X.absmax                         one scale a block: fp32, or (nested, "double quantisation") a code of 8 bit
    X.quant_map                      what the 16 codes mean; always bitsandbytes' own table
    X.nested_absmax, .nested_quant_map   scale = nested_quant_map[absmax] · nested_absmax[block // 256] + nested_offset
    X.quant_state.bitsandbytes__nf4  JSON: quant_type, blocksize, dtype, shape, nested_blocksize, nested_dtype, nested_offset
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.errors import CheckpointError, OffspecError

from .blocked import BlockedMatrix
from .checkpoint import TensorInfo, fault, show
from .grouped import PARTS, GroupedFormat, grouped_weight
from .params import QUANT_TYPES
from .records import ALIGNMENT, FLOAT_DTYPES, typed

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)

# The 16 values of each type, as bitsandbytes computes with them whatever a checkpoint's quant_map says.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_POSITIVE = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
CODES = {"nf4": _NF4, "fp4": (*_FP4_POSITIVE, *(0.0 - value for value in _FP4_POSITIVE))}
_CODE_TOLERANCE = 1e-4  # older versions wrote FP4's values with four digits

_INT8_UNIT = 7.874015718698502e-3  # 1/127 as bitsandbytes has it, so that results are equal to the last bit

# Elements dequantised at once. The kernel allocates its result: 2 MiB come from the allocator's pool, where a whole matrix
# of 117 MB is fresh pages each time: 16 ms of CPU against 64.
_TILE = 1 << 20
_TILE_ON_CUDA = 1 << 24  # there it is the launching that takes the time
_MAX_STATE_BYTES, _MAX_CONSTANT_BYTES = 1 << 16, 1 << 26  # far more than any weight needs
_DAMAGED = "the checkpoint is damaged, download it again"


class PackedWeight(Protocol):
    """A matrix that does not lie as torch multiplies it: quantised, in its stored parts, or reordered (`blocked`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]: outputs, inputs."""
        ...

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K] in `dtype`; in the memory of `out` (contiguous, of that shape and dtype) where given."""
        ...


Weight: TypeAlias = Tensor | PackedWeight


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
        """As stored: "F64", "F32", "F16", "BF16", "nf4", "fp4", "int8", "awq" or "gptq"."""
        ...

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        """The parts to be brought for each use; constants were read before and are held."""
        ...

    def bind(self, parts: Sequence[Tensor]) -> Weight:
        """The weight over raw bytes: one uint8 [nbytes] for each of `streamed`, in that order, all on one device.

        Views of `parts`; a copy only where a part is not aligned to its own dtype.
        """
        ...

    def to(self, device: torch.device | str) -> StoredWeight:
        """The same, its constants on `device`, where the parts will be bound."""
        ...


def _tile(device: torch.device) -> int:
    """Elements that are dequantised at a time."""
    return _TILE_ON_CUDA if device.type == "cuda" else _TILE


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], plus bias [N] → [..., N] in x's dtype.

    scratch: at least N·K elements of x's dtype, 1-D, where a matrix is put that first has to be dequantised or
    converted; without it memory is allocated each time.
    """
    bias = bias if bias is None else bias.to(x.dtype)
    if bias is not None and bias.is_cuda and bias.data_ptr() % ALIGNMENT:
        bias = bias.clone()  # cuBLASLt may take a kernel for aligned ones (pytorch#194497)
    if can_be_fused(weight) and x[..., 0].numel() <= fused_rows(weight.shape, x.dtype, x.device):
        assert isinstance(weight, Matrix4bit)
        return fused_linear(x, weight, bias, scratch)
    if isinstance(weight, BlockedMatrix) and weight.dtype == x.dtype:
        return weight.times(x, bias)
    if not (isinstance(weight, Tensor) and weight.dtype == x.dtype):
        weight = dense(weight, x.dtype, scratch)
    return F.linear(x, weight, bias)


def dense(weight: Weight, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
    """The weight as a plain tensor of `dtype`; in `scratch` (1-D, of that dtype) where it has to be made and that is given."""
    if isinstance(weight, Tensor) and (scratch is None or weight.dtype == dtype):
        return weight.to(dtype)
    out = None if scratch is None else scratch[: math.prod(weight.shape)].view(weight.shape)
    if not isinstance(weight, Tensor):
        return weight.dequantize(dtype, out)
    assert out is not None
    return out.copy_(weight)


# ------------------------------------------------------------------------------------------------------- plain floats


@dataclass(frozen=True)
class PlainWeight:
    """A tensor that lies as what it is."""

    name: str
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        return (self.info,)

    def bind(self, parts: Sequence[Tensor]) -> Tensor:
        return typed(parts[0], FLOAT_DTYPES[self.info.dtype]).view(self.info.shape)

    def to(self, device: torch.device | str) -> PlainWeight:
        return self


# ---------------------------------------------------------------------------------------------------------- LLM.int8


@dataclass(frozen=True)
class Int8Matrix:
    """codes int8 [N, K], scales fp32 [N]: w = codes · scales / 127."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        rows, columns = self.shape
        matrix = torch.empty(rows, columns, dtype=dtype, device=self.codes.device) if out is None else out
        step = max(1, _tile(self.codes.device) // max(1, columns))
        for first in range(0, rows, step):
            some = slice(first, first + step)
            matrix[some] = (self.codes[some] * self.scales[some, None]).mul_(_INT8_UNIT)
        return matrix


@dataclass(frozen=True)
class Int8Weight:
    """X int8 [N, K] and X's `SCB` fp32 [N]: the largest absolute value of each row."""

    name: str
    shape: tuple[int, ...]
    streamed: tuple[TensorInfo, ...]
    dtype: str = "int8"

    def bind(self, parts: Sequence[Tensor]) -> Int8Matrix:
        codes, scales = parts
        return Int8Matrix(codes.view(torch.int8).view(self.shape), typed(scales, torch.float32))

    def to(self, device: torch.device | str) -> Int8Weight:
        return self


# -------------------------------------------------------------------------------------------------------------- 4 bit


@dataclass(frozen=True)
class Nested:
    """Scales that are themselves quantised: scale = values[code] · scales[block // blocksize] + offset."""

    values: Tensor  # fp32 [256]
    scales: Tensor  # fp32 [ceil(blocks / blocksize)]
    offset: float
    blocksize: int

    @cached_property
    def offset_on_device(self) -> Tensor:
        """fp32, without dimensions, beside the scales: as kernels want it. Filled in there: to bring it would wait for the device."""
        return torch.full((), self.offset, dtype=torch.float32, device=self.scales.device)

    def expand(self, codes: Tensor) -> Tensor:
        """uint8 [blocks] → fp32 [blocks]."""
        scales = self.scales.repeat_interleave(self.blocksize)[: codes.shape[0]]
        return self.values.index_select(0, codes.int()).mul_(scales).add_(self.offset)


@dataclass(frozen=True)
class Layout4bit:
    """What the small parts of a 4-bit weight say."""

    shape: tuple[int, int]  # [N, K]
    quant_type: str
    blocksize: int
    nested: Nested | None = None


@dataclass(frozen=True)
class Matrix4bit:
    """codes uint8 [ceil(N·K / 2)], absmax fp32 or (nested) uint8 [ceil(N·K / blocksize)]."""

    layout: Layout4bit
    codes: Tensor
    absmax: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        layout, device = self.layout, self.codes.device
        matrix = torch.empty(layout.shape, dtype=dtype, device=device) if out is None else out
        scales = self.absmax if layout.nested is None else layout.nested.expand(self.absmax)
        if device.type == "cuda" and dtype in _KERNEL_DTYPES and has_kernels(device):
            _dequantize_on_cuda(self.codes, scales, layout, matrix)
        else:
            native = device.type == "cpu" and dtype in _KERNEL_DTYPES and layout.blocksize < _SLOW_BLOCKSIZE
            native = native and has_bitsandbytes()
            _dequantize(self.codes, scales, layout, matrix.view(-1), native=native)
        return matrix


# Rows up to which the fused kernel was measured to be faster, by (shape, dtype, device): `measure.measure_fused_rows`.
_FUSED_ROWS: dict[tuple[tuple[int, ...], torch.dtype, torch.device], int] = {}


def fused_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    """The most rows that `linear` multiplies with a 4-bit matrix [N, K] without dequantising it first; 0 unless set."""
    return _FUSED_ROWS.get((shape, dtype, device), 0)


def set_fused_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, rows: int) -> None:
    _FUSED_ROWS[shape, dtype, device] = rows


def can_be_fused(weight: Weight) -> bool:
    """Whether bitsandbytes' fused kernel takes this matrix: blocks that divide its rows, scales nested by 256 or not at all."""
    if not isinstance(weight, Matrix4bit) or weight.codes.device.type != "cuda":
        return False
    nested = weight.layout.nested
    return weight.shape[1] % weight.layout.blocksize == 0 and (nested is None or nested.blocksize == 256)


def fused_linear(x: Tensor, weight: Matrix4bit, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """As `linear`, by bitsandbytes' product with a matrix that stays packed; for those that `can_be_fused`.

    For few rows, in which a matrix is read once instead of being written and read again. The rounding is the kernel's own.
    """
    bitsandbytes_functional()
    nested, codes = weight.layout.nested, weight.codes
    if codes.data_ptr() % ALIGNMENT:  # files keep bytes anywhere, kernels read many at once
        codes = codes.clone() if scratch is None else scratch.view(torch.uint8)[: codes.shape[0]].copy_(codes)
    outer = {} if nested is None else _outer_scales(nested, weight.absmax)
    scales = weight.absmax if nested is None else nested.scales
    layout = weight.layout
    product: Tensor = torch.ops.bitsandbytes.gemm_4bit(
        x, codes[:, None], layout.shape, scales, layout.blocksize, layout.quant_type, bias, **outer
    )
    return product


def _outer_scales(nested: Nested, codes: Tensor) -> dict[str, Tensor]:
    return {"absmax_8bit": codes, "absmax_code": nested.values, "absmax_offset": nested.offset_on_device}


@dataclass(frozen=True)
class Weight4bit:
    """X and X.absmax are streamed; all else is `layout`."""

    name: str
    layout: Layout4bit
    streamed: tuple[TensorInfo, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> str:
        return self.layout.quant_type

    def bind(self, parts: Sequence[Tensor]) -> Matrix4bit:
        codes, absmax = parts
        return Matrix4bit(self.layout, codes, absmax if self.layout.nested else typed(absmax, torch.float32))

    def to(self, device: torch.device | str) -> Weight4bit:
        nested = self.layout.nested
        if nested is None:
            return self
        moved = replace(nested, values=nested.values.to(device), scales=nested.scales.to(device))
        return replace(self, layout=replace(self.layout, nested=moved))


_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SLOW_BLOCKSIZE = 2048  # from here on bitsandbytes' CPU op calls torch.compile, which takes minutes


def dequantize_reference(codes: Tensor, scales: Tensor, layout: Layout4bit, out: Tensor) -> None:
    """codes uint8 [ceil(N·K / 2)], scales fp32 [blocks] → out [N·K], in plain torch.

    The reference that the kernels are compared with, and what computes where there is no kernel.
    """
    _dequantize(codes, scales, layout, out, native=False)


def _dequantize(codes: Tensor, scales: Tensor, layout: Layout4bit, out: Tensor, *, native: bool) -> None:
    """Tile by tile; what follows the last whole block is left to the reference, for kernels differ in what they take."""
    blocksize, blocks = layout.blocksize, out.shape[0] // layout.blocksize
    step = _tile(out.device) // blocksize
    kernel = _bitsandbytes_blocks if native else _lookup_blocks
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        some = slice(first * blocksize // 2, last * blocksize // 2)
        tile = out[first * blocksize : last * blocksize].view(-1, blocksize)
        tile.copy_(kernel(codes[some], scales[first:last], layout, out.dtype))
    if rest := out.shape[0] - blocks * blocksize:
        values = _lookup(codes[blocks * blocksize // 2 :], layout.quant_type)
        out[-rest:] = values[:rest] * scales[-1]


def _lookup_blocks(codes: Tensor, scales: Tensor, layout: Layout4bit, dtype: torch.dtype) -> Tensor:
    """codes [B · blocksize / 2], scales [B] → fp32 [B, blocksize]. One rounding, when it is stored: w = map[q] · scale."""
    return _lookup(codes, layout.quant_type).view(-1, layout.blocksize).mul_(scales[:, None])


def _lookup(codes: Tensor, quant_type: str) -> Tensor:
    """uint8 [n] → fp32 [2n], looked up by pairs."""
    return _pairs(quant_type, codes.device).index_select(0, codes.int()).view(torch.float32)


@cache
def _pairs(quant_type: str, device: torch.device) -> Tensor:
    """int64 [256]: the two fp32 values that a byte stands for, as one word, so that a look-up moves one."""
    values = torch.tensor(CODES[quant_type])
    byte = torch.arange(256)
    return torch.stack((values[byte >> 4], values[byte & 15]), dim=1).view(torch.int64)[:, 0].to(device)


def _bitsandbytes_blocks(codes: Tensor, scales: Tensor, layout: Layout4bit, dtype: torch.dtype) -> Tensor:
    """As `_lookup_blocks`, but already rounded to `dtype`."""
    functional = bitsandbytes_functional()
    state = functional.QuantState(
        scales, (scales.shape[0], layout.blocksize), None, layout.blocksize, layout.quant_type, dtype
    )
    tile: Tensor = functional.dequantize_4bit(codes[:, None], state)
    return tile


def _dequantize_on_cuda(codes: Tensor, scales: Tensor, layout: Layout4bit, out: Tensor) -> None:
    functional = bitsandbytes_functional()
    state = functional.QuantState(scales, layout.shape, None, layout.blocksize, layout.quant_type, out.dtype)
    functional.dequantize_4bit(codes[:, None], state, out=out)


@cache
def bitsandbytes_functional() -> ModuleType:
    """The module `bitsandbytes.functional`, imported without its noise. Raises OffspecError where it is not installed."""
    try:
        with _quiet_import():
            import bitsandbytes.functional as functional
    except Exception as exc:  # everything: a broken CUDA set-up makes it raise anything
        reason = " ".join(str(exc).split())
        raise OffspecError(
            f"4-bit weights need bitsandbytes, which cannot be imported ({reason}); pip install 'bitsandbytes>=0.50'"
        ) from exc
    assert isinstance(functional, ModuleType)
    return functional


@cache
def has_bitsandbytes() -> bool:
    """Whether it can be imported. On a GPU torch computes the same without it, in several times the time."""
    try:
        bitsandbytes_functional()
    except OffspecError:
        return False
    return True


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether bitsandbytes' kernels run on this GPU: where it finds none for its CUDA it is imported all the same."""
    if not has_bitsandbytes():
        return False
    layout, codes = Layout4bit((1, 64), "nf4", 64), torch.zeros(32, dtype=torch.uint8, device=device)
    try:
        _dequantize_on_cuda(codes, torch.ones(1, device=device), layout, torch.empty(1, 64, device=device))
    except RuntimeError:  # its own, in the place of the library that could not be loaded
        return False
    return True


@contextmanager
def _quiet_import() -> Iterator[None]:
    """bitsandbytes warns of kernels that are not used here, and downloads one from the hub where it finds `kernels`.

    It also wraps operations that are not used here in torch.compile, which alone takes seconds to import.
    """
    level, unused = logging.root.manager.disable, object()
    before, compiler = sys.modules.get("kernels", unused), torch.compile
    logging.disable(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # to import it is an ImportError, which it expects
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.compile = compiler
        sys.modules.pop("kernels", None)
        if isinstance(before, ModuleType):
            sys.modules["kernels"] = before


# ------------------------------------------------------------------------------------------------------- packing 4 bit


def pack_4bit(
    weight: Tensor, quant_type: str = "nf4", *, nested: bool = True, blocksize: int = 64
) -> dict[str, Tensor]:
    """weight [N, K] (bf16, fp16 or fp32, on the CPU) → suffix of its name → tensor, as `transformers` would save them.

    The weight's own suffix is "". The result depends neither on the number of threads nor on the tile's size; memory
    beside it is a few tiles. Raises CheckpointError where a number is not finite.
    """
    codes, absmax = _quantize(weight, quant_type, blocksize)
    if not absmax.isfinite().all():
        raise CheckpointError("holds a number that is not finite and cannot be quantised")
    state: dict[str, object] = {
        "quant_type": quant_type,
        "blocksize": blocksize,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    parts = {"": codes[:, None], ".absmax": absmax, ".quant_map": torch.tensor(CODES[quant_type])}
    if nested:
        with _one_thread():
            offset = absmax.mean()
        parts[".absmax"], outer = bitsandbytes_functional().quantize_blockwise(absmax - offset, blocksize=256)
        parts |= {".nested_absmax": outer.absmax, ".nested_quant_map": outer.code.clone()}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    said = json.dumps(state).encode()
    parts[f".quant_state.bitsandbytes__{quant_type}"] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    return parts


def _quantize(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor]:
    """codes uint8 [ceil(N·K / 2)], absmax fp32 [blocks]. bitsandbytes would take 14 bytes an element for the whole matrix."""
    flat = weight.reshape(-1)
    codes = torch.empty(-(-flat.shape[0] // 2), dtype=torch.uint8)
    absmax = torch.empty(-(-flat.shape[0] // blocksize))
    quantize = bitsandbytes_functional().quantize_4bit
    for first in range(0, flat.shape[0], _TILE):
        tile = flat[first : first + _TILE]
        tile_codes, state = quantize(tile, blocksize=blocksize, quant_type=quant_type)
        codes[first // 2 :][: tile_codes.shape[0]] = tile_codes[:, 0]
        absmax[first // blocksize :][: state.absmax.shape[0]] = state.absmax
    return codes, absmax


@contextmanager
def _one_thread() -> Iterator[None]:
    """A sum's last bits depend on how many threads share it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------- headers → StoredWeight

_PARTS_4BIT = re.compile(r"(.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)", re.DOTALL)
_PARTS_INT8 = re.compile(r"(.+)\.(SCB|weight_format)", re.DOTALL)
_QUANT_STATE = re.compile(r"quant_state\.bitsandbytes__(.+)", re.DOTALL)
_PARTS_GROUPED = re.compile(rf"(.+)\.({'|'.join(PARTS)})", re.DOTALL)
_CONSTANTS = ("quant_map", "nested_absmax", "nested_quant_map")
_SMALL = (*_CONSTANTS, "weight_format", "g_idx")  # parts that are read at once, beside the quant_state

# What other methods call their tensors → how the method is called.
_FOREIGN = (
    (re.compile(r".+\.(qweight|qzeros|g_idx)"), "AWQ or GPTQ without its quantization_config"),
    (re.compile(r".+\.(weight_scale_inv|weight_scale|input_scale|activation_scale)"), "fp8"),
    (re.compile(r".+\.(weight_packed|weight_shape|weight_zero_point)"), "compressed-tensors"),
)
_REMEDY = "use the 16-bit checkpoint, a bitsandbytes 4-bit one, or make one with `offspec quantize`"


@dataclass
class _Group:
    """The tensors of one logical weight: itself, and its companions by their part's name."""

    name: str
    parts: dict[str, TensorInfo] = field(default_factory=dict)

    def refuse(self, info: TensorInfo, what: str) -> NoReturn:
        raise fault(info.path, f"weight {show(self.name)} {what}")


def stored_weights(infos: Mapping[str, TensorInfo], grouped: GroupedFormat | None = None) -> dict[str, StoredWeight]:
    """Groups tensors into logical weights, by the keys of `infos`; reads the constants of the quantised ones.

    grouped: what config.json says of matrices that do not say themselves how they are packed.
    Raises CheckpointError for whatever is incomplete, contradicts itself, or lies in a form that is not read.
    """
    groups = _grouped(infos, grouped)
    values = _read_constants(groups.values())
    return {name: _stored(group, values, grouped) for name, group in groups.items()}


def blank_biases(infos: Mapping[str, TensorInfo], wanted: Collection[str]) -> set[str]:
    """Biases that are not `wanted`, and hold nothing: GPTQ's tools wrote zeros beside every matrix of a model without biases."""
    unwanted = [name for name in infos if name.endswith(".bias") and name not in wanted]
    beside = [infos[name] for name in unwanted if f"{name.removesuffix('bias')}qweight" in infos]
    return {info.name for info, content in _read(beside).items() if not any(content)}


def _grouped(infos: Mapping[str, TensorInfo], said: GroupedFormat | None) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for key, info in infos.items():
        base, part = key, ""
        if said and (match := _PARTS_GROUPED.fullmatch(key)):
            base, part = f"{match[1]}.weight", match[2]
        else:
            _refuse_foreign(key, info)
        if match := _PARTS_4BIT.fullmatch(key):
            base, part = match[1], match[2]
        elif match := _PARTS_INT8.fullmatch(key):
            base, part = f"{match[1]}.weight", match[2]
        groups.setdefault(base, _Group(base)).parts[part] = info
    return groups


def _refuse_foreign(key: str, info: TensorInfo) -> None:
    method = "fp8" if info.dtype.startswith("F8_") else None
    method = method or next((method for pattern, method in _FOREIGN if pattern.fullmatch(key)), None)
    if method:
        raise fault(info.path, f"tensor {show(key)} belongs to a checkpoint in {method}, which is not read; {_REMEDY}")


def _stored(group: _Group, values: Mapping[TensorInfo, bytes], said: GroupedFormat | None) -> StoredWeight:
    parts = group.parts
    if said and not parts.keys().isdisjoint(PARTS):
        order = parts.get("g_idx")
        return grouped_weight(group.name, parts, said, None if order is None else values[order])
    if "" not in parts:
        part, info = next(iter(parts.items()))
        group.refuse(info, f"is missing, but its {show(part)} is there; {_DAMAGED}")
    if any(_QUANT_STATE.fullmatch(part) or part in (*_CONSTANTS, "absmax") for part in parts):
        return _stored_4bit(group, values)
    if "SCB" in parts or "weight_format" in parts:
        return _stored_int8(group, values)
    return _stored_plain(group)


def _stored_plain(group: _Group) -> PlainWeight:
    info = group.parts[""]
    if len(group.parts) > 1:
        unknown = next(part for part in group.parts if part)
        group.refuse(info, f"has a companion {show(unknown)} of an unknown format; {_REMEDY}")
    if info.dtype not in FLOAT_DTYPES:
        group.refuse(
            info, f"is {info.dtype} without what bitsandbytes stores beside it: a format that is not read; {_REMEDY}"
        )
    return PlainWeight(group.name, info)


def _stored_int8(group: _Group, values: Mapping[TensorInfo, bytes]) -> Int8Weight:
    weight, scales, order = (group.parts.get(part) for part in ("", "SCB", "weight_format"))
    assert weight is not None
    if scales is None:
        group.refuse(weight, f"lacks its SCB (the scale of each row); {_DAMAGED}")
    if weight.dtype != "I8" or len(weight.shape) != 2:
        group.refuse(weight, f"has an SCB, but is {weight.dtype} {list(weight.shape)}, not I8 [N, K]; {_DAMAGED}")
    _expect(group, scales, "SCB", "F32", (weight.shape[0],))
    if order is not None:
        _expect(group, order, "weight_format", "U8", ())
        if values[order] != b"\0":
            group.refuse(
                order,
                f"has weight_format {values[order][0]}, only 0 (row-major) is read; save it with a newer bitsandbytes",
            )
    return Int8Weight(group.name, weight.shape, (weight, scales))


def _stored_4bit(group: _Group, values: Mapping[TensorInfo, bytes]) -> Weight4bit:
    weight = group.parts[""]
    quant_type, state_info = _quant_state_part(group)
    state = _QuantStateReader(group, state_info, values[state_info]).read(quant_type)
    blocks = -(-math.prod(state.shape) // state.blocksize)
    code_bytes = -(-math.prod(state.shape) // 2)
    if weight.nbytes != code_bytes or len(weight.shape) != 2 or weight.shape[1] != 1:
        group.refuse(
            weight,
            f"is {weight.dtype} {list(weight.shape)}, but its quant_state calls for {code_bytes} bytes in one column "
            f"({list(state.shape)} in 4 bit); {_DAMAGED}",
        )
    absmax, quant_map = _companion(group, "absmax"), _companion(group, "quant_map")
    _expect(group, absmax, "absmax", "F32" if state.nested is None else "U8", (blocks,))
    _expect(group, quant_map, "quant_map", "F32", (16,))
    expected = torch.tensor(CODES[quant_type])
    if not torch.allclose(_floats(values[quant_map]), expected, rtol=0, atol=_CODE_TOLERANCE):
        group.refuse(
            quant_map, f"has a quant_map that is not that of {quant_type}; no version of bitsandbytes wrote this"
        )
    nested = _nested(group, values, state.nested, blocks)
    return Weight4bit(group.name, Layout4bit(state.shape, quant_type, state.blocksize, nested), (weight, absmax))


def _quant_state_part(group: _Group) -> tuple[str, TensorInfo]:
    """The type that the one quant_state's name tells, and where the state lies."""
    found = {part: info for part, info in group.parts.items() if part.startswith("quant_state.")}
    weight = group.parts[""]
    if len(found) != 1:
        what = f"has {len(found)} quant_states" if found else "lacks its quant_state"
        group.refuse(weight, f"{what}, there must be one; {_DAMAGED}")
    ((part, info),) = found.items()
    match = _QUANT_STATE.fullmatch(part)
    if match is None or match[1] not in QUANT_TYPES:
        group.refuse(info, f"has the unknown {show(part)}; types that are read: {', '.join(QUANT_TYPES)}; {_REMEDY}")
    if unknown := group.parts.keys() - {"", "absmax", part, *_CONSTANTS}:
        group.refuse(info, f"has a companion {show(min(unknown))} that does not belong to {match[1]}; {_DAMAGED}")
    return match[1], info


def _nested(
    group: _Group, values: Mapping[TensorInfo, bytes], said: tuple[float, int] | None, blocks: int
) -> Nested | None:
    """The second level of quantisation; it is there wholly or not at all."""
    if said is None:
        for part in ("nested_absmax", "nested_quant_map"):
            if part in group.parts:
                group.refuse(group.parts[part], f"has a {part}, but its quant_state tells of no nesting; {_DAMAGED}")
        return None
    offset, blocksize = said
    scales, codes = _companion(group, "nested_absmax"), _companion(group, "nested_quant_map")
    _expect(group, scales, "nested_absmax", "F32", (-(-blocks // blocksize),))
    _expect(group, codes, "nested_quant_map", "F32", (256,))
    for part, info in (("nested_absmax", scales), ("nested_quant_map", codes)):
        if not _floats(values[info]).isfinite().all():
            group.refuse(info, f"has a {part} with a number that is not finite; {_DAMAGED}")
    return Nested(_floats(values[codes]), _floats(values[scales]), offset, blocksize)


def _companion(group: _Group, part: str) -> TensorInfo:
    if part not in group.parts:
        group.refuse(group.parts[""], f"lacks its {part}; {_DAMAGED}")
    return group.parts[part]


def _expect(group: _Group, info: TensorInfo, part: str, dtype: str, shape: tuple[int, ...]) -> None:
    if (info.dtype, info.shape) != (dtype, shape):
        found, wanted = f"{info.dtype} {list(info.shape)}", f"{dtype} {list(shape)}"
        group.refuse(info, f"has a {part} that is {found}, where {wanted} belongs; {_DAMAGED}")


def _floats(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32)


@dataclass(frozen=True)
class _QuantState:
    """What the JSON says. nested: (offset, blocksize)."""

    shape: tuple[int, int]
    blocksize: int
    nested: tuple[float, int] | None


@dataclass(frozen=True)
class _QuantStateReader:
    """Reads the JSON of a quant_state, each value checked for being one that can be meant."""

    group: _Group
    info: TensorInfo
    content: bytes

    def read(self, quant_type: str) -> _QuantState:
        said = self._parse()
        self._demand("quant_type", said, said.get("quant_type") == quant_type, f"its name says {quant_type}")
        self._demand("dtype", said, said.get("dtype") in ("bfloat16", "float16", "float32"), "not a dtype of weights")
        shape, blocksize = said.get("shape"), said.get("blocksize")
        self._demand("shape", said, _is_matrix(shape), "not [N, K]")
        self._demand("blocksize", said, _is_blocksize(blocksize), f"not one of {', '.join(map(str, BLOCKSIZES))}")
        nested = self._nested(said) if any(key.startswith("nested_") for key in said) else None
        return _QuantState((shape[0], shape[1]), blocksize, nested)  # type: ignore[index, arg-type]

    def _parse(self) -> dict[str, Any]:
        said = None
        with suppress(ValueError, RecursionError):
            said = json.loads(self.content.decode("utf-8"))
        if not isinstance(said, dict):
            self.group.refuse(self.info, f"has a quant_state that is not a JSON object; {_DAMAGED}")
        return said

    def _nested(self, said: Mapping[str, Any]) -> tuple[float, int]:
        offset, blocksize = said.get("nested_offset"), said.get("nested_blocksize")
        is_number = isinstance(offset, (int, float)) and not isinstance(offset, bool) and abs(offset) < 3e38
        self._demand("nested_offset", said, is_number, "not a number of 32 bit")
        self._demand("nested_blocksize", said, _is_blocksize(blocksize), "not a size of blocks")
        self._demand("nested_dtype", said, said.get("nested_dtype") == "float32", "only float32 is read")
        return float(offset), int(blocksize)  # type: ignore[arg-type]

    def _demand(self, key: str, said: Mapping[str, Any], condition: bool, why: str) -> None:
        if not condition:
            self.group.refuse(self.info, f"has a quant_state with {key} {show(said.get(key))}: {why}; {_DAMAGED}")


def _is_matrix(shape: object) -> bool:
    # `type`, not isinstance: True is an int to Python, and to nobody else. The bound keeps products within 64 bits.
    return isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 2**30 for n in shape)


def _is_blocksize(value: object) -> bool:
    return type(value) is int and value in BLOCKSIZES


def _read_constants(groups: Iterable[_Group]) -> dict[TensorInfo, bytes]:
    """The contents of all small parts."""
    parts = (item for group in groups for item in group.parts.items())
    return _read(info for part, info in parts if part in _SMALL or part.startswith("quant_state."))


def _read(infos: Iterable[TensorInfo]) -> dict[TensorInfo, bytes]:
    """Their contents, file by file in the order of their bytes."""
    wanted = sorted(infos, key=lambda info: (info.path, info.offset))
    values: dict[TensorInfo, bytes] = {}
    for path, pieces in groupby(wanted, key=lambda info: info.path):
        values |= _read_pieces(path, list(pieces))
    return values


def _read_pieces(path: Path, infos: Sequence[TensorInfo]) -> dict[TensorInfo, bytes]:
    values = {}
    try:
        with path.open("rb") as file:
            for info in infos:
                # A part that is far too long is refused by its shape, or as JSON; it need not be read to be.
                most = _MAX_STATE_BYTES if ".quant_state." in info.name else _MAX_CONSTANT_BYTES
                file.seek(info.offset)
                values[info] = file.read(min(info.nbytes, most))
                if len(values[info]) < min(info.nbytes, most):
                    raise fault(
                        path, f"ends before tensor {show(info.name)} does; something changed it, download it again"
                    )
    except OSError as exc:
        reason = exc.strerror or type(exc).__name__
        raise fault(path, f"cannot be read ({reason}); check that it is there and that you may read it") from exc
    return values
