"""Several requests whose texts share the target's passes; texts join and leave between passes.

A streamed pass costs the same for one text's rows as for those of eight. The KV entries that a plan reserves for one
text of the full context and its tree are shared by all texts. If they run out, the text that joined last is paused: it
is scored again later, and stays the same.

A beginning that several texts have in common is scored once, by the first of them. The others join when it is, and
share its KV entries: several answers to one prompt, and conversations with one system prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
from .checked_request import CheckedRequest
from .kv_reservation import PlannedEntries
from .models import Models
from .passes import run_pass
from .request import Request
from .steps import Step
from .waiting_line import WaitingLine

Outcome = Step | OffspecError
LOOKAHEAD = 64  # waiting requests of which one may join before the others, because they wait for another's pass


@dataclass(eq=False)
class Ticket:
    """A request of a batch. It waits, is under way or paused, or has ended; only the batch's thread writes it.

    client: whose request it is. caches: of the batch's pool, until it has ended.
    """

    checked: CheckedRequest
    client: str
    caches: RequestCaches | None = None
    request: Request | None = None
    is_cancelled: bool = False
    counted_s: float = 0.0  # of its constraint's seconds, those that others' passes have been made up for
    owed_s: float = 0.0  # seconds of passes that go to the other texts first, because its constraint took as many

    @cached_property
    def ids(self) -> Ids:
        """The prompt without its last token, which is always scored."""
        return np.asarray(self.checked.prompt[:-1], dtype=np.int64)


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
        on_begin: Callable[[Ticket], None] = lambda ticket: None,
    ) -> None:
        """max_texts: the maximum number of texts under way (`Models.max_texts`).

        pool: of the texts' caches; its idle caches are freed when texts need their KV entries. on_begin: called with a
        ticket that waits no more, before its first pass.
        """
        self._on_begin = on_begin
        self._models, self._max_texts = models, models.max_texts(max_texts)
        self._pool = TextPool(models.new_caches, 0) if pool is None else pool
        num_nodes = kind_of(models.device).useful_rows if (plan := models.loaded.plan) is None else plan.tree
        self._shared = SharedPass(models.stats.costs, num_nodes, models.stats.overlap_switch)
        self._planned = None if plan is None else PlannedEntries.by(plan)
        self._waiting = WaitingLine[Ticket]()
        self._running, self._paused = list[Ticket](), list[Ticket]()  # paused: the next one to resume is the last
        self._lock = Lock()  # guards the waiting tickets

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is under way."""
        with self._lock:
            return not (self._waiting or self._running or self._paused)

    @property
    def num_running(self) -> int:
        """Texts under way."""
        return len(self._running)

    def add(self, checked: CheckedRequest, client: str = "") -> Ticket:
        """Queue a request. client: whose it is; clients take turns, each one's requests join in order."""
        ticket = Ticket(checked, client)
        with self._lock:
            self._waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """End a request before the next pass. Returns whether it still waited, and so has ended at once."""
        with self._lock:
            if self._waiting.discard(ticket):
                return True
        ticket.is_cancelled = True
        return False

    def step(self) -> list[tuple[Ticket, Outcome]]:
        """One pass over the texts under way, after waiting ones have joined; returns what each request got.

        An error ends its request; an error of the whole pass ends all that are under way.
        """
        ended = self._join()
        if not self._running:
            return ended
        try:
            with self._models.turn:
                self._models.loaded.check()
                retry_out_of_memory(self._reserve_entries, self._begin_again)
                # Without the texts whose constraints took long, until the others had as much time.
                running = [ticket for ticket in self._running if ticket.owed_s <= 0] or list(self._running)
                began = time.perf_counter()
                verdicts = run_pass([_request(ticket) for ticket in running], self._shared, self._begin_again)
        except OffspecError as exc:
            ended += [(ticket, exc) for ticket in self._running]
            for ticket in list(self._running):
                self._leave(ticket)
            return ended
        pass_s = time.perf_counter() - began
        for ticket in self._running:  # what they owe to the other texts, and what has been paid back
            if ticket not in running:
                ticket.owed_s -= pass_s
                continue
            total_s = ticket.checked.constraint_s
            ticket.owed_s, ticket.counted_s = max(0.0, total_s - ticket.counted_s), total_s
        for ticket, verdict in zip(running, verdicts, strict=True):
            if verdict is None:
                continue
            outcome = verdict if isinstance(verdict, OffspecError) else _request(ticket).step(verdict)
            ended.append((ticket, outcome))
            if isinstance(outcome, OffspecError) or outcome.finish_reason:
                self._leave(ticket)
        return ended

    def pause_last(self) -> None:
        """Free the KV entries of the text that joined last; it resumes before others join. For `step`'s thread."""
        if self._running:
            last = self._running.pop()
            _request(last).pause()
            self._paused.append(last)

    def close(self) -> None:
        """End all requests."""
        with self._lock:
            self._waiting.clear()
        for ticket in [*self._running, *self._paused]:
            self._leave(ticket)

    # ---------------------------------------------------------------------------------------- joining and leaving

    def _join(self) -> list[tuple[Ticket, Outcome]]:
        """Drop cancelled requests, and let paused and waiting ones join. Returns those that could not."""
        for cancelled in [ticket for ticket in (*self._running, *self._paused) if ticket.is_cancelled]:
            self._leave(cancelled)
        failed = list[tuple[Ticket, Outcome]]()
        while (ticket := self._next()) is not None:
            try:
                self._begin(ticket)
            except BaseException as exc:
                self._end(ticket)
                if not isinstance(exc, OffspecError):
                    raise
                failed.append((ticket, exc))
            else:
                self._running.append(ticket)
        return failed

    def _next(self) -> Ticket | None:
        """The next request, if there are KV entries for it: a paused one, or one that waits for no other's pass."""
        if len(self._running) >= self._max_texts:
            return None
        if self._paused:
            request = _request(self._paused[-1])
            needed = request.kv.needed(request.kv.granted, self._num_nodes_of_next)
            num_shared = self._pool.num_shareable(np.asarray(request.text[:-1], dtype=np.int64))
            can_begin = not self._running or self._can_reserve(needed, num_shared=num_shared)
            return self._paused.pop() if can_begin else None
        unscored = list[tuple[Ids, int]]()  # texts whose prompts are being scored, and how many of their tokens are
        if self._waiting and self._pool.can_copy:
            requests = [_request(ticket) for ticket in self._running]
            unscored = [(np.asarray(each.text), each.target.length) for each in requests if each.num_unscored > 1]
        with self._lock:
            looked_at = islice(self._waiting, LOOKAHEAD)
            ticket = next((ticket for ticket in looked_at if not self._waits_for(ticket, unscored)), None)
            if ticket is None or (self._running and not self._has_entries_for(ticket)):
                return None
            self._waiting.take(ticket)
            return ticket

    @property
    def _num_nodes_of_next(self) -> int:
        """Nodes of a text in a pass with one more text."""
        return self._shared.limit_of(len(self._running) + 1)

    def _has_entries_for(self, ticket: Ticket) -> bool:
        """Whether the plan has KV entries for a request beside those under way. Caches that are idle leave for it."""
        if self._planned is None:
            return True
        needed = len(ticket.checked.prompt) + self._num_nodes_of_next + self._models.draft.num_shared
        num_shared = self._pool.num_shareable(ticket.ids)
        if not self._models.draft.keeps_target_whole:  # idle caches that it takes over keep their size
            needed = max(needed, self._pool.num_idle_entries + num_shared)
        return self._planned.holds(self._used_caches, needed, num_shared=num_shared)

    def _waits_for(self, ticket: Ticket, unscored: Sequence[tuple[Ids, int]]) -> bool:
        """Whether to wait until one of these texts has scored a beginning, so that its KV entries can be copied.

        The whole prompt is not scored twice; a part of it is if that takes less time than waiting for a pass.
        """
        for text, num_scored in unscored:
            number = num_common(text, ticket.ids)
            is_whole = number == len(ticket.ids) and number >= WORTHWHILE
            if number > num_scored and (is_whole or self._shared.is_worth_a_pass(number - num_scored)):
                return True
        return False

    def _begin(self, ticket: Ticket) -> None:
        if ticket.request is not None:
            assert ticket.caches is not None
            retry_out_of_memory(partial(self._pool.refill, ticket.caches), self._begin_again)
            ticket.request.resume()
            return
        self._on_begin(ticket)
        borrow = partial(self._pool.borrow, ticket.checked.prompt)
        ticket.caches = retry_out_of_memory(borrow, self._begin_again)
        ticket.request = Request(self._models, ticket.checked, ticket.caches, self._shared)

    def _leave(self, ticket: Ticket) -> None:
        (self._running if ticket in self._running else self._paused).remove(ticket)
        self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        """The request is over, or could not begin."""
        ticket.request = None
        if ticket.caches is not None:
            self._pool.give_back(ticket.caches)
            ticket.caches = None

    def _begin_again(self, message: str) -> None:
        """After a pass ran out of device memory: free all KV entries, load the target again, and start again."""

        def free() -> None:
            for ticket in self._running:
                _request(ticket).pause()

        self._models.loaded.make_room(message, free)
        for ticket in self._running:
            _request(ticket).resume()

    # ---------------------------------------------------------------------------------------- KV entries

    @property
    def _used_caches(self) -> list[SequenceCache]:
        return [_request(ticket).target.cache for ticket in self._running]

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
        for ticket in list(self._running):
            while ticket in self._running and not self._has_grown(_request(ticket), limit):
                self.pause_last()

    def _has_grown(self, request: Request, num_nodes: int) -> bool:
        """Reserve KV entries for the text and `num_nodes` nodes, and for some tokens more if the plan has them."""
        kv = request.kv
        if kv.needed(len(request.text), num_nodes) <= kv.num_entries:
            kv.reserve(kv.num_entries)
            return True
        for num_tokens in (kv.granted, len(request.text)):
            needed = kv.needed(num_tokens, num_nodes)
            if self._can_reserve(needed, now=kv.num_entries) or len(self._running) == 1:
                kv.reserve(needed)
                return True
        return False


def _request(ticket: Ticket) -> Request:
    assert ticket.request is not None, "the request is not under way"
    return ticket.request
