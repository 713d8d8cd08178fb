"""OpenAI's API as JSON: what requests mean, what is refused, and how answers are written."""

from __future__ import annotations

from typing import Any

import pytest

from offspec import SamplingParams
from offspec.cli.server.openai_requests import parse
from offspec.errors import UsageError
from offspec.stats import Stats

from ...refusals import refused
from .test_tools import WEATHER

DEFAULTS = SamplingParams(40, temperature=0.5, top_k=7)
USER = {"role": "user", "content": "hi"}
BEGUN, CONTINUED = {"role": "assistant", "content": "yes"}, {"continue_final_message": True}
FIGURES = Stats(num_prompt_tokens=9, num_prefilled_tokens=4, num_tokens=3, num_passes=2).as_dict()


def test_what_a_request_does_not_say_is_as_the_server_has_it() -> None:
    asked = parse("chat", {"model": "any", "messages": [USER]}, DEFAULTS)
    assert (asked.params, asked.prompt, asked.streams, asked.wants_usage) == (DEFAULTS, [USER], False, False)


def test_what_a_request_says_is_taken() -> None:
    body = {
        "prompt": "def f(",
        "max_tokens": 5,
        "temperature": 1,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -1,
        "logit_bias": {"17": -100, "3": 2.5},
        "seed": 4,
        "stop": "\n",
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = parse("text", body, DEFAULTS)
    assert asked.params == SamplingParams(
        5, 1, 3, 0.9, 0.1, 1.1, 4, ("\n",), True, None, 0.5, -1, ((17, -100.0), (3, 2.5))
    )
    assert (asked.prompt, asked.streams, asked.wants_usage) == ("def f(", True, True)


def test_what_other_local_servers_take_for_no_limit_a_drawn_seed_and_off() -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        params = parse(
            "chat", {"messages": [USER], name: -1, "seed": -1, "top_k": -1}, SamplingParams(5, seed=3)
        ).params
        assert (params.seed, params.top_k) == (None, 0)
        assert params.max_new_tokens > 10**9


def test_a_prompt_is_a_text_or_token_ids() -> None:
    prompts: list[tuple[Any, Any]] = [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])]
    for given, meant in prompts:
        assert parse("text", {"prompt": given}, DEFAULTS).prompt == meant


def test_messages_may_be_in_parts_and_bear_newer_roles() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "brief"}, {"role": "user", "content": parts, "name": "me"}]
    asked = parse("chat", {"messages": messages, "max_completion_tokens": 3}, DEFAULTS)
    assert asked.prompt == [{"role": "system", "content": "brief"}, {"role": "user", "content": "one two"}]
    assert asked.params.max_new_tokens == 3


