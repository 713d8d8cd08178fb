"""Plain tensors: 16-, 32- and 64-bit floats. Refuses every other tensor that no format recognises."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offspec.errors import CheckpointError

from ..files.checkpoint import TensorInfo, fault, show
from ..files.records import FLOAT_DTYPES, typed
from ..params import FLOAT_FORMATS, ConvertParams
from .core import REMEDY, Allocate, Packer, StoredWeight, TensorGroup, WeightFormat, any_bytes

PLAN_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

_FP8 = "fp8 without its quantization_config"
# Tensor names of other methods → the method's name.
_FOREIGN = (
    (re.compile(r".+\.(qweight|qzeros|g_idx)"), "AWQ or GPTQ without its quantization_config"),
    (re.compile(r".+\.(weight_scale_inv|weight_scale|input_scale|activation_scale)"), _FP8),
    (
        re.compile(r".+\.(weight_packed|weight_shape|weight_zero_point)"),
        "compressed-tensors without its quantization_config",
    ),
)


@dataclass(frozen=True)
class PlainWeight:
    """A stored plain tensor."""

    name: str
    info: TensorInfo
    is_packed = False
    fused_kind = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def plain_dtype(self) -> str:
        return self.info.dtype

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        return (self.info,)

    def is_kept_as_read(self, dtype: torch.dtype) -> bool:
        return FLOAT_DTYPES[self.info.dtype] is dtype

    def bind(self, parts: Sequence[Tensor]) -> Tensor:
        return typed(parts[0], FLOAT_DTYPES[self.info.dtype]).view(self.info.shape)

    def bind_rows(self, rows: Tensor) -> Tensor:
        return rows.view(FLOAT_DTYPES[self.info.dtype])

    def sample(self, device: torch.device) -> Tensor:
        return self.bind([any_bytes(self.info.nbytes, device)])

    def to(self, device: torch.device | str) -> PlainWeight:
        return self


class PlainFormat(WeightFormat):
    """Plain floats. This format is tried last and refuses unsupported tensors."""

    names = tuple(FLOAT_DTYPES)
    plan_forms = tuple(PLAN_DTYPES)

    def recognises(self, group: TensorGroup) -> bool:
        return True

    def read(self, group: TensorGroup) -> StoredWeight:
        info = group.weight
        _refuse_foreign(group.name, info)
        if len(group.parts) > 1:
            unknown = next(part for part in group.parts if part)
            group.refuse(info, f"has a companion {show(unknown)} of an unknown format; {REMEDY}")
        if info.dtype not in FLOAT_DTYPES:
            group.refuse(info, f"is {info.dtype} without bitsandbytes' other tensors, which is not supported; {REMEDY}")
        return PlainWeight(group.name, info)

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        dtype = config.get("torch_dtype") or config.get("dtype")
        return {"float16": "fp16", "float32": "fp32"}.get(str(dtype), "bf16")

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> PlainWeight:
        return PlainWeight(name, allocate(name, PLAN_DTYPES.get(form, form), shape))

    def packer(self, params: ConvertParams) -> Packer | None:
        is_mine = params.format in FLOAT_FORMATS
        return FloatPacker(FLOAT_DTYPES[PLAN_DTYPES[params.format]]) if is_mine else None


@dataclass(frozen=True)
class FloatPacker:
    """Writes matrices as plain floats of `dtype`."""

    dtype: torch.dtype
    suffixes = ("",)
    is_lossless = False

    def prepare(self) -> None:
        pass

    def for_shape(self, shape: tuple[int, ...]) -> FloatPacker:
        return self

    def num_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        packed = weight.to(self.dtype)
        if not bool(packed.isfinite().all()) and bool(weight.isfinite().all()):
            raise CheckpointError(f"has values beyond the range of {str(self.dtype).removeprefix('torch.')}")
        return {"": packed.contiguous()}

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        return {}

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}


def _refuse_foreign(key: str, info: TensorInfo) -> None:
    method = _FP8 if info.dtype.startswith("F8_") else None
    method = method or next((method for pattern, method in _FOREIGN if pattern.fullmatch(key)), None)
    if method:
        description = f"tensor {show(key)} belongs to a checkpoint in {method}, which is not supported"
        raise fault(info.path, f"{description}; {REMEDY}")
