"""Anthropic's Messages API: its requests as chats, and answers as its messages and events.

A request becomes a body of OpenAI's chats, so both have the same checks and the same answers. Fields beyond Anthropic's
that chats have, such as `seed` and `min_p`, are passed on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from offspec import SamplingParams
from offspec.errors import UsageError

from .answer_blocks import AnswerBlock, BlockAnswer, BlockEvent
from .answer_forms import AnswerChunk, AnswerForm, ApiForm
from .openai_requests import FIELDS, CompletionRequest, parse
from .request_parts import Json, assistants, call_of, field_of, list_of_objects, object_of, refuse_fields, text_of

if TYPE_CHECKING:
    from offspec.text.tokenizer import Tokenizer

NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "context_management": ()}
SAME_FIELDS = ("stream", "stop", "ignore_eos", "logit_bias", "chat_template_kwargs", *FIELDS)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}
DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
DELTAS |= {"call": ("input_json_delta", "partial_json")}


class Messages(ApiForm):
    name = "messages"

    def request(self, body: Any, defaults: SamplingParams) -> CompletionRequest:
        return parse("chat", as_chat(body), defaults)

    def answer(
        self, body: Json, request: CompletionRequest, model: str, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> MessageAnswer:
        return MessageAnswer(model, BlockAnswer(request, prompts[0], tokenizer))

    def error(self, failure: Json, status: int) -> Json:
        kind = ERRORS.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": failure["error"]["message"]}}


# ------------------------------------------------------------------------------------------------ requests


def as_chat(body: Any) -> Json:
    """The request as a body of OpenAI's chats. Raises UsageError, which names the field."""
    refuse_fields(object_of(body), NOT_FOLLOWED)
    chat = {name: body[name] for name in SAME_FIELDS if name in body}
    messages = list_of_objects(body, "messages")
    if not messages:
        raise UsageError("messages must be a list of at least one message")
    system = body.get("system")
    chat["messages"] = [{"role": "system", "content": text_of(system, "system", ["text"])}] if system else []
    for number, message in enumerate(messages):
        chat["messages"] += _messages(message, f"messages[{number}]")
    if messages[-1].get("role") == "assistant":
        raise UsageError("messages must not end with the assistant's: beginnings of answers are not supported")
    if (stops := body.get("stop_sequences")) is not None:
        chat["stop"] = stops
    metadata = field_of(body, "metadata", dict) or {}
    chat["user"] = metadata.get("user_id")
    _add_tools(chat, body)
    _add_thinking(chat, body)
    _add_format(chat, body)
    return chat


