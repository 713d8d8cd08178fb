"""Protocols of drafters and of the models that they use; the description of a request.

Drafting is a generator: it yields what the draft has to score and receives the logits (`score_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from ..pace.shared_pass import SharedPass
from ..params import MAX_ROWS
from ..trees.sampling import Sampler
from ..trees.token_tree import FloatArray, IntArray, TokenTree
from ..trees.verify import Logits, TargetPass, TargetStates, Verdict, verify_exactly
from ..trees.vocabulary import Vocabulary

T = TypeVar("T")


class TreeModel(Protocol):
    """A drafter's interface to a model: score tokens after one text, and keep those that became part of it."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's tokens that the model reads and predicts."""

    @property
    def max_context(self) -> int: ...

    @property
    def length(self) -> int:
        """The number of the text's tokens in the model's KV cache."""

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        """Commit chain; add R tree nodes as pending. Logits [(1 if chain) + R, C], C columns of `vocabulary`.

        chain, tokens: `vocabulary.inputs` of the target's tokens. parents [P + R]: as in `TokenTree`, of the P
        nodes that are already pending, then of these.
        """

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending nodes `path`; the nodes `pending` below them stay pending; drop the others.

        path followed by pending is ascending. The nodes that stay pending are numbered from 0 in their order.
        """


@dataclass(frozen=True)
class ScoreCall:
    """The arguments of `TreeModel.score`, and the model of the text."""

    model: TreeModel
    chain: Sequence[int]
    tokens: IntArray
    depths: IntArray
    parents: IntArray

    @property
    def num_rows(self) -> int:
        return len(self.chain) + len(self.tokens)

    def score(self) -> Tensor:
        return self.model.score(self.chain, self.tokens, self.depths, self.parents)


Drafting = Generator[ScoreCall, Tensor, T]


class LogitCorrector(Protocol):
    """Corrects a `TreeModel`'s logits by the target's predictions at nodes that both models scored."""

    def observe(self, rows: IntArray, nodes: IntArray, states: TargetStates) -> None:
        """Record the target's states at K nodes. Called before `TreeModel.keep`.

        rows [K]: of the model's pending region, ROOT for the text's last token. nodes [K]: their rows in the target's
        pass.
        """

    def corrected(self, rows: IntArray) -> Tensor:
        """Corrected logits [K, C] of these pending rows (ROOT first), with all corrections observed so far."""


@dataclass(frozen=True)
class DraftRequest:
    """The input of a drafter for one request.

    sampler: the target's. final: tokens that end the text and have no children. num_unscored: tokens of the text that
    the target's first pass scores; None: as many as the draft scores. most_read: tokens that the draft scores itself
    before it drafts; with more unscored ones it waits for the target. None: no limit. most_rows: nodes that may be
    pending in the draft's KV cache. shared: the passes that the request shares with others; None: it has its own.
    """

    sampler: Sampler
    final: Collection[int] = ()
    num_unscored: int | None = None
    most_read: int | None = None
    most_rows: int = MAX_ROWS
    shared: SharedPass | None = None


@dataclass(frozen=True)
class Rest:
    """Passes without a draft, as it does not pay. Seconds of a draft round, None if there was none; of a plain pass."""

    round_s: float | None
    plain_s: float


class Drafter(Protocol):
    """Proposes trees for one request, and says how a tree's logits become a verdict.

    Calls of `prepare`, `send` and `observe` alternate; after an error, create a new drafter. `propose` and `extend` do
    the same for a text whose draft rounds no other text shares.
    """

    @property
    def is_lossy(self) -> bool:
        """Whether the verdicts' tokens may differ from those of plain decoding."""

    @property
    def rest(self) -> Rest | None:
        """Why nothing is drafted in these passes, but for trials; None where something is, or nothing was chosen."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        """A tree of continuations of `text` (all tokens so far), at most max_depth deep."""

    def prepare(self, text: Sequence[int], max_depth: int) -> Drafting[FloatArray | None]:
        """Draft such a tree. The result is the probabilities of the best candidates, descending, which compete with
        those of other texts; None if the size of the tree is given.
        """

    def send(self, num_nodes: int | None = None) -> TokenTree:
        """The tree of the `num_nodes` best candidates; None: as many as the drafter would send on its own."""

    @property
    def wants_overlap(self) -> bool:
        """Whether to call `extending` during the next pass."""

    def extend(self, is_over: Callable[[], bool]) -> None:
        """Draft during the target's pass until `is_over`. Called between propose and observe, maybe on a thread."""

    def extending(self, is_over: Callable[[], bool]) -> Drafting[None]:
        """`extend`, of which the caller runs the forwards."""

    def verify(self, tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
        """The verdict on the tree that was proposed last; arguments and errors as in `verify_exactly`."""

    def observe(self, done: TargetPass) -> None:
        """Record the target's pass over the tree that was proposed last."""


class ExactDrafter:
    """Base of drafters whose verdicts have plain decoding's tokens, and whose rounds no other text shares."""

    is_lossy = False
    _proposed = TokenTree.empty()

    @property
    def rest(self) -> Rest | None:
        return None

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        raise NotImplementedError

    def prepare(self, text: Sequence[int], max_depth: int) -> Drafting[FloatArray | None]:
        self._proposed = self.propose(text, max_depth)
        yield from ()
        return None

    def send(self, num_nodes: int | None = None) -> TokenTree:
        return self._proposed

    def extend(self, is_over: Callable[[], bool]) -> None:
        pass

    def extending(self, is_over: Callable[[], bool]) -> Drafting[None]:
        self.extend(is_over)
        yield from ()

    def verify(self, tree: TokenTree, logits: Logits, sampler: Sampler, position: int) -> Verdict:
        return verify_exactly(tree, logits, sampler, position)


class SequentialDrafter(ExactDrafter):
    """Base of drafters that do not draft during the target's pass."""

    wants_overlap = False


class NoDrafter(SequentialDrafter):
    """Proposes empty trees: plain decoding."""

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        return TokenTree.empty()

    def observe(self, done: TargetPass) -> None:
        pass


class NoModel:
    """A TreeModel for drafters without a model: its context of 0 prevents every call."""

    vocabulary, max_context, length = Vocabulary(1), 0, 0

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        raise AssertionError("NoModel cannot score")

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        pass
