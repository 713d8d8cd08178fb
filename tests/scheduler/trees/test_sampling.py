"""The noise is splitmix64's, the distribution is transformers', and what is out of range is refused by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from offspec.errors import NumericalError, UsageError
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees import sampling
from offspec.scheduler.trees.sampling import Sampler, gumbel

from ...refusals import refused
from ..fakes import GOLDEN, WORD, Transfers, few, many, noise, processed, sampling_params, splitmix64, uniform

LARGEST_SEED = 2**64 - 1
seeds = st.integers(0, LARGEST_SEED)

# ------------------------------------------------------------------------------------------------ noise


@many
@given(seed=seeds, position=st.integers(0, 1 << 20))
@example(seed=LARGEST_SEED, position=0)
@example(seed=0, position=0)
def test_uniforms_are_those_of_big_integers(seed: int, position: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "log", torch.neg)  # -log(-log(u)) becomes u itself
        uniforms = gumbel(seed, position, 20)
    assert uniforms.tolist() == [uniform(seed, position, token) for token in range(20)]


def test_gumbel_has_the_moments_of_its_distribution() -> None:
    found = gumbel(seed=1, position=0, vocab_size=200_000)
    assert found.mean().item() == pytest.approx(np.euler_gamma, abs=0.015)  # five standard errors
    assert found.var().item() == pytest.approx(math.pi**2 / 6, abs=0.04)
    # Its distribution function exp(-exp(-x)), where Kolmogorov's distance of such a sample stays below 1.95 / √n.
    ordered = torch.exp(-torch.exp(-found)).sort().values
    ranks = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    assert (ordered - ranks).abs().max().item() < 1.95 / math.sqrt(200_000)


@pytest.mark.parametrize("seed", [0, 41, 2**63 - 1, LARGEST_SEED - 1])
def test_neighbours_are_not_correlated(seed: int) -> None:
    size = 100_000
    neighbours = [gumbel(seed + s, p, size) for s, p in itertools.product((0, 1), (6, 7))]
    neighbours += [neighbours[0].roll(1), neighbours[0].roll(2), neighbours[3].roll(1)]
    correlations = torch.corrcoef(torch.stack(neighbours)) - torch.eye(len(neighbours))
    assert correlations.abs().max().item() < 5 / math.sqrt(size)


def _unshifted(word: int, bits: int) -> int:
    """The x of which word = x ^ (x >> bits)."""
    x = word
    for _ in range(64 // bits + 1):
        x = word ^ (x >> bits)
    return x


def _state(word: int) -> int:
    """The state for which splitmix64 gives this word."""
    word = _unshifted(word % WORD, 31) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    word = _unshifted(word, 27) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    return _unshifted(word, 30)


@pytest.mark.parametrize("word", [0, 1, 2**63, LARGEST_SEED - 1, LARGEST_SEED])
def test_gumbel_is_finite_at_the_extremes(word: int) -> None:
    """A seed for which the first token of the first position draws this very word; all ones would round to 1."""
    seed = (_state(_state(_state(word) - GOLDEN) - GOLDEN) - GOLDEN) % WORD
    assert splitmix64(splitmix64(splitmix64(seed + GOLDEN) + GOLDEN) + GOLDEN) == word
    assert gumbel(seed, 0, 1).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 7, LARGEST_SEED])
def test_gumbel_on_cuda_is_that_on_the_cpu(seed: int) -> None:
    there = gumbel(seed, 11, 150_000, "cuda").cpu()
    torch.testing.assert_close(there, gumbel(seed, 11, 150_000), rtol=1e-13, atol=1e-13)


@pytest.mark.gpu
def test_processing_on_cuda_is_that_on_the_cpu() -> None:
    logits = 3 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    paths = [[], [5], [6, 7], [8]]
    for params in (
        SamplingParams(temperature=0.7, top_k=50, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(frequency_penalty=0.5, presence_penalty=-0.3, logit_bias=((7, 2.0),)),
    ):
        here, there = (Sampler(params, 3, 3000, device) for device in ("cpu", "cuda"))
        for each in (here, there):
            each.extend([1, 2, 3])
        expected, found = here.process(logits, paths), there.process(logits.cuda(), paths).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert there.choose(logits[0].cuda(), 3, []) == here.choose(logits[0], 3, [])


# ------------------------------------------------------------------------------------------------ distribution


def sampler(seed: int = 0, vocab_size: int = 8, text: Sequence[int] = (), **params: Any) -> Sampler:
    made = Sampler(SamplingParams(**params), seed, vocab_size)
    made.extend(text)
    return made


def probabilities(logits: Sequence[Sequence[float]] | torch.Tensor, **params: Any) -> torch.Tensor:
    values = torch.as_tensor(logits, dtype=torch.float64)
    return sampler(vocab_size=values.shape[1], **params).process(values, [[]] * len(values)).softmax(-1)


def reference(logits: torch.Tensor, params: SamplingParams, histories: torch.Tensor) -> torch.Tensor:
    """What the processors of transformers make of it, in the order in which its generate applies them."""
    from transformers.generation import logits_process as hf

    processors: list[Any] = [hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if params.temperature > 0:
        processors.append(hf.TemperatureLogitsWarper(params.temperature))
        processors += [hf.TopKLogitsWarper(params.top_k)] if params.top_k else []
        processors += [hf.TopPLogitsWarper(params.top_p), hf.MinPLogitsWarper(params.min_p)]
    for processor in processors:
        logits = processor(histories, logits)
    return logits.softmax(-1)


@pytest.mark.slow
@many
@given(params=sampling_params(), seed=st.integers(0, 1000))
def test_process_is_that_of_transformers(params: SamplingParams, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(5, 50, generator=generator, dtype=torch.float64)
    histories = torch.randint(50, (5, 12), generator=generator)
    histories[:, :9] = histories[0, :9]  # nine tokens of text, then paths of three
    mine = sampler(vocab_size=50, text=histories[0, :9].tolist(), repetition_penalty=params.repetition_penalty)
    mine.params = params
    found = mine.process(logits, histories[:, 9:].tolist()).softmax(-1)
    torch.testing.assert_close(found, reference(logits, params, histories))
    slow = [processed(row.numpy(), params, seen.tolist()) for row, seen in zip(logits, histories, strict=True)]
    torch.testing.assert_close(torch.tensor(np.array(slow)).softmax(-1), found)


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.05}, {"min_p": 0.5}, {"top_k": 1}])
def test_process_with_ties_is_that_of_transformers(settings: dict[str, Any]) -> None:
    """Of equal tokens at the border of the nucleus any may stay, so that only the shape is compared."""
    params = SamplingParams(temperature=0.8, **settings)
    logits = torch.tensor([[2.0, 1.0, 2.0, 1.0, 2.0, 2.0, 0.0, 0.0], [0.0] * 8], dtype=torch.float64)
    expected = reference(logits, params, torch.empty(2, 0, dtype=torch.long))
    found = probabilities(logits, temperature=0.8, **settings)
    torch.testing.assert_close(found.sort().values, expected.sort().values)


@pytest.mark.parametrize("top_p", [0.051, 0.501, 0.901, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0])
def test_a_nucleus_is_that_of_the_whole_vocabulary_sorted(
    top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it ends among the likeliest tokens, or far behind them, or where many are equal, or with them."""
    logits = spread * torch.randn(8, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[2:4] = logits[2:4].round()
    logits[4:6, 20:] = -torch.inf
    params = SamplingParams(temperature=1.0, top_p=top_p)
    whole = Sampler(params, 0, 400).process(logits, [[]] * 8)
    for head in (1, 3, 20, 30, 400):
        monkeypatch.setattr(sampling, "HEAD", head)
        assert Sampler(params, 0, 400).process(logits, [[]] * 8).equal(whole)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kept = (ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) < top_p) & ordered.isfinite()
    assert whole.isfinite().equal(torch.empty_like(kept).scatter_(-1, order, kept))


