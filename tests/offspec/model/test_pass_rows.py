"""The rows of a pass know their parents: from masks, after committed tokens, pending nodes, and a draft's gap."""

from __future__ import annotations

import numpy as np

from offspec.loaders.streaming.weights import LayerView
from offspec.model.decoder import CachedDecoder
from offspec.model.layer_draft import LayerDraft, LayerDraftText
from offspec.model.pass_rows import JoinedRows, TextRows, by_text

from ...scheduler.fakes import build_tree
from .test_decoder import GetModel, Tree, random_tokens


def parents_of(mask: object) -> list[int]:
    mask = np.asarray(mask, dtype=np.bool_)
    numbers = np.zeros(len(mask), dtype=np.int64)
    return TextRows([], numbers, numbers, mask).parents.tolist()


def test_parents_are_seen_last() -> None:
    tree = build_tree([(1, 2, 3), (1, 4), (5,)])
    assert parents_of(tree.mask()) == tree.parents.tolist()
    assert parents_of([[0, 0, 1]]) == [-1]
    assert parents_of([[0, 1, 1]]) == [1]
    assert parents_of(np.zeros((0, 4))) == []


def test_parents_are_slots(tiny_model: GetModel) -> None:
    decoder = tiny_model("llama-gqa").decoder()
    text, tree = CachedDecoder(decoder), Tree([7, 8, 9, 10], [-1, 0, 0, 1])

    def parents(rows: TextRows) -> list[int]:
        return decoder.rows(rows, text.cache).parents.tolist()

    assert parents(TextRows([1, 2, 3], *tree.round(0, 3))) == [-1, 0, 1, 2, 3, 3]
    assert parents(TextRows.of_chain([1])) == [-1]
    text.score([1, 2, 3], *tree.round(0, 2))
    assert parents(TextRows([], *tree.round(2, 4))) == [3, 4]
    text.keep([0])
    assert parents(TextRows.of_chain([5, 6])) == [3, 4]
    assert parents(TextRows([], *Tree([1, 2], [-1, -1]).round(0, 2))) == [3, 3]


def test_parents_of_a_drafts_own_rows_lie_behind_the_gap(tiny_model: GetModel) -> None:
    decoder = tiny_model("llama-gqa").decoder()
    target = CachedDecoder(decoder)
    target.score([1, 2, 3], np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.bool_))
    draft = LayerDraftText(LayerDraft(decoder, (0,), LayerView(decoder.weights, (0,), None)), target)
    draft.begin(room=4)
    tree = Tree([7, 8], [-1, 0])
    rows = draft.decoder.rows(TextRows([4], *tree.round(0, 2)), draft.cache)
    first = rows.visibility.start
    assert first > 3
    assert rows.parents.tolist() == [2, first, first + 1]
    draft.score([4], *tree.round(0, 1))
    pending = draft.cache.last_slot + 1
    assert pending > 4
    assert draft.decoder.rows(TextRows([], *tree.round(1, 2)), draft.cache).parents.tolist() == [pending]


def test_chunks_of_several_texts_are_given_text_by_text(tiny_model: GetModel) -> None:
    decoder = tiny_model("llama-gqa").decoder()
    texts = [decoder.rows(TextRows.of_chain(random_tokens(count)), decoder.new_cache()) for count in (3, 1, 4)]
    rows = JoinedRows(decoder.config, texts)
    found = [(texts.index(text), begin, end, some) for text, begin, end, some in by_text(rows, 2, 6)]
    assert found == [(0, 2, 3, slice(0, 1)), (1, 0, 1, slice(1, 2)), (2, 0, 2, slice(2, 4))]
    assert [(begin, end, some) for _, begin, end, some in by_text(texts[2], 1, 3)] == [(1, 3, slice(0, 2))]
