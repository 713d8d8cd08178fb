"""One engine of several: whatever goes wrong is reported; what is only a prompt's fault does not end the engine."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from offspec import Engine, LoadOptions, SamplingParams
from offspec.cli.batch import Asked
from offspec.cli.node_engine import EngineJob, NodeEngine
from offspec.errors import ContextLengthError, MemoryLimitError, OffspecError
from offspec.loaded_target import LoadedTarget
from offspec.planning import plan

from ..pair import CONTEXT, Pair
from ..refusals import check_message, tells

PARAMS = SamplingParams(max_new_tokens=4)


Found = Generator[tuple[int, dict[str, Any] | OffspecError], None, None]


def answers(engine: Engine, prompts: Sequence[Asked]) -> Found:
    """In reverse order."""
    for place, (prompt, params) in reversed(list(enumerate(prompts))):
        try:
            yield place, {"text": engine.complete(prompt, params), "from": Path.cwd().name}
        except OffspecError as exc:
            yield place, exc


def failing(error: Exception) -> Callable[[Engine, Sequence[Asked]], Found]:
    """The second prompt fails."""

    def answer(engine: Engine, prompts: Sequence[Asked]) -> Found:
        for place, (prompt, _) in enumerate(prompts):
            if prompt == "2":
                if not isinstance(error, OffspecError):
                    raise error
                yield place, error
            else:
                yield place, {"text": prompt}

    return answer


@pytest.fixture
def job(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineJob:
    monkeypatch.chdir(pair.target.parent)
    found = EngineJob(LoadOptions(pair.target.name, "draft", device="cpu", special_in_text=True), answers)
    monkeypatch.chdir(tmp_path)
    return found


def test_prompts_in_answers_out(job: EngineJob, pair: Pair) -> None:
    """Paths are relative to the folder of whoever asked."""
    engine = NodeEngine(pickle.loads(pickle.dumps(job)))
    loaded = engine.answer([])
    assert (loaded.results, loaded.fault, loaded.dtype) == ({}, None, "float32")
    report = engine.answer([("hi", PARAMS), ("x" * 500, PARAMS), ("more", PARAMS)])
    assert list(report.results) == [2, 1, 0]
    first, second, third = (report.results[place] for place in range(3))
    with Engine.load(pair.target, draft=str(pair.draft), device="cpu") as alone:
        texts = [alone.complete(prompt, PARAMS) for prompt in ("hi", "more")]
    assert [first, third] == [{"text": text, "from": pair.target.parent.name} for text in texts]
    assert isinstance(second, str)
    assert tells(second, "context", CONTEXT)
    assert report.fault is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": LoadOptions("no-such-model")}, ("no-such-model",)),
        ({"version": "0.0.1"}, ("0.0.1", "offspec")),
        ({"options": LoadOptions(device="cpu", context="many")}, ("TypeError",)),  # type: ignore[arg-type]
    ],
)
def test_an_engine_that_cannot_be_loaded_says_why(
    change: dict[str, Any], words: tuple[str, ...], job: EngineJob
) -> None:
    engine = NodeEngine(replace(job, **change))
    for prompts in ([], [("hi", PARAMS)]):
        report = engine.answer(prompts)
        assert report.results == {}
        assert report.fault is not None
        check_message(report.fault, *words)


def test_an_engine_with_a_smaller_context_than_others_is_refused(
    job: EngineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts would end earlier, so they would depend on the node."""
    monkeypatch.setattr(LoadedTarget, "max_context", 64)
    fault = NodeEngine(job).answer([]).fault
    assert fault is not None
    check_message(fault, 64, CONTEXT, "--context 64")
    assert NodeEngine(replace(job, options=replace(job.options, context=64))).answer([]).fault is None
    monkeypatch.setattr(plan, "DEFAULT_CONTEXT", 64)
    assert NodeEngine(job).answer([]).fault is None


def test_an_engine_with_more_memory_has_the_context_of_the_others(
    job: EngineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "DEFAULT_CONTEXT", 64)
    monkeypatch.setattr(plan, "CONTEXT_STEP", 8)
    assert NodeEngine(job)._engine.max_context == 64
    long = replace(job, options=replace(job.options, context=100))
    assert NodeEngine(long)._engine.max_context == 100


@pytest.mark.parametrize("error", [MemoryLimitError("gone"), OSError("gone")])
def test_an_engine_that_fails_returns_what_it_has(
    error: Exception, job: EngineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NodeEngine(replace(job, answers=failing(error)))
    monkeypatch.setattr(LoadedTarget, "check", Mock(side_effect=MemoryLimitError("the target is gone")))
    report = engine.answer([("1", PARAMS), ("2", PARAMS), ("3", PARAMS)])
    assert report.results == {0: {"text": "1"}}
    assert report.fault is not None
    assert tells(report.fault, "gone")
    assert engine.answer([("3", PARAMS)]).fault == report.fault


def test_a_prompt_that_fails_does_not_end_the_engine(job: EngineJob) -> None:
    engine = NodeEngine(replace(job, answers=failing(ContextLengthError("too much"))))
    report = engine.answer([("1", PARAMS), ("2", PARAMS), ("3", PARAMS)])
    assert (report.results, report.fault) == ({0: {"text": "1"}, 1: "too much", 2: {"text": "3"}}, None)
