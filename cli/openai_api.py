"""OpenAI's completions API as JSON: parses requests and builds answers, without HTTP or models.

A request is a chat (`messages`) or a text (`prompt`). Fields are OpenAI's, and the following of other local servers:
`top_k`, `min_p`, `repetition_penalty` (or `repeat_penalty`), `max_new_tokens`, `n_predict` and `ignore_eos`. A request
with an unsupported field that would change the answer (NOT_FOLLOWED) is refused; other unknown fields are ignored.
Answers have the engine's statistics under `offspec`.
"""

from __future__ import annotations

import reprlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from offspec import SamplingParams
from offspec.errors import UsageError

if TYPE_CHECKING:
    from offspec.engine import Prompt

Json = dict[str, Any]
Kind = Literal["chat", "text"]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FINISHES = {"eos": "stop", "stop": "stop", "length": "length", None: None}
# Unsupported fields that would change the answer, with their values that have no effect.
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "json_schema": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("temperature", (int, float), "a number"),
    ("top_p", (int, float), "a number"),
    ("min_p", (int, float), "a number"),
    ("repetition_penalty", (int, float), "a number"),
    ("repeat_penalty", (int, float), "a number"),
    ("top_k", int, "a whole number"),
    ("seed", int, "a whole number"),
    ("max_new_tokens", int, "a whole number"),
    ("max_tokens", int, "a whole number"),
    ("max_completion_tokens", int, "a whole number"),
    ("n_predict", int, "a whole number"),
    ("ignore_eos", bool, "true or false"),
)
OURS = {
    "repeat_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
}
# The meaning of -1 for clients of llama.cpp and LM Studio: as many tokens as fit, a random seed, off.
MINUS_ONE: Json = {"max_new_tokens": sys.maxsize, "seed": None, "top_k": 0}


@dataclass(frozen=True)
class CompletionRequest:
    """One request. prompt: a text or token ids for kind "text", messages for kind "chat"."""

    kind: Kind
    prompt: Prompt
    params: SamplingParams
    streams: bool = False
    wants_usage: bool = False  # whether a stream ends with the token counts


# ------------------------------------------------------------------------------------------------ requests


def parse(kind: Kind, body: Any, defaults: SamplingParams) -> CompletionRequest:
    """Parse a request; `defaults` apply to omitted fields. Raises UsageError, which names the field."""
    if not isinstance(body, dict):
        raise UsageError("the request is not a JSON object")
    for name, neutral in NOT_FOLLOWED.items():
        value = body.get(name)
        if value is not None and not any(
            value == asks and isinstance(value, bool) == isinstance(asks, bool) for asks in neutral
        ):
            raise UsageError(f"{name} is not supported; omit it")
    options = _field(body, "stream_options", Mapping, "an object") or {}
    return CompletionRequest(
        kind,
        _messages(body) if kind == "chat" else _prompt(body),
        sampling_params(body, defaults),
        bool(_field(body, "stream", bool, "true or false")),
        bool(options.get("include_usage")),
    )


def sampling_params(body: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """`defaults`, overridden by the fields of `body` that are not null. Raises UsageError, which names the field."""
    params = defaults
    for name, kind, what in FIELDS:
        if (value := _field(body, name, kind, what)) is not None:
            params = _with(params, name, value)
    if (stop := body.get("stop")) is not None:
        texts = [stop] if isinstance(stop, str) else stop
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise UsageError("stop must be a string or a list of strings, none of them empty")
        params = replace(params, stop=tuple(texts))
    return params


def _with(params: SamplingParams, name: str, value: Any) -> SamplingParams:
    """`params` with one field set; an error names the field as the client does."""
    ours = OURS.get(name, name)
    try:
        return replace(params, **{ours: MINUS_ONE[ours] if value == -1 and ours in MINUS_ONE else value})
    except UsageError as exc:
        raise UsageError(str(exc).replace(ours, name, 1)) from exc


def _field(body: Mapping[str, Any], name: str, kind: Any, what: str) -> Any:
    """A field's value, or None if it is absent."""
    value = body.get(name)
    is_wrong_bool = isinstance(value, bool) and kind is not bool  # in Python, bool is a subclass of int
    if value is not None and (is_wrong_bool or not isinstance(value, kind)):
        raise UsageError(f"{name} must be {what}, not {reprlib.repr(value)}")
    if isinstance(value, int) and value.bit_length() > 64:
        raise UsageError(f"{name} is too large: it must fit into 64 bits")
    return value


def _prompt(body: Json) -> str | list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise UsageError("prompt must be one string or one list of token ids")


def _messages(body: Json) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages must be a list of at least one message")
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Any) -> dict[str, str]:
    where = f"messages[{number}]"
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{where} needs a role: one of {', '.join(ROLES)}")
    if message.get("tool_calls"):
        raise UsageError(f"{where}: tool_calls are not supported")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise UsageError(f"{where}: only parts of type text are supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UsageError(f"{where}: content must be a string")
    return {"role": ROLES[role], "content": content}


# ------------------------------------------------------------------------------------------------ answers


class Answer:
    """Builds the answer to one request; all parts of a stream have the same id."""

    def __init__(self, asked: CompletionRequest, model: str) -> None:
        self._asked = asked
        self._is_chat = asked.kind == "chat"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, finish_reason: str | None, figures: Json) -> Json:
        """The whole answer as one object. figures: `Stats.as_dict`."""
        said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": FINISHES[finish_reason]}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": usage(figures), "offspec": figures}

    def parts(self, text: str, finish_reason: str | None, figures: Json, *, is_first: bool) -> Sequence[Json]:
        """The text of one pass as parts of a stream; the last pass adds the finish reason and the statistics."""
        role = {"role": "assistant"} if is_first else {}
        said = {"delta": {**role, "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": FINISHES[finish_reason]}
        head = {**self._head, "object": "chat.completion.chunk" if self._is_chat else "text_completion"}
        if finish_reason is None:
            return [{**head, "choices": [choice]}]
        found = [{**head, "choices": [choice], "offspec": figures}]
        if self._asked.wants_usage:
            found.append({**head, "choices": [], "usage": usage(figures)})
        return found


def usage(figures: Json) -> Json:
    """Tokens of the prompt and of the answer. cached_tokens: prompt tokens that the KV caches already held."""
    prompt, answer = figures["num_prompt_tokens"], figures["num_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": prompt - figures["num_prefilled_tokens"]},
    }


def failure(message: str, *, kind: str = "invalid_request_error", code: str | None = None) -> Json:
    """An error in the form that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
