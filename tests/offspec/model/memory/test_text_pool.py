"""KV caches of several conversations: whose entries a request begins with, and that the text does not change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from offspec import Engine, SamplingParams
from offspec.drafts.self_draft import SelfDraft
from offspec.model.early_exit import EarlyExit
from offspec.model.memory.text_pool import WORTHWHILE, TextPool
from offspec.planning.parked_texts import CONTEXTS, parked_bytes

from ....pair import build_pair

CHAT, TITLE, OTHER = ([40 + (number * step) % 90 for number in range(64)] for step in (1, 7, 11))
MUCH = 2**30


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pair = build_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=512)
    return Engine.load(str(pair.target), draft=str(pair.draft), device="cpu")


def pool_of(engine: Engine, most_bytes: int = MUCH) -> TextPool:
    return TextPool(engine.new_caches, most_bytes)


def answer(engine: Engine, pool: TextPool, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The answer's tokens, which are those of an engine without caches, and the number of the prompt's cached ones."""
    caches = pool.borrow(prompt)
    steps = list(engine.generate(prompt, SamplingParams(6, ignore_eos=True, seed=1, temperature=1), caches=caches))
    pool.give_back(caches)
    tokens = [token for step in steps for token in step.token_ids]
    alone = engine.generate(prompt, SamplingParams(6, ignore_eos=True, seed=1, temperature=1))
    assert tokens == [token for step in alone for token in step.token_ids]
    return tokens, len(prompt) - steps[-1].stats.num_prefilled_tokens


def test_a_conversation_survives_requests_between_its_turns(engine: Engine) -> None:
    """A chat client's title request threw the chat's cache away once."""
    pool = pool_of(engine)
    tokens, cached = answer(engine, pool, CHAT)
    assert cached == 0
    for between in (TITLE, OTHER):
        assert answer(engine, pool, between)[1] < WORTHWHILE
    assert pool.num_parked == 2
    prompt = [*CHAT, *tokens, *OTHER[:8]]
    later, cached = answer(engine, pool, prompt)
    assert len(CHAT) + len(tokens) - 2 <= cached < len(prompt)  # but the last token, unless it was a guess
    assert answer(engine, pool, [*prompt, *later, 50])[1] >= len(prompt)  # in place


def test_a_text_that_others_begin_with_is_parked_once(engine: Engine) -> None:
    pool = pool_of(engine)
    tokens, _ = answer(engine, pool, CHAT)
    answer(engine, pool, TITLE)
    assert pool.num_parked == 1
    answer(engine, pool, [*CHAT, *tokens[:4], *OTHER])  # it continues the parked text, and another begins with this one
    answer(engine, pool, TITLE)
    assert pool.num_parked == 3  # CHAT's two continuations and TITLE: neither begins with the other
    answer(engine, pool, [*CHAT, *tokens, 50])
    answer(engine, pool, OTHER)
    assert pool.num_parked == 3  # CHAT's first answer is the beginning of its third


@pytest.mark.slow
def test_the_memory_limit_drops_what_was_not_used_for_longest(engine: Engine) -> None:
    """Without a draft, whose entries depend on how often it was asked: texts of equal length have equal sizes."""
    engine = Engine.load(engine.name, draft="none", device="cpu")
    one = pool_of(engine)
    answer(engine, one, CHAT)
    answer(engine, one, TITLE)
    most_bytes = one.parked_bytes * 5 // 2
    pool = pool_of(engine, most_bytes=most_bytes)
    for prompt in (CHAT, TITLE, OTHER, CHAT[::-1]):
        answer(engine, pool, prompt)
        assert pool.parked_bytes <= most_bytes
    assert answer(engine, pool, [*TITLE, 50])[1] >= len(TITLE) - 1
    assert answer(engine, pool, [*CHAT, 50])[1] < WORTHWHILE


def test_a_running_request_lends_its_beginning(engine: Engine) -> None:
    pool = pool_of(engine, most_bytes=0)
    first = pool.borrow(CHAT)
    running = engine.generate(CHAT, SamplingParams(10, ignore_eos=True), caches=first)
    next(running)
    _, cached = answer(engine, pool, [*CHAT[:40], *OTHER])
    assert cached == 40
    assert [token for step in running for token in step.token_ids]
    pool.give_back(first)
    assert answer(engine, pool, [*CHAT, 50])[1] >= len(CHAT) - 1


def test_only_running_requests_have_caches_once_one_has_begun(engine: Engine) -> None:
    pool = pool_of(engine)
    both = [pool.borrow(CHAT), pool.borrow(TITLE)]
    assert pool.num_used == 2
    for caches, prompt in zip(both, (CHAT, TITLE), strict=True):
        list(engine.generate(prompt, SamplingParams(4, ignore_eos=True), caches=caches))
        pool.give_back(caches)
    assert (pool.num_used, pool.num_entries, pool.num_parked) == (0, 0, 0)
    third = pool.borrow([*TITLE, 50])
    assert third is both[1]
    assert pool.num_entries == third.target.cache.capacity
    assert pool.num_parked == 1
    assert pool.borrow([*CHAT, 50]) is not both[0]


def test_an_early_exit_keeps_its_caches_text_alone(engine: Engine) -> None:
    """Its first layers share their entries with the target, so its texts are not copied, and stay right."""
    with engine.target.weights.layer(0) as layer:
        draft = SelfDraft(EarlyExit(engine.target, 1, dict(layer)))  # type: ignore[arg-type]
    exiting = engine.with_draft(draft)
    pool = pool_of(exiting)
    answer(exiting, pool, CHAT)
    answer(exiting, pool, TITLE)
    assert pool.num_parked == 0
    assert answer(exiting, pool, [*TITLE, 50])[1] >= len(TITLE) - 1
    assert answer(exiting, pool, CHAT)[1] < WORTHWHILE


def test_the_plan_counts_parked_texts(engine: Engine) -> None:
    assert parked_bytes(engine.plan) == 0
    planned = Engine.load(engine.name, draft="none", device="cpu", cache_ram="1MiB")
    assert parked_bytes(planned.plan) == 2**20
    assert planned.plan is not None
    assert engine.plan is not None
    names = [item.name for item in planned.plan.placement.items]
    assert "earlier conversations" in names
    usual = Engine.load(engine.name, draft="none", device="cpu", cache_ram=None)
    assert usual.plan is not None
    kv_cache = next(item for item in usual.plan.placement.items if item.name == "KV cache")
    assert 0 < parked_bytes(usual.plan) <= CONTEXTS * kv_cache.on_device
