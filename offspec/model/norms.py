"""The norms of decoders, inside layers and after the last one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.backend import Backend

NORMS = ("rms", "rms plus one", "layer", "layer plus one")


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float, backend: Backend) -> Tensor:
    """x [..., N], normed over N, times weight [N] (plus one for some kinds), plus bias [N].

    A weight [..., N] with more dimensions has x's last ones; each row of x is normed separately. Such a weight, and
    that of "rms", is first rounded to x's dtype: a streamed one has the file's dtype, a resident one was rounded before
    (`StoredUnit.bind`).
    kind: of NORMS; "rms" is RMSNorm (1910.07467), "layer" LayerNorm (1607.06450). With "plus one", an RMSNorm adds in
    fp32 and rounds once, as Gemma does; a LayerNorm adds in the weight's dtype, as Nemotron does.
    """
    width, exact = (x.shape[-1],), torch.promote_types(x.dtype, torch.float32)
    if kind == "rms plus one":
        return F.rms_norm(x.to(exact), width, 1.0 + weight.to(exact), eps).to(x.dtype)
    if kind == "layer plus one":
        weight = weight + 1.0
    if weight.dim() > 1:
        assert kind == "layer", "no other norm has a weight for each head"
        return (F.layer_norm(x.to(exact), width, eps=eps) * weight.to(x.dtype).to(exact)).to(x.dtype)
    if kind == "rms":
        return backend.rms_norm(x, weight, eps)
    return F.layer_norm(x, width, weight, bias, eps)


def rms_normed(x: Tensor, eps: float, backend: Backend, factor: float = 1.0) -> Tensor:
    """RMSNorm of x [..., N] over N, times one factor."""
    return backend.rms_norm(x, x.new_full(x.shape[-1:], factor), eps)
