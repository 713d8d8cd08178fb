"""OpenAI's Responses API: its requests as chats, and answers as its items and events. Conversations are stored.

A request becomes a body of OpenAI's chats, so both have the same checks and the same answers.
"""

from __future__ import annotations

import json
import reprlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from offspec import SamplingParams
from offspec.errors import UsageError

from .answer_blocks import AnswerBlock, BlockAnswer, BlockEvent
from .answer_forms import AnswerChunk, AnswerForm, ApiForm
from .openai_requests import FIELDS, CompletionRequest, parse
from .request_parts import Json, assistants, call_of, field_of, list_of_objects, object_of, refuse_fields, text_of

if TYPE_CHECKING:
    from offspec.text.tokenizer import Tokenizer

NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "context_management": ([],),
}
SAME_FIELDS = (
    *("stream", "user", "stop", "parallel_tool_calls", "ignore_eos", "logit_bias", "chat_template_kwargs"),
    *FIELDS,
)
ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
TEXTS = ["input_text", "output_text", "text"]
DELTAS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
FULL_TEXT = {"thinking": "text", "text": "text", "call": "arguments"}
Keep = Callable[[str, Sequence[AnswerBlock]], None]
KEPT_S = 3600.0
MOST_BYTES = 64 * 2**20  # of messages as JSON; each response's are counted whole


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat, with the response as the last one."""

    messages: Sequence[Json]
    num_bytes: int
    ends_s: float


class StoredResponses:
    """Conversations by their responses' ids, for `previous_response_id`: in memory alone. The oldest are dropped.

    An id is a random number of 96 bits that only the client of the response gets, so another one cannot name it.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes, self._clock = most_bytes, clock
        self._stored, self._num_bytes = OrderedDict[str, Conversation](), 0

    def add(self, response_id: str, messages: Sequence[Json]) -> None:
        size = len(json.dumps(messages))
        self._stored[response_id] = Conversation(messages, size, self._clock() + KEPT_S)
        self._num_bytes += size
        while self._stored and (self._num_bytes > self._most_bytes or self._oldest.ends_s <= self._clock()):
            self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def messages(self, response_id: str) -> Sequence[Json]:
        """Raises UsageError for an id that is not known, or no longer."""
        response = self._stored.get(response_id)
        if response is None or response.ends_s <= self._clock():
            raise UsageError(
                "previous_response_id names no response that is stored here; the server keeps the last ones for an "
                "hour, and those with store false not at all: send the conversation as input"
            )
        return response.messages

    @property
    def _oldest(self) -> Conversation:
        return next(iter(self._stored.values()))


