"""The engine in other people's programs: sizes as texts, `with`, whole texts, and what is said after `close`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offspec import ConvertParams, Engine, SamplingParams, SpeculationParams, convert
from offspec.errors import UsageError
from offspec.session import Session

from ..pair import Pair
from ..refusals import refused

PARAMS = SamplingParams(6, ignore_eos=True)


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    with Engine.load(pair.target, draft=str(pair.draft), device="cpu", ram="8GiB") as engine:
        yield engine


def test_a_whole_text_is_what_the_steps_bring(engine: Engine) -> None:
    assert engine.plan is not None
    assert engine.plan.inputs.options.ram == 2**33
    steps = list(engine.generate("def area(", PARAMS, SpeculationParams(budget=4)))
    assert len(steps) > 1
    assert engine.complete("def area(", PARAMS, SpeculationParams(budget=4)) == "".join(step.text for step in steps)


def test_paths_are_texts_or_path_likes(pair: Pair, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("def area(width, height):\n")
    converted = convert(str(pair.target), str(tmp_path / "copy"), ConvertParams("bf16"))
    with Engine.load(converted.path, draft=pair.draft, device="cpu", lookup_files=notes) as engine:
        assert (engine.name, engine.draft_name) == (str(converted.path), str(pair.draft))
        assert engine.lookup_index is not None
        session = Session(engine)
        session.save(str(tmp_path / "chat.json"), {})
        session.export(str(tmp_path / "chat.md"))
        assert session.load(str(tmp_path / "chat.json")) == {}


def test_after_the_end_a_closed_engine_says_so(pair: Pair) -> None:
    with Engine.load(pair.target, draft="none", device="cpu") as engine:
        steps = engine.generate("def area(", PARAMS)
        next(steps)
    with refused(UsageError, "closed"):
        next(steps)
    with refused(UsageError, "closed"):
        engine.complete("def area(")
    with refused(UsageError, "closed"):
        engine.new_caches(16)
    engine.close()  # once more does nothing
