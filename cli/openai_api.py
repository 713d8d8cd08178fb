"""OpenAI's completions API as JSON: parses requests and builds answers, without HTTP or models.

A request is a chat (`messages`) or a text (`prompt`). Fields are OpenAI's, and the following of other local servers:
`top_k`, `min_p`, `repetition_penalty` (or `repeat_penalty`), `max_new_tokens`, `n_predict` and `ignore_eos`. A request
with an unsupported field that would change the answer (NOT_FOLLOWED) is refused; other unknown fields are ignored.
Answers have the engine's statistics under `offspec`.
"""

from __future__ import annotations

import re
import reprlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from offspec import SamplingParams
from offspec.errors import UsageError
from offspec.text.tool_calls import ToolFormat

from .response_format import requested_constraint
from .tools import CalledTools, Tools, called_before, check_depth, tools_of

if TYPE_CHECKING:
    from offspec.engine import Prompt
    from offspec.text.tokenizer import Tokenizer

Json = dict[str, Any]
MOST_ANSWERS = 16  # to one request
Kind = Literal["chat", "text"]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FINISHES = {"eos": "stop", "stop": "stop", "length": "length", None: None}
# Unsupported fields that would change the answer, with their values that have no effect.
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
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
    "structured_outputs": (),
    "guided_choice": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("temperature", (int, float), "a number"),
    ("top_p", (int, float), "a number"),
    ("min_p", (int, float), "a number"),
    ("repetition_penalty", (int, float), "a number"),
    ("repeat_penalty", (int, float), "a number"),
    ("frequency_penalty", (int, float), "a number"),
    ("presence_penalty", (int, float), "a number"),
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
TOKEN_ID = re.compile(r"[0-9]{1,9}")
OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
# The meaning of -1 for clients of llama.cpp and LM Studio: as many tokens as fit, a random seed, off.
MINUS_ONE: Json = {"max_new_tokens": sys.maxsize, "seed": None, "top_k": 0}


@dataclass(frozen=True)
class CompletionRequest:
    """One request. prompt: a text or token ids for kind "text", messages for kind "chat".

    num_answers: answers with seeds that count up from the request's. user: whom the client asks for. tools: what a chat
    may call.
    """

    kind: Kind
    prompt: Prompt
    params: SamplingParams
    streams: bool = False
    wants_usage: bool = False  # whether a stream ends with the token counts
    num_answers: int = 1
    user: str = ""
    tools: Tools | None = None
    tool_format: ToolFormat | None = None  # how the model writes calls of the tools
    template_settings: Json = field(default_factory=dict)  # further variables of the chat template

    @property
    def is_plain_chat(self) -> bool:
        """Whether the prompt is texts of roles alone, without tools, earlier calls and settings of the template."""
        if self.kind != "chat" or self.tools is not None or self.template_settings:
            return False
        return not any("tool_calls" in m for m in self.prompt if isinstance(m, Mapping))


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
        replace(sampling_params(body, defaults), constraint=requested_constraint(body, defaults.constraint)),
        bool(_field(body, "stream", bool, "true or false")),
        bool(options.get("include_usage")),
        _num_answers(body),
        str(_field(body, "user", str, "a string") or ""),
        _tools(kind, body),
        template_settings=_template_settings(kind, body),
    )


def with_tools(asked: CompletionRequest, tokenizer: Tokenizer) -> CompletionRequest:
    """The request with the model's format of calls, and the constraint of `tool_choice`.

    Raises TokenizerError if the model's chat template knows no tools, or in a format that is not known; UsageError if
    the request asks for something else as well.
    """
    if asked.tools is None:
        return asked
    if asked.params.constraint is not None:
        raise UsageError("response_format and tools exclude each other; omit one of them, or set tool_choice to none")
    form = ToolFormat.of(tokenizer)
    return replace(asked, params=replace(asked.params, constraint=asked.tools.constraint(form)), tool_format=form)


def _template_settings(kind: Kind, body: Json) -> Json:
    """chat_template_kwargs, such as Qwen3's enable_thinking; it cannot replace what every template is given."""
    name = "chat_template_kwargs"
    found: Json = _field(body, name, Mapping, "an object") or {}
    if found and kind == "text":
        raise UsageError(f"{name} is for chats only; omit it")
    if taken := sorted(OWN_VARIABLES & found.keys()):
        raise UsageError(f"{name} may not have {', '.join(taken)}")
    check_depth(found, name)
    return found


def _tools(kind: Kind, body: Json) -> Tools | None:
    if kind == "text" and (body.get("tools") or body.get("tool_choice") not in (None, "none", "auto")):
        raise UsageError("tools are for chats only; omit tools and tool_choice")
    return tools_of(body)


