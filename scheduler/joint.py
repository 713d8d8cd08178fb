"""Multi-token joint decoding with a draft (MJSD, Qin et al., 2407.09722; later MTAD, MMTAD): lossy, never the default.

Greedy decoding takes the likeliest token at each step. Joint decoding (MJGD) searches for the gamma tokens that are
likeliest *together*; an exact search would try all sequences. So the draft searches by beam search on q(x1..xi), and
the target scores all beams in one pass. The first i tokens of a beam are accepted if min(1, p(x1..xi) / q(x1..xi)) >=
tau. The text gets the longest accepted prefix, and one token of the target after it. The condition is on the joint
probability alone: a token in the middle may fail it if later tokens compensate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch

from .drafting.drafter import SequentialDrafter, TreeModel
from .drafting.layered_draft import UNEXPANDED, LayeredDraft
from .params import SpeculationParams
from .trees.sampling import Sampler, not_finite
from .trees.token_tree import ROOT, FloatArray, IntArray, TokenTree
from .trees.verify import Logits, TargetPass, Verdict

TAU = 0.1  # where none is given
SLICE_ROWS = 32  # rows whose double-precision logits are in memory at a time

# ------------------------------------------------------------------------------------------------ the draft


class BeamDrafter(SequentialDrafter):
    """Base: beam search for the `gamma` tokens with the highest joint probability under the draft; one per request.

    The tree contains every hypothesis that was in the beam at some length, at most beam x gamma nodes. A hypothesis
    that left the beam costs a row per node, and may be the best one if the longer ones fail. `final` tokens (end of
    text) end a hypothesis, which stays in the beam while it is among the likeliest. `TokenTree.scores` are log
    q(x1..xi); q is the draft's distribution after the sampler's parameters.
    """

    is_lossy = True

    def __init__(
        self,
        model: TreeModel,
        sampler: Sampler,
        params: SpeculationParams,
        final: Collection[int] = (),
        *,
        coupled: bool = False,
    ) -> None:
        """coupled: rank by the target's noise, and keep the draft's distributions (`LayeredDraft`)."""
        # The beam can contain at most `beam` children of one node.
        self._draft = LayeredDraft(model, sampler, params.beam, coupled=coupled, keeps_distributions=coupled)
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


class JointDrafter(BeamDrafter):
    """A beam, of which the target accepts the longest prefix that is likely enough (`verify_jointly`)."""

    def verify(self, tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
        tau = TAU if self._params.tau is None else self._params.tau
        return verify_jointly(tree, logits, sampler, position, tau=tau, final=self._final)


# ------------------------------------------------------------------------------------------------ the target


def verify_jointly(
    tree: TokenTree, logits: Logits, sampler: Sampler, position: int, *, tau: float, final: Collection[int] = ()
) -> Verdict:
    """The longest jointly accepted prefix (2407.09722), and the target's greedy token after it.

    tree: its scores are log q(x1..xi). logits: fp32 [1 + N, V], the target's after the root, then after each node.
    position: of the token after the root. The sampler is greedy; p is the distribution of the processed logits.
    Raises NumericalError if logits are not finite.
    """
    end = _end_of_accepted(tree, log_likelihoods(tree, logits, sampler, position), tau, final)
    path = tree.path(end)
    tokens = tree.tokens[path].tolist()
    return Verdict(path, [*tokens, sampler.choose(logits[end + 1], position + len(path), tokens)])


def log_likelihoods(tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> FloatArray:
    """[N]: log p(x1..xi) of the path down to each node; `logits`, `position` and errors as in `verify_jointly`."""
    likelihoods = np.zeros(len(tree))
    inner = np.unique(tree.parents)  # the nodes that have children, including ROOT
    for first in range(0, len(inner), SLICE_ROWS):
        nodes = inner[first : first + SLICE_ROWS]
        paths = [tree.tokens[tree.path(node)].tolist() if sampler.needs_history else [] for node in nodes.tolist()]
        rows = torch.stack([logits[node + 1] for node in nodes.tolist()]).double()
        values = sampler.process(rows, paths)
        normalisers = values.logsumexp(-1)
        if len(bad := torch.nonzero(~torch.isfinite(normalisers)).flatten().tolist()):
            raise not_finite(position + len(tree.path(int(nodes[bad[0]]))))
        children = np.flatnonzero(np.isin(tree.parents, nodes))
        places = np.stack((np.searchsorted(nodes, tree.parents[children]), tree.tokens[children]))
        parent_rows, tokens = sampler.to_device(torch.from_numpy(places), values.device)
        likelihoods[children] = (values[parent_rows, tokens] - normalisers[parent_rows]).cpu().numpy()
    for depth in range(2, int(tree.depths.max(initial=0)) + 1):
        level = np.flatnonzero(tree.depths == depth)
        likelihoods[level] += likelihoods[tree.parents[level]]
    return likelihoods


def _end_of_accepted(tree: TokenTree, likelihoods: FloatArray, tau: float, final: Collection[int]) -> int:
    """The last node of the accepted path; ROOT if no path is accepted.

    Among paths of equal length, the likeliest under the target wins. A path with a final token counts as long as the
    longest, because its continuation is certain under both models.
    """
    passed = likelihoods - tree.scores >= math.log(tau)  # min(1, p / q) >= tau, as tau is at most 1
    if not passed.any():
        return ROOT
    longest = tree.depths == tree.depths[passed].max()
    may_end = passed & (longest | np.isin(tree.tokens, list(final)))
    return int(np.where(may_end, likelihoods, -math.inf).argmax())
