"""Searching scales as llama.cpp does: beside its own quantiser, in error and in almost every number."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offspec.errors import CheckpointError
from offspec.loaders.files.gguf_types import GGUF_TYPES
from offspec.loaders.formats.gguf_blocks import UNPACK
from offspec.loaders.formats.gguf_pack import TYPES
from offspec.loaders.formats.gguf_search import QUANTISE, search_rows

COLUMNS = 512
NUMBER_OF = {kind.name: number for number, kind in GGUF_TYPES.items()}  # ggml's number of a type
# A tie of two scales is decided by the order of sums, most often where many starts give nearly the same codes.
LEAST_EQUAL = {"Q5_K": 0.93, "Q4_K": 0.96, "Q6_K": 0.98}
WITHOUT_IMPORTANCE = ("Q5_0", "Q5_1")  # where llama.cpp has another method with one; only rows of odd lengths take them
Reference = Callable[[Tensor, str, Tensor | None], Tensor]


@pytest.fixture(scope="module")
def reference() -> Reference:
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp as an oracle: pip install xllamacpp")
    library = ctypes.CDLL(str(next(Path(xllamacpp.__path__[0]).glob("*.so"))))
    chunk = library.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def quantised(weight: Tensor, name: str, importance: Tensor | None) -> Tensor:
        kind, (rows, columns) = TYPES[name], weight.shape
        out = torch.empty(rows, columns // kind.num_weights * kind.num_bytes, dtype=torch.uint8)
        address = None if importance is None else importance.data_ptr()
        assert chunk(NUMBER_OF[name], weight.data_ptr(), out.data_ptr(), 0, rows, columns, address) == out.numel()
        return out

    return quantised


def numbers(rows: Tensor, name: str) -> Tensor:
    return UNPACK[name](rows.reshape(-1, TYPES[name].num_bytes)).view(len(rows), -1)


@pytest.mark.parametrize("name", QUANTISE)
def test_errors_are_llama_cpps(reference: Reference, name: str) -> None:
    """For weights with outliers, a row of zeros, one of tiny numbers, and one sign alone."""
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(64, COLUMNS, generator=random) / torch.rand(64, COLUMNS, generator=random).clamp_min(0.05)
    weight[0], weight[1], weight[2] = 0, weight[1] * 1e-6, weight[2].abs()
    importance = torch.rand(COLUMNS, generator=random) ** 2 + 0.01
    for each in (None,) if name in WITHOUT_IMPORTANCE else (None, importance):
        theirs, ours = (numbers(rows(weight, name, each), name) for rows in (reference, search_rows))
        scale = 1.0 if each is None else each.sqrt()
        errors = [float(((result - weight) * scale).norm()) for result in (theirs, ours)]
        assert errors[1] <= 1.002 * errors[0], each
        assert (ours == theirs).float().mean() >= LEAST_EQUAL.get(name, 0.997), each


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not finite"):
        search_rows(torch.full((1, 256), torch.inf), "Q4_K")
