"""Lossy rules: what each makes of two distributions, and the text of models without caches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offspec.errors import UsageError
from offspec.research.blend import RULES, BlendDrafter, blended
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray

from ...refusals import refused
from ...scheduler import fakes
from ...scheduler.fakes import Rule, RuleModel, noise, plain_text, random_rule, resembling

SIZE, GAMMA, PROMPT = 3, 3, [1, 0, 2]
each_rule = pytest.mark.parametrize("accept", RULES)


def mixture(accept: str, p: list[float], q: list[float], tau: float | None = None) -> FloatArray:
    """The blend of two distributions, as a distribution."""
    rule = RULES[accept]
    values = blended(rule, torch.tensor(p).double().log(), torch.tensor(q).double().log(), tau or rule.tau)
    return values.softmax(-1).numpy()


P, Q = [0.5, 0.3, 0.2], [0.1, 0.8, 0.1]


@pytest.mark.parametrize(
    ("accept", "p", "q", "tau", "expected"),
    [
        ("cascade", P, Q, 0.5, Q),  # 0.8 >= 0.5 - ...
        ("cascade", [0.9, 0.1, 0.0], [0.4, 0.3, 0.3], 0.5, [0.9, 0.1, 0.0]),  # 0.4 < 0.9 - 0.5 * 0.5
        ("relaxed", P, Q, 0.5, Q),  # 0.3 >= 0.5 * 0.5
        ("relaxed", P, Q, 0.7, P),
        ("relaxed", [0.3, 0.25, 0.24, 0.21], [0.1, 0.1, 0.1, 0.7], 0.5, [0.3, 0.25, 0.24, 0.21]),  # the fourth best
    ],
)
def test_who_decides(accept: str, p: list[float], q: list[float], tau: float, expected: list[float]) -> None:
    found, wanted = mixture(accept, p, q, tau), np.array(expected)
    np.testing.assert_allclose(found, wanted / wanted.sum(), atol=1e-9)


def test_means_of_logits() -> None:
    np.testing.assert_allclose(mixture("mix", P, Q, 0.25), normed(np.array(P) ** 0.75 * np.array(Q) ** 0.25))
    np.testing.assert_allclose(mixture("contrastive", P, Q, 0.5), normed(np.array(P) ** 1.5 / np.array(Q) ** 0.5))
    assert mixture("contrastive", [0.95, 0.049, 0.001], [0.9, 0.1, 1e-9], 0.5)[1:].sum() == 0, "too unlikely"


def normed(values: FloatArray) -> FloatArray:
    return values / values.sum()


@each_rule
def test_what_the_target_excludes_stays_excluded(accept: str) -> None:
    """Also where a draft knows fewer tokens, and where the two have none in common."""
    assert mixture(accept, [0.6, 0.4, 0.0, 0.0], [0.0, 0.1, 0.9])[2:].sum() == 0
    np.testing.assert_allclose(mixture(accept, [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]), [1, 0, 0])


# ------------------------------------------------------------------------------------------------ texts


def generate(target: Rule, draft: Rule, params: SamplingParams, speculation: SpeculationParams, num: int) -> list[int]:
    sampler = Sampler(params, 7, SIZE)
    drafter = BlendDrafter(RuleModel(draft, SIZE), sampler, speculation)
    return fakes.generate(RuleModel(target, SIZE), drafter, sampler, PROMPT, num)


def twin(target: Rule, draft: Rule, temperature: float, speculation: SpeculationParams, num: int) -> list[int]:
    """The blend for GAMMA tokens, then one token of the target: the beam holds every text of GAMMA tokens."""
    text = list(PROMPT)
    while len(text) < len(PROMPT) + num:
        left = len(PROMPT) + num - len(text)
        for place in range(min(GAMMA, left - 1) + 1):
            p, q = (np.array(rule(tuple(text))) / (temperature or 1.0) for rule in (target, draft))
            values = torch.tensor(p).log_softmax(-1)
            if place < min(GAMMA, left - 1):
                rule = RULES[speculation.accept]
                values = blended(rule, values, torch.tensor(q).log_softmax(-1), rule.tau)
            chosen = values.numpy() + (noise(7, len(text), SIZE) if temperature else 0.0)
            text.append(int(chosen.argmax()))
    return text[len(PROMPT) :]


@pytest.mark.each_value
@each_rule
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_models_without_caches(accept: str, temperature: float) -> None:
    target = random_rule(SIZE, 0)
    draft = resembling(target, 1, 2.0)
    params, speculation = (
        SamplingParams(temperature=temperature),
        SpeculationParams(accept=accept, beam=27, gamma=GAMMA),
    )
    found = generate(target, draft, params, speculation, 40)
    assert found == twin(target, draft, temperature, speculation, 40)
    assert found != plain_text(target, params, 7, PROMPT, 40)


def test_settings_are_checked() -> None:
    for tau in (0.0, 1.01, math.nan):
        with refused(UsageError, "tau", "0", "1"):
            SpeculationParams(accept="mix", tau=tau)
    with refused(UsageError, "budget", "mix"):
        SpeculationParams(accept="mix", budget=4)
    SpeculationParams(accept="cascade").check_sampling(SamplingParams(temperature=1.0))
