"""Stand-ins for models, and slow twins of what the scheduler does: numpy and big integers, one token at a time.

A model is a rule: from all tokens so far to logits. The twins share no code with the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from offspec.scheduler.drafting.candidate_tree import ChildScores
from offspec.scheduler.drafting.drafter import Drafter, TreeModel
from offspec.scheduler.drafting.estimates import RunningEstimates
from offspec.scheduler.guessing import retrieval
from offspec.scheduler.guessing.recycling import TokenRecycling
from offspec.scheduler.pace.calibration import GRID, Calibration
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.pace.trials import OverlapSwitch
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, FloatArray, IntArray, TokenTree
from offspec.scheduler.trees.transfer import copied
from offspec.scheduler.trees.verify import TargetPass, TargetStates
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..examples import examples

TokenPath = tuple[int, ...]
Rule = Callable[[TokenPath], FloatArray]

few = examples(40)
many = examples(100)

# ------------------------------------------------------------------------------------------------ transfers


class Transfers:
    """A `ToDevice` that copies, and keeps what it copied."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []

    def __call__(self, values: Tensor, device: torch.device) -> Tensor:
        self.sent.append(values.tolist())
        return copied(values, device)


# ------------------------------------------------------------------------------------------------ models


def random_rule(vocab_size: int, seed: int, spread: float = 2.0) -> Rule:
    """Logits that depend on every token so far, and are the same whenever they are asked for."""

    @cache
    def rule(prefix: tuple[int, ...]) -> FloatArray:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        return generator.normal(scale=spread, size=vocab_size).astype(np.float32).astype(np.float64)

    return rule


def resembling(rule: Rule, seed: int, error: float = 1.0) -> Rule:
    """A rule that errs: a draft for the target `rule`."""

    @cache
    def draft(prefix: tuple[int, ...]) -> FloatArray:
        logits = rule(prefix)
        return logits + random_rule(len(logits), seed, error)(prefix)

    return draft


class RuleModel:
    """A TreeModel that computes `rule`, and insists that whoever drives it is consistent.

    Every node must see exactly one path: a root's child, its child, and so on down to itself. `chains` and `batches`
    record what was passed: the chain of every call, and how many nodes.
    """

    def __init__(self, rule: Rule, vocab_size: int, max_context: int = 1 << 20) -> None:
        self.rule, self.vocab_size, self.max_context = rule, vocab_size, max_context
        self.vocabulary = Vocabulary(vocab_size)
        self.text: list[int] = []
        self.chains: list[list[int]] = []
        self.batches: list[int] = []
        self._pending: list[tuple[int, int]] = []  # token, depth
        self._sights: list[list[int]] = []  # for each pending node, whom it sees

    @property
    def length(self) -> int:
        return len(self.text)

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        assert not (chain and self._pending), "the text cannot grow behind pending nodes"
        num_earlier, num_nodes = len(self._pending), len(tokens)
        assert len(parents) == num_earlier + num_nodes
        assert all(ROOT <= parent < node for node, parent in enumerate(parents.tolist()))
        assert [sight[-2] if len(sight) > 1 else ROOT for sight in self._sights] == parents[:num_earlier].tolist()
        assert all(0 <= token < self.vocab_size for token in (*chain, *tokens))
        self.chains.append(list(chain))
        self.batches.append(num_nodes)
        self.text += chain
        self._pending += zip(tokens.tolist(), depths.tolist(), strict=True)
        for node, parent in enumerate(parents[num_earlier:].tolist(), num_earlier):
            self._sights.append([*([] if parent == ROOT else self._sights[parent]), node])
        text = tuple(self.text)
        assert len(text) + max((depth for _, depth in self._pending), default=0) <= self.max_context
        prefixes = [text] if chain else []
        prefixes += [text + self._path(node) for node in range(num_earlier, num_earlier + num_nodes)]
        rows = [self.rule(prefix) for prefix in prefixes]
        return torch.tensor(np.array(rows).reshape(len(rows), -1), dtype=torch.float32)

    def _path(self, node: int) -> tuple[int, ...]:
        sight = self._sights[node]
        assert sight[-1] == node
        assert [self._pending[seen][1] for seen in sight] == list(range(1, len(sight) + 1))
        assert all(self._sights[seen] == sight[: place + 1] for place, seen in enumerate(sight))
        return tuple(self._pending[seen][0] for seen in sight)

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        assert not path or self._sights[path[-1]] == list(path), "what is kept is not a path from the root"
        assert list(pending) == sorted(pending)
        self.text += [self._pending[node][0] for node in path]
        numbers = {node: number for number, node in enumerate(pending)}
        sights = [self._sights[node] for node in pending]
        assert all(sight[: len(path)] == list(path) for sight in sights), "what waits on is not below the path"
        # A KeyError here: an ancestor of what waits on was forgotten.
        self._sights = [[numbers[seen] for seen in sight[len(path) :]] for sight in sights]
        self._pending = [(token, depth - len(path)) for token, depth in (self._pending[node] for node in pending)]


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedModel(RuleModel):
    """A RuleModel whose every pass takes `seconds(rows)` on a virtual clock. `lengths`: of the text at every pass."""

    def __init__(self, rule: Rule, vocab_size: int, clock: VirtualClock, seconds: Callable[[int], float]) -> None:
        super().__init__(rule, vocab_size)
        self.clock, self.seconds = clock, seconds
        self.lengths: list[int] = []

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        self.lengths.append(len(self.text))
        self.clock.now += self.seconds(len(chain) + len(tokens))
        return super().score(chain, tokens, depths, parents)


