"""Logits to tokens: the processed distribution, and the one token it gives for a seed and a position.

The token at position t is `argmax_x (log p(x) + G(seed, t, x))` with Gumbel noise G that is a pure function of seed,
position and token (Gumbel-max: an exact sample of p). So the text is a function of target, prompt, parameters and seed
alone, whatever was guessed on the way. At temperature 0 there is no noise and the token is the argmax.
Knows nothing of trees' shapes, models or text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from offspec.errors import NumericalError

from .params import SEED_LIMIT, SamplingParams

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
    arithmetic, so that every device draws the same uniforms (its logarithm may differ in the last place).
    """
    return gumbel_of(seed, position, torch.arange(vocab_size, device=device))


def gumbel_of(seed: int, position: int | Sequence[int], tokens: Tensor) -> Tensor:
    """`gumbel` of these tokens [N] alone, float64 [N], on their device; position: one, or one for each of them."""
    if isinstance(position, int):
        return _gumbel(_key(seed, position), tokens)
    keys = {each: _key(seed, each) for each in set(position)}
    return _gumbel(torch.tensor([keys[each] for each in position], dtype=torch.int64, device=tokens.device), tokens)


def _key(seed: int, position: int) -> int:
    return _signed(_mixed((_mixed((seed + _GOLDEN) & _WORD) + (position + 1) * _GOLDEN) & _WORD))


def _gumbel(keys: int | Tensor, tokens: Tensor) -> Tensor:
    words = (tokens + 1) * _signed(_GOLDEN) + keys
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    words = words ^ _shifted(words, 31)
    uniform = (_shifted(words, 12).double() + 0.5) * 2.0**-52  # exact, so in (0, 1): with 53 bits it would round to 1
    return -torch.log(-torch.log(uniform))


class Sampler:
    """Chooses tokens for one request, and shows a drafter the same noise.

    vocab_size is the target's; logits of a draft may have fewer columns. `extend` tells it the text, for the penalty.
    """

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.params, self.seed, self.vocab_size, self.device = params, seed, vocab_size, device
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._noise: dict[int, Tensor] = {}
        self._rounded: dict[int, Tensor] = {}
        self._length = 0  # of the text

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether a row's distribution depends on which tokens came before it, beyond the logits."""
        return self.params.repetition_penalty != 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that have become part of the text (the prompt's, then every emitted one)."""
        if self.needs_history:
            self._seen[torch.tensor(tokens, dtype=torch.long, device=self.device)] = True
        self._length += len(tokens)
        for kept in (self._noise, self._rounded):
            for position in [position for position in kept if position < self._length]:
                del kept[position]

    def noise(self, position: int) -> Tensor:
        """G(seed, position, ·), float64 [vocab_size]; kept until the text has moved past it."""
        if position not in self._noise:
            self._noise[position] = gumbel(self.seed, position, self.vocab_size, self.device)
        return self._noise[position]

    def noise_rows(self, positions: Sequence[int]) -> Tensor:
        """The noise at each of R positions in fp32, [R, vocab_size]: exact enough to guess with."""
        for position in set(positions) - self._rounded.keys():
            self._rounded[position] = self.noise(position).float()
        return torch.stack([self._rounded[position] for position in positions])

    def process(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities up to a constant per row, [R, V], of what the parameters make of logits [R, V].

        Excluded tokens are -inf. paths[r]: the tokens between the text and row r, for the repetition penalty.
        Order as in transformers: penalty, temperature, top-k, top-p, min-p. Greedy: penalty only.
        """
        p = self.params
        if self.needs_history:
            logits = self._penalised(logits, paths)
        if self.is_greedy:
            return logits
        # From the maximum, so that no temperature above 0 is too small to divide by.
        logits = (logits - logits.max(-1, keepdim=True).values) / p.temperature
        if 0 < p.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(p.top_k).values[:, -1:], -math.inf)
        if p.top_p < 1:
            logits = _nucleus(logits, p.top_p)
        if p.min_p > 0:
            logits = logits.masked_fill(logits < math.log(p.min_p), -math.inf)  # the maximum is 0
        return logits

    def choose(self, logits: Tensor, position: int, path: Sequence[int]) -> int:
        """The token at `position`, given the logits [V] after text + path.

        Raises NumericalError where the logits are not numbers.
        """
        values = self.process(logits[None].double(), [path])[0]
        if not self.is_greedy:
            values = values + self.noise(position)
        token, greatest = torch.stack((values.argmax().double(), logits.max().double())).tolist()  # one transfer
        if not math.isfinite(greatest):
            raise not_finite(position)
        return int(token)

    def _penalised(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        seen = self._seen[: logits.shape[-1]].expand_as(logits).clone()
        # A path may lead through tokens that only the target has; those have no column here.
        places = [(row, token) for row, path in enumerate(paths) for token in path if token < logits.shape[-1]]
        if places:  # both indices in one tensor: on a GPU each is a copy that waits
            rows, tokens = torch.tensor(places, device=seen.device).T
            seen[rows, tokens] = True
        penalty = self.params.repetition_penalty
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def not_finite(position: int) -> NumericalError:
    """The target's logits for the token at `position` are not numbers."""
    return NumericalError(
        f"the target's logits for position {position} are not finite (NaN or infinity); "
        "try --dtype fp32, and check the checkpoint's weights"
    )


HEAD = 1024  # likeliest tokens among which the nucleus is looked for, before the whole vocabulary is sorted


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the head: a token stays while those before it hold less than top_p (Holtzman et al., 1904.09751).

    Of equal tokens those with smaller ids come first. Sorting a vocabulary takes longer than all the rest of a draft's
    round, so rows whose nucleus ends among the HEAD likeliest are settled by these.
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    best, order = logits.topk(min(HEAD, logits.shape[-1]), dim=-1)
    order, by_id = order.sort(dim=-1)
    best, by_value = best.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    before = _mass_before(best, normaliser)
    # It ends above the least of them: tokens outside that equal the least may belong before it.
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
