"""What a model thinks before its answer: apart from it in the API, and switched by `--think` and `--no-think`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, SamplingParams
from offspec.cli.reasoning import ThinkingReader
from offspec.cli.server.answer_forms import AnswerChunk
from offspec.cli.server.openai_answers import Answer
from offspec.cli.server.openai_requests import parse, with_tools
from offspec.errors import TokenizerError
from offspec.text.thinking import CLOSE, OPEN, ThinkingStyle
from offspec.text.tokenizer import Tokenizer

from ..pair import TEMPLATE, Pair, build_pair, with_tokenizer_config
from ..refusals import refused
from .conftest import Offspec
from .server.serving import USER, Client, served
from .server.test_tools import HERMES, WEATHER

# As Qwen3 has it: without thinking, the prompt ends with an empty one.
SWITCHED = TEMPLATE.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
OPENED = TEMPLATE.removesuffix("{% endif %}") + "{{ '<think>\\n' }}{% endif %}"  # as DeepSeek-R1 has it
HERMES_OPENED = HERMES.removesuffix("{% endif %}") + "{{ '<think>\\n' }}{% endif %}"
CONTINUED = {"messages": [USER, {"role": "assistant", "content": "a"}], "continue_final_message": True}
CLOSES = 300  # the id of CLOSE where a model has it as a token
FIGURES = {"num_prompt_tokens": 9, "num_prefilled_tokens": 4, "num_tokens": 3}


def folder_with(pair: Pair, folder: Path, template: str) -> Path:
    shutil.copytree(pair.target, folder, dirs_exist_ok=True)
    return with_tokenizer_config(folder, chat_template=template)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("thinking"), max_position_embeddings=512)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("is_open", "text", "wanted"),
    [
        (False, "<think>\nIs it?\n</think>\n\nYes.", ("Is it?", "Yes.")),
        (False, "\n <think>a </thin </think>b <think>c</think>", ("a </thin", "b <think>c</think>")),
        (False, "<think>\n\n</think>\n\n yes", ("", "yes")),
        (False, "no </think>", ("", "no </think>")),
        (False, "<think> cut </thi", ("cut </thi", "")),
        (True, "so\n\nit is </think> yes\n", ("so\n\nit is", "yes\n")),
    ],
)
def test_thinking_is_split_off_however_its_text_comes(is_open: bool, text: str, wanted: Any, size: int) -> None:
    reader, found = ThinkingReader(ThinkingStyle(is_open)), ["", ""]
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    for part in [*parts, None]:
        thought, said = reader.push(part or "", is_end=part is None)
        found = [found[0] + thought, found[1] + said]
    assert tuple(found) == wanted


def answer_of(models: Pair, folder: Path, template: str, **fields: Any) -> Answer:
    tokenizer = Tokenizer.load(folder_with(models, folder, template))
    asked = with_tools(parse("chat", {"messages": [USER], **fields}, SamplingParams()), tokenizer)
    described = asked.tools.described if asked.tools else ()
    ids = tokenizer.encode_chat([USER], tools=described, settings=asked.template_settings)
    return Answer(asked, "m", [ids], tokenizer)


@pytest.mark.parametrize(
    ("template", "fields", "text", "thought", "said"),
    [
        (SWITCHED, {}, "<think>\na\n</think>\n\nb", "a", "b"),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": False}}, "a </think> b", None, "a </think> b"),
        (OPENED, {}, "a\n</think>\n\nb", "a", "b"),
        (OPENED, {"response_format": {"type": "json_object"}}, "a</think>{}", "a", "{}"),
        (OPENED, CONTINUED, " b </think> c", None, " b </think> c"),
        (TEMPLATE, {}, "<think>\na\n</think>\n\nb", None, "<think>\na\n</think>\n\nb"),
    ],
)
def test_a_message_has_the_thinking_apart(
    models: Pair, tmp_path: Path, template: str, fields: Any, text: str, thought: str | None, said: str
) -> None:
    whole = answer_of(models, tmp_path / "whole", template, **fields).whole([AnswerChunk(text, "eos", FIGURES)])
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, said)
    streamed, deltas = answer_of(models, tmp_path / "streamed", template, **fields), list[Any]()
    for place, char in enumerate(text):
        found = AnswerChunk(char, "eos" if place == len(text) - 1 else None, FIGURES)
        deltas += [part["choices"][0]["delta"] for part in streamed.parts(0, found, is_first=place == 0)]
    assert deltas[0]["role"] == "assistant"
    for name, wanted in (("reasoning_content", thought or ""), ("content", said)):
        assert "".join(delta.get(name, "") for delta in deltas) == wanted


def test_thinking_comes_before_calls_of_tools(models: Pair, tmp_path: Path) -> None:
    text = (
        '<think>\nRome?\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    template = HERMES + "{# <think> #}"
    (choice,) = answer_of(models, tmp_path, template, tools=[WEATHER]).whole([AnswerChunk(text, "eos", FIGURES)])[
        "choices"
    ]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == ("Rome?", None, "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}


@pytest.fixture(scope="module")
def client(models: Pair, tmp_path_factory: pytest.TempPathFactory) -> Generator[Client, None, None]:
    folder = folder_with(models, tmp_path_factory.mktemp("opened") / "model", OPENED)
    with Engine.load(str(folder), draft="lookup", device="cpu") as engine, served(engine, tries=True) as (found, _):
        yield found


def test_a_server_thinks_in_parts_and_whole(client: Client) -> None:
    body = {"messages": [USER], "max_tokens": 12, "ignore_eos": True, "logprobs": True}
    message = client.ask("POST", "/v1/chat/completions", body).body["choices"][0]["message"]
    assert message["content"] == ""  # the tests' models do not end their thinking
    assert message["reasoning_content"].strip()
    events = client.stream("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    scored = [event["choices"][0]["logprobs"]["content"] for event in events if event["choices"][0]["logprobs"]]
    assert sum(map(len, scored)) == 12


def thinking_model(models: Pair, folder: Path, *, special: bool) -> Path:
    """A model whose template opens the thinking, and which ends it if a bias makes it."""
    folder = folder_with(models, folder, HERMES_OPENED)
    tags = {CLOSES + i: {"content": tag, "special": special} for i, tag in enumerate((CLOSE, OPEN))}
    with_tokenizer_config(folder, added_tokens_decoder=tags)
    assert Tokenizer.load(folder).token_id(CLOSE) == CLOSES
    return folder


@pytest.fixture(scope="module")
def thinker(models: Pair, tmp_path_factory: pytest.TempPathFactory) -> Generator[Client, None, None]:
    folder = thinking_model(models, tmp_path_factory.mktemp("thinker") / "model", special=True)
    with (
        Engine.load(str(folder), draft=str(models.draft), device="cpu") as engine,
        served(engine, tries=True) as (found, _),
    ):
        yield found


COLOURS: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"enum": ["red", "green"]}}}


@pytest.mark.parametrize(
    "asked",
    [{"response_format": COLOURS}, {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}, {}],
    ids=["schema", "tool", "free"],
)
def test_what_an_answer_must_be_holds_after_its_thinking(thinker: Client, asked: Any) -> None:
    settings = {"temperature": 1, "seed": 2, "max_tokens": 300 if asked else 40, "logit_bias": {str(CLOSES): 6}}
    body = {"messages": [USER], **settings, **asked}
    choice = thinker.ask("POST", "/v1/chat/completions", body).body["choices"][0]
    message = choice["message"]
    assert message["reasoning_content"].strip()
    assert CLOSE not in message["reasoning_content"]
    events = thinker.stream("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    if "tools" in asked:
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    elif asked:
        assert json.loads(message["content"]) in ("red", "green")
    else:
        assert message["content"]


@pytest.mark.slow
def test_the_terminal_has_constrained_answers_apart_from_their_thinking(
    models: Pair, tmp_path: Path, offspec: Offspec
) -> None:
    folder, prompts = thinking_model(models, tmp_path / "model", special=False), tmp_path / "prompts.jsonl"
    schema = COLOURS["json_schema"]["schema"]
    settings = {"temperature": 1, "seed": 2, "max_new_tokens": 300, "logit_bias": {str(CLOSES): 6}}
    lines: list[dict[str, Any]] = [{"prompt": "hi", **settings, "json_schema": schema}, {"prompt": "hi", **settings}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ("--draft", "none", "--device", "cpu")
    written = offspec("run", folder, "--prompt-file", prompts, *common).out
    answers = [json.loads(line) for line in written.splitlines()]
    assert json.loads(answers[0]["text"]) in ("red", "green")
    assert answers[0]["reasoning_content"]
    assert answers[0]["reasoning_content"] in answers[1]["text"], "without a constraint, the text is what it was"
    assert CLOSE in answers[1]["text"]
    cut = offspec("run", folder, "hi", "--json-schema", "object", "-n", 5, "--temperature", 1, "--seed", 2, *common)
    assert not cut.out.strip(), "it has not ended its thinking"
    assert len(cut.err.splitlines()) > 1


# ------------------------------------------------------------------------------------------------ the switch


@pytest.mark.parametrize("template", ["{%- if thinking -%}", "{% if x and enable_thinking is true %}"])
def test_a_template_with_a_switch_is_set(models: Pair, tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(folder_with(models, tmp_path, template))
    tokenizer.set_thinking(False)
    assert list(tokenizer.template_settings.values()) == [False]


@pytest.mark.parametrize("template", ["{{ m.thinking }}", "{{ 'thinking' }}{# thinking #}"])
def test_a_template_without_a_switch_is_refused(models: Pair, tmp_path: Path, template: str) -> None:
    with refused(TokenizerError, "template", "thinking", "think"):
        Tokenizer.load(folder_with(models, tmp_path, template)).set_thinking(True)


@pytest.mark.parametrize("flag", ["--think", "--no-think"])
def test_run_and_chat_have_the_switch(
    models: Pair, tmp_path: Path, offspec: Offspec, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, common = folder_with(models, tmp_path / "model", SWITCHED), ("--draft", "none", "-n", 3, "--device", "cpu")
    found = json.loads(offspec("run", folder, "hi", flag, "--json", *common).out)
    prompt = Tokenizer.load(folder).decode(found["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("</think>\n\n") == (flag == "--no-think")
    offspec("run", models.target, "hi", flag, *common).refusal(1, "template", "thinking", "--think")
    offspec("run", folder, "hi", flag, "--raw", *common).refusal(2, "--think", "--raw")
    offspec("chat", models.target, flag, *common).refusal(1, "template", "thinking", "--think")


def test_a_request_overrides_the_switch(models: Pair, tmp_path: Path) -> None:
    with Engine.load(str(folder_with(models, tmp_path / "model", SWITCHED)), draft="none", think=False) as engine:
        messages: Sequence[Any] = [USER]
        assert "<think>" in engine.tokenizer.render_chat(messages)
        assert "<think>" not in engine.tokenizer.render_chat(messages, settings={"enable_thinking": True})
