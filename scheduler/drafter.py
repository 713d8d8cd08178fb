"""What a drafter is, what it is told of a request, and what it may ask of a model. Knows no way of drafting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .sampling import Sampler
from .tree import BoolArray, IntArray, TokenTree
from .verify import TargetPass, TargetStates
from .vocabulary import Vocabulary


class TreeModel(Protocol):
    """What a drafter needs of a model: score tokens behind one text, and remember those that became part of it."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Which of the target's tokens it reads and guesses."""

    @property
    def max_context(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of the text it holds."""

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """Commit chain; add R tree nodes, pending. Logits [(1 if chain) + R, C], C columns of `vocabulary`.

        chain, tokens: `vocabulary.inputs` of the target's. mask: bool [R, P + R], see `TokenTree.mask`; P nodes are
        pending.
        """

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending nodes `path`; `pending`, nodes below them, stay pending; the others are forgotten.

        Both ascend, and so do the two one after the other. What stays is numbered from 0 in its order.
        """


class LogitCorrector(Protocol):
    """Corrects a `TreeModel`'s logits by what the target said after nodes that the model had scored too."""

    def observe(self, rows: IntArray, nodes: IntArray, states: TargetStates) -> None:
        """Told before these are kept or forgotten.

        rows [K]: of the model's pending region, ROOT for the text's last token. nodes [K]: their rows of the target's
        pass.
        """

    def corrected(self, rows: IntArray) -> Tensor:
        """Logits [K, C] after these of what is pending (ROOT first), as the model would give them now."""


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter is told of one request.

    sampler: the target's. final: tokens that end the text, after which nothing is guessed. num_unscored: tokens of the
    text that the target's first pass has to score; None: as many as the draft has to.
    """

    sampler: Sampler
    final: Collection[int] = ()
    num_unscored: int | None = None


class Drafter(Protocol):
    """Guesses trees for one request: propose and observe by turns; after an error in between, make a new one."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        """A tree of guesses for what follows `text` (all tokens so far), at most max_depth deep."""

    @property
    def wants_overlap(self) -> bool:
        """Whether `extend` is worth calling beside the pass that comes."""

    def extend(self, is_over: Callable[[], bool]) -> None:
        """Between propose and observe, perhaps on another thread: draft beside the target's pass, until `is_over`."""

    def observe(self, done: TargetPass) -> None:
        """What the target made of the tree that was proposed last."""


class SequentialDrafter:
    """The part of a drafter that does nothing while the target's pass runs."""

    wants_overlap = False

    def extend(self, is_over: Callable[[], bool]) -> None:
        pass


class NoDrafter(SequentialDrafter):
    """Guesses nothing: plain decoding."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        return TokenTree.empty()

    def observe(self, done: TargetPass) -> None:
        pass


class NoModel:
    """A TreeModel that is never asked: its context has no room for anything."""

    vocabulary, max_context, length = Vocabulary(1), 0, 0

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        raise AssertionError("there is no model to ask")

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        pass