class Responses(ApiForm):
    name = "responses"

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    def request(self, body: Any, defaults: SamplingParams) -> CompletionRequest:
        previous = field_of(object_of(body), "previous_response_id", str)
        return parse("chat", as_chat(body, self._stored.messages(previous) if previous else ()), defaults)

    def answer(
        self, body: Json, request: CompletionRequest, model: str, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> ResponseAnswer:
        messages = cast("Sequence[Json]", request.prompt)[1 if body.get("instructions") else 0 :]  # they do not stay
        keep = None if body.get("store") is False else partial(self._keep, messages)
        return ResponseAnswer(body, model, BlockAnswer(request, prompts[0], tokenizer), keep)

    def _keep(self, messages: Sequence[Json], response_id: str, blocks: Sequence[AnswerBlock]) -> None:
        self._stored.add(response_id, [*messages, _as_message(blocks)])


# ------------------------------------------------------------------------------------------------ requests


def as_chat(body: Any, before: Sequence[Json] = ()) -> Json:
    """The request as a body of OpenAI's chats. before: earlier messages. Raises UsageError, which names the field."""
    refuse_fields(object_of(body), NOT_FOLLOWED)
    chat = {name: body[name] for name in SAME_FIELDS if name in body}
    chat["messages"] = _messages(body, before)
    if (most := body.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = most
    tools = list_of_objects(body, "tools")
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise UsageError(f"tools[{number}] is not of type function; others are not supported")
    chat["tools"] = [{"type": "function", "function": {**tool, "type": None}} for tool in tools]
    chat["tool_choice"] = choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    text = field_of(body, "text", dict) or {}
    if (described := text.get("format")) is not None:
        is_schema = isinstance(described, dict) and described.get("type") == "json_schema"
        chat["response_format"] = {"type": "json_schema", "json_schema": described} if is_schema else described
    return chat


def _messages(body: Json, before: Sequence[Json]) -> list[Json]:
    instructions = field_of(body, "instructions", str)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += before
    if isinstance(body.get("input"), str):
        return [*messages, {"role": "user", "content": body["input"]}]
    items = list_of_objects(body, "input")
    if not items:
        raise UsageError("input must be a string or a list of at least one item")
    thoughts = ""
    for number, item in enumerate(items):
        where, kind = f"input[{number}]", item.get("type") or "message"
        if kind == "reasoning":
            thoughts += text_of(item.get("content") or [], f"{where}.content", ["reasoning_text"])
            continue
        if kind == "function_call":
            call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
            _turn_of_assistant(messages)["tool_calls"].append(call)
        elif kind == "function_call_output":
            output = text_of(item.get("output"), f"{where}.output", TEXTS)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "message":
            messages.append(
                {"role": item.get("role"), "content": text_of(item.get("content"), f"{where}.content", TEXTS)}
            )
        else:
            raise UsageError(f"{where} is of type {reprlib.repr(kind)}, which is not supported")
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1], thoughts = {**messages[-1], "reasoning_content": thoughts}, ""
    return messages


def _as_message(blocks: Sequence[AnswerBlock]) -> Json:
    """A response as a message of a chat, without a call that a limit has cut."""
    text, thoughts = ("".join(each.text for each in blocks if each.kind == kind) for kind in ("text", "thinking"))
    whole = [each for each in blocks if each.arguments is not None]
    return assistants(text, thoughts, [call_of(f"call_{each.call_id}", each.name, each.arguments) for each in whole])


def _turn_of_assistant(messages: list[Json]) -> Json:
    """The message that a call belongs to: the last one, if it is the assistant's, as a copy: it may be stored."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ())]}
    return messages[-1]


# ------------------------------------------------------------------------------------------------ answers


class ResponseAnswer(AnswerForm):
    """The response to one request. keep: gets its id and its blocks when it is complete; None keeps nothing."""

    def __init__(self, body: Json, model: str, answer: BlockAnswer, keep: Keep | None = None) -> None:
        self._answer, self._id, self._keep = answer, secrets.token_hex(12), keep
        self._number = 0  # of the next event
        self._head: Json = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": body.get("previous_response_id"),
            "store": keep is not None,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "truncation": "disabled",
            **{name: body.get(name) for name in ECHOED},
        }

    def whole(self, answers: Sequence[AnswerChunk]) -> Json:
        (passage,) = answers
        self._answer.whole(passage)
        return self._response(passage)

    def parts(self, index: int, passage: AnswerChunk, *, is_first: bool) -> list[Json]:
        events = list[Json]()
        if is_first:
            response = {**self._head, "status": "in_progress", "output": []}
            events = [{"type": f"response.{each}", "response": response} for each in ("created", "in_progress")]
        for event in self._answer.push(passage):
            events += self._events(event)
        if passage.finish_reason is not None:
            response = self._response(passage)
            events.append({"type": f"response.{response['status']}", "response": response})
        return self._numbered(events)

    def error_part(self, error: Json) -> Json:
        inner = error["error"]
        code = inner["code"] or inner["type"]
        return self._numbered([{"type": "error", "code": code, "message": inner["message"], "param": None}])[0]

    def _numbered(self, events: Sequence[Json]) -> list[Json]:
        first, self._number = self._number, self._number + len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, start=first)]

    def _response(self, passage: AnswerChunk) -> Json:
        if self._keep is not None:
            self._keep(self._head["id"], self._answer.blocks)
        is_cut = self._answer.finish == "length"
        state = {"status": "incomplete" if is_cut else "completed"}
        if is_cut:
            state["incomplete_details"] = {"reason": "max_output_tokens"}  # type: ignore[assignment]
        output = [self._item(number, block, state["status"]) for number, block in enumerate(self._answer.blocks)]
        return {**self._head, **state, "output": output, "usage": _usage(passage.figures), "offspec": passage.figures}

    def _item(self, number: int, block: AnswerBlock, status: str) -> Json:
        """A block as an item of the output."""
        item = {"id": f"{block.kind}_{self._id}_{number}", "status": status}
        if block.kind == "call":
            call = {"call_id": f"call_{block.call_id}", "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **call}
        content = [_content(block)] if block.text else []
        if block.kind == "thinking":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _events(self, event: BlockEvent) -> Iterator[Json]:
        """The events of a block: its item, the item's only part of content, and its text."""
        block, has_part = event.block, event.block.kind != "call"
        item = self._item(event.index, block, "completed" if event.kind == "end" else "in_progress")
        place: Json = {"item_id": item["id"], "output_index": event.index}
        inside = {**place, "content_index": 0} if has_part else place
        logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
        if event.kind == "begin":
            yield {"type": "response.output_item.added", "output_index": event.index, "item": item}
            if has_part:
                yield {"type": "response.content_part.added", **inside, "part": _content(block)}
        elif event.kind == "more":
            yield {"type": f"response.{DELTAS[block.kind]}.delta", **inside, "delta": event.text, **logprobs}
        else:
            text = {FULL_TEXT[block.kind]: block.text} | ({} if has_part else {"name": block.name})
            yield {"type": f"response.{DELTAS[block.kind]}.done", **inside, **text, **logprobs}
            if has_part:
                yield {"type": "response.content_part.done", **inside, "part": _content(block)}
            yield {"type": "response.output_item.done", "output_index": event.index, "item": item}


def _content(block: AnswerBlock) -> Json:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": []}


def _usage(figures: Json) -> Json:
    prompt, answer = figures["num_prompt_tokens"], figures["num_tokens"]
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": prompt - figures["num_prefilled_tokens"]},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }
