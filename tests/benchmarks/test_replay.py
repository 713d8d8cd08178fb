"""A replayed drafter is judged as the engine judges it, on a clock that says what was asked of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduling.replay import (
    ClockedModel,
    Costs,
    Recording,
    Replayed,
    VirtualClock,
    is_true,
    record,
    replay,
    walk,
)
from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.recall import Recall, RecallingText
from offspec.model.decoder import CachedDecoder
from offspec.research.opt_tree import OptTreeDrafter
from offspec.research.sequoia import MeasuredAcceptance, SequoiaDrafter
from offspec.scheduler.drafting.drafter import Drafter, DraftRequest, ExactDrafter, NoDrafter
from offspec.scheduler.drafting.estimates import RunningEstimates
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict, verify_exactly

from ..scheduler.fakes import (
    RuleModel,
    build_tree,
    estimates_of,
    few,
    generate,
    plain_text,
    random_rule,
    resembling,
    sampling_params,
)

NUM_TOKENS = 16
GREEDY = SamplingParams(NUM_TOKENS, temperature=0.0, seed=3, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0)
COSTS = Costs(stream_s=10.0, pass_launch_s=4.0, pass_row_s=1.0, round_launch_s=0.5, round_row_s=0.25)

# ------------------------------------------------------------------------------------------------ the built-in pair


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("builtin", device="cpu", dtype="fp32") as loaded:
        yield loaded


def replayed(
    engine: Engine,
    recording: Recording,
    speculation: SpeculationParams,
    estimates: RunningEstimates,
    recall: Recall | None = None,
) -> Replayed:
    assert engine.draft.decoder is not None
    clock, sampler = VirtualClock(), recording.sampler(engine.target.config.vocab_size)
    if recall is None:
        model = ClockedModel(CachedDecoder(engine.draft.decoder), clock, COSTS.round_s)
        drafter = ModelDrafter(model, DraftRequest(sampler), speculation, estimates)
        return replay(recording, drafter, sampler, clock, COSTS, model)
    text = RecallingText(CachedDecoder(engine.draft.decoder), engine.target, recall)
    model = ClockedModel(text, clock, COSTS.round_s)
    drafter = ModelDrafter(model, DraftRequest(sampler), speculation, estimates, corrector=text)
    return replay(recording, drafter, sampler, clock, COSTS, model, CachedDecoder(engine.target))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("recalls", [True, False], ids=["recall", "no-recall"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_replayed_passes_are_the_engines(engine: Engine, params: SamplingParams, recalls: bool, tmp_path: Path) -> None:
    prompts, speculation = builtin.prompts()[:1], SpeculationParams(16, lookup=False, recall=recalls, overlap=False)
    fresh, estimates = engine.with_draft(engine.draft), estimates_of()
    assert engine.draft.decoder is not None
    recall = Recall(engine.draft.decoder, engine.target) if recalls else None
    for index, recording in enumerate(record(engine, prompts, params, tmp_path)):
        assert recording.params == replace(params, seed=3 + index)
        *_, last = fresh.generate(prompts[index], recording.params, speculation)
        found = replayed(engine, recording, speculation, estimates, recall)
        assert found.num_tokens == last.stats.num_tokens == NUM_TOKENS
        assert found.num_passes == last.stats.num_passes < NUM_TOKENS
        assert found.num_drafted_tokens == last.stats.num_drafted_tokens
        assert found.tokens_per_pass == last.stats.tokens_per_pass
    greedy = params.temperature == 0
    assert estimates.calibration.sharpness(greedy=greedy).value == fresh.sharpness(greedy=greedy)


@pytest.mark.slow
def test_a_text_is_recorded_once(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(SAMPLED, max_new_tokens=5)
    prompts = builtin.prompts()[:2]
    first = record(engine, prompts, params, tmp_path / "texts")
    assert [len(recording.token_ids) for recording in first] == [5, 5]
    calls: list[Any] = []
    monkeypatch.setattr(engine, "generate", lambda *asked: calls.append(asked) or Engine.generate(engine, *asked))
    assert record(engine, prompts, params, tmp_path / "texts") == first
    assert calls == []
    assert record(engine, prompts[:1], replace(params, seed=9), tmp_path / "texts") != first[:1]
    assert len(calls) == 1


@pytest.mark.slow
def test_a_recording_that_is_not_the_targets_is_made_anew(engine: Engine, tmp_path: Path) -> None:
    """That of other weights, or one that was cut short."""
    params = replace(SAMPLED, max_new_tokens=5)
    true = record(engine, builtin.prompts()[:1], params, tmp_path)
    (file,) = tmp_path.iterdir()
    said = json.loads(file.read_text())
    said["token_ids"][2] += 1
    for spoilt in (json.dumps(said), file.read_text()[:40]):
        file.write_text(spoilt)
        assert record(engine, builtin.prompts()[:1], params, tmp_path) == true
        assert json.loads(file.read_text())["token_ids"] == true[0].token_ids
    assert is_true(engine, true[0])
    for place in range(5):
        wrong = list(true[0].token_ids)
        wrong[place] += 1
        assert not is_true(engine, replace(true[0], token_ids=wrong))


# ------------------------------------------------------------------------------------------------ any drafter

VOCAB_SIZE, PROMPT, SEED = 4, [3, 0, 2], 11
TARGET = random_rule(VOCAB_SIZE, seed=0)


class Witness(ExactDrafter):
    """A drafter that writes down what was asked of it and what it was told."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.asked: list[tuple[list[int], int]] = []
        self.told: list[tuple[list[int], Verdict]] = []

    def propose(self, text: list[int], max_depth: int) -> TokenTree:
        self.asked.append((list(text), max_depth))
        return self.drafter.propose(text, max_depth)

    @property
    def wants_overlap(self) -> bool:
        return self.drafter.wants_overlap

    def extend(self, is_over: Callable[[], bool]) -> None:
        self.drafter.extend(is_over)

    def observe(self, done: TargetPass) -> None:
        self.told.append((done.tree.tokens.tolist(), done.verdict))
        self.drafter.observe(done)


