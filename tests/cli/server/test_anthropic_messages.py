"""Anthropic's Messages API: requests as chats, and answers, by Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from offspec import Engine
from offspec.cli.server.anthropic_messages import as_chat
from offspec.errors import UsageError

from ...refusals import refused
from .serving import Client
from .test_tools import WEATHER

USER = {"role": "user", "content": "hi"}
SCHEMA = WEATHER["function"]["parameters"]
TOOL = {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Anthropic's client, whose import takes seconds."""
    return pytest.importorskip("anthropic", reason="Anthropic's client is missing: pip install 'offspec[test]'")


@pytest.fixture(scope="module")
def claude(anthropic: Any, served_pair: tuple[Client, Engine]) -> Generator[Any, None, None]:
    port = served_pair[0].port
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="k", max_retries=0) as found:
        yield found


def ask(claude: Any, *messages: Any, **fields: Any) -> Any:
    return claude.messages.create(model="any", messages=messages or [USER], **{"max_tokens": 8, **fields})


def test_a_whole_message_and_its_stream_are_the_same(claude: Any) -> None:
    whole = ask(claude, system="Be brief.", extra_body={"seed": 3})
    with claude.messages.stream(
        model="any",
        messages=[USER],
        max_tokens=8,
        system=[{"type": "text", "text": "Be brief."}],
        extra_body={"seed": 3},
    ) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert (whole.stop_reason, last.stop_reason, whole.role) == ("max_tokens", "max_tokens", "assistant")
    assert whole.usage.output_tokens == last.usage.output_tokens == 8
    assert last.usage.cache_read_input_tokens > 0  # what the first request scored
    total = last.usage.input_tokens + last.usage.cache_read_input_tokens
    assert total == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert whole.offspec["num_passes"] >= 1


def test_counted_tokens_are_those_of_the_request(claude: Any) -> None:
    counted = claude.messages.count_tokens(model="any", messages=[USER], tools=[TOOL], system="Be brief.")
    usage = ask(claude, system="Be brief.", tools=[TOOL]).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_stop_sequence_is_named(claude: Any) -> None:
    text = ask(claude, extra_body={"seed": 1}).content[0].text
    stop = text[1:3]
    answer = ask(claude, stop_sequences=["never", stop], extra_body={"seed": 1})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in answer.content) == text[: text.index(stop)]


def test_tools_are_called_whole_and_streamed(claude: Any) -> None:
    answer = ask(claude, max_tokens=300, **FORCED)
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input["city"] in ("Rome", "Oslo")
    later = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [RESULT]}]
    later[2]["content"][0]["tool_use_id"] = call.id
    with claude.messages.stream(model="any", messages=later, max_tokens=300, **FORCED) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_message()
    assert last.content[0].input["city"] in ("Rome", "Oslo")
    assert {"message_start", "content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds


def test_errors_are_those_that_the_client_expects(
    anthropic: Any, claude: Any, served_pair: tuple[Client, Engine]
) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        ask(claude, max_tokens=0)
    assert raised.value.body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in raised.value.body["error"]["message"]
    client, _ = served_pair
    with pytest.raises(anthropic.AuthenticationError):
        ask(anthropic.Anthropic(base_url=f"http://127.0.0.1:{client.port}", api_key="wrong", max_retries=0))
    embeddings = client.ask("POST", "/v1/embeddings", {"input": "a"}, authorization="Bearer k")
    assert (embeddings.status, embeddings.body["error"]["message"].count("\n")) == (404, 0)


def test_turns_become_messages_of_a_chat() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a file"}}
    messages = [
        {"role": "user", "content": [document, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes"}, CALL]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}]},
    ]
    body = {"messages": messages, "system": "S", "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}}
    chat = as_chat({**body, "stop_sequences": ["x"], "tools": [TOOL], "tool_choice": {"type": "any"}})
    assert [(m["role"], m["content"]) for m in chat["messages"]] == [
        ("system", "S"),
        ("user", "a file?"),
        ("assistant", "Yes"),
        ("tool", "sunny"),
        ("user", "and?"),
    ]
    assert chat["messages"][2]["reasoning_content"] == "Hm."
    assert json.loads(chat["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert (chat["user"], chat["stop"], chat["tool_choice"]) == ("u", ["x"], "required")
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}
    assert chat["tools"][0]["function"]["parameters"] == SCHEMA


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0] role"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "assistant beginnings"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] images"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]}, "text"),
        ({"messages": [USER], "mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": [USER], "tools": [{"type": "web_search_20250305"}]}, "tools[0] custom"),
        ({"messages": [USER], "thinking": {"type": "much"}}, "thinking.type enabled"),
    ],
)
def test_what_is_refused(body: Any, words: str) -> None:
    with refused(UsageError, *words.split()):
        as_chat(body)
