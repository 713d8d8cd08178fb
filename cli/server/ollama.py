"""Ollama's API: its requests as chats and text completions, its answers as JSON or lines of it, and its models.

A request becomes a body of OpenAI's chats or completions, so both have the same checks and the same answers. Options of
Ollama's runner (`num_ctx`, `num_gpu`) and unknown ones are ignored, as Ollama does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offspec import SamplingParams, __version__
from offspec.errors import UsageError

from . import logprobs
from .answer_blocks import AnswerBlock, BlockAnswer
from .answer_forms import LINES, AnswerChunk, AnswerForm, ApiForm
from .logprobs import TokenTexts
from .model_facts import capabilities, template_of
from .openai_answers import FINISHES
from .openai_requests import CompletionRequest, parse
from .request_parts import Json, field_of, list_of_objects, object_of, refuse_fields

if TYPE_CHECKING:
    from offspec.text.tokenizer import Tokenizer
    from offspec.tools.local_models import LocalModel

API_VERSION = "0.12.11"  # of Ollama, whose API this is; clients ask for a least one
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {"template": ("",), "context": ([],), "images": ([],)}
NOT_FOLLOWED_OPTIONS: dict[str, tuple[Any, ...]] = {"typical_p": (1,)}
OPTIONS = {"num_predict": "max_tokens"}  # and those that have one name
OPTIONS |= {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty")}
OPTIONS |= {name: name for name in ("presence_penalty", "frequency_penalty")}
LEVELS = ("low", "medium", "high", "max")  # of thinking
NANOSECONDS = 1e9  # in a second


class Ollama(ApiForm):
    """`/api/chat` or `/api/generate`."""

    stream = LINES

    def __init__(self, kind: Literal["chat", "generate"]) -> None:
        self.name, self._is_chat = f"api/{kind}", kind == "chat"

    def request(self, body: Any, defaults: SamplingParams) -> CompletionRequest:
        """A request as a chat, or with `raw` or a `suffix` as a text completion. Raises UsageError, naming the field.

        Without messages or a prompt it only has the model loaded, and asks for no answer.
        """
        refuse_fields(object_of(body), NOT_FOLLOWED)
        messages = _messages(body) if self._is_chat else _prompted(body)
        is_text = not self._is_chat and bool(body.get("raw") or body.get("suffix"))
        common = {"stream": body.get("stream") is not False, **_options(body), **_format(body)}
        if is_text or not messages:
            number = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
            text = {"prompt": body.get("prompt", ""), "suffix": body.get("suffix"), "logprobs": number}
            completion = parse("text", {**common, **text}, defaults)
            return completion if messages else replace(completion, prompts=[])
        chat = {**common, **_thinking(body), "messages": messages}
        chat |= {name: body.get(name) for name in ("tools", "logprobs", "top_logprobs")}
        return parse("chat", chat, defaults)

    def answer(
        self, body: Json, request: CompletionRequest, model: str, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> OllamaAnswer:
        blocks = BlockAnswer(request, prompts[0], tokenizer) if request.kind == "chat" else None
        texts = TokenTexts(tokenizer) if request.shows_logprobs else None
        return OllamaAnswer(model, blocks, texts, is_chat=self._is_chat, only_loads=not prompts)

    def error(self, failure: Json, status: int) -> Json:
        return {"error": failure["error"]["message"]}


# ------------------------------------------------------------------------------------------------ requests


def _prompted(body: Json) -> list[Json]:
    """The messages of a prompt with a system message; none for an empty prompt."""
    prompt, system = (field_of(body, name, str) or "" for name in ("prompt", "system"))
    if field_of(body, "raw", bool) and system:
        raise UsageError("raw excludes system: the prompt is taken as it is; omit one of them")
    suffix = field_of(body, "suffix", str)
    if not prompt and not suffix:
        return []
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]


def _messages(body: Json) -> list[Json]:
    """Messages as those of OpenAI's chats."""
    messages = list[Json]()
    for number, message in enumerate(list_of_objects(body, "messages")):
        if message.get("images"):
            raise UsageError(f"messages[{number}].images: images are not supported; omit them")
        names = {"thinking": "reasoning_content", "tool_name": "name", "tool_call_id": "tool_call_id"}
        role = message.get("role")
        messages.append(
            {
                "role": role.lower() if isinstance(role, str) else role,
                "content": message.get("content") or "",
                "tool_calls": message.get("tool_calls"),
                **{ours: message[theirs] for theirs, ours in names.items() if theirs in message},
            }
        )
    return messages


