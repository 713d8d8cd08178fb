"""The core is whole without the room of research, which has every other method that a flag names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offspec import ACCEPTS, TREES, Engine, SamplingParams, methods

from ..pages import ROOT

LISTED = """
import sys
from offspec.cli.bench import command
from offspec.research.distill_params import HEADS
print([name for name in sys.modules if name == "torch" or name.startswith("offspec.research.")])
"""


def test_research_has_each_method_that_the_core_has_not() -> None:
    assert set(ACCEPTS) - {"exact", "joint"} == set(methods.research().LOSSY)
    assert set(TREES) - {"best-first"} == set(methods.research().TREES)


def test_the_core_is_whole_without_research(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "RESEARCH", "a module that is not there")
    with Engine.load("builtin", device="cpu") as engine:
        assert engine.complete("def area(", SamplingParams(4))


def test_names_are_listed_without_the_methods() -> None:
    """In a process of its own, where nothing is imported yet."""
    listed = subprocess.run([sys.executable, "-c", LISTED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout == "['offspec.research.distill_params']\n"
