"""Whether a decoder is exact: a row's results have the same bits whatever rows share its pass.

Then texts equal plain decoding's, not only up to near-ties. There are kernels for CPUs, and for GPUs with Triton. On a
CPU a decoder that can be exact is. On a GPU the kernels are slower than others; but passes of a streamed model wait for
weights anyway.
"""

from __future__ import annotations

import torch

from offspec.backends.arithmetic import INT8
from offspec.backends.cpu import EXACT_DTYPES, can_be_exact
from offspec.backends.on_gpu import row_kernels
from offspec.backends.x86.processor import describe_instructions
from offspec.backends.x86.row_attention import can_attend, can_attend_on_gpu

from .config import ModelConfig
from .decoder import Decoder
from .memory.kv_formats import PLAIN, KVFormat

FASTEST_METHOD = "rows are computed in the fastest way"


def is_exact_by_default(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_streamed: bool, kv: KVFormat = PLAIN
) -> bool:
    """Whether a target is exact if its user does not choose its arithmetic: a rule without measured times.

    is_streamed: whether a pass waits for weights. On a CPU that changes nothing, nor do its instructions.
    """
    is_slower = device.type != "cpu" and not is_streamed
    return not is_slower and reason_against_exactness(config, dtype, device, kv) is None


def reason_against_exactness(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, kv: KVFormat = PLAIN
) -> str | None:
    """Why a decoder cannot be exact; None if it can. kv: the format of its KV entries."""
    if not config.is_native:
        return "its layers are modules of transformers"
    if dtype not in EXACT_DTYPES:
        return f"there are no such kernels for {str(dtype).removeprefix('torch.')}"
    if device.type != "cpu":
        return _reason_on_gpu(config, dtype, kv)
    if not can_be_exact(dtype):
        return "there are no kernels for this processor"
    if not can_attend(config.mask_heads, dtype):
        return "too many query heads share a key head"
    return None


def _reason_on_gpu(config: ModelConfig, dtype: torch.dtype, kv: KVFormat) -> str | None:
    if config.delta is not None or config.mamba is not None:
        return "its layers keep states of the text, which other rows round otherwise"
    if row_kernels() is None:
        return "Triton is not installed"
    if config.experts is not None:
        return "the CPU beside the GPU may compute its experts, which rounds otherwise"
    if not kv.is_plain:  # all of them would be unpacked, into memory that plans do not count
        return "its packed KV entries are read in the fastest way on a GPU"
    if not can_attend_on_gpu(config.mask_heads, config.largest_head, dtype.itemsize):
        return "its heads are too large for the kernel of attention"
    return None


def reason_of(decoder: Decoder) -> str | None:
    """Why a decoder is not exact; None if it is."""
    if decoder.is_exact:
        return None
    return reason_against_exactness(decoder.config, decoder.dtype, decoder.device) or FASTEST_METHOD


def arithmetic_of(decoder: Decoder) -> str:
    """What the bits of its results depend on, beside model, dtype and text."""
    if not decoder.is_exact:
        return "fast"
    return f"exact, {describe_instructions()}{', activations in 8 bits' if decoder.arithmetic == INT8 else ''}"
