"""Looking up in files takes memory: it is planned for, and too little to build an index is one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offspec import Engine
from offspec.errors import MemoryLimitError
from offspec.text.lookup_files import lookup_memory_bytes, open_index

from ..refusals import refused


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("for item in items:\n    print(item)\n" * 500)
    return file


def test_an_index_is_an_item_of_the_plan(text: Path) -> None:
    with_index = Engine.load("builtin", device="cpu", context=512, lookup_files=[text])
    without = Engine.load("builtin", device="cpu", context=512)
    assert with_index.plan is not None
    assert without.plan is not None
    (item,) = (item for item in with_index.plan.placement.items if item.name == "lookup index")
    assert item.on_host == lookup_memory_bytes([text])[0] > 0
    assert item.name not in {item.name for item in without.plan.placement.items}
    with_index.close()
    without.close()


def test_too_little_memory_to_build_an_index_is_one_line_and_enough_for_one_that_is_built(text: Path) -> None:
    tokenizer = Engine.load("builtin", device="cpu", draft="none").tokenizer
    needed = sum(lookup_memory_bytes([text]))
    with refused(MemoryLimitError, "lookup index", "RAM"):
        open_index([text], tokenizer, free_bytes=needed - 1)
    context = tokenizer.encode("for item in")
    built = open_index([text], tokenizer, free_bytes=needed).continuations(context, 4, 8)
    mapped = open_index([text], tokenizer, free_bytes=0).continuations(context, 4, 8)
    assert all(np.array_equal(one, other) for one, other in zip(built, mapped, strict=True))
    assert built[0].size
