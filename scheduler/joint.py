"""Multi-token joint decoding with a draft (MJSD, Qin et al., 2407.09722; later MTAD, MMTAD): lossy, never the default.

Greedy decoding takes the likeliest token each time; joint decoding (MJGD) looks for the gamma tokens that are likeliest
*together*, which no model finds without trying them all. So the draft looks for them, by beam search on q(x1..xi), and
the target judges all its beams in one pass. i tokens of a beam are accepted where min(1, p(x1..xi) / q(x1..xi)) >= tau;
the most that are accepted anywhere is what the text gets, and one token by the target behind them. The condition is on
the joint probability alone: a token that fails it may lie in the middle, where those behind it make up for it. Knows
models only through the `TreeModel` protocol.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch

from .drafter import SequentialDrafter, TreeModel
from .layered_draft import UNEXPANDED, LayeredDraft
from .params import SpeculationParams
from .sampling import Sampler, not_finite
from .tree import ROOT, FloatArray, IntArray, TokenTree
from .verify import Logits, TargetPass, Verdict

SLICE_ROWS = 32  # whose double-precision logits are in memory at a time

# ------------------------------------------------------------------------------------------------ the draft


class BeamDrafter(SequentialDrafter):
    """Beam search for the `gamma` tokens that the draft holds likeliest together, one per request.

    Every hypothesis that was in the beam at some length is sent, beam x gamma nodes at most: those that fell out later
    cost a row each, and may be what the target likes best where the longer ones fail. `final` tokens (end of text) end
    a hypothesis, which keeps its place in the beam for as long as it is among the likeliest. `TokenTree.scores` are log
    q(x1..xi), as the sampler's parameters make q of the draft's logits.
    """

    def __init__(
        self, model: TreeModel, sampler: Sampler, params: SpeculationParams, final: Collection[int] = ()
    ) -> None:
        # Of one node's children no more than the beam's width can be in the beam.
        self._draft = LayeredDraft(model, sampler, params.beam, coupled=False)
        self._params, self._final = params, sorted(final)
        self._rows: IntArray = np.empty(0, dtype=np.int64)

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        draft, width = self._draft, self._params.beam
        max_depth = min(draft.room(text, max_depth), self._params.gamma)
        draft.forget()
        if max_depth < 1:
            return TokenTree.empty()
        none = np.empty(0, dtype=np.int64)
        tokens, parents, depths, scores, rows = none, none, none, np.empty(0), none
        beam, ended = np.array([ROOT]), none  # the hypotheses' last nodes: open ones, and those at a final token
        candidates = draft.begin(text)
        for depth in range(1, max_depth + 1):
            above = scores[beam] if depth > 1 else np.zeros(1)
            values = candidates.log_probabilities + above[:, None]
            order = np.argsort(-np.concatenate((scores[ended], values.ravel())), kind="stable")[:width]
            chosen = order[order >= len(ended)] - len(ended)
            row, column = np.unravel_index(chosen[np.isfinite(values.ravel()[chosen])], values.shape)
            new = np.arange(len(tokens), len(tokens) + len(row))
            tokens = np.concatenate((tokens, candidates.tokens[row, column]))
            parents = np.concatenate((parents, beam[row]))
            depths = np.concatenate((depths, np.full(len(new), depth)))
            scores = np.concatenate((scores, values[row, column]))
            rows = np.concatenate((rows, np.full(len(new), UNEXPANDED)))
            is_final = np.isin(tokens[new], self._final)
            ended = np.concatenate((ended[order[order < len(ended)]], new[is_final]))
            beam = new[~is_final]
            if depth == max_depth or not len(beam):
                break
            parent_rows = np.where(parents[beam] == ROOT, ROOT, rows[parents[beam]])
            rows[beam], candidates = draft.expand(parent_rows, tokens[beam])
        self._rows = rows
        return TokenTree(tokens, parents, depths, scores)

    def observe(self, done: TargetPass) -> None:
        if self._draft.layers:
            self._draft.model.keep([int(row) for row in self._rows[done.verdict.path] if row != UNEXPANDED])


# ------------------------------------------------------------------------------------------------ the target


def joint_walk(
    tree: TokenTree, logits: Logits, sampler: Sampler, position: int, *, tau: float, final: Collection[int] = ()
) -> Verdict:
    """The longest prefix that is accepted jointly (2407.09722), and the target's greedy token behind it.

    tree: its scores are log q(x1..xi). logits: fp32 [1 + N, V], the target's after the root, then after each node.
    position: that of the token after the root. The sampler is greedy; p is what its parameters make of the logits.
    Raises NumericalError where logits are not numbers.
    """
    end = _end_of_accepted(tree, log_likelihoods(tree, logits, sampler, position), tau, final)
    path = tree.path(end)
    tokens = tree.tokens[path].tolist()
    return Verdict(path, [*tokens, sampler.choose(logits[end + 1], position + len(path), tokens)])


def log_likelihoods(tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> FloatArray:
    """[N]: log p(x1..xi) of the path down to each node; `logits`, `position` and errors as in `joint_walk`."""
    found = np.zeros(len(tree))
    inner = np.unique(tree.parents)  # the nodes, ROOT among them, whose children are to be judged
    for first in range(0, len(inner), SLICE_ROWS):
        nodes = inner[first : first + SLICE_ROWS]
        paths = [tree.tokens[tree.path(node)].tolist() if sampler.needs_history else [] for node in nodes.tolist()]
        rows = torch.stack([logits[node + 1] for node in nodes.tolist()]).double()
        values = sampler.process(rows, paths)
        normalisers = values.logsumexp(-1)
        if len(bad := torch.nonzero(~torch.isfinite(normalisers)).flatten().tolist()):
            raise not_finite(position + len(tree.path(int(nodes[bad[0]]))))
        children = np.flatnonzero(np.isin(tree.parents, nodes))
        parent_rows = torch.as_tensor(np.searchsorted(nodes, tree.parents[children]), device=values.device)
        tokens = torch.as_tensor(tree.tokens[children], device=values.device)
        found[children] = (values[parent_rows, tokens] - normalisers[parent_rows]).cpu().numpy()
    for depth in range(2, int(tree.depths.max(initial=0)) + 1):
        level = np.flatnonzero(tree.depths == depth)
        found[level] += found[tree.parents[level]]
    return found


def _end_of_accepted(tree: TokenTree, likelihoods: FloatArray, tau: float, final: Collection[int]) -> int:
    """The last node of the accepted path; ROOT where none is accepted.

    Of paths that are equally long it is the one that the target holds likeliest. A text that has ended is as long as
    one likes (what follows is certain under both models), so it is compared with the longest.
    """
    passed = likelihoods - tree.scores >= math.log(tau)  # min(1, p / q) >= tau, as tau is at most 1
    if not passed.any():
        return ROOT
    longest = tree.depths == tree.depths[passed].max()
    found = passed & (longest | np.isin(tree.tokens, list(final)))
    return int(np.where(found, likelihoods, -math.inf).argmax())
