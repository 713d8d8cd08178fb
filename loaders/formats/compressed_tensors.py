"""compressed-tensors' matrices, as used with vLLM: integers of 2 to 8 bit, fp8, NVFP4, MXFP4 and MXFP8.

Tensors per module X with a weight [N, K], by the `format` in config.json for all groups of modules or for one:
    pack-quantized        X.weight_packed int32 [N, ceil(K·bits/32)], X.weight_shape int64 [2]
    int-, naive-quantized X.weight int8 [N, K]
    float-quantized       X.weight F8_E4M3 [N, K]; mxfp8-quantized: with scales that are only exponents (E8M0)
    nvfp4-pack-quantized  X.weight_packed uint8 [N, K/2], scales F8_E4M3 for 16 inputs each, X.weight_global_scale
                          fp32 [1], their divisor
    mxfp4-pack-quantized  X.weight_packed uint8 [N, K/2], scales E8M0 for 32 inputs each
All have X.weight_scale: [1], [N, 1], [N, K/group] or [ceil(N/a), ceil(K/b)], by the `strategy`. If `symmetric` is
false, they have X.weight_zero_point, packed along the outputs for packed codes. X.weight_g_idx int32 [K] has the groups
of inputs that are not contiguous (`actorder: group`). Source: compressed-tensors 0.20; the results are equal. The
tensors determine the group of modules of a weight; names (`targets`, `ignore`) are not used. Activations and KV entries
stay in 16 bit, only weights are quantised.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from offspec.errors import CheckpointError, UnsupportedModelError

from ..files.checkpoint import Checkpoint, TensorInfo, fault, show
from ..files.records import FLOAT_DTYPES
from ..params import COMPRESSED_TENSORS, MXFP4
from .core import DAMAGED, REMEDY, Allocate, StoredWeight, TensorGroup
from .fp8 import block_of, is_block
from .grouped import MAX_ORDER_BYTES, order_of
from .plain import PlainWeight
from .scaled import (
    ACTIVATIONS,
    EXPONENTS,
    FP4,
    Block,
    Codes,
    ScaledFormat,
    ScaledLayout,
    ScaledParts,
    ScaledWeight,
    grid,
    sized_scaled,
    sized_vector,
)

_PARTS = ("packed", "scale", "shape", "zero_point", "g_idx", "global_scale")
_WIDTHS = tuple(range(2, 9))  # bits of packed integers
_HALVES = ("F32", "BF16", "F16")
_PLANNED_GROUP = 128
_MOST_GROUPS = 1000  # of modules, in a config.json


@dataclass(frozen=True)
class Kind:
    """One encoding of codes and scales. form: its name. scales: the allowed dtypes of scales."""

    form: str
    codes: Codes
    dtype: str
    scales: tuple[str, ...] = _HALVES

    @property
    def part(self) -> str:
        """The part of a weight with the codes."""
        return "weight_packed" if self.codes.kind in ("packed", "fp4") else ""

    def has_codes(self, group: TensorGroup) -> bool:
        return self.part in group.parts and group.parts[self.part].dtype == self.dtype


_FP8, _INT8 = Codes("fp8", 8), Codes("int8", 8)
_PACKED = {bits: Kind(f"w{bits}a16", Codes("packed", bits), "I32") for bits in _WIDTHS}
_FLOAT8, _INTEGERS = Kind("fp8", _FP8, "F8_E4M3"), Kind("int8", _INT8, "I8")
# Format, type and bits in config.json → the encoding in the files.
KINDS = {
    **{("pack-quantized", "int", bits): kind for bits, kind in _PACKED.items()},
    **{(name, "int", bits): _INTEGERS for name in ("int-quantized", "naive-quantized") for bits in _WIDTHS},
    **{(name, "float", 8): _FLOAT8 for name in ("float-quantized", "naive-quantized")},
    ("mxfp8-quantized", "float", 8): Kind("mxfp8", _FP8, "F8_E4M3", EXPONENTS),
    ("nvfp4-pack-quantized", "float", 4): Kind("nvfp4", FP4, "U8", ("F8_E4M3",)),
    ("mxfp4-pack-quantized", "float", 4): Kind(MXFP4, FP4, "U8", EXPONENTS),
}
_BY_FORM = {kind.form: kind for kind in KINDS.values()}
# Inputs per scale for `sized`, if not _PLANNED_GROUP.
_PLANNED = {"nvfp4": 16, "mxfp8": 32}


@dataclass(frozen=True)
class Scheme:
    """The quantisation of one group of modules. group_size: inputs per scale; None: not by groups."""

    kind: Kind
    strategy: str
    group_size: int | None
    block: Block | None
    symmetric: bool

    def scales_of(self, shape: tuple[int, int], scales: TensorInfo) -> Block | None:
        """The weights that share one of these scales; None if the scales contradict the scheme."""
        if self.group_size is not None:
            fits = shape[1] % self.group_size == 0 and scales.shape == (shape[0], shape[1] // self.group_size)
            return (1, self.group_size) if fits else None
        if self.block is not None and scales.shape != grid(shape, self.block):
            return None
        block_shape = block_of(shape, scales, self.block)
        wanted = {"tensor": shape, "channel": (1, shape[1]), "block": block_shape}[self.strategy]
        return block_shape if block_shape == wanted else None


# ----------------------------------------------------------------------------------------------------- what config says


def schemes_in(config: Mapping[str, Any], path: Path) -> tuple[Scheme, ...]:
    """The schemes of a `quantization_config`. Raises UnsupportedModelError for unsupported ones, CheckpointError."""
    sparsity = config.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
        kind = sparsity.get("format") if isinstance(sparsity, Mapping) else sparsity
        raise UnsupportedModelError(f"{path}: sparse compressed-tensors ({show(kind)}) are not supported; {REMEDY}")
    if config.get("transform_config"):
        description = (
            "compressed-tensors with transforms (transform_config), which rotate activations, are not supported"
        )
        raise UnsupportedModelError(f"{path}: {description}; {REMEDY}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not 0 < len(groups) <= _MOST_GROUPS:
        raise fault(
            path, f"config.json has config_groups {show(groups)}, which is no list of compressed-tensors' groups"
        )
    schemes = dict.fromkeys(scheme for name, group in groups.items() for scheme in _schemes(name, group, config, path))
    return tuple(schemes)


def _schemes(name: object, group: object, config: Mapping[str, Any], path: Path) -> Iterator[Scheme]:
    """The schemes of one group; none if only activations are quantised."""
    if not isinstance(group, Mapping):
        raise fault(
            path, f"config.json has a group {show(name)} that is {show(group)}, no scheme of compressed-tensors"
        )
    weights = group.get("weights")
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise fault(path, f"config.json has weights {show(weights)} in group {show(name)}, which is no scheme")
    layout, kind_of, bits = (
        group.get("format") or config.get("format"),
        weights.get("type", "int"),
        weights.get("num_bits", 8),
    )
    key = (layout, kind_of, bits)
    if not (isinstance(layout, str) and isinstance(kind_of, str) and type(bits) is int) or key not in KINDS:
        supported = ", ".join(dict.fromkeys(name for name, _, _ in KINDS))
        description = (
            f"compressed-tensors in the format {show(layout)} with {show(bits)} bits of the type {show(kind_of)}"
        )
        raise UnsupportedModelError(
            f"{path}: {description} are not supported; supported: {supported} of 2 to 8 bits; {REMEDY}"
        )
    yield _scheme(KINDS[key], weights, path)


def _scheme(kind: Kind, weights: Mapping[str, Any], path: Path) -> Scheme:
    size, symmetric = weights.get("group_size"), weights.get("symmetric", True)
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        raise UnsupportedModelError(
            f"{path}: compressed-tensors with the strategy {show(strategy)} are not supported; {REMEDY}"
        )
    has_groups = strategy in ("group", "tensor_group")
    if has_groups and not (type(size) is int and size > 0):
        raise fault(path, f"config.json has group_size {show(size)}, which is no number of inputs")
    if not isinstance(symmetric, bool) or (not symmetric and kind.codes.kind not in ("packed", "int8")):
        raise UnsupportedModelError(f"{path}: {kind.form} with symmetric {show(symmetric)} is not supported; {REMEDY}")
    block = _block(weights, path) if strategy == "block" else None
    return Scheme(kind, strategy, size if has_groups else None, block, symmetric)


def _block(weights: Mapping[str, Any], path: Path) -> Block:
    """The block of a scheme; older versions wrote it as text: 128x128."""
    block = weights.get("block_structure")
    digits = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", block) if isinstance(block, str) else None
    if digits is not None:
        return int(digits[1]), int(digits[2])
    if not is_block(block):
        raise fault(path, f"config.json has block_structure {show(block)}, which is not two numbers of weights")
    assert isinstance(block, list)
    return block[0], block[1]


# --------------------------------------------------------------------------------------------------- reading tensors


class CompressedTensorsFormat(ScaledFormat):
    """compressed-tensors, recognised by the companions of a weight."""

    names = tuple(form for form in _BY_FORM if form not in ("fp8", "int8", MXFP4))  # other formats size these
    plan_forms = ("w4a16", "nvfp4")
    companions = re.compile(rf"(.+)\.(weight_(?:{'|'.join(_PARTS)})|{ACTIVATIONS})", re.DOTALL)

    def __init__(self, schemes: tuple[Scheme, ...] = (), notes: tuple[str, ...] = ()) -> None:
        """schemes: from a checkpoint's config; without them, the format recognises nothing."""
        self.schemes, self.notes, self.is_set = schemes, notes, bool(schemes)

    def in_checkpoint(self, checkpoint: Checkpoint) -> CompressedTensorsFormat | None:
        quantization = checkpoint.config.get("quantization_config")
        if not isinstance(quantization, Mapping) or quantization.get("quant_method") != COMPRESSED_TENSORS:
            return None
        kv_note = f"{checkpoint.path.name} quantises KV entries; offspec keeps them in the compute dtype"
        schemes = schemes_in(quantization, checkpoint.path)
        return CompressedTensorsFormat(schemes, (kv_note,) if quantization.get("kv_cache_scheme") else ())

    def recognises(self, group: TensorGroup) -> bool:
        return self.is_set and (len(group.parts) > 1 or "" not in group.parts)

    def constant_bytes(self, part: str) -> int:
        return {"weight_g_idx": MAX_ORDER_BYTES, "weight_shape": 64}.get(part, 0)

    def read(self, group: TensorGroup) -> StoredWeight:
        if not any(part.startswith("weight_") for part in group.parts) and group.weight.dtype in FLOAT_DTYPES:
            return PlainWeight(group.name, group.weight)
        fitting = [scheme for scheme in self.schemes if scheme.kind.has_codes(group)] or list(self.schemes[:1])
        has_zeros = "weight_zero_point" in group.parts
        fitting.sort(key=lambda scheme: scheme.symmetric == has_zeros)
        for scheme in fitting[:-1]:
            with suppress(CheckpointError):  # the scales may belong to another scheme
                return _weight(group, scheme)
        return _weight(group, fitting[-1])

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        """By the first group; weights of 5 to 8 bits count as fp8, which differs only in its scales."""
        quantization = config.get("quantization_config") or {}
        if quantization.get("quant_method") != COMPRESSED_TENSORS:
            return None
        schemes = schemes_in(quantization, Path("config.json"))
        if not schemes:
            return None
        codes = schemes[0].kind.codes
        return "nvfp4" if codes.kind == "fp4" else "w4a16" if codes.kind == "packed" and codes.bits <= 4 else "fp8"

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight:
        """With scales for 128 inputs, or the format's fixed number; vectors are plain."""
        if len(shape) != 2:
            return sized_vector(name, shape, allocate)
        kind = _BY_FORM[form]
        layout = ScaledLayout((shape[0], shape[1]), form, kind.codes, (1, _PLANNED.get(form, _PLANNED_GROUP)))
        scales = "BF16" if kind.scales == _HALVES else kind.scales[0]
        return sized_scaled(layout, name, allocate, (kind.dtype, scales), divisor=form == "nvfp4")


