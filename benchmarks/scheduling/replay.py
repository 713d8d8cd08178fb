"""Evaluates drafters without running the target: records a text once, and replays every drafter along it.

The text depends only on target, prompt, parameters and seed. So the accepted nodes of a tree are those that follow the
recorded text. A virtual clock counts the time on a simulated machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.model.decoder import CachedDecoder
from offspec.scheduler.drafting.drafter import Drafter, LogitCorrector, TreeModel
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, IntArray, TokenTree
from offspec.scheduler.trees.verify import Logits, TargetPass, TargetStates, Verdict, verify_exactly
from offspec.scheduler.trees.vocabulary import Vocabulary
from offspec.text.prompt import Prompt

# ------------------------------------------------------------------------------------------------ recording


@dataclass(frozen=True)
class Recording:
    """A text of the target: token_ids after prompt_ids, with these parameters (the seed is set).

    limit: the maximum number of tokens by parameters and context; the text may end earlier.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    limit: int
    params: SamplingParams

    def sampler(self, vocab_size: int) -> Sampler:
        """A sampler with the noise of the recorded text."""
        assert self.params.seed is not None
        return Sampler(self.params, self.params.seed, vocab_size)

    def chain(self) -> TokenTree:
        """The text but its last token, as a tree without branches."""
        tokens = np.array(self.token_ids[:-1], dtype=np.int64)
        places = np.arange(len(tokens))
        return TokenTree(tokens, places - 1, places + 1, np.zeros(len(tokens)))


def record(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, folder: Path) -> list[Recording]:
    """Decode each prompt plainly, prompt i with seed params.seed + i, unless a recording of it lies in `folder`.

    One pass checks a stored recording, because weights may have changed under the same name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recordings: list[Recording] = []
    for index, prompt in enumerate(prompts):
        own = replace(params, seed=(params.seed or 0) + index)
        ids = engine.encode(prompt)
        file = folder / f"{_key(engine, ids, own)}.json"
        found = _load(file, own)
        if found is None or not is_true(engine, found):
            found = _decoded(engine, ids, own)
            _save(file, found)
        recordings.append(found)
    return recordings


def is_true(engine: Engine, recording: Recording) -> bool:
    """Whether the target generates this text, checked by one pass over it as a chain."""
    sampler = recording.sampler(engine.target.config.vocab_size)
    sampler.extend(recording.prompt_ids)
    tree = recording.chain()
    logits = CachedDecoder(engine.target).score_rows(recording.prompt_ids, tree.tokens, tree.depths, tree.parents)
    return verify_exactly(tree, logits, sampler, len(recording.prompt_ids)).tokens == recording.token_ids


def _decoded(engine: Engine, ids: list[int], params: SamplingParams) -> Recording:
    steps = engine.generate(ids, params, SpeculationParams(budget=0))
    limit = min(params.max_new_tokens, engine.max_context - len(ids))
    return Recording(ids, [token for step in steps for token in step.token_ids], limit, params)


def _key(engine: Engine, ids: Sequence[int], params: SamplingParams) -> str:
    asked = json.dumps([engine.name, engine.max_context, list(ids), asdict(params)])
    return sha256(asked.encode()).hexdigest()[:24]


def _load(file: Path, params: SamplingParams) -> Recording | None:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        return Recording(said["prompt_ids"], said["token_ids"], said["limit"], params)
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # absent, or cut short
        return None


def _save(file: Path, recording: Recording) -> None:
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(recording)), encoding="utf-8")
    unfinished.replace(file)


# ------------------------------------------------------------------------------------------------ time


NO_LOGITS: Logits = torch.empty(0, 0)  # a recorded text has none


class VirtualClock:
    """Seconds of a simulated machine; `now` can replace `time.perf_counter`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds


@dataclass(frozen=True)
class Costs:
    """Seconds of a target's passes and of its draft's rounds.

    A pass takes the maximum of streaming its weights (stream_s) and computing its rows. A row is a tree node or a new
    token of the text. Defaults: 70B in NF4 streamed to an RTX 4090, constant up to 500 rows, and a draft with 12 ms per
    round.
    """

    stream_s: float = 0.9
    pass_launch_s: float = 0.0
    pass_row_s: float = 0.9 / 500
    round_launch_s: float = 0.012
    round_row_s: float = 0.0

    def pass_s(self, num_rows: int) -> float:
        """Of one pass of the target."""
        return max(self.stream_s, self.pass_launch_s + num_rows * self.pass_row_s)

    def round_s(self, num_rows: int) -> float:
        """Of one forward of the draft."""
        return self.round_launch_s + num_rows * self.round_row_s


