"""From a pass's verdict to the step that a user gets: text, the end of the answer, where its tokens stand in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offspec.scheduler.guessing.retrieval import MAX_MATCH
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.logprobs import TokenLogprob
from offspec.scheduler.trees.verify import Verdict

from ..stats import Stats
from ..text.lookup_files import FileIndex, LookedUp
from .logprob_report import LogprobReport
from .models import Models


@dataclass(frozen=True)
class Step:
    """The result of one pass: new token ids, the text that is final by now, and the counters so far.

    finish_reason is None until the last step: eos (the model ended the text), stop (a stop text), length
    (max_new_tokens, or the context is full). The draft proposed num_accepted of the token ids; the last token of a pass
    comes from the target alone. texts[i] is the text that became final with token_ids[i], usually that token's own;
    joined, they are `text`. looked_up: where the first of the accepted ones stand in the files for lookup, if they do.
    logprobs: of the token ids, if asked for. prompt_logprobs: in the first step, of the prompt's tokens from the second
    on. stopped: the stop text that ended the answer.
    """

    token_ids: list[int]
    text: str
    stats: Stats
    finish_reason: str | None = None
    num_accepted: int = 0
    texts: tuple[str, ...] = ()
    looked_up: LookedUp | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stopped: str | None = None


class StepMaker:
    """Makes the steps of one text, in order. final: the tokens that end it."""

    def __init__(
        self, models: Models, sampling: SamplingParams, ends: frozenset[int], continued: Sequence[int] = ()
    ) -> None:
        """ends: tokens that end the answer beside EOS. continued: tokens of a text that the answer continues."""
        tokenizer = models.tokenizer
        self.final = ends | (frozenset() if sampling.ignore_eos else tokenizer.eos_ids)
        self._index, self._limit = models.index, sampling.max_new_tokens
        self._stream = tokenizer.stream(sampling.stop, skip_special_tokens=True, after=continued)

    def step(self, verdict: Verdict, text: Sequence[int], stats: Stats, logprobs: LogprobReport) -> Step:
        """The step of a verdict: its tokens up to the end of the answer. text: the prompt and all tokens so far."""
        tokens, texts = list[int](), list[str]()
        reason: str | None = None
        for token in verdict.tokens:
            tokens.append(token)
            texts.append("" if token in self.final else self._stream.push(token))
            reason = "eos" if token in self.final else "stop" if self._stream.stopped is not None else None
            if reason:
                break
        stats.num_tokens += len(tokens)
        if stats.num_passes == 1:
            stats.num_first_pass_tokens = len(tokens)
        if reason is None and stats.num_tokens >= self._limit:
            reason = "length"
        if reason:
            texts[-1] += self._stream.flush(is_cut=reason == "length")
        num_accepted = min(len(verdict.path), len(tokens))
        looked_up: LookedUp | None = None
        position = len(text) - len(verdict.tokens)
        if isinstance(self._index, FileIndex):
            looked_up = self._index.source(text[max(0, position - MAX_MATCH) : position], tokens[:num_accepted])
        return Step(
            tokens,
            "".join(texts),
            replace(stats),
            reason,
            num_accepted,
            tuple(texts),
            looked_up,
            logprobs=tuple(logprobs.of_pass[: len(tokens)]),
            prompt_logprobs=tuple(logprobs.of_prompt) if stats.num_passes == 1 else (),
            stopped=self._stream.stopped if reason == "stop" else None,
        )