def _weight(group: TensorGroup, scheme: Scheme) -> ScaledWeight:
    """Check the tensors of a weight and build it by a scheme. Raises CheckpointError."""
    kind = scheme.kind
    codes, shape = _codes(group, kind)
    scales = _companion(group, "weight_scale")
    block = scheme.scales_of(shape, scales)
    if block is None or scales.dtype not in kind.scales:
        sizes = scheme.group_size or scheme.block or ""
        description = f"has scales that are {scales.dtype} {list(scales.shape)}, where {list(shape)} in {kind.form}"
        group.refuse(scales, f"{description} with a scale for each {scheme.strategy} {sizes} has others; {DAMAGED}")
    layout = ScaledLayout(shape, kind.form, kind.codes, block)
    zeros, divisor = _zeros(group, scheme, layout, scales), None
    if kind.form == "nvfp4":
        divisor = _companion(group, "weight_global_scale")
        if divisor.dtype != "F32" or divisor.shape not in ((), (1,)):
            group.refuse(
                divisor, f"has a weight_global_scale {divisor.dtype} {list(divisor.shape)}, not F32 [1]; {DAMAGED}"
            )
    is_packed_zeros = zeros is not None and zeros.dtype == "I32"
    layout = ScaledLayout(shape, kind.form, kind.codes, block, is_packed_zeros, _groups(group, scheme, layout))
    return ScaledWeight(group.name, layout, ScaledParts(codes, scales, zeros, divisor))


