"""Lossy modes in which the draft's distribution counts too: which token follows, given both distributions.

Each rule is a function of the target's distribution p and the draft's q, after the sampler's parameters, before the
token is chosen. The noise of the position is the same for all of them, so the text depends on target, draft, rule,
parameters and seed, and on where the tree ends: there q is unknown, and the token is the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offspec.scheduler.drafting.drafter import TreeModel
from offspec.scheduler.drafting.layered_draft import UNEXPANDED
from offspec.scheduler.joint import BeamDrafter
from offspec.scheduler.params import SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.verify import Logits, Verdict

CONTRAST_LEAST = 0.1  # of the target's greatest probability: tokens below it stay excluded (2311.08981, section 2)
RELAXED_BEST = 3  # number of the target's likeliest tokens among which a guess is accepted


def cascade(log_p: Tensor, log_q: Tensor, tau: float) -> Tensor:
    """Speculative cascades, rule OPT (2405.19261, section 4.3): q, unless p is surer by more than their distance.

    q where max q >= max p - tau * TV(p, q), otherwise p.
    """
    p, q = log_p.exp(), log_q.exp()
    distance = (p - q).clamp(min=0).sum()
    return log_q if q.max() >= p.max() - tau * distance else log_p


def contrastive(log_p: Tensor, log_q: Tensor, tau: float) -> Tensor:
    """Speculative contrastive decoding (2311.08981, section 2): what the target prefers more than the draft does.

    (1 + tau) log p - tau log q, among tokens with at least CONTRAST_LEAST of the greatest p.
    """
    kept = log_p >= log_p.max() + math.log(CONTRAST_LEAST)
    return torch.where(kept, (1 + tau) * log_p - tau * log_q.clamp(min=-50.0), -math.inf)


def mix(log_p: Tensor, log_q: Tensor, tau: float) -> Tensor:
    """The two models' logits combined (FS-GEN, 2406.12295, section 2): a weighted mean of log-probabilities."""
    return (1 - tau) * log_p + tau * log_q.clamp(min=-50.0)


def relaxed(log_p: Tensor, log_q: Tensor, tau: float) -> Tensor:
    """Relaxed acceptance (SpecDec, 2203.16487, section 3.2; DARE, 2408.05676): a guess may be second or third best.

    q, if its likeliest token is among the target's RELAXED_BEST and has at least `tau` of its greatest
    probability; otherwise p.
    """
    token = log_q.argmax()
    accepts = (log_p > log_p[token]).sum() < RELAXED_BEST and log_p[token] >= log_p.max() + math.log(tau)
    return log_q if accepts else log_p


@dataclass(frozen=True)
class Rule:
    """A lossy mode. blend: log-probabilities up to a constant [V] of log p and log q [V], and the tau."""

    blend: Callable[[Tensor, Tensor, float], Tensor]
    tau: float


RULES: dict[str, Rule] = {
    "cascade": Rule(cascade, 0.5),
    "contrastive": Rule(contrastive, 0.5),
    "mix": Rule(mix, 0.3),
    "relaxed": Rule(relaxed, 0.3),
}


class BlendDrafter(BeamDrafter):
    """A beam of the draft, with the target's noise, that keeps the draft's distributions until the verdict."""

    def __init__(
        self, model: TreeModel, sampler: Sampler, params: SpeculationParams, final: Collection[int] = ()
    ) -> None:
        super().__init__(model, sampler, params, final, coupled=True)
        self._way = RULES[params.accept]
        self._tau = self._way.tau if params.tau is None else params.tau

    def log_probabilities(self, node: int) -> Tensor | None:
        """log q [V] after a node of the last tree, or after ROOT; None where the draft has not scored it."""
        row = ROOT if node == ROOT else int(self._rows[node])
        return None if row == UNEXPANDED or not self._draft.layers else self._draft.log_probabilities(row)

    def verify(self, tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
        """Walk down the tree by choices from the blend; arguments and errors as in `verify_exactly`."""
        node, path, tokens = ROOT, list[int](), list[int]()
        while True:
            token = sampler.choose(logits[node + 1], position + len(path), tokens)
            if (log_q := self.log_probabilities(node)) is not None:
                log_p = sampler.process(logits[node + 1][None].double(), [tokens])[0].log_softmax(-1)
                values = blended(self._way, log_p, log_q.to(log_p), self._tau)
                token = int((values if sampler.is_greedy else values + sampler.noise(position + len(path))).argmax())
            tokens.append(token)
            child = tree.child(node, token)
            if child is None:
                return Verdict(path, tokens)
            node = child
            path.append(node)


def blended(method: Rule, log_p: Tensor, log_q: Tensor, tau: float) -> Tensor:
    """Log-probabilities [V] up to a constant, among the tokens that the target does not exclude.

    log_p [V], log_q [up to V]: normalised. If nothing is left, they are the target's.
    """
    log_q = pad(log_q, (0, len(log_p) - len(log_q)), value=-math.inf)
    values = torch.where(log_p > -math.inf, method.blend(log_p, log_q, tau), -math.inf)
    return values if values.max() > -math.inf else log_p
