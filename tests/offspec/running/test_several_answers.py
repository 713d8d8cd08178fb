"""Several answers to one prompt are those of plain decoding with their seeds; the prompt is scored once."""

from __future__ import annotations

from typing import Any

import pytest

from offspec import Engine, SamplingParams, SpeculationParams, Step
from offspec.errors import ContextLengthError, NumericalError

from ...pair import Pair
from ...refusals import refused

PROMPT = "for i in range(10):\n    print(i)\n" * 2 + "def area("  # longer than what is not worth copying
PARAMS = SamplingParams(6, temperature=0.9, seed=7)


def load(pair: Pair, draft: str = "own", **more: Any) -> Engine:
    name = str(pair.draft) if draft == "own" else draft
    return Engine.load(str(pair.target), draft=name, device="cpu", dtype="fp32", **more)


def ids_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def answers_of(engine: Engine, number: int, **more: Any) -> list[list[Step]]:
    found: list[list[Step]] = [[] for _ in range(number)]
    for index, step in engine.generate_answers(PROMPT, number, PARAMS, **more):
        found[index].append(step)
    return found


@pytest.mark.parametrize(("draft", "max_texts"), [("own", 2), ("none", 1)])
def test_each_answer_is_that_of_its_seed_alone(pair: Pair, draft: str, max_texts: int) -> None:
    with load(pair, draft, texts=max_texts) as engine:
        found = answers_of(engine, 4, max_texts=max_texts)
        assert [steps[-1].stats.seed for steps in found] == [7, 8, 9, 10]
        for index, steps in enumerate(found):
            params = SamplingParams(6, temperature=0.9, seed=7 + index)
            alone = list(engine.generate(PROMPT, params, SpeculationParams(budget=0)))
            assert ids_of(steps) == ids_of(alone)
            assert steps[-1].finish_reason == alone[-1].finish_reason
            assert "".join(step.text for step in steps) == "".join(step.text for step in alone)


def test_the_prompt_is_scored_once(pair: Pair) -> None:
    with load(pair, texts=4) as engine:
        num_prompt = len(engine.encode(PROMPT))
        prefilled = [steps[-1].stats.num_prefilled_tokens for steps in answers_of(engine, 4)]
    assert num_prompt > 33
    assert prefilled == [num_prompt, 1, 1, 1]


def test_errors(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(pair) as engine:
        with refused(ContextLengthError, "context"):
            engine.generate_answers("x" * 500, 2, PARAMS)
        monkeypatch.setattr("offspec.scheduler.drafting.drafter.verify_exactly", _fail)
        with pytest.raises(NumericalError):
            list(engine.generate_answers("x", 2, PARAMS))


def _fail(*args: Any) -> None:
    raise NumericalError("the logits are not finite")
