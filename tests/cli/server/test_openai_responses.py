"""OpenAI's Responses API: requests as chats, and answers, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from offspec import SamplingParams
from offspec.cli.server.answer_blocks import BlockAnswer
from offspec.cli.server.answer_forms import EVENTS, AnswerChunk
from offspec.cli.server.openai_requests import parse
from offspec.cli.server.openai_responses import ResponseAnswer, as_chat
from offspec.errors import UsageError

from ...refusals import refused
from .serving import Client
from .test_tools import FIGURES, WEATHER

openai = pytest.importorskip("openai", reason="OpenAI's client is missing: pip install 'offspec[test]'")

FUNCTION: dict[str, Any] = {"type": "function", "strict": None, **WEATHER["function"]}
FORCED: dict[str, Any] = {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "get_weather"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


@pytest.fixture(scope="module")
def responses(served_pair: tuple[Client, Any]) -> Generator[Any, None, None]:
    url = f"http://127.0.0.1:{served_pair[0].port}/v1"
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as found:
        yield found.responses


def test_a_whole_response_and_its_stream_are_the_same(responses: Any) -> None:
    fields = {"model": "any", "input": "hi", "instructions": "Be brief.", "extra_body": {"seed": 3}}
    whole = responses.create(max_output_tokens=16, **fields)
    events = list(responses.create(max_output_tokens=16, stream=True, **fields))
    last = events[-1].response
    assert whole.output_text == last.output_text == "".join(e.delta for e in events if e.type.endswith("text.delta"))
    assert (whole.status, last.status) == ("incomplete", "incomplete")
    assert last.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == last.usage.output_tokens == 16
    assert last.usage.input_tokens_details.cached_tokens > 0
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]


def test_functions_are_called_whole_and_streamed(responses: Any) -> None:
    whole = responses.create(model="any", input="hi", max_output_tokens=300, **FORCED)
    (call,) = whole.output
    assert (whole.status, call.type, call.name) == ("completed", "function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    output = {**OUTPUT, "call_id": call.call_id}
    later: list[Any] = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True), output]
    with responses.stream(model="any", input=later, max_output_tokens=300, **FORCED) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert json.loads(last.output[0].arguments)["city"] in ("Rome", "Oslo")
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]


def test_a_response_continues_another(responses: Any) -> None:
    """With its messages, but for its instructions; as if the client had sent all of them."""
    settings: dict[str, Any] = {"model": "any", "max_output_tokens": 12}
    first = responses.create(input="hi", instructions="Be brief.", **settings)
    for streams in (False, True):
        later = responses.create(input="and then?", previous_response_id=first.id, stream=streams, **settings)
        later = [*later][-1].response if streams else later
        assert later.previous_response_id == first.id
    said = {"role": "assistant", "content": first.output_text}
    asks = [{"role": "user", "content": text} for text in ("hi", "and then?")]
    alone = responses.create(input=[asks[0], said, asks[1]], **settings)
    assert (later.output_text, later.usage.input_tokens) == (alone.output_text, alone.usage.input_tokens)
    third = responses.create(input="?", previous_response_id=later.id, **settings)
    assert third.usage.input_tokens > later.usage.input_tokens


def test_a_call_is_answered_by_its_id_alone(responses: Any) -> None:
    called = responses.create(model="any", input="hi", max_output_tokens=300, **FORCED)
    output: Any = [{**OUTPUT, "call_id": called.output[0].call_id}]
    for _ in range(2):  # what is stored does not change
        later = responses.create(model="any", input=output, previous_response_id=called.id, max_output_tokens=4)
    everything = [{"role": "user", "content": "hi"}, called.output[0].model_dump(exclude_none=True), *output]
    alone = responses.create(model="any", input=everything, max_output_tokens=4)
    assert later.usage.input_tokens == alone.usage.input_tokens


def test_a_response_that_is_not_stored_is_no_beginning(responses: Any) -> None:
    first = responses.create(model="any", input="hi", max_output_tokens=2, store=False)
    assert first.store is False
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        responses.create(model="any", input="hi", previous_response_id=first.id)


def test_a_schema_holds(responses: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "A", "schema": schema, "strict": True}
    found = responses.create(model="any", input="hi", max_output_tokens=300, text={"format": form})
    assert json.loads(found.output_text)["a"] in (1, 2)


def test_an_error_within_a_stream_is_an_event(served_pair: tuple[Client, Any]) -> None:
    tokenizer = served_pair[1].tokenizer
    asked = parse("chat", as_chat({"input": "hi"}), SamplingParams(8))
    answer = ResponseAnswer({}, "m", BlockAnswer(asked, [1], tokenizer))
    answer.parts(0, AnswerChunk("a", figures=FIGURES), is_first=True)
    event = answer.error_part({"error": {"message": "no", "type": "server_error", "code": None}})
    assert (event["type"], event["code"], event["message"]) == ("error", "server_error", "no")
    assert event["sequence_number"] > 0
    assert EVENTS.written(event).startswith("event: error\ndata: {")


def test_items_become_messages_of_a_chat() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]}
    asks = {"role": "user", "content": [{"type": "input_text", "text": "?"}]}
    chat = as_chat({"instructions": "S", "input": [asks, thought, said, CALL, OUTPUT, asks], "max_output_tokens": 9})
    assert [(m["role"], m["content"]) for m in chat["messages"]] == [
        ("system", "S"),
        ("user", "?"),
        ("assistant", "Yes"),
        ("tool", "sunny"),
        ("user", "?"),
    ]
    assert chat["messages"][2]["reasoning_content"] == "Hm."
    assert chat["messages"][2]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert chat["max_completion_tokens"] == 9


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({"input": [{"type": "item_reference"}]}, "input[0] item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] texts"),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0] function"),
    ],
)
def test_what_is_refused(body: Any, words: str) -> None:
    with refused(UsageError, *words.split()):
        as_chat(body)
