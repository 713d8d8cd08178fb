"""A speculative text that is not plain decoding's is found, located and explained; a text that is, is left alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from offspec import Engine
from offspec.drafts.without_model import LookupDraft, NoDraft
from offspec.errors import UsageError
from offspec.scheduler.guessing.retrieval import build_index
from offspec.scheduler.params import Scoring, SpeculationParams
from offspec.scheduler.trees import verify as scheduler_verify
from offspec.scheduler.trees.sampling import gumbel
from offspec.scheduler.trees.verify import Verdict
from offspec.tools.verification import NEAR_TIE, Setting, VerificationReport, near_tie, settings_of, verify

from ...pair import build_pair
from ...refusals import refused

PROMPTS = ["def area(", "for item in"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pair = build_pair(tmp_path_factory.mktemp("pair"))
    return Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="fp32")


def setting(
    temperature: float = 0.0, budget: int | None = 8, scoring: Scoring = "coupled", draft: str = "own"
) -> Setting:
    return Setting(temperature, 1.0, budget, scoring, draft)


def replace_at(monkeypatch: pytest.MonkeyPatch, place: int, token: int) -> None:
    """Speculation says `token` at an absolute position, whatever the target chose; plain decoding is left alone."""

    def walk(tree: Any, logits: Any, sampler: Any, position: int) -> Verdict:
        verdict = scheduler_verify.exact_walk(tree, logits, sampler, position)
        at = place - position
        if len(tree) == 0 or not 0 <= at < len(verdict.tokens):
            return verdict
        return Verdict(verdict.path[:at], [*verdict.tokens[:at], token])

    monkeypatch.setattr("offspec.scheduler.drafting.drafter.exact_walk", walk)


def plain_tokens(engine: Engine, prompt: str, one: Setting, seed: int, num_tokens: int = 8) -> list[int]:
    found = engine.generate(prompt, one.sampling(num_tokens, seed), SpeculationParams(budget=0))
    return [token for step in found for token in step.token_ids]


@pytest.mark.slow
def test_texts_that_are_equal(engine: Engine) -> None:
    settings = settings_of([1], 0.9, [8, None], ["coupled", "specexec"], ["own", "random"])
    seen: list[tuple[int, int]] = []
    report = verify(engine, PROMPTS, settings, max_new_tokens=6, progress=lambda *done: seen.append(done))
    assert report.is_exact
    assert report.settings == settings
    assert len(report.tokens_per_pass) == len(settings) == 8
    assert seen == [(i + 1, 8) for i in range(8)]
    assert report.num_tokens <= 8 * len(PROMPTS) * 6
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_gap_counts_logits_and_noise(temperature: float, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, target = engine.encode(PROMPTS[0]), engine.target
    hidden = target.forward(torch.tensor(prompt), torch.arange(len(prompt)), target.new_cache())
    values = target.logits(hidden[-1:])[0].double()
    if temperature:
        values = values / temperature + gumbel(6, len(prompt), len(values))
    best, second = values.topk(2).indices.tolist()
    replace_at(monkeypatch, len(prompt), second)
    (found,) = verify(engine, PROMPTS[:1], [setting(temperature)], max_new_tokens=4, seed=6).differences
    assert (found.plain_token, found.speculative_token) == (best, second)
    assert found.gap == pytest.approx(float(values[best] - values[second]), rel=1e-4)


def test_a_random_draft_s_text_is_left_after_some_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = setting(draft="random")
    whole = verify(engine, PROMPTS, [one], max_new_tokens=8, random_passes=8)
    part = verify(engine, PROMPTS, [one], max_new_tokens=8, random_passes=3)
    assert whole.num_tokens == 8 * len(PROMPTS) > part.num_tokens >= 3 * len(PROMPTS)
    assert whole.is_exact
    assert part.is_exact
    length = len(engine.encode(PROMPTS[0]))
    wanted = plain_tokens(engine, PROMPTS[0], one, seed=0)
    replace_at(monkeypatch, length + 2, (wanted[2] + 1) % 256)
    (found,) = verify(engine, PROMPTS[:1], [one], max_new_tokens=8, random_passes=3).errors
    assert (found.token_index, found.plain_token) == (2, wanted[2])


def test_only_near_ties_of_inexact_engines_are_excused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NEAR_TIE[torch.float32] == 0 < NEAR_TIE[torch.float16] < NEAR_TIE[torch.bfloat16]
    prompt = engine.encode(PROMPTS[0])
    replace_at(monkeypatch, len(prompt), 40)
    monkeypatch.setitem(NEAR_TIE, torch.float32, 1000.0)
    if engine.is_exact:
        assert not verify(engine, PROMPTS[:1], [setting()], max_new_tokens=4).is_exact
    monkeypatch.setattr(engine.target, "is_exact", False)
    report = verify(engine, PROMPTS[:1], [setting()], max_new_tokens=4)
    assert report.is_exact
    assert (report.promise, report.as_dict()["inexact_reason"]) == ("up to near-ties", report.inexact_reason)
    assert [difference.is_near_tie for difference in report.differences] == [True]
    monkeypatch.setitem(NEAR_TIE, torch.float32, 0.0)
    assert not verify(engine, PROMPTS[:1], [setting()], max_new_tokens=4).is_exact


@pytest.mark.parametrize(("kv_cache", "excused"), [("16", 0.0), ("8", 1.0), ("4", 4.0)])
def test_packed_entries_have_near_ties_in_fp32_too(
    tmp_path_factory: pytest.TempPathFactory, kv_cache: str, excused: float
) -> None:
    pair = build_pair(tmp_path_factory.mktemp("packed"))
    options: dict[str, Any] = {"draft": "none", "device": "cpu", "dtype": "fp32", "kv_cache": kv_cache}
    with Engine.load(str(pair.target), arithmetic="fast", **options) as engine:
        assert near_tie(engine) == excused


def test_a_token_that_was_ruled_out_is_no_near_tie(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEAR_TIE, torch.float32, 1000.0)
    one = Setting(1.0, 1e-6, 8, "coupled", "own")  # top-p keeps the best token alone
    prompt = engine.encode(PROMPTS[0])
    (wanted,) = plain_tokens(engine, PROMPTS[0], one, seed=0, num_tokens=1)
    replace_at(monkeypatch, len(prompt), (wanted + 1) % 256)
    report = verify(engine, PROMPTS[:1], [one], max_new_tokens=4)
    assert [(d.gap, d.is_near_tie) for d in report.differences] == [(None, False)]


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


def test_the_report_as_json(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_at(monkeypatch, len(engine.encode(PROMPTS[0])), 40)
    report = verify(engine, PROMPTS[:1], [setting(), setting(draft="random")], max_new_tokens=4)
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told.keys() == {
        *("exact", "promise", "inexact_reason", "num_prompts", "num_tokens", "near_ties", "settings", "differences")
    }
    assert told["near_ties"].keys() == {"num", "num_compared", "per_1000_tokens", "largest_gap"}
    assert [s["draft"] for s in told["settings"]] == ["own", "random"]
    assert all(s["tokens_per_pass"] >= 1 for s in told["settings"])
    assert told["differences"][0].keys() == {
        *("setting", "prompt_index", "token_index", "plain_token", "speculative_token", "gap", "is_near_tie")
    }
    assert not told["exact"]


def test_near_ties_are_counted_by_tokens_compared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text counts up to its first difference: what follows it is another text."""
    monkeypatch.setitem(NEAR_TIE, torch.float32, 1000.0)
    monkeypatch.setattr(engine.target, "is_exact", False)
    wanted = plain_tokens(engine, PROMPTS[1], setting(), seed=1)
    replace_at(monkeypatch, len(engine.encode(PROMPTS[1])) + 3, (wanted[3] + 1) % 256)
    report = verify(engine, PROMPTS[1:], [setting()], max_new_tokens=8, seed=1)
    (found,) = report.near_ties
    assert report.is_exact
    assert found.token_index == 3
    assert report.num_compared == [4]
    assert report.near_ties_per_1000 == 1000 / 4
    assert report.largest_gap == found.gap
    counts = report.as_dict()["near_ties"]
    assert (counts["num"], counts["per_1000_tokens"]) == (1, report.near_ties_per_1000)


def test_no_difference_is_exact() -> None:
    report = VerificationReport(num_prompts=0)
    assert report.is_exact
    assert (report.near_ties_per_1000, report.largest_gap) == (0, 0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((-1.0, 1.0, 8, "coupled"), ("temperature", -1)),
        ((0.0, 0.0, 8, "coupled"), ("top_p", 0)),
        ((0.0, 1.0, -1, "coupled"), ("budget", -1)),
        ((0.0, 1.0, 8, "other"), ("scoring", "other")),
    ],
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


def test_top_p_counts_at_temperature_1_only() -> None:
    settings = settings_of([0, 0.6, 1], 0.9, [4], ["coupled"], ["own"])
    assert [(s.temperature, s.top_p) for s in settings] == [(0, 1.0), (0.6, 1.0), (1, 0.9)]
