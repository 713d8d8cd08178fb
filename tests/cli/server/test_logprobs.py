"""Log-probabilities, echoes and lists of prompts over HTTP: OpenAI's forms, with the engine's figures."""

from __future__ import annotations

from typing import Any

import pytest

from offspec import Engine, SamplingParams
from offspec.cli.server.logprobs import TokenTexts

from .serving import USER, Client

PROMPT = "def area(w: int) -> int:\n    return"
TEXT = "/v1/completions"


def text(client: Client, **fields: Any) -> list[Any]:
    reply = client.ask("POST", TEXT, {"prompt": PROMPT, "max_tokens": 6, **fields})
    assert reply.status == 200, reply
    choices: list[Any] = reply.body["choices"]
    return choices


def test_a_texts_are_the_engines(client: Client, engine: Engine) -> None:
    (choice,) = text(client, logprobs=2)
    steps = list(engine.generate(PROMPT, SamplingParams(6, logprobs=2)))
    wanted, found, names = (
        [each for step in steps for each in step.logprobs],
        choice["logprobs"],
        TokenTexts(engine.tokenizer),
    )
    assert found["token_logprobs"] == pytest.approx([each.logprob for each in wanted], abs=1e-4)
    assert found["tokens"] == [names.text(each.token, "bytes:") for each in wanted]
    for likeliest, each, name in zip(found["top_logprobs"], wanted, found["tokens"], strict=True):
        assert len(likeliest) in (1, 2)  # two tokens may have one text
        assert max(likeliest.values()) == likeliest[name] == pytest.approx(each.logprob, abs=1e-4)  # it is greedy
    assert found["text_offset"][0] == 0
    pieces = [part for step in steps for part in step.texts]
    for at, piece in zip(found["text_offset"], pieces, strict=True):
        assert choice["text"][at : at + len(piece)] == piece


def test_an_echo_begins_with_the_prompt_and_scores_it(client: Client, engine: Engine) -> None:
    ids, (step,) = engine.encode(PROMPT), engine.generate(PROMPT, SamplingParams(1, logprobs=1, prompt_logprobs=True))
    for prompt in (PROMPT, ids):
        (choice,) = text(client, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
        found = choice["logprobs"]
        assert choice["text"] == engine.tokenizer.decode(ids) + step.text
        assert [len(values) for values in found.values()] == [len(ids) + 1] * 4
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        wanted = [each.logprob for each in (*step.prompt_logprobs, *step.logprobs)]
        assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
        for name, value, likeliest in zip(*([*v][1:] for v in list(found.values())[:3]), strict=True):
            assert likeliest[name] == value <= max(likeliest.values())
    (bare,) = text(client, echo=True)
    assert (bare["text"].startswith(PROMPT), bare["logprobs"]) == (True, None)


def test_a_prompt_alone_is_scored(client: Client, engine: Engine) -> None:
    reply = client.ask("POST", TEXT, {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1})
    (choice,) = reply.body["choices"]
    num_tokens = len(engine.encode(PROMPT))
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == num_tokens
    assert (reply.body["usage"]["completion_tokens"], reply.body["usage"]["total_tokens"]) == (0, num_tokens)


def test_several_prompts_are_answered_each_as_alone(client: Client, engine: Engine) -> None:
    prompts: list[Any] = [PROMPT, engine.encode("x = ["), "import"]
    common = {"temperature": 0.9, "seed": 4, "echo": True, "logprobs": 0}
    found = text(client, prompt=prompts, n=2, **common)
    assert [choice["index"] for choice in found] == list(range(6))
    for place, prompt in enumerate(prompts):
        alone = text(client, prompt=prompt, n=2, **common)
        for mine, other in zip(found[2 * place :], alone, strict=False):
            assert mine["text"] == other["text"]
            assert mine["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            assert mine["logprobs"]["token_logprobs"][1:] == pytest.approx(
                other["logprobs"]["token_logprobs"][1:], abs=1e-4
            )
    assert len({choice["text"] for choice in found}) > 3


def test_usage_counts_all_prompts(client: Client, engine: Engine) -> None:
    usage = client.ask("POST", TEXT, {"prompt": ["a b c", "import"], "max_tokens": 3, "n": 2, "ignore_eos": True}).body[
        "usage"
    ]
    num_prompt = len(engine.encode("a b c")) + len(engine.encode("import"))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 12)


def test_more_answers_than_the_queue_has_places_are_refused(client: Client) -> None:
    reply = client.ask("POST", TEXT, {"prompt": ["a"] * 13, "n": 2})
    assert (reply.status, "26" in reply.body["error"]["message"]) == (400, True)


@pytest.mark.parametrize("kind", ["text", "echo", "chat"])
def test_the_parts_of_a_stream_have_those_of_the_whole(client: Client, kind: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "temperature": 1, "seed": 3, "ignore_eos": True}
    if kind == "chat":
        fields |= {"messages": [USER], "logprobs": True, "top_logprobs": 2}
    else:
        fields |= {"prompt": [PROMPT, "x"], "logprobs": 2, "echo": kind == "echo"}
    path = "/v1/chat/completions" if kind == "chat" else TEXT
    whole = client.ask("POST", path, fields).body["choices"]
    parts: dict[int, list[Any]] = {choice["index"]: [] for choice in whole}
    for event in client.stream(path, fields):
        for choice in event["choices"]:
            parts[choice["index"]].append(choice)
    for choice in whole:
        own = parts[choice["index"]]
        if kind == "chat":
            joined = [each for part in own if part["logprobs"] for each in part["logprobs"]["content"]]
            wanted, names = choice["logprobs"]["content"], ("token", "bytes")
            assert len(wanted) == 9
            assert [[each[name] for name in names] for each in joined] == [[e[n] for n in names] for e in wanted]
            assert all(len(each["top_logprobs"]) == 2 for each in joined)
        else:
            assert "".join(part["text"] for part in own) == choice["text"]
            for name in ("tokens", "text_offset"):
                assert [one for part in own for one in part["logprobs"][name]] == choice["logprobs"][name]


def test_a_part_of_a_character_has_its_bytes(engine: Engine) -> None:
    names, tokenizer = TokenTexts(engine.tokenizer), engine.tokenizer
    ids = tokenizer.encode("\N{SNOWMAN}", add_special_tokens=False)
    assert b"".join(names.content(token) for token in ids).decode().strip() == "\N{SNOWMAN}"
    if len(ids) > 1:
        assert names.text(ids[-1], "bytes:").startswith("bytes:\\x")
    (end, *_) = tokenizer.eos_ids
    assert names.text(end) == tokenizer.token_text(end)
