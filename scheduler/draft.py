"""Drafters: who guesses the tree. The best-first drafter on a small model (SpecExec, 2406.02532), and its scoring.

A child x of a node is scored by how likely the *target* is to choose it. The target will choose
argmax(log p + G) with noise G that is known beforehand, so the draft looks at v(x) = log q(x) + G(seed, position, x),
and believes log softmax(v / s): s, the sharpness, is how far the two models' log-probabilities typically lie apart. It is
fitted while running, from every verified node. With no noise and s = 1 this is SpecExec's cumulative probability.
How long to draft and how much to send is a `Controller`'s to say. Knows models only through the `TreeModel` protocol.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.errors import NumericalError

from .budget import Controller, GoingRate, Prospect, Switch, controller_for
from .calibration import SIXTHS, UNIT, Calibration
from .costs import MOST_ROWS, WIDTHS, Costs
from .growth import Growth, Guesses
from .lookup import Guesser
from .params import MAX_NODES, MAX_ROWS, SpeculationParams
from .sampling import Sampler
from .tree import ROOT, BoolArray, FloatArray, IntArray, TokenTree
from .verify import Logits, Verdict

MOST_GUESTS = 64  # nodes that one guesser may add
LEAST_TRUST = 1e-6  # in them
MOST_REVISED = int(WIDTHS[-1])  # places whose guesses are corrected after a pass, the likeliest ones
Clock = Callable[[], float]


class TreeModel(Protocol):
    """What a drafter needs of a model: score tokens behind one text, and remember those that became part of it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of the text it holds."""

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """Commit chain; add R tree nodes, pending. Logits [(1 if chain) + R, V]. mask: bool [R, P + R]."""

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending nodes `path`; `pending`, nodes below them, stay pending; the others are forgotten.

        Both ascend, and so do the two one after the other. What stays is numbered from 0 in its order.
        """


class Hindsight(Protocol):
    """Corrects what a `TreeModel` says by what the target made of nodes that the model had been asked about."""

    def observe(self, rows: IntArray, nodes: IntArray, logits: Logits) -> None:
        """Told before these are kept or forgotten: their rows [K] of the model's pending region (ROOT for the text's last token),
        and of the target's logits."""

    def revised(self, rows: IntArray) -> Tensor:
        """Logits [K, V] after these of what is pending (ROOT first), as the model would have them now."""


class Drafter(Protocol):
    """Guesses trees for one request: propose and observe by turns; after an error in between, make a new one."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        """A tree of guesses for what follows `text` (all tokens so far), at most max_depth deep."""

    @property
    def is_eager(self) -> bool:
        """Whether `extend` is worth calling beside the pass that comes."""

    def extend(self, is_over: Callable[[], bool]) -> None:
        """Between propose and observe, perhaps on another thread: use the time of the target's pass, until `is_over`."""

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Logits) -> None:
        """What the target made of the tree that was proposed last. logits: the root's row, then the nodes'."""


class Patient:
    """A drafter that waits while the target's pass runs."""

    is_eager = False

    def extend(self, is_over: Callable[[], bool]) -> None:
        pass


