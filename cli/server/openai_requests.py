"""Requests of OpenAI's completions API, from JSON; without HTTP or models.

A request is a chat (`messages`) or a text (`prompt`). Fields are OpenAI's, and the following of other local servers:
`top_k`, `min_p`, `repetition_penalty` (or `repeat_penalty`), `max_new_tokens`, `n_predict`, `ignore_eos` and
`continue_final_message`. A request with an unsupported field that would change the answer (NOT_FOLLOWED) is refused;
other unknown fields are ignored.
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from offspec import Constraint, SamplingParams
from offspec.errors import UsageError
from offspec.text.infill import Infill
from offspec.text.tool_calls import ToolFormat

from ..constraints import NAMES, constraint_in
from .request_parts import NUMBER, Json, field_of, object_of, refuse_fields
from .tools import Tools, called_before, check_depth, lenient, tools_of

if TYPE_CHECKING:
    from offspec import Prompt
    from offspec.text.tokenizer import Tokenizer

MOST_ANSWERS = 16  # to one request
Kind = Literal["chat", "text"]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Unsupported fields that would change the answer, with their values that have no effect.
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
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
}
FIELDS: dict[str, Any] = {  # of sampling → their kinds
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "repeat_penalty"), NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), NUMBER),
    **dict.fromkeys(("top_k", "seed", "max_new_tokens", "max_tokens", "max_completion_tokens", "n_predict"), int),
    "ignore_eos": bool,
}
OURS = {
    "repeat_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
}
# vLLM's names of older releases → those of prompt files, which are llama.cpp's as well.
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar"}
FORMATS = ("text", "json_object", "json_schema")
TOKEN_ID = re.compile(r"[0-9]{1,9}")
OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
# The meaning of -1 for clients of llama.cpp and LM Studio: as many tokens as fit, a random seed, off.
MINUS_ONE: Json = {"max_new_tokens": sys.maxsize, "seed": None, "top_k": 0}


@dataclass(frozen=True)
class CompletionRequest:
    """One request. prompts: texts or token ids for kind "text", one list of messages for kind "chat".

    num_answers: answers to each prompt, with seeds that count up from the request's. num_kept: how many of them the
    client gets, those with the highest mean log-probability of their tokens. shows_logprobs: whether the client asked
    for log-probabilities; choosing needs them anyway. user: whom the client asks for.
    echoes: answers begin with the prompt. omits_answer: nothing follows it. tools: what a chat may call. infill: what
    follows the answer of a text, whose prompts are then texts.
    """

    kind: Kind
    prompts: Sequence[Prompt]
    params: SamplingParams
    streams: bool = False
    wants_usage: bool = False  # whether a stream ends with the token counts
    num_answers: int = 1
    num_kept: int = 1
    shows_logprobs: bool = False
    user: str = ""
    echoes: bool = False
    omits_answer: bool = False
    tools: Tools | None = None
    tool_format: ToolFormat | None = None  # how the model writes calls of the tools
    template_settings: Json = field(default_factory=dict)  # further variables of the chat template
    reports_passes: bool = False  # whether a stream tells of each pass
    infill: Infill | None = None
    given: frozenset[str] = frozenset()  # fields of `params` that the request has, not the defaults
    continues: bool = False  # whether a chat's answer continues its last message, the assistant's

    @property
    def prompt(self) -> Prompt:
        """The first prompt, and a chat's only one."""
        return self.prompts[0]

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_answers

    @property
    def is_plain_chat(self) -> bool:
        """Whether the prompt is texts of roles alone, without tools, earlier calls and settings of the template."""
        if self.kind != "chat" or self.tools is not None or self.template_settings:
            return False
        return not any("tool_calls" in m for m in self.prompt if isinstance(m, dict))


# ------------------------------------------------------------------------------------------------ requests


def parse(kind: Kind, body: Any, defaults: SamplingParams) -> CompletionRequest:
    """Parse a request; `defaults` apply to omitted fields. Raises UsageError, which names the field."""
    refuse_fields(object_of(body), NOT_FOLLOWED)
    options = field_of(body, "stream_options", dict) or {}
    if (echoes := bool(field_of(body, "echo", bool))) and kind == "chat":
        raise UsageError("echo is for text completions only; omit it")
    if kind == "text" and (body.get("tools") or body.get("tool_choice") not in (None, "none", "auto")):
        raise UsageError("tools are for chats only; omit tools and tool_choice")
    omits_answer = echoes and body.get("max_tokens") == 0  # the prompt's log-probabilities alone
    params = sampling_params({**body, "max_tokens": 1} if omits_answer else body, defaults)
    params = _with_logprobs(params, kind, body, of_prompt=echoes)
    shows_logprobs = params.logprobs is not None
    num_kept, num_answers = _num_answers(kind, body)
    if num_answers > num_kept and not shows_logprobs:
        params = replace(params, logprobs=0)
    constraint = requested_constraint(body, defaults.constraint)
    prompts: Sequence[Prompt] = [_messages(body)] if kind == "chat" else _prompts(body)
    completion = CompletionRequest(
        kind,
        prompts,
        replace(params, constraint=constraint),
        bool(field_of(body, "stream", bool)),
        bool(options.get("include_usage")),
        num_answers,
        num_kept,
        shows_logprobs,
        str(field_of(body, "user", str) or ""),
        echoes,
        omits_answer,
        tools_of(body),
        template_settings=_template_settings(kind, body),
        reports_passes=_reports_passes(body),
        infill=_infill(kind, body, prompts, echoes=echoes),
        given=frozenset(OURS.get(name, name) for name in FIELDS if body.get(name) is not None),
        continues=_continues(kind, body),
    )
    if completion.continues:
        _check_begun(completion)
    return completion


