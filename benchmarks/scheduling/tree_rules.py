"""Acceptance rules from the literature for trees of sampled candidates, as baselines for the walk with shared noise.

The draft draws candidates for the next token from its distribution q; the target's p is known at every node. A rule
accepts at most one of a node's candidates, so that the emitted token has exactly the target's distribution. The walk
then continues below it. These rules need their own randomness, so the text depends on the draft; offspec's text does
not.

`Chains`, `Branches` and `StochasticBeam` draw the candidates; a rule is exact for candidates that were drawn as its
docstring says. At temperature 0 the target is certain of one token, so every rule accepts it if it was drawn; branches
and beams are then the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offspec.scheduler.drafting.drafter import TreeModel
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, FloatArray, TokenTree

from .rules import Candidates, Draws, drawn, normalised


@dataclass(frozen=True)
class Choice:
    """The result of a rule at a node with k candidates.

    accepted [k]: the probability that this candidate is the next token. own [V]: the probability that all candidates
    are rejected, and that the next token is this one. All of them together sum to 1.
    """

    accepted: FloatArray
    own: FloatArray


# p [V]: the target's distribution; q [V]: the draft's; the candidates, in the order in which they were drawn.
TreeRule = Callable[[FloatArray, FloatArray, Sequence[int]], Choice]


def multi_step(p: FloatArray, q: FloatArray, candidates: Sequence[int]) -> Choice:
    """SpecInfer (2305.09781, algorithm 2): the ratio test for each candidate, against what is left of p.

    Candidates: independent draws from q.
    """
    return _one_by_one(p, q, candidates, removes=False)


def recursive(p: FloatArray, q: FloatArray, candidates: Sequence[int]) -> Choice:
    """Recursive rejection sampling (RSD, 2402.14160, algorithm 1; multi-candidate speculation, 2401.06706).

    Candidates: draws from q without replacement, so each ratio test is against q without those before it.
    """
    return _one_by_one(p, q, candidates, removes=True)


def _one_by_one(p: FloatArray, q: FloatArray, candidates: Sequence[int], *, removes: bool) -> Choice:
    accepted, left = np.zeros(len(candidates)), 1.0
    for place, token in enumerate(candidates):
        chance = min(1.0, p[token] / q[token])
        accepted[place], left = left * chance, left * (1 - chance)
        p = normalised(np.maximum(p - q, 0))
        if removes:
            q = normalised(np.where(np.arange(len(q)) == token, 0.0, q))
    return Choice(accepted, left * p)


def k_sequential(p: FloatArray, q: FloatArray, candidates: Sequence[int]) -> Choice:
    """K-SEQ (SpecTr, 2310.15141, algorithm 2): each candidate passes with probability min(1, p / (rho q)).

    Candidates: independent draws from q. With beta the probability that one passes, rho is the smallest value for
    which what the candidates emit, min(q, p / rho) * (1 - (1 - beta)^k) / beta, exceeds p nowhere.
    """
    if not candidates:
        return Choice(np.empty(0), p)
    rho = _least_rho(p, q, len(candidates))
    passes = np.minimum(q, p / rho)
    beta = min(1.0, float(passes.sum()))
    chances = np.array([min(1.0, p[token] / (rho * q[token])) for token in candidates])
    reached = np.cumprod([1.0, *(1 - chances)])
    some_pass = 1 - (1 - beta) ** len(candidates)
    missing = np.maximum(p - passes * (some_pass / beta if beta > 0 else 0.0), 0)
    return Choice(reached[:-1] * chances, reached[-1] * normalised(missing))


def _least_rho(p: FloatArray, q: FloatArray, num_candidates: int) -> float:
    """The root of 1 - (1 - beta)^k = rho beta in [1, k], from above (SpecTr, section 5)."""
    low, high = 1.0, float(num_candidates)
    for _ in range(60):
        rho = (low + high) / 2
        beta = min(1.0, float(np.minimum(q, p / rho).sum()))
        low, high = (low, rho) if 1 - (1 - beta) ** num_candidates <= rho * beta else (rho, high)
    return high


# ------------------------------------------------------------------------------------------------ drawing candidates


class Drawing(Protocol):
    """Draws the candidates of one tree, level by level."""

    def begin(self) -> None:
        """Start a new tree; its first level is the root."""

    def draw(self, q: FloatArray, generator: np.random.Generator | None) -> list[list[int]]:
        """Candidates of a level's R nodes, from their distributions q [R, V], in order; a token may occur repeatedly.

        The next level has the different tokens of the first node, then of the second, and so on. generator: None takes
        the likeliest candidates, where that is possible.
        """


class Chains:
    """Independent chains, which share their common beginnings (SpecTr; SpecInfer with one draft)."""

    def __init__(self, num_chains: int) -> None:
        self._num_chains = num_chains

    def begin(self) -> None:
        self._counts = [self._num_chains]  # chains through each node of the level

    def draw(self, q: FloatArray, generator: np.random.Generator | None) -> list[list[int]]:
        generator = generator or np.random.default_rng(0)
        found = [[drawn(row, generator) for _ in range(count)] for row, count in zip(q, self._counts, strict=True)]
        self._counts = [tokens.count(token) for tokens in found for token in dict.fromkeys(tokens)]
        return found


class Branches:
    """widths[level] candidates of each node, without replacement (RSD-C; multi-candidate speculation)."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths

    def begin(self) -> None:
        self._level = -1

    def draw(self, q: FloatArray, generator: np.random.Generator | None) -> list[list[int]]:
        self._level += 1
        values = _log(q) + (0.0 if generator is None else generator.gumbel(size=q.shape))
        return [_best(row, self._widths[self._level]) for row in values]


