"""BiLD: texts of models without caches, beside a twin that follows the publication's algorithm word by word."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from offspec.research.bild import ROLLBACK, BildDrafter
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree

from ...scheduler import fakes
from ...scheduler.fakes import Rule, RuleModel, noise, plain_text, random_rule, resembling

SIZE, SEED, PROMPT = 4, 7, [1, 0, 2]
BILD = SpeculationParams(accept="bild", tau=0.7, beam=2, gamma=4)


def generate(
    target: Rule, draft: Rule, params: SamplingParams, bild: SpeculationParams, num: int, final: tuple[int, ...] = ()
) -> tuple[list[int], list[int]]:
    """The text, and the number of drafted tokens of each pass."""
    sampler, proposed = Sampler(params, SEED, SIZE), list[TokenTree]()
    drafter = BildDrafter(RuleModel(draft, SIZE), sampler, bild, final)
    text = fakes.generate(RuleModel(target, SIZE), drafter, sampler, PROMPT, num, proposed=proposed)
    return text, [len(tree) for tree in proposed]


def twin(target: Rule, draft: Rule, temperature: float, bild: SpeculationParams, num: int) -> list[int]:
    """Algorithm 1 of the publication, one token at a time, without caches."""

    def probabilities(rule: Rule, text: list[int]) -> FloatArray:
        values = np.exp(np.array(rule(tuple(text))) / (temperature or 1.0))
        return values / values.sum()

    def chosen(rule: Rule, text: list[int]) -> int:
        values = np.log(probabilities(rule, text))
        return int((values + (noise(SEED, len(text), SIZE) if temperature else 0.0)).argmax())

    text, end = list(PROMPT), len(PROMPT) + num
    while len(text) < end:
        drafted = list(text)
        while (
            len(drafted) < min(end - 1, len(text) + bild.beam * bild.gamma)
            and probabilities(draft, drafted).max() >= bild.tau
        ):
            drafted.append(chosen(draft, drafted))
        for place in range(len(text), len(drafted)):
            if probabilities(target, drafted[:place])[drafted[place]] < ROLLBACK:
                drafted = drafted[:place]
                break
        text = [*drafted, chosen(target, drafted)]
    return text[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_the_published_algorithm(temperature: float) -> None:
    target = random_rule(SIZE, 1)
    draft = resembling(target, 2, 1.0)
    params = SamplingParams(temperature=temperature)
    text, lengths = generate(target, draft, params, BILD, 40)
    assert text == twin(target, draft, temperature, BILD, 40)
    assert text != plain_text(target, params, SEED, PROMPT, 40)
    assert min(lengths) == 0, "a pass at once, where the draft doubts"
    assert max(lengths) > 2


def test_a_threshold_of_one_is_plain_decoding() -> None:
    """A draft that is never sure says nothing."""
    target = random_rule(SIZE, 0)
    draft, plain = resembling(target, 1, 1.0), plain_text(target, SamplingParams(), SEED, PROMPT, 20)
    assert generate(target, draft, SamplingParams(), replace(BILD, tau=1.0), 20)[0] == plain


def test_a_final_token_ends_the_chain() -> None:
    def sure(text: tuple[int, ...]) -> list[float]:
        return [0.0 if token == len(text) % SIZE else -30.0 for token in range(SIZE)]

    text, lengths = generate(sure, sure, SamplingParams(), BILD, 5, final=(1,))
    assert text == [3, 0, 1, 2, 3]
    assert lengths == [3, 0], "3, 0, 1, which is final; then there is room for the target's token only"
    assert math.isclose(sum(lengths) + len(lengths), len(text))
