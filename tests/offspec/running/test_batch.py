"""Texts that share passes are those of plain decoding alone, whatever joins, leaves, waits or is paused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec import Constraint, Engine, SamplingParams, SpeculationParams, Step
from offspec.errors import NumericalError, OffspecError
from offspec.model.memory.sequence_cache import SequenceCache
from offspec.model.memory.text_pool import TextPool
from offspec.running.batch import Batch
from offspec.running.sequence import Sequence
from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.text.grammar_constraint import SlowTime

from ...pair import Pair, build_pair
from ...scheduler.fakes import few
from ..model.heads.head_twins import EAGLE_CONFIG, MEDUSA_CONFIG, eagle_tensors, medusa_tensors, write_folder

PLAIN = SpeculationParams(budget=0)
PROMPTS = (
    "def area(",
    "class Tree:\n    def",
    "import",
    "for i in range(10):\n    print(i)\n" * 3,
    "x = 1",
    "return x +",
)
SAMPLING = (
    SamplingParams(9, seed=1),
    SamplingParams(7, temperature=1.0, seed=2),
    SamplingParams(11, temperature=0.7, top_p=0.9, repetition_penalty=1.3, seed=3),
    SamplingParams(8, temperature=1.2, top_k=20, seed=4, ignore_eos=True),
    SamplingParams(8, repetition_penalty=0.8, seed=5, stop=("\n",)),
    SamplingParams(8, frequency_penalty=1.5, presence_penalty=0.5, logit_bias=((7, 5.0),), seed=6),
)
HEAD = "for i in range(10):\n    print(i)\n" * 4  # 92 tokens
TAPPED = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
HEADS = {"eagle": (EAGLE_CONFIG | TAPPED, lambda: eagle_tensors(3)), "medusa": (MEDUSA_CONFIG, medusa_tensors)}
DRAFTS = ("own", "lookup", "none", "self", "shadow:4", *HEADS, "own, 8 bits")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With as many layers as an EAGLE-3 head reads."""
    return build_pair(tmp_path_factory.mktemp("pair"), num_layers=3)


def load(pair: Pair, draft: str, **more: Any) -> Engine:
    """In fp32, so that texts are equal and not only up to near-ties."""
    if draft == "self":
        more["exit_layer"] = 1
    if draft in HEADS:
        config, tensors = HEADS[draft]
        draft = str(write_folder(pair.target.parent / draft, config, tensors()))
    if draft == "own, 8 bits":
        draft, more["kv_cache"] = "own", "8"
    return Engine.load(
        str(pair.target), draft=str(pair.draft) if draft == "own" else draft, device="cpu", dtype="fp32", **more
    )


@pytest.fixture(scope="module")
def engines(pair: Pair) -> Iterator[dict[str, Engine]]:
    found = {draft: load(pair, draft) for draft in DRAFTS}
    yield found
    for engine in found.values():
        engine.close()


def plain(engine: Engine, prompt: str, params: SamplingParams) -> list[int]:
    return [token for step in engine.generate(prompt, params, PLAIN) for token in step.token_ids]


@pytest.fixture(scope="module")
def plain_of(engines: dict[str, Engine]) -> Callable[..., list[int]]:
    """`plain` of one of `engines`, by its name."""
    return cache(lambda draft, prompt, params: plain(engines[draft], prompt, params))