def _companion(group: TensorGroup, part: str) -> TensorInfo:
    """A part of a weight. Raises CheckpointError if it is missing."""
    if part not in group.parts:
        group.refuse(next(iter(group.parts.values())), f"lacks its {part or 'codes'}; {DAMAGED}")
    return group.parts[part]


def _codes(group: TensorGroup, kind: Kind) -> tuple[TensorInfo, tuple[int, int]]:
    """The codes, and the shape [N, K] of the matrix. Raises CheckpointError if they are not of this kind."""
    info = _companion(group, kind.part)
    if info.dtype != kind.dtype or len(info.shape) != 2 or 0 in info.shape:
        description = f"is {info.dtype} {list(info.shape)}, where {kind.form} has a matrix of {kind.dtype}"
        group.refuse(info, f"{description}; {DAMAGED}")
    if kind.codes.kind != "packed":
        return info, (info.shape[0], info.shape[1] * (2 if kind.codes.kind == "fp4" else 1))
    stored_shape = _companion(group, "weight_shape")
    content = group.contents["weight_shape"]
    sizes = struct.unpack("<2q", content) if stored_shape.dtype == "I64" and len(content) == 16 else ()
    fits = len(sizes) == 2 and sizes[0] == info.shape[0] and 0 < sizes[1] <= 32 * info.shape[1]
    if not fits or 4 * info.shape[1] != kind.codes.row_bytes(sizes[1]):
        stored_text = f"says {list(sizes)}" if sizes else f"is {stored_shape.dtype} {list(stored_shape.shape)}"
        description = f"is {list(info.shape)} words of {kind.codes.bits} bits, but its weight_shape {stored_text}"
        group.refuse(stored_shape, f"{description}; {DAMAGED}")
    return info, (sizes[0], sizes[1])


