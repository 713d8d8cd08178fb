"""The engine: a target, a draft, and the estimates about it; generates text for one or several requests at a time.

It does not depend on the terminal, on file formats, or on how trees are drafted.
"""

from __future__ import annotations

import secrets
import time
from collections import abc
from collections.abc import Generator
from dataclasses import replace
from functools import cached_property
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING

from offspec.backends.device_kinds import kind_of
from offspec.scheduler.guessing.retrieval import SuffixIndex
from offspec.scheduler.params import Constraint, SamplingParams, SpeculationParams, tree_room
from offspec.scheduler.trees.constraint import TokenConstraint

from .drafts.base import NEEDS_DRAFT_MODEL, Draft, Learner
from .drafts.draft_stats import DraftStats
from .drafts.without_model import NoDraft
from .errors import UsageError
from .load_options import AnyPath, LoadOptions, LoadSettings
from .loaded_target import LoadedTarget
from .model.decoder import Decoder
from .model.exactness import reason_of
from .model.memory.request_caches import RequestCaches
from .notes import Note
from .planning.plan import Plan
from .running.batch import Batch, steps_alone
from .running.models import Models
from .running.sequence import Observer, Sequence
from .running.several_answers import params_of_each
from .running.steps import Step
from .stats import Stats
from .text.context_limit import ContextLimit
from .text.prompt import Prompt, encode_prompt
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .text.grammar import ConstraintCompiler


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
        self.models = Models(target, tokenizer, draft or NoDraft(), index)
        self.loaded, self.tokenizer, self.draft = target, tokenizer, self.models.draft
        self.name = name

    @cached_property
    def constraints(self) -> ConstraintCompiler:
        """What compiles constraints on this tokenizer's tokens."""
        from .text.grammar import ConstraintCompiler  # imported here, because few engines need it

        return ConstraintCompiler(self.tokenizer, self.target.config.vocab_size)

    @classmethod
    def load(cls, model: AnyPath | LoadOptions = "builtin", **options: Unpack[LoadSettings]) -> Engine:
        """Load MODEL (a path, a hub id or a name) and its draft; layers that do not fit in memory are streamed.

        options: what `LoadOptions` describes, e.g. draft, device, dtype, context. A LoadOptions in place of MODEL has
        all of them. `notes` lists automatic choices and their reasons, `plan` shows where everything went.
        The engine is a context manager: `with Engine.load(...) as engine` closes it at the end.
        Raises a subclass of OffspecError if something cannot be loaded or does not match.
        """
        from .loading import load  # an engine that exists does not need it

        if isinstance(model, LoadOptions):
            if options:
                raise UsageError("LoadOptions has all options; give it alone, or a model with options")
            chosen = model
        else:
            chosen = LoadOptions.of(model, **options)
        parts = load(chosen)
        return cls(parts.target, parts.tokenizer, parts.draft, name=chosen.model, index=parts.index)

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
    def context_limit(self) -> ContextLimit:
        """`max_context` beside the model's own limit."""
        return ContextLimit(self.max_context, self.target.config.max_context)

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
    def aligner(self) -> Learner | None:
        """Trains the draft between requests; None if the draft does not learn."""
        return self.draft.aligner

    @property
    def is_deterministic(self) -> bool:
        """Whether nothing depends on measured times, nor on earlier requests (`LoadOptions.deterministic`)."""
        return self.loaded.is_deterministic

    @property
    def recommended_sampling(self) -> SamplingParams:
        """The sampling that the model's authors recommend, and our usual one where they recommend none."""
        return self.loaded.recommended_sampling

    @property
    def is_exact(self) -> bool:
        """Whether texts equal plain decoding's for any draft, not only up to near-ties (`model.exactness`)."""
        return self.target.is_exact

    @property
    def inexact_reason(self) -> str | None:
        """Why texts equal plain decoding's up to near-ties only; None if `is_exact`."""
        return reason_of(self.target)

    @property
    def draft_stats(self) -> DraftStats:
        """The estimates about the draft that are kept from request to request."""
        return self.models.stats

    @property
    def lookup_index(self) -> SuffixIndex | None:
        """Of other texts, for n-gram lookup."""
        return self.models.index

    def close(self) -> None:
        """Free the memory and end the read-ahead threads. Afterwards `generate` raises UsageError."""
        self.models.keep_costs()
        self.loaded.close()
        self.draft.close()

    def with_draft(self, draft: Draft) -> Engine:
        """An engine with the same target and another draft, without estimates."""
        return Engine(self.loaded, self.tokenizer, draft, name=self.name, index=self.lookup_index)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: raw text, chat messages (through the chat template), or token ids.

        Raises UsageError for a prompt of another kind, an empty one, or an id outside the vocabulary.
        """
        ids = encode_prompt(self.tokenizer, prompt, self.context_limit)
        if bad := [token for token in ids if not 0 <= token < self.target.config.vocab_size]:
            raise UsageError(f"token id {bad[0]} is outside the model's vocabulary of {self.target.config.vocab_size}")
        return ids

    def room_after(self, num_tokens: int) -> int:
        """Tokens that the context leaves for an answer to a prompt. Raises ContextLengthError if it leaves none."""
        return self.context_limit.room_after(num_tokens)

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises UsageError for a bias on a token that the vocabulary does not have, and a constraint too long."""
        if params.constraint is not None:
            from .text.grammar_library import check_size

            check_size(params.constraint)
        vocab_size = self.target.config.vocab_size
        if bad := [token for token, _ in params.logit_bias if token >= vocab_size]:
            raise UsageError(f"logit_bias: token id {bad[0]} is outside the model's vocabulary of {vocab_size}")

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        caches: RequestCaches | None = None,
        observer: Observer | None = None,
    ) -> Generator[Step, None, None]:
        """Generate text for a prompt: an iterator with one `Step` per pass.

        The text is that of plain decoding (`SpeculationParams(budget=0)`) with the same seed, for any draft: exactly if
        `is_exact`, otherwise up to near-ties. With lossy acceptance (`SpeculationParams.accept`) it may differ;
        `Stats.is_lossy` is then true.
        Closing the iterator between steps leaves the engine ready for the next request.
        caches: from `new_caches`, kept from request to request; tokens that the prompt shares with the earlier text are
        not scored again. One request at a time may use them: UsageError while another iterator is open.
        observer: called with the tree and the verdict after every pass.
        Raises ContextLengthError or UsageError at once, TokenizerError if a constraint does not fit the tokenizer.
        Raises NumericalError, MemoryLimitError or ConstraintError while running.
        """
        sequence = self.check_request(prompt, params, speculation, observer)
        return steps_alone(sequence, caches or self.new_caches())

    def check_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        observer: Observer | None = None,
    ) -> Sequence:
        """A request that can run, for `Batch.add`. Raises those errors of `generate` that come at once."""
        began = time.perf_counter()
        self.loaded.check()
        params, speculation = params or SamplingParams(), speculation or SpeculationParams()
        if self.is_deterministic:
            speculation = speculation.without_timing()
        speculation.check_sampling(params)
        if speculation.is_lossy and self.draft.decoder is None:
            raise UsageError(NEEDS_DRAFT_MODEL)
        num_nodes, most = tree_room(speculation, kind_of(self.target.device).useful_rows), self.target.most_nodes
        if most is not None and num_nodes > most:
            raise UsageError(f"a tree of {num_nodes} nodes is too large for this model's windows; set at most {most}")
        text = self.encode(prompt)
        room = self.room_after(len(text))
        self.check_sampling(params)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        params = replace(params, seed=seed, max_new_tokens=min(params.max_new_tokens, room))
        constraint = None
        if params.constraint is not None:
            constraint = self.compile_constraint(params.constraint, text, gives_forced=speculation.forced)
        return Sequence(self.models, text, params, seed, speculation, observer, began, constraint)

    def generate_many(
        self,
        prompts: abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | None = None,
        *,
        max_texts: int | None = None,
    ) -> Generator[tuple[int, Step], None, None]:
        """Generate texts for several prompts, which share passes: pairs of a prompt's index and its next `Step`.

        Each text is that of `generate` with the same parameters. params: for all prompts, or one for each. max_texts:
        the maximum number of texts under way (`Models.max_texts`); the others wait. Raises the errors of `generate`.
        """
        batch = Batch(self.models, max_texts)
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise UsageError(f"there are {len(prompts)} prompts and {len(each)} params; give one for all, or one each")
        pairs = zip(prompts, each, strict=True)
        indices = {batch.add(self.check_request(*pair, speculation)): i for i, pair in enumerate(pairs)}
        return ((indices[sequence], step) for sequence, step in batch.steps())

    def generate_answers(
        self,
        prompt: Prompt,
        num_answers: int,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        max_texts: int | None = None,
    ) -> Generator[tuple[int, Step], None, None]:
        """Generate several answers to one prompt, which is scored once: pairs of an answer's index and its next `Step`.

        Answer i is that of `generate` with seed params.seed + i; without a seed, a random one. The first one alone has
        `prompt_logprobs`. max_texts and errors: those of `generate_many`.
        """
        params = params or SamplingParams()
        checked = self.check_request(prompt, params, speculation)
        each = params_of_each(params, checked.seed, num_answers)
        return self.generate_many([checked.prompt] * num_answers, each, speculation, max_texts=max_texts)

    def compile_constraint(
        self, constraint: Constraint, prompt: abc.Sequence[int] = (), *, gives_forced: bool = True
    ) -> TokenConstraint:
        """The constraint on the tokens of one answer to a prompt. Raises the errors of `ConstraintCompiler.compile`."""
        return self.constraints.compile(constraint, prompt, gives_forced=gives_forced)

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

    def new_caches(self, num_tokens: int = 0, num_nodes: int = 0) -> RequestCaches:
        """Empty KV caches of one text, to pass as `caches` to several requests.

        They have room for `num_tokens` tokens and a tree of `num_nodes` nodes at once, and grow as needed. If device
        memory runs out here, the target is loaded again with fewer resident layers.
        """
        return self.models.new_caches(num_tokens, num_nodes)

    @property
    def guesses(self) -> bool:
        """Whether anything proposes tokens: a draft model, lookup, or an index of other texts."""
        return self.draft_name is not None or self.draft.decoder is not None or self.lookup_index is not None

    def sharpness(self, *, greedy: bool) -> float:
        """The sharpness fitted so far (see `scheduler.pace.calibration`)."""
        return self.draft_stats.calibration.sharpness(greedy=greedy).value
