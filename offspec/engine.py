"""The engine: a target, perhaps a draft, and the loop that turns a prompt into text.

propose (scheduler, draft) → score (target) → verify (scheduler) → commit (both caches) → observe → yield.
The first pass takes the prompt together with the first tree, so that a streamed target is walked once for both.
Knows nothing of the terminal, of files' bytes, or of how trees are drafted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from pathlib import Path
from threading import RLock
from typing import TypeGuard

import torch

from offspec.loaders.cuda import device_bytes, limit_memory, release_memory, span
from offspec.loaders.hardware import Rates, read_hardware
from offspec.loaders.placement import Placement
from offspec.loaders.tiers import Progress, TieredWeights
from offspec.loaders.units import format_size
from offspec.scheduler.baselines.opt_tree import OptTreeDrafter
from offspec.scheduler.baselines.sequoia import SequoiaDrafter
from offspec.scheduler.controllers import controller_for
from offspec.scheduler.costs import Costs, Predict
from offspec.scheduler.drafter import Drafter, DraftRequest, NoDrafter
from offspec.scheduler.joint import BeamDrafter, joint_walk
from offspec.scheduler.learnt import Learnt
from offspec.scheduler.lookup import Guesser, PromptLookup
from offspec.scheduler.model_drafter import ModelDrafter
from offspec.scheduler.params import MAX_ROWS, SamplingParams, SpeculationParams, max_nodes
from offspec.scheduler.retrieval import Retrieval, SuffixIndex
from offspec.scheduler.sampling import Sampler
from offspec.scheduler.tree import TokenTree
from offspec.scheduler.verify import Logits, Verdict, exact_walk

from .background import in_background
from .checkpoints.exit_layers import ExitFile
from .checkpoints.opening import LOOKUP, SELF, ModelFiles, Note, choose_device, open_pair
from .drafts.early_exit import EarlyExit, shared_text
from .drafts.recall import Recall, RecallingText
from .errors import ContextLengthError, MemoryLimitError, UsageError
from .model.cuda_graphs import TreeGraphs, is_static
from .model.decoder import CachedDecoder, Decoder
from .model.names import EMBEDDING
from .model.row_logits import RowLogits
from .model.text_caches import TextCaches
from .planning.out_of_memory import Loading, first_line, with_fewer_residents
from .planning.out_of_memory import explain as explain_shortage
from .planning.plan import (
    Beside,
    MemoryOptions,
    Plan,
    all_resident,
    explain,
    is_blocked,
    measure_link,
    plan_here,
    quick_rates,
    settle_fused,
)
from .process import disable_cudnn_attention, set_num_threads
from .stats import Stats, peak_host_bytes
from .text.lookup_files import open_index
from .text.tokenizer import TextStream, Tokenizer
from .training.online import Aligner, Listener, check_learning, open_aligner

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
Observer = Callable[[TokenTree, Verdict], None]


@dataclass(frozen=True)
class Step:
    """What one pass brought: new token ids, the text that is certain by now, and the counters so far.

    finish_reason is None until the last step: eos (the model ended), stop (a stop text), length (max_new_tokens, or the
    context is full). num_accepted of the token ids were the draft's guesses; the last of a pass is the target's alone.
    texts[i] is what token_ids[i] made certain, often its own text; together they are `text`.
    """

    token_ids: list[int]
    text: str
    stats: Stats
    finish_reason: str | None = None
    num_accepted: int = 0
    texts: tuple[str, ...] = ()


class Engine:
    """A loaded target and, for speculation, a draft. Calibration of the draft is kept from request to request.

    Several requests may be under way, in several threads, too: their passes come one after the other.
    """

    def __init__(
        self,
        target: Decoder,
        tokenizer: Tokenizer,
        draft: Decoder | None = None,
        *,
        name: str = "",
        draft_name: str | None = None,
        max_context: int | None = None,
    ) -> None:
        """max_context: the most a text may have in tokens, where memory was planned for less than the model could take."""
        self.target, self.tokenizer, self.draft = target, tokenizer, draft
        self.name, self.draft_name = name, draft_name
        self.max_context = max_context or target.config.max_context
        self.notes: list[Note] = []
        self.plan: Plan | None = None
        self.link_bytes_per_s: float | None = None
        self._predict: Predict | None = None
        self.learnt = Learnt.nothing(target.config.vocab_size, shares_cores=target.device.type == "cpu")
        self.lookup_index: SuffixIndex | None = None
        self._recall = None if draft is None else Recall(draft, target)
        self.aligner: Aligner | None = None
        self.turn = RLock()  # held by whoever computes with the models
        self._loading: Loading[Decoder] | None = None  # how the target was loaded; None once it was loaded again
        self._draft_graphs: TreeGraphs | None = None
        has_own_pass = draft is not None and not isinstance(draft, EarlyExit)
        if draft is not None and has_own_pass and draft.device.type == "cuda" and is_static(draft):
            self._draft_graphs = TreeGraphs(draft, self.max_context + 1 + MAX_ROWS)

    @classmethod
    def load(
        cls,
        model: str = "builtin",
        *,
        draft: str = "auto",
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        vram: int | None = None,
        ram: int | None = None,
        context: int | None = None,
        tree: int | None = None,
        synchronous: bool = False,
        progress: Progress | None = None,
        lookup_files: Sequence[str | Path] = (),
        learn: bool = False,
        learn_file: str | Path | None = None,
        exit_file: str | Path | None = None,
        chats: bool = False,
    ) -> Engine:
        """Load MODEL (a folder, a hub id, or `builtin`) and its draft; what does not fit in memory is streamed.

        draft: auto (the built-in pair's own; lookup for other models), none, lookup (no model: what stood in the text
        before, and what the target said), self (the target's first layers and the exit layer of exit_file, or the one that was
        made last for this target), or a model like MODEL. lookup_files: text files to look up in as well. device: auto, cpu,
        cuda or cuda:N. dtype: auto, bf16, fp16, fp32. vram, ram: bytes that may be used; None is what is free.
        context: tokens to make room for; None is up to `planning.DEFAULT_CONTEXT`. tree: nodes to make room for beside them, where
        a larger budget will be asked for than is found by itself. synchronous: read each streamed layer
        when it is needed (the ring's plain twin). progress(bytes_done, bytes_total) follows the loading of what stays.
        learn: the draft may learn between requests (`learn`). learn_file: what it learnt before; without `learn` it must be there.
        chats: it will be given messages; a model without a chat template is refused before its weights are read.
        What was chosen automatically stands in `notes`, with its reason, where everything went in `plan`.
        Raises OffspecError's children for whatever cannot be loaded or does not fit together.
        """
        if threads is not None:
            if threads < 1:
                raise UsageError(f"threads must be at least 1, not {threads}")
            set_num_threads(threads)
        notes: list[Note] = []
        place = choose_device(device, notes)
        # Headers and tokenizers of both first, so that what cannot work is refused before gigabytes are read.
        pair = open_pair(model, draft, revision=revision, dtype=dtype, device_type=place.type, notes=notes)
        if chats:
            pair.tokenizer.check_chat_template()
        learn_file, exit_file = (None if file is None else Path(file) for file in (learn_file, exit_file))
        learns = learn or learn_file is not None
        if learns:
            check_learning(learn_file, has_draft=pair.draft is not None, writes=learn)
        early = _find_exit(pair.target, pair.draft_name, exit_file, notes)
        if place.type == "cuda":  # what torch keeps of an engine that was closed would count as taken
            release_memory(place)
        grant = MemoryOptions(vram, ram, context, tree)
        plan = plan_here(pair.target, pair.draft, read_hardware(place), grant, Beside(learns, early))
        if place.type == "cuda":
            limit_memory(plan.placement.limits.device if vram is not None else None, place)
        link = measure_link(plan, pair.target, place)
        notes += explain(plan, grant, link)
        rates = quick_rates(pair.target, place, link)
        packed = [model for model in (pair.target, pair.draft) if model is not None]
        if (fused := settle_fused(packed, place)) is not None:
            notes.append(fused)

        def load_target(plan: Plan) -> Decoder:
            return load_decoder(
                pair.target, plan.placement, place, EMBEDDING, synchronous=synchronous, progress=progress
            )

        def load_both(plan: Plan) -> tuple[Decoder | None, Aligner | None, Decoder]:
            guesser = None
            if pair.draft is not None:
                guesser = load_decoder(pair.draft, all_resident(pair.draft), place, is_written=learns)
            aligner = open_aligner(guesser, learn_file, listens=learn) if learns and guesser is not None else None
            target = load_target(plan)
            if early is not None:
                guesser = EarlyExit(target, early.exit_layer, early.load(target.dtype, place))
            return guesser, aligner, target

        leaner = partial(with_fewer_residents, target=pair.target, draft=pair.draft)
        plan, (guesser, aligner, target) = Loading(load_both, leaner, place).within_memory(plan, notes)
        if isinstance(target.weights, TieredWeights) and (unpinned := target.weights.unpinned_bytes):
            what = f"the system does not allow {format_size(unpinned)} of weights in RAM to be page-locked"
            remedy = "raise its limit (ulimit -l, the container's)"
            notes.append(Note(f"{what}, so they are copied more slowly; {remedy}", advice=True))
        engine = cls(target, pair.tokenizer, guesser, name=model, draft_name=pair.draft_name, max_context=plan.context)
        if early is None:  # whose weights are the target's
            engine._loading = Loading(load_target, leaner, place)
        engine.notes, engine.aligner = notes, aligner
        engine.follow(plan, rates, link)
        if lookup_files:
            engine.lookup_index = open_index(lookup_files, pair.tokenizer)
        return engine

    def follow(self, plan: Plan, rates: Rates, link_bytes_per_s: float | None) -> None:
        """Take over what was planned and measured: what passes will take is predicted from it."""
        self.plan, self.link_bytes_per_s = plan, link_bytes_per_s
        self._predict = partial(plan.predict_pass_s, rates)
        self.learnt.costs = Costs(self._predict)

    def close(self) -> None:
        """Lets go of the memory, and joins what reads ahead; the engine cannot be used afterwards."""
        self.target.weights.close()
        if self._draft_graphs is not None:
            self._draft_graphs.close()
        if self.draft is not None:
            self.draft.weights.close()

    def shed(self, told: str) -> None:
        """Load the target anew with fewer layers that stay, after device memory ran out; once.

        told: what torch said. The target's caches are to be made anew. Raises MemoryLimitError, explained.
        """
        loading, plan, self._loading = self._loading, self.plan, None
        if plan is None or loading is None:
            where = self.target.device
            raise MemoryLimitError(
                explain_shortage(plan, where, told) if plan else f"{where} ran out of memory ({told})"
            )
        self.target.weights.close()
        self.plan, self.target = loading.again(plan, told, self.notes)

    def with_draft(self, draft: Decoder | None, name: str | None) -> Engine:
        """The same target with another draft (or none), calibrated afresh."""
        fresh = Engine(
            self.target, self.tokenizer, draft, name=self.name, draft_name=name, max_context=self.max_context
        )
        fresh._predict, fresh.learnt.costs = self._predict, Costs(self._predict)
        fresh.lookup_index = self.lookup_index
        fresh.turn = self.turn  # it is the same target
        return fresh

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: raw text, chat messages (through the chat template), or ids as they are."""
        if isinstance(prompt, str):
            self.tokenizer.check_length(prompt, self.max_context)
            ids = self.tokenizer.encode(prompt)
        elif _is_chat(prompt):
            ids = self.tokenizer.encode_chat(prompt, self.max_context)
        elif _is_ids(prompt):
            ids = [index(token) for token in prompt]
        else:
            raise UsageError("a prompt is a text, a list of token ids, or a list of messages with role and content")
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        if bad := [token for token in ids if not 0 <= token < self.target.config.vocab_size]:
            raise UsageError(f"token id {bad[0]} is outside the model's vocabulary of {self.target.config.vocab_size}")
        return ids

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        caches: TextCaches | None = None,
        observer: Observer | None = None,
    ) -> Generator[Step, None, None]:
        """Generate text for a prompt, a step a pass; the text appears as it is accepted.

        The text is that of plain decoding (`SpeculationParams(budget=0)`) with the same seed, token for token, whatever
        the draft; with `SpeculationParams(accept="joint")` it is another, and the statistics say so (`is_lossy`). Closing the
        iterator between steps leaves the engine ready for the next request.
        caches: kept from an earlier request (`new_caches`); what the prompt shares with its text is not scored again.
        observer: shown every tree with its verdict, as the pass ends.
        Raises ContextLengthError or UsageError at once, NumericalError while running.
        """
        began = time.perf_counter()
        params, speculation = params or SamplingParams(), speculation or SpeculationParams()
        speculation.check_sampling(params)
        if speculation.is_lossy and self.draft is None:
            raise UsageError(
                "joint acceptance weighs the target against a draft model, and there is none; give --draft PATH"
            )
        text = self.encode(prompt)
        room = self.max_context - len(text)
        if room < 1:
            raise ContextLengthError(self._too_long(len(text)))
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(32))
        request = _Request(
            self,
            text,
            params,
            min(params.max_new_tokens, room),
            speculation,
            began,
            caches or self.new_caches(),
            observer,
        )
        return request.run()

    def learn(self, stats: Stats) -> None:
        """Let the draft learn from what the target said in the requests so far, if it was loaded with `learn`.

        To be called when a request has ended; what it took is counted in `stats`, that request's. Text does not change by it.
        Left by an exception (Ctrl-C), the draft is as it was. Keys and values that a conversation's caches hold of the draft
        as it was stay: they guess a little worse, and scoring them anew would cost a pass over the whole text.
        """
        if self.aligner is None or not self.aligner.is_listening:
            return
        with self.turn:
            learnt = self.aligner.learn(stats.prefill_s + stats.decode_s)
        stats.learn_s, stats.learn_steps = learnt.seconds, learnt.num_steps
        stats.learnt_loss, stats.unlearnt_loss = learnt.loss, learnt.loss_before

    def new_caches(self, num_tokens: int = 0, num_nodes: int = 0) -> TextCaches:
        """Empty KV caches of one text, to be kept from request to request; with room at once for so many tokens and a tree beside them.

        Where device memory runs out for it, the target is loaded anew (`shed`).
        """
        with self.turn:
            while True:
                try:
                    return self._empty_caches(num_tokens, num_nodes)
                except torch.OutOfMemoryError as exc:
                    told = first_line(exc)
                self.shed(told)  # not in the handler: a traceback keeps what was made

    def _empty_caches(self, num_tokens: int, num_nodes: int) -> TextCaches:
        capacity, drafted = num_tokens + num_nodes, num_tokens + MAX_ROWS if num_tokens else 0
        if isinstance(self.draft, EarlyExit):
            return TextCaches(*shared_text(self.target, self.draft, capacity))
        draft = None
        if self._draft_graphs is not None:
            draft = self._draft_graphs.text(drafted)
        elif self.draft is not None:
            draft = CachedDecoder(self.draft, drafted)
        return TextCaches(CachedDecoder(self.target, capacity), draft)

    def _too_long(self, num_tokens: int) -> str:
        planned, longest = self.max_context, self.target.config.max_context
        where, more = "the model's context is", ""
        if planned < longest:
            where, more = "memory was planned for", f", or give --context (up to {longest})"
        return (
            f"the prompt has {num_tokens} tokens and {where} {planned}, which leaves no room for an answer; "
            f"shorten the prompt{more}"
        )

    def drafter(
        self,
        model: CachedDecoder | None,
        sampler: Sampler,
        speculation: SpeculationParams,
        final: frozenset[int],
        num_unscored: int | None = None,
    ) -> Drafter:
        """A drafter for one request. `model`: the draft with the text's KV cache. num_unscored: tokens of the text that the target
        has to score, where these are not as many as the draft has to.
        """
        if model is not None and speculation.is_lossy:
            return BeamDrafter(model, sampler, speculation, final)
        guessers = self._guessers(speculation)
        if speculation.budget == 0 or (model is None and not guessers):
            return NoDrafter()
        if isinstance(self.draft, EarlyExit):  # drafting and the pass share the first layers' caches
            speculation = replace(speculation, overlap=False)
        is_coupled = speculation.scoring == "coupled"
        if model is not None and speculation.tree == "sequoia":
            return SequoiaDrafter(model, sampler, speculation, self.learnt.acceptance, final, coupled=is_coupled)
        if model is not None and speculation.tree == "opt-tree":
            return OptTreeDrafter(model, sampler, speculation, final, coupled=is_coupled)
        recalling = None
        if model is not None and self._recall is not None and speculation.recall:
            recalling = RecallingText(model, self.target, self._recall)
        return ModelDrafter(
            recalling or model,
            DraftRequest(sampler, final, num_unscored),
            speculation,
            self.learnt,
            guessers=guessers,
            corrector=recalling,
            controller=controller_for(speculation, self.learnt.costs, max_nodes(self.target.device.type)),
        )

    def _guessers(self, speculation: SpeculationParams) -> list[Guesser]:
        """Those that need no model."""
        is_alone = self.draft_name == LOOKUP
        has_draft = is_alone or self.draft is not None
        found: list[Guesser] = []
        if has_draft and speculation.lookup:
            found.append(PromptLookup(self.learnt.lookups))
        if self.lookup_index is not None:
            found.append(Retrieval(self.lookup_index, self.learnt.retrievals))
        if is_alone or (has_draft and speculation.recycling):
            found.append(self.learnt.recycling)
        return found

    @property
    def guesses(self) -> bool:
        """Whether anything does: a draft, what is looked up in its stead, or texts to look up in."""
        return self.draft is not None or self.draft_name is not None or self.lookup_index is not None

    def sharpness(self, *, greedy: bool) -> float:
        """The sharpness fitted so far (see `scheduler.calibration`)."""
        return self.learnt.calibration.sharpness(greedy=greedy).value


