"""From logits to tokens: the processed distribution, and the token for a seed and a position.

The token at position t is `argmax_x (log p(x) + G(seed, t, x))`. The Gumbel noise G is a pure function of seed,
position and token (Gumbel-max: an exact sample of p). So the text depends only on target, prompt, parameters and seed,
not on the draft. At temperature 0 there is no noise and the token is the argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from offspec.errors import NumericalError

from ..params import SEED_LIMIT, SamplingParams
from .constraint import MaskBits, TokenConstraint
from .token_tree import BoolArray, IntArray
from .transfer import ToDevice, copied

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = SEED_LIMIT - 1


def _mixed(word: int) -> int:
    """splitmix64's finaliser on a Python integer."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 words."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def gumbel(seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise, float64 [vocab_size], a pure function of (seed, position, token).

    Counter-based: splitmix64 (Steele et al., OOPSLA 2014) of a key hashed from seed and position, in wrapping int64
    arithmetic. So every device has the same uniforms; their logarithms may differ in the last bit.
    """
    return gumbel_of(seed, position, torch.arange(vocab_size, device=device))


def gumbel_of(seed: int, position: int | Sequence[int], tokens: Tensor) -> Tensor:
    """`gumbel` of these tokens [N] only, float64 [N], on their device.

    position: one for all, or one per token, of tokens on the CPU.
    """
    if isinstance(position, int):
        return _gumbel(_key(seed, position), tokens)
    keys = {each: _key(seed, each) for each in set(position)}
    return _gumbel(torch.tensor([keys[each] for each in position], dtype=torch.int64), tokens)


def _key(seed: int, position: int) -> int:
    return _signed(_mixed((_mixed((seed + _GOLDEN) & _WORD) + (position + 1) * _GOLDEN) & _WORD))


def _gumbel(keys: int | Tensor, tokens: Tensor) -> Tensor:
    words = (tokens + 1) * _signed(_GOLDEN) + keys
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    words = words ^ _shifted(words, 31)
    uniform = (_shifted(words, 12).double() + 0.5) * 2.0**-52  # exact, so in (0, 1); 53 bits would round to 1
    return -torch.log(-torch.log(uniform))


class Sampler:
    """Chooses tokens for one request, and gives drafters the same noise.

    vocab_size: the target's; a draft's logits may have fewer columns. `extend` records the text, for penalties.
    constraint: the tokens that the answer may have, or None; set by `constrain` when the text is the prompt.
    to_device: transfers tokens, masks and biases to the device of the logits.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        to_device: ToDevice = copied,
    ) -> None:
        self.params, self.seed, self.vocab_size, self.device = params, seed, vocab_size, torch.device(device)
        self.to_device = to_device
        self._in_numpy = self.device.type == "cpu"  # it takes a tenth of torch's time for a vocabulary
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._answered: Tensor | None = None  # [vocab_size]: how often the answer has each token
        if params.frequency_penalty or params.presence_penalty:
            self._answered = torch.zeros(vocab_size, dtype=torch.long, device=device)
        self._bias: Tensor | None = None  # fp32 [vocab_size]
        if params.logit_bias:
            biases = torch.zeros(vocab_size)
            for token, value in params.logit_bias:
                biases[token] = value
            self._bias = to_device(biases, self.device)
        self._noise: dict[int, Tensor] = {}
        self._rounded: dict[int, Tensor] = {}
        self._length = 0  # of the text
        self.constraint: TokenConstraint | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether a row's distribution depends on the preceding tokens, in addition to the logits."""
        return self._has_repetition_penalty or self._answered is not None or self.constraint is not None

    def needs_paths(self, tokens: IntArray) -> bool:
        """`needs_history` of rows whose paths consist of these tokens."""
        if self._has_repetition_penalty or self._answered is not None:
            return True
        return self.constraint is not None and not self.constraint.is_idle(tokens)

    @property
    def _has_repetition_penalty(self) -> bool:
        return self.params.repetition_penalty != 1

    def constrain(self, constraint: TokenConstraint | None) -> None:
        """Allow only what the constraint allows from here on: `extend` passes it the tokens that follow."""
        self.constraint = constraint

    def extend(self, tokens: Sequence[int], *, is_prompt: bool = False) -> None:
        """Record tokens of the text: the prompt, then every emitted token."""
        if self.constraint is not None:
            self.constraint.accept(tokens)
        if self._has_repetition_penalty:
            _mark(self._seen, self._on_device(tokens))
        if self._answered is not None and not is_prompt:
            _count(self._answered, self._on_device(tokens))
        self._length += len(tokens)
        for kept in (self._noise, self._rounded):
            for position in [position for position in kept if position < self._length]:
                del kept[position]

    def _on_device(self, ids: Sequence[int]) -> Tensor:
        """int64 [len(ids)] on the sampler's device."""
        return self.to_device(torch.tensor(ids, dtype=torch.long), self.device)

    def noise(self, position: int) -> Tensor:
        """G(seed, position, ·), float64 [vocab_size]; cached until the text has passed the position."""
        if position not in self._noise:
            self._noise[position] = gumbel(self.seed, position, self.vocab_size, self.device)
        return self._noise[position]

    def noise_rows(self, positions: Sequence[int]) -> Tensor:
        """The noise at each of R positions, [R, vocab_size]; fp32 is precise enough for drafting."""
        for position in set(positions) - self._rounded.keys():
            self._rounded[position] = self.noise(position).float()
        return torch.stack([self._rounded[position] for position in positions])

    def process(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Apply the parameters to logits [R, V]: log-probabilities up to a constant per row, [R, V].

        Excluded tokens are -inf. paths[r]: the tokens between the text and row r, for constraint and penalties.
        Order as in vLLM and transformers: constraint, bias, repetition, frequency and presence penalty, temperature,
        top-k, top-p, min-p. Greedy: up to the penalties only.
        """
        p, logits = self.params, self.penalised(logits, paths)
        if self.is_greedy:
            return logits
        # Relative to the maximum, so that division by any temperature above 0 is safe.
        logits = (logits - logits.max(-1, keepdim=True).values) / p.temperature
        if 0 < p.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(p.top_k).values[:, -1:], -math.inf)
        if p.top_p < 1:
            logits = _nucleus(logits, p.top_p)
        if p.min_p > 0:
            logits = logits.masked_fill(logits < math.log(p.min_p), -math.inf)  # the maximum is 0
        return logits

    def penalised(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits [R, V] after constraint, bias and penalties, before the temperature. paths: see `process`."""
        if self.constraint is not None and (bits := self._mask_bits(paths)) is not None:
            allowed = self._unpacked(bits)[:, : logits.shape[1]]
            # A draft's unknown tokens have -inf. Rows in which nothing would be left stay, see `are_allowed`.
            is_left = (allowed & (logits > -math.inf)).any(-1, keepdim=True)
            logits = logits.masked_fill(~allowed & is_left, -math.inf)
        if self._bias is not None:
            logits = logits + self._bias[: logits.shape[-1]]
        if self._has_repetition_penalty:
            seen = self._seen[: logits.shape[-1]].expand_as(logits).clone(memory_format=torch.contiguous_format)
            if places := _places(paths, logits.shape[-1]):
                _mark(seen.view(-1), self._on_device(places))
            penalty = self.params.repetition_penalty
            logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self._answered is not None:
            counts = self._answered[: logits.shape[-1]].expand_as(logits).clone(memory_format=torch.contiguous_format)
            if places := _places(paths, logits.shape[-1]):
                _count(counts.view(-1), self._on_device(places))
            p = self.params
            logits = logits - counts * p.frequency_penalty - (counts > 0) * p.presence_penalty
        return logits

    def choose(self, logits: Tensor, position: int, path: Sequence[int]) -> int:
        """The token at `position`, given the logits [V] after text + path.

        Raises NumericalError if the logits are not finite, ConstraintError if the constraint allows no token.
        """
        values = self._of_target(logits, path)
        changes = self.constraint, self._bias, self._answered
        if not self.is_greedy or self._has_repetition_penalty or any(each is not None for each in changes):
            values = self.process(values[None].double(), [path])[0]
        if not self.is_greedy:
            values = values + self.noise(position)
        if self._in_numpy:
            token, greatest = values.numpy().argmax(), float(logits.numpy().max())
        else:
            token, greatest = torch.stack((values.argmax().double(), logits.max().double())).tolist()  # one transfer
        if not math.isfinite(greatest):
            raise not_finite(position)
        return int(token)

    def _of_target(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """Target logits [V] without barred tokens. Raises ConstraintError where the constraint allows no token."""
        if self.constraint is None:
            return logits
        mask = self.constraint.mask(path)
        if mask is not None and not mask.any():
            raise self.constraint.dead_end(path)
        barred = self.constraint.barred(path) if mask is None else ()
        if not barred:
            return logits
        return logits.index_fill(0, self._on_device(barred), -math.inf)

    def are_allowed(self, tokens: IntArray, paths: Sequence[Sequence[int]]) -> BoolArray:
        """Which of a draft's proposals, `tokens` [R, C] after R paths, the constraint allows.

        `process` excludes the others, but in rows in which nothing is left: at a dead end, and where the draft knows
        none of the allowed tokens.
        """
        if self.constraint is None or (rows := self._mask_bits(paths)) is None:
            return np.ones(tokens.shape, dtype=np.bool_)
        bits = np.take_along_axis(rows, tokens >> 3, axis=1)
        allowed: BoolArray = (bits >> (tokens & 7).astype(np.uint8) & 1).astype(np.bool_)
        return allowed

    def _mask_bits(self, paths: Sequence[Sequence[int]]) -> MaskBits | None:
        """[R, ceil(V / 8)], see `TokenConstraint.mask`; None if every token may follow each path."""
        assert self.constraint is not None
        masks = [self.constraint.mask(path) for path in (paths if any(paths) else paths[:1])]
        some = next((mask for mask in masks if mask is not None), None)
        if some is None:
            return None
        everything = np.full_like(some, 255)
        rows = np.stack([everything if mask is None else mask for mask in masks])
        return rows if len(rows) == len(paths) else np.repeat(rows, len(paths), axis=0)

    def _unpacked(self, bits: MaskBits) -> Tensor:
        """Bool [R, 8 · B] of bits [R, B], lowest bit first. A GPU gets the bits, an eighth of the bytes."""
        if self._in_numpy:
            return torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little").view(np.bool_))
        shifts = torch.arange(8, dtype=torch.uint8, device=self.device)
        packed = self.to_device(torch.from_numpy(bits), self.device)
        return (packed[..., None] >> shifts & 1).bool().flatten(1)


# These two have no value to copy: to a GPU, `seen[places] = True` copies the True.


def _mark(seen: Tensor, places: Tensor) -> None:
    """Set bool [N] at `places`."""
    seen.index_fill_(0, places, True)


def _count(counts: Tensor, places: Tensor) -> None:
    """Add 1 to int64 [N] at each of `places`, which may repeat."""
    counts.index_add_(0, places, torch.ones_like(places))


def _places(paths: Sequence[Sequence[int]], width: int) -> list[int]:
    """The places of the paths' tokens in [len(paths), width], flattened.

    A path may contain tokens that only the target knows; those have no column.
    """
    return [row * width + token for row, path in enumerate(paths) for token in path if token < width]


def not_finite(position: int) -> NumericalError:
    """The error for target logits at `position` that are not finite."""
    return NumericalError(
        f"the target's logits for position {position} are not finite (NaN or infinity); "
        "try `dtype=fp32`, and check the checkpoint's weights"
    )


HEAD = 1024  # number of likeliest tokens to search for the nucleus before sorting the whole vocabulary


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the nucleus: a token stays if the likelier ones sum to less than top_p (Holtzman et al., 1904.09751).

    Among equal tokens, smaller ids come first. Sorting a vocabulary takes longer than the rest of a draft round, so
    only rows whose nucleus exceeds the HEAD likeliest tokens are sorted fully.
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    best, order = logits.topk(min(HEAD, logits.shape[-1]), dim=-1)
    order, by_id = order.sort(dim=-1)
    best, by_value = best.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    before = _mass_before(best, normaliser)
    # The nucleus must end above the least likely of them: tokens outside with an equal value may precede it.
    least = best[..., -1:]
    is_settled = ((before >= top_p) & (best > least)).any(-1) | (least[..., 0] == -math.inf)
    dropped = torch.ones_like(logits, dtype=torch.bool)
    dropped.scatter_(-1, order.gather(-1, by_value), before >= top_p)
    if not is_settled.all():
        ordered, order = logits[~is_settled].sort(dim=-1, descending=True, stable=True)
        before = _mass_before(ordered, normaliser[~is_settled])
        dropped[~is_settled] = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, before >= top_p)
    return logits.masked_fill(dropped, -math.inf)


def _mass_before(ordered: Tensor, normaliser: Tensor) -> Tensor:
    probabilities = (ordered - normaliser).exp()
    return probabilities.cumsum(-1) - probabilities
