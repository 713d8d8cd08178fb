"""One request, from a prompt to its text, and its part in a pass (`passes.run_pass`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from offspec.backends.device_kinds import kind_of
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.drafting.drafter import Drafter, Drafting, NoDrafter
from offspec.scheduler.drafting.forced import prepare_masks
from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict

from ..checkpoints.opening import Note
from ..drafts.base import DraftTask
from ..errors import ConstraintError, NumericalError, OffspecError
from ..model.exactness import reason_of
from ..model.memory.request_caches import RequestCaches
from ..model.pass_rows import TextRows
from ..model.row_logits import RowLogits
from ..planning.out_of_memory import out_of_memory_message, retry_out_of_memory
from .checked_request import CheckedRequest
from .kv_reservation import KVReservation
from .logprob_report import LogprobReport
from .models import Models
from .pass_counter import PassCounter
from .steps import Step, StepMaker

T = TypeVar("T")
TEXT_ERRORS = (NumericalError, ConstraintError)  # end their text; other errors of a pass end all texts in it


class Request:
    """A running request. `text` is the prompt and all emitted tokens; the caches hold all of it but the last token.

    chain, tree: the rows of the next pass. is_prefilling: the pass scores a part of a prompt, and has no tree. fault:
    of a constraint while drafting, which ends the text.
    """

    def __init__(
        self, models: Models, checked: CheckedRequest, caches: RequestCaches, shared: SharedPass | None = None
    ) -> None:
        """shared: the passes that it shares with other requests. None: its own, and it reserves all its KV entries."""
        sampling, prompt, target = checked.sampling, checked.prompt, models.target
        self.models, self.checked = models, checked
        self._caches, self._shared = caches, shared
        self.sampler = Sampler(sampling, checked.seed, target.config.vocab_size, target.device, to_device)
        self.sampler.extend(prompt, is_prompt=True)
        self.sampler.constrain(checked.constraint)
        self.draft_stats = models.estimates()
        longest = len(prompt) + sampling.max_new_tokens
        self.kv = KVReservation(models, caches, checked.speculation, longest, is_shared=shared is not None)
        self._counter = PassCounter(models.loaded, checked, self.draft_stats.costs.target)
        self.stats = self._counter.stats
        self.drafter: Drafter = NoDrafter()
        self.chain, self.tree = list[int](), TokenTree.empty()
        self.is_prefilling = False
        self.fault: OffspecError | None = None
        self._logprobs, self._steps = LogprobReport(sampling, len(prompt)), StepMaker(models, checked)
        with models.turn:
            self.stats.num_prefilled_tokens = retry_out_of_memory(lambda: self._begin(prompt), self._make_room)
        self.stats.is_lossy = self.drafter.is_lossy
        self.stats.inexact_reason = reason_of(target)
        self._listen = models.draft.new_listener()

    # ---------------------------------------------------------------------------------------- the text and its caches

    def _begin(self, text: list[int]) -> int:
        """Prepare the caches and a drafter for `text`. Returns how many of its tokens the target must score."""
        caches, models, is_shared = self._caches, self.models, self._shared is not None
        if self._logprobs.lacks_prompt:
            self._logprobs.of_prompt.clear()
            caches.rewind([])  # the pass has to score all rows
        if models.loaded.is_deterministic and is_shared:
            caches.rewind([])  # entries of other texts come from passes of other widths
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
            speculation=self.checked.speculation,
            index=models.index,
            prompt=text,
        )
        self.drafter = models.draft.drafter(task, self.draft_stats)
        return num_prefilled

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
        self._caches.target.drop()

    def resume(self) -> None:
        """Start again from the same text, whose dropped entries the next pass computes again."""
        retry_out_of_memory(lambda: self._begin(self.text), self._make_room)

    def begin_again(self, message: str) -> None:
        """After a pass ran out of device memory, free some and start again from the same text."""
        self._make_room(message)
        self.resume()

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
        max_depth = self.checked.sampling.max_new_tokens - self.stats.num_tokens - 1
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
        constraint = self.checked.constraint
        has_time = kind_of(self.models.device).has_own_memory or self._counter.bytes_streamed > 0
        if constraint is None or not has_time or self.is_prefilling:
            return False
        return not constraint.is_idle(self.tree.tokens)

    def prepare_masks(self, is_over: Callable[[], bool]) -> None:
        """Compute the masks that the walk may need, until `is_over`."""
        assert self.checked.constraint is not None
        try:
            prepare_masks(self.checked.constraint, self.tree, is_over)
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
                verdict = self.drafter.walk(self.tree, rows, self.sampler, len(self.text))
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
        if self.checked.observer is not None:
            self.checked.observer(self.tree, verdict)

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
