"""Requests as clients send them are served: recorded ones (`clients.json`), LangChain's and lm_eval's own.

The recorded bodies were written down from the clients' sources, which each of them names; the texts are ours.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from offspec import Engine

from .serving import Client, served

RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("clients.json").read_text())


@pytest.fixture(scope="module")
def engine() -> Generator[Engine, None, None]:
    with Engine.load("builtin", device="cpu", context=512) as found:
        yield found


@pytest.fixture(scope="module")
def with_tools(tool_engine: Engine) -> Generator[Client, None, None]:
    with served(tool_engine, tries=True) as (found, _):
        yield found


@pytest.mark.parametrize("recorded", RECORDED, ids=itemgetter("client"))
def test_what_clients_send_is_served(recorded: dict[str, Any], client: Client, with_tools: Client) -> None:
    client = with_tools if "tools" in recorded else client
    path, body, is_chat = recorded["path"], recorded["body"], "messages" in recorded["body"]
    if body.get("stream"):
        events = client.stream(path, body)
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join((choice["delta"].get("content") or "") if is_chat else choice["text"] for choice in choices)
        if body.get("stream_options"):
            assert events[-1]["usage"]["completion_tokens"] > 0
    else:
        reply = client.ask("POST", path, body)
        assert reply.status == 200, reply
        choices = reply.body["choices"]
        text = "".join(choice["message"]["content"] if is_chat else choice["text"] for choice in choices)
    assert choices[-1]["finish_reason"] in ("stop", "length", "tool_calls")
    assert text or choices[-1]["finish_reason"] == "stop"
    if "response_format" in body:
        assert json.loads(text)["a"] in (1, 2)


def test_a_stream_tells_of_each_pass(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "def area("}], "max_tokens": 24, "seed": 1}
    events = client.stream("/v1/chat/completions", {**body, "offspec": {"passes": True}})
    passes = [event["offspec"] for event in events if not event["choices"]]
    text = "".join(token["text"] for each in passes for token in each["pass"]["tokens"])
    deltas = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    assert text == "".join(filter(None, deltas))
    assert [each["num_passes"] for each in passes] == list(range(1, len(passes) + 1))
    assert sum(len(each["pass"]["tokens"]) for each in passes) == passes[-1]["num_tokens"] == 24
    tree = passes[0]["pass"]["tree"]
    columns = [tree[name] for name in ("texts", "parents", "probabilities", "sources")]
    assert {len(column) for column in columns} == {min(tree["num_nodes"], 64)}
    path = [tree["texts"][node] for node in tree["accepted"]]
    assert [token["text"] for token in passes[0]["pass"]["tokens"]][: len(path)] == path
    plain = client.stream("/v1/chat/completions", body)
    assert all(event["choices"] for event in plain)


def scores_of(reply: Any, contexts: Sequence[int]) -> list[tuple[float, bool]]:
    """Of continuations: their log-likelihoods, and whether they are greedy, by the rules of lm_eval's `parse_logprobs`.

    The last token of each answer is generated, and does not count.
    """
    found = []
    for choice, num_context in zip(sorted(reply["choices"], key=itemgetter("index")), contexts, strict=True):
        values = choice["logprobs"]["token_logprobs"][num_context:-1]
        likeliest = choice["logprobs"]["top_logprobs"][num_context:-1]
        are_greedy = all(value == max(top.values()) for value, top in zip(values, likeliest, strict=True))
        found.append((sum(values), are_greedy))
    return found


def test_lm_eval_gets_the_likelihoods_of_the_target(client: Client, engine: Engine) -> None:
    recorded = next(each for each in RECORDED if each["client"].endswith("log-likelihoods"))
    start = engine.encode("def area(")
    greedy = [token for step in engine.generate(start, None) for token in step.token_ids][:5]
    prompts = [start + greedy, start + greedy[:2] + [greedy[2] + 1, 9]]
    reply = client.ask("POST", recorded["path"], {**recorded["body"], "prompt": prompts})
    found = scores_of(reply.body, [len(start)] * 2)
    assert [is_greedy for _, is_greedy in found] == [True, False]
    for prompt, (score, _) in zip(prompts, found, strict=True):
        target = engine.target
        hidden = target.forward(torch.tensor(prompt), torch.arange(len(prompt)), target.new_cache())
        rows = target.logits(hidden).log_softmax(-1)
        own = sum(rows[at - 1, prompt[at]].item() for at in range(len(start), len(prompt)))
        assert score == pytest.approx(own, abs=0.1)  # bf16: the rows of a pass depend slightly on their number


# ------------------------------------------------------------------------------------------------ LangChain


def chat_model(client: Client, **settings: Any) -> Any:
    langchain = pytest.importorskip("langchain_openai", reason="LangChain is missing: pip install 'offspec[test]'")
    settings |= {"max_tokens": 300, "max_retries": 0, "seed": 1, "stream_usage": True}
    return langchain.ChatOpenAI(model="any", base_url=f"http://127.0.0.1:{client.port}/v1", api_key="-", **settings)


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def test_langchain_binds_tools(with_tools: Client) -> None:
    model = chat_model(with_tools)
    bound = model.bind_tools([weather], tool_choice="any")
    answer = bound.invoke("What is the weather in Rome?")
    assert answer.tool_calls
    assert {call["name"] for call in answer.tool_calls} == {"weather"}
    assert all(call["args"]["city"] in ("Rome", "Oslo") for call in answer.tool_calls)
    messages = pytest.importorskip("langchain_core.messages")
    (call, *_) = answer.tool_calls
    result = messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    said = [messages.HumanMessage("What is the weather?"), answer.model_copy(update={"tool_calls": [call]}), result]
    streamed = None
    for part in model.bind_tools([weather]).bind(max_tokens=5).stream(said):
        streamed = part if streamed is None else streamed + part
    assert streamed.usage_metadata["output_tokens"] > 0
    gathered = None
    for part in bound.stream("What is the weather in Rome?"):
        gathered = part if gathered is None else gathered + part
    assert gathered.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")


def test_langchain_gets_structured_output(with_tools: Client) -> None:
    pydantic = pytest.importorskip("pydantic")
    Place = pydantic.create_model("Place", city=(Literal["Rome", "Oslo"], ...), is_large=(bool, ...))  # noqa: N806
    found = chat_model(with_tools).with_structured_output(Place, method="json_schema").invoke("Which city?")
    assert found.city in ("Rome", "Oslo")