def with_tools(completion: CompletionRequest, tokenizer: Tokenizer) -> CompletionRequest:
    """The request with the model's format of calls, and the constraint of `tool_choice`.

    Raises TokenizerError if the model's chat template knows no tools, or in a format that is not known; UsageError if
    the request asks for something else as well.
    """
    if completion.tools is None:
        return completion
    if completion.params.constraint is not None:
        raise UsageError("response_format and tools exclude each other; omit one of them, or set tool_choice to none")
    form = ToolFormat.of(tokenizer)
    may_ignore = completion.params.ignore_eos and not completion.tools.are_strict  # a constraint may end the answer
    constraint = None if may_ignore else completion.tools.constraint(form)
    return replace(completion, params=replace(completion.params, constraint=constraint), tool_format=form)


def _infill(kind: Kind, body: Json, prompts: Sequence[Prompt], *, echoes: bool) -> Infill | None:
    """What `suffix` says; an empty one asks for nothing."""
    suffix = field_of(body, "suffix", str)
    if not suffix:
        return None
    if kind == "chat" or echoes or not all(isinstance(prompt, str) for prompt in prompts):
        raise UsageError("suffix is for text completions of prompts that are texts, without echo; omit it")
    return Infill(suffix)


def _template_settings(kind: Kind, body: Json) -> Json:
    """chat_template_kwargs, such as Qwen3's enable_thinking; it cannot replace what every template is given."""
    name = "chat_template_kwargs"
    settings: Json = field_of(body, name, dict) or {}
    if settings and kind == "text":
        raise UsageError(f"{name} is for chats only; omit it")
    if taken := sorted(OWN_VARIABLES & settings.keys()):
        raise UsageError(f"{name} may not have {', '.join(taken)}")
    check_depth(settings, name)
    return settings


def _continues(kind: Kind, body: Json) -> bool:
    """continue_final_message, as vLLM and transformers have it."""
    name, other = "continue_final_message", "add_generation_prompt"
    continues = bool(field_of(body, name, bool))
    is_prompted = field_of(body, other, bool)
    if continues and kind == "text":
        raise UsageError(f"{name} is for chats only; omit it")
    if continues and is_prompted:
        raise UsageError(f"{name} and {other} exclude each other; omit one of them")
    if is_prompted is False and not continues:
        raise UsageError(f"{other} false is supported only with {name} true; omit it, or add that")
    return continues


def _check_begun(completion: CompletionRequest) -> None:
    """Raises UsageError if the last message cannot be continued."""
    name, last = "continue_final_message", cast("list[Json]", completion.prompt)[-1]
    if last["role"] != "assistant" or not last["content"] or "tool_calls" in last:
        raise UsageError(f"{name} needs a last message of the assistant with text and without tool_calls; omit it")
    if completion.tools is not None or completion.params.constraint is not None:
        raise UsageError(f"{name} excludes tools and response_format, which apply to whole answers; omit one of them")


def _reports_passes(body: Json) -> bool:
    settings = field_of(body, "offspec", dict) or {}
    if unknown := sorted(settings.keys() - {"passes"}):
        raise UsageError(f"offspec may have passes, not {', '.join(unknown)}")
    passes = bool(field_of(settings, "passes", bool))
    if passes and not body.get("stream"):
        raise UsageError("offspec.passes is for streams; set stream to true, or omit it")
    return passes


