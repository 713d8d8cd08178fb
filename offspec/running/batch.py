"""Several requests whose texts share the target's passes; texts join and leave between passes.

A streamed pass costs the same for one text's rows as for those of eight. The KV entries that a plan reserves for one
text of the full context and its tree are shared by all texts. If they run out, the text that joined last is paused: it
is scored again later, and stays the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np

from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.scheduler.params import max_nodes

from ..errors import OffspecError
from ..model.text_caches import TextCaches
from ..model.text_pool import TextPool, num_common
from ..planning.out_of_memory import retry_out_of_memory
from .checked_request import CheckedRequest
from .models import Models
from .passes import run_pass
from .request import Request
from .steps import Step

Outcome = Step | OffspecError


@dataclass(eq=False)
class Ticket:
    """A request of a batch. It waits, is under way, or has ended; only its batch writes it.

    user: marks the caches as used while the request lasts. lent: caches of the batch's own pool.
    """

    checked: CheckedRequest
    caches: TextCaches | None
    user: Generator[None, None, None]
    lent: TextCaches | None = None
    request: Request | None = None
    is_cancelled: bool = False
    counted_s: float = 0.0  # of its constraint's seconds, those that others' passes have been made up for
    owed_s: float = 0.0  # seconds of passes that go to the other texts first, because its constraint took as many


class Batch:
    """Requests that share passes. `add` and `cancel` may be called from any thread, `step` from one thread at a time.

    Each text is that of `Engine.generate` alone with its seed, whatever shares its passes (in 16 bits up to near-ties,
    as for any tree).
    """

    def __init__(self, models: Models, max_texts: int | None = None, pool: TextPool | None = None) -> None:
        """max_texts: the maximum number of texts under way (`Models.max_texts`). The others wait in order.

        pool: of the caches that are given to `add`; texts without take caches from it, too. Its idle caches are freed
        when texts need their room.
        """
        self._models, self._max_texts = models, models.max_texts(max_texts)
        self._pool = TextPool(models.new_caches, 0) if pool is None else pool
        num_nodes = max_nodes(models.device.type) if (plan := models.loaded.plan) is None else plan.tree
        self._shared = SharedPass(models.learnt.costs, num_nodes, models.learnt.overlap_switch)
        self._num_entries = None if plan is None else plan.kv_entries
        self._waiting, self._running = deque[Ticket](), list[Ticket]()
        self._lock = Lock()  # guards the waiting tickets

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is under way."""
        return not self._waiting and not self._running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, checked: CheckedRequest, caches: TextCaches | None = None) -> Ticket:
        """Queue a request. Raises UsageError for caches that another request uses."""
        user = _marker()
        with self._lock:
            if caches is not None:
                caches.user.check_free()
                caches.user.begin(user)
            ticket = Ticket(checked, caches, user)
            self._waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next pass. Its caches keep its tokens so far."""
        ticket.is_cancelled = True

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
                retry_out_of_memory(self._make_room, self._begin_again)
                running, began = self._next_texts(), time.perf_counter()
                verdicts = run_pass([_request(ticket) for ticket in running], self._shared, self._begin_again)
        except OffspecError as exc:
            ended += [(ticket, exc) for ticket in self._running]
            for ticket in list(self._running):
                self._leave(ticket)
            return ended
        self._settle(running, time.perf_counter() - began)
        for ticket, verdict in zip(running, verdicts, strict=True):
            if verdict is None:
                continue
            outcome = verdict if isinstance(verdict, OffspecError) else _request(ticket).step(verdict)
            ended.append((ticket, outcome))
            if isinstance(outcome, OffspecError) or outcome.finish_reason:
                self._leave(ticket)
        return ended

    def _next_texts(self) -> list[Ticket]:
        """The texts of the next pass: without those whose constraints took long, until the others had as much time."""
        return [ticket for ticket in self._running if ticket.owed_s <= 0] or list(self._running)

    def _settle(self, running: Sequence[Ticket], pass_s: float) -> None:
        """After a pass of `running`: what they owe to the other texts, and what has been paid back."""
        for ticket in self._running:
            if ticket not in running:
                ticket.owed_s -= pass_s
                continue
            total_s = ticket.checked.constraint_s
            ticket.owed_s, ticket.counted_s = max(0.0, total_s - ticket.counted_s), total_s

    def pause_last(self) -> None:
        """Free the KV entries of the text that joined last; it waits, and resumes later. For `step`'s thread."""
        if self._running:
            last = self._running.pop()
            _request(last).pause()
            with self._lock:
                self._waiting.appendleft(last)

    def close(self) -> None:
        """End all requests."""
        with self._lock:
            while self._waiting:
                self._end(self._waiting.popleft())
        for ticket in list(self._running):
            self._leave(ticket)

    # ---------------------------------------------------------------------------------------- joining and leaving

    def _join(self) -> list[tuple[Ticket, Outcome]]:
        """Drop cancelled requests, and let waiting ones join in order. Returns those that could not."""
        for cancelled in [ticket for ticket in self._running if ticket.is_cancelled]:
            self._leave(cancelled)
        failed = list[tuple[Ticket, Outcome]]()
        while (ticket := self._next()) is not None:
            try:
                self._begin(ticket)
            except OffspecError as exc:
                failed.append((ticket, exc))
                self._end(ticket)
            else:
                self._running.append(ticket)
        return failed

    def _next(self) -> Ticket | None:
        """The next request, if there is room for it."""
        with self._lock:
            while self._waiting and self._waiting[0].is_cancelled:
                self._end(self._waiting.popleft())
            if not self._waiting or len(self._running) >= self._max_texts:
                return None
            first = self._waiting[0]
            if self._running and (not self._has_room(self._needed(first)) or self._has_beginning_soon(first)):
                return None
            return self._waiting.popleft()

    def _needed(self, ticket: Ticket) -> int:
        """KV entries that a waiting request needs to join; a paused one would otherwise soon be paused again."""
        num_nodes = self._shared.limit_of(len(self._running) + 1)
        if ticket.request is not None:
            return ticket.request.kv.needed(ticket.request.kv.granted, num_nodes)
        needed = len(ticket.checked.prompt) + num_nodes + self._models.draft.num_shared
        return needed if ticket.caches is None else max(needed, ticket.caches.target.cache.capacity)

    def _has_beginning_soon(self, ticket: Ticket) -> bool:
        """Whether another text is about to score so much of this one's beginning that waiting for it takes less time.

        The entries are then copied.
        """
        if ticket.caches is not None or ticket.request is not None or not self._pool.can_copy:
            return False
        unscored = (_num_unscored(_request(other), ticket.checked.prompt) for other in self._running)
        return self._shared.is_worth_a_pass(max(unscored))

    def _begin(self, ticket: Ticket) -> None:
        if ticket.request is not None:
            ticket.request.resume()
            return
        caches = ticket.caches
        if caches is None:
            borrow = partial(self._pool.borrow, ticket.checked.prompt)
            caches = ticket.lent = retry_out_of_memory(borrow, self._begin_again)
        ticket.request = Request(self._models, ticket.checked, caches, self._shared)

    def _leave(self, ticket: Ticket) -> None:
        self._running.remove(ticket)
        self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        """The request is over, whether it has begun or not."""
        ticket.user.close()
        ticket.request = None
        if ticket.lent is not None:
            self._pool.give_back(ticket.lent)
            ticket.lent = None

    def _begin_again(self, message: str) -> None:
        """After a pass ran out of device memory: free all KV entries, load the target again, and start again."""

        def free() -> None:
            for ticket in self._running:
                _request(ticket).pause()

        self._models.loaded.make_room(message, free)
        for ticket in self._running:
            _request(ticket).resume()

    # ---------------------------------------------------------------------------------------- KV entries

    def _has_room(self, num_entries: int) -> bool:
        """Whether this number of additional KV entries is within the plan, if necessary without idle caches."""
        if self._num_entries is None:
            return True
        room = self._num_entries - sum(_request(ticket).kv.num_entries for ticket in self._running)
        if num_entries + self._pool.num_idle_entries > room:
            self._pool.park_idle()
        return num_entries <= room

    def _make_room(self) -> None:
        """Give every text the KV entries that it needs for the next pass; pause those that joined last if necessary."""
        limit = self._shared.most_per_text = self._shared.limit_of(len(self._running))
        for ticket in list(self._running):
            while ticket in self._running and not self._has_grown(_request(ticket), limit):
                self.pause_last()

    def _has_grown(self, request: Request, num_nodes: int) -> bool:
        """Reserve KV entries for the text and `num_nodes` nodes, and for some tokens more if there is room."""
        kv = request.kv
        if kv.needed(len(request.text), num_nodes) <= kv.num_entries:
            kv.reserve(kv.num_entries)
            return True
        for num_tokens in (kv.granted, len(request.text)):
            needed = kv.needed(num_tokens, num_nodes)
            if self._has_room(needed - kv.num_entries) or len(self._running) == 1:
                kv.reserve(needed)
                return True
        return False


def _request(ticket: Ticket) -> Request:
    assert ticket.request is not None, "the request is not under way"
    return ticket.request


def _num_unscored(request: Request, text: Sequence[int]) -> int:
    """How many tokens of the beginning that both texts have in common the request has not scored yet."""
    return num_common(np.asarray(request.text), np.asarray(text[:-1])) - request.target.length


def _marker() -> Generator[None, None, None]:
    """A generator that marks caches as used until it is closed."""
    yield
