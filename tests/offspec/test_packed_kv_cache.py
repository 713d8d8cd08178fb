"""Texts on packed KV caches that are kept, cut back and copied. `test_texts` has plain decoding's beside drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offspec import KV_CACHES, Engine, SamplingParams, SpeculationParams
from offspec.errors import UsageError
from offspec.loaders.streaming.link import CopyStream
from offspec.model.memory.kv_formats import KV_FORMATS
from offspec.model.memory.kv_in_ram import EntriesInRam
from offspec.model.memory.text_pool import TextPool
from offspec.session import Session

from ..pair import Pair, build_pair
from ..refusals import refused

GetEngine = Callable[[str, str], Engine]
PLAIN = SpeculationParams(budget=0)
PROMPTS = ("def area(", "for i in range(10):\n    print(i)\n" * 2, "x = 1")
PARAMS = (
    SamplingParams(8, ignore_eos=True),
    SamplingParams(6, temperature=1.0, seed=2),
    SamplingParams(9, temperature=0.7, top_p=0.9, repetition_penalty=1.3, seed=3),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), 3, max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine_of(pair: Pair) -> Iterator[GetEngine]:
    """In fp32, so that texts are equal and not only up to near-ties."""
    found = dict[tuple[str, str], Engine]()

    def get(draft: str, kv_cache: str) -> Engine:
        if (draft, kv_cache) not in found:
            more: dict[str, Any] = {"exit_layer": 1} if draft == "self" else {}
            name = str(pair.draft) if draft == "own" else draft
            found[draft, kv_cache] = Engine.load(
                str(pair.target), draft=name, device="cpu", dtype="fp32", kv_cache=kv_cache, **more
            )
        return found[draft, kv_cache]

    yield get
    for engine in found.values():
        engine.close()


def said(
    engine: Engine, prompt: str, params: SamplingParams, speculation: SpeculationParams | None = None
) -> list[int]:
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_caches_with_entries_in_ram_are_kept(
    kv_cache: str, engine_of: GetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has but one memory, which here is two, the device's with slots for the entries of two layers of three."""
    engine = engine_of("own", kv_cache)
    expected = said(engine, PROMPTS[1], PARAMS[1])
    far = EntriesInRam(frozenset(range(3)), KV_FORMATS[kv_cache], CopyStream(engine.target.device))
    monkeypatch.setattr(engine.target, "entries_in_ram", far)
    caches = engine.new_caches()
    for _ in range(2):
        steps = list(engine.generate(PROMPTS[1], PARAMS[1], caches=caches))
        assert [token for step in steps for token in step.token_ids] == expected
    assert steps[-1].stats.num_prefilled_tokens == 1
    assert far.copies.num_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["own", "self"])
def test_long_prompts_take_several_passes(draft: str, engine_of: GetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose chunks are the same, so that the text is; only the last one has a tree, and counts as a pass."""
    engine = engine_of(draft, "8")
    params, prompt = SamplingParams(5, ignore_eos=True, logprobs=1, prompt_logprobs=True), list(range(40, 90))
    monkeypatch.setattr("offspec.model.pass_rows.CHUNK_ROWS", 8)
    expected = list(engine.generate(prompt, params))
    for module in ("offspec.model.decoder", "offspec.running.passes"):
        monkeypatch.setattr(f"{module}.PASS_ROWS", 16)
    found = list(engine.generate(prompt, params))
    tokens = [[token for step in steps for token in step.token_ids] for steps in (expected, found)]
    assert tokens[0] == tokens[1]
    assert [each.token for each in found[0].prompt_logprobs] == prompt[1:]
    for one, other in zip(expected[0].prompt_logprobs, found[0].prompt_logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    assert found[0].stats.num_passes == 1
    together: list[list[int]] = [[] for _ in range(2)]
    for index, step in engine.generate_many([prompt, prompt[::-1]], params, max_texts=2):
        together[index] += step.token_ids
    assert together[0] == tokens[0]


def test_a_conversation_says_what_a_fresh_run_says(engine_of: GetEngine) -> None:
    """Its cache is cut back and continued."""
    engine = engine_of("own", "4")
    session = Session(engine)
    for message in ("def area(", "hi", "for item in"):
        for _ in session.reply(message, SamplingParams(6, temperature=0.6, seed=3)):
            pass
        ids = session.encode(session.turns)
        fresh = list(engine.generate(ids, SamplingParams(6, temperature=0.6, seed=3), PLAIN))
        tokens = [token for step in fresh for token in step.token_ids]
        reply = session.turns[-1]
        assert reply.token_ids == (tokens[:-1] if fresh[-1].finish_reason == "eos" else tokens)


def test_copied_entries_give_the_same_text(engine_of: GetEngine) -> None:
    engine = engine_of("own", "8")
    first, other = ([40 + (number * step) % 90 for number in range(64)] for step in (1, 7))
    pool, params = TextPool(engine.new_caches, 2**30), SamplingParams(6, ignore_eos=True, seed=1, temperature=1)
    for prompt in (first, other, [*first, *other[:8]]):
        caches = pool.borrow(prompt)
        found = [token for step in engine.generate(prompt, params, caches=caches) for token in step.token_ids]
        pool.give_back(caches)
        assert found == [token for step in engine.generate(prompt, params) for token in step.token_ids]
    assert pool.num_parked > 0


@pytest.mark.slow
def test_formats_change_the_text(engine_of: GetEngine) -> None:
    """Of few bits, over many tokens; otherwise the option would have no effect."""
    params = SamplingParams(40, temperature=1, seed=1, ignore_eos=True)
    texts = [said(engine_of("own", kv_cache), "x = 1", params, PLAIN) for kv_cache in ("16", "4")]
    assert texts[0] != texts[1]


def test_the_plan_counts_the_caches_bytes(engine_of: GetEngine) -> None:
    for kv_cache in KV_CACHES:
        engine = engine_of("lookup", kv_cache)
        assert engine.plan is not None
        cache = engine.new_caches().target.cache
        cache.reserve(engine.plan.kv_entries)
        (item,) = (item for item in engine.plan.placement.items if item.name == "KV cache")
        assert cache.nbytes == item.on_device


def test_an_unknown_format_is_refused(pair: Pair) -> None:
    with refused(UsageError, "`kv_cache`", "'5'"):
        Engine.load(str(pair.target), device="cpu", kv_cache="5")