def _zeros(group: TensorGroup, scheme: Scheme, layout: ScaledLayout, scales: TensorInfo) -> TensorInfo | None:
    """The zeros; None in symmetric schemes, in which older files have unpacked zeros of 0."""
    zero_point = group.parts.get("weight_zero_point")
    if scheme.symmetric:
        if zero_point is not None and zero_point.dtype == "I32":
            group.refuse(zero_point, f"has a weight_zero_point, but config.json says that it is symmetric; {DAMAGED}")
        return None
    info = _companion(group, "weight_zero_point")
    rows, columns = layout.grid
    wanted = ("I8", scales.shape)
    if scheme.kind.codes.kind == "packed" and scheme.strategy in ("group", "channel"):
        wanted = ("I32", (layout.codes.row_bytes(rows) // 4, columns))
    if (info.dtype, info.shape) != wanted:
        is_there, right = f"{info.dtype} {list(info.shape)}", f"{wanted[0]} {list(wanted[1])}"
        group.refuse(info, f"has a weight_zero_point that is {is_there}, where {right} belongs; {DAMAGED}")
    return info


def _groups(group: TensorGroup, scheme: Scheme, layout: ScaledLayout) -> Tensor | None:
    if "weight_g_idx" not in group.parts:
        return None
    if scheme.group_size is None:
        group.refuse(group.parts["weight_g_idx"], f"has a weight_g_idx, but no groups of inputs; {DAMAGED}")
    group.expect("weight_g_idx", "I32", (layout.shape[1],))
    return order_of(group, "weight_g_idx", layout.shape[1], layout.grid[1], scheme.group_size)
