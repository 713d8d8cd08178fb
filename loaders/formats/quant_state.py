"""The JSON that bitsandbytes stores beside a 4-bit weight, with all values checked.

{"quant_type", "blocksize", "dtype", "shape"} and, if scales are quantised too,
{"nested_blocksize", "nested_dtype", "nested_offset"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..files.checkpoint import TensorInfo, show
from .core import DAMAGED, TensorGroup

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
QUANT_STATE = re.compile(r"quant_state\.bitsandbytes__(.+)", re.DOTALL)  # the part's name, with the type


@dataclass(frozen=True)
class QuantState:
    """The content of the JSON. nested: (offset, blocksize)."""

    shape: tuple[int, int]
    blocksize: int
    nested: tuple[float, int] | None


@dataclass(frozen=True)
class QuantStateReader:
    """Reads the JSON of a quant_state and checks each value."""

    group: TensorGroup
    info: TensorInfo
    content: bytes

    def read(self, quant_type: str) -> QuantState:
        state = self._parse()
        self._demand("quant_type", state, state.get("quant_type") == quant_type, f"its name says {quant_type}")
        self._demand("dtype", state, state.get("dtype") in ("bfloat16", "float16", "float32"), "not a dtype of weights")
        shape, blocksize = state.get("shape"), state.get("blocksize")
        self._demand("shape", state, _is_matrix(shape), "not [N, K]")
        self._demand("blocksize", state, _is_blocksize(blocksize), f"not one of {', '.join(map(str, BLOCKSIZES))}")
        nested = self._nested(state) if any(key.startswith("nested_") for key in state) else None
        return QuantState((shape[0], shape[1]), blocksize, nested)  # type: ignore[index, arg-type]

    def _parse(self) -> dict[str, Any]:
        state = None
        with suppress(ValueError, RecursionError):
            state = json.loads(self.content.decode("utf-8"))
        if not isinstance(state, dict):
            self.group.refuse(self.info, f"has a quant_state that is not a JSON object; {DAMAGED}")
        return state

    def _nested(self, state: Mapping[str, Any]) -> tuple[float, int]:
        offset, blocksize = state.get("nested_offset"), state.get("nested_blocksize")
        is_number = isinstance(offset, (int, float)) and not isinstance(offset, bool) and abs(offset) < 3e38
        self._demand("nested_offset", state, is_number, "not a number of 32 bit")
        self._demand("nested_blocksize", state, _is_blocksize(blocksize), "not a block size")
        self._demand("nested_dtype", state, state.get("nested_dtype") == "float32", "only float32 is supported")
        return float(offset), int(blocksize)  # type: ignore[arg-type]

    def _demand(self, key: str, state: Mapping[str, Any], condition: bool, why: str) -> None:
        if not condition:
            self.group.refuse(self.info, f"has a quant_state with {key} {show(state.get(key))}: {why}; {DAMAGED}")


def _is_matrix(shape: object) -> bool:
    # `type`, not isinstance: in Python, True is an int. The bound keeps products within 64 bits.
    return isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 2**30 for n in shape)


def _is_blocksize(value: object) -> bool:
    return type(value) is int and value in BLOCKSIZES