@dataclass
class Watched:
    """A batch, and what its tickets got."""

    engine: Engine
    max_texts: int | None = None
    pool: TextPool | None = None
    found: dict[Sequence, list[Step]] = field(default_factory=dict)
    errors: dict[Sequence, OffspecError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = Batch(self.engine.models, self.max_texts, self.pool)

    def add(self, prompt: str, params: SamplingParams, speculation: SpeculationParams | None = None) -> Sequence:
        ticket = self.batch.add(self.engine.check_request(prompt, params, speculation))
        self.found[ticket] = []
        return ticket

    def step(self) -> None:
        for ticket, outcome in self.batch.step():
            if isinstance(outcome, OffspecError):
                self.errors[ticket] = outcome
            else:
                self.found[ticket].append(outcome)

    def finish(self) -> None:
        for _ in range(1000):
            if self.batch.is_idle:
                return
            self.step()
        pytest.fail("the batch does not end")

    def ids(self, ticket: Sequence) -> list[int]:
        return [token for step in self.found[ticket] for token in step.token_ids]


# ------------------------------------------------------------------------------------------------ texts


@pytest.mark.slow
def test_requests_of_other_kinds_share_passes(pair: Pair, engines: dict[str, Engine]) -> None:
    """One with a constraint and one with joint acceptance, whose text depends on the draft, beside two plain ones."""
    digits = Constraint.regex("[0-9]{3,12}")
    asked = [
        (PROMPTS[0], SAMPLING[0], SpeculationParams(8)),
        (PROMPTS[1], SamplingParams(16, temperature=1.0, seed=3, constraint=digits), SpeculationParams(8)),
        (PROMPTS[2], SamplingParams(16, seed=4, ignore_eos=True), SpeculationParams(accept="joint")),
        (PROMPTS[3], SAMPLING[1], None),
    ]
    found: list[list[int]] = []
    for request in asked:
        fresh = engines["own"].with_draft(engines["own"].draft)
        found.append([token for step in fresh.generate(*request) for token in step.token_ids])
    with load(pair, "own", texts=4) as engine:
        watched = Watched(engine)
        tickets = [watched.add(*each) for each in asked]
        watched.finish()
        assert [watched.ids(ticket) for ticket in tickets] == found
        assert engine.tokenizer.decode(watched.ids(tickets[1])[:-1]).isdecimal()


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What happens between passes: requests join (prompt, sampling), are cancelled, or nothing."""
    kinds = st.sampled_from(["add", "add", "step", "step", "step", "cancel", "pause"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 5), st.integers(0, 4)), min_size=4, max_size=24))


@pytest.mark.slow
@few
@given(schedule=schedules(), draft=st.sampled_from(DRAFTS), max_texts=st.integers(1, 4))
def test_texts_do_not_depend_on_the_schedule(
    engines: dict[str, Engine],
    plain_of: Callable[..., list[int]],
    schedule: list[tuple[str, int, int]],
    draft: str,
    max_texts: int,
) -> None:
    watched = Watched(engines[draft], max_texts)
    asked: dict[Sequence, tuple[str, SamplingParams]] = {}
    cancelled = set[Sequence]()
    for kind, first, second in schedule:
        if kind == "add":
            prompt, params = PROMPTS[first], SAMPLING[second]
            asked[watched.add(prompt, params)] = prompt, params
        elif kind == "cancel" and asked:
            ticket = list(asked)[first % len(asked)]
            watched.batch.cancel(ticket)
            cancelled.add(ticket)
        elif kind == "pause":
            watched.batch.pause_last()
        else:
            watched.step()
    watched.finish()
    assert not watched.errors
    for ticket, (prompt, params) in asked.items():
        expected, ids = plain_of(draft, prompt, params), watched.ids(ticket)
        if ticket in cancelled:
            assert ids == expected[: len(ids)]
        else:
            assert ids == expected
            assert watched.found[ticket][-1].finish_reason is not None


def test_a_pass_takes_all_texts(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are walked once for all of them."""
    engine = engines["none"]
    walks = list[int]()
    through = type(engine.target).through

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        walks.append(len(args[1]))
        return through(*args, **kwargs)

    monkeypatch.setattr(type(engine.target), "through", counted)
    prompts = PROMPTS[:2]
    lengths = [len(engine.encode(prompt)) for prompt in prompts]
    params = SamplingParams(5, seed=0, ignore_eos=True)
    list(engine.generate_many(prompts, params))
    assert walks == [sum(lengths), 2, 2, 2, 2]


def test_a_long_prompt_is_scored_in_parts_beside_other_texts(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.running.passes.prefill_rows", lambda *_: 5)
    engine = engines["own"]
    watched = Watched(engine)
    first = watched.add(PROMPTS[0], SAMPLING[0])
    watched.step()
    second = watched.add(PROMPTS[3], SAMPLING[1])
    watched.step()
    assert len(watched.found[first]) == 2
    assert not watched.found[second]
    watched.finish()
    assert watched.ids(first) == plain(engine, PROMPTS[0], SAMPLING[0])
    assert watched.ids(second) == plain(engine, PROMPTS[3], SAMPLING[1])
    last = watched.found[second][-1].stats
    assert last.num_passes == len(watched.found[second])
    assert last.prefill_s > 0


class SlowConstraint:
    """Allows everything; each look at it is accounted as so many seconds."""

    def __init__(self) -> None:
        self.slow = SlowTime()

    def mask(self, path: Any) -> None:
        self.slow.seconds += 1e6

    def barred(self, path: Any) -> tuple[()]:
        return ()

    def is_idle(self, tokens: Any) -> bool:
        return False

    def forced(self, path: Any, most: int) -> list[int]:
        return []

    def accept(self, tokens: Any) -> None:
        pass


def test_a_text_with_a_slow_constraint_lets_the_others_go_first(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no part in passes until they have had as much time; then it goes on, and its text is the same."""
    engine = engines["none"]
    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "compile_constraint", lambda *_, **__: SlowConstraint())
        watched = Watched(engine)
        other = watched.add(PROMPTS[1], SamplingParams(12, seed=3, ignore_eos=True))
        slow = watched.add(PROMPTS[0], replace(SAMPLING[0], constraint=Constraint.regex("a"), ignore_eos=False))
        for _ in range(5):
            watched.step()
        assert (len(watched.found[slow]), len(watched.found[other])) == (1, 5)
        watched.finish()
    assert watched.ids(other) == plain(engine, PROMPTS[1], SamplingParams(12, seed=3, ignore_eos=True))
    assert watched.ids(slow) == plain(engine, PROMPTS[0], replace(SAMPLING[0], ignore_eos=False))


# ------------------------------------------------------------------------------------------------ KV entries


@pytest.mark.slow
def test_texts_share_the_planned_kv_entries(pair: Pair) -> None:
    """Texts that do not fit beside each other wait or are paused; none is lost, and the plan is kept."""
    engine = load(pair, "own", context=64)
    assert engine.plan is not None
    room, pool = engine.plan.context + engine.plan.tree, TextPool(engine.new_caches, 0)
    watched = Watched(engine, 4, pool)
    batch = watched.batch
    params = [SamplingParams(32, temperature=1.0, seed=i, ignore_eos=True) for i in range(3)]
    tickets = [watched.add("def area(", own) for own in params]
    most = 0
    while not batch.is_idle:
        watched.step()
        entries = [ticket.kv.num_entries for ticket in tickets if ticket.caches is not None]
        assert sum(entries) <= room
        assert pool.num_entries + pool.num_idle_entries <= engine.plan.kv_entries or not pool.num_used
        most = max(most, batch.num_running)
    assert most > 1
    for ticket, own in zip(tickets, params, strict=True):
        assert watched.ids(ticket) == plain(engine, "def area(", own)
    engine.close()


def test_a_common_beginning_is_scored_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By texts that join together each for itself; those that join later copy the entries."""
    monkeypatch.setattr(SharedPass, "is_worth_a_pass", lambda self, num_rows: False)
    prompts = [HEAD + end for end in ("x = 1", "def area(", "import", "return")]
    params, ends = SamplingParams(6, seed=0, ignore_eos=True), dict[int, Step]()
    found: list[list[int]] = [[] for _ in prompts]
    with load(pair, "own", texts=8) as engine:
        for index, step in engine.generate_many(prompts, params, max_texts=2):
            found[index] += step.token_ids
            ends[index] = step
        assert found == [plain(engine, prompt, params) for prompt in prompts]
        numbers = [ends[index].stats.num_prefilled_tokens for index in range(len(prompts))]
        assert numbers[:2] == [len(engine.encode(prompt)) for prompt in prompts[:2]]
        assert max(numbers[2:]) < 12


def test_answers_share_the_entries_of_their_prompt(tmp_path: Path) -> None:
    """Four texts of 184 tokens run where two would not fit beside the first one's tree; a paused one shares again."""
    params = [SamplingParams(12, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    with load(build_pair(tmp_path, max_position_embeddings=512), "own", context=200) as engine:
        pool = TextPool(engine.new_caches, 0)
        watched = Watched(engine, 4, pool)
        few = SpeculationParams(2)  # so that no text ends in the three passes below
        tickets = [watched.add(2 * HEAD, own, few) for own in params]
        watched.step()
        watched.step()
        assert watched.batch.num_running == 4
        assert engine.plan is not None
        num_of_two = tickets[0].kv.num_entries + len(tickets[1].prompt) + engine.plan.tree // 2
        assert pool.num_entries <= engine.plan.kv_entries < num_of_two
        watched.batch.pause_last()
        watched.step()
        caches = [ticket.caches.target.cache for ticket in tickets if ticket.caches is not None]
        assert len(caches) == 4
        assert len({cache.beginning for cache in caches}) == 1
        assert caches[0].beginning is not None
        watched.finish()
        expected = [plain(engine, 2 * HEAD, own) for own in params]
    assert [watched.ids(ticket) for ticket in tickets] == expected


@pytest.mark.slow
def test_the_drafts_cache_has_room_before_each_pass(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all rounds, however long the text has grown: on a GPU it must not grow while the target computes."""
    monkeypatch.setattr("offspec.running.kv_reservation.GRANT", 8)
    monkeypatch.setattr("offspec.running.kv_reservation.DRAFT_ROWS", 10)
    extend, num_grown = SequenceCache.extend, 0

    def noted(self: SequenceCache, count: int) -> None:
        nonlocal num_grown
        num_grown += self.size + count > self.capacity
        extend(self, count)

    monkeypatch.setattr(SequenceCache, "extend", noted)
    with load(pair, "own", texts=4) as engine:
        batch = Batch(engine.models)
        params = SamplingParams(16, seed=1, ignore_eos=True)
        tickets = [batch.add(engine.check_request(prompt, params, SpeculationParams(8))) for prompt in PROMPTS[:2]]
        batch.step()
        for ticket in tickets:
            assert ticket.caches is not None
            ticket.caches.target.reserve(200)  # as after a longer text: the target's never grows
        num_grown = 0
        while not batch.is_idle:
            batch.step()
    assert num_grown == 0


# ------------------------------------------------------------------------------------------------ errors


def test_a_text_with_bad_logits_ends_alone(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines["none"]
    watched = Watched(engine)
    good = watched.add(PROMPTS[0], SAMPLING[0])
    bad = watched.add(PROMPTS[1], SAMPLING[0])
    watched.step()
    monkeypatch.setattr(bad.sampler, "choose", lambda *args: (_ for _ in ()).throw(NumericalError("not finite")))
    watched.finish()
    assert isinstance(watched.errors[bad], NumericalError)
    assert watched.ids(good) == plain(engine, PROMPTS[0], SAMPLING[0])


@pytest.mark.parametrize("part", ["prepare", "extending"])
def test_a_text_whose_draft_fails_goes_on_without_it(pair: Pair, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the pass, and during it."""

    def fail(*args: object) -> Iterator[Any]:
        raise NumericalError("the draft's logits are not finite")
        yield

    with load(pair, "own") as engine:
        watched = Watched(engine)
        good, bad = (watched.add(prompt, SAMPLING[0], SpeculationParams(8)) for prompt in PROMPTS[:2])
        watched.step()
        monkeypatch.setattr(bad.drafter, part, fail)
        monkeypatch.setattr(type(bad.drafter), "wants_overlap", True)
        watched.finish()
        for ticket, prompt in ((good, PROMPTS[0]), (bad, PROMPTS[1])):
            assert watched.ids(ticket) == plain(engine, prompt, SAMPLING[0])


@pytest.mark.slow
def test_no_token_is_lost_when_memory_runs_out_after_a_verdict(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts that were committed before go on behind their last token, and so does the one that failed."""
    with load(pair, "own") as engine:
        monkeypatch.setattr(engine.loaded, "make_room", lambda message, free: free())
        watched = Watched(engine)
        tickets = [watched.add(prompt, SAMPLING[0], SpeculationParams(8)) for prompt in PROMPTS[:3]]
        watched.step()
        monkeypatch.setattr(tickets[1].drafter, "observe", _out_of_memory)
        watched.finish()
        assert [watched.ids(ticket) for ticket in tickets] == [
            plain(engine, prompt, SAMPLING[0]) for prompt in PROMPTS[:3]
        ]


def _out_of_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("out of memory")


def test_a_request_that_ends_gives_its_caches_back(engines: dict[str, Engine]) -> None:
    """However it ends: by its last token, cancelled while it runs or waits, or with its batch."""
    engine = engines["none"]
    pool = TextPool(engine.new_caches, 0)
    batch = Batch(engine.models, 1, pool)
    first, second, third = (batch.add(engine.check_request(prompt, SAMPLING[0])) for prompt in PROMPTS[:3])
    batch.step()
    assert batch.cancel(second)
    assert not batch.cancel(first)
    batch.step()
    assert (first.caches, second.caches, pool.num_used) == (None, None, 1)
    assert third.caches is not None
    batch.pause_last()
    batch.close()
    assert (third.caches, pool.num_used) == (None, 0)
    assert batch.is_idle


def test_a_paused_text_resumes_before_others_join(engines: dict[str, Engine]) -> None:
    engine, began = engines["none"], list[Sequence]()
    batch = Batch(engine.models, 2, on_begin=began.append)
    checked = [engine.check_request(prompt, SAMPLING[0]) for prompt in PROMPTS[:4]]
    tickets = [batch.add(*each) for each in zip(checked, "aabc", strict=True)]
    batch.step()
    assert began == [tickets[0], tickets[2]], "clients take turns"
    batch.pause_last()
    batch.cancel(tickets[0])
    batch.step()
    assert tickets[2].caches is not None
    assert began == [tickets[0], tickets[2], tickets[3]]
    batch.close()