def drafter_of(kind: str, model: Any, sampler: Sampler) -> Drafter:
    speculation = SpeculationParams(budget=7, max_depth=5, overlap=False)
    if kind == "model":
        return ModelDrafter(model, DraftRequest(sampler), speculation, estimates_of())
    if kind == "sequoia":
        return SequoiaDrafter(model, sampler, speculation, MeasuredAcceptance(), coupled=True)
    return OptTreeDrafter(model, sampler, speculation, threshold=0.05) if kind == "opt-tree" else NoDrafter()


@pytest.mark.slow
@few
@given(
    kind=st.sampled_from(["model", "sequoia", "opt-tree", "none"]), params=sampling_params(), seed=st.integers(0, 99)
)
def test_a_drafter_cannot_tell_a_recording_from_a_target(kind: str, params: SamplingParams, seed: int) -> None:
    draft_rule = resembling(TARGET, 1, 0.7)
    sampler, draft = Sampler(params, seed, VOCAB_SIZE), RuleModel(draft_rule, VOCAB_SIZE)
    real, target = Witness(drafter_of(kind, draft, sampler)), RuleModel(TARGET, VOCAB_SIZE)
    words = generate(target, real, sampler, PROMPT, 20)
    recording = Recording(PROMPT, words, 20, replace(params, seed=seed))
    clock, sampler = VirtualClock(), recording.sampler(VOCAB_SIZE)
    model = ClockedModel(RuleModel(draft_rule, VOCAB_SIZE), clock, COSTS.round_s)
    fake = Witness(drafter_of(kind, model, sampler))
    found = replay(recording, fake, sampler, clock, COSTS, model)
    assert (fake.asked, fake.told) == (real.asked, real.told)
    assert (found.num_tokens, found.num_passes, found.num_rounds) == (20, len(real.told), len(draft.batches))
    assert found.num_drafted_tokens == sum(target.batches)
    num_draft_rows = sum(map(len, draft.chains)) + sum(draft.batches)
    assert found.draft_s == pytest.approx(0.5 * found.num_rounds + 0.25 * num_draft_rows)
    target_rows = [len(chain) + nodes for chain, nodes in zip(target.chains, target.batches, strict=True)]
    assert found.total_s == pytest.approx(found.draft_s + sum(max(10.0, 4.0 + rows) for rows in target_rows))


def test_a_text_that_ended_by_itself() -> None:
    """Depth is what the limit allows; the walk does not go beyond the end, though the tree does."""
    words = plain_text(TARGET, GREEDY, 0, PROMPT, 4)
    recording = Recording(PROMPT, words, 9, GREEDY)
    sampler = recording.sampler(VOCAB_SIZE)
    perfect = Witness(drafter_of("opt-tree", RuleModel(TARGET, VOCAB_SIZE), sampler))
    found = replay(recording, perfect, sampler, VirtualClock(), COSTS)
    assert found.num_tokens == 4
    assert perfect.asked[0] == (PROMPT, 8)
    assert [token for _, verdict in perfect.told for token in verdict.tokens] == words


# ------------------------------------------------------------------------------------------------ parts


@few
@given(
    paths=st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=9), ahead=st.lists(st.integers(0, 2), min_size=6)
)
def test_the_walk_is_the_exact_walk(paths: list[list[int]], ahead: list[int]) -> None:
    """Of a target that is certain of what it says."""
    tree = build_tree(paths)
    model = RuleModel(lambda prefix: 9.0 * (np.arange(3) == ahead[len(prefix) - 1]), 3)
    logits = model.score([0], tree.tokens, tree.depths, tree.parents)
    assert walk(tree, ahead) == verify_exactly(tree, logits, Sampler(GREEDY, 0, 3), 1)
