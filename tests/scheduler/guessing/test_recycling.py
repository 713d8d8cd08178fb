"""What the target thought of a token is remembered, in bounded memory, and followed best first."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec.scheduler.guessing.recycling import SuccessorTable, TokenRecycling
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict

from ..fakes import build_tree, many, paths, softmax

VOCAB_SIZE = 30


def logits_of(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(num_rows, vocab_size), scale=2)).float()


def test_under_two_megabytes_for_a_vocabulary_of_128k() -> None:
    table = SuccessorTable(128_256)
    assert table.num_bytes < 2e6
    tokens = np.arange(0, 128_256, 7)
    for part in np.array_split(tokens, 2000):
        table.store(part, torch.arange(20.0).repeat(len(part), 1))
    assert table.num_bytes < 2e6
    known = (table.successors(np.arange(128_256))[0] >= 0).all(axis=1)
    assert np.flatnonzero(known).tolist() == tokens[-SuccessorTable.NUM_ROWS :].tolist(), "the latest tokens stay"


def test_table_holds_the_likeliest_successors_and_their_probabilities() -> None:
    table, logits = SuccessorTable(VOCAB_SIZE), logits_of(3)
    table.store(np.array([4, 9, 4]), logits)
    successors, probabilities = table.successors(np.array([9, 4, 5]))
    for row, source in ((0, 1), (1, 2)):
        expected = softmax(logits[source].double().numpy())
        best = np.argsort(-expected)[: SuccessorTable.NUM_SUCCESSORS]
        assert successors[row].tolist() == best.tolist()
        np.testing.assert_allclose(probabilities[row], expected[best], rtol=2e-3)
    assert (successors[2] == -1).all()


def estimates(recycling: TokenRecycling, seed: int = 1) -> TokenRecycling:
    """Has seen every token: the text was the even ones, and the odd ones stood in trees beside it."""
    for token in range(0, VOCAB_SIZE, 2):
        recycling.observe(TargetPass([token], build_tree([[token + 1]]), Verdict([], [0]), logits_of(2, seed + token)))
    return recycling


@many
@given(max_nodes=st.integers(1, 40), max_depth=st.integers(1, 4), temperature=st.sampled_from([0.0, 1.0]))
def test_tree_is_the_best_of_everything(max_nodes: int, max_depth: int, temperature: float) -> None:
    """Against the whole tree, which takes no pruning."""
    sampler = Sampler(SamplingParams(temperature=temperature), 3, VOCAB_SIZE)
    recycling = estimates(TokenRecycling(VOCAB_SIZE))
    everything = recycling.guess([5], sampler, 10_000, max_depth)
    assert len(everything) == sum(SuccessorTable.NUM_SUCCESSORS**depth for depth in range(1, max_depth + 1))
    tree = recycling.guess([5], sampler, max_nodes, max_depth)
    np.testing.assert_array_equal(tree.scores, everything.scores[:max_nodes])
    for path in paths(tree):
        for token, successor in pairwise((5, *path)):
            assert successor in recycling.table.successors(np.array([token]))[0]


def test_rows_of_the_walk_are_kept_however_far_down_the_tree() -> None:
    """And of the others the first, which were computed with the root's; no row beyond is computed."""
    tree, logits, asked = build_tree([[1], [2], [3], [4, 5], [6]]), logits_of(7), list[int]()

    class Recorded:
        def __getitem__(self, row: int) -> torch.Tensor:
            asked.append(row)
            return logits[row]

    recycling = TokenRecycling(VOCAB_SIZE, num_spare_rows=2)
    node = paths(tree).index((4, 5))
    path = tree.path(node)
    recycling.observe(TargetPass([8], tree, Verdict(path, [4, 5, 9]), Recorded()))
    assert sorted(asked) == sorted({0, 1, *(node + 1 for node in path)})
    known = np.flatnonzero(recycling.table.successors(np.arange(VOCAB_SIZE))[0][:, 0] >= 0)
    assert set(known) == {8, int(tree.tokens[0]), 4, 5}


def test_nothing_known_nothing_guessed() -> None:
    recycling = TokenRecycling(VOCAB_SIZE)
    sampler = Sampler(SamplingParams(), 0, VOCAB_SIZE)
    assert len(recycling.guess([3], sampler, 10, 5)) == 0
    recycling.observe(TargetPass([3], TokenTree.empty(), Verdict([], [7]), logits_of(1)))
    tree = recycling.guess([3], sampler, 10, 5)
    assert set(tree.depths.tolist()) == {1}
    assert int(logits_of(1)[0].argmax()) == tree.tokens[0]


def test_plain_passes_are_stored_by_the_next_guess_and_never_many_wait() -> None:
    recycling, table = TokenRecycling(VOCAB_SIZE), SuccessorTable(VOCAB_SIZE)
    tokens = [1, 2, *([3, 4, 3, 5] * TokenRecycling.MOST_WAITING)][: 2 + TokenRecycling.MOST_WAITING]
    for place, token in enumerate(tokens):
        logits = logits_of(1, seed=place)
        if place >= len(tokens) - TokenRecycling.MOST_WAITING:
            table.store(np.array([token]), logits)
        recycling.observe(TargetPass([token], TokenTree.empty(), Verdict([], [0]), logits))
    assert not (recycling.table.successors(np.array(tokens))[0] >= 0).any(), "nothing was asked yet"
    recycling.guess([9], Sampler(SamplingParams(), 0, VOCAB_SIZE), 1, 1)
    for found, expected in zip(
        *(part.successors(np.arange(VOCAB_SIZE)) for part in (recycling.table, table)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_first_scores_are_sure_of_what_the_target_was_sure_of() -> None:
    recycling = TokenRecycling(VOCAB_SIZE)
    for token, confidence in ((1, 0.99), (2, 0.4)):
        logits = torch.full((1, VOCAB_SIZE), math.log((1 - confidence) / (VOCAB_SIZE - 1)))
        logits[0, 9] = math.log(confidence)
        recycling.observe(TargetPass([token], TokenTree.empty(), Verdict([], [9]), logits))
    sampler = Sampler(SamplingParams(), 0, VOCAB_SIZE)
    sure, unsure = (recycling.guess([token], sampler, 1, 1).scores[0] for token in (1, 2))
    assert sure > unsure + 0.3