class CountsCalls(Protocol):
    num_calls: int


class ClockedModel:
    """A TreeModel whose every `score` takes `seconds(rows)` on a clock."""

    def __init__(self, model: TreeModel, clock: VirtualClock, seconds: Callable[[int], float]) -> None:
        self._model, self._clock, self._seconds = model, clock, seconds
        self.num_calls = 0

    @property
    def vocabulary(self) -> Vocabulary:
        return self._model.vocabulary

    @property
    def max_context(self) -> int:
        return self._model.max_context

    @property
    def length(self) -> int:
        return self._model.length

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        self.num_calls += 1
        self._clock.advance(self._seconds(len(chain) + len(tokens)))
        return self._model.score(chain, tokens, depths, parents)

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        self._model.keep(path, pending)


class ClockedCorrector:
    """A LogitCorrector whose every `corrected` takes `seconds(rows)` on a clock."""

    def __init__(self, corrector: LogitCorrector, clock: VirtualClock, seconds: Callable[[int], float]) -> None:
        self._corrector, self._clock, self._seconds = corrector, clock, seconds

    def observe(self, rows: IntArray, nodes: IntArray, states: TargetStates) -> None:
        self._corrector.observe(rows, nodes, states)

    def corrected(self, rows: IntArray) -> Tensor:
        self._clock.advance(self._seconds(len(rows)))
        return self._corrector.corrected(rows)


# ------------------------------------------------------------------------------------------------ replaying


@dataclass(frozen=True)
class Replayed:
    """The result of a drafter. draft_s: seconds in which the target waited for the draft. total_s: all seconds."""

    num_tokens: int = 0
    num_passes: int = 0
    num_rounds: int = 0
    num_drafted_tokens: int = 0
    draft_s: float = 0.0
    total_s: float = 0.0

    @classmethod
    def total(cls, parts: Iterable[Replayed]) -> Replayed:
        """Of several texts together."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes

    @property
    def tokens_per_s(self) -> float:
        """Over all passes, including the first with the prompt."""
        return self.num_tokens / self.total_s


def replay(
    recording: Recording,
    drafter: Drafter,
    sampler: Sampler,
    clock: VirtualClock,
    costs: Costs,
    draft: CountsCalls | None = None,
    target: CachedDecoder | None = None,
    layers: Sequence[int] = (),
) -> Replayed:
    """The engine's loop with a recorded text as the target, and `costs.pass_s` per pass on the clock.

    sampler: the drafter's, from `recording.sampler`. draft: the drafter's model, to count its rounds. target: an empty
    text of the target, for a drafter that learns from its logits. layers: the target's, whose states the drafter reads.
    """
    text, said = list(recording.prompt_ids), recording.token_ids
    sampler.extend(text)
    began, rounds_before = clock.now(), draft.num_calls if draft else 0
    num_tokens, num_passes, num_drafted, draft_s, num_new = 0, 0, 0, 0.0, len(text)
    while num_tokens < len(said):
        started = clock.now()
        tree = drafter.propose(text, max_depth=recording.limit - num_tokens - 1)
        draft_s += clock.now() - started
        ends = clock.now() + costs.pass_s(num_new + len(tree))
        if drafter.wants_overlap:
            drafter.extend(lambda ends=ends: clock.now() >= ends)
        clock.advance(max(0.0, ends - clock.now()))  # a round that was under way is waited for
        verdict = walk(tree, said[num_tokens:])
        done = TargetPass(text, tree, verdict, NO_LOGITS)
        if target is not None:
            new = text[target.length :]
            rows = target.score_rows(new, tree.tokens, tree.depths, tree.parents, layers=layers)
            target.keep(verdict.path)
            done = TargetPass(text, tree, verdict, rows, rows)
        drafter.observe(done)
        text += verdict.tokens
        sampler.extend(verdict.tokens)
        num_tokens, num_passes, num_drafted = num_tokens + len(verdict.tokens), num_passes + 1, num_drafted + len(tree)
        num_new = 1  # the target holds all but the last token
    num_rounds = (draft.num_calls if draft else 0) - rounds_before
    return Replayed(num_tokens, num_passes, num_rounds, num_drafted, draft_s, clock.now() - began)


def walk(tree: TokenTree, ahead: Sequence[int]) -> Verdict:
    """The verdict of a target whose next tokens are `ahead` (at least one)."""
    node, path = ROOT, list[int]()
    for token in ahead[:-1]:
        child = tree.child(node, token)
        if child is None:
            break
        node = child
        path.append(node)
    return Verdict(path, list(ahead[: len(path) + 1]))
