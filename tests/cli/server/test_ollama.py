"""Ollama's API: requests as chats and texts, answers, and models, by Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from offspec import Constraint, Engine, SamplingParams
from offspec.cli.server import responses
from offspec.cli.server.answer_forms import AnswerChunk
from offspec.cli.server.ollama import Ollama
from offspec.cli.server.openai_requests import with_tools
from offspec.errors import UsageError
from offspec.stats import Stats

from ...pair import build_pair, with_tokenizer_config
from ...refusals import refused, tells
from ..test_reasoning import SWITCHED
from .serving import Client, served
from .test_llama_cpp import PREFIX, SUFFIX, coder, wanted  # noqa: F401 (coder is a fixture)
from .test_tools import TAGGED, WEATHER

DEFAULTS = SamplingParams(8, temperature=0.5)
USER = {"role": "user", "content": "hi"}
FIGURES = Stats(num_prompt_tokens=9, num_tokens=3, num_passes=2).as_dict()


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("ollama", reason="Ollama's client is missing: pip install 'offspec[test]'")


@pytest.fixture(scope="module")
def ollama(library: Any, served_pair: tuple[Client, Engine]) -> Generator[Any, None, None]:
    port = served_pair[0].port
    with library.Client(f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer k"}) as found:
        found.list()  # the thread that reads headers begins here, not in the test that asks first
        yield found


@pytest.fixture(scope="module")
def coding(library: Any, coder: tuple[Client, Engine]) -> Generator[Any, None, None]:  # noqa: F811
    with library.Client(f"http://127.0.0.1:{coder[0].port}") as found:
        found.list()
        yield found


def test_a_chat_and_its_stream_are_the_same(ollama: Any, served_pair: tuple[Client, Engine]) -> None:
    options = {"num_predict": 12, "temperature": 1, "seed": 3, "num_ctx": 4096}
    messages = [{"role": "system", "content": "Be brief."}, USER]
    whole = ollama.chat("any", messages, options=options)
    parts = list(ollama.chat("any", messages, options=options, stream=True))
    said = served_pair[1].generate(messages, SamplingParams(12, temperature=1, seed=3))
    assert whole.message.content == "".join(step.text for step in said)
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (whole, parts[-1]):
        assert (last.model, last.done, last.done_reason, last.eval_count) == ("target", True, "length", 12)
        assert last.prompt_eval_count > 0
        assert last.eval_duration > 0


def test_earlier_calls_are_read(ollama: Any) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    later = {"role": "tool", "content": "sunny", "tool_name": "get_weather"}
    messages: list[Any] = [USER, {"role": "assistant", "tool_calls": [call]}]
    asked: dict[str, Any] = {"tools": [WEATHER], "options": {"num_predict": 2}}
    before = ollama.chat("any", messages, **asked)
    assert ollama.chat("any", [*messages, later], **asked).prompt_eval_count > before.prompt_eval_count


def test_calls_are_told_as_objects(served_pair: tuple[Client, Engine]) -> None:
    """Whole and streamed; a call that a limit cuts is not told."""
    tokenizer, form = served_pair[1].tokenizer, Ollama("chat")
    body = {"messages": [USER], "tools": [WEATHER]}
    asked = with_tools(form.request(body, DEFAULTS), tokenizer)
    said = f"Let me look. {TAGGED[0]}"
    told = form.answer(body, asked, "m", [[1]], tokenizer).whole([AnswerChunk(said, "eos", FIGURES)])["message"]
    wanted_call = {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert (told["content"].strip(), [call["function"] for call in told["tool_calls"]]) == (
        "Let me look.",
        [wanted_call],
    )
    for length, calls in ((len(said), [wanted_call]), (len(said) - 20, [])):
        answer = form.answer(body, asked, "m", [[1]], tokenizer)
        passages = [AnswerChunk(said[:30], None, FIGURES), AnswerChunk(said[30:length], "length", FIGURES)]
        parts = [part for passage in passages for part in answer.parts(0, passage, is_first=False)]
        messages = [part["message"] for part in parts]
        assert "".join(message["content"] for message in messages).strip() == "Let me look."
        assert [call["function"] for message in messages for call in message.get("tool_calls", [])] == calls
        assert (parts[-1]["done"], parts[-1]["done_reason"]) == (True, "length")


def test_json_is_as_the_schema_says(ollama: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    found = ollama.chat("any", [USER], format=schema, options={"num_predict": 300})
    assert json.loads(found.message.content)["a"] in (1, 2)
    found = ollama.generate("any", "hi", format=schema, options={"num_predict": 300})
    assert json.loads(found.response)["a"] in (1, 2)


def test_a_prompt_is_a_chat_or_a_text(coding: Any, coder: tuple[Client, Engine]) -> None:  # noqa: F811
    engine, options = coder[1], {"num_predict": 8}
    chat = coding.generate("any", "hi", system="Be brief.", options=options)
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert chat.response == "".join(step.text for step in engine.generate(messages, SamplingParams(8)))
    raw = coding.generate("any", PREFIX, raw=True, options=options)
    assert raw.response == engine.complete(PREFIX, SamplingParams(8))
    parts = coding.generate("any", PREFIX, suffix=SUFFIX, options=options, stream=True)
    assert "".join(part.response for part in parts) == wanted(engine)


def test_log_probabilities_are_told(coding: Any) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 4}}
    for found in (coding.generate("any", "hi", raw=True, **asked), coding.chat("any", [USER], **asked)):
        assert len(found.logprobs) == 4
        assert len(found.logprobs[0].top_logprobs) == 2
    parts = list(coding.chat("any", [USER], stream=True, **asked))
    assert sum(len(part.logprobs or ()) for part in parts) == 4


def test_without_a_prompt_the_model_is_loaded(ollama: Any) -> None:
    assert ollama.generate("any").done_reason == "load"
    assert ollama.chat("any", []).done_reason == "load"
    (part,) = ollama.generate("any", stream=True, keep_alive=0)
    assert (part.done, part.response) == (True, "")


def test_errors_are_as_its_client_reads_them(ollama: Any, library: Any) -> None:
    for streams in (False, True):
        with pytest.raises(library.ResponseError) as caught:
            list(ollama.chat("any", [USER], options={"typical_p": 0.5}, stream=streams))
        assert caught.value.status_code == 400
        assert tells(caught.value.error, "typical_p")


def test_models_are_described(ollama: Any, coding: Any, served_pair: tuple[Client, Engine]) -> None:
    (model,) = ollama.list().models
    assert (model.model, model.details.family, model.details.format) == ("target", "llama", "safetensors")
    assert model.size > 0
    assert len(model.digest) == 64
    shown = ollama.show("target")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["llama.context_length"] == served_pair[1].max_context
    assert shown.template == served_pair[1].tokenizer.chat_template
    assert coding.show("target").capabilities == ["completion", "insert"]
    assert served_pair[0].ask("GET", "/api/version", **{"X-Api-Key": "k"}).body["version"]


def test_thinking_is_told_apart(library: Any, tmp_path: Any) -> None:
    folder = with_tokenizer_config(build_pair(tmp_path).target, chat_template=SWITCHED)
    with Engine.load(str(folder), draft="none", device="cpu") as engine, served(engine) as (client, _):
        asker = library.Client(f"http://127.0.0.1:{client.port}")
        assert "thinking" in asker.show("target").capabilities
        assert asker.chat("any", [USER], think=False, options={"num_predict": 4}).message.content
        asker.close()


def test_a_client_that_waits_gets_lines_of_json_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life are white space before a line: its clients parse each line, and an empty one is no JSON."""
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.001)
    monkeypatch.setattr(responses, "SILENCE_S", 0.0)
    body = {"messages": [USER], "options": {"num_predict": 4}}
    with closing(client.open("POST", "/api/chat", body)) as connection:
        response = connection.getresponse()
        assert response.getheader("content-type") == "application/x-ndjson"
        *lines, rest = response.read().decode().split("\n")
    assert (json.loads(lines[-1])["done"], rest) == (True, "")
    assert any(line.startswith(" ") for line in lines)
    assert all(json.loads(line) for line in lines)
    with closing(
        client.open("POST", "/api/chat", {**body, "messages": [{"role": "user", "content": "x" * 999}]})
    ) as it:
        *lines, rest = it.getresponse().read().decode().split("\n")
    assert tells(json.loads(lines[-1])["error"], "128")


