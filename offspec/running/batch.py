"""Several requests whose texts share the target's passes; texts join and leave between passes.

A streamed pass costs the same for one text's rows as for those of eight. The KV entries that a plan reserves for one
text of the full context and its tree are shared by all texts. If they run out, the text that joined last is paused: it
is scored again later, and stays the same.

A beginning that several texts have in common is scored once, by the first of them. The others join when it is, and
share its KV entries: several answers to one prompt, and conversations with one system prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from itertools import islice
from threading import Lock

import numpy as np

from offspec.backends.device_kinds import kind_of
from offspec.scheduler.pace.shared_pass import SharedPass

from ..errors import OffspecError
from ..model.memory.request_caches import RequestCaches
from ..model.memory.sequence_cache import SequenceCache
from ..model.memory.text_pool import WORTHWHILE, Ids, TextPool, num_common
from ..planning.out_of_memory import retry_out_of_memory
from .kv_reservation import PlannedEntries
from .models import Models
from .passes import run_pass
from .sequence import Sequence
from .steps import Step
from .waiting_line import WaitingLine

Outcome = Step | OffspecError
LOOKAHEAD = 64  # waiting requests of which one may join before the others, because they wait for another's pass


class Batch:
    """Requests that share passes. `add` and `cancel` may be called from any thread, `step` from one thread at a time.

    Each text is that of `Engine.generate` alone with its seed, whatever shares its passes (up to near-ties
    where the target is not exact, as for any tree).
    """

    def __init__(
        self,
        models: Models,
        max_texts: int | None = None,
        pool: TextPool | None = None,
        on_begin: Callable[[Sequence], None] = lambda sequence: None,
        *,
        is_alone: bool = False,
    ) -> None:
        """max_texts: the maximum number of texts under way (`Models.max_texts`).

        pool: of the texts' caches; its idle caches are freed when texts need their KV entries. on_begin: called with a
        sequence that waits no more, before its first pass. is_alone: of one text, which has all KV entries at once.
        """
        self._on_begin, self._is_alone = on_begin, is_alone
        self._models, self._max_texts = models, 1 if is_alone else models.max_texts(max_texts)
        self._pool = TextPool(models.new_caches, 0) if pool is None else pool
        plan = None if is_alone else models.loaded.plan
        num_nodes = kind_of(models.device).useful_rows if plan is None else plan.tree
        self._shared = SharedPass(models.stats.costs, num_nodes, models.stats.overlap_switch)
        self._planned = None if plan is None else PlannedEntries.by(plan)
        self._waiting = WaitingLine[Sequence]()
        self._running, self._paused = list[Sequence](), list[Sequence]()  # paused: the next one to resume is the last
        self._lock = Lock()  # guards the waiting sequences

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is under way."""
        with self._lock:
            return not (self._waiting or self._running or self._paused)

    @property
    def num_running(self) -> int:
        """Texts under way."""
        return len(self._running)

    def add(self, sequence: Sequence, client: str = "") -> Sequence:
        """Queue a request. client: whose it is; clients take turns, each one's requests join in order."""
        sequence.client = client
        with self._lock:
            self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> bool:
        """End a request before the next pass. Returns whether it still waited, and so has ended at once."""
        with self._lock:
            if self._waiting.discard(sequence):
                return True
        sequence.is_cancelled = True
        return False

    def step(self) -> list[tuple[Sequence, Outcome]]:
        """One pass over the texts under way, after waiting ones have joined; returns what each request got.

        An error ends its request; an error of the whole pass ends all that are under way.
        """
        with self._models.turn:
            ended = self._join()
        if not self._running:
            return ended
        try:
            with self._models.turn:
                self._models.loaded.check()
                retry_out_of_memory(self._reserve_entries, self._begin_again)
                # Without the texts whose constraints took long, until the others had as much time.
                running = [sequence for sequence in self._running if sequence.owed_s <= 0] or list(self._running)
                began = time.perf_counter()
                verdicts = run_pass(running, self._shared, self._begin_again)
        except OffspecError as exc:
            ended += [(sequence, exc) for sequence in self._running]
            for sequence in list(self._running):
                self._leave(sequence)
            return ended
        pass_s = time.perf_counter() - began
        for sequence in self._running:  # what they owe to the other texts, and what has been paid back
            if sequence not in running:
                sequence.owed_s -= pass_s
                continue
            total_s = sequence.constraint_s
            sequence.owed_s, sequence.counted_s = max(0.0, total_s - sequence.counted_s), total_s
        for sequence, verdict in zip(running, verdicts, strict=True):
            if verdict is None:
                continue
            outcome = verdict if isinstance(verdict, OffspecError) else sequence.step(verdict)
            ended.append((sequence, outcome))
            if isinstance(outcome, OffspecError) or outcome.finish_reason:
                self._leave(sequence)
        return ended

    def steps(self) -> Generator[tuple[Sequence, Step], None, None]:
        """All texts' steps, in the order in which they come. Raises the first error; closing it ends all requests."""
        with closing(self):
            while not self.is_idle:
                for sequence, outcome in self.step():
                    if isinstance(outcome, OffspecError):
                        raise outcome
                    yield sequence, outcome

    def pause_last(self) -> None:
        """Free the KV entries of the text that joined last; it resumes before others join. For `step`'s thread."""
        if self._running:
            last = self._running.pop()
            last.pause()
            self._paused.append(last)

    def close(self) -> None:
        """End all requests."""
        with self._lock:
            self._waiting.clear()
        for sequence in [*self._running, *self._paused]:
            self._leave(sequence)

    # ---------------------------------------------------------------------------------------- joining and leaving

    def _join(self) -> list[tuple[Sequence, Outcome]]:
        """Drop cancelled requests, and let paused and waiting ones join. Returns those that could not."""
        for cancelled in [sequence for sequence in (*self._running, *self._paused) if sequence.is_cancelled]:
            self._leave(cancelled)
        failed = list[tuple[Sequence, Outcome]]()
        while (sequence := self._next()) is not None:
            try:
                self._begin(sequence)
            except BaseException as exc:
                self._end(sequence)
                if not isinstance(exc, OffspecError):
                    raise
                failed.append((sequence, exc))
            else:
                self._running.append(sequence)
        return failed

    def _next(self) -> Sequence | None:
        """The next request, if there are KV entries for it: a paused one, or one that waits for no other's pass."""
        if len(self._running) >= self._max_texts:
            return None
        if self._paused:
            last = self._paused[-1]
            needed = last.kv.needed(last.kv.granted, self._num_nodes_of_next)
            num_shared = self._pool.num_shareable(np.asarray(last.text[:-1], dtype=np.int64))
            can_begin = not self._running or self._can_reserve(needed, num_shared=num_shared)
            return self._paused.pop() if can_begin else None
        unscored = list[tuple[Ids, int]]()  # texts whose prompts are being scored, and how many of their tokens are
        if self._waiting and self._pool.can_copy:
            unscored = [(np.asarray(each.text), each.target.length) for each in self._running if each.num_unscored > 1]
        with self._lock:
            looked_at = islice(self._waiting, LOOKAHEAD)
            sequence = next((sequence for sequence in looked_at if not self._waits_for(sequence, unscored)), None)
            if sequence is None or (self._running and not self._has_entries_for(sequence)):
                return None
            self._waiting.take(sequence)
            return sequence

    @property
    def _num_nodes_of_next(self) -> int:
        """Nodes of a text in a pass with one more text."""
        return self._shared.limit_of(len(self._running) + 1)

    def _has_entries_for(self, sequence: Sequence) -> bool:
        """Whether the plan has KV entries for a request beside those under way. Caches that are idle leave for it."""
        if self._planned is None:
            return True
        needed = len(sequence.prompt) + self._num_nodes_of_next + self._models.draft.num_shared
        num_shared = self._pool.num_shareable(sequence.ids)
        if not self._models.draft.keeps_target_whole:  # idle caches that it takes over keep their size
            needed = max(needed, self._pool.num_idle_entries + num_shared)
        return self._planned.holds(self._used_caches, needed, num_shared=num_shared)

    def _waits_for(self, sequence: Sequence, unscored: list[tuple[Ids, int]]) -> bool:
        """Whether to wait until one of these texts has scored a beginning, so that its KV entries can be copied.

        The whole prompt is not scored twice; a part of it is if that takes less time than waiting for a pass.
        """
        for text, num_scored in unscored:
            number = num_common(text, sequence.ids)
            is_whole = number == len(sequence.ids) and number >= WORTHWHILE
            if number > num_scored and (is_whole or self._shared.is_worth_a_pass(number - num_scored)):
                return True
        return False

    def _begin(self, sequence: Sequence) -> None:
        self._models.loaded.check()
        if sequence.caches is not None:  # it was paused
            retry_out_of_memory(partial(self._pool.refill, sequence.caches), self._begin_again)
            sequence.resume()
            return
        self._on_begin(sequence)
        borrow = partial(self._pool.borrow, sequence.prompt)
        caches = retry_out_of_memory(borrow, self._begin_again)
        if self._models.loaded.is_deterministic and not self._is_alone:
            caches.rewind([])  # entries of other texts come from passes of other widths
        sequence.begin(caches, self._shared, is_alone=self._is_alone)

    def _leave(self, sequence: Sequence) -> None:
        (self._running if sequence in self._running else self._paused).remove(sequence)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """The request is over, or could not begin."""
        if sequence.caches is not None:
            self._pool.give_back(sequence.caches)
            sequence.end()

    def _begin_again(self, message: str) -> None:
        """After a pass ran out of device memory: free all KV entries, load the target again, and start again."""

        def free() -> None:
            for sequence in self._running:
                sequence.pause()

        self._models.loaded.make_room(message, free)
        for sequence in self._running:
            sequence.resume()

    # ---------------------------------------------------------------------------------------- KV entries

    @property
    def _used_caches(self) -> list[SequenceCache]:
        return [sequence.target.cache for sequence in self._running]

    def _can_reserve(self, wanted: int, *, now: int = 0, num_shared: int = 0) -> bool:
        """`PlannedEntries.holds` beside the running texts, if necessary without idle caches."""
        if self._planned is None:
            return True
        if not self._planned.holds(self._pool.targets, wanted, now=now, num_shared=num_shared):
            self._pool.park_idle()
        return self._planned.holds(self._used_caches, wanted, now=now, num_shared=num_shared)

    def _reserve_entries(self) -> None:
        """Give every text the KV entries that it needs for the next pass; pause those that joined last if necessary."""
        limit = self._shared.most_per_text = self._shared.limit_of(len(self._running))
        for sequence in list(self._running):
            while sequence in self._running and not self._has_grown(sequence, limit):
                self.pause_last()

    def _has_grown(self, sequence: Sequence, num_nodes: int) -> bool:
        """Reserve KV entries for the text and `num_nodes` nodes, and for some tokens more if the plan has them."""
        kv = sequence.kv
        if kv.needed(len(sequence.text), num_nodes) <= kv.num_entries:
            kv.reserve(kv.num_entries)
            return True
        for num_tokens in (kv.granted, len(sequence.text)):
            needed = kv.needed(num_tokens, num_nodes)
            if self._can_reserve(needed, now=kv.num_entries) or len(self._running) == 1:
                kv.reserve(needed)
                return True
        return False


def steps_alone(sequence: Sequence, caches: RequestCaches) -> Generator[Step, None, None]:
    """The steps of a text in passes of its own, with these caches. Raises UsageError while they are in use."""
    batch = Batch(sequence.models, pool=TextPool(lambda: caches, 0), is_alone=True)
    batch.add(sequence)
    with sequence.models.turn:  # if two threads use the same caches, one gets UsageError
        caches.user.check_free()
        return caches.user.begin(step for _, step in batch.steps())
