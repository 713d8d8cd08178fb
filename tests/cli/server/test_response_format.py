"""`response_format` and its other names: answers that obey, asked by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from offspec import Constraint, Engine, SamplingParams, SpeculationParams
from offspec.cli.server.openai_requests import parse
from offspec.errors import UsageError
from offspec.text.tool_calls import ToolFormat

from ...refusals import refused, tells
from .serving import USER, Client

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install 'offspec[test]'")
pydantic = pytest.importorskip("pydantic")  # OpenAI's client needs it

DEFAULTS = SamplingParams(40)
SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 2}


class Car(pydantic.BaseModel):  # type: ignore[misc, name-defined] (untyped where pydantic is not installed)
    color: Literal["red", "green"]
    doors: list[Literal[3, 5]] = pydantic.Field(min_length=2, max_length=2)


def by_schema(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "colors", "schema": schema, **fields}}


# ------------------------------------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint.json_object()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Constraint.json_schema(SCHEMA)),
        ({"response_format": by_schema()}, Constraint.json_schema(SCHEMA)),
        (
            {"response_format": by_schema(strict=False)},
            Constraint.json_schema({**SCHEMA, "x-guidance": {"lenient": True}}),
        ),
        ({"json_schema": SCHEMA}, Constraint.json_schema(SCHEMA)),
        ({"guided_regex": "a+"}, Constraint.regex("a+")),
        ({"grammar": 'root ::= "a"'}, Constraint.grammar('root ::= "a"')),
        ({"grammar": "", "response_format": None}, None),
    ],
    ids=str,
)
def test_a_request_says_what_its_answer_must_be(body: Any, constraint: Constraint | None) -> None:
    assert parse("chat", {"messages": [USER], **body}, DEFAULTS).params.constraint == constraint


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format type json_object"),
        ({"response_format": by_schema(strict="yes")}, "strict true false"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "only one guided_regex"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_named(body: Any, named: str) -> None:
    with refused(UsageError, *named.split()):
        parse("chat", {"messages": [USER], **body}, DEFAULTS)


# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_an_answer_is_plain_decoding_under_the_schema(asker: Any, engine: Engine, temperature: float) -> None:
    params = SamplingParams(60, temperature=temperature, seed=4, constraint=Constraint.json_schema(SCHEMA))
    plain = engine.complete([USER], params, SpeculationParams(budget=0))
    settings = {"temperature": temperature, "seed": 4, "max_tokens": 60, "response_format": by_schema(strict=True)}
    whole = asker.chat.completions.create(model="any", messages=[USER], **settings)
    assert whole.choices[0].message.content == plain
    assert whole.choices[0].finish_reason == "stop"
    assert len(json.loads(plain)) == 2
    parts = asker.chat.completions.create(model="any", messages=[USER], stream=True, **settings)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == plain


def test_each_of_several_answers_obeys(asker: Any) -> None:
    answers = asker.completions.create(
        model="any", prompt="hi", n=3, seed=5, temperature=1, max_tokens=60, extra_body={"guided_regex": "(yes|no)!"}
    )
    assert {choice.text for choice in answers.choices} <= {"yes!", "no!"}


def test_an_answer_that_is_cut_says_so(asker: Any) -> None:
    settings = {"messages": [USER], "max_tokens": 3, "model": "any"}
    answer = asker.chat.completions.create(**settings, response_format=by_schema())
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        asker.chat.completions.parse(**settings, response_format=Car)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": by_schema({"type": "array", "uniqueItems": True})}, ["uniqueItems"]),
        ({"guided_regex": "a("}, ["regex"]),
        ({"guided_regex": "a" * 300_000}, ["regex", 262144]),
        ({"guided_regex": r"[^\s\S]"}, ["regex", "no token", "first"]),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("streams", [False, True])
def test_what_cannot_be_compiled_is_a_bad_request(asker: Any, streams: bool, body: Any, words: list[object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asker.chat.completions.create(model="any", messages=[USER], stream=streams, extra_body=body)
    assert caught.value.type == "invalid_request_error"
    assert tells(caught.value.message, *words)
    assert asker.completions.create(model="any", prompt="hi", max_tokens=2).choices[0].finish_reason == "length"


def test_a_schema_that_is_not_strict_ignores_what_is_not_implemented(asker: Any) -> None:
    schema = {**SCHEMA, "uniqueItems": True}
    answer = asker.chat.completions.create(
        model="any", messages=[USER], max_tokens=60, response_format=by_schema(schema, strict=False)
    )
    assert len(json.loads(answer.choices[0].message.content)) == 2


def test_a_dead_end_is_told_and_the_server_stays_up(client: Client) -> None:
    body = {"prompt": "hi", "grammar": 'start: "ab" B\nB: /[^\\s\\S]/', "max_tokens": 9}
    reply = client.ask("POST", "/v1/completions", body)
    assert reply.status == 400
    assert tells(reply.body["error"]["message"], "grammar", "no token")
    events = client.stream("/v1/completions", body)
    assert events[-1]["error"]["message"] == reply.body["error"]["message"]
    assert client.chat(USER).status == 200


def test_half_a_character_is_a_bad_request(client: Client) -> None:
    """OpenAI's client cannot send it; others can."""
    reply = client.chat(USER, response_format=by_schema({"const": "\ud800"}))
    assert reply.status == 400
    assert tells(reply.body["error"]["message"], "schema")


def test_texts_under_different_constraints_share_passes(engine: Engine) -> None:
    """And each is the text that it is alone: free, constrained, cut, and bound from a marker on."""
    late = ToolFormat("hermes", "<tool_call>").late_constraint({"f": SCHEMA}, allows_several=True, yields=True)
    constraints = [None, Constraint.json_schema(SCHEMA), Constraint.regex("(yes|no){12}"), late]
    each = [SamplingParams(20, temperature=1, seed=3, constraint=constraint) for constraint in constraints]
    texts = [""] * len(each)
    for index, step in engine.generate_many([[USER]] * len(each), each):
        texts[index] += step.text
    assert texts == [engine.complete([USER], params, SpeculationParams(budget=0)) for params in each]
    assert texts[3] == texts[0], "no call has begun"
