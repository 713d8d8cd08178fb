"""What the engine hands on: to every setting its drafter, to every drafter what was learnt before
and what passes cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offspec import Engine, SamplingParams, SpeculationParams, Step
from offspec.drafts.base import DraftTask
from offspec.drafts.without_model import NoDraft
from offspec.loaders.machine.hardware import Rates
from offspec.planning.draft_forecast import round_s
from offspec.research.opt_tree import OptTreeDrafter
from offspec.research.sequoia import MeasuredAcceptance, SequoiaDrafter
from offspec.scheduler.drafting.drafter import Drafter, NoDrafter
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import PromptLookup
from offspec.scheduler.guessing.recycling import TokenRecycling
from offspec.scheduler.guessing.retrieval import Retrieval, SuffixIndex
from offspec.scheduler.joint import JointDrafter
from offspec.scheduler.params import Scoring
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import TokenTree

from ..pair import Pair
from ..scheduler.fakes import build_index, paths

PROMPT, SEED = "def area(", 5
GREEDY, SAMPLED = SamplingParams(20, seed=SEED), SamplingParams(20, temperature=1.0, seed=SEED)
PLAIN = SpeculationParams(budget=0)
SCORINGS: tuple[Scoring, ...] = ("coupled", "specexec")
RATES = Rates(matmul_flops={1: 1e6, 16: 8e6, 128: 2e7})


def load(pair: Pair, draft: str, **more: Any) -> Engine:
    """The target with `draft`: own, lookup or none."""
    return Engine.load(str(pair.target), draft=str(pair.draft) if draft == "own" else draft, device="cpu", **more)


@pytest.fixture(scope="module")
def loaded(pair: Pair) -> Iterator[dict[str, Engine]]:
    with ExitStack() as opened:
        yield {draft: opened.enter_context(load(pair, draft)) for draft in ("own", "lookup", "none")}


@pytest.fixture
def engines(loaded: dict[str, Engine]) -> dict[str, Engine]:
    """The same models, of which nothing is known yet."""
    return {name: engine.with_draft(engine.draft) for name, engine in loaded.items()}


def steps(engine: Engine, params: SamplingParams, speculation: SpeculationParams | None = None) -> list[Step]:
    return list(engine.generate(PROMPT, params, speculation))


def ids(found: Sequence[Step]) -> list[int]:
    return list(chain.from_iterable(step.token_ids for step in found))


def sampler_of(engine: Engine, params: SamplingParams = GREEDY) -> Sampler:
    """One that knows the prompt."""
    sampler = Sampler(params, SEED, engine.target.config.vocab_size)
    sampler.extend(engine.encode(PROMPT))
    return sampler


def drafter_of(
    engine: Engine,
    params: SamplingParams = GREEDY,
    final: frozenset[int] = frozenset(),
    **speculation: Any,
) -> Drafter:
    """As a new request would get it."""
    sampler = sampler_of(engine, params)
    text = engine.new_caches().draft
    params, index = SpeculationParams(**speculation), engine.lookup_index
    task = DraftTask(sampler, final, text=text, target=engine.target, speculation=params, index=index)
    return engine.draft.drafter(task, engine.draft_stats)


# ------------------------------------------------------------------------------------------------ what passes cost


def test_before_the_first_pass_its_cost_is_what_the_plan_predicts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offspec.loading.measure_quick_rates", lambda *_: RATES)
    engine = load(pair, "own")
    assert engine.plan is not None
    rows = np.array([1, 16, 128, 1024])
    predicted = [engine.plan.predict_pass_s(RATES, n) for n in rows.tolist()]
    assert predicted[-1] > 2 * predicted[0] > 0
    for one in (engine, engine.with_draft(NoDraft())):
        np.testing.assert_allclose(one.draft_stats.costs.target.seconds(rows), predicted)
    assert engine.draft.as_planned is not None
    rounds = [round_s(engine.plan, engine.draft.as_planned, lambda model: RATES, n) for n in rows.tolist()]
    assert rounds[-1] > 2 * rounds[0] > 0
    np.testing.assert_allclose(engine.draft_stats.costs.draft.seconds(rows), rounds)
    assert not engine.with_draft(NoDraft()).draft_stats.costs.draft.is_known


# ------------------------------------------------------------------------------------------------ who drafts


@pytest.mark.parametrize(
    ("draft", "settings", "kind"),
    [
        ("own", {}, ModelDrafter),
        ("own", {"tree": "sequoia"}, SequoiaDrafter),
        ("own", {"tree": "opt-tree"}, OptTreeDrafter),
        ("own", {"accept": "joint"}, JointDrafter),
        ("own", {"budget": 0}, NoDrafter),
        ("own", {"budget": 0, "tree": "sequoia"}, NoDrafter),
        ("lookup", {}, ModelDrafter),
        ("lookup", {"tree": "sequoia"}, ModelDrafter),  # there is no model to be asked layer by layer
        ("lookup", {"budget": 0}, NoDrafter),
        ("none", {}, NoDrafter),
    ],
)
def test_every_setting_has_its_drafter(
    draft: str, settings: dict[str, Any], kind: type[Drafter], engines: dict[str, Engine]
) -> None:
    assert type(drafter_of(engines[draft], **settings)) is kind


class Noted(ModelDrafter):
    """Remembers what it was made of."""

    def __init__(self, model: Any, *others: Any, **named: Any) -> None:
        super().__init__(model, *others, **named)
        self.model, self.stats, self.named = model, others[-1], named


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offspec.drafts.model_draft.ModelDrafter", Noted)
    monkeypatch.setattr("offspec.drafts.base.ModelDrafter", Noted)


def index_of(text: Sequence[int]) -> SuffixIndex:
    return build_index(np.array(text, dtype=np.int32))


@pytest.mark.each_value
@pytest.mark.parametrize("has_files", [True, False])
@pytest.mark.parametrize("recycling", [True, False])
@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("draft", ["own", "lookup", "none"])
@pytest.mark.usefixtures("noted")
def test_who_guesses_beside_the_model(
    draft: str, lookup: bool, recycling: bool, has_files: bool, engines: dict[str, Engine]
) -> None:
    engine = engines[draft]
    if has_files:
        engine.models.index = index_of(engine.encode("for item in items"))
    kinds = {
        PromptLookup: lookup and draft != "none",
        Retrieval: has_files,
        TokenRecycling: draft == "lookup" or (recycling and draft == "own"),
    }
    expected = [kind for kind, is_wanted in kinds.items() if is_wanted]
    drafter = drafter_of(engine, lookup=lookup, recycling=recycling)
    if draft == "own" or expected:
        assert isinstance(drafter, Noted)
        assert [type(guesser) for guesser in drafter.named["guessers"]] == expected
    else:
        assert isinstance(drafter, NoDrafter)


@pytest.mark.parametrize("draft", ["own", "lookup"])
@pytest.mark.usefixtures("noted")
def test_what_one_request_learns_the_next_one_knows(draft: str, engines: dict[str, Engine]) -> None:
    engine = engines[draft]
    engine.models.index = index_of(engine.encode("for item in items"))
    for _ in range(2):
        drafter = drafter_of(engine)
        assert isinstance(drafter, Noted)
        assert drafter.stats is engine.draft_stats
        prompt_lookup, retrieval, *recycling = drafter.named["guessers"]
        assert prompt_lookup.reliability is engine.draft_stats.lookups
        assert retrieval.reliability is engine.draft_stats.retrievals
        assert recycling == ([engine.draft_stats.recycling] if draft == "lookup" else [])


def test_costs_are_learnt_from_the_first_request_on(engines: dict[str, Engine]) -> None:
    engine = engines["own"]
    steps(engine, GREEDY, SpeculationParams(budget=8))
    assert engine.draft_stats.costs.target.weight(9) > 0.1
    assert engine.draft_stats.costs.draft.weight(1) > 0.1


def test_the_first_pass_counts_the_rows_that_the_target_scores(engines: dict[str, Engine]) -> None:
    """Few where its cache is kept, though the draft has the whole text to read, which was not asked before."""
    engine, text = engines["own"], engines["own"].encode(PROMPT * 20)
    caches = engine.new_caches()
    assert len(list(engine.generate(text, replace(GREEDY, max_new_tokens=1), PLAIN, caches=caches))) == 1
    step = next(engine.generate(text, GREEDY, SpeculationParams(budget=4), caches=caches))
    assert (step.stats.num_prefilled_tokens, step.stats.num_drafted_tokens) == (1, 4)
    here, elsewhere = (engine.draft_stats.costs.target.weight(rows) for rows in (1 + 4, len(text) + 4))
    assert here > 0.05 > elsewhere == 0


def test_repetitions_join_the_models_tree(engines: dict[str, Engine]) -> None:
    """Of a text that says the same twice over, which no draft with random weights would."""
    engine = engines["own"]
    again = engine.encode("for item in self.items: ")
    with_lookup, without = (
        drafter_of(engine, budget=64, lookup=lookup).propose([*again, *again, *again[:2]], 4)
        for lookup in (True, False)
    )
    assert tuple(again[2:6]) in paths(with_lookup)
    assert tuple(again[2:6]) not in paths(without)
    assert len(set(with_lookup.tokens.tolist()) - set(again)) > 8, "nothing of the model's is left"


# ------------------------------------------------------------------------------------------------ a layer at a time


@pytest.mark.parametrize("tree", ["sequoia", "opt-tree"])
def test_trees_of_layers_see_the_noise_where_scoring_is_coupled(tree: str, engines: dict[str, Engine]) -> None:
    engine, found = engines["own"], list[TokenTree]()
    text, final = engine.encode(PROMPT), frozenset(range(0, 320, 3))
    for scoring in SCORINGS:
        found.append(drafter_of(engine, SAMPLED, final, tree=tree, scoring=scoring, budget=20).propose(text, 8))
        model, sampler = engine.new_caches().draft, sampler_of(engine, SAMPLED)
        assert model is not None
        speculation, coupled = SpeculationParams(20), scoring == "coupled"
        twin = (
            SequoiaDrafter(model, sampler, speculation, MeasuredAcceptance(), final, coupled=coupled)
            if tree == "sequoia"
            else OptTreeDrafter(model, sampler, speculation, final, coupled=coupled)
        ).propose(text, 8)
        np.testing.assert_array_equal(found[-1].tokens, twin.tokens)
        np.testing.assert_array_equal(found[-1].parents, twin.parents)
    assert found[0].tokens.tolist() != found[1].tokens.tolist()


@pytest.mark.parametrize("scoring", SCORINGS)
def test_sequoia_goes_on_measuring_from_request_to_request(scoring: Scoring, engines: dict[str, Engine]) -> None:
    engine, counts = engines["own"], list[int]()
    for _ in range(2):
        steps(engine, replace(SAMPLED, max_new_tokens=8), SpeculationParams(20, tree="sequoia", scoring=scoring))
        acceptance = engine.draft_stats.of_kind(MeasuredAcceptance)
        counts.append(acceptance.ranks(greedy=False, coupled=scoring == "coupled").num_nodes)
    assert counts[1] > counts[0] > 0
    assert acceptance.ranks(greedy=False, coupled=scoring != "coupled").num_nodes == 0


# ------------------------------------------------------------------------------------------------ looking up


def test_a_looked_up_file_saves_passes_and_leaves_the_text_alone(
    engines: dict[str, Engine], pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain = steps(engines["none"], SAMPLED, PLAIN)
    file = tmp_path / "said.txt"
    file.write_text(PROMPT + "".join(step.text for step in plain), encoding="utf-8")
    speculation = SpeculationParams(budget=16)
    without = steps(engines["lookup"], SAMPLED, speculation)
    found = steps(load(pair, "lookup", lookup_files=[file]), SAMPLED, speculation)
    assert ids(found) == ids(without) == ids(plain)
    assert len(found) < len(without)