def _tree_room(speculation: SpeculationParams, device_type: str) -> int:
    """The most nodes that a tree of the target may have."""
    if speculation.is_lossy:
        return speculation.beam * speculation.gamma
    return max_nodes(device_type) if speculation.budget is None else speculation.budget


class _Request:
    """One request under way. `text` is the prompt and every token emitted; the caches hold all of it but the last."""

    def __init__(
        self,
        engine: Engine,
        text: list[int],
        params: SamplingParams,
        limit: int,
        speculation: SpeculationParams,
        began: float,
        caches: TextCaches,
        observer: Observer | None,
    ) -> None:
        assert params.seed is not None
        self.engine, self.params, self.limit, self.began, self.observer = engine, params, limit, began, observer
        self.final = frozenset() if params.ignore_eos else engine.tokenizer.eos_ids
        self.speculation, self._caches, self._longest = speculation, caches, len(text) + limit
        self.sampler = Sampler(params, params.seed, engine.target.config.vocab_size, engine.target.device)
        self.sampler.extend(text)
        with engine.turn:
            num_prefilled = self._begin_within_memory(text)
        self.listener: Listener | None = None
        self.stats = Stats(
            num_prompt_tokens=len(text),
            num_prefilled_tokens=num_prefilled,
            seed=params.seed,
            is_lossy=speculation.is_lossy,
        )

    def _begin_within_memory(self, text: list[int]) -> int:
        """`_begin`; where device memory runs out for the caches, again with fewer of the target's layers staying."""
        while True:
            try:
                return self._begin(text)
            except torch.OutOfMemoryError as exc:
                told = first_line(exc)
            self._shed(told)

    def _shed(self, told: str) -> None:
        cached = self._caches.target
        cached.cache = cached.decoder.new_cache()  # an empty one: what the old one takes is wanted
        self.engine.shed(told)

    def _begin(self, text: list[int]) -> int:
        """Caches and a drafter for what follows `text`; returns how many of its tokens the target has to score."""
        caches, target = self._caches, self.engine.target
        num_prefilled = caches.rewind(text)
        caches.target.decoder = target  # another one, where the model was loaded again since (`Engine.shed`)
        self.text, self.target = caches.text, caches.target  # one list: the caches know what they hold
        self.target.cache.reserve(self._longest + _tree_room(self.speculation, target.device.type))
        if caches.draft is not None:  # all that may be drafted: on a GPU it must not grow beside the target's pass
            caches.draft.reserve(self._longest + MAX_ROWS)
        self.drafter = self.engine.drafter(caches.draft, self.sampler, self.speculation, self.final, num_prefilled)
        self._moved_before = target.weights.bytes_streamed
        return num_prefilled

    def run(self) -> Generator[Step, None, None]:
        stream = self.engine.tokenizer.stream(self.params.stop, skip_special_tokens=True)
        while True:
            with self.engine.turn:
                verdict = self._iterate_within_memory()
            step = self._step(verdict, stream)
            yield step
            if step.finish_reason:
                return

    def _iterate_within_memory(self) -> Verdict:
        """`_iterate`; where device memory runs out, again with fewer of the target's layers staying."""
        while True:
            try:
                return self._iterate()
            except torch.OutOfMemoryError as exc:
                told = first_line(exc)
            moved = self.engine.target.weights.bytes_streamed - self._moved_before
            self._shed(told)
            self._begin_within_memory(self.text)
            self._moved_before -= moved

    def _iterate(self) -> Verdict:
        """One iteration: propose, score, verify, commit, observe."""
        started = time.perf_counter()
        text, target, drafter = self.text, self.target, self.drafter
        with span("draft"):
            tree = drafter.propose(text, max_depth=self.limit - self.stats.num_tokens - 1)
        drafted = time.perf_counter()
        with span("pass"), in_background(drafter.extend, target.device) if drafter.wants_overlap else nullcontext():
            logits = target.score_rows(text[target.length :], tree.tokens, tree.depths, tree.mask())
            target.synchronize()
        with span("walk"):
            verdict = self._judge(tree, logits)
        scored = time.perf_counter()
        target.keep(verdict.path)
        drafter.observe(tree, verdict, logits)
        self._listen(tree, verdict, logits)
        text += verdict.tokens
        self.sampler.extend(verdict.tokens)
        self._count(len(tree), drafted - started, scored - drafted, time.perf_counter() - started)
        if self.observer is not None:
            self.observer(tree, verdict)
        return verdict

    def _listen(self, tree: TokenTree, verdict: Verdict, logits: RowLogits) -> None:
        """Take down what the target thought, where the draft is to learn from it: in the first pass along the prompt, too."""
        if self.listener is None and self.engine.aligner is not None:
            self.listener = self.engine.aligner.listen(self.text, logits)
        if self.listener is not None:
            self.listener.observe(tree, verdict, logits)

    def _judge(self, tree: TokenTree, logits: Logits) -> Verdict:
        position, tau = len(self.text), self.speculation.tau
        if self.speculation.is_lossy:
            return joint_walk(tree, logits, self.sampler, position, tau=tau, final=self.final)
        return exact_walk(tree, logits, self.sampler, position)

    def _count(self, num_drafted: int, draft_s: float, target_s: float, total_s: float) -> None:
        stats = self.stats
        stats.draft_s += draft_s
        stats.target_s += target_s
        stats.num_passes += 1
        stats.num_drafted_tokens += num_drafted
        if stats.num_passes == 1:
            stats.prefill_s, stats.ttft_s = total_s, time.perf_counter() - self.began
        else:
            stats.decode_s += total_s
        if moved := self.engine.target.weights.bytes_streamed - self._moved_before:
            stats.stream_bytes_per_pass = moved // stats.num_passes
            stats.stream_gb_per_s = moved / stats.target_s / 1e9
            stats.link_gb_per_s = self.engine.link_bytes_per_s and self.engine.link_bytes_per_s / 1e9
        stats.peak_host_bytes = peak_host_bytes()
        stats.peak_device_bytes = device_bytes(self.engine.target.device)[1]

    def _step(self, verdict: Verdict, stream: TextStream) -> Step:
        """The tokens of a verdict up to where the text ends, as text."""
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


