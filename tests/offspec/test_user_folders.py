"""Folders of users with and without a home."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import pytest

from offspec.user_folders import NO_HOME, Kind, expand_home, home_folder, user_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="homes as POSIX has them")


@pytest.fixture
def _no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is a number alone."""
    for name in ("HOME", *(f"XDG_{kind.upper()}_HOME" for kind in get_args(Kind))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)


def test_a_home_is_put_in_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_folder() == tmp_path
    assert expand_home("~/a") == tmp_path / "a"
    assert expand_home(Path("a/~")) == Path("a/~")
    assert expand_home("~nobody-of-this-name/a") == Path("~nobody-of-this-name/a")


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_environment_names_folders(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if sys.platform == "linux":
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path))
        assert user_folder(kind) == tmp_path / "offspec"


@pytest.mark.usefixtures("_no_home")
def test_without_a_home_nothing_is_there_nor_can_be_written() -> None:
    for folder in (home_folder(), *map(user_folder, get_args(Kind))):
        assert folder.is_relative_to(NO_HOME)
        assert not folder.exists()
        with pytest.raises((NotADirectoryError, FileExistsError)):
            folder.mkdir(parents=True)
    assert expand_home("~/a") == Path("~/a")
