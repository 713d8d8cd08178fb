"""Recall: correct the draft's logits by its errors at similar places.

A *place* is a position at which both models computed a final state. A pass gives the target's prediction after every
node of the tree, hundreds of places, of which the text uses a few. The first pass also gives those along the prompt.
The draft's errors at these places predict its errors at similar places. So recall keeps the last `SIZE` places, each
as the draft's and the target's final states. The corrected logits of a new place are

    log q(x) + sum_i w_i (log p_i(x) - log q_i(x))
    w_i = k_i / (DOUBT + sum_j k_j),  k_i = exp(NEARNESS (cos_i - 1))

where cos_i is the cosine of the draft's states at the new place and at place i. This is a kernel regression of the
draft's error (Nadaraya-Watson); kNN-LM (arXiv 1911.00172) uses nearest neighbours on hidden states. Logits are linear
in the states, so the sum is taken over states: each round multiplies by the target's head once, and no place needs an
array of the vocabulary's size. If a model caps its logits, the cap is applied after the sum, with the draft's value.
Recall changes the drafted tokens, never the text. It does not depend on how trees grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.pace.costs import WIDTHS
from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.trees.token_tree import IntArray
from offspec.scheduler.trees.verify import TargetStates
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..model.config import ModelConfig
from ..model.decoder import Decoder, SharedForward
from ..model.memory.request_caches import DraftText

SIZE = 1024  # number of places kept
MOST_NODES = 256  # places kept of one tree, so that a large tree does not replace all earlier places
MOST_PROMPT = 512  # places kept of a prompt, the last ones
NEARNESS = 20.0  # how fast a place's weight falls with its distance; values from 10 to 40 give similar results
DOUBT = 0.1  # the sum of k at which half of the correction is applied


class Correction(NamedTuple):
    """States [R, hidden] for the draft's and the target's heads; the corrected logits are the sum of both results."""

    draft: Tensor
    target: Tensor


class Recall:
    """A ring buffer of the last places at which both models computed final states."""

    def __init__(self, draft: Decoder, target: Decoder, size: int = SIZE) -> None:
        def room(*shape: int, of: Decoder) -> Tensor:
            return torch.zeros(size, *shape, dtype=of.dtype, device=of.device)

        self._keys = room(draft.config.hidden_size, of=draft)  # the draft's states, normalised
        self._lengths = room(of=draft)  # their norms
        self._target_states = room(target.config.hidden_size, of=target)
        self._count = 0  # places added so far, including overwritten ones

    def __len__(self) -> int:
        return min(self._count, len(self._keys))

    @torch.inference_mode()
    def add(self, draft: Tensor, target: Tensor) -> None:
        """Add K places: the draft's and the target's final states, [K, hidden] each."""
        size = len(self._keys)
        draft, target = draft[-size:], target[-size:]
        slots = torch.arange(self._count, self._count + len(draft), device=draft.device) % size
        self._keys[slots] = F.normalize(draft, dim=-1)
        self._lengths[slots] = draft.norm(dim=-1)
        self._target_states[slots] = target
        self._count += len(draft)

    @torch.inference_mode()
    def correct(self, states: Tensor) -> Correction:
        """The correction at R new places, from the draft's final states [R, hidden] there."""
        keys, lengths, targets = (part[: len(self)] for part in (self._keys, self._lengths, self._target_states))
        nearness = F.normalize(states, dim=-1) @ keys.T
        weights = (NEARNESS * (nearness.float() - 1)).exp()
        weights = (weights / (DOUBT + weights.sum(-1, keepdim=True))).to(keys.dtype)
        return Correction(states - (weights * lengths) @ keys, weights.to(targets.dtype) @ targets)


def recall_bytes(
    draft: ModelConfig, target: ModelConfig, itemsize: int, num_waiting: int = MAX_ROWS + MOST_PROMPT
) -> int:
    """Bytes of a `Recall`, of the states that wait for a verdict and their copy, and of one corrected round.

    num_waiting: pending nodes and tokens of a prompt. The round has WIDTHS[-1] rows.
    """
    rows, place = int(WIDTHS[-1]), draft.hidden_size + 1 + target.hidden_size
    waiting = 2 * num_waiting * draft.hidden_size
    return itemsize * (SIZE * place + waiting) + 4 * rows * (3 * SIZE + target.vocab_size)