class NoDrafter(Patient):
    """Guesses nothing: plain decoding."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        return TokenTree.empty()

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Logits) -> None:
        pass


class NoModel:
    """A TreeModel that is never asked: its context has no room for anything."""

    vocab_size, max_context, length = 1, 0, 0

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        raise AssertionError("there is no model to ask")

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        pass


class ModelDrafter:
    """Best-first growth in batches on a small model (SpecExec, section 4), one per request.

    Each round expands the best open candidates with one forward of the draft; what is sent is the best of all candidates
    seen. When the target's own next token is an expanded candidate, the growth below it lives on with its KV entries
    (`--no-reuse` forgets it). `final` tokens (end of text) are never expanded.
    """

    def __init__(
        self,
        model: TreeModel | None,
        sampler: Sampler,
        params: SpeculationParams,
        calibration: Calibration,
        final: Collection[int] = (),
        *,
        guessers: Sequence[Guesser] = (),
        controller: Controller | None = None,
        max_nodes: int = MAX_NODES,
        costs: Costs | None = None,
        switch: Switch | None = None,
        hindsight: Hindsight | None = None,
        num_unscored: int | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """model: None leaves the guessing to the guessers, whose trees are merged with the model's own otherwise.
        controller: what `params` call for, where there is none, with trees of at most max_nodes. costs: learns the draft's and the target's. switch: learns
        whether `extend` pays; without it, it does. hindsight: the model's, where it has some. num_unscored: tokens of the text that
        the target's first pass has to score; None: as many as the model's. clock: in seconds.
        """
        self._model: TreeModel = model or NoModel()
        self._sampler, self._params, self._final = sampler, params, final
        self._is_coupled = params.scoring == "coupled"
        self._belief = calibration.belief(greedy=sampler.is_greedy, coupled=self._is_coupled)
        self._columns = min(self._model.vocab_size, sampler.vocab_size)
        self._guessers, self._going = [_Asked(guesser) for guesser in guessers], GoingRate()
        self._num_unscored = num_unscored
        self._text: Sequence[int] = ()
        self._costs, self._clock = costs or Costs(), clock
        self._controller = controller or controller_for(params, self._costs, max_nodes)
        self._growth = Growth(final)
        self._position = 0  # of the root's children
        self._max_depth = self._model_depth = 0
        self._sent: IntArray = np.empty(0, dtype=np.int64)
        self._began = self._proposed = self._rounds_s = 0.0
        self._chain = 0  # rows of the target's pass beside the nodes
        self._is_first = True
        self._pause = _Pause()
        self._switch, self._was_eager, self._hindsight = switch, False, hindsight

    # ------------------------------------------------------------------------------------------------ a tree

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        self._began, self._rounds_s = self._clock(), 0.0
        self._chain = 1
        if self._is_first:
            self._chain = len(text) - self._model.length if self._num_unscored is None else self._num_unscored
        self._position, self._text = len(text), text
        self._max_depth = min(max_depth, self._params.max_depth)
        # Positions beyond the draft's context would be guessed badly or not at all.
        self._model_depth = min(self._max_depth, self._model.max_context - len(text))
        self._sent = np.empty(0, dtype=np.int64)
        if self._max_depth > 0 and self._controller.limit > 0:
            # With a budget that is given trees depend on nothing that is measured.
            is_priced = self._params.budget is None
            due = [each for each in self._guessers if not is_priced or each.is_due(self._going.value)]
            asked = [(each, self._ask(each)) for each in due]
            if self._model_depth > 0 and self._is_worth_a_root():
                self._grow(text)
            best = self._best(self._controller.limit)
            self._sent = best[: self._controller.size(self._prospect(best))]
            if is_priced and asked and not self._is_first:  # when they take in the whole text
                worth = self._worth_of_guests()
                for each, seconds in asked:
                    each.learn(worth, seconds)
        tree, now = self._growth.tree(self._sent), self._clock()
        if self._switch and not self._is_first:
            expected = 1 + float(self._probabilities(self._sent).sum())
            self._switch.observe(self._was_eager, expected, now - self._proposed)
        self._was_eager, self._proposed = self.is_eager, now
        return tree

    def _ask(self, asked: _Asked) -> float:
        """Take what a guesser has to say into the tree; returns the seconds that took."""
        began, limit = self._clock(), min(self._controller.limit, MOST_GUESTS)
        guesses = asked.guesser.guess(self._text, self._sampler, limit, self._max_depth)
        self._growth.add_guests(replace(guesses, scores=guesses.scores + self._doubt), self._index)
        return self._clock() - began

    @property
    def _doubt(self) -> float:
        """What guessers' log-probabilities lose, since the model knows better."""
        return math.log(max(self._belief.guests.value, LEAST_TRUST))

    def _worth_of_guests(self) -> float:
        """Tokens that the guessers' nodes of the tree promise, less what their rows cost at the going rate."""
        nodes = self._growth.nodes[self._sent]
        guests = self._sent[nodes["score"] <= nodes["floor"]]
        rows = self._chain + len(self._sent)
        without, all_of_them = self._costs.target.seconds(np.array([rows - len(guests), rows]))
        return float(self._probabilities(guests).sum() - self._going.value * (all_of_them - without))

    def _grow(self, text: Sequence[int]) -> None:
        growth = self._growth
        if growth.is_rooted:
            self._look_again()
        else:
            chain = [min(token, self._model.vocab_size - 1) for token in text[self._model.length :]]
            none = np.empty(0, dtype=np.int64)
            began = self._clock()
            logits = self._model.score(chain, none, none, np.empty((0, 0), dtype=np.bool_))
            self._add_children(np.array([ROOT]), logits)
            self._count_round(len(chain), began)
        while growth.num_expanded < MAX_ROWS:
            best = self._best(self._controller.limit)
            nodes = growth.open_among(best, self._model_depth)
            width = min(self._controller.width(self._prospect(best, nodes)), MAX_ROWS - growth.num_expanded)
            if width < 1:
                break
            began = self._clock()
            self._expand(nodes[:width])
            self._count_round(width, began)

    def _look_again(self) -> None:
        """Judge what has lived on, by all that is known by now: it was drafted before the target's last word."""
        growth = self._growth
        if self._hindsight is None:
            growth.rescore(self._index)
            return
        expanded = growth.expanded(MOST_REVISED - 1)
        nodes = np.append(ROOT, expanded)
        logits = self._hindsight.revised(np.append(ROOT, growth.nodes["row"][expanded]))
        growth.revise(nodes, self._children(nodes, logits), self._index)

    @property
    def is_eager(self) -> bool:
        has_use = self._params.overlap and self._params.reuse and self._growth.is_rooted
        return has_use and (self._switch is None or self._switch.is_on())

    def extend(self, is_over: Callable[[], bool]) -> None:
        """Go on where `propose` stopped: the best open candidates are the likeliest to be the next root, or below it."""
        growth, width = self._growth, self._costs.draft.best_width()
        while not is_over() and growth.is_rooted and growth.num_expanded + width <= MAX_ROWS:
            best = growth.best(growth.num_expanded + 8 * width, self._model_depth)
            nodes = growth.open_among(best, self._model_depth)
            if not len(nodes):
                break
            self._expand(nodes[:width])

    def _expand(self, nodes: IntArray) -> None:
        mask = self._growth.expand(nodes)
        picked = self._growth.nodes[nodes]
        # Guessers may know tokens that the model does not.
        tokens = np.minimum(picked["token"], self._model.vocab_size - 1)
        self._add_children(nodes, self._model.score([], tokens, picked["depth"], mask))

    def _best(self, count: int) -> IntArray:
        return self._growth.best(count, self._max_depth)

    def _prospect(self, best: IntArray, open_nodes: IntArray | None = None) -> Prospect:
        return Prospect(
            best=self._probabilities(best),
            open=self._probabilities(open_nodes) if open_nodes is not None else np.empty(0),
            profile=self._belief.profile.values,
            chain=self._chain,
            spent_s=self._clock() - self._began,
        )

    def _probabilities(self, nodes: IntArray) -> FloatArray:
        """That these nodes are accepted: the model's guesses as far as it is trusted, the guessers' as they say."""
        scores, floors = self._growth.nodes["score"][nodes], self._growth.nodes["floor"][nodes]
        trust = np.where(scores > floors, self._belief.trust.value, 1.0)
        probabilities: FloatArray = trust * np.exp(scores)
        return probabilities

    def _is_worth_a_root(self) -> bool:
        """Whether asking the draft at all promises anything; where it does not, it is asked again now and then."""
        if self._growth.is_rooted:
            return True
        root = np.array([self._belief.trust.value])
        profile, overhead_s = self._belief.profile.values, self._costs.overhead_s
        prospect = Prospect(np.empty(0), root, profile, self._chain, 0.0, overhead_s)
        return self._pause.is_over(promising=self._controller.width(prospect) > 0)

    def _count_round(self, rows: int, began: float) -> None:
        seconds = self._clock() - began
        self._rounds_s += seconds
        if rows <= MOST_ROWS:
            self._costs.draft.observe(rows, seconds)

    # ------------------------------------------------------------------------------------------------ a verdict

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Logits) -> None:
        now, rows = self._clock(), self._chain + len(tree)
        if rows <= MOST_ROWS:
            self._costs.target.observe(rows, now - self._proposed)
        for each in self._guessers:
            each.guesser.observe(self._text, tree, verdict, logits)
        self._learn_trust(tree, verdict)
        self._learn_trust_in_guests(verdict)
        if self._hindsight is not None and self._growth.is_rooted:
            pending: IntArray = self._growth.nodes["row"][self._sent]
            asked = np.flatnonzero(pending >= 0)
            self._hindsight.observe(
                np.append(np.array([ROOT]), pending[asked]), np.append(np.array([0]), asked + 1), logits
            )
        self._live_on(self._sent[verdict.path], verdict.tokens)
        if not self._is_first:  # the first pass has the prompt in it, and says nothing of the rate
            seconds = self._clock() - self._began
            self._controller.observe(len(verdict.tokens), seconds)
            self._going.observe(len(verdict.tokens), seconds)
            if self._rounds_s:
                self._costs.observe_overhead(seconds - self._rounds_s - (now - self._proposed))
        self._is_first = False

    def _learn_trust(self, tree: TokenTree, verdict: Verdict) -> None:
        """From the model's own nodes. Where nothing was sent its best guess is judged all the same, or a draft once out of
        favour would stay so."""
        nodes, trust = self._growth.nodes, self._belief.trust
        own = nodes["score"][self._sent] > nodes["floor"][self._sent]
        if own.any():
            trust.observe(float(np.exp(tree.scores[own]).sum()), int(own[verdict.path].sum()))
        elif not len(tree) and self._growth.is_rooted and len(best := self._best(1)):
            guess = nodes[best[0]]
            trust.observe(float(np.exp(guess["score"])), int(guess["token"] == verdict.tokens[0]))

    def _learn_trust_in_guests(self, verdict: Verdict) -> None:
        """From what they named, sent or not, where the target went on and the model had said otherwise."""
        growth = self._growth
        if not growth.is_rooted:
            return
        places = np.append(ROOT, self._sent[verdict.path])
        guests, claims = growth.contested(places, self._index)
        if len(guests):
            followed = dict(zip(places.tolist(), verdict.tokens, strict=True))
            nodes = growth.nodes[guests]
            right = [followed[place] == token for place, token in zip(nodes["parent"], nodes["token"], strict=True)]
            self._belief.guests.observe(float(np.exp(np.minimum(claims - self._doubt, 0.0)).sum()), sum(right))

    def _live_on(self, path: IntArray, tokens: Sequence[int]) -> None:
        """Commit what was accepted, learn from it, and keep what was drafted below the new last token."""
        growth = self._growth
        rows = [int(row) for row in growth.nodes["row"][path] if row >= 0]
        if growth.is_rooted:
            self._learn(rows, tokens)
        if self._params.reuse and len(rows) == len(path):
            last = growth.child(int(path[-1]) if len(path) else ROOT, tokens[-1])
            if last is not None and (known := growth.nodes[last])["row"] >= 0 and known["score"] > -np.inf:
                rows.append(int(known["row"]))
                self._model.keep(rows, growth.reroot(last).tolist())
                return
        self._model.keep(rows)
        self._growth = Growth(self._final)

    def _learn(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """From the tokens that followed the root and the nodes in these rows."""
        guesses = self._growth.guesses
        if self._is_coupled:  # values without the noise would say nothing about values with it
            for row, token in zip([-1, *rows], tokens, strict=False):
                self._belief.sharpness.observe(guesses.likelihood(row + 1, token))
        self._belief.profile.observe(np.exp(guesses.log_probabilities(self._index)))

    # ------------------------------------------------------------------------------------------------ scoring

    @property
    def _index(self) -> int:
        return self._belief.sharpness.index if self._is_coupled else UNIT

    def _add_children(self, nodes: IntArray, logits: Tensor) -> None:
        """Score the children of the nodes just expanded."""
        self._growth.add(nodes, self._children(nodes, logits), self._index)

    def _children(self, nodes: IntArray, logits: Tensor) -> Guesses:
        """Of `nodes` [R] (ROOT first, if it is one of them), by draft logits [R, V]."""
        paths = self._growth.path_tokens(nodes) if self._sampler.needs_history else [[]] * len(nodes)
        return self._guess(logits[:, : self._columns], paths, self._position + self._growth.depths(nodes))

    def _guess(self, logits: Tensor, paths: Sequence[Sequence[int]], positions: IntArray) -> Guesses:
        """Candidates of R rows of draft logits [R, V], the children of each at positions [R]."""
        values = self._sampler.process(logits, paths)
        if self._is_coupled and not self._sampler.is_greedy:
            values = values + self._sampler.noise_rows(positions.tolist())[:, : self._columns]
        best, tokens = values.topk(min(self._params.children, self._columns), dim=-1)
        # Tokens are exact in a double, so that there is one transfer.
        parts = torch.cat((tokens.double(), best.double(), _power_sums(values).double()), dim=-1).cpu().numpy()
        num_children = tokens.shape[1]
        normalisers = _log_normalisers(parts[:, 2 * num_children :])
        if not np.isfinite(normalisers).all():
            raise NumericalError(
                "the draft's logits are not finite (NaN or infinity); try --dtype fp32 or another draft"
            )
        return Guesses(parts[:, :num_children].astype(np.int64), parts[:, num_children : 2 * num_children], normalisers)


# ------------------------------------------------------------------------------------------------ normalisers
# logsumexp(v / s) for every s of `calibration.GRID`. With e = exp((v - max v) / 6) each is the logarithm of a sum of some e^k,
# and that an inner product of two small powers of e: one exponential for each value and one matrix product give all of them.

_POWERS = (1, 2, 4, 5, 10)  # every one of SIXTHS is the sum of two of them
_PAIRS = np.array(
    [next((i, j) for i, a in enumerate(_POWERS) for j, b in enumerate(_POWERS) if a + b == k) for k in SIXTHS]
)
# Logits whose powers are in memory at a time: what a core's cache holds, and on a GPU 40 MB, so that launches are few.
_SLICE_ELEMENTS = {"cpu": 2**17, "cuda": 2**21}
# Values that one product of the batch sums over. cuBLAS gives each to one block, however long it is (NVIDIA/cutlass#1033).
_WIDTH = {"cuda": 2048}


def log_normalisers(values: Tensor) -> FloatArray:
    """[R, S]: logsumexp(v / s) of v [R, V] for each s of `calibration.GRID`."""
    return _log_normalisers(_power_sums(values).double().cpu().numpy())


def _power_sums(values: Tensor) -> Tensor:
    """[R, 25 + 1]: the sums of all products of two powers, and the greatest value."""
    step = max(1, _SLICE_ELEMENTS[values.device.type] // values.shape[1])
    return torch.cat([_power_sums_of(rows) for rows in values.split(step)])  # type: ignore[no-untyped-call]


def _power_sums_of(values: Tensor) -> Tensor:
    num_rows, size = values.shape
    greatest = values.amax(-1, keepdim=True)
    width = min(size, _WIDTH.get(values.device.type, size))
    parts = (F.pad(values, (0, -size % width), value=-math.inf) if size % width else values).view(num_rows, -1, width)
    powers = values.new_empty(num_rows, parts.shape[1], len(_POWERS), width)
    one, two, four, five, ten = powers.unbind(2)
    torch.sub(parts, greatest[..., None], out=one).mul_(1 / 6).exp_()
    for a, b, product in ((one, one, two), (two, two, four), (four, one, five), (five, five, ten)):
        torch.mul(a, b, out=product)
    powers = powers.flatten(0, 1)
    sums = torch.bmm(powers, powers.transpose(1, 2)).view(num_rows, -1, len(_POWERS) ** 2).sum(1)
    return torch.cat((sums, greatest), dim=-1)


def _log_normalisers(power_sums: FloatArray) -> FloatArray:
    sums = power_sums[:, _PAIRS[:, 0] * len(_POWERS) + _PAIRS[:, 1]]
    logs: FloatArray = np.log(sums) + power_sums[:, -1:] * (np.array(SIXTHS) / 6)
    return logs


class _Asked:
    """A guesser, and whether what it promises is worth its seconds; where it is not, it is asked again now and then."""

    RATE = 0.1  # of each time it is asked
    HOPE = 0.02  # tokens that are never ruled out: beside a pass that takes long, asking costs less than that

    def __init__(self, guesser: Guesser) -> None:
        self.guesser = guesser
        self._tokens = self._seconds = 0.0  # that it promises, and takes
        self._pause = _Pause()

    def is_due(self, going_rate: float) -> bool:
        return self._pause.is_over(promising=self._tokens + self.HOPE >= going_rate * self._seconds)

    def learn(self, num_tokens: float, seconds: float) -> None:
        rate = self.RATE if self._seconds else 1.0
        self._tokens += rate * (num_tokens - self._tokens)
        self._seconds += rate * (seconds - self._seconds)


class _Pause:
    """When to ask a draft again that promises nothing: after 8 passes, then 16, and so on up to 128."""

    FIRST, LONGEST = 8, 128

    def __init__(self) -> None:
        self._length, self._passed = self.FIRST, 0

    def is_over(self, *, promising: bool) -> bool:
        if promising:
            self._length, self._passed = self.FIRST, 0
            return True
        self._passed += 1
        if self._passed < self._length:
            return False
        self._length, self._passed = min(2 * self._length, self.LONGEST), 0
        return True
