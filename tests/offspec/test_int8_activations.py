"""Engines whose rows are rounded to 8 bits: texts equal plain decoding's, and what cannot be rounded is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.errors import UsageError
from offspec.model.decoder import CachedDecoder, TextRows, pass_together
from offspec.model.exactness import arithmetic_of

from ..cli.sandbox import write_gguf
from ..machines import needs_kernels
from ..pair import Pair, build_pair
from ..refusals import refused

pytestmark = needs_kernels
PROMPTS = ("def area(", "x = 1", "class Stack:\n    def push(self, ")
PLAIN = SpeculationParams(budget=0)


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


def text(engine: Engine, prompt: str, params: SamplingParams, speculation: SpeculationParams) -> list[int]:
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


def logits(engine: Engine) -> torch.Tensor:
    cached = CachedDecoder(engine.target)
    return engine.target.logits(pass_together([(cached, TextRows.of_chain([3, 5, 7]))]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_equal_plain_decoding(engine: Engine, temperature: float) -> None:
    assert engine.is_exact
    params = SamplingParams(10, temperature=temperature, seed=3, ignore_eos=True)
    plain = [text(engine, prompt, params, PLAIN) for prompt in PROMPTS]
    assert [text(engine, prompt, params, SpeculationParams(budget=24)) for prompt in PROMPTS] == plain
    together: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    for index, step in engine.generate_many(PROMPTS, params):
        together[index] += step.token_ids
    assert list(together.values()) == plain


def test_rows_are_rounded_and_no_more(engine: Engine, packed: Path) -> None:
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
