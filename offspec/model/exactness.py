"""Whether a decoder is exact: a row's results have the same bits whatever rows share its pass.

Then texts equal plain decoding's, not only up to near-ties. Kernels for it exist for CPUs. They are as fast as others,
except where torch has AMX for many rows of bf16. Passes of a streamed model wait for weights anyway.
"""

from __future__ import annotations

import torch

from offspec.loaders.formats.products import EXACT_DTYPES, can_be_exact
from offspec.loaders.kernels.compiler import describe_instructions, has_amx
from offspec.loaders.kernels.row_attention import can_attend

from .config import ModelConfig
from .decoder import Decoder

FASTEST_WAY = "rows are computed in the fastest way"


def is_exact_by_default(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_streamed: bool) -> bool:
    """Whether a target is exact unless its user wants fast arithmetic: a rule without measured times.

    is_streamed: whether a pass waits for weights.
    """
    is_slower = dtype == torch.bfloat16 and has_amx()
    return reason_against_exactness(config, dtype, device) is None and (is_streamed or not is_slower)


def reason_against_exactness(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a decoder cannot be exact; None if it can."""
    if not config.is_native:
        return "its layers are modules of transformers"
    if config.delta is not None or config.mamba is not None:
        return "its layers keep states of the text, which other rows round otherwise"
    if device.type != "cpu":
        return f"the kernels for {device.type} have not run on a card yet"
    if dtype not in EXACT_DTYPES:
        return f"there are no such kernels for {str(dtype).removeprefix('torch.')}"
    if not can_be_exact(dtype):
        return "there are no kernels for this processor"
    if not can_attend(config.mask_heads, dtype):
        return "too many query heads share a key head"
    return None


def reason_of(decoder: Decoder) -> str | None:
    """Why a decoder is not exact; None if it is."""
    if decoder.is_exact:
        return None
    return reason_against_exactness(decoder.config, decoder.dtype, decoder.device) or FASTEST_WAY


def arithmetic_of(decoder: Decoder) -> str:
    """What the bits of its results depend on, beside model, dtype and text."""
    return f"exact, {describe_instructions()}" if decoder.is_exact else "fast"