def _messages(message: Json, where: str) -> Iterator[Json]:
    """One message as those of a chat: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise UsageError(f"{where} needs a role: user or assistant")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise UsageError(f"{where}.content must be a string or a list of blocks")
    blocks = list_of_objects(message, "content")
    numbered = [(block, f"{where}.content[{number}]") for number, block in enumerate(blocks)]
    yield from [_of_assistant(numbered)] if role == "assistant" else _of_user(role, numbered)


def _of_user(role: str, blocks: Sequence[tuple[Json, str]]) -> Iterator[Json]:
    texts = list[str]()
    for block, where in blocks:
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": role, "content": "".join(texts)}
            texts = []
            result = text_of(block.get("content") or "", f"{where}.content", ["text"])
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        else:
            texts.append(_text(block, where))
    if texts:
        yield {"role": role, "content": "".join(texts)}


def _of_assistant(blocks: Sequence[tuple[Json, str]]) -> Json:
    texts, thoughts, calls = list[str](), list[str](), list[Json]()
    for block, where in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(call_of(block.get("id"), block.get("name"), arguments))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, where))
    return assistants("".join(texts), "".join(thoughts), calls)


def _text(block: Json, where: str) -> str:
    """The text of a block of text, or of a document that is a text."""
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
        block = {"type": "text", "text": source.get("data")}
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise UsageError(f"{where} must be of type text: images and other files are not supported")
    return str(block["text"])


def _add_tools(chat: Json, body: Json) -> None:
    chat["tools"] = []
    for number, tool in enumerate(list_of_objects(body, "tools")):
        if tool.get("type") not in (None, "custom"):
            raise UsageError(
                f"tools[{number}] is a tool of Anthropic's servers; only tools of type custom are supported"
            )
        function: Json = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        function["parameters"] = tool.get("input_schema")
        chat["tools"].append({"type": "function", "function": function})
    choice = field_of(body, "tool_choice", dict)
    if choice is None:
        return
    if choice.get("type") == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice.get("type") in [*CHOICES]:  # a list: the value may be anything
        chat["tool_choice"] = CHOICES[choice["type"]]
    else:
        raise UsageError(f"tool_choice.type must be one of {', '.join(CHOICES)}, tool")
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _add_thinking(chat: Json, body: Json) -> None:
    """Whether the model thinks, as the templates of Qwen3 and others read it; a budget of tokens is not kept."""
    thinking = field_of(body, "thinking", dict)
    if thinking is None:
        return
    if thinking.get("type") not in [*THINKING]:
        raise UsageError(f"thinking.type must be one of {', '.join(THINKING)}")
    settings = field_of(chat, "chat_template_kwargs", dict) or {}
    chat["chat_template_kwargs"] = {"enable_thinking": THINKING[thinking["type"]], **settings}


def _add_format(chat: Json, body: Json) -> None:
    config = field_of(body, "output_config", dict) or {}
    described = config.get("format") or body.get("output_format")
    if described is None:
        return
    if not isinstance(described, dict) or described.get("type") != "json_schema":
        raise UsageError("output_config.format must be an object of type json_schema")
    chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": described.get("schema")}}


# ------------------------------------------------------------------------------------------------ answers


class MessageAnswer(AnswerForm):
    """The response to one request."""

    def __init__(self, model: str, answer: BlockAnswer) -> None:
        self._answer = answer
        self._head: Json = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, answers: Sequence[AnswerChunk]) -> Json:
        (passage,) = answers
        content = [_content(block, is_whole=True) for block in self._answer.whole(passage)]
        return {
            **self._head,
            "content": content,
            **self._stop(passage),
            "usage": _usage(passage.figures),
            "offspec": passage.figures,
        }

    def parts(self, index: int, passage: AnswerChunk, *, is_first: bool) -> list[Json]:
        events = list[Json]()
        if is_first:
            usage = {**_usage(passage.figures), "output_tokens": 0}
            message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            events.append({"type": "message_start", "message": message})
        events += map(_event, self._answer.push(passage))
        if passage.finish_reason is not None:
            figures = {"usage": _usage(passage.figures), "offspec": passage.figures}
            events += [{"type": "message_delta", "delta": self._stop(passage), **figures}, {"type": "message_stop"}]
        return events

    def _stop(self, passage: AnswerChunk) -> Json:
        if passage.stopped is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": passage.stopped}
        return {"stop_reason": STOP_REASONS[self._answer.finish or "stop"], "stop_sequence": None}


def _content(block: AnswerBlock, *, is_whole: bool) -> Json:
    """A block of content; in a stream it begins empty."""
    if block.kind == "call":
        arguments = json.loads(block.text or "{}") if is_whole else {}
        return {"type": "tool_use", "id": f"toolu_{block.call_id}", "name": block.name, "input": arguments}
    text = block.text if is_whole else ""
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _event(event: BlockEvent) -> Json:
    if event.kind == "begin":
        content = _content(event.block, is_whole=False)
        return {"type": "content_block_start", "index": event.index, "content_block": content}
    if event.kind == "end":
        return {"type": "content_block_stop", "index": event.index}
    kind, name = DELTAS[event.block.kind]
    return {"type": "content_block_delta", "index": event.index, "delta": {"type": kind, name: event.text}}


def _usage(figures: Json) -> Json:
    """Counts of tokens. Those of the prompt that the KV caches held are not part of `input_tokens`."""
    scored = figures["num_prefilled_tokens"]
    return {
        "input_tokens": scored,
        "cache_read_input_tokens": figures["num_prompt_tokens"] - scored,
        "cache_creation_input_tokens": 0,
        "output_tokens": figures["num_tokens"],
    }
