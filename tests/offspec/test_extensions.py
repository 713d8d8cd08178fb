"""Methods by name: the core's first, extensions' looked up when they are asked for, and imported when they are used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from offspec import ACCEPTS, TREES, Engine, SamplingParams, SpeculationParams, extensions
from offspec.errors import UsageError
from offspec.extensions import Methods

from ..refusals import refused


@pytest.fixture
def laboratory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An extension with one method, in place of the real ones."""
    module = ModuleType("laboratory")
    module.METHODS = {"a greeting": {"hello": "laboratory_of_greetings:hello"}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "laboratory", module)
    monkeypatch.setattr(extensions, "EXTENSIONS", ["laboratory"])
    return module


def test_an_extension_adds_names_and_is_imported_when_its_method_is_used(
    laboratory: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    greetings = Methods("a greeting", "plain")
    assert list(greetings) == ["plain", "hello"]
    assert len(greetings) == 2
    assert [name in greetings for name in ("plain", "hello", "bye", ["plain"])] == [True, True, False, False]
    with pytest.raises(ModuleNotFoundError, match="laboratory_of_greetings"):
        greetings.load("hello")
    home = ModuleType("laboratory_of_greetings")
    home.hello = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    assert greetings.load("hello") is print


def test_what_no_extension_adds_is_none(laboratory: ModuleType) -> None:
    assert Methods("a greeting", "plain").load("plain") is None, "the core has code of its own for it"
    assert Methods("a greeting").load("bye") is None
    assert list(Methods("another kind", "one")) == ["one"]


def test_the_core_is_whole_without_the_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "EXTENSIONS", [])
    assert [list(names) for names in (ACCEPTS, TREES)] == [["exact", "joint"], ["best-first"]]
    with refused(UsageError, "accept", "joint", "mix"):
        SpeculationParams(accept="mix")
    with Engine.load("builtin", device="cpu") as engine:
        assert engine.complete("def area(", SamplingParams(4))


def test_the_cores_names_need_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "EXTENSIONS", ["a module that is not there"])
    assert "plain" in Methods("a greeting", "plain")
