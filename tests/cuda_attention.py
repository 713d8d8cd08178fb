"""Plain twins of torch's CUDA operators for attention, which refuse what those refuse, and return what those return.

Their contracts are those of aten/src/ATen/native/transformers/cuda: `mha_fwd` in flash_attn/flash_api.cpp, and
`AttentionKernel::check_supported` in mem_eff_attention/kernel_forward.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offspec.model.parts.split_attention import OnCuda

ALIGNMENT = 16  # bytes
LSE_ROWS = 32  # rows to a multiple of which memory-efficient attention pads the sums


class RefusedByCudaError(Exception):
    """A call that CUDA would refuse."""


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise RefusedByCudaError(rule)


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    for tensor in (query, key, value):
        require(tensor.dim() == 4, "four dimensions")
        require(tensor.dtype == query.dtype, "one dtype")
        require(tensor.stride(-1) == 1, "a contiguous last dimension")
        require(tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0, "an aligned address")
        strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if size > 1]
        require(all(stride * tensor.element_size() % ALIGNMENT == 0 for stride in strides), "aligned strides")
    require(key.shape == value.shape, "as many keys as values")
    require(query.shape[0] == key.shape[0], "one batch size")
    require(query.shape[3] == key.shape[3], "one head size")
    require(key.shape[2] > 0, "keys")


def plainly(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Result and logarithms of sums, in fp32."""
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if bias is not None:
        scores = scores + bias.float()
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp() @ value.float(), sums


def flash(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> tuple[Tensor, ...]:
    """`aten._scaled_dot_product_flash_attention`, which takes no mask."""
    check_inputs(query, key, value)
    require(query.dtype in (torch.float16, torch.bfloat16), "16 bits")
    require(query.shape[3] <= 256 and query.shape[3] % 8 == 0, "heads of at most 256 numbers, a multiple of 8")
    require(query.shape[1] % key.shape[1] == 0, "heads of queries for each head of keys")
    repeats = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(repeats, 1) for each in (key, value))
    found, sums = plainly(query, keys, values, None, scale)
    return torch.empty_like(query).copy_(found), sums, torch.zeros(2), torch.zeros(())


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """`aten._scaled_dot_product_efficient_attention`, whose sums are padded with infinity."""
    check_inputs(query, key, value)
    require(query.shape[1] == key.shape[1], "as many heads of keys as of queries")
    require(query.dtype in (torch.float16, torch.bfloat16, torch.float32), "no more than 32 bits")
    require(query.shape[3] * query.element_size() % ALIGNMENT == 0, "an aligned head size")
    if attn_bias is not None:
        check_bias(attn_bias, query, key)
    found, sums = plainly(query, key, value, attn_bias, scale)
    batch, heads, rows, head_dim = query.shape
    out = torch.empty(batch, rows, heads, head_dim, dtype=query.dtype).copy_(found.transpose(1, 2)).transpose(1, 2)
    padded = torch.full((batch, heads, -(-rows // LSE_ROWS) * LSE_ROWS if compute_log_sumexp else 0), torch.inf)
    padded[..., :rows] = sums if compute_log_sumexp else 0
    return out, padded, torch.zeros(()), torch.zeros(())


def check_bias(bias: Tensor, query: Tensor, key: Tensor) -> None:
    """Rows are read in whole blocks of 16 bytes, whose memory has to exist."""
    require(bias.dtype == query.dtype, "a bias of the queries' dtype")
    require(tuple(bias.shape) == (*query.shape[:3], key.shape[2]), "a bias of the scores' shape")
    require(bias.stride(-1) == 1, "a bias with a contiguous last dimension")
    block = ALIGNMENT // bias.element_size()
    strides = [stride for size, stride in zip(bias.shape[:3], bias.stride()[:3], strict=True) if size > 1]
    require(all(stride % block == 0 for stride in strides), "attn_bias is not correctly aligned")
    last_row = bias.storage_offset() + sum(
        (size - 1) * s for size, s in zip(bias.shape[:3], bias.stride(), strict=False)
    )
    needed = last_row + -(-bias.shape[3] // block) * block
    require(needed * bias.element_size() <= bias.untyped_storage().nbytes(), "a bias with memory to its last block")


TWINS = OnCuda(flash, efficient)