def sampling_params(body: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """`defaults`, overridden by the fields of `body` that are not null. Raises UsageError, which names the field."""
    params = defaults
    for name, kind in FIELDS.items():
        if (value := field_of(body, name, kind)) is not None:
            params = _with(params, name, value)
    if (bias := field_of(body, "logit_bias", dict)) is not None:
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


def _num_answers(kind: Kind, body: Json) -> tuple[int, int]:
    """n, and `best_of`: how many answers there are to choose from."""
    number, best_of = (field_of(body, name, int) for name in ("n", "best_of"))
    number = 1 if number is None else int(number)
    if not 1 <= number <= MOST_ANSWERS:
        raise UsageError(f"n must be between 1 and {MOST_ANSWERS}, not {number}")
    if best_of in (None, number):
        return number, number
    if kind == "chat":
        raise UsageError("best_of is for text completions only; omit it")
    if not number < best_of <= MOST_ANSWERS:
        raise UsageError(f"best_of must be between n and {MOST_ANSWERS}, not {best_of}")
    if body.get("stream"):
        raise UsageError("best_of answers cannot be streamed: the best is known at the end; omit stream or best_of")
    return number, int(best_of)


def _with(params: SamplingParams, name: str, value: Any) -> SamplingParams:
    """`params` with one field set; an error names the field as the client does."""
    ours = OURS.get(name, name)
    try:
        return replace(params, **{ours: MINUS_ONE[ours] if value == -1 and ours in MINUS_ONE else value})
    except UsageError as exc:
        raise UsageError(str(exc).replace(ours, name, 1)) from exc


def _with_logprobs(params: SamplingParams, kind: Kind, body: Json, *, of_prompt: bool) -> SamplingParams:
    """`logprobs` is a number of alternatives in text completions; in chats a switch, and `top_logprobs` the number."""
    name = "logprobs" if kind == "text" else "top_logprobs"
    number = None if body.get(name) is False else field_of(body, name, int)
    if kind == "text" and body.get("top_logprobs"):
        raise UsageError("top_logprobs is for chats only; give logprobs, the number of tokens")
    if kind == "chat":
        is_asked = field_of(body, "logprobs", bool)
        if number and not is_asked:
            raise UsageError("top_logprobs needs logprobs, which must be true")
        number = (number or 0) if is_asked else None
    try:
        return replace(params, logprobs=number, prompt_logprobs=of_prompt and number is not None)
    except UsageError as exc:
        raise UsageError(str(exc).replace("logprobs", name, 1)) from exc


def _prompts(body: Json) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    prompt = body.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) and prompt and not _is_ids(prompt) else [prompt]
    if not all(isinstance(each, str) or _is_ids(each) for each in prompts):
        raise UsageError("prompt must be a string, a list of token ids, or a list of several of one kind")
    return prompts


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _messages(body: Json) -> list[Json]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages must be a list of at least one message")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, where: str) -> Json:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{where} needs a role: one of {', '.join(ROLES)}")
    message_read: Json = {"role": ROLES[role], "content": _content(message, where)}
    if message.get("tool_calls"):
        if role != "assistant":
            raise UsageError(f"{where}: tool_calls are for the assistant's messages")
        message_read["tool_calls"] = called_before(message, where)
    if role == "assistant" and isinstance(message.get("reasoning_content"), str):
        message_read["reasoning_content"] = message["reasoning_content"]  # templates may show it between calls of tools
    if role == "tool":
        message_read |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    return message_read


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


# ------------------------------------------------------------------------------------------------ constraints


def requested_constraint(body: Mapping[str, Any], default: Constraint | None) -> Constraint | None:
    """The constraint that a request states, else `default`. Raises UsageError, which names the field."""
    stated = {name: body[name] for name in (*NAMES, *GUIDED) if body.get(name) not in (None, False, "")}
    requested = body.get("response_format")
    if requested is None:
        if len(stated) > 1:
            raise UsageError(f"only one of {', '.join(stated)} may be given")
        return constraint_in({GUIDED.get(name, name): value for name, value in stated.items()}, default)
    if not isinstance(requested, dict) or requested.get("type") not in FORMATS:
        raise UsageError(f"response_format must be an object whose type is one of {', '.join(FORMATS)}")
    if stated:
        raise UsageError(f"only one of response_format, {', '.join(stated)} may be given")
    if requested["type"] == "text":
        return None
    if requested["type"] == "json_schema":
        return _of_schema(requested.get("json_schema"))
    if requested.get("schema") is not None:  # as llama.cpp's server has it
        return Constraint.json_schema(_schema(requested["schema"], "response_format.schema"))
    return Constraint.json_object()


def _of_schema(described: Any) -> Constraint:
    """The schema always holds. `strict: false` ignores those keywords that the library does not implement."""
    where = "response_format.json_schema"
    if not isinstance(described, dict):
        raise UsageError(f"{where} must be an object with a schema")
    strict = described.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise UsageError(f"{where}.strict must be true or false")
    schema = _schema(described.get("schema"), f"{where}.schema")
    return Constraint.json_schema(lenient(schema) if strict is False else schema)


def _schema(schema: Any, where: str) -> Json:
    if not isinstance(schema, dict):
        raise UsageError(f"{where} must be an object: a JSON schema")
    return schema
