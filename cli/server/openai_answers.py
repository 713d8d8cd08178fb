"""Answers of OpenAI's completions API as JSON: whole ones, and the parts of streams.

Answers have the engine's statistics under `offspec`.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offspec import SamplingParams
from offspec.text.thinking import ThinkingStyle

from ..reasoning import ThinkingReader
from . import logprobs
from .answer_forms import AnswerChunk, AnswerForm, ApiForm
from .logprobs import TokenTexts
from .openai_requests import CompletionRequest, Kind, parse
from .request_parts import Json
from .tools import CalledTools

if TYPE_CHECKING:
    from offspec import TokenLogprob
    from offspec.text.tokenizer import Tokenizer

FINISHES = {"eos": "stop", "stop": "stop", "length": "length", None: None}


def mean_logprob(chunk: AnswerChunk) -> float:
    """The mean log-probability of an answer's tokens, by which `best_of` chooses; an empty answer comes last."""
    return sum(each.logprob for each in chunk.logprobs) / len(chunk.logprobs) if chunk.logprobs else -math.inf


class EchoedPrompt:
    """A prompt that its answers begin with. The first answer brings the log-probabilities of its tokens."""

    def __init__(self, prompt: str | None, ids: Sequence[int], tokenizer: Tokenizer) -> None:
        """prompt: the prompt, if it was a text."""
        self.text = tokenizer.decode(ids) if prompt is None else prompt
        self._ids, self._texts = ids, TokenTexts(tokenizer)
        self._logprobs: tuple[TokenLogprob, ...] = ()

    def scored(self, logprobs: Sequence[TokenLogprob]) -> list[tuple[int, TokenLogprob | None, str]]:
        """Its tokens as `logprobs.of_text` takes them. logprobs: of the first answer."""
        self._logprobs = self._logprobs or tuple(logprobs)
        return list(zip(self._ids, (None, *self._logprobs), self._texts.by_token(self._ids), strict=True))


class TextChoice:
    """One answer of a text completion."""

    def __init__(self, completion: CompletionRequest, texts: TokenTexts | None, echoed: EchoedPrompt | None) -> None:
        self._completion, self._texts, self._echoed = completion, texts, echoed
        self._length = 0  # of the text so far, in characters

    def whole(self, chunk: AnswerChunk) -> Json:
        return self.parts(chunk, is_first=True)[0]

    def parts(self, chunk: AnswerChunk, *, is_first: bool) -> list[Json]:
        if self._completion.omits_answer:
            chunk = AnswerChunk("", chunk.finish_reason, chunk.figures, prompt_logprobs=chunk.prompt_logprobs)
        echoed = self._echoed if is_first else None
        text = chunk.text if echoed is None else echoed.text + chunk.text
        part: Json = {"text": text, "logprobs": None}
        if self._completion.shows_logprobs and self._texts is not None:
            scored = [] if echoed is None else echoed.scored(chunk.prompt_logprobs)
            before = logprobs.of_text(scored, self._texts, 0)
            start = self._length + (0 if echoed is None else len(echoed.text))
            answered = zip((each.token for each in chunk.logprobs), chunk.logprobs, chunk.texts, strict=True)
            new = logprobs.of_text(list(answered), self._texts, start)
            part["logprobs"] = {name: before[name] + new[name] for name in new}
        self._length += len(text)
        return [part]

    def finish(self, chunk: AnswerChunk) -> str | None:
        return "length" if self._completion.omits_answer else FINISHES[chunk.finish_reason]