@pytest.mark.parametrize("top_p", [1e-9, 1e-300, 0.3])
def test_tiny_top_p_keeps_the_likeliest(top_p: float) -> None:
    assert probabilities([[0.0, 1.0, 3.0, 2.0]], temperature=1.0, top_p=top_p).tolist() == [[0, 0, 1, 0]]


def test_min_p_keeps_what_is_just_likely_enough() -> None:
    found = probabilities([[0.0, math.log(0.5), -1.0]], temperature=1.0, min_p=0.5)
    torch.testing.assert_close(found, torch.tensor([[2 / 3, 1 / 3, 0.0]], dtype=torch.float64))


def test_tiny_temperature_is_greedy() -> None:
    for temperature, tail in itertools.product((1e-30, 1e-320, 5e-324), ({}, {"top_p": 0.5}, {"min_p": 0.1})):
        choose = sampler(vocab_size=4, temperature=temperature, **tail).choose
        assert [choose(torch.tensor([1.0, -2.0, 3.0, 2.0]), position, []) for position in range(20)] == [2] * 20


def test_repetition_penalty_follows_the_path() -> None:
    logits = torch.tensor([[4.0, -4.0, 2.0, -2.0, 1.0]] * 2, dtype=torch.float64)
    mine = sampler(vocab_size=5, text=[0, 0], repetition_penalty=2.0)
    found = mine.process(logits, [[1, 2], []])
    assert found.tolist() == [[2, -8, 1, -2, 1], [2, -4, 2, -2, 1]]
    mine.extend([3])
    assert mine.process(logits, [[1, 2], []]).tolist() == [[2, -8, 1, -4, 1], [2, -4, 2, -4, 1]]
    assert logits.tolist() == [[4, -4, 2, -2, 1]] * 2