class LearningModel(RuleModel):
    """A RuleModel whose rule is another one after each verdict, and corrects what it said before."""

    def __init__(self, rules: Callable[[int], Rule], vocab_size: int) -> None:
        super().__init__(rules(0), vocab_size)
        self._rules, self._num_verdicts = rules, 0

    def observe(self, rows: IntArray, nodes: IntArray, states: TargetStates) -> None:
        self._num_verdicts += 1
        self.rule = self._rules(self._num_verdicts)

    def corrected(self, rows: IntArray) -> Tensor:
        paths = [self._path(row) if row >= 0 else () for row in rows.tolist()]
        return torch.tensor(np.array([self.rule((*self.text, *path)) for path in paths]), dtype=torch.float32)


def estimates_of(
    calibration: Calibration | None = None, costs: Costs | None = None, switch: OverlapSwitch | None = None
) -> RunningEstimates:
    """What was learnt before, where it matters. Without a switch drafting beside the pass always pays."""
    return RunningEstimates(TokenRecycling(1), calibration or Calibration(), costs or Costs(), switch)


def generate(
    target: TreeModel,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Sequence[int],
    num_tokens: int,
    rounds_ahead: int = 0,
    *,
    proposed: list[TokenTree] | None = None,
) -> list[int]:
    """The engine's loop without the engine: propose, (extend,) score, verify, commit, observe.

    proposed: gets the trees.
    """
    text, end = list(prompt), len(prompt) + num_tokens
    sampler.extend(text)
    while len(text) < end:
        tree = drafter.propose(text, max_depth=end - len(text) - 1)
        if proposed is not None:
            proposed.append(tree)
        if drafter.wants_overlap:
            drafter.extend(count_down(rounds_ahead))
        logits = target.score(text[target.length :], tree.tokens, tree.depths, tree.parents)
        verdict = drafter.verify(tree, logits, sampler, len(text))
        target.keep(verdict.path)
        drafter.observe(TargetPass(text, tree, verdict, logits))
        text += verdict.tokens
        sampler.extend(verdict.tokens)
    return text[len(prompt) :]


def count_down(count: int) -> Callable[[], bool]:
    """False so many times, then True."""
    left = iter(range(count))
    return lambda: next(left, None) is None


# ------------------------------------------------------------------------------------------------ twins


