"""bitsandbytes' 4-bit formats, NF4 and FP4: reading, the packed matrix, and packing (`pack_4bit`).

Dequantised matrices equal bitsandbytes' bit for bit. On a GPU, bitsandbytes' fused kernel multiplies few rows with the
packed matrix, up to a measured number of rows (`on_gpu.FUSED_ROWS`).

The layout, per weight [N, K] with blocks of `blocksize` (QLoRA, https://arxiv.org/abs/2305.14314):
    X                                two codes per byte, row-major, high nibble first, in any storage dtype
    X.absmax                         one scale per block: fp32, or (nested, "double quantisation") a code of 8 bit
    X.quant_map                      the values of the 16 codes; always bitsandbytes' own table
    X.nested_absmax, .nested_quant_map   scale = nested_quant_map[absmax] · nested_absmax[block // 256] + nested_offset
    X.quant_state.bitsandbytes__nf4  JSON: see `quant_state`
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from offspec.backends.choice import backend_of
from offspec.backends.weights import ALIGNMENT, Product
from offspec.backends.x86.encodings import Blocks, FourBit
from offspec.backends.x86.processor import num_lanes, per_processor
from offspec.backends.x86.row_product import RowProduct
from offspec.errors import CheckpointError

from ..files.checkpoint import TensorInfo, show
from ..files.records import typed
from ..params import QUANT_TYPES, ConvertParams
from .core import DAMAGED, REMEDY, Allocate, PackedStored, Packer, StoredWeight, TensorGroup, WeightFormat, any_bytes
from .plain import PlainWeight
from .process_state import bitsandbytes_functional, has_bitsandbytes, one_thread
from .quant_state import QUANT_STATE, QuantStateReader
from .unpacked import UnpackedMatrix

TILE = 1 << 20  # weights that are packed at a time
WRITTEN_BLOCKSIZE = 64  # as in transformers, which has no setting for it
NESTED_BLOCKSIZE = 256

# The 16 values of each type; bitsandbytes uses them regardless of a checkpoint's quant_map.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_POSITIVE = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
CODES = {"nf4": _NF4, "fp4": (*_FP4_POSITIVE, *(0.0 - value for value in _FP4_POSITIVE))}
_CODE_TOLERANCE = 1e-4  # older versions wrote FP4's values with four digits

# ------------------------------------------------------------------------------------------------------- the matrix


@dataclass(frozen=True)
class Nested:
    """Scales that are themselves quantised: scale = values[code] · scales[block // blocksize] + offset."""

    values: Tensor  # fp32 [256]
    scales: Tensor  # fp32 [ceil(blocks / blocksize)]
    offset: float
    blocksize: int

    @cached_property
    def offset_on_device(self) -> Tensor:
        """The offset as fp32 [] on the scales' device, for kernels. Filled there, without a copy."""
        return torch.full((), self.offset, dtype=torch.float32, device=self.scales.device)

    def expand(self, codes: Tensor) -> Tensor:
        """uint8 [blocks] → fp32 [blocks], by few kernels: a matrix needs them for each use, and each is launched.

        The sum is rounded after the product, so that all ways give the same numbers.
        """
        if self.blocksize == NESTED_BLOCKSIZE and backend_of(codes.device).fuses and has_kernels(codes.device):
            return self.expand_by_bitsandbytes(codes)
        expanded, size = self.values.index_select(0, codes.int()), self.blocksize
        if num_whole := codes.shape[0] // size:
            expanded[: num_whole * size].view(num_whole, size).mul_(self.scales[:num_whole, None])
        if codes.shape[0] % size:
            expanded[num_whole * size :].mul_(self.scales[num_whole])
        return expanded.add_(self.offset)

    def expand_by_bitsandbytes(self, codes: Tensor) -> Tensor:
        """As `expand`, by two kernels."""
        bitsandbytes_functional()
        product: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            codes, self.scales, self.values, self.blocksize, torch.float32
        )
        return product.add_(self.offset)


@dataclass(frozen=True)
class Layout4bit:
    """The layout of a 4-bit weight, from its small parts."""

    shape: tuple[int, int]  # [N, K]
    quant_type: str
    blocksize: int
    nested: Nested | None = None