def test_repetition_penalty_serves_fewer_columns() -> None:
    """A draft may know fewer tokens than the text holds, or than others guess."""
    mine = sampler(vocab_size=8, text=[1, 7], repetition_penalty=2.0)
    assert mine.process(torch.ones(2, 3), [[2], [5, 0]]).tolist() == [[1, 0.5, 0.5], [0.5, 0.5, 1]]
    assert mine.process(torch.ones(1, 3), [[6]]).tolist() == [[1, 0.5, 1]]


def test_penalties_of_the_answer_count_its_tokens_and_those_of_the_path() -> None:
    """OpenAI: logit - number of times * frequency_penalty - (whether there) * presence_penalty; not for the prompt."""
    mine = Sampler(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), 0, 5)
    mine.extend([0, 0, 4], is_prompt=True)
    logits = torch.zeros(2, 5, dtype=torch.float64)
    assert mine.process(logits, [[1, 2, 1], []]).tolist() == [[0, -1.25, -0.75, 0, 0], [0] * 5]
    mine.extend([1, 3, 1])
    assert mine.process(logits, [[1, 2], []]).tolist() == [[0, -1.75, -0.75, -0.75, 0], [0, -1.25, 0, -0.75, 0]]
    assert mine.process(torch.zeros(1, 2), [[4, 1]]).tolist() == [[0, -1.75]]  # a draft with fewer tokens
    assert mine.needs_history
    assert not logits.any()


def test_a_bias_is_added_before_the_penalties() -> None:
    mine = sampler(vocab_size=4, text=[1], repetition_penalty=2.0, logit_bias=((1, 3.0), (3, -100.0)))
    assert mine.process(torch.ones(1, 4), [[]]).tolist() == [[1, 2, 1, -99]]
    assert mine.process(torch.ones(1, 2), [[0]]).tolist() == [[0.5, 2]]
    assert not sampler(logit_bias=((1, 3.0),)).needs_history


# ------------------------------------------------------------------------------------------------ transfers


