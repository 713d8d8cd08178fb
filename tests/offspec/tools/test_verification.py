"""A speculative text that is not plain decoding's is found, located and explained; a text that is, is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offspec import Engine
from offspec.drafts.without_model import LookupDraft, NoDraft
from offspec.errors import UsageError
from offspec.scheduler.params import Scoring, SpeculationParams
from offspec.scheduler.trees import verify as scheduler_verify
from offspec.scheduler.trees.verify import Verdict
from offspec.tools.verification import NEAR_TIE, Setting, near_tie, settings_of, verify

from ...pair import Pair
from ...refusals import refused
from ...scheduler.fakes import build_index

PROMPTS = ["def area(", "for item in"]


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Engine:
    return Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="fp32")


def setting(
    temperature: float = 0.0, budget: int | None = 8, scoring: Scoring = "coupled", draft: str = "own"
) -> Setting:
    return Setting(temperature, 1.0, budget, scoring, draft)


def replace_at(monkeypatch: pytest.MonkeyPatch, place: int, token: int) -> None:
    """Speculation says `token` at an absolute position, whatever the target chose; plain decoding is left alone."""

    def walk(tree: Any, logits: Any, sampler: Any, position: int) -> Verdict:
        verdict = scheduler_verify.verify_exactly(tree, logits, sampler, position)
        at = place - position
        if len(tree) == 0 or not 0 <= at < len(verdict.tokens):
            return verdict
        return Verdict(verdict.path[:at], [*verdict.tokens[:at], token])

    monkeypatch.setattr("offspec.scheduler.drafting.drafter.verify_exactly", walk)


def plain_tokens(engine: Engine, prompt: str, one: Setting, seed: int, num_tokens: int = 8) -> list[int]:
    found = engine.generate(prompt, one.sampling(num_tokens, seed), SpeculationParams(budget=0))
    return [token for step in found for token in step.token_ids]


@pytest.mark.slow
def test_texts_that_are_equal(engine: Engine) -> None:
    settings = settings_of([1], 0.9, [8], ["coupled", "specexec"], ["own", "random"])
    seen: list[tuple[int, int]] = []
    report = verify(engine, PROMPTS, settings, max_new_tokens=6, progress=lambda *done: seen.append(done))
    assert report.is_exact
    assert report.settings == settings
    assert len(report.tokens_per_pass) == len(settings) == 4
    assert seen == [(i + 1, 4) for i in range(4)]
    assert report.num_tokens <= 4 * len(PROMPTS) * 6
    own = [n for s, n in zip(settings, report.tokens_per_pass, strict=True) if s.draft == "own" and s.budget == 8]
    assert min(own) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_difference_is_located_and_explained(
    temperature: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = setting(temperature)
    wanted = plain_tokens(engine, PROMPTS[1], one, seed=6)
    other = (wanted[3] + 1) % 256
    length = len(engine.encode(PROMPTS[1]))
    assert length != len(engine.encode(PROMPTS[0]))  # so that only one of the two prompts is spoilt
    replace_at(monkeypatch, length + 3, other)
    report = verify(engine, PROMPTS[1:], [one], max_new_tokens=8, seed=6)
    (found,) = report.errors
    assert (found.setting, found.prompt_index, found.token_index) == (one, 0, 3)
    assert (found.plain_token, found.speculative_token, found.is_near_tie) == (wanted[3], other, False)
    assert found.gap is not None
    assert found.gap > 0
    for words in (f"token {other} instead of token {wanted[3]}", "position 3", "budget 8", "own draft"):
        assert words in str(found)


def test_only_near_ties_of_inexact_engines_are_excused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NEAR_TIE[torch.float32] == 0 < NEAR_TIE[torch.float16] < NEAR_TIE[torch.bfloat16]
    prompt = engine.encode(PROMPTS[0])
    replace_at(monkeypatch, len(prompt), 40)
    monkeypatch.setitem(NEAR_TIE, torch.float32, 1000.0)
    if engine.is_exact:
        assert not verify(engine, PROMPTS[:1], [setting()], max_new_tokens=4).is_exact
    monkeypatch.setattr(engine.target, "arithmetic", "fast")
    report = verify(engine, PROMPTS[:1], [setting()], max_new_tokens=4)
    assert report.is_exact
    assert (report.promise, report.as_dict()["inexact_reason"]) == ("up to near-ties", report.inexact_reason)
    assert [difference.is_near_tie for difference in report.differences] == [True]
    monkeypatch.setitem(NEAR_TIE, torch.float32, 0.0)
    assert not verify(engine, PROMPTS[:1], [setting()], max_new_tokens=4).is_exact


@pytest.mark.parametrize(("kv_cache", "excused"), [("16", 0.0), ("8", 1.0)])
def test_packed_entries_have_near_ties_in_fp32_too(pair: Pair, kv_cache: str, excused: float) -> None:
    options: dict[str, Any] = {"draft": "none", "device": "cpu", "dtype": "fp32", "kv_cache": kv_cache}
    with Engine.load(str(pair.target), arithmetic="fast", **options) as engine:
        assert near_tie(engine) == excused


def test_a_text_that_ends_early_differs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (eos,) = engine.tokenizer.eos_ids
    wanted = plain_tokens(engine, PROMPTS[0], setting(), seed=0)
    real = Engine.generate

    def short(self: Engine, prompt: Any, params: Any, speculation: Any) -> Any:
        for step in real(self, prompt, params, speculation):
            yield step
            if speculation.budget:
                return

    monkeypatch.setattr(Engine, "generate", short)
    report = verify(engine, PROMPTS[:1], [setting()], max_new_tokens=8)
    (found,) = report.errors
    assert (found.plain_token, found.speculative_token) == (wanted[found.token_index], None)
    assert "the end instead of token" in str(found)
    assert eos not in wanted


@pytest.mark.parametrize(
    ("values", "words"),
    [((-1.0, 1.0, 8, "coupled"), ("temperature", -1)), ((0.0, 1.0, 8, "other"), ("scoring", "other"))],
)
def test_settings_that_cannot_be_meant(values: tuple[Any, Any, Any, Any], words: tuple[object, ...]) -> None:
    with refused(UsageError, *words):
        Setting(*values, draft="own")


def test_own_needs_something_that_guesses(engine: Engine) -> None:
    alone = engine.with_draft(NoDraft())
    with refused(UsageError, "`draft`"):
        verify(alone, PROMPTS, [setting()])
    assert verify(alone, PROMPTS, [setting(draft="random")], max_new_tokens=4).is_exact


def test_what_is_looked_up_is_verified(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = engine.encode(PROMPTS[0] * 2)
    alone = engine.with_draft(NoDraft())
    alone.models.index = build_index(np.array(ids, dtype=np.int32))
    for found in (engine.with_draft(LookupDraft()), alone):
        assert verify(found, [PROMPTS[0] * 2], [setting(), setting(budget=None)], max_new_tokens=8).is_exact
        with monkeypatch.context() as patch:
            replace_at(patch, len(ids), 40)  # only where there is a tree
            (difference,) = verify(found, [PROMPTS[0] * 2], [setting(budget=8)], max_new_tokens=8).errors
        assert "own draft, coupled scoring, budget 8" in str(difference)
