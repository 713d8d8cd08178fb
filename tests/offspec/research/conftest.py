"""A pair deep enough for heads that read several layers, and its target as a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from offspec import Engine
from offspec.checkpoints.opening import open_model

from ...pair import Pair, build_pair

if TYPE_CHECKING:
    from offspec.research.distillation import Teacher


@pytest.fixture(scope="session")
def deep_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("deep"), num_layers=4)


@pytest.fixture(scope="module")
def teacher(deep_pair: Pair) -> Iterator[Teacher]:
    from offspec.research.distillation import Teacher  # which imports accelerate, as a bare machine cannot

    with Engine.load(str(deep_pair.target), draft="none", device="cpu", dtype="fp32") as engine:
        yield Teacher(engine.target, open_model(deep_pair.target, "fp32", []), engine.tokenizer)