def softmax(values: FloatArray) -> FloatArray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def log_softmax(values: FloatArray) -> FloatArray:
    shifted = values - values.max()
    return shifted - math.log(np.exp(shifted).sum())


def processed(logits: FloatArray, params: SamplingParams, seen: Iterable[int] = ()) -> FloatArray:
    """Log-probabilities up to a constant of what the parameters make of logits [V], given the tokens so far."""
    values = logits.astype(np.float64)
    for token in set(seen):
        values[token] *= params.repetition_penalty if values[token] < 0 else 1 / params.repetition_penalty
    if params.temperature == 0:
        return values
    values /= params.temperature
    order = np.argsort(-values, kind="stable")
    if 0 < params.top_k < len(values):
        values[values < values[order[params.top_k - 1]]] = -math.inf
    probabilities, mass = softmax(values), 0.0
    for token in order:
        if params.top_p < 1 and mass >= params.top_p:
            values[token] = -math.inf
        mass += probabilities[token]
    probabilities = softmax(values)
    values[probabilities < params.min_p * probabilities.max()] = -math.inf
    return values


WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """The generator's output for a state, as its authors give it (https://prng.di.unimi.it/splitmix64.c)."""
    z = state % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def uniform(seed: int, position: int, token: int) -> float:
    """The number in (0, 1) behind the noise of one token."""
    stream = splitmix64(splitmix64(seed + GOLDEN) + (position + 1) * GOLDEN)
    word = splitmix64(stream + (token + 1) * GOLDEN)
    return (2 * (word >> 12) + 1) / 2**53


def noise(seed: int, position: int, vocab_size: int) -> FloatArray:
    return np.array([-math.log(-math.log(uniform(seed, position, token))) for token in range(vocab_size)])


