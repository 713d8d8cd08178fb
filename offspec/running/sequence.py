"""One text of a request, from a prompt to its answer, and its part in a pass (`passes.run_pass`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from offspec.backends.device_kinds import kind_of
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.drafting.drafter import Drafting, NoDrafter
from offspec.scheduler.drafting.forced import prepare_masks
from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.constraint import TokenConstraint
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict

from ..drafts.base import DraftTask
from ..errors import ConstraintError, NumericalError, OffspecError
from ..model.exactness import reason_of
from ..model.memory.request_caches import RequestCaches
from ..model.memory.text_pool import Ids
from ..model.pass_rows import TextRows
from ..model.row_logits import RowLogits
from ..notes import Note
from ..planning.out_of_memory import out_of_memory_message, retry_out_of_memory
from ..stats import Stats
from .kv_reservation import KVReservation
from .logprob_report import LogprobReport
from .models import Models
from .pass_counter import PassCounter
from .steps import Step, StepMaker

T = TypeVar("T")
TEXT_ERRORS = (NumericalError, ConstraintError)  # end their text; other errors of a pass end all texts in it
Observer = Callable[[TokenTree, Verdict], None]


@dataclass(eq=False, repr=False)
class Sequence:
    """One text of a request, from its check (`Engine.check_request`) until its answer ends.

    It waits in a batch, runs from `begin` to `end`, and may be paused meanwhile. Once it runs, one thread writes it.

    prompt: its token ids, which fit the context together with `sampling.max_new_tokens`. seed: the sampling seed.
    began: the start time, by `perf_counter`. constraint: of the answer, compiled. ends: tokens that end the answer
    beside EOS. continues: whether the answer continues the prompt's last text, inside a message. client: whose request
    it is.

    caches: while it runs or is paused; they hold all of `text`, the prompt and all emitted tokens, but the last one.
    chain, tree: the rows of the next pass. is_prefilling: the pass scores a part of a prompt, and has no tree. fault:
    of a constraint while drafting, which ends the text.
    """

    models: Models
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    speculation: SpeculationParams
    observer: Observer | None = None
    began: float = 0.0
    constraint: TokenConstraint | None = None
    ends: frozenset[int] = frozenset()
    continues: bool = False
    client: str = ""
    is_cancelled: bool = False
    counted_s: float = 0.0  # of its constraint's seconds, those that others' passes have been made up for
    owed_s: float = 0.0  # seconds of passes that go to the other texts first, because its constraint took as many
    caches: RequestCaches | None = None

    @cached_property
    def ids(self) -> Ids:
        """The prompt without its last token, which is always scored."""
        return np.asarray(self.prompt[:-1], dtype=np.int64)

    @property
    def constraint_s(self) -> float:
        """Seconds of CPU time that slow steps of the constraint have taken so far."""
        slow = getattr(self.constraint, "slow", None)
        return 0.0 if slow is None else float(slow.seconds)

    # ---------------------------------------------------------------------------------------- the text and its caches

    def begin(self, caches: RequestCaches, shared: SharedPass, *, is_alone: bool) -> None:
        """Run with these caches. shared: its passes, with other texts or not. is_alone: it never shares any."""
        sampling, prompt, models, target = self.sampling, self.prompt, self.models, self.models.target
        self.caches, self._shared = caches, shared
        self.sampler = Sampler(sampling, self.seed, target.config.vocab_size, target.device, to_device)
        self.sampler.extend(prompt, is_prompt=True)
        self.sampler.constrain(self.constraint)
        self._estimates = models.estimates()
        longest = len(prompt) + sampling.max_new_tokens
        self.kv = KVReservation(models, caches, self.speculation, longest, is_alone=is_alone)
        self.stats = Stats(num_prompt_tokens=len(prompt), seed=self.seed)
        self._counter = PassCounter(models.loaded, self.stats, self.began, self._estimates.costs.target)
        self._logprobs = LogprobReport(sampling, len(prompt))
        self._steps = StepMaker(models, sampling, self.ends, prompt if self.continues else ())
        self.fault: OffspecError | None = None
        self.stats.num_prefilled_tokens = retry_out_of_memory(lambda: self._begin(caches, prompt), self._make_room)
        self.stats.is_lossy = self.drafter.is_lossy
        self.stats.inexact_reason = reason_of(target)
        self._listen = models.draft.new_listener()

    def _begin(self, caches: RequestCaches, text: list[int]) -> int:
        """Prepare the caches and a drafter for `text`. Returns how many of its tokens the target must score."""
        models = self.models
        if self._logprobs.lacks_prompt:
            self._logprobs.of_prompt.clear()
            caches.rewind([])  # the pass has to score all rows
        num_prefilled = caches.rewind(text)
        self.text, self.target = caches.text, caches.target  # the same list as the caches'
        self.kv.begin()
        task = DraftTask(
            self.sampler,
            self._steps.final,
            num_prefilled,
            most_rows=self.kv.draft_rows,
            shared=self._shared,
            text=caches.draft,
            target=models.target,
            speculation=self.speculation,
            index=models.index,
            prompt=text,
        )
        self.drafter = models.draft.drafter(task, self._estimates)
        return num_prefilled

    def end(self) -> None:
        """Run no more: drop what has memory of the device."""
        self.caches = None
        for name in ("text", "target", "kv", "sampler", "drafter", "tree", "_estimates", "_listen", "_shared"):
            self.__dict__.pop(name, None)

    @property
    def num_unscored(self) -> int:
        """Tokens of the text that the target has not scored yet: the last one, and those of a prompt."""
        return len(self.text) - self.target.length

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return len(self.chain) + len(self.tree)

    def pause(self) -> None:
        """Free the target's KV entries. `resume` must come before the next pass."""
        self.target.drop()

    def resume(self) -> None:
        """Start again from the same text, whose dropped entries the next pass computes again."""
        caches = self.caches
        assert caches is not None, "the text is not under way"
        retry_out_of_memory(lambda: self._begin(caches, self.text), self._make_room)

    def _make_room(self, message: str) -> None:
        """After device memory ran out, drop the text's KV cache and reload the target. message: torch's error."""
        self.models.loaded.make_room(message, self.pause)

    # ---------------------------------------------------------------------------------------- before a pass

    def draft(self, num_chain: int) -> Drafting[FloatArray | None]:
        """Draft for a pass that scores `num_chain` of the unscored tokens.

        The result is the probabilities of candidates that compete with other texts' for the pass, descending; None if
        the size of the tree does not depend on them.
        """
        text, num_scored = self.text, self.target.length
        self.chain, self.tree = text[num_scored : num_scored + num_chain], TokenTree.empty()
        self.is_prefilling = num_scored + num_chain < len(text)
        if self.is_prefilling:
            return None
        max_depth = self.sampling.max_new_tokens - self.stats.num_tokens - 1
        return (yield from self._catching(self.drafter.prepare(text, max_depth)))

    def send(self, num_nodes: int | None) -> TextRows:
        """The rows of the pass. num_nodes: of the candidates; None: as many as the drafter wants."""
        if not self.is_prefilling and self.fault is None:
            self.tree = self.drafter.send(num_nodes)
        return TextRows(self.chain, self.tree.tokens, self.tree.depths, self.tree.parents)

    # ---------------------------------------------------------------------------------------- during a pass

    @property
    def prepares_masks(self) -> bool:
        """Whether to compute a constraint's masks during the pass: on a GPU, or while layers are read."""
        has_time = kind_of(self.models.device).has_own_memory or self._counter.bytes_streamed > 0
        if self.constraint is None or not has_time or self.is_prefilling:
            return False
        return not self.constraint.is_idle(self.tree.tokens)

    def prepare_masks(self, is_over: Callable[[], bool]) -> None:
        """Compute the masks that the walk may need, until `is_over`."""
        assert self.constraint is not None
        try:
            prepare_masks(self.constraint, self.tree, is_over)
        except TEXT_ERRORS as exc:
            self.fault = exc

    def extending(self, is_over: Callable[[], bool]) -> Drafting[None]:
        """Draft during the pass until `is_over`, in rounds that texts share."""
        yield from self._catching(self.drafter.extending(is_over))

    # ---------------------------------------------------------------------------------------- after a pass

    def verdict(self, rows: RowLogits) -> Verdict | OffspecError | None:
        """The verdict on the tree; None after a part of a prompt."""
        if self.fault is not None:
            return self.fault
        try:
            verdict = None
            if not self.is_prefilling:
                verdict = self.drafter.verify(self.tree, rows, self.sampler, len(self.text))
            self._logprobs.take(rows, verdict, self.text, self.target.length, len(self.chain))
        except TEXT_ERRORS as exc:
            return exc
        return verdict

    def commit(self, verdict: Verdict, rows: RowLogits) -> str:
        """Keep what the verdict accepted, tell the drafter, and extend the text.

        Returns torch's message if device memory ran out; the text is then complete, the caches are not.
        """
        message = ""
        try:
            self.target.keep(verdict.path)
            done = TargetPass(self.text, self.tree, verdict, rows, rows)
            self.drafter.observe(done)
            self._listen(done)
        except RuntimeError as exc:
            if (lack_of_memory := out_of_memory_message(exc)) is None:
                raise
            message = lack_of_memory
        self.text += verdict.tokens
        self.sampler.extend(verdict.tokens)
        return message

    def count(self, draft_s: float, target_s: float, total_s: float) -> None:
        """Record a pass: seconds of drafting, of the pass with its verdicts, and of everything."""
        self._counter.count(draft_s, target_s, total_s)
        if not self.is_prefilling:
            self._counter.count_tree(len(self.tree), self.drafter)

    def observe(self, verdict: Verdict) -> None:
        """Call the request's observer, if it has one."""
        if self.observer is not None:
            self.observer(self.tree, verdict)

    def step(self, verdict: Verdict) -> Step:
        """The step of a verdict, after `commit`: its tokens up to the end of the answer."""
        return self._steps.step(verdict, self.text, self.stats, self._logprobs)

    # ---------------------------------------------------------------------------------------- errors

    def _catching(self, drafting: Drafting[T]) -> Drafting[T | None]:
        """`drafting`, whose errors do not end other texts' drafting.

        A constraint's becomes this text's `fault`. After a draft's, the rest is decoded plainly: it changes no text.
        """
        try:
            return (yield from drafting)
        except ConstraintError as exc:
            self.fault = exc
        except NumericalError as exc:
            self.drafter = NoDrafter()
            self.stats.draft_fault = str(exc)
            text = f"a text was decoded without the draft from some pass on, which changes no text ({exc})"
            self.models.loaded.note_once(Note(text, advice=True))
        return None
