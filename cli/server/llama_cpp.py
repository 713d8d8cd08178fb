"""llama.cpp's own routes: `/infill`, whose requests become text completions, `/tokenize`, `/detokenize`, `/props`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offspec import SamplingParams, __version__
from offspec.errors import UsageError
from offspec.text.infill import Infill

from .answer_forms import AnswerChunk, AnswerForm, ApiForm
from .logprobs import TokenTexts
from .model_facts import template_of
from .openai_requests import CompletionRequest, parse
from .request_parts import Json, field_of, list_of_objects, object_of, refuse_fields

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.text.tokenizer import Tokenizer

NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {"n_probs": (0,), "n_cmpl": (1,), "lora": ([],)}
OTHERS = ("suffix", "echo", "n", "best_of", "logprobs", "stream_options", "offspec")  # OpenAI's, which it does not have
STOP_TYPES = {"eos": "eos", "stop": "word", "length": "limit"}


class Infilling(ApiForm):
    name = "infill"

    def request(self, body: Any, defaults: SamplingParams) -> CompletionRequest:
        """A request as a text completion: `prompt` follows `input_prefix`. Raises UsageError, which names the field.

        `n_predict` 0 has the prompt read, for the caches.
        """
        refuse_fields(object_of(body), NOT_FOLLOWED)
        names = ("input_prefix", "prompt", "input_suffix")
        prefix, prompt, suffix = (field_of(body, name, str) or "" for name in names)
        text = {**body, **dict.fromkeys(OTHERS), "prompt": prefix + prompt}
        is_read_only = field_of(body, "n_predict", int) == 0
        completion = parse("text", {**text, "n_predict": 1} if is_read_only else text, defaults)
        return replace(completion, infill=Infill(suffix, _extra(body)), omits_answer=is_read_only)

    def answer(
        self, body: Json, request: CompletionRequest, model: str, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> InfillAnswer:
        return InfillAnswer(body, request, model, tokenizer.decode(prompts[0], skip_special_tokens=False))

    def error(self, failure: Json, status: int) -> Json:
        return {"error": {**failure["error"], "code": status}}


def _extra(body: Json) -> tuple[tuple[str, str], ...]:
    """Further files, as pairs of a name and a text."""
    files = list[tuple[str, str]]()
    for number, each in enumerate(list_of_objects(body, "input_extra")):
        name, text = each.get("filename", "tmp"), each.get("text")
        if not (isinstance(name, str) and isinstance(text, str)):
            raise UsageError(f"input_extra[{number}] must have a text, and may have a filename, both strings")
        files.append((name, text))
    return tuple(files)


class InfillAnswer(AnswerForm):
    """The response to one request. prompt: as the model reads it."""

    def __init__(self, body: Json, completion: CompletionRequest, model: str, prompt: str) -> None:
        self._completion, self._text = completion, ""
        self._fields = body.get("response_fields")
        self._facts = {"model": model, "prompt": prompt, "generation_settings": settings(completion.params)}

    def whole(self, answers: Sequence[AnswerChunk]) -> Json:
        (chunk,) = answers
        text = "" if self._completion.omits_answer else chunk.text
        return self._selected({**self._end(chunk), "content": text, "has_new_line": "\n" in text})

    def parts(self, index: int, passage: AnswerChunk, *, is_first: bool) -> list[Json]:
        """The part of a pass; an answer's last one has no text, and the figures."""
        parts = list[Json]()
        if passage.text and not self._completion.omits_answer:
            self._text += passage.text
            parts.append({**_counts(passage.figures), "content": passage.text, "stop": False})
        if passage.finish_reason is not None:
            end = {**self._end(passage), "content": "", "has_new_line": "\n" in self._text}
            parts.append(self._selected(end))
        return parts

    def _end(self, chunk: AnswerChunk) -> Json:
        figures = chunk.figures
        return {
            **_counts(figures),
            **self._facts,
            "stop": True,
            "stop_type": STOP_TYPES.get(chunk.finish_reason or "", "none"),
            "stopping_word": chunk.stopped or "",
            "truncated": False,
            "tokens_cached": figures["num_prompt_tokens"] - figures["num_prefilled_tokens"],
            "timings": {
                "cache_n": figures["num_prompt_tokens"] - figures["num_prefilled_tokens"],
                **_rates("prompt", figures["num_prefilled_tokens"], figures["prefill_s"]),
                **_rates("predicted", figures["num_tokens"], figures["decode_s"]),
            },
            "offspec": figures,
        }

    def _selected(self, part: Json) -> Json:
        """Those values that `response_fields` names by their paths; all if it is omitted."""
        if not isinstance(self._fields, list) or not self._fields:
            return part
        selected: Json = {}
        for path in self._fields:
            value: Any = part
            for name in path.split("/") if isinstance(path, str) else [None]:
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                selected[path] = value
        return selected


def _counts(figures: Json) -> Json:
    counts = {"tokens_predicted": figures["num_tokens"], "tokens_evaluated": figures["num_prompt_tokens"]}
    return {"index": 0, "id_slot": 0, "tokens": [], **counts}


def _rates(name: str, number: int, seconds: float) -> Json:
    return {
        f"{name}_n": number,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / number if number else 0.0,
        f"{name}_per_second": number / seconds if seconds else 0.0,
    }


def settings(params: SamplingParams) -> Json:
    """Settings of sampling under llama.cpp's names."""
    most = -1 if params.max_new_tokens == sys.maxsize else params.max_new_tokens
    same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
    return {
        **{name: getattr(params, name) for name in same},
        "repeat_penalty": params.repetition_penalty,
        "seed": -1 if params.seed is None else params.seed,
        "stop": list(params.stop),
        "n_predict": most,
        "max_tokens": most,
    }


# ------------------------------------------------------------------------------------------------ tokens, properties


def tokenize(body: Json, engine: Engine) -> Json:
    """The answer to `/tokenize`. Raises UsageError, and ContextLengthError for a text longer than the context."""
    text = field_of(body, "content", str) or ""
    flags = {name: field_of(body, name, bool) for name in ("add_special", "with_pieces")}
    parses_special = field_of(body, "parse_special", bool) is not False
    tokenizer = engine.tokenizer
    tokenizer.check_length(text, engine.context_limit)
    ids = tokenizer.encode(text, add_special_tokens=False) if parses_special else tokenizer.encode_plain(text)
    if flags["add_special"]:
        ids = [*tokenizer.encode(""), *ids]
    if not flags["with_pieces"]:
        return {"tokens": ids}
    texts = TokenTexts(tokenizer)
    return {"tokens": [{"id": token, "piece": _piece(texts.content(token))} for token in ids]}


def _piece(content: bytes) -> str | list[int]:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)


def detokenize(body: Json, engine: Engine) -> Json:
    """The answer to `/detokenize`. Raises UsageError."""
    ids = body.get("tokens") or []
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UsageError("tokens must be a list of token ids")
    return {"content": engine.tokenizer.decode(engine.encode(ids) if ids else [], skip_special_tokens=False)}


def props(engine: Engine, name: str, defaults: SamplingParams, num_texts: int) -> Json:
    """The answer to `/props`. name: as clients see the model. num_texts: that share passes."""
    tokenizer = engine.tokenizer
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {
        "default_generation_settings": {"n_ctx": engine.max_context, "params": settings(defaults)},
        "total_slots": num_texts,
        "model_alias": name,
        "model_path": name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template_of(tokenizer),
        **{key: "" if token is None else tokenizer.token_text(token) for key, token in names.items()},
        "build_info": f"offspec {__version__}",
    }