def sampling_params(body: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """`defaults`, overridden by the fields of `body` that are not null. Raises UsageError, which names the field."""
    params = defaults
    for name, kind, what in FIELDS:
        if (value := _field(body, name, kind, what)) is not None:
            params = _with(params, name, value)
    if (bias := _field(body, "logit_bias", Mapping, "an object")) is not None:
        params = replace(params, logit_bias=_logit_bias(bias))
    if (stop := body.get("stop")) is not None:
        texts = [stop] if isinstance(stop, str) else stop
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise UsageError("stop must be a string or a list of strings, none of them empty")
        params = replace(params, stop=tuple(texts))
    return params


def _logit_bias(bias: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """The pairs of an object: token ids, which JSON has as texts, and numbers."""
    for token, value in bias.items():
        if not TOKEN_ID.fullmatch(token) or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(
                f"logit_bias must have token ids and numbers, not {reprlib.repr(token)}: {reprlib.repr(value)}"
            )
        if not abs(value) <= 100:
            raise UsageError(f"logit_bias must have numbers from -100 to 100, not {reprlib.repr(value)}")
    return tuple((int(token), float(value)) for token, value in bias.items())


def _num_answers(body: Json) -> int:
    """n. `best_of` may only repeat it: to choose the best of more answers takes the likelihoods of their tokens."""
    number, best_of = (_field(body, name, int, "a whole number") for name in ("n", "best_of"))
    number = 1 if number is None else int(number)
    if not 1 <= number <= MOST_ANSWERS:
        raise UsageError(f"n must be between 1 and {MOST_ANSWERS}, not {number}")
    if best_of not in (None, number):
        raise UsageError("best_of is not supported, but for the value of n; omit it")
    return number


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


def _messages(body: Json) -> list[Json]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages must be a list of at least one message")
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Any) -> Json:
    where = f"messages[{number}]"
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{where} needs a role: one of {', '.join(ROLES)}")
    found: Json = {"role": ROLES[role], "content": _content(message, where)}
    if message.get("tool_calls"):
        if role != "assistant":
            raise UsageError(f"{where}: tool_calls are for the assistant's messages")
        found["tool_calls"] = called_before(message, where)
    if role == "tool":
        found |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    return found


def _content(message: Json, where: str) -> str:
    """A message's text. An assistant's may be null: calls of tools need no text."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise UsageError(f"{where}: only parts of type text are supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UsageError(f"{where}: content must be a string")
    return content


# ------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True)
class Said:
    """Text of an answer, all of it or a part. figures: `Stats.as_dict`, once there is a pass."""

    text: str = ""
    finish_reason: str | None = None
    figures: Json = field(default_factory=dict)


class Answer:
    """Builds the response to one request; all parts of a stream have the same id."""

    def __init__(self, asked: CompletionRequest, model: str) -> None:
        self._asked, self._figures = asked, list[Json]()
        self._is_chat = asked.kind == "chat"
        self._called: list[CalledTools] | None = None
        if asked.tools is not None and asked.tool_format is not None:
            self._called = [CalledTools(asked.tools, asked.tool_format) for _ in range(asked.num_answers)]
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Said]) -> Json:
        """The whole answers as one object."""
        choices, figures = [], [said.figures for said in answers]
        for index, said in enumerate(answers):
            message = (
                {"message": {"role": "assistant", **self._whole(index, said)}} if self._is_chat else {"text": said.text}
            )
            finish_reason = self._finish(index, said)
            choices.append({"index": index, **message, "logprobs": None, "finish_reason": finish_reason})
        kind = "chat.completion" if self._is_chat else "text_completion"
        own = {"offspec": figures[0] if len(figures) == 1 else figures}
        return {**self._head, "object": kind, "choices": choices, "usage": usage(figures), **own}

    def parts(self, index: int, said: Said, *, is_first: bool) -> list[Json]:
        """The parts of a stream for an answer's text of one pass. The answer's last part has its figures."""
        is_end = said.finish_reason is not None
        texts: list[Json] = [{"content": said.text}] if self._is_chat else [{"text": said.text}]
        if self._called is not None:
            texts = self._called[index].deltas(said.text, is_end=is_end)
            if is_end or (is_first and not texts):
                texts = texts or [{"content": ""}]
        if is_first and self._is_chat and texts:
            texts[0] = {"role": "assistant", **texts[0]}
        parts = [self._part(index, text) for text in texts]
        if is_end:
            parts[-1]["choices"][0]["finish_reason"] = self._finish(index, said)
            parts[-1]["offspec"] = said.figures
            self._figures.append(said.figures)
        return parts

    def _part(self, index: int, text: Json) -> Json:
        choice = {"index": index, **({"delta": text} if self._is_chat else text)}
        return {**self._part_head, "choices": [{**choice, "logprobs": None, "finish_reason": None}]}

    def _whole(self, index: int, said: Said) -> Json:
        return {"content": said.text} if self._called is None else self._called[index].whole(said.text)

    def _finish(self, index: int, said: Said) -> str | None:
        """An answer's finish_reason; call after its text was taken."""
        reason = FINISHES[said.finish_reason]
        return "tool_calls" if reason == "stop" and self._called and self._called[index].num_calls else reason

    def usage_part(self) -> Json | None:
        """The part with the token counts, if the request wants one, after the last parts of all answers."""
        if not self._asked.wants_usage:
            return None
        return {**self._part_head, "choices": [], "usage": usage(self._figures)}

    @property
    def _part_head(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk" if self._is_chat else "text_completion"}


def usage(figures: Sequence[Json]) -> Json:
    """Tokens of the prompt and of its answers. cached_tokens: prompt tokens that the KV caches already held.

    Of several answers, the one that found the fewest scored the prompt.
    """
    prompt, answer = figures[0]["num_prompt_tokens"], sum(found["num_tokens"] for found in figures)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": prompt - max(found["num_prefilled_tokens"] for found in figures)},
    }


def failure(message: str, *, kind: str = "invalid_request_error", code: str | None = None) -> Json:
    """An error in the form that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
