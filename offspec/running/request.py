"""One request, from a prompt to its text, and its part in a pass (`passes.run_pass`)."""

from __future__ import annotations

from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.drafting.drafter import Drafting
from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray
from offspec.scheduler.trees.verify import TargetPass, Verdict

from ..drafts.base import DraftTask
from ..errors import OffspecError
from ..model.exactness import reason_of
from ..model.memory.request_caches import RequestCaches
from ..model.row_logits import RowLogits
from ..planning.out_of_memory import out_of_memory_message, retry_out_of_memory
from .checked_request import CheckedRequest
from .kv_reservation import KVReservation
from .logprob_report import LogprobReport
from .models import Models
from .pass_counter import PassCounter
from .steps import Step, StepMaker
from .text_drafting import TEXT_ERRORS, TextDrafting


class Request:
    """A running request. `text` is the prompt and all emitted tokens; the caches hold all of it but the last token."""

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
        self.drafting = TextDrafting(models, self._counter, checked.constraint)
        self._logprobs, self._steps = LogprobReport(sampling, len(prompt)), StepMaker(models, checked)
        with models.turn:
            self.stats.num_prefilled_tokens = retry_out_of_memory(lambda: self._begin(prompt), self._make_room)
        self.stats.is_lossy = self.drafting.drafter.is_lossy
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
        self.drafting.drafter = models.draft.drafter(task, self.draft_stats)
        return num_prefilled

    @property
    def num_unscored(self) -> int:
        """Tokens of the text that the target has not scored yet: the last one, and those of a prompt."""
        return len(self.text) - self.target.length

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

    # ---------------------------------------------------------------------------------------- passes

    def draft(self, num_chain: int) -> Drafting[FloatArray | None]:
        """`TextDrafting.draft` for a pass that scores `num_chain` of the unscored tokens."""
        max_depth = self.checked.sampling.max_new_tokens - self.stats.num_tokens - 1
        return self.drafting.draft(self.text, self.target.length, num_chain, max_depth)

    def verdict(self, rows: RowLogits) -> Verdict | OffspecError | None:
        """The verdict on the tree; None after a part of a prompt."""
        drafting = self.drafting
        if drafting.fault is not None:
            return drafting.fault
        try:
            verdict = None
            if not drafting.is_prefilling:
                verdict = drafting.drafter.walk(drafting.tree, rows, self.sampler, len(self.text))
            self._logprobs.take(rows, verdict, self.text, self.target.length, len(drafting.chain))
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
            done = TargetPass(self.text, self.drafting.tree, verdict, rows, rows)
            self.drafting.drafter.observe(done)
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
        if not self.drafting.is_prefilling:
            self._counter.count_tree(len(self.drafting.tree), self.drafting.drafter)

    def observe(self, verdict: Verdict) -> None:
        """Call the request's observer, if it has one."""
        if self.checked.observer is not None:
            self.checked.observer(self.drafting.tree, verdict)

    def step(self, verdict: Verdict) -> Step:
        """The step of a verdict, after `commit`: its tokens up to the end of the answer."""
        return self._steps.step(verdict, self.text, self.stats, self._logprobs)
