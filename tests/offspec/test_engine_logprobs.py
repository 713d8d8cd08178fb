"""Log-probabilities of tokens: the target's own, whatever drafts, shares a pass, or was cached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams, Step
from offspec.errors import NumericalError, UsageError
from offspec.model.row_logits import HEAD_ROWS
from offspec.scheduler.trees.logprobs import TokenLogprob, token_logprobs

from ..pair import Pair
from ..refusals import refused

PROMPT = "for i in range(10):\n    print(i)\n" * 3 + "def area("
PARAMS = SamplingParams(10, temperature=0.8, top_k=30, repetition_penalty=1.2, seed=5, logprobs=3, ignore_eos=True)


def load(pair: Pair, draft: str) -> Engine:
    options: dict[str, Any] = {"exit_layer": 1} if draft == "self" else {}
    name = str(pair.draft) if draft == "own" else draft
    return Engine.load(str(pair.target), draft=name, device="cpu", dtype="fp32", **options)


def expected(engine: Engine, text: list[int]) -> Tensor:
    """[T, V]: log-probabilities after each token of a text, by one plain pass."""
    target = engine.target
    hidden = target.forward(torch.tensor(text), torch.arange(len(text)), target.new_cache())
    return target.logits(hidden).log_softmax(-1)


def check(found: list[TokenLogprob], tokens: list[int], rows: Tensor, num_likeliest: int) -> None:
    assert [each.token for each in found] == tokens
    for each, row in zip(found, rows, strict=True):
        assert each.logprob == pytest.approx(row[each.token].item(), abs=1e-4)
        best = row.topk(num_likeliest)
        assert [value for _, value in each.likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert {token for token, _ in each.likeliest} == set(best.indices.tolist())


@pytest.mark.each_value
@pytest.mark.parametrize("draft", ["own", "none", "lookup", "self"])
@pytest.mark.parametrize("shares", [False, True])
def test_they_are_those_of_a_plain_pass(pair: Pair, draft: str, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the answer and of the prompt: before penalties, temperature and filters; also where caches hold the prompt."""
    monkeypatch.setattr("offspec.running.passes.prefill_rows", lambda *_: 40)
    asked = SamplingParams(**{**vars(PARAMS), "prompt_logprobs": True})
    with load(pair, draft) as engine:
        caches, prompt = engine.new_caches(), engine.encode(PROMPT)
        assert len(prompt) > HEAD_ROWS
        if shares:  # the other text is past its prompt, so that this one is read in parts
            texts: list[list[Step]] = [[], []]
            for index, step in engine.generate_many(["x", PROMPT], [PARAMS, asked]):
                texts[index].append(step)
            steps = texts[1]
        else:
            list(engine.generate(PROMPT, PARAMS, caches=caches))
            steps = list(engine.generate(PROMPT, asked, caches=caches))
        answer = [token for step in steps for token in step.token_ids]
        plain = list(
            engine.generate(PROMPT, SamplingParams(**{**vars(PARAMS), "logprobs": None}), SpeculationParams(0))
        )
        assert answer == [token for step in plain for token in step.token_ids]
        rows = expected(engine, prompt + answer)
    assert not any(step.logprobs or step.prompt_logprobs for step in plain)
    assert not any(step.prompt_logprobs for step in steps[1:])
    check(list(steps[0].prompt_logprobs), prompt[1:], rows[: len(prompt) - 1], 3)
    check([each for step in steps for each in step.logprobs], answer, rows[len(prompt) - 1 : -1], 3)


def test_a_long_prompt_takes_few_rows_of_logits_at_a_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(pair, "none") as engine:
        num_rows, head = list[int](), type(engine.target).head

        def noted(self: Any, states: Tensor) -> Tensor:
            num_rows.append(len(states))
            return head(self, states)

        monkeypatch.setattr(type(engine.target), "head", noted)
        num_prompt = len(engine.encode(PROMPT))
        list(engine.generate(PROMPT, SamplingParams(1, logprobs=0, prompt_logprobs=True)))
    assert max(num_rows) <= HEAD_ROWS
    assert sum(num_rows) == num_prompt


def test_of_several_answers_the_first_has_the_prompts(pair: Pair) -> None:
    with load(pair, "lookup") as engine:
        params = SamplingParams(4, temperature=1.0, seed=2, logprobs=1, prompt_logprobs=True)
        found: list[list[Step]] = [[], [], []]
        for index, step in engine.generate_answers(PROMPT, 3, params):
            found[index].append(step)
        num_prompt = len(engine.encode(PROMPT))
    assert [len(steps[0].prompt_logprobs) for steps in found] == [num_prompt - 1, 0, 0]
    assert [steps[-1].stats.num_prefilled_tokens for steps in found] == [num_prompt, 1, 1]
    assert all(len(step.logprobs) == len(step.token_ids) for steps in found for step in steps)


def test_a_prompt_of_one_token_has_none(pair: Pair) -> None:
    with load(pair, "none") as engine:
        (step,) = engine.generate([5], SamplingParams(1, logprobs=0, prompt_logprobs=True))
    assert (step.prompt_logprobs, len(step.logprobs), step.logprobs[0].likeliest) == ((), 1, ())


def test_logits_that_are_not_finite_are_told() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    with refused(NumericalError, "position", "8"):
        token_logprobs(logits, [0, 1, 2], 2, 7)


def test_parameters_that_cannot_be_meant() -> None:
    for bad in ({"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": True}):
        with refused(UsageError, next(iter(bad))):
            SamplingParams(**bad)  # type: ignore[arg-type]
