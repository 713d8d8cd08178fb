"""BiLD (Big Little Decoder, Kim et al., 2302.07863, section 3): the draft speaks alone until it doubts. Lossy.

Fallback: the draft decodes token by token while the probability of its likeliest token is at least `tau`. Then the
target scores the whole chain in one pass. Rollback: from the first token on to which the target gives less than
ROLLBACK, the chain is dropped, and the target chooses the token there; otherwise it chooses the one after the chain.
The publication's rollback threshold is a cross entropy, -log ROLLBACK.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from offspec.scheduler.drafting.drafter import SequentialDrafter, TreeModel
from offspec.scheduler.drafting.layered_draft import LayeredDraft
from offspec.scheduler.joint import log_likelihoods
from offspec.scheduler.params import SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.verify import Logits, TargetPass, Verdict

TAU = 0.6  # where none is given; the publication tunes it for each task
ROLLBACK = 0.1  # least probability under the target


class BildDrafter(SequentialDrafter):
    """A chain that the draft is sure of. At a temperature above 0 it is drawn with the noise of the target's positions.

    The chain has at most `beam * gamma` tokens, the room that lossy acceptance plans for.
    """

    is_lossy = True

    def __init__(
        self, model: TreeModel, sampler: Sampler, params: SpeculationParams, final: Collection[int] = ()
    ) -> None:
        self._draft = LayeredDraft(model, sampler, 1, coupled=True, keeps_distributions=True)
        self._final = frozenset(final)
        self._most = params.beam * params.gamma
        self._least_confidence = math.log(TAU if params.tau is None else params.tau)
        self._least_likelihood = math.log(ROLLBACK)
        self._num_rows = 0

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        draft, tokens, row = self._draft, list[int](), ROOT
        room = min(draft.room(text, max_depth), self._most)
        draft.forget()
        self._num_rows = 0
        if room < 1:
            return TokenTree.empty()
        candidates = draft.begin(text)
        while float(draft.log_probabilities(row).max()) >= self._least_confidence:
            token = int(candidates.tokens[0, 0])
            if token < 0:  # a constraint excludes it
                break
            tokens.append(token)
            if len(tokens) == room or token in self._final:
                break
            rows, candidates = draft.expand(np.array([row]), np.array([token]))
            row = int(rows[0])
            self._num_rows = row + 1
        return TokenTree.chain(tokens)

    def verify(self, tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
        """The chain before the rollback, and the target's token after it; arguments and errors: `verify_jointly`."""
        with np.errstate(invalid="ignore"):  # after a token that the target excludes
            likelihoods = np.diff(log_likelihoods(tree, logits, sampler, position), prepend=0.0)
        is_kept = likelihoods >= self._least_likelihood
        length = len(tree) if is_kept.all() else int(is_kept.argmin())
        tokens = tree.tokens[:length].tolist()
        return Verdict(list(range(length)), [*tokens, sampler.choose(logits[length], position + length, tokens)])

    def observe(self, done: TargetPass) -> None:
        if self._draft.layers:
            self._draft.model.keep([row for row in done.verdict.path if row < self._num_rows])
