"""METHODS: each method is where the table says, and commands list its name without importing it."""

from __future__ import annotations

import subprocess
import sys

from offspec.extensions import Methods
from offspec.research import METHODS

from ...pages import ROOT

CALLED = [(kind, name) for kind in METHODS for name in METHODS[kind]]
LISTED = """
import sys
from offspec import ACCEPTS, TREES
from offspec.research.distill_params import HEADS
print(*ACCEPTS, *TREES, *HEADS)
print([name for name in sys.modules if name == "torch" or name.startswith("offspec.research.")])
"""


def test_each_method_is_there() -> None:
    for kind, name in CALLED:
        assert name in Methods(kind), (kind, name)
        assert Methods(kind).load(name) is not None, (kind, name)


def test_names_are_listed_without_the_methods() -> None:
    """In a process of its own, where nothing is imported yet."""
    listed = subprocess.run(
        [sys.executable, "-c", LISTED], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {"exact", "mix", "sequoia", "eagle3", "koala"} <= set(listed[0].split())
    assert listed[1] == "[]"
