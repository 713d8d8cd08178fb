"""`offspec models`: what is listed, downloaded and removed."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from ..pair import Pair
from .conftest import Offspec


@pytest.fixture
def shelf(pair: Pair, tmp_path: Path) -> Path:
    """A folder with a model, one that does not run, and what is none."""
    shutil.copytree(pair.target, tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    return tmp_path


@pytest.fixture
def hub(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one model, `org/good`."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--good" / "snapshots" / ("0" * 40)
    shutil.copytree(pair.target, snapshot)
    (cache / "models--org--good" / "refs").mkdir()
    (cache / "models--org--good" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", partial(huggingface_hub.scan_cache_dir, cache))
    return cache


def test_a_folders_models_are_listed_with_what_hinders_them(offspec: Offspec, shelf: Path) -> None:
    shown = offspec("models", "list", shelf)
    head, bad, why, good = shown.out.splitlines()
    assert head.split() == ["model", "size", "format", "draft"]
    assert bad.startswith(str(shelf / "bad"))
    assert bad.endswith("does not run")
    assert "neither model.safetensors" in why
    assert good.split()[0] == str(shelf / "good")
    assert good.split()[-2:] == ["float32", "lookup"]
    rows = [json.loads(line) for line in offspec("models", "list", shelf, "--json").out.splitlines()]
    assert [(Path(row["name"]).name, bool(row["fault"])) for row in rows] == [("bad", True), ("good", False)]
    assert rows[1]["size_bytes"] == sum(file.stat().st_size for file in (shelf / "good").iterdir())
    offspec("models", "list", shelf / "nowhere").refusal(2, "nowhere", "folder")


def test_the_hubs_models_are_listed_and_removed(offspec: Offspec, hub: Path) -> None:
    shown = offspec("models").out.splitlines()
    assert [line.split()[0] for line in shown][:2] == ["model", "builtin"]
    assert shown[-1].split()[0] == "org/good"
    assert offspec("models", "rm", "org/good", stdin=b"n\n").code == 130
    assert (hub / "models--org--good").is_dir()
    assert "removed" in offspec("models", "rm", "org/good", "--yes").err
    assert not (hub / "models--org--good").exists()
    offspec("models", "rm", "org/good", "-y").refusal(2, "org/good", "cache")
    offspec("models", "rm", "builtin", "-y").refusal(2, "builtin", "pip uninstall")


def test_pull_tells_where_a_model_is(offspec: Offspec, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offspec("models", "pull", shelf / "good").out == f"{shelf / 'good'}\n"
    offspec("models", "pull").refusal(2, "models pull ORG/NAME")
    assert offspec("models", "rm", shelf / "good", "-y").code == 0
    assert not (shelf / "good").exists()
    assert offspec("models", "rm", shelf / "notes", "-y").code == 2
