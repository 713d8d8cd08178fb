"""Engines whose rows are rounded to 8 bits: texts equal plain decoding's, and what cannot be rounded is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import Engine
from offspec.errors import UsageError
from offspec.model.decoder import CachedDecoder, TextRows, pass_together
from offspec.model.exactness import arithmetic_of

from ..cli.sandbox import write_gguf
from ..machines import needs_kernels
from ..pair import Pair, build_pair
from ..refusals import refused

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), 3, max_position_embeddings=512)


@pytest.fixture(scope="module")
def packed(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target in blocks of 32."""
    file = tmp_path_factory.mktemp("packed") / "target.gguf"
    write_gguf(pair.target, file, {"attn_": "Q8_0", "ffn_gate": "Q4_0", "ffn_up": "Q8_0", "norm": "F32"})
    return file


def load(folder: Path, draft: str = "none", **options: Any) -> Engine:
    return Engine.load(str(folder), draft=draft, device="cpu", **options)


@pytest.fixture(scope="module")
def engine(packed: Path, pair: Pair) -> Iterator[Engine]:
    with load(packed, str(pair.draft), arithmetic="int8") as engine:
        yield engine


def logits(engine: Engine) -> torch.Tensor:
    cached = CachedDecoder(engine.target)
    return engine.target.logits(pass_together([(cached, TextRows.of_chain([3, 5, 7]))]))


def test_rows_are_rounded_and_no_more(engine: Engine, packed: Path) -> None:
    assert engine.is_exact
    with load(packed) as other:
        found, expected = logits(engine), logits(other)
        assert arithmetic_of(engine.target) == f"{arithmetic_of(other.target)}, activations in 8 bits"
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_where_it_would_change_nothing(pair: Pair, packed: Path) -> None:
    with refused(UsageError, "int8", "GGUF", "omit it"):
        load(pair.target, arithmetic="int8")
    with refused(UsageError, "exact", "int8", "fast", "int4"):
        load(packed, arithmetic="int4")