class StochasticBeam:
    """A beam of sequences without replacement (RSD-S, 2402.14160, algorithm 4; Kool et al., 1903.06059).

    A sequence's perturbed log-probability is its own plus Gumbel noise, conditioned on its parent's being the greatest
    of the parent's children. The order of siblings is independent of the parent's value, and whether there is a next
    sibling depends on those before it alone, so siblings are draws from q without replacement.
    """

    def __init__(self, width: int) -> None:
        self._width = width

    def begin(self) -> None:
        self._log_q, self._perturbed = np.zeros(1), np.zeros(1)  # of each node of the level

    def draw(self, q: FloatArray, generator: np.random.Generator | None) -> list[list[int]]:
        log_q = self._log_q[:, None] + _log(q)
        perturbed = log_q if generator is None else _with_maximum(log_q, self._perturbed, generator)
        chosen = _best(perturbed.ravel(), self._width)
        rows, tokens = np.unravel_index(np.array(chosen, dtype=np.int64), perturbed.shape)
        found = [tokens[rows == row].tolist() for row in range(len(q))]  # in order of their perturbed values
        order = np.argsort(rows, kind="stable")
        self._log_q, self._perturbed = (each[rows, tokens][order] for each in (log_q, perturbed))
        return found


def _with_maximum(log_q: FloatArray, maxima: FloatArray, generator: np.random.Generator) -> FloatArray:
    """log_q [R, V] with Gumbel noise, conditioned on the maximum of each row (1903.06059, section 4.1)."""
    noisy = log_q + generator.gumbel(size=log_q.shape)
    greatest = noisy.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        excess = maxima[:, None] - noisy + np.log1p(-np.exp(np.minimum(noisy - greatest, 0.0)))
    found: FloatArray = maxima[:, None] - np.maximum(0, excess) - np.log1p(np.exp(-np.abs(excess)))
    return found