def _options(body: Json) -> Json:
    options = field_of(body, "options", dict) or {}
    refuse_fields(options, NOT_FOLLOWED_OPTIONS)
    renamed = {ours: options[theirs] for theirs, ours in OPTIONS.items() if theirs in options}
    for name in ("top_k", "seed", "max_tokens"):
        if isinstance(value := renamed.get(name), float) and value.is_integer():
            renamed[name] = int(value)
    if renamed.get("max_tokens") == -2:  # up to the end of the context
        renamed["max_tokens"] = -1
    return renamed


def _format(body: Json) -> Json:
    form = body.get("format")
    if form in (None, ""):
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(form, dict):
        raise UsageError("format must be json, or an object: a JSON schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form}}}


def _thinking(body: Json) -> Json:
    """Whether and how much the model thinks, as the templates of Qwen3 and of gpt-oss read it."""
    think = body.get("think")
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in LEVELS:
        raise UsageError(f"think must be true, false, or one of {', '.join(LEVELS)}")
    effort = {} if isinstance(think, bool) else {"reasoning_effort": think}
    return {"chat_template_kwargs": {"enable_thinking": bool(think), **effort}}


# ------------------------------------------------------------------------------------------------ answers


class OllamaAnswer(AnswerForm):
    """The response to one request. blocks: of a chat; without them, answers are texts."""

    def __init__(
        self, model: str, blocks: BlockAnswer | None, texts: TokenTexts | None, *, is_chat: bool, only_loads: bool
    ) -> None:
        """texts: of tokens, if the client asked for log-probabilities. is_chat: a message is told, not a response.

        only_loads: there is no answer.
        """
        self._model, self._blocks, self._texts = model, blocks, texts
        self._is_chat, self._only_loads = is_chat, only_loads

    def whole(self, answers: Sequence[AnswerChunk]) -> Json:
        if self._only_loads:
            return self._loaded()
        (chunk,) = answers
        blocks = [AnswerBlock("text", chunk.text)] if self._blocks is None else self._blocks.whole(chunk)
        return {**self._told(blocks), **self._logprobs(chunk), **_end(chunk)}

    def parts(self, index: int, passage: AnswerChunk, *, is_first: bool) -> list[Json]:
        """The parts of a pass; an answer's last one has no text, and the figures."""
        lines = [self._told([block]) for block in self._said(passage)]
        if (scores := self._logprobs(passage)) and not lines:
            lines.append(self._told([]))  # the text of these tokens is held back
        if scores:
            lines[0] |= scores
        if passage.finish_reason is not None:
            lines.append({**self._told([]), **_end(passage)})
        return lines

    def last_parts(self) -> list[Json]:
        return [self._loaded()] if self._only_loads else []

    def _said(self, passage: AnswerChunk) -> Iterator[AnswerBlock]:
        """What a pass says, in blocks: texts as they come, calls when they are complete."""
        if self._blocks is None:
            if passage.text:
                yield AnswerBlock("text", passage.text)
            return
        for event in self._blocks.push(passage):
            if event.kind == "more" and event.block.kind != "call":
                yield AnswerBlock(event.block.kind, event.text)
            elif event.kind == "end" and event.block.arguments is not None:
                yield event.block

    def _told(self, blocks: Sequence[AnswerBlock]) -> Json:
        head = {"model": self._model, "created_at": datetime.now(timezone.utc).isoformat(), "done": False}
        text, thoughts = ("".join(each.text for each in blocks if each.kind == kind) for kind in ("text", "thinking"))
        thinking = {"thinking": thoughts} if thoughts else {}
        if not self._is_chat:
            return {**head, "response": text, **thinking}
        message: Json = {"role": "assistant", "content": text, **thinking}
        if calls := [each for each in blocks if each.kind == "call"]:
            message["tool_calls"] = [
                {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return {**head, "message": message}

    def _loaded(self) -> Json:
        return {**self._told([]), "done": True, "done_reason": "load"}

    def _logprobs(self, chunk: AnswerChunk) -> Json:
        if self._texts is None or not chunk.logprobs:
            return {}
        return {"logprobs": logprobs.of_chat(chunk.logprobs, self._texts)["content"]}


def _end(chunk: AnswerChunk) -> Json:
    """The last part's figures; durations are in nanoseconds."""
    figures = chunk.figures
    first_s, later_s = figures["prefill_s"], figures["decode_s"]
    seconds = {
        "total_duration": figures["ttft_s"] + later_s,
        "prompt_eval_duration": first_s,
        "eval_duration": later_s or first_s,  # the first pass has tokens of the answer, too
    }
    return {
        "done": True,
        "done_reason": FINISHES[chunk.finish_reason],
        **{name: round(NANOSECONDS * value) for name, value in seconds.items()},
        "load_duration": 0,
        "prompt_eval_count": figures["num_prompt_tokens"],
        "eval_count": figures["num_tokens"],
        "offspec": figures,
    }


# ------------------------------------------------------------------------------------------------ models


def version() -> Json:
    """The answer to `/api/version`."""
    return {"version": API_VERSION, "offspec": __version__}


def tags(paths: Mapping[str, Path]) -> Json:
    """The answer to `/api/tags`. paths: the models', by their names. Raises OffspecError."""
    return {"models": [_listed(name, path, path.stat().st_mtime_ns) for name, path in paths.items()]}


def show(name: str, path: Path, context: int | None) -> Json:
    """The answer to `/api/show`. context: of the loaded model; None is the model's own. Raises OffspecError."""
    return _shown(name, path, path.stat().st_mtime_ns, context)


@lru_cache(maxsize=256)
def _described(path: Path, changed_ns: int) -> LocalModel:
    """From headers, read again after a change."""
    from offspec.tools.local_models import described

    return described(path.name, path)


def _listed(name: str, path: Path, changed_ns: int) -> Json:
    model = _described(path, changed_ns)
    digest = hashlib.sha256(f"{name} {model.size_bytes} {changed_ns}".encode()).hexdigest()  # it tells of a change
    modified = datetime.fromtimestamp(changed_ns / NANOSECONDS, timezone.utc).isoformat()
    facts = {"modified_at": modified, "size": model.size_bytes, "digest": digest}
    millions = model.num_parameters / 1e6
    return {
        "name": name,
        "model": name,
        **facts,
        "details": {
            "parent_model": "",
            "format": "gguf" if model.path.suffix == ".gguf" else "safetensors",
            "family": model.architecture,
            "families": [model.architecture],
            "parameter_size": f"{millions / 1e3:.1f}B" if millions >= 1e3 else f"{millions:.1f}M",
            "quantization_level": model.form.upper(),
        },
    }


@lru_cache(maxsize=32)
def _shown(name: str, path: Path, changed_ns: int, context: int | None) -> Json:
    from offspec.text.tokenizer import Tokenizer

    listed, model, tokenizer = _listed(name, path, changed_ns), _described(path, changed_ns), Tokenizer.load(path)
    family = model.architecture
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "",
        "template": template_of(tokenizer),
        "details": listed["details"],
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": model.num_parameters,
            f"{family}.context_length": context or model.max_context,
        },
        "capabilities": capabilities(tokenizer),
        "modified_at": listed["modified_at"],
    }
