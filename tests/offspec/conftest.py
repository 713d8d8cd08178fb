"""Engines of these tests are loaded with assumed rates; most have the same target and draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..assumed_rates import assumed_rates  # noqa: F401 (for each module)

if TYPE_CHECKING:
    from ..pair import Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two layers each; tests change copies (`pair.variant`)."""
    from ..pair import build_pair

    return build_pair(tmp_path_factory.mktemp("pair"))
