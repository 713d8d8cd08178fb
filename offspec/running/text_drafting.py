"""Drafts for one text: its rows of the next pass, and what is computed for it while a pass runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from offspec.backends.device_kinds import kind_of
from offspec.scheduler.drafting.drafter import Drafter, Drafting, NoDrafter
from offspec.scheduler.drafting.forced import prepare_masks
from offspec.scheduler.trees.constraint import TokenConstraint
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree

from ..checkpoints.opening import Note
from ..errors import ConstraintError, NumericalError, OffspecError
from ..model.pass_rows import TextRows
from .models import Models
from .pass_counter import PassCounter

T = TypeVar("T")
TEXT_ERRORS = (NumericalError, ConstraintError)  # end their text; other errors of a pass end all texts in it


class TextDrafting:
    """A drafter of one text, whose errors do not end other texts.

    chain, tree: the rows of the next pass. is_prefilling: the pass scores a part of a prompt, and has no tree. fault:
    of a constraint while drafting, which ends the text.
    """

    def __init__(self, models: Models, counter: PassCounter, constraint: TokenConstraint | None) -> None:
        self._models, self._counter, self._constraint = models, counter, constraint
        self.drafter: Drafter = NoDrafter()
        self.chain, self.tree = list[int](), TokenTree.empty()
        self.is_prefilling = False
        self.fault: OffspecError | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return len(self.chain) + len(self.tree)

    # ---------------------------------------------------------------------------------------- before a pass

    def draft(
        self, text: Sequence[int], num_scored: int, num_chain: int, max_depth: int
    ) -> Drafting[FloatArray | None]:
        """Draft for a pass that scores `num_chain` tokens of the text after those that are scored.

        The result is the probabilities of candidates that compete with other texts' for the pass, descending; None if
        the size of the tree does not depend on them.
        """
        self.chain, self.tree = list(text[num_scored : num_scored + num_chain]), TokenTree.empty()
        self.is_prefilling = num_scored + num_chain < len(text)
        if self.is_prefilling:
            return None
        return (yield from self._catching(self.drafter.prepare(text, max_depth)))

    def send(self, num_nodes: int | None) -> TextRows:
        """The rows of the pass. num_nodes: of the candidates; None: as many as the drafter wants."""
        if not self.is_prefilling and self.fault is None:
            self.tree = self.drafter.send(num_nodes)
        return TextRows(self.chain, self.tree.tokens, self.tree.depths, self.tree.parents)

    # ---------------------------------------------------------------------------------------- during a pass

    @property
    def prepares_masks(self) -> bool:
        """Whether to compute a constraint's masks during the pass: on a GPU, or while layers are read."""
        has_time = kind_of(self._models.device).has_own_memory or self._counter.bytes_streamed > 0
        if self._constraint is None or not has_time or self.is_prefilling:
            return False
        return not self._constraint.is_idle(self.tree.tokens)

    def prepare_masks(self, is_over: Callable[[], bool]) -> None:
        """Compute the masks that the walk may need, until `is_over`."""
        assert self._constraint is not None
        try:
            prepare_masks(self._constraint, self.tree, is_over)
        except TEXT_ERRORS as exc:
            self.fault = exc

    def extending(self, is_over: Callable[[], bool]) -> Drafting[None]:
        """Draft during the pass until `is_over`, in rounds that texts share."""
        yield from self._catching(self.drafter.extending(is_over))

    # ---------------------------------------------------------------------------------------- errors

    def _catching(self, drafting: Drafting[T]) -> Drafting[T | None]:
        """`drafting`, whose errors do not end other texts' drafting: a constraint's becomes this text's `fault`."""
        try:
            return (yield from drafting)
        except ConstraintError as exc:
            self.fault = exc
        except NumericalError as exc:
            self._go_on_without_draft(exc)
        return None

    def _go_on_without_draft(self, error: NumericalError) -> None:
        """Decode the rest of the text plainly: a draft's fault changes no text."""
        self.drafter = NoDrafter()
        self._counter.stats.draft_fault = str(error)
        text = f"a text was decoded without the draft from some pass on, which changes no text ({error})"
        self._models.loaded.note_once(Note(text, advice=True))
