"""Constraints that are hard to compile delay no others, and end with their deadlines and clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from threading import Event
from typing import TypeVar

import pytest

from offspec import Constraint, Engine
from offspec.cli.server import constraint_queue
from offspec.cli.server.constraint_queue import ConstraintQueue
from offspec.errors import UsageError
from offspec.text.grammar_constraint import Part, Start
from offspec.text.grammar_trials import CAN_TRY

from ...offspec.text.hard_constraints import ENDLESS, ENDLESS_TEXT
from ...refusals import refused
from .serving import LONG_S, Client, served, until

pytestmark = pytest.mark.skipif(not CAN_TRY, reason="this system has no fork")
T = TypeVar("T")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("builtin", draft="none", device="cpu") as found:
        yield found


def run(engine: Engine, work: Callable[[ConstraintQueue], Awaitable[T]]) -> T:
    async def all_of() -> T:
        with closing(ConstraintQueue(engine.constraints)) as queue:
            return await work(queue)

    return asyncio.run(all_of())


def test_what_is_quick_does_not_wait(engine: Engine) -> None:
    async def quick(queue: ConstraintQueue) -> bool:
        hard = [asyncio.create_task(queue.compile(ENDLESS, (), f"attacker {i}")) for i in range(6)]
        await queue.compile(Constraint.regex("[0-9]{1,7}"), (), "victim")
        still_tried = not any(task.done() for task in hard)
        for task in hard:
            task.cancel()
        await asyncio.gather(*hard, return_exceptions=True)
        await queue.compile(Constraint.regex("[0-9]{1,8}"), (), "victim")  # the places are free again
        return still_tried

    assert run(engine, quick)


def test_a_deadline_ends_a_trial(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_queue, "SHORT_S", 0.01)
    monkeypatch.setattr(constraint_queue, "LONG_S", 0.05)
    with refused(UsageError, "grammar", "0.05 s", "simplify"):
        run(engine, lambda queue: queue.compile(ENDLESS, (), ""))
    assert not run(engine, lambda queue: queue.compiles_soon(ENDLESS, ""))


def test_a_process_that_has_ended_is_started_again(engine: Engine) -> None:
    async def twice(queue: ConstraintQueue) -> None:
        await queue.compile(Constraint.regex("a{3}"), (), "")
        assert queue._trials is not None
        queue._trials.close()
        await queue.compile(Constraint.regex("a{4}"), (), "")

    run(engine, twice)


def test_a_client_that_leaves_ends_the_compilation(engine: Engine) -> None:
    with served(engine) as (client, service):
        with closing(client.open("POST", "/v1/completions", {"prompt": "a", "grammar": ENDLESS_TEXT})):
            until(lambda: service._num_encoding == 1)
        until(lambda: service._num_encoding == 0)
        assert client.ask("POST", "/v1/completions", {"prompt": "a", "regex": "[0-9]"}).status == 200


def test_what_waits_for_the_thread_ends_with_its_client(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the thread compiles cannot end; a trial has shown how long it takes, and the result is kept."""
    compile_part, may_go_on, begun = engine.constraints.compile_part, Event(), list[str]()

    def slowly(part: Part) -> Start:
        begun.append(part[0].text)
        assert may_go_on.wait(LONG_S)
        return compile_part(part)

    async def two(queue: ConstraintQueue) -> None:
        queue.slow = queue.quick
        asked = [asyncio.create_task(queue.compile(Constraint.regex(text), (), text)) for text in ("b{3}", "b{4}")]
        while not (begun and queue.quick._waiting):
            await asyncio.sleep(0.001)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        may_go_on.set()
        await queue.compile(Constraint.regex(begun[0]), (), "")

    monkeypatch.setattr(engine.constraints, "compile_part", slowly)
    run(engine, two)
    assert len(begun) == 1 or begun[0] == begun[1]


def test_a_client_with_many_hard_constraints_is_answered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a program behind the same proxy: there is no address that gets 429 for what others do."""
    monkeypatch.setattr(constraint_queue, "SHORT_S", 0.05)
    monkeypatch.setattr(constraint_queue, "LONG_S", 0.05)

    def status(client: Client, **fields: str) -> int:
        return client.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, **fields}).status

    with served(engine) as (client, _):
        assert [status(client, grammar=f"{ENDLESS_TEXT}\n// {i}") for i in range(3)] == [400] * 3
        assert status(client, regex="[0-9]+") == 200