@dataclass(frozen=True)
class Matrix4bit(UnpackedMatrix):
    """codes uint8 [ceil(N·K / 2)], absmax fp32 or (nested) uint8 [ceil(N·K / blocksize)]."""

    layout: Layout4bit
    codes: Tensor
    absmax: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def _scales(self) -> Tensor:
        """fp32 [blocks]."""
        return self.absmax if self.layout.nested is None else self.layout.nested.expand(self.absmax)

    def unpack(self, out: Tensor) -> None:
        dequantize_reference(self.codes, self._scales, self.layout, out.view(-1))

    def compiled_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        """bitsandbytes'."""
        if out.dtype not in _KERNEL_DTYPES or self.layout.blocksize >= _SLOW_BLOCKSIZE or not has_bitsandbytes():
            return None
        return partial(_dequantize, self.codes, self._scales, self.layout, out.view(-1), native=True)

    def launched_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        if out.dtype not in _KERNEL_DTYPES or not has_kernels(self.device):
            return None
        return partial(_dequantize_on_cuda, self.codes, self._scales, self.layout, out)

    @property
    def fused_linear(self) -> Product | None:
        return partial(_fused, self) if can_be_fused(self) else None

    @property
    def form(self) -> str:  # type: ignore[override]
        return self.layout.quant_type

    @property
    def kernel(self) -> tuple[RowProduct, list[Tensor]] | None:
        layout, nested = self.layout, self.layout.nested
        product = _product(layout.quant_type, layout.blocksize, 0 if nested is None else nested.blocksize)
        if product is None or not product.encoding.can_read(self.shape[1]):
            return None
        parts = [self.codes, self.absmax]
        return product, parts if nested is None else [*parts, nested.values, nested.scales, nested.offset_on_device]


@per_processor
def _product(quant_type: str, blocksize: int, nested_blocksize: int) -> RowProduct | None:
    lanes = num_lanes()
    return RowProduct(FourBit(lanes, CODES[quant_type], Blocks(blocksize, nested_blocksize))) if lanes else None


def can_be_fused(matrix: Matrix4bit) -> bool:
    """Whether bitsandbytes' fused kernel supports it: blocks divide its rows, and scales are plain or nested by 256."""
    nested = matrix.layout.nested
    is_aligned = matrix.shape[1] % matrix.layout.blocksize == 0
    has_scales = nested is None or nested.blocksize == NESTED_BLOCKSIZE
    return backend_of(matrix.device).fuses and is_aligned and has_scales


