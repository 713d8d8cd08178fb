"""The sorted index finds what comparing everything finds, in one shard or in many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.scheduler.guessing import retrieval
from offspec.scheduler.guessing.lookup import NO_TOKEN
from offspec.scheduler.guessing.retrieval import MAX_MATCH, Retrieval
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler

from ..fakes import build_index, many, paths

DEPTH = 3


def by_comparing(tokens: Sequence[int], context: Sequence[int], shard: int) -> list[tuple[list[int], int]]:
    """Every place where a token of the context's end stands: what follows, and how many tokens match in its shard."""
    found: list[tuple[list[int], int]] = []
    for place in range(len(tokens)):
        room = min(place % shard + 1, len(context), MAX_MATCH)
        length = next((n for n in range(room) if tokens[place - n] != context[-1 - n]), room)
        if length:
            ahead = [*tokens[place + 1 : place + 1 + DEPTH], *[NO_TOKEN] * DEPTH]
            found.append((ahead[:DEPTH], length))
    return found


@many
@given(
    tokens=st.lists(st.integers(NO_TOKEN, 2), min_size=1, max_size=70),
    context=st.lists(st.integers(0, 2), min_size=1, max_size=25),
    shard=st.sampled_from([1 << 22, 7, 16]),
)
def test_finds_what_comparing_everything_finds(tokens: list[int], context: list[int], shard: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "SHARD_TOKENS", shard)
        index = build_index(np.array(tokens, dtype=np.int32))
        rows, lengths = index.continuations(context, 1000, DEPTH)
        expected = by_comparing(tokens, context, shard)
        assert sorted(zip(rows.tolist(), lengths.tolist(), strict=True)) == sorted(expected)
        few, few_lengths = index.continuations(context, 3, DEPTH)
        assert few_lengths.tolist() == sorted((length for _, length in expected), reverse=True)[:3]
        assert all(pair in expected for pair in zip(few.tolist(), few_lengths.tolist(), strict=True))


def test_of_many_matches_some_are_taken_evenly() -> None:
    """A token that stands after each of 200 others, and before each of them."""
    tokens = np.array([token for other in range(1, 201) for token in (other, 0)], dtype=np.int32)
    rows, lengths = build_index(tokens).continuations([500, 0], 10, 1)
    assert set(lengths) == {1}
    picked = np.sort(rows[:, 0])
    assert len(set(picked)) == 10
    assert np.diff(picked).max() < 50


def test_guesses_go_the_way_of_the_longest_match() -> None:
    tokens = np.array([1, 2, 3, 4, 5, NO_TOKEN, 9, 3, 7, 7, NO_TOKEN, 8, 3, 7, 6], dtype=np.int32)
    guesser = Retrieval(build_index(tokens))
    tree = guesser.guess([1, 2, 3], Sampler(SamplingParams(), 0, 10), 10, 4)
    assert paths(tree)[0] == (4,)
    assert set(paths(tree)) == {(4,), (4, 5), (7,), (7, 7), (7, 6)}, "nothing beyond a text's end"


def test_tokens_that_the_model_does_not_have_are_not_guessed() -> None:
    tokens = np.array([1, 2, 30, 4, 1, 2, 3, 30], dtype=np.int32)
    tree = Retrieval(build_index(tokens)).guess([1, 2], Sampler(SamplingParams(), 0, 10), 10, 4)
    assert paths(tree) == [(3,)]


def test_an_empty_index_guesses_nothing() -> None:
    guesser = Retrieval(build_index(np.empty(0, dtype=np.int32)))
    assert len(guesser.guess([1, 2], Sampler(SamplingParams(), 0, 10), 10, 4)) == 0
