"""The benchmark of learning: what is measured is held out, is not learnt from, and a changed text is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.drafts import alignment
from offspec import Engine, SamplingParams, SpeculationParams

from ..pair import Pair, build_pair

PARAMS, SPECULATION = SamplingParams(12), SpeculationParams(8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"def number_{number}(width, height): return width * height\n" * 4)
    return tmp_path


def arguments(pair: Pair, folder: Path) -> list[str]:
    models = ("--model", pair.target, "--draft", pair.draft, "--folder", folder, "--pattern", "*.txt")
    sizes = (
        "--prompt-tokens",
        16,
        "--max-new-tokens",
        12,
        "--held-out",
        1,
        "--requests",
        "0,1",
        "--budget",
        8,
        "--most-share",
        1e9,
    )
    return ["alignment.py", *map(str, (*models, *sizes))]


def test_files_are_learnt_from_or_held_out() -> None:
    files = [Path(str(number)) for number in range(10)]
    learnt_from, held_out = alignment.split(files)
    assert not set(learnt_from) & set(held_out)
    assert {*learnt_from, *held_out} == set(files)
    assert len(held_out) == 3


@pytest.mark.slow
def test_measuring_teaches_nothing(pair: Pair) -> None:
    engine = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", learn=True)
    assert engine.aligner is not None
    first = alignment.measure(engine, [[70, 71, 72]], PARAMS, SPECULATION)
    assert engine.aligner.learn(100.0).num_steps == 0
    assert first == alignment.measure(engine, [[70, 71, 72]], PARAMS, SPECULATION)


@pytest.mark.slow
def test_the_last_line_is_json(
    pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", arguments(pair, folder))
    alignment.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    before, after = report["rows"]
    assert (before["num_tokens"], before["num_steps"], after["num_tokens"]) == (0, 0, 12)
    assert after["num_steps"] > 0
    assert report["gain"] == pytest.approx(after["tokens_per_pass"] / before["tokens_per_pass"] - 1)


@pytest.mark.slow
def test_a_text_that_changes_is_an_error(pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(range(100))
    monkeypatch.setattr("sys.argv", arguments(pair, folder))
    monkeypatch.setattr(alignment, "measure", lambda *args: (1.0, [[next(texts)]]))
    with pytest.raises(SystemExit, match="changed a text"):
        alignment.main()