# ------------------------------------------------------------------------------------------------ requests


def test_options_are_those_of_a_chat() -> None:
    options = {"num_predict": 5.0, "top_k": 3.0, "top_p": 0.9, "min_p": 0.1, "seed": 4, "stop": ["\n"]}
    options |= {"repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 0}
    ignored = {"num_ctx": 8, "num_gpu": 1, "repeat_last_n": 64, "typical_p": 1.0, "mirostat": 1, "num_keep": 2}
    asked = Ollama("chat").request({"messages": [USER], "options": {**options, **ignored}}, DEFAULTS)
    assert asked.params == SamplingParams(
        5, 0, 3, 0.9, 0.1, 1.1, 4, ("\n",), frequency_penalty=0.25, presence_penalty=0.5
    )
    assert asked.streams
    unlimited = Ollama("chat").request({"messages": [USER], "options": {"num_predict": -2, "seed": -1}}, DEFAULTS)
    assert unlimited.params.max_new_tokens > 10**9
    assert not Ollama("chat").request({"messages": [USER], "stream": False}, DEFAULTS).streams
    assert asked.params != replace(asked.params, temperature=DEFAULTS.temperature)


@pytest.mark.parametrize(
    ("form", "constraint"),
    [("", None), (None, None), ("json", Constraint.json_object()), ({"type": "array"}, None)],
    ids=str,
)
def test_a_format_is_a_constraint(form: Any, constraint: Constraint | None) -> None:
    params = Ollama("generate").request({"prompt": "a", "format": form}, DEFAULTS).params
    assert params.constraint == (Constraint.json_schema(form) if isinstance(form, dict) else constraint)


@pytest.mark.parametrize(("think", "settings"), [(True, {}), (False, {}), ("high", {"reasoning_effort": "high"})])
def test_thinking_is_a_setting_of_the_template(think: Any, settings: Any) -> None:
    asked = Ollama("chat").request({"messages": [USER], "think": think}, DEFAULTS)
    assert asked.template_settings == {"enable_thinking": bool(think), **settings}


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("chat", [], "JSON object"),
        ("chat", {"messages": [{"role": "robot", "content": ""}]}, "messages[0] role"),
        ("chat", {"messages": [{**USER, "images": ["a"]}]}, "messages[0].images"),
        ("chat", {"messages": [USER], "options": {"top_k": 1.5}}, "top_k 1.5"),
        ("chat", {"messages": [USER], "think": "hard"}, "think low medium high"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, "raw system"),
    ],
)
def test_what_is_refused(kind: Any, body: Any, words: str) -> None:
    with refused(UsageError, *words.split()):
        Ollama(kind).request(body, DEFAULTS)
