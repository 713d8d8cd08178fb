"""One request, from a prompt to its text; and the pass that one or several requests share (`run_pass`).

propose (draft) → score (target) → verify (scheduler) → commit (both caches) → observe → yield.
The first pass takes the prompt and the first tree together, so that the weights are streamed once for both. A prompt
of more than PASS_ROWS tokens takes several passes, the last of which has the tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from offspec.loaders.streaming.cuda import device_bytes, span
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.drafting.drafter import DraftRequest, NoDrafter
from offspec.scheduler.drafting.forced import prepare_masks
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.drafting.score_calls import CompetingDrafter, Drafting, run_together
from offspec.scheduler.guessing.retrieval import MAX_MATCH
from offspec.scheduler.pace.costs import CostCurve
from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.scheduler.params import DRAFT_ROWS, MAX_ROWS, SamplingParams, SpeculationParams, max_nodes, tree_room
from offspec.scheduler.trees.constraint import TokenConstraint
from offspec.scheduler.trees.logprobs import SLICE_ROWS, TokenLogprob, token_logprobs
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, FloatArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict

from .background import in_background
from .checkpoints.opening import Note
from .drafts.base import DraftTask
from .drafts.shared_rounds import SharedRounds
from .errors import ConstraintError, NumericalError, OffspecError
from .model.decoder import PASS_ROWS, TextRows, score_together
from .model.row_logits import HEAD_ROWS, RowLogits
from .model.text_caches import TextCaches
from .planning.out_of_memory import out_of_memory_message, retry_out_of_memory
from .stats import Stats, peak_host_bytes
from .text.lookup_files import FileIndex, LookedUp

if TYPE_CHECKING:
    from .engine import Engine

T = TypeVar("T")
Observer = Callable[[TokenTree, Verdict], None]
# Rows of prompts in a pass that texts past their prompts share: a long prompt may not delay them long. At most
# PREFILL_ROWS, and so few that the pass takes PREFILL_S more than one without, or PREFILL_SLOWDOWN times as long.
PREFILL_ROWS, PREFILL_S, PREFILL_SLOWDOWN = 512, 0.5, 2.0
FEWEST_PREFILL_ROWS = 16
MEASURED = 0.02  # weight of measured passes from which on they count as measured
GRANT = 256  # new tokens for which a request that shares passes reserves KV entries at a time
SHORT_REST = 8  # passes without a draft after which statistics tell of them
TEXT_ERRORS = (NumericalError, ConstraintError)  # end their text; other errors of a pass end all texts in it


@dataclass(frozen=True)
class Step:
    """The result of one pass: new token ids, the text that is final by now, and the counters so far.

    finish_reason is None until the last step: eos (the model ended the text), stop (a stop text), length
    (max_new_tokens, or the context is full). The draft proposed num_accepted of the token ids; the last token of a pass
    comes from the target alone. texts[i] is the text that became final with token_ids[i], usually that token's own;
    joined, they are `text`. looked_up: where the first of the accepted ones stand in the files for lookup, if they do.
    logprobs: of the token ids, if asked for. prompt_logprobs: in the first step, of the prompt's tokens from the second
    on.
    """

    token_ids: list[int]
    text: str
    stats: Stats
    finish_reason: str | None = None
    num_accepted: int = 0
    texts: tuple[str, ...] = ()
    looked_up: LookedUp | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class RequestParams:
    """The parameters of a request.

    seed: the sampling seed, never None. began: the start time, by `perf_counter`. constraint: of the answer, compiled.
    """

    sampling: SamplingParams
    seed: int
    speculation: SpeculationParams
    observer: Observer | None
    began: float
    constraint: TokenConstraint | None = None


class Request:
    """A running request. `text` is the prompt and all emitted tokens; the caches hold all of it but the last token."""

    def __init__(
        self,
        engine: Engine,
        text: list[int],
        asked: RequestParams,
        caches: TextCaches,
        shared: SharedPass | None = None,
    ) -> None:
        """text: the prompt's token ids. They and `max_new_tokens` must fit the context together.

        shared: the passes that it shares with other requests. None: passes of its own; it reserves all its KV entries.
        """
        self.engine, self.asked, self.limit = engine, asked, asked.sampling.max_new_tokens
        self.final = frozenset() if asked.sampling.ignore_eos else engine.tokenizer.eos_ids
        self._caches, self._longest, self._shared = caches, len(text) + self.limit, shared
        self._learnt = engine.estimates()
        target = engine.target
        self.sampler = Sampler(asked.sampling, asked.seed, target.config.vocab_size, target.device, to_device)
        self.sampler.extend(text, is_prompt=True)
        self.sampler.constrain(asked.constraint)
        self._stream = engine.tokenizer.stream(asked.sampling.stop, skip_special_tokens=True)
        self._moved_before = engine.loaded.bytes_streamed
        self._chain, self._tree = list[int](), TokenTree.empty()  # of the next pass
        self._is_prefilling = False
        self._resting_since: int | None = None  # the number of a pass
        self.fault: OffspecError | None = None  # of a constraint while drafting, which ends the text
        self._logprobs, self._prompt_logprobs = list[TokenLogprob](), list[TokenLogprob]()  # of a pass; of the prompt
        self._num_prompt = len(text)
        with engine.turn:
            num_prefilled = retry_out_of_memory(lambda: self._begin(text), self._make_room)
        self._listen = engine.draft.new_listener()
        self.stats = Stats(
            num_prompt_tokens=len(text),
            num_prefilled_tokens=num_prefilled,
            seed=asked.seed,
            is_lossy=self.drafter.is_lossy,
            learn_file=None if (file := engine.draft.learn_file) is None else str(file),
        )

    def _begin(self, text: list[int]) -> int:
        """Prepare the caches and a drafter for `text`. Returns how many of its tokens the target must score."""
        caches, engine, speculation = self._caches, self.engine, self.asked.speculation
        if self._wants_prompt_logprobs:
            self._prompt_logprobs.clear()
            caches.rewind([])  # the pass has to score all rows
        if engine.is_deterministic and self._shared is not None:
            caches.rewind([])  # entries of other texts come from passes of other widths
        num_prefilled = caches.rewind(text)
        self.text, self.target = caches.text, caches.target  # the same list as the caches'
        num_entries = self._num_draft_tokens = 0  # tokens for which the draft's cache has room
        if self._shared is None:
            num_entries = self.num_needed(self._longest, tree_room(speculation, engine.target.device.type))
        self.reserve(num_entries)
        most_rows, shared = self._most_rows, self._shared
        asked = DraftRequest(self.sampler, self.final, num_prefilled, most_rows=most_rows, shared=shared)
        task = DraftTask(caches.draft, engine.target, asked, speculation, engine.lookup_index, text, caches.beside)
        self.drafter = engine.draft.drafter(task, self._learnt)
        drafter = self.drafter
        self._competitor = drafter if isinstance(drafter, CompetingDrafter) and self._shared is not None else None
        return num_prefilled

    @property
    def granted(self) -> int:
        """Tokens of the text, now and in a while, that need KV entries."""
        return self._longest if self._shared is None else min(self._longest, len(self.text) + GRANT)

    @property
    def constraint_s(self) -> float:
        """Seconds of CPU time that slow steps of the request's constraint have taken so far."""
        slow = getattr(self.asked.constraint, "slow", None)
        return 0.0 if slow is None else float(slow.seconds)

    @property
    def num_unscored(self) -> int:
        """Tokens of the text that the target has not scored yet: the last one, and those of a prompt."""
        return len(self.text) - self.target.length

    @property
    def num_entries(self) -> int:
        """KV entries that the target's cache has room for."""
        return self.target.cache.capacity

    def num_needed(self, num_tokens: int, num_nodes: int) -> int:
        """KV entries that a text of `num_tokens` and a tree of `num_nodes` need, with those of a draft among them."""
        num_shared = self._caches.num_shared
        if num_shared:
            num_nodes = max(num_nodes, tree_room(self.asked.speculation, self.engine.target.device.type))
        return num_tokens + num_nodes + num_shared

    def reserve(self, num_entries: int) -> None:
        """Make room for `num_entries` in the target's KV cache, and in the draft's for the granted text and all rounds.

        On a GPU the draft's must not grow during the target's pass.
        """
        if num_entries > self.target.cache.capacity:
            self.engine.loaded.make_kv_room(self.target.cache, num_entries)
            self.target.cache.reserve(num_entries)
        if self._caches.draft is not None and len(self.text) > self._num_draft_tokens:
            self._num_draft_tokens = self.granted
            for text in (self._caches.draft, *self._caches.beside):
                text.reserve(self.granted + self._most_rows)

    @property
    def _most_rows(self) -> int:
        """Pending nodes of the draft."""
        return MAX_ROWS if self._shared is None else DRAFT_ROWS

    def _make_room(self, message: str) -> None:
        """After device memory ran out, drop the text's KV cache and reload the target. message: torch's error."""
        self.engine.loaded.make_room(message, self._caches.drop_target)

    def run(self) -> Generator[Step, None, None]:
        """One step per pass of its own, until the text ends."""
        alone = SharedPass(self._learnt.costs, max_nodes(self.engine.target.device.type))
        while True:
            with self.engine.turn:
                self.engine.loaded.check()
                (verdict,) = run_pass([self], alone, self._begin_again)
            if isinstance(verdict, OffspecError):
                raise verdict
            if verdict is None:  # a part of a long prompt
                continue
            step = self.step(verdict)
            yield step
            if step.finish_reason:
                return

    def _begin_again(self, message: str) -> None:
        """After a pass ran out of device memory, free some and start again from the same text."""
        self._make_room(message)
        self.resume()

    def pause(self) -> None:
        """Free the target's KV entries. `resume` must come before the next pass."""
        self._caches.drop_target()

    def resume(self) -> None:
        """Start again from the same text, whose dropped entries the next pass computes again."""
        retry_out_of_memory(lambda: self._begin(self.text), self._make_room)

    @property
    def num_rows(self) -> int:
        """Rows of its last pass."""
        return len(self._chain) + len(self._tree)

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return self.asked.sampling.prompt_logprobs and len(self._prompt_logprobs) < self._num_prompt - 1

    # ---------------------------------------------------------------------------------------- parts of a pass

    def draft(self, num_chain: int) -> Drafting[FloatArray | None]:
        """Draft for a pass that scores `num_chain` of the unscored tokens; a part of a prompt has no tree.

        The result is the probabilities of candidates that compete with other texts' for the pass, descending; None if
        the size of the tree does not depend on them.
        """
        self._chain, self._tree = self.text[self.target.length :][:num_chain], TokenTree.empty()
        self._is_prefilling = num_chain < self.num_unscored
        if self._is_prefilling:
            return None
        return (yield from self.catching(self._propose()))

    def _propose(self) -> Drafting[FloatArray | None]:
        max_depth = self.limit - self.stats.num_tokens - 1
        if self._competitor is not None:
            return (yield from self._competitor.prepare(self.text, max_depth))
        self._tree = self.drafter.propose(self.text, max_depth)
        return None

    def catching(self, drafting: Drafting[T]) -> Drafting[T | None]:
        """`drafting`, whose errors do not end other texts' drafting: a constraint's becomes this text's `fault`."""
        try:
            return (yield from drafting)
        except ConstraintError as exc:
            self.fault = exc
        except NumericalError as exc:
            self._go_on_without_draft(exc)
        return None

    def _go_on_without_draft(self, error: NumericalError) -> None:
        """Decode the rest of the text plainly: a draft's fault changes no text."""
        self.drafter, self._competitor = NoDrafter(), None
        self.stats.draft_fault = str(error)
        text = f"a text was decoded without the draft from some pass on, which changes no text ({error})"
        self.engine.loaded.note_once(Note(text, advice=True))

    def send(self, num_nodes: int | None) -> TextRows:
        """The rows of the pass. num_nodes: of the candidates; None: as many as the drafter wants."""
        if self._competitor is not None and not self._is_prefilling and self.fault is None:
            self._tree = self._competitor.send(num_nodes)
        tree = self._tree
        return TextRows(self._chain, tree.tokens, tree.depths, tree.mask())

    def verdict(self, rows: RowLogits) -> Verdict | OffspecError | None:
        """The verdict on the tree; None after a part of a prompt."""
        if self.fault is not None:
            return self.fault
        try:
            verdict = None
            if not self._is_prefilling:
                verdict = self.drafter.walk(self._tree, rows, self.sampler, len(self.text))
            self._report(rows, verdict)
        except TEXT_ERRORS as exc:
            return exc
        return verdict

    def _report(self, rows: RowLogits, verdict: Verdict | None) -> None:
        """Take the log-probabilities that the request asks for from a pass."""
        num_likeliest = self.asked.sampling.logprobs
        if num_likeliest is None:
            return
        if self._wants_prompt_logprobs:
            self._report_prompt(rows, num_likeliest)
        if verdict is not None:
            nodes, found = [ROOT, *verdict.path], list[TokenLogprob]()
            for first in range(0, len(nodes), SLICE_ROWS):
                logits = torch.stack([rows[node + 1] for node in nodes[first : first + SLICE_ROWS]])
                tokens = verdict.tokens[first : first + SLICE_ROWS]
                found += token_logprobs(logits, tokens, num_likeliest, len(self.text) + first)
            self._logprobs = found

    def _report_prompt(self, rows: RowLogits, num_likeliest: int) -> None:
        """Of those of the prompt's tokens that follow the chain's: a slice of rows at a time."""
        end = self.target.length  # of the chain, in the text
        begin, prompt, found = end - len(self._chain), self.text[: self._num_prompt], self._prompt_logprobs
        for first in range(0, rows.num_before, HEAD_ROWS):
            last, at = min(first + HEAD_ROWS, rows.num_before), begin + first + 1
            found += token_logprobs(rows.before(first, last), prompt[at : begin + last + 1], num_likeliest, at)
        if end < self._num_prompt:
            found += token_logprobs(rows[0][None], [prompt[end]], num_likeliest, end)

    @property
    def prepares_masks(self) -> bool:
        """Whether to compute a constraint's masks during the pass: on a GPU, or while layers are read."""
        engine = self.engine
        has_time = engine.target.device.type != "cpu" or engine.loaded.bytes_streamed > self._moved_before
        constraint = self.sampler.constraint
        if constraint is None or not has_time or self._is_prefilling:
            return False
        return not constraint.is_idle(self._tree.tokens)

    def prepare_masks(self, is_over: Callable[[], bool]) -> None:
        """Compute the masks that the walk may need, until `is_over`."""
        assert self.sampler.constraint is not None
        try:
            prepare_masks(self.sampler.constraint, self._tree, is_over)
        except TEXT_ERRORS as exc:
            self.fault = exc

    def extending(self, is_over: Callable[[], bool]) -> Drafting[None]:
        """Draft during the pass until `is_over`, in rounds that texts share."""
        if isinstance(self.drafter, CompetingDrafter):
            yield from self.catching(self.drafter.extending(is_over))

    def extend(self, is_over: Callable[[], bool]) -> None:
        """Draft during the pass until `is_over`, if the drafter's rounds cannot be shared."""
        if not isinstance(self.drafter, CompetingDrafter):
            try:
                self.drafter.extend(is_over)
            except NumericalError as exc:
                self._go_on_without_draft(exc)

    def commit(self, verdict: Verdict, rows: RowLogits) -> str:
        """Keep what the verdict accepted, tell the drafter, and extend the text.

        Returns torch's message if device memory ran out; the text is then complete, the caches are not.
        """
        message = ""
        try:
            self.target.keep(verdict.path)
            done = TargetPass(self.text, self._tree, verdict, rows, rows)
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
        stats, link = self.stats, self.engine.loaded.link_bytes_per_s
        stats.draft_s += draft_s
        stats.target_s += target_s
        if stats.num_passes == 0:
            stats.prefill_s, stats.ttft_s = stats.prefill_s + total_s, time.perf_counter() - self.asked.began
        else:
            stats.decode_s += total_s
        if self._is_prefilling:
            return
        stats.num_passes += 1
        stats.num_drafted_tokens += len(self._tree)
        self._observe_rest()
        if moved := self.engine.loaded.bytes_streamed - self._moved_before:
            stats.stream_bytes_per_pass = moved // stats.num_passes
            stats.stream_gb_per_s = moved / stats.target_s / 1e9
            stats.link_gb_per_s = link and link / 1e9
        stats.peak_host_bytes = peak_host_bytes()
        stats.peak_device_bytes = device_bytes(self.engine.target.device)[1]

    def _observe_rest(self) -> None:
        """Record since when the draft is switched off, and why, if it is for more than some passes."""
        stats = self.stats
        rest = self.drafter.rest if isinstance(self.drafter, ModelDrafter) else None
        self._resting_since = None if rest is None else self._resting_since or stats.num_passes
        stats.draft_off_since = stats.draft_round_s = stats.plain_pass_s = None
        if rest is not None and self._resting_since and stats.num_passes - self._resting_since >= SHORT_REST:
            stats.draft_off_since = self._resting_since
            stats.draft_round_s, stats.plain_pass_s = rest.round_s, rest.plain_s

    def observe(self, verdict: Verdict) -> None:
        """Call the request's observer, if it has one."""
        if self.asked.observer is not None:
            self.asked.observer(self._tree, verdict)

    def step(self, verdict: Verdict) -> Step:
        """The step of a verdict: its tokens up to the end of the text."""
        tokens, texts, stream = list[int](), list[str](), self._stream
        reason = None
        for token in verdict.tokens:
            tokens.append(token)
            texts.append("" if token in self.final else stream.push(token))
            if token in self.final:
                reason = "eos"
                break
            if stream.stopped is not None:
                reason = "stop"
                break
        self.stats.num_tokens += len(tokens)
        if self.stats.num_passes == 1:
            self.stats.num_first_pass_tokens = len(tokens)
        if reason is None and self.stats.num_tokens >= self.limit:
            reason = "length"
        if reason:
            texts[-1] += stream.flush()
        num_accepted = min(len(verdict.path), len(tokens))
        looked_up = self._looked_up(len(self.text) - len(verdict.tokens), tokens[:num_accepted])
        prompt_logprobs = tuple(self._prompt_logprobs) if self.stats.num_passes == 1 else ()
        logprobs = tuple(self._logprobs[: len(tokens)])
        step = Step(tokens, "".join(texts), replace(self.stats), reason, num_accepted, tuple(texts), looked_up)
        return replace(step, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _looked_up(self, position: int, accepted: Sequence[int]) -> LookedUp | None:
        """Where the tokens accepted at `position` stand in the files for lookup."""
        index = self.engine.lookup_index
        if not isinstance(index, FileIndex):
            return None
        return index.source(self.text[max(0, position - MAX_MATCH) : position], accepted)


def run_pass(
    requests: Sequence[Request], shared: SharedPass, begin_again: Callable[[str], None]
) -> list[Verdict | OffspecError | None]:
    """One pass of the target over the texts of these requests: propose, score, verify, commit, observe.

    Returns each request's verdict: None after a part of its prompt, an error if logits are not finite or its constraint
    allows no token. Each text is the same as in passes of its own, whatever else shares the pass. begin_again: called
    with torch's message after device memory ran out; it frees some, and starts all requests again from their texts.
    """
    started = time.perf_counter()
    passed = retry_out_of_memory(lambda: _score(requests, shared), begin_again)
    verdicts = passed.verdicts
    if not passed.logits:
        return verdicts
    of_all = zip(requests, verdicts, passed.logits, strict=True)
    messages = [request.commit(verdict, own) for request, verdict, own in of_all if isinstance(verdict, Verdict)]
    if any(messages):
        begin_again(max(messages))
    num_rows, num_tokens = sum(request.num_rows for request in requests), max(len(own.text) for own in requests)
    requests[0].engine.loaded.observe_pass(num_rows, num_tokens, passed.target_s)
    ended = time.perf_counter()
    for request in requests:
        request.count(passed.drafted_s, passed.target_s, ended - started)
    good = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
    if shared.is_shared:
        shared.end(passed.num_nodes, sum(len(verdict.tokens) for verdict in good), passed.target_s, ended - started)
    for request, verdict in zip(requests, verdicts, strict=True):
        if isinstance(verdict, Verdict):
            request.observe(verdict)
    return verdicts


@dataclass(frozen=True)
class ScoredPass:
    """A pass before anything of it is kept. logits: of each text. Seconds: of drafting, of the pass with verdicts."""

    verdicts: list[Verdict | OffspecError | None]
    logits: list[RowLogits]
    num_nodes: int
    drafted_s: float
    target_s: float


def _score(requests: Sequence[Request], shared: SharedPass) -> ScoredPass:
    """Propose, score and verify. If drafting failed for all texts, there is no pass."""
    engine, target, started = requests[0].engine, requests[0].target, time.perf_counter()
    with span("draft"):
        rows = _propose(requests, shared)
    drafted = time.perf_counter()
    if all(request.fault is not None for request in requests):
        return ScoredPass([request.fault for request in requests], [], 0, drafted - started, 0.0)
    with span("pass"), _drafting_ahead(requests, shared):
        texts = [(request.target, own) for request, own in zip(requests, rows, strict=True)]
        logits = score_together(texts, engine.draft.target_layers)
        target.synchronize()
    with span("walk"):
        verdicts = [request.verdict(own) for request, own in zip(requests, logits, strict=True)]
    num_nodes = sum(len(own.tokens) for own in rows)
    return ScoredPass(verdicts, logits, num_nodes, drafted - started, time.perf_counter() - drafted)


def _propose(requests: Sequence[Request], shared: SharedPass) -> list[TextRows]:
    """Draft for all requests, and share the pass among their trees."""
    began, engine = time.perf_counter(), requests[0].engine
    num_beside = prefill_rows(engine.learnt.costs.target, len(requests))
    chains = _chains([request.num_unscored for request in requests], num_beside)
    shared.begin(chains)
    draftings = [_drafting(request, num_chain, shared) for request, num_chain in zip(requests, chains, strict=True)]
    drafted = run_together(draftings, SharedRounds(shared).score)
    if not shared.is_shared:
        return [requests[0].send(None)]
    competing = [found for found in drafted if found is not None]
    sizes = iter(shared.sizes(competing, time.perf_counter() - began))
    return [
        request.send(None if found is None else next(sizes)) for request, found in zip(requests, drafted, strict=True)
    ]


def _drafting(request: Request, num_chain: int, shared: SharedPass) -> Drafting[FloatArray | None]:
    shared.next_text()
    return (yield from request.draft(num_chain))


def prefill_rows(costs: CostCurve, num_texts: int) -> int:
    """How many rows of prompts may join a pass of `num_texts` texts; costs: of passes by number of rows.

    At most twice as many as in measured passes, whose rows are taken to cost as much again.
    """
    if not costs.is_known:
        return PREFILL_ROWS

    def seconds(num_rows: int) -> float:
        return float(costs.seconds(np.array([num_texts + num_rows]))[0])

    plain_s, rows = seconds(0), FEWEST_PREFILL_ROWS
    most_s, pass_s = max(plain_s * PREFILL_SLOWDOWN, plain_s + PREFILL_S), seconds(rows)
    while rows < PREFILL_ROWS and costs.weight(num_texts + rows) > MEASURED:
        more = min(2 * rows, PREFILL_ROWS)
        more_s = seconds(more)
        if costs.weight(num_texts + more) <= MEASURED:
            more_s = max(more_s, plain_s + (pass_s - plain_s) * more / rows)
        if more_s > most_s:
            break
        rows, pass_s = more, more_s
    return rows


def _chains(unscored: Sequence[int], num_beside: int) -> list[int]:
    """How many of its unscored tokens each text scores in the next pass: of all prompts PASS_ROWS or `num_beside`.

    num_beside: of prompts beside texts past theirs. Prompts have equal shares, and what shorter ones leave goes to
    longer ones: so none waits for another to end.
    """
    chains = [1] * len(unscored)
    prompts = sorted((number, place) for place, number in enumerate(unscored) if number > 1)
    left = num_beside if 1 in unscored else PASS_ROWS
    for rank, (number, place) in enumerate(prompts):
        chains[place] = max(1, min(number, left // (len(prompts) - rank)))
        left -= chains[place]
    return chains


def _drafting_ahead(requests: Sequence[Request], shared: SharedPass) -> AbstractContextManager[None]:
    """Computes masks and drafts for these requests in the background, as far as their drafters want to."""
    sound = [request for request in requests if request.fault is None]
    drafting = [request for request in sound if request.drafter.wants_overlap]
    constrained = [request for request in sound if request.prepares_masks]
    if not drafting and not constrained:
        return nullcontext()

    def work(is_over: Callable[[], bool]) -> None:
        for request in constrained:
            request.prepare_masks(is_over)
        run_together([request.extending(is_over) for request in drafting], SharedRounds(shared).score)
        for request in drafting:
            request.extend(is_over)

    return in_background(work, requests[0].target.device)
