"""The loop of one request, from a prompt to its text.

propose (draft) → score (target) → verify (scheduler) → commit (both caches) → observe → yield.
The first pass takes the prompt and the first tree together, so that the weights are streamed once for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offspec.loaders.cuda import device_bytes, span
from offspec.scheduler.drafter import DraftRequest
from offspec.scheduler.joint import joint_walk
from offspec.scheduler.params import MAX_ROWS, SamplingParams, SpeculationParams, tree_room
from offspec.scheduler.sampling import Sampler
from offspec.scheduler.tree import TokenTree
from offspec.scheduler.verify import Logits, TargetPass, Verdict, exact_walk

from .background import in_background
from .drafts.base import DraftTask
from .model.text_caches import TextCaches
from .planning.out_of_memory import retry_out_of_memory
from .stats import Stats, peak_host_bytes
from .text.text_stream import TextStream

if TYPE_CHECKING:
    from .engine import Engine

Observer = Callable[[TokenTree, Verdict], None]


@dataclass(frozen=True)
class Step:
    """The result of one pass: new token ids, the text that is final by now, and the counters so far.

    finish_reason is None until the last step: eos (the model ended the text), stop (a stop text), length
    (max_new_tokens, or the context is full). The draft proposed num_accepted of the token ids; the last token of a pass
    comes from the target alone. texts[i] is the text that became final with token_ids[i], usually that token's own;
    joined, they are `text`.
    """

    token_ids: list[int]
    text: str
    stats: Stats
    finish_reason: str | None = None
    num_accepted: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RequestParams:
    """The parameters of a request. seed: the sampling seed, never None. began: the start time, by `perf_counter`."""

    sampling: SamplingParams
    seed: int
    speculation: SpeculationParams
    observer: Observer | None
    began: float


class Request:
    """A running request. `text` is the prompt and all emitted tokens; the caches hold all of it but the last token."""

    def __init__(self, engine: Engine, text: list[int], asked: RequestParams, caches: TextCaches) -> None:
        """text: the prompt's token ids. They and `max_new_tokens` must fit the context together."""
        self.engine, self.asked, self.limit = engine, asked, asked.sampling.max_new_tokens
        self.final = frozenset() if asked.sampling.ignore_eos else engine.tokenizer.eos_ids
        self._caches, self._longest = caches, len(text) + self.limit
        self.sampler = Sampler(asked.sampling, asked.seed, engine.target.config.vocab_size, engine.target.device)
        self.sampler.extend(text)
        self._moved_before = engine.loaded.bytes_streamed
        with engine.turn:
            num_prefilled = retry_out_of_memory(lambda: self._begin(text), self._make_room)
        self._listen = engine.draft.new_listener()
        self.stats = Stats(
            num_prompt_tokens=len(text),
            num_prefilled_tokens=num_prefilled,
            seed=asked.seed,
            is_lossy=asked.speculation.is_lossy,
        )

    def _begin(self, text: list[int]) -> int:
        """Prepare the caches and a drafter for `text`. Returns how many of its tokens the target must score."""
        caches, engine, speculation = self._caches, self.engine, self.asked.speculation
        num_prefilled = caches.rewind(text)
        self.text, self.target = caches.text, caches.target  # the same list as the caches'
        num_entries = self._longest + tree_room(speculation, engine.target.device.type) + caches.num_shared
        engine.loaded.make_kv_room(self.target.cache, num_entries)
        self.target.cache.reserve(num_entries)
        if caches.draft is not None:  # reserve for all rounds: on a GPU it must not grow during the target's pass
            caches.draft.reserve(self._longest + MAX_ROWS)
        asked = DraftRequest(self.sampler, self.final, num_prefilled)
        task = DraftTask(caches.draft, engine.target, asked, speculation, engine.lookup_index)
        self.drafter = engine.draft.drafter(task, engine.learnt)
        return num_prefilled

    def _make_room(self, message: str) -> None:
        """After device memory ran out, drop the text's KV cache and reload the target. message: torch's error."""
        self.engine.loaded.make_room(message, self._caches.drop_target)

    def run(self) -> Generator[Step, None, None]:
        """One step per pass, until the text ends."""
        stream = self.engine.tokenizer.stream(self.asked.sampling.stop, skip_special_tokens=True)
        while True:
            with self.engine.turn:
                self.engine.loaded.check()
                verdict = retry_out_of_memory(self._iterate, self._begin_again)
            step = self._step(verdict, stream)
            yield step
            if step.finish_reason:
                return

    def _begin_again(self, message: str) -> None:
        """After a pass ran out of device memory, free some and start again from the same text."""
        self._make_room(message)
        retry_out_of_memory(lambda: self._begin(self.text), self._make_room)

    def _iterate(self) -> Verdict:
        """One iteration: propose, score, verify, commit, observe."""
        started = time.perf_counter()
        text, target, drafter = self.text, self.target, self.drafter
        with span("draft"):
            tree = drafter.propose(text, max_depth=self.limit - self.stats.num_tokens - 1)
        drafted = time.perf_counter()
        with span("pass"), in_background(drafter.extend, target.device) if drafter.wants_overlap else nullcontext():
            chain, layers = text[target.length :], self.engine.draft.target_layers
            rows = target.score_rows(chain, tree.tokens, tree.depths, tree.mask(), layers)
            target.synchronize()
        with span("walk"):
            verdict = self._judge(tree, rows)
        scored = time.perf_counter()
        target.keep(verdict.path)
        done = TargetPass(text, tree, verdict, rows, rows)
        drafter.observe(done)
        self._listen(done)
        text += verdict.tokens
        self.sampler.extend(verdict.tokens)
        self._count(len(tree), drafted - started, scored - drafted, time.perf_counter() - started)
        if self.asked.observer is not None:
            self.asked.observer(tree, verdict)
        return verdict

    def _judge(self, tree: TokenTree, logits: Logits) -> Verdict:
        position, speculation = len(self.text), self.asked.speculation
        if speculation.is_lossy:
            return joint_walk(tree, logits, self.sampler, position, tau=speculation.tau, final=self.final)
        return exact_walk(tree, logits, self.sampler, position)

    def _count(self, num_drafted: int, draft_s: float, target_s: float, total_s: float) -> None:
        stats, link = self.stats, self.engine.loaded.link_bytes_per_s
        stats.draft_s += draft_s
        stats.target_s += target_s
        stats.num_passes += 1
        stats.num_drafted_tokens += num_drafted
        if stats.num_passes == 1:
            stats.prefill_s, stats.ttft_s = total_s, time.perf_counter() - self.asked.began
        else:
            stats.decode_s += total_s
        if moved := self.engine.loaded.bytes_streamed - self._moved_before:
            stats.stream_bytes_per_pass = moved // stats.num_passes
            stats.stream_gb_per_s = moved / stats.target_s / 1e9
            stats.link_gb_per_s = link and link / 1e9
        stats.peak_host_bytes = peak_host_bytes()
        stats.peak_device_bytes = device_bytes(self.engine.target.device)[1]

    def _step(self, verdict: Verdict, stream: TextStream) -> Step:
        """The step of a verdict: its tokens up to the end of the text."""
        tokens, texts = list[int](), list[str]()
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
        return Step(tokens, "".join(texts), replace(self.stats), reason, num_accepted, tuple(texts))
