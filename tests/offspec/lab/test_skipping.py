"""Layers that do least are skipped first; an interrupted search gives what one that was not gives; plans follow it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offspec import Engine
from offspec.checkpoints.opening import ModelFiles
from offspec.drafts.base import DraftOptions, OpenRequest
from offspec.drafts.kinds import open_draft
from offspec.errors import CheckpointError, MemoryLimitError, UsageError
from offspec.lab.skip_files import SkipFile, default_skip_file
from offspec.lab.skipping import Agreement, SkipParams, search_skips
from offspec.loaders.streaming.placement import Limits
from offspec.model.decoder import CachedDecoder
from offspec.model.pass_rows import TextRows
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import make_plan
from offspec.training.distillation import Teacher

from ...pair import build_pair, scale_weights
from ...refusals import refused

NUM_LAYERS, IDLE = 5, (3, 1)  # the idle layers add nothing to the hidden states
SMALL = SkipParams(num_tokens=96, candidates=2, least_agreement=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = build_pair(tmp_path_factory.mktemp("deep"), NUM_LAYERS).target
    ends = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    return scale_weights(made, {f"model.layers.{layer}.{end}": 0.0 for layer in IDLE for end in ends})


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(str(folder), draft="none", device="cpu", dtype="fp32") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def files(folder: Path) -> ModelFiles:
    return ModelFiles.open(folder, "fp32", "cpu", [])


@pytest.fixture(autouse=True)
def exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data folder."""
    monkeypatch.setattr("offspec.checkpoints.exit_layers.exits_folder", lambda: tmp_path / "exits")
    return tmp_path / "exits"


def search(engine: Engine, files: ModelFiles, **more: Any) -> SkipFile:
    return search_skips(Teacher(engine.target, files, engine.tokenizer), SMALL, **more)


def test_idle_layers_are_skipped_first(engine: Engine, files: ModelFiles) -> None:
    found = search(engine, files)
    assert set(found.order[:2]) == set(IDLE)
    assert sorted(found.order) == list(range(NUM_LAYERS))
    assert found.agreement[:3] == (1.0, 1.0, 1.0)
    assert all(0 <= share <= 1 for share in found.agreement)
    assert found.agreement[-1] < 1
    assert found.num_tokens == 96
    assert found.path == default_skip_file(files)
    assert SkipFile.find(files) == SkipFile.open(found.path, files)
    assert [path.name for path in found.path.parent.iterdir() if "unfinished" in path.name] == []


def test_agreement_is_the_likeliest_token_without_these_layers(engine: Engine) -> None:
    """One place after the other, with the target's entries for the text before it."""
    texts = np.array([[5, 40, 41, 42, 43, 44], [6, 50, 40, 60, 61, 62]])
    agreement, target = Agreement(engine.target, texts), engine.target
    assert agreement.without(()) == agreement.without(IDLE) == 1.0
    skipped, right = {0, 4}, 0
    for text in texts:
        for place in range(len(text)):
            cached = CachedDecoder(target)
            whole = cached.score(text[: place + 1].tolist(), *_no_nodes())
            cached.truncate(place)
            hidden = target.embed(_tensor(text[place : place + 1]))
            rows = target.rows(TextRows.of_chain(text[place : place + 1].tolist()), cached.cache)
            for layer in range(NUM_LAYERS):
                if layer not in skipped:
                    hidden = target.through(hidden, rows, range(layer, layer + 1))
            right += int(target.logits(hidden).argmax()) == int(whole[-1].argmax())
    assert agreement.without(skipped) == pytest.approx(right / texts.size)


def _no_nodes() -> Any:
    return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=bool)


def _tensor(values: Any) -> Any:
    import torch

    return torch.as_tensor(np.array(values))


@pytest.mark.parametrize("steps", [0, 2])
def test_an_interrupted_search_is_resumed(engine: Engine, files: ModelFiles, tmp_path: Path, steps: int) -> None:
    class Stop(Exception):  # noqa: N818 - it stands for Ctrl-C
        pass

    def stop(what: str, done: int, total: int) -> None:
        if what == "layers skipped" and done == steps:
            raise Stop

    whole = search(engine, files, out=tmp_path / "whole.json")
    with pytest.raises(UsageError, match="nothing to resume"):
        search(engine, files, out=tmp_path / "part.json", resume=True)
    with pytest.raises(Stop):
        search(engine, files, out=tmp_path / "part.json", progress=stop)
    with pytest.raises(UsageError, match="interrupted run"):
        search(engine, files, out=tmp_path / "part.json")
    with pytest.raises(UsageError, match="other settings"):
        search(engine, files, out=tmp_path / "part.json", texts=[tmp_path / "text"], resume=True)
    resumed = search(engine, files, out=tmp_path / "part.json", resume=True)
    assert (tmp_path / "part.json").read_bytes() == whole.path.read_bytes()
    assert (resumed.order, resumed.agreement) == (whole.order, whole.agreement)


def test_the_plan_streams_what_is_skipped_first(engine: Engine, files: ModelFiles) -> None:
    def streamed(draft: str) -> dict[int, tuple[int, ...]]:
        """The streamed layers by their number, for every amount of memory."""
        opened = open_draft("target", OpenRequest(DraftOptions(draft), files, None, "fp32", "cpu", []))
        options, found = MemoryOptions(context=64), dict[int, tuple[int, ...]]()
        most = make_plan(files, [opened], Limits(None, 2**40), options, 0).placement.ram_bytes
        for ram in range(most, 0, -(2**12)):
            try:
                placement = make_plan(files, [opened], Limits(None, ram), options, 0).placement
            except MemoryLimitError:
                return found
            found[len(placement.streamed)] = placement.streamed
            num_layers = sum(count for _, count in opened.guessing(placement).layers)
            assert num_layers in (0, len(placement.resident))
        raise AssertionError

    evenly = streamed("resident")
    assert len(evenly) > 1
    found = search(engine, files)
    by_file = {number: tuple(sorted(found.order[:number])) for number in evenly}
    assert streamed("resident") == streamed(f"resident:{found.path}") == by_file != evenly


def test_damaged_files_are_refused(engine: Engine, files: ModelFiles, tmp_path: Path) -> None:
    good = json.loads(search(engine, files).path.read_text())
    path = tmp_path / "bad.json"
    for change in (
        {"format": "x"},
        {"target": "0" * 16},
        {"order": [0, 0, 1, 2, 3]},
        {"order": list(range(NUM_LAYERS - 1))},
        {"order": ["0"] * NUM_LAYERS},
        {"agreement": []},
        {"agreement": [2.0]},
        {"agreement": "1"},
        {"num_tokens": None},
    ):
        path.write_text(json.dumps(good | change))
        with refused(CheckpointError, path, "distill MODEL --skip"):
            SkipFile.open(path, files)
    for content in ("[1]", "{", ""):
        path.write_text(content)
        with refused(CheckpointError, path, "distill MODEL --skip"):
            SkipFile.open(path, files)


def test_a_file_of_something_else_is_not_overwritten(engine: Engine, files: ModelFiles, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(UsageError, match="something else"):
        search_skips(Teacher(engine.target, files, engine.tokenizer), out=notes)
    assert notes.read_text() == "mine"