def _log(q: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        found: FloatArray = np.log(q)
    return found


def _best(values: FloatArray, count: int) -> list[int]:
    """The places of the greatest values [N], greatest first, without those of -inf."""
    found: list[int] = np.argsort(-values, kind="stable")[:count].tolist()
    return [place for place in found if values[place] > -np.inf]


# ------------------------------------------------------------------------------------------------ a tree


@dataclass(frozen=True)
class SampledTree:
    """Candidates candidates. tree: each of them once. num_scored: nodes that the draft has scored, the first ones.

    candidates: of the root, then of each scored node, in the order in which they were drawn; nodes of the tree, maybe
    repeated. q [1 + num_scored, V]: the distributions that they were drawn from.
    """

    tree: TokenTree
    candidates: list[list[int]]
    q: FloatArray
    num_scored: int


class TreeDrawing:
    """Lets a draft and a `Drawing` draw one tree after the other, `depth` levels deep."""

    def __init__(self, draft: TreeModel, drawing: Drawing, sampler: Sampler, depth: int) -> None:
        self.draft, self.drawing, self.sampler, self.depth = draft, drawing, sampler, depth

    def tree(self, text: Sequence[int], max_depth: int, generator: np.random.Generator) -> SampledTree:
        """A tree of continuations of `text`; its scores are 0."""
        tokens, parents, paths = list[int](), list[int](), list[list[int]]()
        candidates, rows = list[list[int]](), [np.empty((0, self.sampler.vocab_size))]
        level, above, row_of = [ROOT], list[int](), {ROOT: ROOT}  # above: rows of the parents of all scored nodes
        self.drawing.begin()
        noise = None if self.sampler.is_greedy else generator
        for depth in range(min(self.depth, max_depth)):
            scored = level if depth else []
            row_of.update(zip(scored, range(len(above), len(above) + len(scored)), strict=True))
            above += [row_of[parents[node]] for node in scored]
            rows.append(self._scored(text, [tokens[node] for node in scored], depth, above, paths))
            level_candidates = self.drawing.draw(rows[-1], noise)
            below = list[int]()
            for parent, drafted in zip(level, level_candidates, strict=True):
                nodes = dict(zip(dict.fromkeys(drafted), range(len(tokens), len(tokens) + len(drafted)), strict=False))
                tokens += nodes
                parents += [parent] * len(nodes)
                paths += [[*(paths[parent] if parent != ROOT else ()), token] for token in nodes]
                candidates.append([nodes[token] for token in drafted])
                below += nodes.values()
            if not below:
                break
            level = below
        num_scored = max(0, sum(map(len, rows)) - 1)
        depths = np.array([len(path) for path in paths], dtype=np.int64)
        tree = TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64), depths, 0.0 * depths)
        return SampledTree(tree, candidates, np.vstack(rows), num_scored)

    def _scored(
        self, text: Sequence[int], tokens: list[int], depth: int, parents: list[int], paths: list[list[int]]
    ) -> FloatArray:
        """The draft's distributions [R, V of the target] after the root, or after a level's nodes."""
        draft, vocab_size = self.draft, self.sampler.vocab_size
        chain = [] if depth else draft.vocabulary.text(text[draft.length :])
        inputs = draft.vocabulary.inputs(np.array(tokens, dtype=np.int64))
        logits = draft.score(chain, inputs, np.full(len(tokens), depth), np.array(parents, dtype=np.int64))
        logits = draft.vocabulary.over_target(logits, vocab_size).double()
        values = self.sampler.process(logits, paths[len(paths) - len(tokens) :] if depth else [[]])
        found = np.zeros((len(values), vocab_size))
        found[:, : values.shape[1]] = values.softmax(-1).cpu().numpy()
        return found


def walk(
    sampled: SampledTree, p: FloatArray, rule: TreeRule, generator: np.random.Generator
) -> tuple[list[int], list[int]]:
    """The accepted nodes, and the emitted tokens, one more. p [1 + N, V]: the target's distributions."""
    node, path, tokens = ROOT, list[int](), sampled.tree.tokens
    while node < sampled.num_scored:
        candidates = sampled.candidates[node + 1] if sampled.candidates else []
        choice = rule(p[node + 1], sampled.q[node + 1] if candidates else p[node + 1], tokens[candidates].tolist())
        place = drawn(np.array([*choice.accepted, choice.own.sum()]), generator)
        if place == len(candidates):
            return path, [*tokens[path].tolist(), drawn(choice.own, generator)]
        node = candidates[place]
        path.append(node)
    return path, [*tokens[path].tolist(), drawn(p[node + 1], generator)]


def trees(drawing: TreeDrawing, rule: TreeRule, generator: np.random.Generator) -> Draws:
    """Trees of `drawing`, accepted by a rule."""

    def draws(text: Sequence[int], max_depth: int) -> Candidates:
        sampled = drawing.tree(text, max_depth, generator)
        return Candidates(sampled.tree, sampled.num_scored, lambda p: walk(sampled, p, rule, generator))

    return draws
