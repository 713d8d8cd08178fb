"""One engine for many clients: a queue of limited length, and a thread that runs the passes of those under way."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict, abc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, count
from threading import Condition, Thread
from typing import TypeVar, cast

from offspec import Constraint, Engine, Message, SamplingParams, SpeculationParams
from offspec.errors import ConstraintError, ContextLengthError, OffspecError, UsageError
from offspec.model.memory.text_pool import TextPool
from offspec.planning.parked_texts import parked_bytes
from offspec.running.batch import Batch
from offspec.running.pass_report import LastPass
from offspec.running.sequence import Sequence
from offspec.running.several_answers import params_of_each
from offspec.running.steps import Step
from offspec.session import Turn, encode_turns, turns_of
from offspec.text.infill import InfillTokens

from ..main import SERVE_THREAD
from .constraint_queue import ConstraintQueue
from .fair_thread import TurnsExecutor
from .logprobs import TokenTexts
from .metrics import Metrics, Times, first_line, log_line, progress_line
from .openai_requests import CompletionRequest, with_tools
from .privacy import model_folders, without_paths
from .reply_tokens import ReplyTokens
from .request_parts import Json

MOST_CUT = 3  # tokens of a character that is not complete: UTF-8 has at most four bytes
MOST_LOOSER = 64  # constraints that do not compile, whose replacements are kept
OF_ONE_REQUEST = (ConstraintError, ContextLengthError, UsageError)  # errors that say nothing of the engine
CLOSE_S = 0.5  # how long `close` waits for a pass
LONGEST_RETRY_S = 60  # clients ignore longer times
PROGRESS_S = 30.0  # between two lines of log about an answer under way


T = TypeVar("T")
LOG = logging.getLogger("uvicorn.error")  # shown with -v


class BusyError(OffspecError):
    """The queue is full. retry_after_s: when there may be room."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the server's queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class StoppingError(OffspecError):
    """The server stops."""

    def __init__(self) -> None:
        super().__init__("the server is stopping; retry when it runs again")


@dataclass(eq=False)
class RequestedAnswer:
    """One answer of a request. number: of the server's answers, for its log."""

    work: ServerRequest
    index: int
    sequence: Sequence
    number: int
    asked_s: float
    reply: Turn = field(default_factory=lambda: Turn(""))
    began_s: float | None = None
    first_s: float | None = None
    told_s: float = 0.0  # when the log last told of it
    is_open: bool = True  # until its last step, its error, or its client's leave

    @property
    def name(self) -> str:
        return f"{self.work.completion.kind} {self.number}"

    def add(self, step: Step, now_s: float) -> None:
        self.reply.add(step)
        if self.first_s is None:
            self.first_s = now_s

    def times(self, now_s: float) -> Times:
        first_s = None if self.first_s is None else self.first_s - self.asked_s
        queue_s = (now_s if self.began_s is None else self.began_s) - self.asked_s
        return Times(queue_s, first_s, now_s - self.asked_s)


class ServerRequest:
    """A request under way: its answers, and the queue that their steps arrive in."""

    def __init__(self, completion: CompletionRequest, prompts: list[list[int]], client: str) -> None:
        """completion: as it is answered. prompts: token ids. client: whose request it is; clients take turns."""
        self.completion, self.prompts, self.client = completion, prompts, client
        self.jobs = list[RequestedAnswer]()
        self._results = asyncio.Queue[tuple[int, Step | Exception, Json | None]]()
        self._loop = asyncio.get_running_loop()

    @property
    def has_begun(self) -> bool:
        return any(job.began_s is not None for job in self.jobs)

    def put(self, index: int, result: Step | Exception, report: Json | None = None) -> None:
        """The next step of an answer, or its error; from any thread."""
        with suppress(RuntimeError):  # the loop may have ended
            self._loop.call_soon_threadsafe(self._results.put_nowait, (index, result, report))

    async def next(self, timeout_s: float | None = None) -> tuple[int, Step, Json | None] | None:
        """An answer's index, its next step, and the pass's report if the request asks for it.

        None if none arrives in time. Raises an answer's error.
        """
        try:
            index, result, report = await asyncio.wait_for(self._results.get(), timeout_s)
        except asyncio.TimeoutError:
            return None
        if isinstance(result, Exception):
            raise result
        return index, result, report