def _is_chat(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    return len(prompt) > 0 and all(isinstance(part, Mapping) for part in prompt)


def _is_ids(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[int]]:
    return all(hasattr(part, "__index__") for part in prompt)  # numpy's integers too, but no float


# ------------------------------------------------------------------------------------------------ loading


def _find_exit(target: ModelFiles, draft_name: str | None, file: Path | None, notes: list[Note]) -> ExitFile | None:
    """The exit layer that `--draft self` calls for."""
    if draft_name != SELF:
        if file is not None:
            raise UsageError(f"--exit-file {file} is for --draft self; give that too, or leave it out")
        return None
    found = ExitFile.find(target) if file is None else ExitFile.open(file, target)
    notes.append(Note(f"draft: the first {found.exit_layer} of {target.config.num_layers} layers and {found.path}"))
    return found


def load_decoder(
    model: ModelFiles,
    placement: Placement,
    device: torch.device,
    embedding: str | None = None,
    *,
    synchronous: bool = False,
    progress: Progress | None = None,
    is_written: bool = False,
) -> Decoder:
    """Load what stays, arm the stream for the rest. `embedding` may lie away from the device, unless the head needs it.

    is_written: its weights will be written to (`--learn`), and have to lie as they are.
    """
    if device.type == "cuda":
        disable_cudnn_attention()
    weights = TieredWeights(
        model.stored,
        placement,
        dtype=model.dtype,
        device=device,
        embedding=None if model.config.tied_head else embedding,
        synchronous=synchronous,
        progress=progress,
        blocked=is_blocked(model, device) and not is_written,
    )
    return Decoder(model.config, weights, dtype=model.dtype, device=device)
