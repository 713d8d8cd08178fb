"""Whether a decoder is exact: a row's results have the same bits whatever rows share its pass.

Then texts equal plain decoding's, not only up to near-ties. There are kernels for CPUs, and for GPUs with Triton. On a
CPU a decoder that can be exact is. On a GPU the kernels are slower than others; but passes of a streamed model wait for
weights anyway.
"""

from __future__ import annotations

import torch

from offspec.backends.arithmetic import EXACT, INT8
from offspec.backends.backend import ExactRows
from offspec.backends.choice import backend_of
from offspec.backends.weights import PLAIN_FORMS
from offspec.backends.x86.processor import describe_instructions

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
    is_slower = backend_of(device).is_faster and not is_streamed
    if is_slower or reason_against_exactness(config, dtype, device, kv) is not None:
        return False
    return backend_of(device, EXACT).fault() is None


def reason_against_exactness(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, kv: KVFormat = PLAIN
) -> str | None:
    """Why a decoder cannot be exact; None if it can. kv: the format of its KV entries."""
    if not config.is_native:
        return "its layers are modules of transformers"
    if dtype not in PLAIN_FORMS:
        return f"there are no such kernels for {str(dtype).removeprefix('torch.')}"
    rows = ExactRows(
        dtype,
        keeps_states=config.delta is not None or config.mamba is not None,
        has_experts=config.experts is not None,
        has_packed_keys=not kv.is_plain,
        group=config.mask_heads,
        head_dim=config.largest_head,
    )
    return backend_of(device, EXACT).reason_against(rows)


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