class ChatChoice:
    """One answer of a chat."""

    def __init__(self, completion: CompletionRequest, texts: TokenTexts | None, thinking: ThinkingStyle | None) -> None:
        self._texts = texts if completion.params.logprobs is not None else None
        self._thinking = None if thinking is None else ThinkingReader(thinking)
        self._unsent: tuple[TokenLogprob, ...] = ()  # of tokens whose text is held back
        self._called: CalledTools | None = None
        if completion.tools is not None and completion.tool_format is not None:
            are_bound = completion.params.constraint is not None
            self._called = CalledTools(completion.tools, completion.tool_format, are_bound=are_bound)

    def whole(self, chunk: AnswerChunk) -> Json:
        thought, text = self._split(chunk.text, is_end=True)
        message = {"content": text} if self._called is None else self._called.whole(text)
        if thought:
            message["reasoning_content"] = thought
        self._unsent = chunk.logprobs
        return {"message": {"role": "assistant", **message}, "logprobs": self._taken_logprobs()}

    def parts(self, chunk: AnswerChunk, *, is_first: bool) -> list[Json]:
        """The parts of a stream for the text of one pass; none if all of it is held back."""
        is_end = chunk.finish_reason is not None
        thought, text = self._split(chunk.text, is_end=is_end)
        deltas: list[Json] = [{"reasoning_content": thought}] if thought else []
        if self._called is not None:
            deltas += self._called.deltas(text, is_end=is_end)
        elif text or self._thinking is None:
            deltas.append({"content": text})
        if is_end or is_first:
            deltas = deltas or [{"content": ""}]
        if is_first:
            deltas[0] = {"role": "assistant", **deltas[0]}
        self._unsent += chunk.logprobs
        return [
            {"delta": delta, "logprobs": self._taken_logprobs() if place == 0 else None}
            for place, delta in enumerate(deltas)
        ]

    def _split(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """What the model thinks, and what it says."""
        return ("", text) if self._thinking is None else self._thinking.push(text, is_end=is_end)

    def _taken_logprobs(self) -> Json | None:
        unsent, self._unsent = self._unsent, ()
        return logprobs.of_chat(unsent, self._texts) if self._texts is not None else None

    def finish(self, chunk: AnswerChunk) -> str | None:
        """The answer's finish_reason; call after its text was taken."""
        reason = FINISHES[chunk.finish_reason]
        return "tool_calls" if reason == "stop" and self._called and self._called.num_calls else reason


class Completions(ApiForm):
    """OpenAI's chats or text completions."""

    def __init__(self, kind: Kind) -> None:
        self.name: str = kind
        self._kind: Kind = kind

    def request(self, body: Any, defaults: SamplingParams) -> CompletionRequest:
        return parse(self._kind, body, defaults)

    def answer(
        self, body: Json, request: CompletionRequest, model: str, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> Answer:
        return Answer(request, model, prompts, tokenizer)


class Answer(AnswerForm):
    """Builds the response to one request; all parts of a stream have the same id."""

    end = "data: [DONE]\n\n"

    def __init__(
        self,
        completion: CompletionRequest,
        model: str,
        prompts: Sequence[Sequence[int]] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """prompts: token ids; they and the tokenizer are needed for thinking, echoes and log-probabilities."""
        self._completion, self._figures = completion, dict[int, Json]()
        self._is_chat = completion.kind == "chat"
        texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._choices: list[ChatChoice | TextChoice] = []
        thinking = None
        if self._is_chat and tokenizer is not None and not completion.continues:
            thinking = ThinkingStyle.of(prompts[0], tokenizer)
        for number, prompt in enumerate(completion.prompts):
            echoed = None
            if completion.echoes and tokenizer is not None:
                echoed = EchoedPrompt(prompt if isinstance(prompt, str) else None, prompts[number], tokenizer)
            for _ in range(completion.num_answers):
                is_chat = self._is_chat
                self._choices.append(
                    ChatChoice(completion, texts, thinking) if is_chat else TextChoice(completion, texts, echoed)
                )
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[AnswerChunk]) -> Json:
        """The whole answers as one object."""
        wholes: list[Json] = []
        for index, (choice, chunk) in enumerate(zip(self._choices, answers, strict=True)):
            wholes.append({**choice.whole(chunk), "finish_reason": choice.finish(chunk)})
            self._figures[index] = chunk.figures
        kept = self._kept(answers)
        choices = [{"index": index, **wholes[number]} for index, number in enumerate(kept)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        figures = [answers[number].figures for number in kept]
        more = {"offspec": figures[0] if len(figures) == 1 else figures}
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(), **more}

    def _kept(self, answers: Sequence[AnswerChunk]) -> list[int]:
        """The answers that the client gets: of each prompt's, those with the highest mean log-probability."""
        each, kept = self._completion.num_answers, list[int]()
        for first in range(0, len(answers), each):
            numbers: Sequence[int] = range(first, first + each)
            if self._completion.num_kept < each:
                best_first = sorted(numbers, key=lambda number: mean_logprob(answers[number]), reverse=True)
                numbers = best_first[: self._completion.num_kept]
            kept += numbers
        return kept

    def parts(self, index: int, passage: AnswerChunk, *, is_first: bool) -> list[Json]:
        """The parts of a stream for an answer's text of one pass. The answer's last part has its figures."""
        choice = self._choices[index]
        bodies = [{"index": index, **part, "finish_reason": None} for part in choice.parts(passage, is_first=is_first)]
        parts: list[Json] = [{**self._part_head, "choices": [part]} for part in bodies]
        if passage.finish_reason is not None:
            parts[-1]["choices"][0]["finish_reason"] = choice.finish(passage)
            parts[-1]["offspec"] = passage.figures
            self._figures[index] = passage.figures
        if passage.report is not None:
            report = {"index": index, "pass": passage.report, **passage.figures}
            parts.insert(0, {**self._part_head, "choices": [], "offspec": report})
        return parts

    def last_parts(self) -> list[Json]:
        """The part with the token counts, if the request wants one, after the last parts of all answers."""
        return [{**self._part_head, "choices": [], "usage": self._usage()}] if self._completion.wants_usage else []

    @property
    def _part_head(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk" if self._is_chat else "text_completion"}

    def _usage(self) -> Json:
        """Tokens of the prompts and of their answers. cached_tokens: prompt tokens that the KV caches already held.

        Of several answers to a prompt, the one that found the fewest scored the prompt.
        """
        each = self._completion.num_answers
        by_prompt = [
            [self._figures[index] for index in range(first, first + each)]
            for first in range(0, self._completion.num_choices, each)
        ]
        prompt = sum(each[0]["num_prompt_tokens"] for each in by_prompt)
        scored = sum(max(figures["num_prefilled_tokens"] for figures in each) for each in by_prompt)
        answer = sum(figures["num_tokens"] for figures in self._figures.values())
        answer = 0 if self._completion.omits_answer else answer
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": prompt - scored},
        }


def failure(message: str, *, kind: str = "invalid_request_error", code: str | None = None) -> Json:
    """An error in the form that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
