"""The target's first layers as its draft: the text is plain decoding's, each row is computed once,
drafting streams nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec import Engine, SamplingParams, SpeculationParams, Step
from offspec.checkpoints.exit_layers import ExitFile
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import open_model
from offspec.drafts.recall import RecallingText
from offspec.drafts.self_draft import OpenedSelf, SelfDraft
from offspec.drafts.without_model import NoDraft
from offspec.errors import MemoryLimitError
from offspec.loaded_target import LoadedTarget
from offspec.loaders.accelerators.capture import Work, as_it_is
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of
from offspec.model.block import Block
from offspec.model.cuda_graphs import RoundBuffers, is_static
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.early_exit import EarlyExit, SharedDraft, Trunk, shared_text
from offspec.model.pass_rows import TextRows
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import make_plan
from offspec.running.batch import Batch
from offspec.scheduler.trees.token_tree import ancestor_mask
from offspec.text.tokenizer import Tokenizer

from ...examples import examples
from ...pair import build_pair
from ...refusals import refused
from ...scheduler.fakes import build_tree, sampling_params

CPU = torch.device("cpu")
NUM_LAYERS, TOLERANCE = 4, 1e-5
PROMPT = "def area("
GetEngine = Callable[[int, bool, bool | None], Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pair(tmp_path_factory.mktemp("deep"), NUM_LAYERS).target


def load(folder: Path, num_resident: int = NUM_LAYERS) -> Decoder:
    """A target whose first layers stay and whose other ones come from disk."""
    files = open_model(folder, "fp32", [])
    costs = [layer.cost(files.dtype) for layer in files.stored.layers]
    slot = max(cost.slot_bytes for cost in costs)
    places = places_of(resident=range(num_resident), on_disk=range(num_resident, NUM_LAYERS))
    placement = Placement(places, Slots(2, 0, slot), (), Limits(None, 0), 0, 0)
    return load_decoder(files, placement, CPU, WeightSettings(has_far_embedding=True))


def copied(target: Decoder, index: int) -> dict[str, torch.Tensor]:
    with target.weights.layer(index) as layer:
        return {name: w.clone() for name, w in layer.items() if isinstance(w, torch.Tensor)}


@pytest.fixture(scope="module")
def get_engine(folder: Path) -> Iterator[GetEngine]:
    """A target and an exit after so many layers: the last layer, which guesses well the later it comes,
    or a bad one, or none.
    """
    resident, tokenizer = load(folder), Tokenizer.load(folder)
    streamed = {num_first: load(folder, num_first) for num_first in range(1, NUM_LAYERS)}

    @cache
    def get(num_first: int, is_streamed: bool, is_good: bool | None) -> Engine:
        layer = None if is_good is None else copied(resident, NUM_LAYERS - 1 if is_good else 0)
        target = streamed[num_first] if is_streamed else resident
        return Engine(LoadedTarget(target), tokenizer, SelfDraft(EarlyExit(target, num_first, layer)))

    yield get
    for target in (resident, *streamed.values()):
        target.weights.close()


def says(
    engine: Engine, params: SamplingParams, speculation: SpeculationParams | None = None, prompt: str = PROMPT
) -> list[int]:
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


@pytest.mark.slow
@examples(40)
@given(
    params=sampling_params(),
    num_first=st.integers(1, NUM_LAYERS - 1),
    is_streamed=st.booleans(),
    is_good=st.sampled_from([True, False, None]),
    speculation=st.builds(
        SpeculationParams,
        budget=st.sampled_from([16, 3, 64, 1, None]),
        width=st.sampled_from([None, 2, 5]),
        tree=st.sampled_from(["best-first", "best-first", "sequoia", "opt-tree"]),
        scoring=st.sampled_from(["coupled", "specexec"]),
        stopping=st.sampled_from(["default", "thompson", "thompson-calibrated"]),
        lookup=st.booleans(),
        recycling=st.booleans(),
        reuse=st.booleans(),
    ),
    seed=st.integers(0, 3),
)
def test_the_text_is_that_of_plain_decoding(
    get_engine: GetEngine,
    params: SamplingParams,
    num_first: int,
    is_streamed: bool,
    is_good: bool | None,
    speculation: SpeculationParams,
    seed: int,
) -> None:
    params = replace(params, max_new_tokens=10, seed=seed, ignore_eos=True)
    plain = get_engine(num_first, False, is_good).with_draft(NoDraft())
    assert says(get_engine(num_first, is_streamed, is_good), params, speculation) == says(plain, params)


GREEDY = SamplingParams(14, seed=0, ignore_eos=True)
SAMPLED = SamplingParams(10, temperature=1.0, seed=1, ignore_eos=True)


@pytest.mark.each_value
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize(("num_first", "is_good"), [(1, True), (3, True), (2, None)])
def test_every_row_goes_through_the_first_layers_once(
    get_engine: GetEngine,
    monkeypatch: pytest.MonkeyPatch,
    num_first: int,
    is_good: bool | None,
    lookup: bool,
    params: SamplingParams,
) -> None:
    """A row is a beginning of the text or of a guess of how it goes on: none comes twice, whoever asks for it."""
    engine = get_engine(num_first, False, is_good)
    text = engine.encode(PROMPT) + says(engine, params)
    came: list[tuple[int, ...]] = []
    through = Counter[int]()
    advance, compute = Trunk.advance, Block.forward

    def watched(self: Trunk, rows: TextRows) -> None:
        length, num_chain = self.cache.length, len(rows.chain)
        came.extend(tuple(text[: length + i + 1]) for i in range(num_chain))
        pending = np.concatenate((self._tokens, rows.tokens))
        masks = ancestor_mask(rows.parents, rows.num_before)
        came.extend((*text[: length + num_chain], *pending[row].tolist()) for row in masks)
        advance(self, rows)

    def counted(self: Block, x: torch.Tensor, *rest: object) -> torch.Tensor:
        if self in engine.target.blocks:
            through[self.index] += len(x)
        return compute(self, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Trunk, "advance", watched)
    monkeypatch.setattr(Block, "forward", counted)
    steps = list(engine.generate(PROMPT, params, SpeculationParams(16, lookup=lookup)))
    assert [count for _, count in Counter(came).most_common(1)] == [1]
    assert {through[layer] for layer in range(num_first)} == {len(came)}
    sent = steps[-1].stats.num_drafted_tokens + len(text) - 1 - sum(step.num_accepted for step in steps)
    assert {through[layer] for layer in range(num_first, NUM_LAYERS)} == {sent}
    assert {tuple(text[:end]) for end in range(1, len(text))} <= set(came)


@pytest.mark.parametrize(("num_first", "is_good"), [(1, True), (2, None)])
def test_drafting_streams_nothing(
    get_engine: GetEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, num_first: int, is_good: bool | None
) -> None:
    engine, score = get_engine(num_first, True, is_good), RecallingText.score
    weights, moved = engine.target.weights, list[int]()

    def watched(self: RecallingText, *args: object) -> torch.Tensor:
        before = weights.bytes_streamed
        logits = score(self, *args)  # type: ignore[arg-type]
        moved.append(weights.bytes_streamed - before)
        return logits

    monkeypatch.setattr(RecallingText, "score", watched)
    before = weights.bytes_streamed
    *_, last = engine.generate(PROMPT, GREEDY, SpeculationParams(16))
    assert len(moved) > last.stats.num_passes
    assert set(moved) == {0}
    layers = open_model(folder, "fp32", []).stored.layers[num_first:]
    per_pass = sum(layer.record.read_bytes for layer in layers)  # of the other layers, walked once
    assert weights.bytes_streamed - before == last.stats.num_passes * per_pass > 0


@pytest.mark.parametrize(("reuse", "is_good"), [(False, True), (True, None)])
def test_all_caches_are_those_of_a_fresh_prefill(get_engine: GetEngine, reuse: bool, is_good: bool | None) -> None:
    engine = get_engine(2, False, is_good)
    caches, text = engine.new_caches(), engine.encode(PROMPT)
    for step in engine.generate(text, SAMPLED, SpeculationParams(16, reuse=reuse), caches=caches):
        text = text + step.token_ids
        target, draft = caches.target, caches.draft
        assert isinstance(draft, SharedDraft)
        trunk = draft.trunk
        assert target.length == len(text) - 1
        nothing = build_tree([])
        fresh = CachedDecoder(engine.target)
        fresh.score(text[: trunk.cache.length], nothing.tokens, nothing.depths, nothing.parents)
        for layer in range(NUM_LAYERS):
            ours = trunk.cache if layer < 2 else target.cache
            for found, expected in zip(
                ours.read(layer, ours.length), fresh.cache.read(layer, ours.length), strict=True
            ):
                torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        assert trunk.num_hidden <= trunk.cache.size - min(target.length, draft.length), (
            "hidden states nobody has still to see"
        )


@pytest.mark.slow
def test_a_text_that_was_left_and_changed_goes_on_as_a_fresh_one(get_engine: GetEngine) -> None:
    engine = get_engine(2, False, True)
    caches = engine.new_caches()
    other = engine.encode(PROMPT)
    for cut, prompt in enumerate([PROMPT, "class"]):
        long = replace(SAMPLED, max_new_tokens=12)
        request = engine.generate(prompt, long, SpeculationParams(16), caches=caches)
        for _ in range(cut + 1):
            next(request)
        request.close()
        other = caches.text[: len(caches.text) - cut]
        found = [t for s in engine.generate(other, SAMPLED, SpeculationParams(16), caches=caches) for t in s.token_ids]
        assert found == [t for s in engine.generate(other, SAMPLED, SpeculationParams(0)) for t in s.token_ids]


@pytest.mark.slow
def test_an_interrupted_pass_does_not_disturb_the_next(get_engine: GetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, real = get_engine(2, False, True), Block.forward
    caches, expected = engine.new_caches(), says(engine, SAMPLED, SpeculationParams(0))
    for stop_at in (1, 8, 22):
        calls: list[int] = []

        def interrupted(self: Block, *rest: object, calls: list[int] = calls, stop_at: int = stop_at) -> torch.Tensor:
            calls.append(self.index)
            if len(calls) > stop_at:
                raise KeyboardInterrupt
            return real(self, *rest)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(Block, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(engine.generate(PROMPT, SAMPLED, SpeculationParams(16), caches=caches))
        found = [t for s in engine.generate(PROMPT, SAMPLED, caches=caches) for t in s.token_ids]
        assert found == expected


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_static_rounds_through_the_first_layers(
    get_engine: GetEngine, monkeypatch: pytest.MonkeyPatch, is_streamed: bool, params: SamplingParams
) -> None:
    """As captured on a GPU, also if the embedding and the layers behind the exit are elsewhere: the same trees."""
    engine, layers, recorded = get_engine(2, is_streamed, True), range(2), list[tuple[int, int]]()
    assert is_static(engine.target, layers)

    def record(work: Any) -> Work:
        recorded.append(work.args)
        return as_it_is(work)

    fresh = engine.with_draft(engine.draft)  # nothing learnt
    *_, plain = fresh.generate(PROMPT, params, SpeculationParams(16), caches=fresh.new_caches(400))
    buffers = RoundBuffers(engine.target, record, layers)
    monkeypatch.setattr("offspec.model.early_exit.USES_BEFORE_RECORDING", 1)
    monkeypatch.setattr("offspec.drafts.self_draft.shared_text", lambda *args: shared_text(*args[:3], buffers))
    fresh = engine.with_draft(engine.draft)
    caches = fresh.new_caches(400)
    *_, static = fresh.generate(PROMPT, params, SpeculationParams(16), caches=caches)
    assert caches.text == [*engine.encode(PROMPT), *says(engine, params, SpeculationParams(0))]
    assert static.stats.num_passes == plain.stats.num_passes
    assert recorded


def test_the_first_layers_are_planned_to_stay(folder: Path) -> None:
    files = open_model(folder, "fp32", [])
    early, layer_bytes = ExitFile(Path("exit"), 1, 1), files.stored.layers[0].cost(files.dtype).resident_bytes

    def features(exit_file: ExitFile | None) -> list[OpenedSelf]:
        return [] if exit_file is None else [OpenedSelf(files, exit_file.exit_layer, exit_file, [])]

    def least(exit_file: ExitFile | None) -> int:
        """The least RAM that is not refused."""
        low, high = 0, 2**30
        while high - low > 256:
            middle = (low + high) // 2
            try:
                make_plan(files, features(exit_file), Limits(None, middle), MemoryOptions(context=64), 0)
                high = middle
            except MemoryLimitError:
                low = middle
        return high

    plan = make_plan(files, features(early), Limits(None, least(early)), MemoryOptions(context=64), 0)
    assert plan.placement.resident[0] == 0
    assert plan.placement.streamed
    assert least(early) > least(None) + layer_bytes
    with refused(MemoryLimitError, "exit layer", "`ram`"):
        make_plan(files, features(early), Limits(None, least(early) - 512), MemoryOptions(context=64), 0)


# ------------------------------------------------------------------------------------------------ several texts


@pytest.mark.slow
def test_texts_that_share_passes_are_plain_decodings(get_engine: GetEngine) -> None:
    """Also one that is paused, with its first layers' entries, and resumed."""
    engine, prompts = get_engine(2, True, True), ("def area(", "class Tree:\n    def", "x = 1", "import")
    params = [SamplingParams(10, temperature=0.7 * (i % 2), seed=i, ignore_eos=True) for i in range(len(prompts))]
    batch = Batch(engine.models, 3)
    tickets = {
        batch.add(engine.check_request(prompts[i], params[i], SpeculationParams(8))): i for i in range(len(prompts))
    }
    found: list[list[int]] = [[] for _ in prompts]
    for number in count():
        if batch.is_idle:
            break
        if number in (1, 3, 4):
            batch.pause_last()
        for ticket, outcome in batch.step():
            assert isinstance(outcome, Step), outcome
            found[tickets[ticket]] += outcome.token_ids
    for prompt, own, tokens in zip(prompts, params, found, strict=True):
        alone = engine.generate(prompt, own, SpeculationParams(budget=0))
        assert tokens == [token for step in alone for token in step.token_ids]