class Operations(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class OnlyEven:
    """A constraint, for the calls of `Sampler` alone."""

    def mask(self, path: Sequence[int]) -> np.ndarray:
        return np.array([0b01010101], dtype=np.uint8)

    def accept(self, tokens: Sequence[int]) -> None: ...


PATHS = [[], [5], [6, 7]]


@pytest.mark.parametrize(
    ("params", "sent"),
    [
        ({}, []),
        ({"repetition_penalty": 1.3}, [[1, 2], [8 + 5, 16 + 6, 16 + 7]]),
        ({"frequency_penalty": 0.5}, [[1, 2], [8 + 5, 16 + 6, 16 + 7]]),
        ({"logit_bias": ((1, 2.0),)}, [[0, 2, 0, 0, 0, 0, 0, 0]]),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_reach_the_device_by_the_transfer_that_was_given(
    params: dict[str, Any], sent: list[list[int]], device: str
) -> None:
    """One transfer for all paths. What torch would copy by itself is not used: `x[places] = value` of a GPU's x."""
    transfers = Transfers()
    with Operations() as operations:
        mine = Sampler(SamplingParams(**params), 0, 8, device, transfers)
        mine.extend([1, 2])
        found = mine.process(torch.zeros(3, 8, device=device), PATHS)
    assert found.device.type == device
    assert transfers.sent == sent
    assert not any(name.startswith(("index_put", "_index_put")) for name in operations.names)


def test_a_constraints_masks_reach_the_device_as_bits() -> None:
    transfers = Transfers()
    mine = Sampler(SamplingParams(), 0, 8, "meta", transfers)
    mine.constrain(OnlyEven())  # type: ignore[arg-type]
    mine.process(torch.zeros(3, 8, device="meta"), PATHS)
    assert transfers.sent == [[[0b01010101]] * 3]


def test_without_a_path_nothing_is_sent() -> None:
    transfers = Transfers()
    mine = Sampler(SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5), 0, 8, "cpu", transfers)
    mine.process(torch.zeros(2, 8), [[], [9]])  # a token beyond the columns
    assert transfers.sent == []


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((7, 2.0),))
    logits = torch.randn(3, 3000, device="cuda")
    to_device(torch.zeros(1), logits.device)  # makes its page-locked memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        mine = Sampler(params, 3, 3000, "cuda", to_device)
        mine.extend([1, 2, 3])
        mine.process(logits, PATHS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------ choice


@few
@given(params=sampling_params(), seed=seeds, position=st.integers(0, 1 << 20))
def test_choose_is_argmax_of_the_noisy_twin(params: SamplingParams, seed: int, position: int) -> None:
    logits = np.random.default_rng(position).normal(scale=2, size=8)
    mine = Sampler(params, seed, 8)
    mine.extend([1, 2])
    values = processed(logits, params, [1, 2, 5]) + (noise(seed, position, 8) if params.temperature else 0)
    assert mine.choose(torch.tensor(logits), position, [5]) == values.argmax()


def test_noise_is_kept_until_the_text_moves_and_then_the_same() -> None:
    mine = sampler(seed=3, temperature=1.0)
    first = mine.noise(5)
    assert mine.noise(5) is first
    mine.extend([1] * 6)
    assert mine.noise(5) is not first
    assert torch.equal(mine.noise(5), first)
    assert torch.equal(first, gumbel(3, 5, 8))


def test_tokens_without_probability_are_never_chosen() -> None:
    logits = torch.full((8,), -math.inf)
    logits[[2, 5]] = 0.0
    chosen = {sampler(temperature=1.0).choose(logits, position, []) for position in range(100)}
    assert chosen == {2, 5}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 0, 0], [0, math.inf, 0], [-math.inf] * 3, [-math.inf, math.nan, 1]])
def test_logits_that_are_not_numbers_are_refused_in_one_line(bad: list[float], temperature: float) -> None:
    with refused(NumericalError, "target", "logits", "position 41", "finite"):
        sampler(vocab_size=3, temperature=temperature).choose(torch.tensor(bad), 41, [])


# ------------------------------------------------------------------------------------------------ parameters

BAD_SAMPLING = [
    ("max_new_tokens", (0, -1)),
    ("temperature", (-0.1, math.inf, math.nan)),
    ("top_k", (-1,)),
    ("top_p", (0.0, -0.5, 1.01, math.nan)),
    ("min_p", (-0.1, 1.0, math.nan)),
    ("repetition_penalty", (0.0, -1.0, math.inf, math.nan)),
    ("frequency_penalty", (2.1, -2.1, math.nan)),
    ("presence_penalty", (3.0, -math.inf)),
    ("logit_bias", (((-1, 1.0),), ((1, 101.0),), ((1,),), ((1, math.nan),))),
    ("seed", (-1, 2**64)),
    ("stop", (("",), ("a", ""))),
]
BAD_SPECULATION = [
    ("budget", (-1,)),
    ("scoring", ("greedy", "")),
    ("width", (0,)),
    ("children", (0, -3)),
    ("max_depth", (0,)),
]


@pytest.mark.parametrize(
    ("params", "name", "value"),
    [(SamplingParams, name, value) for name, values in BAD_SAMPLING for value in values]
    + [(SpeculationParams, name, value) for name, values in BAD_SPECULATION for value in values],
)
def test_bad_parameters_are_named(params: Any, name: str, value: Any) -> None:
    with refused(UsageError, name, repr(value)):
        params(**{name: value})


def test_parameters_at_their_limits_are_good() -> None:
    SamplingParams(max_new_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=LARGEST_SEED, stop=("x",))
    SamplingParams(temperature=1e9, top_p=1e-9, min_p=0.999, repetition_penalty=1e-3, seed=0)
    SpeculationParams(budget=0, scoring="specexec", width=1, children=1, max_depth=1)
