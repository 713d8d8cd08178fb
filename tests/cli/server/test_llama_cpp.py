"""Texts with a gap (`suffix`)."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from offspec import Engine, SamplingParams
from offspec.text.infill import Infill, InfillTokens

from ...pair import build_pair, with_gaps
from ...refusals import tells
from .serving import Client, served

PREFIX, SUFFIX = "def area(width", "\n    return width"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Client, Engine], None, None]:
    """A model whose tokenizer has tokens for a gap."""
    folder = with_gaps(build_pair(tmp_path_factory.mktemp("coder")).target)
    with Engine.load(str(folder), draft="lookup", device="cpu") as engine, served(engine) as (client, _):
        yield client, engine


def wanted(engine: Engine, number: int = 8) -> str:
    ids = InfillTokens.of(engine.tokenizer).encode(PREFIX, Infill(SUFFIX), 128, 8)
    return engine.complete(ids, SamplingParams(number))


def test_a_suffix_is_read_before_the_answer(coder: tuple[Client, Engine]) -> None:
    client, engine = coder
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8}
    reply = client.ask("POST", "/v1/completions", body)
    assert reply.body["choices"][0]["text"] == wanted(engine)
    parts = client.stream("/v1/completions", body)
    assert "".join(part["choices"][0]["text"] for part in parts) == wanted(engine)
    plain = client.ask("POST", "/v1/completions", {**body, "suffix": ""})
    assert plain.body["choices"][0]["text"] == engine.complete(PREFIX, SamplingParams(8))


def test_a_token_of_another_part_ends_the_answer(coder: tuple[Client, Engine]) -> None:
    client, engine = coder
    body = {"prompt": PREFIX, "max_tokens": 8, "logit_bias": {engine.tokenizer.token_id("<|fim_pad|>"): 100}}
    for suffix, ending, number in ((SUFFIX, "stop", 1), ("", "length", 8)):
        reply = client.ask("POST", "/v1/completions", {**body, "suffix": suffix})
        assert reply.body["choices"][0]["finish_reason"] == ending
        assert reply.body["usage"]["completion_tokens"] == number


def test_a_model_without_tokens_for_a_gap_is_named_as_the_reason(client: Client) -> None:
    reply = client.ask("POST", "/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 4})
    assert reply.status == 400
    assert tells(reply.body["error"]["message"], "<|fim_prefix|>", "suffix", "Qwen2.5-Coder")
