"""The engine: a target, a draft, and the estimates about it; generates text for one or several requests at a time.

It does not depend on the terminal, on file formats, or on how trees are drafted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from numbers import Integral
from operator import index
from os import PathLike
from threading import RLock
from types import TracebackType
from typing import Any, TypeGuard

from offspec.loaders.params import KV_CACHES
from offspec.loaders.units import parse_size
from offspec.scheduler.guessing.retrieval import SuffixIndex
from offspec.scheduler.params import AUTO_TEXTS, Constraint, SamplingParams, SpeculationParams, check_names
from offspec.scheduler.trees.constraint import TokenConstraint

from .batch import Batch, Ticket
from .checkpoints.opening import Note
from .drafts.base import NEEDS_DRAFT_MODEL, Draft
from .drafts.learnt import EstimatesAndRecall
from .drafts.without_model import NoDraft
from .errors import ContextLengthError, OffspecError, UsageError
from .loading import LoadedTarget, LoadOptions, load, path_text
from .model.decoder import Decoder
from .model.text_caches import TextCaches
from .planning.memory import AUTO
from .planning.out_of_memory import retry_out_of_memory
from .planning.plan import Plan
from .request import Observer, Request, RequestParams, Step
from .stats import Stats
from .text.grammar import ConstraintCompiler
from .text.tokenizer import Tokenizer
from .training.online import Aligner

Message = Mapping[str, Any]  # role and content; with tools also what OpenAI's messages have
Prompt = str | Sequence[int] | Sequence[Message]


class Engine:
    """A loaded target and a draft. Estimates about the draft are kept from request to request.

    Several requests may run at once, also in several threads; their passes take turns.
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
        """draft: None is plain decoding. name: the model's name as given. index: of other texts for n-gram lookup."""
        self.loaded, self.tokenizer, self.draft = target, tokenizer, draft or NoDraft()
        self.name, self.lookup_index = name, index
        self.learnt = self._new_learnt()
        self.draft.prepare(self.max_context)
        self._constraints = ConstraintCompiler(tokenizer, target.decoder.config.vocab_size)

    @classmethod
    def load(cls, model: str | PathLike[str] = "builtin", **options: Any) -> Engine:
        """Load MODEL (a path, a hub id or a name) and its draft; layers that do not fit in memory are streamed.

        options: the fields of `offspec.loading.LoadOptions`, e.g. draft, device, dtype, context. vram, ram and
        cache_ram may also be texts like "4GiB". `notes` lists automatic choices and their reasons, `plan` shows where
        everything went.
        The engine is a context manager: `with Engine.load(...) as engine` closes it at the end.
        Raises a subclass of OffspecError if something cannot be loaded or does not match.
        """
        asked = _load_options(model, options)
        found = load(asked)
        return cls(found.target, found.tokenizer, found.draft, name=asked.model, index=found.index)

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
        """The draft's name: a model's name, `lookup`, or `self`; None if nothing drafts."""
        return self.draft.name

    @property
    def max_context(self) -> int:
        """The maximum number of tokens of prompt and answer."""
        return self.loaded.max_context

    @property
    def notes(self) -> list[Note]:
        """Automatic choices and their reasons."""
        return self.loaded.notes

    @property
    def plan(self) -> Plan | None:
        """Where everything was placed; None for a target without a plan."""
        return self.loaded.plan

    @property
    def turn(self) -> RLock:
        """The lock that a request holds while it uses the models."""
        return self.loaded.turn

    @property
    def aligner(self) -> Aligner | None:
        """Trains the draft between requests; None if the draft does not learn."""
        return self.draft.aligner

    @property
    def is_deterministic(self) -> bool:
        """Whether nothing depends on measured times, nor on earlier requests (`LoadOptions.deterministic`)."""
        return self.loaded.is_deterministic

    @property
    def is_exact(self) -> bool:
        """Whether texts in 16 bits equal plain decoding's to the bit, not only up to near-ties (`model.exactness`)."""
        return self.loaded.decoder.is_exact

    def estimates(self) -> EstimatesAndRecall:
        """The estimates about the draft for a request: those kept from request to request, or new ones."""
        return self._new_learnt() if self.is_deterministic else self.learnt

    def _new_learnt(self) -> EstimatesAndRecall:
        target = self.loaded
        return self.draft.new_learnt(target.decoder, target.predict_pass_s if target.rates else None)

    def max_texts(self, wanted: int | None = None) -> int:
        """The maximum number of texts that share passes. wanted: None is AUTO_TEXTS."""
        return 1 if self.is_deterministic else wanted or AUTO_TEXTS

    def close(self) -> None:
        """Free the memory and end the read-ahead threads. Afterwards `generate` raises UsageError."""
        self.loaded.close()
        self.draft.close()

    def with_draft(self, draft: Draft) -> Engine:
        """An engine with the same target and another draft, without estimates."""
        return Engine(self.loaded, self.tokenizer, draft, name=self.name, index=self.lookup_index)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: raw text, chat messages (through the chat template), or token ids.

        Raises UsageError for a prompt of another kind, an empty one, or an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            self.tokenizer.check_length(prompt, self.max_context)
            ids = self.tokenizer.encode(prompt)
        elif _is_chat(prompt):
            ids = self.tokenizer.encode_chat(prompt, self.max_context)
        elif _is_ids(prompt):
            ids = [index(token) for token in prompt]
        else:
            raise UsageError("a prompt must be a text, a list of token ids, or a list of messages (role, content)")
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        if bad := [token for token in ids if not 0 <= token < self.target.config.vocab_size]:
            raise UsageError(f"token id {bad[0]} is outside the model's vocabulary of {self.target.config.vocab_size}")
        return ids

    def room_after(self, num_tokens: int) -> int:
        """Tokens that the context leaves for an answer to a prompt. Raises ContextLengthError if it leaves none."""
        room = self.max_context - num_tokens
        if room < 1:
            raise ContextLengthError(self._too_long(num_tokens))
        return room

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises UsageError for a bias on a token that the vocabulary does not have."""
        vocab_size = self.target.config.vocab_size
        if bad := [token for token, _ in params.logit_bias if token >= vocab_size]:
            raise UsageError(f"logit_bias: token id {bad[0]} is outside the model's vocabulary of {vocab_size}")

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        caches: TextCaches | None = None,
        observer: Observer | None = None,
    ) -> Generator[Step, None, None]:
        """Generate text for a prompt: an iterator with one `Step` per pass.

        The text is that of plain decoding (`SpeculationParams(budget=0)`) with the same seed, for any draft: in 32 bits
        exactly, in 16 bits up to near-ties. With lossy acceptance (`SpeculationParams.accept`) it may differ;
        `Stats.is_lossy` is then true.
        Closing the iterator between steps leaves the engine ready for the next request.
        caches: from `new_caches`, kept from request to request; tokens that the prompt shares with the earlier text are
        not scored again. One request at a time may use them: UsageError while another iterator is open.
        observer: called with the tree and the verdict after every pass.
        Raises ContextLengthError or UsageError at once, TokenizerError if a constraint does not fit the tokenizer.
        Raises NumericalError, MemoryLimitError or ConstraintError while running.
        """
        text, asked = self.check_request(prompt, params, speculation, observer)
        caches = caches or self.new_caches()
        with self.turn:  # if two threads use the same caches, one gets UsageError
            caches.user.check_free()
            return caches.user.begin(Request(self, text, asked, caches).run())

    def check_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        speculation: SpeculationParams | None,
        observer: Observer | None,
    ) -> tuple[list[int], RequestParams]:
        """A prompt's token ids and its request's parameters. Raises those errors of `generate` that come at once."""
        began = time.perf_counter()
        self.loaded.check()
        params, speculation = params or SamplingParams(), speculation or SpeculationParams()
        if self.is_deterministic:
            speculation = speculation.without_timing()
        speculation.check_sampling(params)
        if speculation.is_lossy and self.draft.decoder is None:
            raise UsageError(NEEDS_DRAFT_MODEL)
        text = self.encode(prompt)
        room = self.room_after(len(text))
        self.check_sampling(params)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        params = replace(params, seed=seed, max_new_tokens=min(params.max_new_tokens, room))
        constraint = None
        if params.constraint is not None:
            constraint = self.compile_constraint(params.constraint, text, gives_forced=speculation.forced)
        return text, RequestParams(params, seed, speculation, observer, began, constraint)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | None = None,
        *,
        max_texts: int | None = None,
    ) -> Generator[tuple[int, Step], None, None]:
        """Generate texts for several prompts, which share passes: pairs of a prompt's index and its next `Step`.

        Each text is that of `generate` with the same parameters. params: for all prompts, or one for each. max_texts:
        the maximum number of texts under way (`Batch`); the others wait in order. Raises the errors of `generate`.
        """
        batch = Batch(self, max_texts)
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise UsageError(f"there are {len(prompts)} prompts and {len(each)} params; give one for all, or one each")
        pairs = zip(prompts, each, strict=True)
        indices = {batch.add(prompt, own, speculation): i for i, (prompt, own) in enumerate(pairs)}
        return _steps_of(batch, indices)

    def compile_constraint(
        self, constraint: Constraint, prompt: Sequence[int] = (), *, gives_forced: bool = True
    ) -> TokenConstraint:
        """The constraint on the tokens of one answer to a prompt. Raises the errors of `ConstraintCompiler.compile`."""
        return self._constraints.compile(constraint, prompt, gives_forced=gives_forced)

    def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, speculation: SpeculationParams | None = None
    ) -> str:
        """The whole text that `generate` yields in steps. Raises the same errors."""
        return "".join(step.text for step in self.generate(prompt, params, speculation))

    def learn(self, stats: Stats) -> None:
        """Train the draft on the target's predictions in the requests so far, if it was loaded with `learn`.

        Call this after a request, with its `stats`, which get the seconds, steps and losses. The text of later requests
        does not change. After an exception (Ctrl-C), the draft is unchanged. A conversation's caches keep the draft's
        old KV entries: they predict slightly worse, but scoring them again would cost a pass over the conversation.
        """
        if self.aligner is None or not self.aligner.is_listening:
            return
        with self.turn:
            learnt = self.aligner.learn(stats.prefill_s + stats.decode_s)
        stats.learn_s, stats.learn_steps = learnt.seconds, learnt.num_steps
        stats.learnt_loss, stats.unlearnt_loss = learnt.loss, learnt.loss_before

    def new_caches(self, num_tokens: int = 0, num_nodes: int = 0) -> TextCaches:
        """Empty KV caches of one text, to pass as `caches` to several requests.

        They have room for `num_tokens` tokens and a tree of `num_nodes` nodes at once, and grow as needed. If device
        memory runs out here, the target is loaded again with fewer resident layers.
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
        """Whether anything proposes tokens: a draft model, lookup, or an index of other texts."""
        return self.draft_name is not None or self.draft.decoder is not None or self.lookup_index is not None

    def sharpness(self, *, greedy: bool) -> float:
        """The sharpness fitted so far (see `scheduler.pace.calibration`)."""
        return self.learnt.calibration.sharpness(greedy=greedy).value

    def _too_long(self, num_tokens: int) -> str:
        planned, longest = self.max_context, self.target.config.max_context
        limit, more = "the model's context", ""
        if planned < longest:
            limit, more = "the planned context", f" or set a larger `context`, up to {longest}"
        return (
            f"the prompt has {num_tokens} tokens and {limit} is {planned}, which leaves no room for an answer; "
            f"shorten the prompt{more}"
        )