def plain_text(rule: Rule, params: SamplingParams, seed: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """One token after the other, without trees, caches or tensors."""
    text = list(prompt)
    for _ in range(num_tokens):
        values = processed(rule(tuple(text)), params, text)
        if params.temperature > 0:
            values = values + noise(seed, len(text), len(values))
        text.append(int(values.argmax()))
    return text[len(prompt) :]


def guesses_of(values: FloatArray, num_candidates: int) -> ChildScores:
    """One row: the best candidates of values [V]."""
    order = np.argsort(-values, kind="stable")[:num_candidates]
    normalisers = np.array([np.log(np.exp(values / s).sum()) for s in GRID])
    return ChildScores(order[None], values[order][None], normalisers[None])


class PlainCandidates:
    """What a `CandidateTree` should hold: the paths that were expanded and guessed; the rest is worked out when asked.

    Paths count from `root`, which is a path itself. expanded: in the order of their rows.
    """

    def __init__(self, rule: Rule, num_children: int, final: Collection[int]) -> None:
        self.rule, self.num_children, self.final = rule, num_children, final
        self.root: TokenPath = ()
        self.is_rooted = False
        self.expanded: list[TokenPath] = []
        self.claims: dict[TokenPath, float] = {}

    def row(self, path: TokenPath) -> int:
        return self.expanded.index(path) if path in self.expanded else -1

    def is_open(self, path: TokenPath) -> bool:
        return path not in self.expanded and path[-1] not in self.final

    def parents(self) -> list[int]:
        return [self.row(path[:-1]) for path in self.expanded]

    def scores(self, sharpness: float) -> dict[TokenPath, float]:
        """Of every candidate."""
        found: dict[TokenPath, float] = dict.fromkeys(self.claims, -math.inf)
        for parent in [(), *self.expanded] if self.is_rooted else []:
            values = self.rule((*self.root, *parent))
            gains = log_softmax(values / sharpness)
            for token in np.argsort(-values, kind="stable")[: self.num_children].tolist():
                if gains[token] > -math.inf:
                    found[(*parent, token)] = gains[token]
        for path in sorted(found, key=len):
            # What was guessed once may be no candidate any more.
            above = found.get(path[:-1], -math.inf) if path[:-1] else 0.0
            found[path] = max(found[path] + above, self.claims.get(path, -math.inf))
        return {path: score for path, score in found.items() if score > -math.inf}

    def add_guesses(self, tree: TokenTree) -> None:
        for path, score in zip(paths(tree), tree.scores.tolist(), strict=True):
            if not set(path[:-1]) & set(self.final):
                self.claims[path] = max(self.claims.get(path, -math.inf), score)

    def disputed(self, sharpness: float) -> dict[TokenPath, float]:
        """What others give, where their parents are, to guesses that the model was asked about and thinks less of."""
        scores, found = self.scores(sharpness), dict[TokenPath, float]()
        for path, claimed in self.claims.items() if self.is_rooted else ():
            if not path[:-1] or path[:-1] in self.expanded:
                values = self.rule((*self.root, *path[:-1]))
                gain = log_softmax(values / sharpness)[path[-1]]
                is_guessed = path[-1] in np.argsort(-values, kind="stable")[: self.num_children]
                claim = claimed - (scores.get(path[:-1], -math.inf) if path[:-1] else 0.0)
                if claim > (gain if is_guessed else -math.inf):
                    found[path] = claim
        return found

    def reroot(self, node: TokenPath, sharpness: float) -> list[int]:
        """The rows that stay."""
        score, depth = self.scores(sharpness)[node], len(node)
        below = [path for path in self.expanded if path[:depth] == node and path != node]
        rows = [self.row(path) for path in below]
        self.claims = {p[depth:]: f - score for p, f in self.claims.items() if p[:depth] == node and p != node}
        self.root, self.expanded = (*self.root, *node), [path[depth:] for path in below]
        return rows


# ------------------------------------------------------------------------------------------------ trees


def build_tree(paths: Iterable[Sequence[int]]) -> TokenTree:
    """The tree that holds these token paths and all their beginnings; scores say only how deep a node lies."""
    index: dict[tuple[int, ...], int] = {(): ROOT}
    for path in paths:
        for end in range(1, len(path) + 1):
            index.setdefault(tuple(path[:end]), len(index) - 1)
    nodes = list(index)[1:]
    depths = np.array([len(node) for node in nodes], dtype=np.int64)
    tokens = np.array([node[-1] for node in nodes], dtype=np.int64)
    parents = np.array([index[node[:-1]] for node in nodes], dtype=np.int64)
    return TokenTree(tokens, parents, depths, -depths.astype(np.float64))


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from the root's child down to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


def assert_well_formed(tree: TokenTree) -> None:
    """Every guess once, parents first, best first, and none better than its parent."""
    assert len(set(paths(tree))) == len(tree), "siblings hold the same token"
    assert (tree.parents < np.arange(len(tree))).all()
    assert tree.depths.tolist() == [len(path) for path in paths(tree)]
    assert (np.diff(tree.scores) <= 0).all()
    inner = tree.parents != ROOT
    assert (tree.scores[inner] <= tree.scores[tree.parents[inner]]).all()
    assert (tree.scores <= 0).all()


def trees(vocab_size: int, max_depth: int = 5, max_paths: int = 12) -> st.SearchStrategy[TokenTree]:
    path = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_depth)
    return st.lists(path, max_size=max_paths).map(build_tree)


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    """Greedy and sampled, with every way of processing on and (more often, lest they leave one token) off."""
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
        top_k=st.sampled_from([0, 0, 3, 100, 1]),
        top_p=st.sampled_from([1.0, 1.0, 0.95, 0.9, 0.4]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.2]),
        repetition_penalty=st.sampled_from([1.0, 1.4, 0.8]),
    )


def build_index(tokens: npt.NDArray[np.int32]) -> retrieval.SuffixIndex:
    """An index of `tokens` [N] in memory."""
    size = retrieval.SHARD_TOKENS
    shards = [retrieval.sorted_places(tokens, at, min(at + size, len(tokens))) for at in range(0, len(tokens), size)]
    return retrieval.SuffixIndex(tokens, np.concatenate([np.empty(0, dtype=np.int32), *shards]))