def test_what_asks_for_nothing_is_no_reason_to_refuse() -> None:
    neutral = {"n": 1, "logprobs": None, "presence_penalty": 0.0, "tools": [], "response_format": {"type": "text"}}
    neutral |= {"bad_words": [], "use_beam_search": False, "include_stop_str_in_output": False, "typical_p": 1.0}
    neutral |= {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "mirostat": 0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0,
    }
    neutral |= {"dynatemp_range": 0.0, "json_schema": None, "structured_outputs": None, "prompt_logprobs": None}
    assert parse("chat", {"messages": [USER], **neutral, "user": "me"}, DEFAULTS).params == DEFAULTS


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([], "object"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "robot", "content": "hi"}]}, "messages[1] role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0] content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0] parts text"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0] tool_calls"),
        ({"messages": [USER], "n": 0}, "n between 1 16 0"),
        ({"messages": [USER], "offspec": {"passes": True}}, "offspec.passes stream"),
        ({"messages": [USER], "offspec": {"trees": True}}, "offspec passes trees"),
        ({"messages": [USER], "n": 2, "best_of": 3}, "best_of text completions"),
        ({"messages": [USER], "logprobs": 0}, "logprobs true 0"),
        ({"messages": [USER], "echo": True}, "echo text"),
        ({"messages": [USER], "guided_choice": ["a"]}, "guided_choice supported"),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt continue_final_message"),
        ({"messages": [USER], **CONTINUED}, "continue_final_message last assistant"),
        ({"messages": [USER, {"role": "assistant", "content": ""}], **CONTINUED}, "continue_final_message text"),
        ({"messages": [USER, BEGUN], **CONTINUED, "add_generation_prompt": True}, "continue_final_message omit"),
        ({"messages": [USER, BEGUN], **CONTINUED, "tools": [WEATHER]}, "continue_final_message tools"),
        ({"messages": [USER, BEGUN], **CONTINUED, "regex": "a"}, "continue_final_message response_format"),
        ({"messages": [USER, BEGUN], "continue_final_message": 1}, "continue_final_message true false"),
        ({"messages": [USER], "mirostat": 2}, "mirostat supported"),
        ({"messages": [USER], "temperature": 10**400}, "temperature large"),
        ({"messages": [USER], "max_tokens": True}, "max_tokens number True"),
        ({"messages": [{"role": "user", "content": [["x"]]}]}, "messages[0] parts text"),
        ({"messages": [USER], "logit_bias": {"word": 1}}, "logit_bias token ids word"),
        ({"messages": [USER], "top_p": ["x" * 10**6]}, "top_p number"),
        ({"messages": [USER], "stream": "yes"}, "stream true false"),
    ],
)
def test_what_cannot_be_meant_or_followed_is_named(body: Any, named: str) -> None:
    with refused(UsageError, *named.split()) as caught:
        parse("chat", body, DEFAULTS)
    assert len(str(caught.value)) < 200


def test_a_begun_answer_is_continued() -> None:
    for fields in (CONTINUED, {**CONTINUED, "add_generation_prompt": False, "tools": [WEATHER], "tool_choice": "none"}):
        assert parse("chat", {"messages": [USER, BEGUN], **fields}, DEFAULTS).continues
    assert not parse("chat", {"messages": [USER, BEGUN]}, DEFAULTS).continues
    with refused(UsageError, "continue_final_message", "chats"):
        parse("text", {"prompt": "hi", **CONTINUED}, DEFAULTS)


@pytest.mark.parametrize("prompt", [None, [], [True], [1, "a"], [[]], [["a"]]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with refused(UsageError, "prompt", "string", "token ids"):
        parse("text", {"prompt": prompt}, DEFAULTS)


def test_a_request_may_have_several_prompts() -> None:
    prompts: list[Any] = [["a", "b"], [[1, 2], [3]], ["a", [1]]]
    for given in prompts:
        asked = parse("text", {"prompt": given, "n": 3}, DEFAULTS)
        assert (asked.prompts, asked.num_choices) == (given, 3 * len(given))


def test_log_probabilities_of_chats_and_of_texts() -> None:
    chats: list[tuple[Any, Any]] = [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)]
    chats += [({"logprobs": False, "top_logprobs": 0}, None)]
    for fields, number in chats:
        params = parse("chat", {"messages": [USER], **fields}, DEFAULTS).params
        assert (params.logprobs, params.prompt_logprobs) == (number, False)
    texts: list[tuple[Any, Any]] = [({}, None), ({"logprobs": 0}, 0), ({"logprobs": 3}, 3), ({"logprobs": False}, None)]
    for fields, number in texts:
        assert parse("text", {"prompt": "a", **fields}, DEFAULTS).params.logprobs == number
        asked = parse("text", {"prompt": "a", "echo": True, "max_tokens": 0, **fields}, DEFAULTS)
        assert (asked.params.logprobs, asked.params.prompt_logprobs) == (number, number is not None)
        assert (asked.echoes, asked.omits_answer, asked.params.max_new_tokens) == (True, True, 1)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"logprobs": True}, "logprobs number True"),
        ({"logprobs": 21}, "logprobs 0 20 21"),
        ({"logprobs": 2, "top_logprobs": 2}, "top_logprobs chats"),
        ({"max_tokens": 0}, "max_tokens 1 0"),
    ],
)
def test_what_texts_cannot_have(body: Any, named: str) -> None:
    with refused(UsageError, *named.split()):
        parse("text", {"prompt": "a", **body}, DEFAULTS)
