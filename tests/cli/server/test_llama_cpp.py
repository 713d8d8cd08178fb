"""Texts with a gap (`suffix`, `/infill`), and llama.cpp's `/tokenize`, `/detokenize` and `/props`."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from typing import Any

import pytest

from offspec import Engine, SamplingParams
from offspec.cli.server.llama_cpp import Infilling
from offspec.errors import UsageError
from offspec.text.infill import Infill, InfillTokens

from ...pair import FIM, TEMPLATE, build_pair, with_gaps
from ...refusals import refused, tells
from .serving import Client, served

PREFIX, SUFFIX = "def area(width", "\n    return width"
ASKED = {"input_prefix": "def area(", "prompt": "width", "input_suffix": SUFFIX}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Client, Engine], None, None]:
    """A model whose tokenizer has tokens for a gap."""
    folder = with_gaps(build_pair(tmp_path_factory.mktemp("coder")).target)
    with Engine.load(str(folder), draft="lookup", device="cpu") as engine, served(engine) as (client, _):
        yield client, engine


def wanted(engine: Engine, number: int = 8) -> str:
    ids = InfillTokens.of(engine.tokenizer).encode(PREFIX, Infill(SUFFIX), engine.context_limit, 8)
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


def test_infill_answers_as_llama_cpp(coder: tuple[Client, Engine]) -> None:
    client, engine = coder
    body = {**ASKED, "n_predict": 8, "samplers": ["top_k", "infill"], "n_indent": 4, "cache_prompt": True}
    whole = client.ask("POST", "/infill", body).body
    assert (whole["content"], whole["stop"], whole["stop_type"]) == (wanted(engine), True, "limit")
    assert whole["prompt"] == f"{FIM[0]}{PREFIX}{FIM[1]}{SUFFIX}{FIM[2]}"
    assert whole["timings"]["predicted_n"] == whole["tokens_predicted"] == 8
    with closing(client.open("POST", "/infill", {**body, "stream": True})) as connection:
        events = connection.getresponse().read().decode().split("\n\n")
    *parts, last = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: ")]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert {part["stop"] for part in parts} == {False}
    assert (last["content"], last["stop"], last["tokens_predicted"]) == ("", True, 8)


def test_infill_gives_the_fields_that_are_asked_for(coder: tuple[Client, Engine]) -> None:
    """As the plug-in for vim asks: values inside objects by their paths, and prompts to be read for the caches."""
    fields = ["content", "timings/prompt_n", "timings/none", "tokens_cached"]
    client, engine = coder
    for number, text in ((0, ""), (8, wanted(engine))):
        reply = client.ask("POST", "/infill", {**ASKED, "n_predict": number, "response_fields": fields}).body
        assert sorted(reply) == ["content", "timings/prompt_n", "tokens_cached"]
        assert reply["content"] == text
    assert reply["tokens_cached"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/infill"])
def test_a_model_without_tokens_for_a_gap_is_named_as_the_reason(client: Client, path: str) -> None:
    reply = client.ask("POST", path, {"prompt": "a", "suffix": "b", "input_suffix": "b", "max_tokens": 4})
    assert reply.status == 400
    assert tells(reply.body["error"]["message"], "<|fim_prefix|>", "suffix", "Qwen2.5-Coder")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0] text"),
        ({"n_probs": 3}, "n_probs"),
        ({"n_predict": "a"}, "n_predict number"),
    ],
)
def test_what_is_refused(body: Any, words: str) -> None:
    with refused(UsageError, *words.split()):
        Infilling().request(body, SamplingParams(8))


def test_tokens_and_texts(coder: tuple[Client, Engine]) -> None:
    client, engine = coder
    text = f"def é{FIM[0]}"
    ids = client.ask("POST", "/tokenize", {"content": text}).body["tokens"]
    assert ids == engine.tokenizer.encode(text)
    assert ids[-1] == engine.tokenizer.token_id(FIM[0])
    assert client.ask("POST", "/detokenize", {"tokens": ids}).body == {"content": text}
    plain = client.ask("POST", "/tokenize", {"content": text, "parse_special": False}).body["tokens"]
    assert engine.tokenizer.token_id(FIM[0]) not in plain
    assert client.ask("POST", "/detokenize", {"tokens": plain}).body == {"content": text}
    pieces = client.ask("POST", "/tokenize", {"content": "a é", "with_pieces": True}).body["tokens"]
    contents = [bytes(each["piece"]) if isinstance(each["piece"], list) else each["piece"].encode() for each in pieces]
    assert b"".join(contents).decode() == "a é"
    assert any(isinstance(each["piece"], list) for each in pieces)  # a part of a character


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"content": "x" * 9999}, "128"),
        ("/tokenize", {"content": "\ud800"}, "Unicode"),
        ("/detokenize", {"tokens": ["a"]}, "tokens list"),
        ("/detokenize", {"tokens": [-1]}, "-1 vocabulary"),
    ],
)
def test_what_cannot_be_encoded_is_refused(client: Client, path: str, body: Any, words: str) -> None:
    reply = client.ask("POST", path, body)
    assert (reply.status, reply.body["error"]["code"]) == (400, 400)
    assert tells(reply.body["error"]["message"], *words.split())


def test_properties_are_described(client: Client, engine: Engine) -> None:
    props = client.ask("GET", "/props").body
    assert props["default_generation_settings"]["n_ctx"] == engine.max_context
    assert props["default_generation_settings"]["params"]["n_predict"] == 16
    assert (props["chat_template"], props["eos_token"], props["bos_token"]) == (TEMPLATE, "<|endoftext|>", "")
    assert (props["total_slots"], props["model_path"]) == (8, "target")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_embeddings_are_refused_by_name(client: Client, path: str) -> None:
    reply = client.ask("POST", path, {"input": "a"})
    assert reply.status == 404
    assert tells(json.dumps(reply.body), "embeddings", "embedding model")