def _steps_of(batch: Batch, indices: Mapping[Ticket, int]) -> Generator[tuple[int, Step], None, None]:
    with closing(batch):
        while not batch.is_idle:
            for ticket, outcome in batch.step():
                if isinstance(outcome, OffspecError):
                    raise outcome
                yield indices[ticket], outcome


def _load_options(model: str | PathLike[str], options: Mapping[str, Any]) -> LoadOptions:
    """`LoadOptions` from keyword arguments; parses sizes. Raises UsageError for an unknown name or an invalid size."""
    known, found = [field.name for field in fields(LoadOptions) if field.name != "model"], dict(options)
    check_names("Engine.load", options, known)
    for name in ("vram", "ram", "cache_ram"):
        size = found.get(name)
        if isinstance(size, str):
            found[name] = parse_size(size)
        elif not (size is None or isinstance(size, Integral)):
            raise UsageError(f'{name} must be a number of bytes or a text like "4GiB", not {size!r}')
    if "kv_cache" in found:
        found["kv_cache"] = _cache_format(found["kv_cache"])
    return LoadOptions(path_text("model", model), **found)


def _cache_format(given: Any) -> str:
    """The name of a format of the KV cache, from a number or a text. Raises UsageError."""
    if (name := str(given)) not in (AUTO, *KV_CACHES):
        raise UsageError(f"`kv_cache` must be {AUTO}, {', '.join(KV_CACHES[:-1])} or {KV_CACHES[-1]}, not {given!r}")
    return name


def _is_chat(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    return len(prompt) > 0 and all(isinstance(part, Mapping) for part in prompt)


def _is_ids(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[int]]:
    return all(hasattr(part, "__index__") for part in prompt)  # includes numpy's integers, excludes floats
