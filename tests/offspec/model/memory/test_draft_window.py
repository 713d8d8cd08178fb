"""A draft's text with a window: which entries stay, where they are, and that the target's text is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.errors import UsageError
from offspec.model.cuda_graphs import TreeGraphs
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.memory.chunk_attention import NUM_SINKS
from offspec.model.memory.draft_window import WindowedText, context_window, most_entries
from offspec.model.memory.text_pool import TextPool
from offspec.scheduler.pace.trials import WindowTrials
from offspec.scheduler.params import DRAFT_ROWS, MAX_ROWS

from ....fakes import TinyModel
from ....pair import Pair, build_pair, variant
from ..test_decoder import NO_NODES, Tree, random_tokens

GetModel = Callable[[str], TinyModel]
WINDOW = 64
TEXT = random_tokens(400, 5)
PARAMS = SamplingParams(20, ignore_eos=True)


def kept(decoder: Decoder, tokens: Sequence[int], chain: Sequence[int]) -> torch.Tensor:
    """The logits after `chain`, of a text that has only `tokens` before it."""
    text = CachedDecoder(decoder)
    text.score(tokens, *NO_NODES)
    return text.score(chain, *NO_NODES)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_a_short_text_is_as_without_a_window(tiny_model: GetModel, family: str) -> None:
    decoder, tree = tiny_model(family).decoder(), Tree(random_tokens(9, 7), [-1, -1, 0, 0, 1, 2, 2, 5, 6])
    plain, windowed = CachedDecoder(decoder), WindowedText(CachedDecoder(decoder), WINDOW)
    for text in (plain, windowed):
        text.reserve(200)
    for chain in (TEXT[:40], TEXT[40:90], [7]):
        assert torch.equal(*(text.score(chain, *tree.round(0, 9)) for text in (plain, windowed)))
        for text in (plain, windowed):
            text.keep([0, 2], [5, 7])
            text.keep([0])
            text.truncate(text.length - 1)
        assert plain.length == windowed.length


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3"])
def test_of_a_long_chain_the_first_and_last_tokens_are_read(tiny_model: GetModel, family: str) -> None:
    """At positions far behind those of the same tokens alone, which RoPE does not notice."""
    decoder = tiny_model(family).decoder()
    text = WindowedText(CachedDecoder(decoder), WINDOW)
    found = text.score(TEXT, *NO_NODES)
    short = [*TEXT[:NUM_SINKS], *TEXT[-WINDOW:]]
    torch.testing.assert_close(found, kept(decoder, short[:-1], short[-1:]), atol=2e-4, rtol=1e-3)
    assert text.length == len(TEXT)


@pytest.mark.parametrize("static", [False, True])
def test_a_growing_text_keeps_the_window(tiny_model: GetModel, static: bool) -> None:
    """The decoder has one layer of attention: a kept entry does not know what was dropped before it."""
    decoder = tiny_model("llama-gqa").decoder()
    decoder = Decoder(decoder.config.only_layers([0]), decoder.weights, dtype=decoder.dtype, device=decoder.device)
    own = TreeGraphs(decoder, 300).text(300) if static else CachedDecoder(decoder)
    text, read, sizes = WindowedText(own, WINDOW), 10, set[int]()
    text.reserve(4096)
    assert own.cache.capacity == (max(300, most_entries(WINDOW) + MAX_ROWS))
    text.score(TEXT[:read], *NO_NODES)
    while read < len(TEXT) - 9:
        text.score(TEXT[read : read + 2], np.array(TEXT[read + 2 : read + 5]), np.arange(1, 4), np.arange(-1, 2))
        text.keep([0, 1], [2])  # two of three nodes, the third stays pending
        text.keep([0])
        read += 5
        assert text.length == read
        sizes.add(own.cache.length)
        first = own.cache.length - NUM_SINKS  # entries of the window
        if own.cache.num_dropped:
            assert first >= WINDOW
            expected = [*TEXT[:NUM_SINKS], *TEXT[read - first : read]]
            chain = TEXT[read : read + 1]
            found = text.score(chain, *NO_NODES)
            torch.testing.assert_close(found, kept(decoder, expected, chain), atol=2e-4, rtol=1e-3)
            read += 1
    assert most_entries(WINDOW) - 5 < max(sizes) <= most_entries(WINDOW)
    assert own.cache.num_dropped > 200
    assert own.cache.positions[: own.cache.length].tolist() == [
        own.cache.num_dropped + slot for slot in range(own.cache.length)
    ]


def test_a_text_is_cut_back(tiny_model: GetModel) -> None:
    decoder = tiny_model("llama-gqa").decoder()
    text = WindowedText(CachedDecoder(decoder), WINDOW)
    text.score(TEXT[:300], *NO_NODES)
    text.truncate(290)
    assert text.length == 290
    expected = kept(decoder, [*TEXT[:NUM_SINKS], *TEXT[300 - WINDOW : 290]], TEXT[290:293])
    torch.testing.assert_close(text.score(TEXT[290:293], *NO_NODES), expected, atol=2e-4, rtol=1e-3)
    for length in (200, 2, 0):  # too few entries are left, or none: it is read again
        text.truncate(length)
        assert text.length == 0
        text.score(TEXT[: length + 30], *NO_NODES)
        assert text.length == length + 30
    text.truncate(25)
    assert text.length == 25  # nothing was dropped of a short text


def test_states_before_a_long_chains_end_are_those_of_its_end(tiny_model: GetModel) -> None:
    decoder = tiny_model("llama-gqa").decoder()
    text = WindowedText(CachedDecoder(decoder), WINDOW)
    states = text.states(TEXT, *NO_NODES, before=100)
    assert len(states) == WINDOW
    assert torch.equal(decoder.head(states[-1:]), WindowedText(CachedDecoder(decoder), WINDOW).score(TEXT, *NO_NODES))


# ------------------------------------------------------------------------------------------------ with a target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=2048)


PROMPT = [40 + (number * 7) % 90 for number in range(400)]


def tokens_of(engine: Engine, speculation: SpeculationParams | None = None) -> tuple[list[int], float]:
    steps = list(engine.generate(PROMPT, PARAMS, speculation))
    return [token for step in steps for token in step.token_ids], steps[-1].stats.tokens_per_pass


@pytest.mark.slow
def test_the_text_is_plain_decodings(pair: Pair) -> None:
    engine = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", draft_window=64)
    plain, _ = tokens_of(engine, SpeculationParams(budget=0))
    found, per_pass = tokens_of(engine, SpeculationParams(budget=16, lookup=False, recycling=False))
    assert found == plain
    assert per_pass > 1.3
    assert any("the last 64 tokens" in note.text for note in engine.notes)
    texts = [PROMPT[:70], PROMPT[100:250]]
    alone = [[t for step in engine.generate(text, PARAMS) for t in step.token_ids] for text in texts]
    together: list[list[int]] = [[] for _ in texts]
    for index, step in engine.generate_many(texts, PARAMS):
        together[index] += step.token_ids
    assert together == alone


@pytest.mark.slow
def test_a_draft_with_a_short_context_goes_on_beyond_it(pair: Pair, tmp_path: Path) -> None:
    """Without a window it would not draft at all there, as with `draft_window` above its context."""
    short = variant(pair.draft, tmp_path / "short", max_position_embeddings=256)
    speculation = SpeculationParams(budget=16, lookup=False, recycling=False)
    engine = Engine.load(str(pair.target), draft=str(short), device="cpu")
    assert engine.draft.decoder is not None
    assert (window := context_window(engine.draft.decoder.config)) is not None
    assert most_entries(window) + SpeculationParams.max_depth <= 256
    found, per_pass = tokens_of(engine, speculation)
    assert found == tokens_of(engine, SpeculationParams(budget=0))[0]
    assert per_pass > 1.5


@pytest.mark.parametrize(("window", "texts"), [(64, 8), (None, 4)])
def test_the_plan_counts_each_texts_window(pair: Pair, window: int | None, texts: int) -> None:
    engine = Engine.load(
        str(pair.target), draft=str(pair.draft), device="cpu", draft_window=window, context=2048, texts=texts
    )
    assert engine.plan is not None
    planned = {item.name: item.on_device for item in engine.plan.placement.items}["draft KV cache"]
    assert engine.draft.decoder is not None
    of_token = CachedDecoder(engine.draft.decoder, 1).cache.nbytes
    shared = engine.plan.reservation.num_tokens
    entries = shared if window is None else min(shared, texts * most_entries(window))
    assert planned == (entries + max(MAX_ROWS, texts * DRAFT_ROWS)) * of_token
    engine.close()


def test_a_window_that_no_text_outgrows_is_none(pair: Pair) -> None:
    """So that a server copies the draft's entries between texts, too."""
    engine = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", draft_window=512, context=512)
    caches = engine.new_caches()
    assert type(caches.draft) is CachedDecoder


