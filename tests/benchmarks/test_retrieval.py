"""A pruned index keeps what came often, and finds it as the whole one does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.drafts.retrieval import frequent, pruned
from offspec.scheduler.guessing.lookup import NO_TOKEN
from offspec.scheduler.guessing.retrieval import build_index

# Three texts over eight tokens, so that many n-grams recur.
TOKENS = np.random.default_rng(0).integers(0, 8, 400).astype(np.int32)
TOKENS[[130, 260]] = NO_TOKEN


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("least", [1, 2, 6])
def test_what_is_frequent(length: int, least: int) -> None:
    grams = {place: tuple(TOKENS[place - length + 1 : place + 1].tolist()) for place in range(length - 1, 400)}
    counts = Counter(gram for gram in grams.values() if NO_TOKEN not in gram)
    expected = [place for place, gram in grams.items() if counts[gram] >= least]
    assert np.flatnonzero(frequent(build_index(TOKENS), length, least)).tolist() == expected


def test_what_is_kept_is_found() -> None:
    """Continuations of a frequent bigram are the whole index's; of a rare one there are none by two tokens."""
    index = build_index(TOKENS)
    kept = frequent(index, 2, 9)
    small, num_bytes = pruned(index, kept)
    assert num_bytes < 8 * len(TOKENS)
    assert 0 < kept.sum() < len(TOKENS) // 2
    for place in range(1, len(TOKENS)):
        context = TOKENS[place - 1 : place + 1].tolist()
        if NO_TOKEN in context:
            continue
        rows, lengths = small.continuations(context, 400, 6)
        all_rows, all_lengths = index.continuations(context, 400, 6)
        found, expected = (
            {tuple(row) for row in r[n == 2].tolist()} for r, n in ((rows, lengths), (all_rows, all_lengths))
        )
        assert found == (expected if kept[place] else set())
