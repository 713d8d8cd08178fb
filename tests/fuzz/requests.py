"""Random bodies of requests to a server: each is answered in JSON with status 200 or 4xx, and the server stays up.

    python -m tests.fuzz.requests [--count 2000] [--seed 0]

asks a server with the built-in pair.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from contextlib import closing
from typing import Any

from offspec import Engine

from ..cli.server.serving import Client, served

TEXTS = ["", "a", "def f(x):\n    return", "é\u0000\u202e", "\ud800", "<|end|>", "<think>", "x" * 300, "</tool_call>"]
NUMBERS = [0, 1, 2, -1, 3.5, 0.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**63, 2**64, -(2**70), 10**400]
ODD: list[Any] = [None, True, False, [], {}, [[]], [None], {"a": 1}, [1, "a"], [{}], [[[[]]]], "null", "1", *NUMBERS]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False}
MESSAGES: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "system", "content": "be brief"},
    {"role": "developer", "content": [{"type": "text", "text": "parts"}]},
    {"role": "assistant", "content": None, "reasoning_content": "hm"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "{}"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    {"role": "user"},
    {"role": "user", "content": "\ud800"},
    {"content": "x"},
]
FUNCTION = {"name": "f", "description": "does", "parameters": SCHEMA}
FIELDS: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 2, 1e-300, 1e300],
    "top_p": [1, 0.1, 1e-300, 0],
    "top_k": [0, 1, 50, -1, 10**9],
    "min_p": [0, 0.1, 1],
    "frequency_penalty": [-2, 0.5, 2, 2.1],
    "presence_penalty": [-2, 0.5, 2, 2.1],
    "repetition_penalty": [1, 1.3, 1e-300, 1e300, 0],
    "logit_bias": [{"1": 5}, {"1": -100, "2": 100}, {"999999999": 1}, {"a": 1}, {"1": "a"}, {"-1": 1}],
    "seed": [0, 7, 2**64 - 1, -1],
    "stop": ["\n", ["a", "b"], [""], ["a"] * 100, "\ud800"],
    "n": [1, 2, 3, 17],
    "best_of": [1, 2],
    "echo": [False, True],
    "logprobs": [False, True, 0, 3, 20, 21],
    "top_logprobs": [0, 2, 20],
    "max_tokens": [3, 0, 1, -1],
    "max_completion_tokens": [1, 2],
    "n_predict": [1, -1],
    "ignore_eos": [True],
    "stream": [True],
    "stream_options": [{"include_usage": True}, {"include_usage": 3}],
    "response_format": [
        {"type": "json_object"},
        {"type": "text"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
        {"type": "json_schema"},
    ],
    "json_schema": [SCHEMA, "{", {"$ref": "#/nowhere"}],
    "grammar": ['root ::= "a" | "b"', "root ::=", "start: /[a-z]+/"],
    "regex": ["[ab]+", "(", "(?=x)"],
    "guided_json": [SCHEMA],
    "tools": [[{"type": "function", "function": FUNCTION}], [{"type": "function"}], [FUNCTION]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}, "f"],
    "parallel_tool_calls": [True, False],
    "chat_template_kwargs": [{"enable_thinking": False}, {"messages": []}, {"x": {"y": [1]}}],
    "user": ["me", "\ud800\n"],
    "suffix": ["", "x"],
    "best_guess": [1],  # unknown fields are ignored
}


PROMPTS: list[Any] = ["def f(", [5, 6], ["a", [7]], [[1], [2]], "", [], [0], [10**9], "x" * 2000]
ANY_KIND = ("response_format", "json_schema", "grammar", "regex", "guided_json", "tools")  # one of them at a time


# What the APIs of agents have instead; the first value of each list is valid.
BLOCKS: list[Any] = [
    {"type": "text", "text": "hi"},
    {"type": "tool_result", "tool_use_id": "1", "content": "{}"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "image", "source": {}},
]
TURNS = [[{"role": "user", "content": [block]}] for block in BLOCKS[:2]]
TURNS += [[{"role": "assistant", "content": BLOCKS[2:4]}, {"role": "user", "content": BLOCKS[1:2]}], [{"role": []}]]
ITEMS: list[Any] = [
    [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}],
    [{"type": "function_call_output", "call_id": "1", "output": "{}"}, {"type": "reasoning", "content": []}],
    [{"type": "item_reference"}, {"type": []}],
]
OF_AGENTS: dict[str, dict[str, list[Any]]] = {
    "messages": {
        "messages": [*TURNS, [{"role": "user", "content": "hi"}]],
        "system": ["brief", BLOCKS[:1], BLOCKS],
        "thinking": [{"type": "enabled", "budget_tokens": 9}, {"type": []}, {"type": "x"}],
        "tools": [[{"name": "f", "input_schema": SCHEMA}], [{"type": "bash_20250124"}], [{"name": []}]],
        "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": {}}],
        "stop_sequences": [["a"], [""], "a"],
        "output_config": [{"format": {"type": "json_schema", "schema": SCHEMA}}, {"format": []}],
        "metadata": [{"user_id": "me"}, {"user_id": []}],
    },
    "responses": {
        "input": ["hi", *ITEMS],
        "instructions": ["brief", "", 3],
        "tools": [[{"type": "function", **FUNCTION}], [{"type": "web_search"}], [{"type": []}]],
        "tool_choice": ["auto", "required", {"type": "function", "name": "f"}, {"type": []}],
        "text": [{"format": {"type": "text"}}, {"format": {"type": "json_schema", "schema": SCHEMA}}, {"format": 1}],
        "max_output_tokens": [3, 0],
        "previous_response_id": [None, "resp_1"],
        "store": [False, 1],
    },
    "infill": {
        "input_prefix": ["def f(", ""],
        "input_suffix": ["return", "x" * 2000],
        "input_extra": [[{"filename": "a", "text": "b"}], [{"text": []}], [[]]],
        "prompt": ["a", [1]],
        "n_predict": [3, 0, True],
        "response_fields": [["content", "timings/prompt_n"], [[], "a/b/c"], "content"],
        "n_probs": [0, 1],
    },
    "ollama chat": {
        "messages": [[{"role": "user", "content": "hi"}], [], [{"role": "USER"}], [{"role": "tool", "tool_name": 1}]],
        "options": [{"num_predict": 3}, {"num_predict": -2, "top_k": 0.5}, {"stop": [[]]}, {"seed": 1e300}],
        "format": ["json", SCHEMA, [], {"not": {}}],
        "think": [False, "high", "x", []],
        "tools": [[{"type": "function", "function": FUNCTION}], [FUNCTION]],
        "logprobs": [True, "x"],
        "top_logprobs": [2, 99],
        "stream": [False, None, 1],
        "keep_alive": [0, "5m"],
    },
    "ollama generate": {
        "prompt": ["hi", "", "x" * 2000],
        "suffix": ["", "x"],
        "system": ["brief", []],
        "raw": [True, False, 1],
        "options": [{"num_predict": 3}, {"typical_p": 0.5}],
        "format": ["", "json"],
        "logprobs": [True, []],
        "top_logprobs": [2, "x"],
        "context": [[], [1], {}],
    },
    "tokenize": {"content": ["hi", "\ud800", "x" * 9999], "with_pieces": [True, 1], "parse_special": [False, "x"]},
    "detokenize": {"tokens": [[5, 6], [-1], [10**30], [True], ["a"]]},
    "show": {"model": ["builtin", [], "x"]},
}
PATHS = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "infill": "/infill",
    "ollama chat": "/api/chat",
    "ollama generate": "/api/generate",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "show": "/api/show",
}
LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "error")


def agents_body(generator: random.Random, kind: str) -> dict[str, Any]:
    """A body for an API of agents: valid values, or odd ones."""
    fields, is_careful = OF_AGENTS[kind], generator.random() < 0.5
    needed = next(iter(fields))
    found: dict[str, Any] = {"max_tokens": 3, "n_predict": 3, "options": {"num_predict": 3}}
    found[needed] = generator.choice(fields[needed][:2])
    for name in generator.sample(sorted(fields), k=min(generator.choice([0, 1, 2, 4]), len(fields))):
        if not is_careful:
            found[name] = generator.choice([*fields[name], *fields[name], *ODD])
        elif name not in ("output_config", "text", "format"):  # they exclude tools
            found[name] = fields[name][0]
    return found | generator.choice([{}, {"stream": True}])


def body(generator: random.Random, kind: str) -> Any:
    """A body for `kind`, of PATHS: half of them with valid values alone, others with odd ones, or no object."""
    if generator.random() < 0.02:
        return generator.choice(ODD)
    if kind in OF_AGENTS:
        return agents_body(generator, kind)
    is_careful = generator.random() < 0.5
    found: dict[str, Any] = {"model": "any", "max_tokens": generator.choice([1, 2, 3])}
    if kind == "chat":
        others = MESSAGES[:6] if is_careful else MESSAGES
        found["messages"] = [MESSAGES[0], *generator.choices(others, k=generator.choice([0, 0, 1, 2]))]
        generator.shuffle(found["messages"])
    else:
        found["prompt"] = generator.choice(PROMPTS[:4] if is_careful else PROMPTS)
    for name in generator.sample(sorted(FIELDS), k=generator.choice([0, 1, 2, 3, 6])):
        if not (is_careful and name in ANY_KIND and any(other in found for other in ANY_KIND)):
            found[name] = FIELDS[name][0] if is_careful else generator.choice(FIELDS[name])
    if is_careful:
        number = generator.choice([0, 3, 20])
        scored = {"logprobs": True, "top_logprobs": number} if kind == "chat" else {"logprobs": number, "echo": True}
        found |= generator.choice([{}, scored])
    if not is_careful and generator.random() < 0.5:
        name = generator.choice([*FIELDS, "messages" if kind == "chat" else "prompt"])
        found[name] = generator.choice([*ODD, *TEXTS])
    return found


def fault_of(client: Client, kind: str, asked: Any) -> str | None:
    """What is wrong with the answer to a body; None for an answer as it should be."""
    try:
        content = json.dumps(asked)
    except ValueError:
        return None  # a number that Python does not write
    with closing(client.open("POST", PATHS[kind], content)) as connection:
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200 and not 400 <= response.status < 500:
            return f"status {response.status}: {text}"
        media_type = response.getheader("content-type", "")
    if media_type.startswith("text/event-stream"):
        events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
        return _fault_of_events(events, has_end=kind != "infill")
    if media_type == "application/x-ndjson":
        last = json.loads(text.splitlines()[-1])
        return None if last.get("done") or "unexpected" not in last.get("error", "unexpected") else f"no end: {last}"
    try:
        found = json.loads(text)
    except ValueError:
        return f"no JSON: {text}"
    if bool(found.get("error")) == (response.status == 200):
        return f"status {response.status}: {text}"
    return None


def _fault_of_events(events: list[str], *, has_end: bool) -> str | None:
    texts = [event.partition("data: ")[2] for event in events]
    found = [json.loads(text) for text in texts if text != "[DONE]"]
    if has_end and texts[-1] != "[DONE]" and found[-1].get("type") not in LAST_EVENTS:
        return f"no end: {events[-1]}"
    kinds = ("server_error", "api_error")
    errors = [event["error"] for event in found if (event.get("error") or {}).get("type") in kinds]
    return f"an error of the server's: {errors[0]}" if errors else None


def faults(client: Client, count: int, seed: int) -> list[str]:
    """The bodies, of `count` random ones, whose answers are not as they should be, with what is wrong."""
    generator, found = random.Random(seed), list[str]()
    for number in range(count):
        kind = generator.choice([*PATHS])
        asked = body(generator, kind)
        if (fault := fault_of(client, kind, asked)) is not None:
            found.append(f"{number}: {kind} {asked!r}: {fault}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    with Engine.load("builtin", device="cpu") as engine, served(engine) as (client, _):
        found = faults(client, flags.count, flags.seed)
    print("\n".join([*found, f"{flags.count} bodies, {len(found)} faults"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
