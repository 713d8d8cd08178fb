"""The engine: a target, a draft, and what was learnt of it; turns prompts into text, one request at a time or several.

Knows nothing of the terminal, of files' bytes, or of how trees are drafted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from numbers import Integral
from operator import index
from os import PathLike, fspath
from threading import RLock
from types import TracebackType
from typing import Any, TypeGuard

from offspec.loaders.units import parse_size
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.retrieval import SuffixIndex

from .checkpoints.opening import Note
from .drafts.base import NO_MODEL_TO_WEIGH, Draft
from .drafts.without_model import NoDraft
from .errors import ContextLengthError, UsageError
from .loading import LoadedTarget, LoadOptions, load
from .model.decoder import Decoder
from .model.text_caches import TextCaches
from .planning.out_of_memory import retry_out_of_memory
from .planning.plan import Plan
from .request import Observer, Request, RequestParams, Step
from .stats import Stats
from .text.tokenizer import Tokenizer
from .training.online import Aligner

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


class Engine:
    """A loaded target and a draft. What is learnt of the draft is kept from request to request.

    Several requests may be under way, in several threads, too: their passes come one after the other.
    """

    def __init__(
        self,
        target: LoadedTarget,
        tokenizer: Tokenizer,
        draft: Draft | None = None,
        *,
        name: str = "",
        index: SuffixIndex | None = None,
    ) -> None:
        """draft: None guesses nothing. name: the model's, as it was asked for. index: of other texts to look up in."""
        self.loaded, self.tokenizer, self.draft = target, tokenizer, draft or NoDraft()
        self.name, self.lookup_index = name, index
        self.learnt = self.draft.new_learnt(target.decoder, target.predict_pass_s if target.rates else None)
        self.draft.prepare(self.max_context)

    @classmethod
    def load(cls, model: str | PathLike[str] = "builtin", **options: Any) -> Engine:
        """Load MODEL (a path, a hub id, or `builtin`) and its draft; what does not fit in memory is streamed.

        options: see `offspec.loading.LoadOptions`, e.g. draft, device, dtype, context; vram and ram also as texts like
        "4GiB". What was chosen automatically stands in `notes`, with its reason, where everything went in `plan`.
        The engine is its own context manager: `with Engine.load(...) as engine` closes it at the end.
        Raises OffspecError's children for whatever cannot be loaded or does not fit together.
        """
        name = fspath(model)
        found = load(_load_options(name, options))
        return cls(found.target, found.tokenizer, found.draft, name=name, index=found.index)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def target(self) -> Decoder:
        return self.loaded.decoder

    @property
    def draft_name(self) -> str | None:
        """What guesses: a model's name, `lookup`, `self`; None where nothing does."""
        return self.draft.name

    @property
    def max_context(self) -> int:
        """The most a text may have in tokens."""
        return self.loaded.max_context

    @property
    def notes(self) -> list[Note]:
        """What was chosen automatically, with its reason."""
        return self.loaded.notes

    @property
    def plan(self) -> Plan | None:
        """Where everything went; None for a target that was not loaded by a plan."""
        return self.loaded.plan

    @property
    def turn(self) -> RLock:
        """Held by whoever computes with the models."""
        return self.loaded.turn

    @property
    def aligner(self) -> Aligner | None:
        """What the draft learns with, where it may."""
        return self.draft.aligner

    def close(self) -> None:
        """Lets go of the memory, and joins what reads ahead; afterwards `generate` raises UsageError."""
        self.loaded.close()
        self.draft.close()

    def with_draft(self, draft: Draft) -> Engine:
        """The same target with another draft, of which nothing is learnt yet."""
        return Engine(self.loaded, self.tokenizer, draft, name=self.name, index=self.lookup_index)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: raw text, chat messages (through the chat template), or ids as they are."""
        if isinstance(prompt, str):
            self.tokenizer.check_length(prompt, self.max_context)
            ids = self.tokenizer.encode(prompt)
        elif _is_chat(prompt):
            ids = self.tokenizer.encode_chat(prompt, self.max_context)
        elif _is_ids(prompt):
            ids = [index(token) for token in prompt]
        else:
            raise UsageError("a prompt is a text, a list of token ids, or a list of messages with role and content")
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        if bad := [token for token in ids if not 0 <= token < self.target.config.vocab_size]:
            raise UsageError(f"token id {bad[0]} is outside the model's vocabulary of {self.target.config.vocab_size}")
        return ids

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        caches: TextCaches | None = None,
        observer: Observer | None = None,
    ) -> Generator[Step, None, None]:
        """Generate text for a prompt, a step a pass; the text appears as it is accepted.

        The text is that of plain decoding (`SpeculationParams(budget=0)`) with the same seed, token for token, whatever
        the draft; with `SpeculationParams(accept="joint")` it is another, and the statistics say so (`is_lossy`).
        Closing the iterator between steps leaves the engine ready for the next request.
        caches: kept from an earlier request (`new_caches`); what the prompt shares with its text is not scored again.
        One request at a time may use them: UsageError until the other's iterator has ended, is closed, or is gone.
        observer: shown every tree with its verdict, as the pass ends.
        Raises ContextLengthError or UsageError at once, NumericalError or MemoryLimitError while running.
        """
        began = time.perf_counter()
        self.loaded.check()
        params, speculation = params or SamplingParams(), speculation or SpeculationParams()
        speculation.check_sampling(params)
        if speculation.is_lossy and self.draft.decoder is None:
            raise UsageError(NO_MODEL_TO_WEIGH)
        text = self.encode(prompt)
        room = self.max_context - len(text)
        if room < 1:
            raise ContextLengthError(self._too_long(len(text)))
        seed = secrets.randbits(32) if params.seed is None else params.seed
        params = replace(params, seed=seed, max_new_tokens=min(params.max_new_tokens, room))
        asked = RequestParams(params, seed, speculation, observer, began)
        caches = caches or self.new_caches()
        with self.turn:  # of two threads that come with the same caches, one is refused
            caches.user.check_free()
            return caches.user.begin(Request(self, text, asked, caches).run())

    def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, speculation: SpeculationParams | None = None
    ) -> str:
        """The whole text that `generate` gives piece by piece. Raises what it does."""
        return "".join(step.text for step in self.generate(prompt, params, speculation))

    def learn(self, stats: Stats) -> None:
        """Let the draft learn from what the target said in the requests so far, if it was loaded with `learn`.

        To be called when a request has ended; what it took is counted in `stats`, that request's. Text does not change
        by it. Left by an exception (Ctrl-C), the draft is as it was. Keys and values that a conversation's caches hold
        of the draft as it was stay: they guess a little worse, and scoring them anew would cost a pass over it all.
        """
        if self.aligner is None or not self.aligner.is_listening:
            return
        with self.turn:
            learnt = self.aligner.learn(stats.prefill_s + stats.decode_s)
        stats.learn_s, stats.learn_steps = learnt.seconds, learnt.num_steps
        stats.learnt_loss, stats.unlearnt_loss = learnt.loss, learnt.loss_before

    def new_caches(self, num_tokens: int = 0, num_nodes: int = 0) -> TextCaches:
        """Empty KV caches of one text, to be kept from request to request; with room at once for so many tokens and a
        tree beside them. Where device memory runs out for it, the target is loaded anew with fewer resident layers.
        """
        with self.turn:
            self.loaded.check()
            if num_tokens or num_nodes:
                self.loaded.spare_nothing()
            return retry_out_of_memory(
                lambda: self.draft.new_caches(self.target, num_tokens, num_nodes), self.loaded.make_room
            )

    @property
    def guesses(self) -> bool:
        """Whether anything does: a draft, what is looked up in its stead, or texts to look up in."""
        return self.draft_name is not None or self.draft.decoder is not None or self.lookup_index is not None

    def sharpness(self, *, greedy: bool) -> float:
        """The sharpness fitted so far (see `scheduler.calibration`)."""
        return self.learnt.calibration.sharpness(greedy=greedy).value

    def _too_long(self, num_tokens: int) -> str:
        planned, longest = self.max_context, self.target.config.max_context
        where, more = "the model's context is", ""
        if planned < longest:
            where, more = "memory was planned for", f", or give --context (up to {longest})"
        return (
            f"the prompt has {num_tokens} tokens and {where} {planned}, which leaves no room for an answer; "
            f"shorten the prompt{more}"
        )


def _load_options(model: str, options: Mapping[str, Any]) -> LoadOptions:
    """Sizes may be texts. Raises UsageError for an unknown name, or a size that is none."""
    known, found = [field.name for field in fields(LoadOptions) if field.name != "model"], dict(options)
    if unknown := [name for name in options if name not in known]:
        near = get_close_matches(unknown[0], known, n=1)
        meant = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
        raise UsageError(f"Engine.load has no option {unknown[0]!r}; {meant}")
    for name in ("vram", "ram"):
        size = found.get(name)
        if isinstance(size, str):
            found[name] = parse_size(size)
        elif not (size is None or isinstance(size, Integral)):
            raise UsageError(f'{name} must be a number of bytes or a text like "4GiB", not {size!r}')
    return LoadOptions(model, **found)


def _is_chat(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    return len(prompt) > 0 and all(isinstance(part, Mapping) for part in prompt)


def _is_ids(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[int]]:
    return all(hasattr(part, "__index__") for part in prompt)  # numpy's integers too, but no float