@pytest.mark.slow
def test_requests_with_long_texts_find_out_whether_a_window_pays(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they choose, and whichever caches they have, the text is plain decoding's."""
    monkeypatch.setattr("offspec.drafts.model_draft.TRIED_WINDOW", 64)
    monkeypatch.setattr(WindowTrials, "PASSES", 3)
    engine = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="fp32", context=1024)
    pool, params = TextPool(engine.new_caches, 2**30), SamplingParams(12, temperature=0.7, seed=5, ignore_eos=True)
    windows, prompt, budget = [], PROMPT[:200], SpeculationParams(budget=16)
    for number in range(6):
        caches = pool.borrow(prompt)
        steps = engine.generate(prompt, params, budget, caches=caches)
        found = [token for step in steps for token in step.token_ids]
        plain = engine.generate(prompt, params, SpeculationParams(budget=0))
        assert found == [token for step in plain for token in step.token_ids]
        assert isinstance(caches.draft, WindowedText)
        windows.append(caches.draft.window)
        pool.give_back(caches)
        prompt = [*prompt, *found[:7]] if number % 2 else PROMPT[number : 210 + number]
    assert set(windows) == {None, 64}
    assert windows[0] is None
    short = engine.new_caches()
    list(engine.generate(PROMPT[:100], params, budget, caches=short))
    assert isinstance(short.draft, WindowedText)
    assert short.draft.window is None
    engine.close()


def test_a_window_is_set_and_removed(tiny_model: GetModel) -> None:
    """Dropped entries are computed again: the next chain is the whole text."""
    decoder = tiny_model("llama-gqa").decoder()
    tokens = random_tokens(200)
    text = WindowedText(CachedDecoder(decoder), None)
    expected = CachedDecoder(decoder).score(tokens, *NO_NODES)
    assert torch.equal(text.score(tokens, *NO_NODES), expected)
    text.begin(tokens, 64)
    assert text.length == 200
    text.score(tokens[:3], *NO_NODES)
    assert text.cache.length < 100
    text.truncate(200)
    text.begin(tokens, None)
    assert text.length == 0
    assert text.max_context == decoder.config.max_context
    assert torch.equal(text.score(tokens, *NO_NODES), expected)


def test_what_does_not_fit_is_refused(pair: Pair) -> None:
    with pytest.raises(UsageError, match="at least 64"):
        Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", draft_window=10)
    engine = Engine.load(str(pair.target), draft="lookup", device="cpu", draft_window=64)
    assert any("does nothing" in note.text and note.advice for note in engine.notes)