def fused_linear(x: Tensor, weight: Matrix4bit, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """As `Backend.linear`, by bitsandbytes' product with the packed matrix; only if it `can_be_fused`.

    For few rows: it reads the matrix once, without writing a dequantised one. Rounding is the kernel's.
    """
    bitsandbytes_functional()
    nested, codes = weight.layout.nested, weight.codes
    if codes.data_ptr() % ALIGNMENT:  # kernels read several bytes at once, but files align bytes arbitrarily
        codes = codes.clone() if scratch is None else scratch.view(torch.uint8)[: codes.shape[0]].copy_(codes)
    outer = {} if nested is None else _outer_scales(nested, weight.absmax)
    scales = weight.absmax if nested is None else nested.scales
    layout = weight.layout
    product: Tensor = torch.ops.bitsandbytes.gemm_4bit(
        x, codes[:, None], layout.shape, scales, layout.blocksize, layout.quant_type, bias, **outer
    )
    return product


def _fused(matrix: Matrix4bit, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    return fused_linear(x, matrix, bias, scratch)


def _outer_scales(nested: Nested, codes: Tensor) -> dict[str, Tensor]:
    return {"absmax_8bit": codes, "absmax_code": nested.values, "absmax_offset": nested.offset_on_device}


_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SLOW_BLOCKSIZE = 2048  # from this size on, bitsandbytes' CPU op calls torch.compile, which takes minutes


def dequantize_reference(codes: Tensor, scales: Tensor, layout: Layout4bit, out: Tensor) -> None:
    """codes uint8 [ceil(N·K / 2)], scales fp32 [blocks] → out [N·K], in plain torch.

    The reference for the kernels, and the fallback without a kernel.
    """
    _dequantize(codes, scales, layout, out, native=False)


def _dequantize(codes: Tensor, scales: Tensor, layout: Layout4bit, out: Tensor, *, native: bool) -> None:
    """Tile by tile; the reference computes the part after the last whole block, where kernels differ."""
    blocksize, blocks = layout.blocksize, out.shape[0] // layout.blocksize
    step = backend_of(out.device).tile // blocksize
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
    """codes [B · blocksize / 2], scales [B] → fp32 [B, blocksize]. One rounding, at the end: w = map[q] · scale."""
    return _lookup(codes, layout.quant_type).view(-1, layout.blocksize).mul_(scales[:, None])


def _lookup(codes: Tensor, quant_type: str) -> Tensor:
    """uint8 [n] → fp32 [2n], by a table of pairs."""
    return _pairs(quant_type, codes.device).index_select(0, codes.int()).view(torch.float32)


@cache
def _pairs(quant_type: str, device: torch.device) -> Tensor:
    """int64 [256]: the two fp32 values of a byte as one word, so that a look-up moves one word."""
    values = torch.tensor(CODES[quant_type])
    byte = torch.arange(256)
    return torch.stack((values[byte >> 4], values[byte & 15]), dim=1).view(torch.int64)[:, 0].to(device)


def _bitsandbytes_blocks(codes: Tensor, scales: Tensor, layout: Layout4bit, dtype: torch.dtype) -> Tensor:
    """As `_lookup_blocks`, but rounded to `dtype`."""
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
def has_kernels(device: torch.device) -> bool:
    """Whether bitsandbytes' kernels run on this GPU. bitsandbytes can be imported even without kernels for its CUDA."""
    if not has_bitsandbytes():
        return False
    layout, codes = Layout4bit((1, 64), "nf4", 64), torch.zeros(32, dtype=torch.uint8, device=device)
    try:
        _dequantize_on_cuda(codes, torch.ones(1, device=device), layout, torch.empty(1, 64, device=device))
    except RuntimeError:  # bitsandbytes raises it if its library could not be loaded
        return False
    return True


# ---------------------------------------------------------------------------------------------------- the stored weight


@dataclass(frozen=True)
class Weight4bit(PackedStored):
    """A 4-bit weight: X and X.absmax are streamed; `layout` contains the rest."""

    name: str
    layout: Layout4bit
    streamed: tuple[TensorInfo, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> str:
        return self.layout.quant_type

    @property
    def fused_kind(self) -> Hashable | None:
        return (self.layout.shape, self.layout.blocksize, self.layout.quant_type)

    def bind(self, parts: Sequence[Tensor]) -> Matrix4bit:
        codes, absmax = parts
        return Matrix4bit(self.layout, codes, absmax if self.layout.nested else typed(absmax, torch.float32))

    def sample(self, device: torch.device) -> Matrix4bit:
        """A sample with nested scales, even if the weight has plain ones."""
        num_elements = math.prod(self.shape)
        num_blocks = num_elements // self.layout.blocksize
        outer = torch.ones(-(-num_blocks // NESTED_BLOCKSIZE))
        nested = Nested(torch.linspace(-1, 1, 256), outer, 0.0, NESTED_BLOCKSIZE)
        stored = replace(self, layout=replace(self.layout, nested=nested)).to(device)
        return stored.bind([any_bytes(nbytes, device) for nbytes in (num_elements // 2, num_blocks)])

    def to(self, device: torch.device | str) -> Weight4bit:
        nested = self.layout.nested
        if nested is None:
            return self
        moved = replace(nested, values=nested.values.to(device), scales=nested.scales.to(device))
        return replace(self, layout=replace(self.layout, nested=moved))


# -------------------------------------------------------------------------------------------------- reading checkpoints

_PARTS = re.compile(r"(.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)", re.DOTALL)
_CONSTANTS = ("quant_map", "nested_absmax", "nested_quant_map")
_MAX_STATE_BYTES, _MAX_CONSTANT_BYTES = 1 << 16, 1 << 26  # far more than any weight needs


class FourBitFormat(WeightFormat):
    """NF4 and FP4, recognised by the companions' names. Plans and `offspec quantize` use transformers' layout."""

    names = QUANT_TYPES
    plan_forms = ("nf4",)
    outside_layers = "bf16"

    def companion(self, key: str) -> tuple[str, str] | None:
        match = _PARTS.fullmatch(key)
        return (match[1], match[2]) if match else None

    def recognises(self, group: TensorGroup) -> bool:
        return any(QUANT_STATE.fullmatch(part) or part in (*_CONSTANTS, "absmax") for part in group.parts)

    def constant_bytes(self, part: str) -> int:
        if part.startswith("quant_state."):
            return _MAX_STATE_BYTES
        return _MAX_CONSTANT_BYTES if part in _CONSTANTS else 0

    def read(self, group: TensorGroup) -> Weight4bit:
        return _stored_4bit(group)

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        quantization = config.get("quantization_config") or {}
        return "nf4" if quantization.get("load_in_4bit") else None

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight:
        """With 64 weights per scale, and scales of 8 bit (double quantisation); vectors are plain."""
        if len(shape) != 2:
            return PlainWeight(name, allocate(name, "BF16", shape))
        elements = math.prod(shape)
        codes = allocate(name, "U8", (-(-elements // 2), 1))
        scales = allocate(f"{name}.absmax", "U8", (-(-elements // WRITTEN_BLOCKSIZE),))
        return Weight4bit(name, Layout4bit((shape[0], shape[1]), form, WRITTEN_BLOCKSIZE), (codes, scales))

    def prepare(self) -> None:
        bitsandbytes_functional()

    def packer(self, params: ConvertParams) -> Packer | None:
        return Packer4bit(params) if params.format in QUANT_TYPES else None


def _stored_4bit(group: TensorGroup) -> Weight4bit:
    weight = group.weight
    quant_type, part = _quant_state_part(group)
    state = QuantStateReader(group, group.parts[part], group.contents[part]).read(quant_type)
    blocks = -(-math.prod(state.shape) // state.blocksize)
    code_bytes = -(-math.prod(state.shape) // 2)
    if weight.nbytes != code_bytes or len(weight.shape) != 2 or weight.shape[1] != 1:
        group.refuse(
            weight,
            f"is {weight.dtype} {list(weight.shape)}, but its quant_state needs {code_bytes} bytes in one column "
            f"({list(state.shape)} in 4 bit); {DAMAGED}",
        )
    absmax, quant_map = group.companion("absmax"), group.companion("quant_map")
    group.expect("absmax", "F32" if state.nested is None else "U8", (blocks,))
    group.expect("quant_map", "F32", (16,))
    expected = torch.tensor(CODES[quant_type])
    if not torch.allclose(_floats(group.contents["quant_map"]), expected, rtol=0, atol=_CODE_TOLERANCE):
        group.refuse(
            quant_map, f"has a quant_map that is not that of {quant_type}, which no version of bitsandbytes writes"
        )
    nested = _nested(group, state.nested, blocks)
    return Weight4bit(group.name, Layout4bit(state.shape, quant_type, state.blocksize, nested), (weight, absmax))


def _quant_state_part(group: TensorGroup) -> tuple[str, str]:
    """The type in the quant_state's name, and the name. Raises CheckpointError unless there is exactly one."""
    states = {part: info for part, info in group.parts.items() if part.startswith("quant_state.")}
    weight = group.parts[""]
    if len(states) != 1:
        description = f"has {len(states)} quant_states" if states else "lacks its quant_state"
        group.refuse(weight, f"{description}; it needs exactly one; {DAMAGED}")
    ((part, info),) = states.items()
    match = QUANT_STATE.fullmatch(part)
    if match is None or match[1] not in QUANT_TYPES:
        group.refuse(info, f"has the unknown {show(part)}; supported types: {', '.join(QUANT_TYPES)}; {REMEDY}")
    if unknown := group.parts.keys() - {"", "absmax", part, *_CONSTANTS}:
        group.refuse(info, f"has a companion {show(min(unknown))} that does not belong to {match[1]}; {DAMAGED}")
    return match[1], part


def _nested(group: TensorGroup, settings: tuple[float, int] | None, blocks: int) -> Nested | None:
    """The second level of quantisation, or None. Raises CheckpointError if it is incomplete."""
    if settings is None:
        for part in ("nested_absmax", "nested_quant_map"):
            if part in group.parts:
                group.refuse(group.parts[part], f"has a {part}, but its quant_state has no nesting; {DAMAGED}")
        return None
    offset, blocksize = settings
    wanted = {"nested_absmax": (-(-blocks // blocksize),), "nested_quant_map": (256,)}
    for part in wanted:
        group.companion(part)
    for part, shape in wanted.items():
        group.expect(part, "F32", shape)
    scales, codes = (_floats(group.contents[part]) for part in wanted)
    for part, numbers in zip(wanted, (scales, codes), strict=True):
        if not numbers.isfinite().all():
            group.refuse(group.parts[part], f"has a {part} with a number that is not finite; {DAMAGED}")
    return Nested(codes, scales, offset, blocksize)


def _floats(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32)


# -------------------------------------------------------------------------------------------------------------- packing


def pack_4bit(
    weight: Tensor, quant_type: str = "nf4", *, nested: bool = True, blocksize: int = 64
) -> dict[str, Tensor]:
    """weight [N, K] (bf16, fp16 or fp32, on the CPU) → suffix of its name → tensor, in the layout of `transformers`.

    The weight's own suffix is "". The result depends neither on the number of threads nor on the tile size; additional
    memory is a few tiles. Raises CheckpointError if a number is not finite.
    """
    codes, absmax = _quantize(weight, quant_type, blocksize)
    if not absmax.isfinite().all():
        raise CheckpointError("contains a number that is not finite and cannot be quantised")
    state: dict[str, object] = {
        "quant_type": quant_type,
        "blocksize": blocksize,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    parts = {"": codes[:, None], ".absmax": absmax, ".quant_map": torch.tensor(CODES[quant_type])}
    if nested:
        with one_thread():
            offset = absmax.mean()
        parts[".absmax"], outer = bitsandbytes_functional().quantize_blockwise(
            absmax - offset, blocksize=NESTED_BLOCKSIZE
        )
        parts |= {".nested_absmax": outer.absmax, ".nested_quant_map": outer.code.clone()}
        state |= {"nested_blocksize": NESTED_BLOCKSIZE, "nested_dtype": "float32", "nested_offset": offset.item()}
    encoded = json.dumps(state).encode()
    parts[f".quant_state.bitsandbytes__{quant_type}"] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    return parts


def _quantize(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor]:
    """codes uint8 [ceil(N·K / 2)], absmax fp32 [blocks].

    By tiles: for a whole matrix, bitsandbytes would need 14 bytes per element.
    """
    flat = weight.reshape(-1)
    codes = torch.empty(-(-flat.shape[0] // 2), dtype=torch.uint8)
    absmax = torch.empty(-(-flat.shape[0] // blocksize))
    quantize = bitsandbytes_functional().quantize_4bit
    for first in range(0, flat.shape[0], TILE):
        tile = flat[first : first + TILE]
        tile_codes, state = quantize(tile, blocksize=blocksize, quant_type=quant_type)
        codes[first // 2 :][: tile_codes.shape[0]] = tile_codes[:, 0]
        absmax[first // blocksize :][: state.absmax.shape[0]] = state.absmax
    return codes, absmax


@dataclass(frozen=True)
class Packer4bit:
    """Writes NF4 or FP4 in transformers' layout: 64 weights per scale; scales in 8 bit with `double_quant`."""

    params: ConvertParams
    is_lossless = False

    def prepare(self) -> None:
        bitsandbytes_functional()

    def for_shape(self, shape: tuple[int, ...]) -> Packer4bit:
        return self

    @property
    def suffixes(self) -> tuple[str, ...]:
        nested = (".nested_absmax", ".nested_quant_map") if self.params.double_quant else ()
        return ("", ".absmax", ".quant_map", f".quant_state.bitsandbytes__{self.params.format}", *nested)

    def num_bytes(self, elements: int) -> int:
        blocks = -(-elements // WRITTEN_BLOCKSIZE)
        scales = blocks + 4 * -(-blocks // NESTED_BLOCKSIZE) + 1024 if self.params.double_quant else 4 * blocks
        return -(-elements // 2) + scales + 1024  # quant_map, quant_state, and their header entries

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        return pack_4bit(weight, self.params.format, nested=self.params.double_quant, blocksize=WRITTEN_BLOCKSIZE)

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        return quantization_config(self.params, dtype)

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "bitsandbytes": version("bitsandbytes")}


def quantization_config(params: ConvertParams, dtype: str) -> dict[str, Any]:
    """The quantization_config as of transformers' BitsAndBytesConfig. dtype: of the source weights ("BF16")."""
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": {"F16": "float16", "BF16": "bfloat16"}.get(dtype, "float32"),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": params.format,
        "bnb_4bit_use_double_quant": params.double_quant,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
