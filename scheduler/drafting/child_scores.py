"""A draft's logits as scores of the children of tree nodes.

The score of a child x estimates the probability that the *target* chooses x. The target chooses argmax(log p + G), and
the noise G is known in advance. So the draft computes v(x) = log q(x) + G(seed, position, x) and estimates the
log-probability as log softmax(v / s). The sharpness s measures how far the two models' log-probabilities typically
differ (`calibration.Sharpness`).

SpecExec's scoring (2406.02532) is log q(x) of the draft alone: without noise and sharpness and, as in its authors'
code, without the request's temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.errors import NumericalError

from ..pace.calibration import SIXTHS
from ..trees.sampling import Sampler
from ..trees.token_tree import FloatArray, IntArray
from ..trees.vocabulary import Vocabulary
from .candidate_tree import ChildScores


class ChildScorer:
    """Scores the likeliest children of nodes by a draft's logits, for one request."""

    def __init__(self, vocabulary: Vocabulary, sampler: Sampler, num_children: int, *, coupled: bool) -> None:
        """vocabulary: the draft's. num_children: kept per node.

        coupled: score by the request's settings and the target's noise; otherwise as SpecExec does.
        """
        self._vocabulary, self._sampler = vocabulary, sampler
        self._num_children = min(num_children, vocabulary.num_known(sampler.vocab_size))
        self._is_coupled, self._has_noise = coupled, coupled and not sampler.is_greedy

    def score(self, logits: Tensor, paths: Sequence[Sequence[int]], positions: IntArray) -> ChildScores:
        """The best children for each of R rows of draft logits [R, C].

        paths: for each row, the tokens between the text and the children. positions [R]: the children's positions.
        Raises NumericalError if logits are not finite.
        """
        adjusted = self._sampler.process if self._is_coupled else self._sampler.penalised
        values = adjusted(self._vocabulary.over_target(logits, self._sampler.vocab_size), paths)
        if self._has_noise:
            values = values + self._sampler.noise_rows(positions.tolist())[:, : values.shape[1]]
        best, tokens = values.topk(self._num_children, dim=-1)
        # Doubles hold tokens exactly, so one transfer suffices.
        parts = torch.cat((tokens.double(), best.double(), _power_sums(values).double()), dim=-1).cpu().numpy()
        count = tokens.shape[1]
        normalisers = _log_normalisers(parts[:, 2 * count :])
        if not np.isfinite(normalisers).all():
            raise draft_not_finite()
        best_tokens, best_values = parts[:, :count].astype(np.int64), parts[:, count : 2 * count]
        return ChildScores(
            best_tokens, np.where(self._sampler.are_allowed(best_tokens, paths), best_values, -math.inf), normalisers
        )


def draft_not_finite() -> NumericalError:
    """The error for draft logits that are not finite."""
    return NumericalError("the draft's logits are not finite (NaN or infinity); try `dtype=fp32` or another draft")


# ------------------------------------------------------------------------------------------------ normalisers
# logsumexp(v / s) for every s of `calibration.GRID`. With e = exp((v - max v) / 6), each is the logarithm of a sum of
# some e^k, which is an inner product of two small powers of e. So one exponential per value and one matrix product
# suffice.

_POWERS = (1, 2, 4, 5, 10)  # every one of SIXTHS is the sum of two of them
_PAIRS = np.array(
    [next((i, j) for i, a in enumerate(_POWERS) for j, b in enumerate(_POWERS) if a + b == k) for k in SIXTHS]
)
# Logits whose powers are in memory at a time: they fit a core's cache; on a GPU 40 MB, to keep launches few.
SLICE_ELEMENTS = {"cpu": 2**17, "cuda": 2**21}
# Length of the sums in one product of the batch. cuBLAS computes each in one block, whatever its length
# (NVIDIA/cutlass#1033).
PRODUCT_WIDTH = {"cuda": 2048}


def log_normalisers(values: Tensor) -> FloatArray:
    """[R, S]: logsumexp(v / s) of v [R, V] for each s of `calibration.GRID`."""
    return _log_normalisers(_power_sums(values).double().cpu().numpy())


def _power_sums(values: Tensor) -> Tensor:
    """[R, 25 + 1]: the sums of all products of two powers, and the maximum of the row."""
    step = max(1, SLICE_ELEMENTS[values.device.type] // values.shape[1])
    return torch.cat([_power_sums_of(rows) for rows in values.split(step)])  # type: ignore[no-untyped-call]


def _power_sums_of(values: Tensor) -> Tensor:
    num_rows, size = values.shape
    greatest = values.amax(-1, keepdim=True)
    width = min(size, PRODUCT_WIDTH.get(values.device.type, size))
    parts = (F.pad(values, (0, -size % width), value=-math.inf) if size % width else values).view(num_rows, -1, width)
    powers = values.new_empty(num_rows, parts.shape[1], len(_POWERS), width)
    one, two, four, five, ten = powers.unbind(2)
    torch.sub(parts, greatest[..., None], out=one).mul_(1 / 6).exp_()
    for a, b, product in ((one, one, two), (two, two, four), (four, one, five), (five, five, ten)):
        torch.mul(a, b, out=product)
    powers = powers.flatten(0, 1)
    sums = torch.bmm(powers, powers.transpose(1, 2)).view(num_rows, -1, len(_POWERS) ** 2).sum(1)
    return torch.cat((sums, greatest), dim=-1)


def _log_normalisers(power_sums: FloatArray) -> FloatArray:
    sums = power_sums[:, _PAIRS[:, 0] * len(_POWERS) + _PAIRS[:, 1]]
    logs: FloatArray = np.log(sums) + power_sums[:, -1:] * (np.array(SIXTHS) / 6)
    return logs
