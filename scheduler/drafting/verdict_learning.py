"""Updates a draft's trust, sharpness and profile from a verdict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pace.calibration import DraftCalibration, Trust
from ..trees.token_tree import IntArray, TokenTree
from ..trees.verify import Verdict
from .candidate_tree import CandidateTree


def learn_trust(trust: Trust, candidates: CandidateTree, sent: IntArray, tree: TokenTree, verdict: Verdict) -> None:
    """Update the trust from the draft's own nodes of `tree`, which consists of the candidates `sent`."""
    is_drafted = ~(candidates.is_claimed(sent) | candidates.is_certain(sent))
    if is_drafted.any():
        trust.observe(float(np.exp(tree.scores[is_drafted]).sum()), int(is_drafted[verdict.path].sum()))


def learn_trust_unsent(trust: Trust, candidates: CandidateTree, best: IntArray, verdict: Verdict) -> None:
    """Update the trust from the best candidate if the tree was empty; otherwise a low trust could never rise again."""
    for guess in candidates.nodes[best[:1]]:
        trust.observe(float(np.exp(guess["score"])), int(guess["token"] == verdict.tokens[0]))


def learn_children(
    calibration: DraftCalibration, candidates: CandidateTree, path: IntArray, tokens: Sequence[int]
) -> None:
    """Update the sharpness from the target's choices at the root and along `path`, and the profile from all rows."""
    if not candidates.is_rooted:
        return
    scores = candidates.child_scores
    for row, token in zip([-1, *candidates.rows(path)], tokens, strict=False):
        calibration.observe_choice(scores.likelihood(row + 1, token))
    calibration.profile.observe(np.exp(scores.log_probabilities(calibration.index)))
