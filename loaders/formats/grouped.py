"""AWQ's and GPTQ's matrices: 4-bit integers, with a scale and a zero point per group of inputs.

    w[n, k] = (code[k, n] - zero[group of k, n]) · scale[group of k, n]

Both store a matrix [N, K] transposed, with eight codes per int32, lowest bits first:
    X.qweight   GPTQ: int32 [K/8, N], eight inputs in order. AWQ ("gemm"): int32 [K, N/8], the outputs 0 2 4 6 1 3 5 7
    X.qzeros    int32 [G, N/8]: GPTQ: in order, minus one ("gptq") or unchanged ("gptq_v2"). AWQ: 0 2 4 6 1 3 5 7
    X.scales    fp16 (or bf16, fp32) [G, N]
    X.g_idx     GPTQ: int32 [K], each input's group; if it is not in order (`desc_act`), scales are gathered
Sources: AWQ (2306.00978) as packed by AutoAWQ, GPTQ (2210.17323) as packed by AutoGPTQ and GPTQModel. The results equal
theirs in fp16 bit for bit: codes, zeros and their products with a 16-bit scale are exact in fp32, and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from offspec.backends.choice import backend_of
from offspec.backends.on_gpu import triton_kernels
from offspec.errors import UnsupportedModelError

from ..files.checkpoint import Checkpoint, TensorInfo, fault, show
from ..files.records import FLOAT_DTYPES, typed
from ..params import GROUPED_METHODS
from .core import DAMAGED, Allocate, PackedStored, TensorGroup, WeightFormat, read_small
from .unpacked import UnpackedMatrix

PARTS = ("qweight", "qzeros", "scales", "g_idx")  # of a matrix's name without its `.weight`
CODES_PER_WORD, BITS = 8, 4
PLANNED_GROUP = 128  # inputs per group in plans without a given size
MAX_ORDER_BYTES = 1 << 26  # limit of a g_idx, or of a bias without content; far more than any matrix needs
_PARTS = re.compile(rf"(.+)\.({'|'.join(PARTS)})", re.DOTALL)
_LAYOUTS = {"awq": {"gemm": 0}, "gptq": {"gptq": 1, "gptq_v2": 0}}  # layout → offset of the zeros
# Keys of a config.json for the layout; the first one present counts, as in transformers.
_LAYOUT_KEYS = {"awq": ("checkpoint_format", "version", "format"), "gptq": ("checkpoint_format", "format")}
_OLD_CONFIG = "quantize_config.json"  # AutoGPTQ's own
_REMEDY = "use another 4-bit checkpoint of it, or the 16-bit one and `offspec quantize`"

# Weights unpacked at a time, inputs by outputs: they fit a core's cache; on a GPU more, to keep launches few.
_TILE = {"cpu": (128, 2048), "cuda": (512, 8192)}


@dataclass(frozen=True)
class GroupedLayout:
    """The layout of one matrix [N, K]. groups: int64 [K] if inputs of a group are not contiguous, otherwise None."""

    shape: tuple[int, int]
    method: str
    group_size: int
    zero_offset: int
    groups: Tensor | None = None


@dataclass(frozen=True)
class GroupedMatrix(UnpackedMatrix):
    """codes int32 [K/8, N] (GPTQ) or [K, N/8] (AWQ), zeros int32 [G, N/8], scales float [G, N]."""

    layout: GroupedLayout
    codes: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def form(self) -> str:  # type: ignore[override]
        return self.layout.method

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K], usually a transposed view of [K, N]; in `out` (contiguous) if given."""
        matrix = torch.empty(self.shape, dtype=dtype, device=self.device) if out is None else out
        # Unpacking is fastest in the stored orientation. But a CPU multiplies by rows.
        backend = backend_of(self.device)
        upright = matrix.t() if backend.multiplies_rows else matrix.view(self.shape[::-1])
        backend.unpack(self, upright)
        return upright.t()

    def launched_unpacking(self, out: Tensor) -> Callable[[], None] | None:
        kernels = triton_kernels()
        return None if kernels is None else partial(self.unpack_with, kernels, out)

    def unpack_with(self, kernels: ModuleType, upright: Tensor) -> None:
        """Unpack with Triton (`backends.triton.unpack`) → upright, contiguous [K, N]."""
        layout, num_inputs = self.layout, self.shape[1]
        groups = layout.groups
        if groups is None:
            groups = torch.arange(num_inputs, device=self.codes.device) // layout.group_size
        if layout.method == "awq":
            kernels.unpack_awq(self.codes, self.zeros, self.scales, groups, upright)
        else:
            kernels.unpack_gptq(self.codes, self.zeros, self.scales, groups, upright, layout.zero_offset)

    def unpack(self, out: Tensor) -> None:
        """out: [K, N]."""
        (num_inputs, num_outputs), device, dtype = out.shape, out.device, out.dtype
        is_turned = not out.is_contiguous()
        height, width = _TILE[device.type]
        groups_of_tiles = self._groups(height)
        for left in range(0, num_outputs, width):
            columns = slice(left, min(left + width, num_outputs))
            scales, shifts = self._scales_and_shifts(columns)
            for first, groups in zip(range(0, num_inputs, height), groups_of_tiles, strict=True):
                rows = slice(first, min(first + height, num_inputs))
                tile = self._codes(rows, columns).float().view(len(groups), -1, columns.stop - left)
                own_scales, own_shifts = (part.index_select(0, groups)[:, None] for part in (scales, shifts))
                tile = torch.addcmul(own_shifts, tile, own_scales, out=tile).flatten(0, 1)
                if is_turned:
                    tile = tile.to(dtype).t().contiguous().t()
                out[rows, columns].copy_(tile)

    def _groups(self, height: int) -> tuple[Tensor, ...]:
        """Groups for every `height` inputs: one per input, or one per run of inputs that share a group."""
        if self.layout.groups is not None:
            return torch.split(self.layout.groups, height)
        num_inputs, size = self.shape[1], self.layout.group_size
        common = gcd(size, height, num_inputs)
        groups = torch.arange(0, num_inputs, common, device=self.codes.device) // size
        return torch.split(groups, height // common)

    def _scales_and_shifts(self, columns: slice) -> tuple[Tensor, Tensor]:
        """fp32 [G, columns] each: w = code · scale + shift."""
        words = self.zeros[:, _words(columns)]
        zeros = _interleaved(words) if self.layout.method == "awq" else _in_order(words.t()).t().contiguous()
        zeros = (zeros + self.layout.zero_offset).bitwise_and_((1 << BITS) - 1)
        scales = self.scales[:, columns].float()
        return scales, (zeros * scales).neg_()

    def _codes(self, rows: slice, columns: slice) -> Tensor:
        """Integers [rows, columns], without the zeros."""
        if self.layout.method == "awq":
            return _interleaved(self.codes[rows, _words(columns)])
        return _in_order(self.codes[_words(rows), columns])


def _words(codes: slice) -> slice:
    return slice(codes.start // CODES_PER_WORD, codes.stop // CODES_PER_WORD)


def _in_order(words: Tensor) -> Tensor:
    """int32 [R, C] → int32 [8 · R, C]"""
    places = torch.arange(0, 32, BITS, dtype=torch.int32, device=words.device)[:, None]
    return (words[:, None] >> places).bitwise_and_((1 << BITS) - 1).flatten(0, 1)


def _interleaved(words: Tensor) -> Tensor:
    """int32 [R, W] → uint8 [R, 8 · W]: the codes 0 4 1 5 2 6 3 7 of each word, a byte each.

    Three steps move all eight codes of a word at once; the comments show their places, one hexadecimal digit per code.
    """
    wide = words.long().bitwise_and_(0xFFFFFFFF)  # ........76543210
    wide.bitwise_or_(wide << 24).bitwise_and_(0x00FF00FF00FF00FF)  # ..76..32..54..10
    wide.bitwise_or_(wide >> 8).bitwise_and_(0x0000FFFF0000FFFF)  # ....7632....5410
    wide.bitwise_or_(wide << 12).bitwise_and_(0x0F0F0F0F0F0F0F0F)  # .7.3.6.2.5.1.4.0
    return wide.view(torch.uint8)


@dataclass(frozen=True)
class GroupedWeight(PackedStored):
    """A stored AWQ or GPTQ weight: X.qweight, X.qzeros and X.scales are streamed; `layout.groups` is the g_idx."""

    name: str
    layout: GroupedLayout
    streamed: tuple[TensorInfo, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> str:
        return self.layout.method

    def bind(self, parts: Sequence[Tensor]) -> GroupedMatrix:
        codes, zeros = (
            typed(part, torch.int32).view(info.shape) for part, info in zip(parts[:2], self.streamed, strict=False)
        )
        scales = self.streamed[2]
        return GroupedMatrix(self.layout, codes, zeros, typed(parts[2], FLOAT_DTYPES[scales.dtype]).view(scales.shape))

    def to(self, device: torch.device | str) -> GroupedWeight:
        if self.layout.groups is None:
            return self
        return replace(self, layout=replace(self.layout, groups=self.layout.groups.to(device)))


# -------------------------------------------------------------------------------------------------- reading checkpoints


@dataclass(frozen=True)
class GroupedSettings:
    """The settings of a config.json for all matrices. group_size: None is a single group."""

    method: str
    group_size: int | None
    zero_offset: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> GroupedSettings | None:
        """The settings of its `quantization_config`; None for another method, or without one.

        Raises UnsupportedModelError for other bits, another layout or settings per module; CheckpointError.
        """
        quantization, path = checkpoint.config.get("quantization_config"), checkpoint.path
        if not quantization:
            _refuse_old_gptq(checkpoint)
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        if not isinstance(quantization, Mapping) or method not in GROUPED_METHODS:
            return None
        if (bits := quantization.get("bits", BITS)) != BITS:
            raise UnsupportedModelError(
                f"{path}: {method} with {show(bits)} bits is not supported, only with {BITS}; {_REMEDY}"
            )
        size = quantization.get("group_size", 128)
        if type(size) is not int or not (size == -1 or size > 0):
            raise fault(
                path, f"config.json has group_size {show(size)}, which is neither a number of inputs nor -1 (all)"
            )
        if rules := _overrides(quantization.get("dynamic")):
            raise UnsupportedModelError(
                f"{path}: {method} with different settings for some modules (dynamic: {rules}) is not supported; "
                f"{_REMEDY}"
            )
        layouts = _LAYOUTS[method]
        layout = next(
            (str(quantization[key]).lower() for key in _LAYOUT_KEYS[method] if quantization.get(key)),
            next(iter(layouts)),
        )
        if layout not in layouts:
            raise UnsupportedModelError(
                f"{path}: {method} layout {show(layout)} is not supported, only {' and '.join(layouts)}; {_REMEDY}"
            )
        return cls(method, None if size == -1 else size, layouts[layout])


def _overrides(dynamic: object) -> str:
    """GPTQModel's rules for some modules as text; "" if they only exclude modules ("-:")."""
    if isinstance(dynamic, Mapping):
        dynamic = [rule for rule in dynamic if not rule.startswith("-:")]
    return show(dynamic) if dynamic else ""


def _refuse_old_gptq(checkpoint: Checkpoint) -> None:
    path = checkpoint.path
    if (path / _OLD_CONFIG).is_file() and any(name.endswith(".qweight") for name in checkpoint.tensors):
        raise fault(
            path,
            f"is GPTQ, but its config.json has no quantization_config; add one: the content of {_OLD_CONFIG} with "
            '"quant_method": "gptq"',
        )


class GroupedFormat(WeightFormat):
    """AWQ and GPTQ. Only the quantization_config in config.json describes the packing of their tensors."""

    names = GROUPED_METHODS

    def __init__(self, settings: GroupedSettings | None = None) -> None:
        """settings: from a checkpoint's config; without them, the format recognises nothing."""
        self.settings = settings

    def in_checkpoint(self, checkpoint: Checkpoint) -> GroupedFormat | None:
        settings = GroupedSettings.of(checkpoint)
        return None if settings is None else GroupedFormat(settings)

    def companion(self, key: str) -> tuple[str, str] | None:
        match = _PARTS.fullmatch(key) if self.settings is not None else None
        return (f"{match[1]}.weight", match[2]) if match else None

    def recognises(self, group: TensorGroup) -> bool:
        return self.settings is not None and not group.parts.keys().isdisjoint(PARTS)

    def constant_bytes(self, part: str) -> int:
        return MAX_ORDER_BYTES if part == "g_idx" else 0

    def read(self, group: TensorGroup) -> GroupedWeight:
        assert self.settings is not None
        return _grouped_weight(group, self.settings)

    def blank_tensors(self, infos: Mapping[str, TensorInfo], wanted: Collection[str]) -> set[str]:
        """Biases of zeros, which GPTQ's tools wrote for every matrix of a model without biases."""
        unwanted = [name for name in infos if name.endswith(".bias") and name not in wanted]
        grouped_biases = [infos[name] for name in unwanted if f"{name.removesuffix('bias')}qweight" in infos]
        return {
            info.name
            for info, content in read_small(dict.fromkeys(grouped_biases, MAX_ORDER_BYTES)).items()
            if not any(content)
        }

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        """NF4, whose sizes differ by less than one percent."""
        quantization = config.get("quantization_config") or {}
        return "nf4" if quantization.get("quant_method") in GROUPED_METHODS else None

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> GroupedWeight:
        (num_outputs, num_inputs), num_groups = shape, -(-shape[1] // PLANNED_GROUP)
        words = num_outputs // CODES_PER_WORD
        codes = (num_inputs, words) if form == "awq" else (num_inputs // CODES_PER_WORD, num_outputs)
        parts = (("I32", codes), ("I32", (num_groups, words)), ("F16", (num_groups, num_outputs)))
        infos = (allocate(f"{name}.{part}", kind, dims) for part, (kind, dims) in zip(PARTS, parts, strict=False))
        return GroupedWeight(name, GroupedLayout((num_outputs, num_inputs), form, PLANNED_GROUP, 0), tuple(infos))


def _grouped_weight(group: TensorGroup, settings: GroupedSettings) -> GroupedWeight:
    """Check the tensors (by their names in PARTS) and build the weight. Raises CheckpointError."""
    parts = group.parts

    def refuse(problem: str) -> NoReturn:
        group.refuse(next(iter(parts.values())), f"{problem}; {DAMAGED}")

    if missing := [part for part in PARTS[:3] if part not in parts]:
        refuse(f"lacks its {missing[0]}")
    if unknown := sorted(parts.keys() - {*PARTS}):
        refuse(f"has a companion {show(unknown[0] or 'weight')} beside its {settings.method} parts")
    codes, zeros, scales = (parts[part] for part in PARTS[:3])
    if any(len(info.shape) != 2 for info in (codes, zeros, scales)) or 0 in codes.shape + scales.shape:
        refuse(f"is {list(codes.shape)}, {list(zeros.shape)} and {list(scales.shape)}, which should be matrices")
    num_groups, num_outputs = scales.shape
    num_inputs = codes.shape[0] if settings.method == "awq" else codes.shape[0] * CODES_PER_WORD
    if num_outputs % CODES_PER_WORD or num_inputs % CODES_PER_WORD:
        refuse(f"is [{num_outputs}, {num_inputs}], but both must be multiples of {CODES_PER_WORD}")
    words = num_outputs // CODES_PER_WORD
    wanted = {
        "qweight": ("I32", (num_inputs, words) if settings.method == "awq" else (codes.shape[0], num_outputs)),
        "qzeros": ("I32", (num_groups, words)),
        "g_idx": ("I32", (num_inputs,)),
    }
    for part, expected in wanted.items():
        if part in parts and (parts[part].dtype, parts[part].shape) != expected:
            stored = f"{parts[part].dtype} {list(parts[part].shape)}"
            refuse(f"has a {part} that is {stored}, not {expected[0]} {list(expected[1])}")
    if scales.dtype not in ("F16", "BF16", "F32"):
        refuse(f"has scales that are {scales.dtype}, not fp16, bf16 or fp32")
    size = min(settings.group_size or num_inputs, num_inputs)
    if num_groups != (wanted_groups := -(-num_inputs // size)):
        refuse(f"has {num_groups} groups of scales, but {num_inputs} inputs in groups of {size} need {wanted_groups}")
    groups = order_of(group, "g_idx", num_inputs, num_groups, size)
    layout = GroupedLayout((num_outputs, num_inputs), settings.method, size, settings.zero_offset, groups)
    return GroupedWeight(group.name, layout, (codes, zeros, scales))


def order_of(group: TensorGroup, part: str, num_inputs: int, num_groups: int, size: int) -> Tensor | None:
    """Each input's group, int64 [num_inputs], from a g_idx (I32 [num_inputs], the part `part`).

    None without a g_idx, or if inputs are in order. Raises CheckpointError.
    """
    info = group.parts.get(part)
    if info is None:
        return None
    content = group.contents[part]
    if len(content) != 4 * num_inputs:
        group.refuse(info, f"has {num_inputs} inputs in its {part}, more than the limit; {DAMAGED}")
    groups = torch.frombuffer(bytearray(content), dtype=torch.int32).long()
    if not (int(groups.min()) >= 0 and int(groups.max()) < num_groups):
        named = f"groups from {int(groups.min())} to {int(groups.max())} of {num_groups}"
        group.refuse(info, f"has a {part} that names {named}; {DAMAGED}")
    return None if bool((groups == torch.arange(num_inputs) // size).all()) else groups