class RecallingText:
    """The draft's text, with logits corrected by recall (a `scheduler.drafting.drafter.TreeModel`)."""

    num_before = MOST_PROMPT  # rows of a chain whose states are kept, in addition to its last one

    def __init__(self, text: DraftText, target: Decoder, recall: Recall) -> None:
        """text: a text without pending nodes."""
        self.text, self._target, self._recall = text, target, recall
        # The draft's final states:
        self._root: Tensor | None = None  # after the text's last token, [1, hidden]
        self._before: Tensor | None = None  # after the earlier tokens of the same chain, [B, hidden]
        self._pending: list[Tensor] = []  # after the pending nodes, in parts of [P, hidden]

    @property
    def vocabulary(self) -> Vocabulary:
        return self.text.vocabulary

    @property
    def max_context(self) -> int:
        return self.text.max_context

    @property
    def length(self) -> int:
        return self.text.length

    @torch.inference_mode()
    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        """`CachedDecoder.score` with corrected logits."""
        states = self.text.states(chain, tokens, depths, parents, before=self.num_before)
        return self._logits_of(states, bool(chain), len(tokens))

    def joining(self, chain: Sequence[int]) -> SharedForward | None:
        """As `CachedDecoder.joining`."""
        shared = self.text.joining(chain)
        return shared and shared._replace(num_before=self.num_before, logits=self._logits_of)

    def _logits_of(self, states: Tensor, is_after_chain: bool, num_nodes: int) -> Tensor:
        """Corrected logits of a forward, whose states [B + (1 if is_after_chain) + num_nodes, hidden] are kept.

        B: up to `num_before` rows of the chain before its last one.
        """
        nodes = states.clone()  # the next replay of a captured round overwrites its states
        if is_after_chain:
            num_before = len(states) - num_nodes - 1
            self._before, self._root, nodes = nodes[:num_before], nodes[num_before, None], nodes[num_before + 1 :]
            states = states[num_before:]
        if num_nodes:
            self._pending.append(nodes)
        return self._logits(states)

    @torch.inference_mode()
    def corrected(self, rows: IntArray) -> Tensor:
        """Logits [K, vocab] of scored rows, corrected by the places known by now; see `LogitCorrector`."""
        return self._logits(self.states_at(rows))

    def _logits(self, states: Tensor) -> Tensor:
        draft = self.text.decoder
        if not len(self._recall):
            return draft.head(states)
        correction = self._recall.correct(states)
        logits = draft.linear_logits(correction.draft)
        self.vocabulary.add_target(logits, self._target.logits_by(draft.backend, correction.target))
        return draft.capped(logits)

    def states_at(self, rows: IntArray) -> Tensor:
        """The draft's final states [K, hidden] at these pending rows; ROOT is the text's last token."""
        assert self._root is not None
        return torch.cat((self._root, *self._pending))[to_device(torch.from_numpy(rows + 1), self._root.device)]

    def observe(self, rows: IntArray, nodes: IntArray, states: TargetStates) -> None:
        """Add scored rows as places, with the target's states after the same nodes; see `LogitCorrector`."""
        rows, nodes = rows[: 1 + MOST_NODES], nodes[: 1 + MOST_NODES]
        places = self.states_at(rows)
        if self._before is not None and (count := min(len(self._before), states.num_before)):
            self._recall.add(self._before[-count:], states.states_before(count))
        self._before = None
        self._recall.add(places, states.states(nodes.tolist()))

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """As `CachedDecoder.keep`."""
        self.text.keep(path, pending)
        if self._pending:
            places = torch.cat(self._pending)
            self._root = places[path[-1], None].clone() if path else self._root
            kept = to_device(torch.tensor(pending, dtype=torch.int64), places.device)
            self._pending = [places[kept]] if pending else []
