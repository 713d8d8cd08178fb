"""The built-in pair keeps what it promises: sizes, one vocabulary, held-out prompts.

What it writes is not judged here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from offspec import Engine, SamplingParams, builtin
from offspec.loaders.files.containers import open_checkpoint
from offspec.text.tokenizer import Tokenizer, check_vocabularies
from offspec.tools.verification import settings_of, verify

ROLES = ("target", "draft")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("builtin", device="cpu", dtype="fp32") as loaded:
        yield loaded


def num_parameters(role: str) -> int:
    return sum(math.prod(info.shape) for info in open_checkpoint(builtin.path(role)).tensors.values())


def test_sizes() -> None:
    folder = Path(builtin.__file__).parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 18e6
    assert 6e6 <= num_parameters("target") <= 8e6
    assert num_parameters("draft") <= num_parameters("target") / 8
    # A grown copy is exact in bf16 only if it is wider by a power of four: 4096 = 256 · 4².
    assert open_checkpoint(builtin.path("target")).config["hidden_size"] == 256


def test_one_vocabulary() -> None:
    target, draft = (Tokenizer.load(builtin.path(role)) for role in ROLES)
    check_vocabularies(target, draft)
    assert target.vocab_size == draft.vocab_size
    assert 3500 <= target.vocab_size <= 4500
    assert target.eos_ids
    text = "def area(width):\n\treturn 'schön €'\n"
    assert target.decode(target.encode(text)) == text


def test_prompts_are_many_and_fit(engine: Engine) -> None:
    prompts = builtin.prompts()
    assert len(prompts) >= 20
    assert len(set(prompts)) == len(prompts)
    assert all(4 <= len(engine.encode(prompt)) <= engine.target.config.max_context - 256 for prompt in prompts)


def test_it_is_what_load_finds_without_a_name(engine: Engine) -> None:
    assert (engine.name, engine.draft_name) == ("builtin", "builtin")
    assert engine.draft.decoder is not None
    messages = [{"role": "user", "content": "Return the area."}]
    *_, last = engine.generate(messages, SamplingParams(max_new_tokens=4))
    assert last.stats.num_tokens <= 4
    assert engine.encode(messages) != engine.encode("Return the area.")


@pytest.mark.slow
def test_guesses_leave_the_text_alone(engine: Engine) -> None:
    settings = settings_of([0, 1], 0.9, [16], ["coupled"], ["own"])
    report = verify(engine, builtin.prompts()[:1], settings, max_new_tokens=8)
    assert report.is_exact, report.errors[0]
    assert all(tokens_per_pass >= 1 for tokens_per_pass in report.tokens_per_pass)
