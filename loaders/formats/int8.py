"""bitsandbytes' LLM.int8 (2208.07339): 8-bit integers, with one scale per output.

    X                    int8 [N, K]
    X's SCB              fp32 [N]: the largest absolute value of each row; w = X · SCB / 127
    X's weight_format    the order of the codes; only 0 (row-major) is supported

LLM.int8 also rounds *activations* to 8 bit (except outlier columns); offspec keeps activations unrounded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec.backends.choice import backend_of
from offspec.backends.x86.encodings import Int8
from offspec.backends.x86.processor import num_lanes, per_processor
from offspec.backends.x86.row_product import RowProduct

from ..files.checkpoint import TensorInfo
from ..files.records import typed
from .core import DAMAGED, Allocate, PackedStored, TensorGroup, WeightFormat
from .unpacked import UnpackedMatrix

_UNIT = 7.874015718698502e-3  # bitsandbytes' constant for 1/127, for bit-identical results
_PARTS = re.compile(r"(.+)\.(SCB|weight_format)", re.DOTALL)
_MAX_CONSTANT_BYTES = 1 << 26  # far more than is needed


@dataclass(frozen=True)
class Int8Matrix(UnpackedMatrix):
    """codes int8 [N, K], scales fp32 [N]: w = codes · scales / 127."""

    codes: Tensor
    scales: Tensor
    form = "int8"

    @property
    def kernel(self) -> tuple[RowProduct, list[Tensor]] | None:
        product = _product()
        if product is None or not product.encoding.can_read(self.shape[1]):
            return None
        return product, [self.codes, self.scales]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def unpack(self, out: Tensor) -> None:
        rows, columns = self.shape
        step = max(1, backend_of(self.device).tile // max(1, columns))
        for first in range(0, rows, step):
            some = slice(first, first + step)
            out[some] = (self.codes[some] * self.scales[some, None]).mul_(_UNIT)


@per_processor
def _product() -> RowProduct | None:
    lanes = num_lanes()
    return RowProduct(Int8(lanes, _UNIT)) if lanes else None


@dataclass(frozen=True)
class Int8Weight(PackedStored):
    """A stored weight: X int8 [N, K] and X's `SCB` fp32 [N]."""

    name: str
    shape: tuple[int, ...]
    streamed: tuple[TensorInfo, ...]
    dtype: str = "int8"

    def bind(self, parts: Sequence[Tensor]) -> Int8Matrix:
        codes, scales = parts
        return Int8Matrix(codes.view(torch.int8).view(self.shape), typed(scales, torch.float32))


class Int8Format(WeightFormat):
    """LLM.int8, recognised by the companions' names."""

    names = ("int8",)

    def companion(self, key: str) -> tuple[str, str] | None:
        match = _PARTS.fullmatch(key)
        return (f"{match[1]}.weight", match[2]) if match else None

    def recognises(self, group: TensorGroup) -> bool:
        return "SCB" in group.parts or "weight_format" in group.parts

    def constant_bytes(self, part: str) -> int:
        return _MAX_CONSTANT_BYTES if part == "weight_format" else 0

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> Int8Weight:
        return Int8Weight(name, shape, (allocate(name, "I8", shape), allocate(f"{name}.SCB", "F32", shape[:1])))

    def read(self, group: TensorGroup) -> Int8Weight:
        weight, scales, order = group.weight, group.parts.get("SCB"), group.parts.get("weight_format")
        if scales is None:
            group.refuse(weight, f"lacks its SCB (the scale of each row); {DAMAGED}")
        if weight.dtype != "I8" or len(weight.shape) != 2:
            group.refuse(weight, f"has an SCB, but is {weight.dtype} {list(weight.shape)}, not I8 [N, K]; {DAMAGED}")
        group.expect("SCB", "F32", (weight.shape[0],))
        if order is not None:
            group.expect("weight_format", "U8", ())
            if group.contents["weight_format"] != b"\0":
                order_code = group.contents["weight_format"][0]
                description = f"has weight_format {order_code}, not 0 (row-major); save it with a newer bitsandbytes"
                group.refuse(order, description)
        return Int8Weight(group.name, weight.shape, (weight, scales))
