"""A draft that recalls how far from the target it was at places like this one.

A pass says what the target thinks after every node of the tree, hundreds of places of which the text takes a few, and
the first one after every token of the prompt. None of it is waste: where the draft drafts next, it errs as it did
there. So the last `SIZE` places are kept, each as the two final states that the models' heads made logits of, and a
place's logits become

    log q(x) + sum_i w_i (log p_i(x) - log q_i(x))
    w_i = k_i / (DOUBT + sum_j k_j),  k_i = exp(NEARNESS (cos_i - 1))

with cos_i between the draft's state here and there: a kernel regression of the draft's error (Nadaraya-Watson; nearest
neighbours on hidden states are kNN-LM's, 1911.00172). Since logits are linear in the states, the sum is taken over
states: the target's head is multiplied once a round, and nothing is kept or computed of the size of the vocabulary for
each place. A model that caps its logits does so behind the head: the sum is taken before, and capped as the draft's.
What is guessed changes by it, never the text. Knows nothing of how trees grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.small_transfers import to_device
from offspec.scheduler.costs import WIDTHS
from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.verify import TargetStates
from offspec.scheduler.vocabulary import Vocabulary

from ..model.config import ModelConfig
from ..model.decoder import BoolArray, CachedDecoder, Decoder, IntArray

SIZE = 1024  # places that are kept
MOST_NODES = 256  # of one tree, so that a large one leaves something of those before it
MOST_PROMPT = 512  # of a prompt, its last ones
NEARNESS = 20.0  # how fast a place counts less with its distance; from 10 to 40 it hardly matters
DOUBT = 0.1  # how much nearness there has to be for half of the correction to be believed


class Correction(NamedTuple):
    """States [R, hidden] for the draft's head and for the target's, whose `linear_logits` are to be added."""

    draft: Tensor
    target: Tensor


class Recall:
    """The last places at which both models were asked; the oldest ones give way."""

    def __init__(self, draft: Decoder, target: Decoder, size: int = SIZE) -> None:
        def room(*shape: int, of: Decoder) -> Tensor:
            return torch.zeros(size, *shape, dtype=of.dtype, device=of.device)

        self._keys = room(draft.config.hidden_size, of=draft)  # of length 1
        self._lengths = room(of=draft)
        self._said = room(target.config.hidden_size, of=target)
        self._count = 0  # of all that were ever added

    def __len__(self) -> int:
        return min(self._count, len(self._keys))

    @torch.inference_mode()
    def add(self, draft: Tensor, target: Tensor) -> None:
        """K places: the draft's final states [K, hidden] and the target's."""
        size = len(self._keys)
        draft, target = draft[-size:], target[-size:]
        slots = torch.arange(self._count, self._count + len(draft), device=draft.device) % size
        self._keys[slots] = F.normalize(draft, dim=-1)
        self._lengths[slots] = draft.norm(dim=-1)
        self._said[slots] = target
        self._count += len(draft)

    @torch.inference_mode()
    def correct(self, states: Tensor) -> Correction:
        """For the draft's final states [R, hidden] at R new places."""
        keys, lengths, said = (part[: len(self)] for part in (self._keys, self._lengths, self._said))
        nearness = F.normalize(states, dim=-1) @ keys.T
        weights = (NEARNESS * (nearness.float() - 1)).exp()
        weights = (weights / (DOUBT + weights.sum(-1, keepdim=True))).to(keys.dtype)
        return Correction(states - (weights * lengths) @ keys, weights.to(said.dtype) @ said)


def recall_bytes(draft: ModelConfig, target: ModelConfig, itemsize: int) -> int:
    """Bytes of a `Recall`, of the states that wait for a verdict with a copy of them, and of a round that it corrects.

    The round is of WIDTHS[-1] rows.
    """
    rows, place = int(WIDTHS[-1]), draft.hidden_size + 1 + target.hidden_size
    waiting = 2 * (MAX_ROWS + MOST_PROMPT) * draft.hidden_size
    return itemsize * (SIZE * place + waiting) + 4 * rows * (3 * SIZE + target.vocab_size)


class RecallingText:
    """The draft's text, with logits corrected by what is recalled (a `scheduler.drafter.TreeModel`)."""

    def __init__(self, text: CachedDecoder, target: Decoder, recall: Recall) -> None:
        """text: one in which nothing is pending."""
        self._text, self._target, self._recall = text, target, recall
        self._root: Tensor | None = None  # the final state after the text's last token, [1, hidden]
        self._before: Tensor | None = None  # those after the tokens before it that were scored with it, [B, hidden]
        self._pending: list[Tensor] = []  # parts of [P, hidden], those after the pending nodes

    @property
    def vocabulary(self) -> Vocabulary:
        return self._text.vocabulary

    @property
    def max_context(self) -> int:
        return self._text.max_context

    @property
    def length(self) -> int:
        return self._text.length

    @torch.inference_mode()
    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """As `CachedDecoder.score`, corrected."""
        states = self._text.states(chain, tokens, depths, mask, before=MOST_PROMPT)
        nodes = states.clone()  # those of a static round do not outlive it
        if chain:
            num_before = len(states) - len(tokens) - 1
            self._before, self._root, nodes = nodes[:num_before], nodes[num_before, None], nodes[num_before + 1 :]
            states = states[num_before:]
        self._pending.append(nodes)
        return self._logits(states)

    @torch.inference_mode()
    def corrected(self, rows: IntArray) -> Tensor:
        """Logits [K, vocab] after places that were scored here, by what is recalled by now; see `LogitCorrector`."""
        return self._logits(self.states_at(rows))

    def _logits(self, states: Tensor) -> Tensor:
        draft = self._text.decoder
        if not len(self._recall):
            return draft.head(states)
        correction = self._recall.correct(states)
        logits = draft.linear_logits(correction.draft)
        self.vocabulary.add_target(logits, self._target.linear_logits(correction.target))
        return draft.capped(logits)

    def states_at(self, rows: IntArray) -> Tensor:
        """The draft's final states [K, hidden] in these rows of what is pending, ROOT for the text's last token."""
        assert self._root is not None
        return torch.cat((self._root, *self._pending))[to_device(torch.from_numpy(rows + 1), self._root.device)]

    def observe(self, rows: IntArray, nodes: IntArray, states: TargetStates) -> None:
        """What the target made of places that were scored here; see `LogitCorrector`."""
        rows, nodes = rows[: 1 + MOST_NODES], nodes[: 1 + MOST_NODES]
        places = self.states_at(rows)
        if self._before is not None and (count := min(len(self._before), states.num_before)):
            self._recall.add(self._before[-count:], states.states_before(count))
        self._before = None
        self._recall.add(places, states.states(nodes.tolist()))

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """As `CachedDecoder.keep`."""
        self._text.keep(path, pending)
        if self._pending:
            places = torch.cat(self._pending)
            self._root = places[path[-1], None].clone() if path else self._root
            self._pending = [places[to_device(torch.tensor(pending, dtype=torch.int64), places.device)]]
