"""Joint acceptance in the engine: the text of models without caches, and where it ends, is cut or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.drafts.base import Draft, DraftTask
from offspec.drafts.draft_stats import DraftStats
from offspec.errors import UsageError
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.scheduler.drafting.drafter import Drafter, NoDrafter
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree
from offspec.scheduler.trees.verify import Logits, Verdict

from ..pair import CONTEXT, Pair, variant
from ..refusals import refused
from ..scheduler.fakes import Rule, RuleModel
from ..scheduler.test_joint import generate
from .test_engine import PROMPT, ids, load, steps, text

JOINT = SpeculationParams(accept="joint", tau=0.1, beam=4, gamma=4)
EAGER = SpeculationParams(accept="joint", tau=1e-6, beam=4, gamma=6)


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with load(pair.target, pair.draft) as loaded:
        yield loaded


def uncached(decoder: Decoder) -> Rule:
    """A model as a rule: every text from its beginning, with nothing kept."""
    none = np.empty(0, dtype=np.int64)

    @cache
    def rule(prefix: tuple[int, ...]) -> FloatArray:
        logits = CachedDecoder(decoder).score(prefix, none, none, none)
        return logits[0].double().numpy()

    return rule


@pytest.mark.each_value
@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("speculation", [JOINT, EAGER], ids=["tau 0.1", "tau 1e-6"])
def test_text_is_that_of_models_without_caches(speculation: SpeculationParams, penalty: float, engine: Engine) -> None:
    assert engine.draft.decoder is not None
    params = SamplingParams(14, repetition_penalty=penalty, ignore_eos=True)
    found = steps(engine, params=params, speculation=speculation)
    size = engine.target.config.vocab_size
    models = (RuleModel(uncached(decoder), size) for decoder in (engine.target, engine.draft.decoder))
    assert ids(found) == generate(
        *models, speculation, params.max_new_tokens, params=params, prompt=engine.encode(PROMPT)
    )
    plain = steps(engine, params=params, speculation=SpeculationParams(budget=0))
    assert ids(found) != ids(plain)
    assert found[-1].stats.is_lossy
    assert not plain[-1].stats.is_lossy
    assert max(step.num_accepted for step in found) == speculation.gamma


@pytest.mark.parametrize("num_free", [1, 2, 5])
def test_the_context_fills_to_its_last_place(num_free: int, engine: Engine) -> None:
    found = steps(engine, [40] * (CONTEXT - num_free), SamplingParams(ignore_eos=True), EAGER)
    assert (len(ids(found)), found[-1].finish_reason) == (num_free, "length")


def test_a_text_ends_at_its_final_token(pair: Pair, engine: Engine, tmp_path: Path) -> None:
    """Any token that joint decoding says may be made the final one: then it is the last,
    and nothing is said behind it.
    """
    unbounded = ids(steps(engine, params=SamplingParams(16), speculation=EAGER))
    ended = 0
    for number, token in enumerate(dict.fromkeys(unbounded[3:8])):
        folder = variant(pair.target, tmp_path / f"target-{number}")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, token]}))
        found = steps(load(folder, pair.draft), params=SamplingParams(16), speculation=EAGER)
        assert token not in ids(found)[:-1]
        assert (ids(found)[-1] == token) == (found[-1].finish_reason == "eos")
        assert text(found) == engine.tokenizer.decode([t for t in ids(found) if t != token])
        ended += found[-1].finish_reason == "eos"
    assert ended >= 2


def test_caches_go_on_from_request_to_request(engine: Engine) -> None:
    """What a lossy request leaves behind is its text, for lossy and exact requests alike."""
    caches, params = engine.new_caches(), SamplingParams(12, ignore_eos=True)
    first = list(engine.generate(PROMPT, params, EAGER, caches=caches))
    prompt = [*engine.encode(PROMPT), *ids(first), 40, 41]
    for speculation in (EAGER, SpeculationParams(budget=16), JOINT):
        found = list(engine.generate(prompt, params, speculation, caches=caches))
        assert ids(found) == ids(steps(engine, prompt, params, speculation))
        assert found[-1].stats.num_prefilled_tokens < len(prompt)


def test_it_needs_a_draft_and_no_temperature(pair: Pair, engine: Engine) -> None:
    for draft in ("none", "lookup"):
        alone = Engine.load(str(pair.target), draft=draft, device="cpu")
        with refused(UsageError, "joint", "`draft=PATH`"):
            alone.generate(PROMPT, speculation=JOINT)  # at once, not at the first step
    with refused(UsageError, "joint", "temperature", 0, 1, "exact"):
        engine.generate(PROMPT, SamplingParams(temperature=1.0), JOINT)


class OneTokenDrafter(NoDrafter):
    """Its walk says the same token, whatever the target says."""

    is_lossy = True

    def verify(self, tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
        return Verdict([], [7])


class OneTokenDraft(Draft):
    def drafter(self, task: DraftTask, stats: DraftStats) -> Drafter:
        return OneTokenDrafter()


def test_the_drafter_brings_the_walk_and_marks_the_text(engine: Engine) -> None:
    made = list(engine.with_draft(OneTokenDraft()).generate(PROMPT, SamplingParams(4, ignore_eos=True)))
    assert ids(made) == [7] * 4
    assert made[-1].stats.is_lossy
