"""Logits of a pass's rows: computed when they are asked for, the first ones of several texts together."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from offspec.model.row_logits import HEAD_ROWS, RowLogits


class Head:
    """A head that counts the rows of each product."""

    def __init__(self) -> None:
        self.products: list[int] = []

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self.products.append(len(hidden))
        return 2 * hidden


def made(head: Head, *sizes: int) -> list[tuple[RowLogits, Tensor]]:
    """Texts of so many rows each, and their hidden states."""
    states = [100 * i + torch.arange(size * 3.0).view(size, 3) for i, size in enumerate(sizes)]
    return [(RowLogits(head, each), each) for each in states]


def test_rows_are_computed_when_they_are_asked_for() -> None:
    head = Head()
    ((text, states),) = made(head, HEAD_ROWS + 5)
    assert torch.equal(text[3], 2 * states[3])
    assert head.products == [HEAD_ROWS]
    assert torch.equal(text[HEAD_ROWS + 1], 2 * states[HEAD_ROWS + 1])
    assert torch.equal(text[0], 2 * states[0])
    assert head.products == [HEAD_ROWS, 5]


def test_texts_of_a_pass_share_products_of_their_first_rows() -> None:
    head = Head()
    texts = made(head, 1, 30, HEAD_ROWS - 31, HEAD_ROWS + 9, 1)
    RowLogits.share([text for text, _ in texts])
    for text, states in reversed(texts):
        for row in range(len(states)):
            assert torch.equal(text[row], 2 * states[row])
    assert sorted(head.products) == [1, 9, HEAD_ROWS, HEAD_ROWS]


def test_nothing_waits_for_the_garbage_collector() -> None:
    """Logits of a large vocabulary are tens of megabytes a pass."""
    gc.disable()
    try:
        (text, _), (other, _) = made(Head(), 2, 3)
        RowLogits.share([text, other])
        logits = weakref.ref(text[0].untyped_storage())
        gone = weakref.ref(text), weakref.ref(other)
        del text, other
        assert [each() for each in (*gone, logits)] == [None] * 3
    finally:
        gc.enable()
