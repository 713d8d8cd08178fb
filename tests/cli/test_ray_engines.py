"""Which engine gets which prompts, and what is done when one dies: with a Ray that carries out calls here."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from offspec import LoadOptions, SamplingParams
from offspec.cli import ray_batch
from offspec.cli.node_engine import EngineJob, Report
from offspec.cli.ray_batch import RayEngines
from offspec.errors import OffspecError

from ..refusals import refused, tells

Answering = Callable[[list[str]], Report]  # what the engine of a node does with prompts; [] is its loading


class RayError(Exception):
    """A process or a node died."""


class ActorUnavailableError(RayError):
    """A process died, and Ray starts it again."""


@dataclass(eq=False)
class Call:
    """A call of an engine that was not carried out yet."""

    node: str
    prompts: list[str]


@dataclass
class FakeRay:
    """Nodes by name with what their engines do. A call is carried out when its result is taken, the oldest first.

    joining: nodes that come into the cluster after the first call.
    """

    nodes_now: dict[str, Answering]
    joining: dict[str, Answering] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="head:1")

    def nodes(self) -> list[dict[str, Any]]:
        common = {"Alive": True, "Resources": {"CPU": 2.0}}
        return [{"NodeID": name, "NodeManagerAddress": f"at-{name}", **common} for name in self.nodes_now]

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda scheduling_strategy, **_: self._actor(scheduling_strategy))

    def _actor(self, node: str) -> Any:
        method = SimpleNamespace(remote=lambda prompts: Call(node, [prompt for prompt, _ in prompts]))
        method.options = lambda **_: method
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(answer=method, node=node))

    def wait(self, calls: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        self.nodes_now |= self.joining
        return calls[:1], calls[1:]

    def get(self, call: Call) -> Report:
        return self.nodes_now[call.node](call.prompts)

    def kill(self, handle: Any) -> None:
        self.killed.append(handle.node)

    def shutdown(self) -> None:
        self.killed.append("connection")


def answer(prompts: list[str], dtype: str = "float32", notes: Sequence[tuple[str, bool]] = ()) -> Report:
    stats = {"num_tokens": 2, "ttft_s": 0.5, "decode_s": 0.5}
    return Report({i: {"text": f"{p}!", "stats": stats} for i, p in enumerate(prompts)}, None, dtype, list(notes))


def broken(prompts: list[str]) -> Report:
    return Report({}, "no such folder")


def engines_of(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, **job: Any) -> RayEngines:
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    for name, module in {"ray": ray, "ray.util": None, "ray.util.scheduling_strategies": strategies}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_batch, "connect", lambda address: None)
    monkeypatch.setattr(ray_batch, "LOOK_S", 0.0)
    monkeypatch.setattr(RayEngines, "_is_head_there", lambda engines: True)

    def unused(*_: Any) -> Any:
        raise AssertionError

    return RayEngines("auto", EngineJob(LoadOptions("m", device="cpu"), unused, **job), quiet=False, verbose=False)


def answers(engines: RayEngines, *prompts: str) -> dict[int, str]:
    """The answers, or errors, by the places of the prompts."""
    found = list(engines.answers([(prompt, SamplingParams()) for prompt in prompts]))
    assert max(Counter(place for place, _ in found).values()) == 1
    return {place: str(result) if isinstance(result, OffspecError) else result["text"] for place, result in found}


def test_prompts_go_to_engines_that_are_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: dict[str, list[list[str]]] = {"a": [], "b": [], "late": []}

    def at(node: str) -> Answering:
        def call(prompts: list[str]) -> Report:
            calls[node].append(prompts)
            return answer(prompts, notes=[("common", False), ("more memory helps", True)])

        return call

    ray = FakeRay({"a": at("a"), "b": at("b")}, joining={"late": at("late")})
    engines = engines_of(ray, monkeypatch, prompts_per_call=2)
    assert answers(engines, *"abcdefghi") == {i: f"{letter}!" for i, letter in enumerate("abcdefghi")}
    assert sorted(prompt for found in calls.values() for prompts in found for prompt in prompts) == [*"abcdefghi"]
    assert all(found[0] == [] and len(found) > 1 for found in calls.values())
    assert {len(prompts) for found in calls.values() for prompts in found[1:]} == {1, 2}
    assert sorted(ray.killed) == ["a", "b", "connection", "late"]
    *nodes, last = engines.describe().splitlines()
    assert len(nodes) == 3
    assert tells(last, "9 prompts", "18 tokens")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert all("more memory helps" in line for line in told)


def test_what_was_not_answered_goes_to_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stops(prompts: list[str]) -> Report:
        return Report(answer(prompts[:1]).results, "the disk is gone" if prompts else None, "float32")

    engines = engines_of(FakeRay({"a": stops, "b": answer, "c": broken}), monkeypatch, prompts_per_call=3)
    assert answers(engines, *"abcdef") == {i: f"{letter}!" for i, letter in enumerate("abcdef")}
    told = capsys.readouterr().err
    assert tells(told, "at-a (a)", "stopped", "the disk is gone")
    assert tells(told, "at-c (c)", "cannot run m", "no such folder")


def test_a_prompt_that_ends_processes_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes are started again, and answer the others."""
    deaths = list[str]()

    def dies(prompts: list[str]) -> Report:
        if "poison" in prompts:
            deaths.append("")
            raise ActorUnavailableError("Socket closed")
        return answer(prompts)

    engines = engines_of(FakeRay({"a": dies, "b": dies}), monkeypatch)
    found = answers(engines, "x", "poison", "y", "z")
    assert tells(found.pop(1), 3, "engines", "process died")
    assert (found, len(deaths)) == ({0: "x!", 2: "y!", 3: "z!"}, 3)
    assert capsys.readouterr().err.count("Ray starts it again") == 3


def test_a_node_that_dies_gets_nothing_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(prompts: list[str]) -> Report:
        if prompts:
            del ray.nodes_now["a"]
            raise RayError("the actor is not schedulable")
        return answer(prompts)

    ray = FakeRay({"a": dies, "b": answer})
    assert answers(engines_of(ray, monkeypatch), *"abcd") == {i: f"{letter}!" for i, letter in enumerate("abcd")}
    (told,) = capsys.readouterr().err.splitlines()
    assert tells(told, "at-a (a)", "left the cluster")


def test_no_engine_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ray = FakeRay({"a": broken, "b": broken})
    with refused(OffspecError, "Ray", "m", "2 prompts"):
        answers(engines_of(ray, monkeypatch), "x", "y")
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert sorted(ray.killed) == ["a", "b", "connection"]


def test_a_cluster_without_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(OffspecError, "Ray", "CPUs", "GPUs"):
        answers(engines_of(FakeRay({}), monkeypatch), "x")


def test_different_arithmetic_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    in_16_bit = FakeRay({"a": answer, "b": lambda prompts: answer(prompts, "bfloat16"), "c": answer})
    answers(engines_of(in_16_bit, monkeypatch), *"abcdefg")
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert tells(told, "float32 and bfloat16", "--dtype")
