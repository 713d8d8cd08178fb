"""Acceptance rules from the literature, as baselines for the exact walk: ratio test and block verification, on chains.

The draft samples gamma tokens from its distributions q; the target's p are known after each of them. A rule determines
the number of accepted tokens and the distribution of the next one, so that the emitted tokens have exactly the target's
distribution. Both rules need their own randomness, so the text depends on the draft; offspec's text does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from offspec.scheduler.drafting.drafter import TreeModel
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree


@dataclass(frozen=True)
class Outcome:
    """The result of a rule for a chain of gamma drafted tokens.

    stop [gamma + 1]: the probability that exactly that many are accepted. following [gamma + 1, V]: the distribution of
    the token after them; rows at which a chain never stops are meaningless.
    """

    stop: FloatArray
    following: FloatArray

    @property
    def expected_accepted(self) -> float:
        return float(self.stop @ np.arange(len(self.stop)))


# p [gamma + 1, V]: the target after the text and after each drafted token. q [gamma, V]: what each of them was drawn
# from.
Rule = Callable[[FloatArray, FloatArray, Sequence[int]], Outcome]


def token_level(p: FloatArray, q: FloatArray, drafted: Sequence[int]) -> Outcome:
    """The ratio test (Leviathan et al., 2211.17192, algorithm 1): each token separately, until one is rejected."""
    accepted = np.minimum(1.0, _ratios(p, q, drafted))
    reached = np.cumprod([1.0, *accepted])
    stop = reached * np.array([*(1 - accepted), 1.0])
    return Outcome(stop, np.vstack((normalised(np.maximum(p[:-1] - q, 0)), p[-1:])))


def block(p: FloatArray, q: FloatArray, drafted: Sequence[int]) -> Outcome:
    """Block verification (Sun et al., 2403.10444, algorithm 2): the longest prefix that passes its test."""
    joint = [1.0]  # of each beginning: p's share of q, capped at 1 on the way
    for ratio in _ratios(p, q, drafted):
        joint.append(min(1.0, joint[-1] * ratio))
    left = np.maximum(np.array(joint[:-1])[:, None] * p[:-1] - q, 0)
    passed = [_share(mass, 1 - above) for mass, above in zip(left.sum(-1), joint, strict=False)] + [joint[-1]]
    passed[0] = 1.0  # nothing accepted is what remains
    stop = np.array(passed) * np.append(np.cumprod(1 - np.array(passed[:0:-1]))[::-1], 1.0)
    return Outcome(stop, np.vstack((normalised(left), p[-1:])))


def draw(outcome: Outcome, drafted: Sequence[int], generator: np.random.Generator) -> list[int]:
    """The emitted tokens: those accepted, and the one that follows."""
    num_accepted = drawn(outcome.stop, generator)
    return [*drafted[:num_accepted], drawn(outcome.following[num_accepted], generator)]


def _ratios(p: FloatArray, q: FloatArray, drafted: Sequence[int]) -> FloatArray:
    """p / q of each drafted token."""
    rows, tokens = np.arange(len(drafted)), np.array(drafted, dtype=np.int64)
    ratios: FloatArray = p[rows, tokens] / q[rows, tokens]
    return ratios


def _share(mass: float, other: float) -> float:
    """mass / (mass + other); 0 / 0 is where p and q agree, so that a longer beginning passes for certain."""
    return mass / (mass + other) if mass > 0 else 0.0


def normalised(rows: FloatArray) -> FloatArray:
    """Rows [..., V] divided by their sums; rows of zeros stay so."""
    totals = rows.sum(-1, keepdims=True)
    shares: FloatArray = np.divide(rows, totals, out=np.zeros_like(rows), where=totals > 0)
    return shares


def drawn(probabilities: FloatArray, generator: np.random.Generator) -> int:
    """An index, with these probabilities up to rounding; never one whose probability is 0."""
    edges = probabilities.cumsum()
    return int(np.searchsorted(edges, generator.random() * edges[-1], side="right"))


# ------------------------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class Decoded:
    """A text decoded by a rule, and the target passes and drafted tokens that it took."""

    token_ids: list[int]
    num_passes: int
    num_drafted: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Candidates:
    """Candidates that a draft has drawn for one pass.

    num_scored: nodes of the tree that the draft has scored, the first ones. judge: from the target's distributions
    p [1 + N, V] to the accepted nodes, a path from the root, and the emitted tokens, one more.
    """

    tree: TokenTree
    num_scored: int
    judge: Callable[[FloatArray], tuple[list[int], list[int]]]


Draws = Callable[[Sequence[int], int], Candidates]  # from the text and the greatest depth


def decode(
    target: TreeModel,
    draft: TreeModel,
    sampler: Sampler,
    prompt: Sequence[int],
    max_new_tokens: int,
    draws: Draws,
    final: Collection[int] = (),
) -> Decoded:
    """Decode by candidates of `draft`; p are the target's distributions after the sampler's parameters.

    The sampler's noise is not used. Ends after a `final` token, or at max_new_tokens.
    """
    text, end, num_passes, num_nodes = list(prompt), len(prompt) + max_new_tokens, 0, 0
    sampler.extend(text)
    while len(text) < end and not (num_passes and text[-1] in final):
        candidates = draws(text, end - len(text) - 1)
        tree = candidates.tree
        paths: list[list[int]] = [[], *(tree.tokens[tree.path(node)].tolist() for node in range(len(tree)))]
        logits = target.score(text[target.length :], tree.tokens, tree.depths, tree.parents)
        path, emitted = candidates.judge(distributions(logits, sampler, paths))
        num_passes, num_nodes = num_passes + 1, num_nodes + len(tree)
        target.keep(path)
        draft.keep([node for node in path if node < candidates.num_scored])
        emitted = until(emitted, final)
        text += emitted
        sampler.extend(emitted)
    return Decoded(text[len(prompt) :], num_passes, num_nodes)


def chains(draft: TreeModel, sampler: Sampler, num_drafted: int, rule: Rule, generator: np.random.Generator) -> Draws:
    """Chains of `num_drafted` tokens, accepted by a rule."""

    def draws(text: Sequence[int], max_depth: int) -> Candidates:
        drafted, q = _drafted(draft, sampler, text, min(num_drafted, max_depth), generator)

        def judge(p: FloatArray) -> tuple[list[int], list[int]]:
            emitted = draw(rule(p, q, drafted), drafted, generator)
            return list(range(len(emitted) - 1)), emitted

        return Candidates(TokenTree.chain(drafted), len(drafted) - 1, judge)

    return draws


def _drafted(
    draft: TreeModel, sampler: Sampler, text: Sequence[int], num_drafted: int, generator: np.random.Generator
) -> tuple[list[int], FloatArray]:
    """A chain drawn from the draft, and the distributions [gamma, V of the target] that its tokens were drawn from."""
    drafted: list[int] = []
    q = np.zeros((num_drafted, sampler.vocab_size))
    for depth in range(num_drafted):
        chain = draft.vocabulary.text(text[draft.length :]) if depth == 0 else []
        tokens, steps = np.array(drafted[-1:], dtype=np.int64), np.arange(depth)
        logits = draft.score(chain, draft.vocabulary.inputs(tokens), steps[-1:] + 1, steps - 1)
        row = distributions(draft.vocabulary.over_target(logits, sampler.vocab_size), sampler, [drafted])[0]
        q[depth, : len(row)] = row
        drafted.append(drawn(row, generator))
    return drafted, q


def distributions(logits: Tensor, sampler: Sampler, paths: Sequence[Sequence[int]]) -> FloatArray:
    """[R, V] of logits [R, V] after the drafted tokens paths[r]; greedy is certain of its choice."""
    values = sampler.process(logits.double(), paths)
    if sampler.is_greedy:
        values = torch.where(one_hot(values.argmax(-1), values.shape[-1]) == 1, 0.0, -torch.inf)
    found: FloatArray = values.softmax(-1).cpu().numpy()
    return found


def until(tokens: list[int], final: Collection[int]) -> list[int]:
    """Up to and with the first final token."""
    ends = [place for place, token in enumerate(tokens) if token in final]
    return tokens[: ends[0] + 1] if ends else tokens