def _params(completion: CompletionRequest) -> list[SamplingParams]:
    """The parameters of each answer to a prompt."""
    if completion.num_answers == 1:
        return [completion.params]
    seed = secrets.randbits(32) if completion.params.seed is None else completion.params.seed
    return params_of_each(completion.params, seed, completion.num_answers)


class Service:
    """One engine for many clients. One thread runs all passes, so that torch has one thread pool.

    Another one encodes, at which clients take turns, and a `ConstraintQueue` compiles constraints.

    error: an error after which the engine cannot continue; the service then calls `give_up`.
    """

    def __init__(
        self,
        engine: Engine,
        speculation: SpeculationParams,
        *,
        most_waiting: int,
        most_texts: int | None = None,
        notify: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """most_waiting: answers beyond those under way. most_texts: of these, by default AUTO_TEXTS.

        notify: gets a line for each answer that begins or has ended.
        """
        self.engine, self.metrics, self.notify = engine, Metrics(), notify
        self.error: OffspecError | None = None
        self.give_up: Callable[[], None] = lambda: None
        self._clock, self._numbers = clock, count(1)
        self._speculation, self._folders = speculation, model_folders(engine)
        self._most_texts = engine.models.max_texts(most_texts)
        self._pool = TextPool(engine.new_caches, parked_bytes(engine.plan))
        self._batch = Batch(engine.models, self._most_texts, self._pool, self._begin)
        self._most_open = most_waiting + self._most_texts
        self._reply_tokens, self._texts = ReplyTokens(), TokenTexts(engine.tokenizer)
        self._looser = OrderedDict[Constraint, Constraint | None]()  # in place of those that do not compile
        self._changed = Condition()  # its lock guards the next four
        self._open, self._left = dict[Sequence, RequestedAnswer](), list[RequestedAnswer]()
        self._num_encoding, self._is_stopping = 0, False
        self._encoder, self._constraints = TurnsExecutor("offspec-encode"), ConstraintQueue(engine.constraints)
        self._thread = Thread(target=self._run, name=SERVE_THREAD, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer all requests with an error, at once, and take no more."""
        with self._changed:
            self._is_stopping = True
            for job in list(self._open.values()):
                job.work.put(job.index, StoppingError())
                self._close(job, "stopped")
            self._changed.notify()

    def close(self) -> None:
        """Stop the threads. Waits for a pass under way, but not for long: a streamed pass can take a minute."""
        self.stop()
        self._encoder.shutdown()
        self._constraints.close()
        self._thread.join(CLOSE_S)

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Present figures and their descriptions, by name."""
        with self._changed:
            num_begun = sum(job.began_s is not None for job in self._open.values())
            num_waiting = len(self._open) - num_begun + self._num_encoding
        return {
            "requests_running": ("Answers under way.", num_begun),
            "requests_waiting": ("Answers that wait for their turn.", num_waiting),
            "parked_texts": ("Earlier conversations whose KV entries are kept in RAM.", self._pool.num_parked),
            "parked_bytes": ("Bytes of these entries.", self._pool.parked_bytes),
        }

    @property
    def num_texts(self) -> int:
        """The maximum number of answers that share passes."""
        return self._most_texts

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way or waits."""
        with self._changed:
            return not self._open and not self._num_encoding

    @property
    def fault(self) -> str | None:
        """Why each further request fails; None if that is not so."""
        if self.error is not None:
            return str(self._without_paths(self.error))
        return str(StoppingError()) if self._is_stopping else None

    def tell_progress(self) -> None:
        """A line of log for each answer that has been under way for PROGRESS_S since the last one; from any thread."""
        now_s = self._clock()
        with self._changed:
            begun = [job for job in self._open.values() if job.began_s is not None and now_s - job.told_s >= PROGRESS_S]
            for job in begun:
                job.told_s = now_s
        for job in sorted(begun, key=lambda job: job.number):
            self.notify(progress_line(job.name, job.reply.stats, job.times(now_s)))

    # ---------------------------------------------------------------------------------------- for the event loop

    async def submit(self, completion: CompletionRequest, client: str) -> ServerRequest:
        """Check a request and queue its answers. client: who asks.

        Raises BusyError if the queue is full, StoppingError, and the errors of `Engine.generate` for an invalid
        request, without this machine's folders, which clients should not learn.
        """
        asked_s = self._clock()
        self._reserve(completion.num_choices)
        try:
            completion, checked = await self._prepare(completion, client)
        except BusyError:
            raise
        except OffspecError as exc:
            raise self._without_paths(exc) from exc
        finally:
            with self._changed:
                self._num_encoding -= completion.num_choices
        work = ServerRequest(completion, [each[0].prompt for each in checked], client)
        with self._changed:
            if self._is_stopping:
                raise StoppingError
            for index, sequence in enumerate(chain.from_iterable(checked)):
                job = RequestedAnswer(work, index, sequence, next(self._numbers), asked_s)
                self._open[self._batch.add(sequence, client)] = job
                work.jobs.append(job)
            self._changed.notify()
        return work

    async def count_tokens(self, completion: CompletionRequest, client: str) -> int:
        """The number of a chat's tokens. Raises the errors of `submit`."""
        return len(await self.on_encoder(client, partial(self._encode_chat, completion, client)))

    async def on_encoder(self, client: str, work: Callable[[], T]) -> T:
        """The result of `work` on the thread that encodes. Raises its errors, and those of `submit`."""
        self._reserve(1)
        try:
            return await asyncio.wrap_future(self._encoder.submit(client, work))
        except OffspecError as exc:
            raise self._without_paths(exc) from exc
        finally:
            with self._changed:
                self._num_encoding -= 1

    def with_tools(self, completion: CompletionRequest) -> CompletionRequest:
        """The request with the model's format of tool calls. Raises the errors of `openai_requests.with_tools`."""
        try:
            return with_tools(completion, self.engine.tokenizer)
        except OffspecError as exc:
            raise self._without_paths(exc) from exc

    def cancel(self, work: ServerRequest) -> None:
        """Nobody reads the answers any more. Those under way end before the next pass."""
        with self._changed:
            for job in [job for job in work.jobs if job.is_open]:
                if self._batch.cancel(job.sequence):
                    self._close(job, "left")
                else:
                    self._left.append(job)
            self._changed.notify()

    def _reserve(self, num_answers: int) -> None:
        """Take places in the queue. Raises BusyError, and UsageError if the queue is always too small."""
        with self._changed:
            if self._is_stopping:
                raise StoppingError
            if self.error is not None:
                raise self._without_paths(self.error)
            if num_answers > self._most_open:
                message = f"n and prompt ask for {num_answers} answers; the server's queue has {self._most_open}"
                raise UsageError(f"{message}, so ask for at most as many at a time")
            if len(self._open) + self._num_encoding + num_answers > self._most_open:
                self.metrics.refused()
                expected_s = round(self.metrics.usual_answer_s / self._most_texts)
                raise BusyError(min(max(expected_s, 1), LONGEST_RETRY_S))
            self._num_encoding += num_answers

    async def _prepare(
        self, completion: CompletionRequest, client: str
    ) -> tuple[CompletionRequest, list[list[Sequence]]]:
        """The request as it can be answered, and the answers of each of its prompts, checked."""
        self._speculation.check_sampling(completion.params)
        self.engine.check_sampling(completion.params)
        prompts = await asyncio.wrap_future(self._encoder.submit(client, partial(self._encode, completion, client)))
        if completion.params.constraint is None:
            check = partial(self._checked, completion, prompts)
            return completion, await asyncio.wrap_future(self._encoder.submit(client, check))
        completion = await self._with_usable_tools(completion, client)
        if (constraint := completion.params.constraint) is not None and completion.kind == "chat":
            constraint = replace(constraint, thinks=True)
            completion = replace(completion, params=replace(completion.params, constraint=constraint))
        starts = [] if constraint is None else await self._constraints.compile(constraint, prompts[0], client)
        return completion, await self._constraints.run(starts, client, partial(self._checked, completion, prompts))

    def _checked(self, completion: CompletionRequest, prompts: abc.Sequence[list[int]]) -> list[list[Sequence]]:
        """The answers of each prompt."""
        ends = frozenset[int]() if completion.infill is None else InfillTokens.of(self.engine.tokenizer).ends

        def check(prompt: list[int], params: SamplingParams) -> Sequence:
            sequence = self.engine.check_request(prompt, params, self._speculation, LastPass())
            sequence.prompt, sequence.ends, sequence.continues = prompt, ends, completion.continues  # one list for all
            return sequence

        return [[check(prompt, params) for params in _params(completion)] for prompt in prompts]

    def _encode(self, completion: CompletionRequest, client: str) -> list[list[int]]:
        """The prompts' token ids, after checks that depend on the model."""
        if completion.kind == "chat":
            prompts = [self._encode_chat(completion, client)]
        else:
            prompts = [self._encode_text(cast("str | list[int]", prompt), completion) for prompt in completion.prompts]
        for ids in prompts:
            self.engine.room_after(len(ids))
        return prompts

    async def _with_usable_tools(self, completion: CompletionRequest, client: str) -> CompletionRequest:
        """The request without those schemas that cannot be used, of tools that the model may call and need not."""
        tools, form, constraint = completion.tools, completion.tool_format, completion.params.constraint
        if tools is None or form is None or tools.are_strict or constraint is None:
            return completion
        if constraint not in self._looser:
            try:
                await self._constraints.compile(constraint, (), client)
            except UsageError as exc:
                self.notify(f"the arguments of tools are not bound to all schemas: {self._without_paths(exc)}")
                compiles = partial(self._constraints.compiles_soon, client=client)
                self._looser[constraint] = await tools.looser_constraint(form, compiles)
                while len(self._looser) > MOST_LOOSER:
                    self._looser.popitem(last=False)
            else:
                return completion
        return replace(completion, params=replace(completion.params, constraint=self._looser[constraint]))

    def _encode_chat(self, completion: CompletionRequest, client: str) -> list[int]:
        """A chat's token ids. The client's replies keep their original ones, because the KV caches contain these."""
        messages, tokenizer, limit = (
            cast(abc.Sequence[Message], completion.prompt),
            self.engine.tokenizer,
            self.engine.context_limit,
        )
        if begun := self._begun_ids(completion, client):
            before = replace(completion, prompts=[messages[:-1]], continues=False)
            return [*self._encode_chat(before, client), *begun]
        turns = turns_of(messages, self._reply_tokens.of(client, messages)) if completion.is_plain_chat else None
        if turns is not None:
            return encode_turns(tokenizer, *turns, limit)
        described = completion.tools.described if completion.tools is not None else ()
        settings, continues = completion.template_settings, completion.continues
        return tokenizer.encode_chat(messages, limit, tools=described, settings=settings, continues=continues)

    def _begun_ids(self, completion: CompletionRequest, client: str) -> list[int]:
        """The original token ids of the reply that a chat continues; none if they are not remembered.

        Ids at the end that are part of a character have no text yet. The model chooses them again.
        """
        if not completion.continues or not completion.is_plain_chat:
            return []
        messages = cast(abc.Sequence[Message], completion.prompt)
        ids, text = self._reply_tokens.of(client, messages)[-1], messages[-1]["content"]
        wholes = (ids[: len(ids) - num_cut] for num_cut in range(min(len(ids), MOST_CUT + 1)))
        return next((whole for whole in wholes if self.engine.tokenizer.decode(whole) == text), [])

    def _encode_text(self, prompt: str | list[int], completion: CompletionRequest) -> list[int]:
        if isinstance(prompt, str) and completion.infill is not None:
            limit = self.engine.context_limit
            num_answer = min(completion.params.max_new_tokens, limit.num_tokens // 4)
            return InfillTokens.of(self.engine.tokenizer).encode(prompt, completion.infill, limit, num_answer)
        if not isinstance(prompt, str):
            self.engine.room_after(len(prompt))  # before its ids are looked at
        return self.engine.encode(prompt)

    def _without_paths(self, error: OffspecError) -> OffspecError:
        return type(error)(without_paths(str(error), self._folders))

    # ---------------------------------------------------------------------------------------- the passes' thread

    def _run(self) -> None:
        try:
            while self.error is None and self._has_work():
                self._end_left()
                self._step()
        except Exception as exc:  # noqa: BLE001 (or requests would wait for ever)
            self._give_up(exc)
        self._batch.close()

    def _has_work(self) -> bool:
        """Wait for work; False if the service stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._left or not self._batch.is_idle)
            return not self._is_stopping

    def _begin(self, sequence: Sequence) -> None:
        """An answer's first pass is the next. Its clock begins: its seconds in the queue are another figure."""
        sequence.began = time.perf_counter()
        with self._changed:
            if (job := self._open.get(sequence)) is None:
                return
            job.began_s = job.told_s = self._clock()
        self.notify(first_line(job.name, len(sequence.prompt), job.times(job.began_s)))

    def _step(self) -> None:
        try:
            results = self._batch.step()
        except Exception as exc:
            LOG.error("a pass failed", exc_info=exc)
            with self._changed:
                begun = [job for job in self._open.values() if job.began_s is not None]
            for job in begun:
                self._batch.cancel(job.sequence)
                self._fail(job, exc)
            self._check_engine()
            return
        for sequence, result in results:
            answer = self._open.get(sequence)
            if answer is None:
                continue  # its client has left, or the server stops
            if isinstance(result, Step):
                self._advance(answer, result)
            else:
                self._fail(answer, result)
        if any(isinstance(result, Exception) and not isinstance(result, OF_ONE_REQUEST) for _, result in results):
            self._check_engine()

    def _check_engine(self) -> None:
        """After a failure: give up unless another request succeeds."""
        try:
            for _ in self.engine.generate([0], SamplingParams(1), SpeculationParams(0)):
                pass
        except Exception as exc:  # noqa: BLE001 (whatever it is, each further request would meet it)
            self._give_up(exc)

    def _give_up(self, error: Exception) -> None:
        """End the server, and all requests: the engine cannot continue."""
        if not isinstance(error, OffspecError):
            LOG.error("the engine failed", exc_info=error)
            error = OffspecError(f"the server cannot go on ({type(error).__name__}: {error}); start it again")
        self.error = error
        self.give_up()
        with self._changed:
            left = list(self._open.values())
        for job in left:
            self._fail(job, error)

    def _advance(self, job: RequestedAnswer, step: Step) -> None:
        """Deliver a step. After the last one, the draft trains."""
        job.add(step, self._clock())
        report = self._report(job, step) if job.work.completion.reports_passes else None
        if step.finish_reason is None:
            job.work.put(job.index, step, report)
            return
        self._remember(job)
        self._close(job, step.finish_reason)
        job.work.put(job.index, step, report)
        self._learn(job.reply)

    def _report(self, job: RequestedAnswer, step: Step) -> Json:
        """A pass for people: its tokens with their sources, and its tree by columns."""
        tree = asdict(cast(LastPass, job.sequence.observer).report(step))
        sources = tree.pop("token_sources")
        tree["texts"] = [self._texts.text(token) for token in tree.pop("tokens")]
        tokens = [{"text": text, "source": source} for text, source in zip(step.texts, sources, strict=True)]
        return {"tokens": tokens, "tree": tree}

    def _end_left(self) -> None:
        """Count the answers whose clients have disconnected; the batch ends them with its next step."""
        with self._changed:
            left, self._left = [job for job in self._left if job.is_open], []
        for job in left:
            self._remember(job)
            self._close(job, "left")
            self._learn(job.reply)

    def _fail(self, job: RequestedAnswer, error: Exception) -> None:
        self._close(job, "failed")
        job.work.put(job.index, self._without_paths(error) if isinstance(error, OffspecError) else error)

    def _close(self, job: RequestedAnswer, outcome: str) -> None:
        """Count an answer that has ended, unless the server's stop has ended it before."""
        with self._changed:
            if not job.is_open:
                return
            job.is_open = False
            del self._open[job.sequence]
        times = job.times(self._clock())
        self.metrics.ended(outcome, job.reply.stats, times)
        self.notify(log_line(job.name, outcome, job.reply.stats, times))

    def _remember(self, job: RequestedAnswer) -> None:
        """Keep the token ids of a chat's reply for the next turn."""
        completion, reply = job.work.completion, job.reply
        if not completion.is_plain_chat:
            return
        messages, text, ids = cast(abc.Sequence[Message], completion.prompt), reply.reply, reply.token_ids
        if completion.continues:
            begun = self._begun_ids(completion, job.work.client)
            *messages, last = messages
            text, ids = last["content"] + text, [*begun, *ids] if begun else []
        self._reply_tokens.add(job.work.client, messages, text, ids)

    def _learn(self, reply: Turn) -> None:
        if reply.stats is None:
            return
        try:
            self.engine.learn(reply.stats)
        except Exception as exc:  # noqa: BLE001 (requests can go on without)
            self.notify(f"training on the request failed: {type(exc).__name__}: {exc}")
