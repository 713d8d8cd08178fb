"""The n-gram index finds what a search of the whole text would; trees of matches are well formed and guess right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import (
    MATCH_LENGTHS,
    NO_TOKEN,
    NUM_SUPPORTS,
    Guesser,
    NGramIndex,
    PromptLookup,
    Trie,
)
from offspec.scheduler.guessing.recycling import TokenRecycling
from offspec.scheduler.guessing.retrieval import Retrieval
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.verify import TargetPass, verify_exactly

from ..fakes import (
    Rule,
    RuleModel,
    assert_well_formed,
    build_index,
    estimates_of,
    generate,
    many,
    paths,
    random_rule,
)

VOCAB_SIZE = 12
GREEDY = SamplingParams()


def sampler_for(params: SamplingParams = GREEDY) -> Sampler:
    return Sampler(params, seed=3, vocab_size=VOCAB_SIZE)


def sole_drafter(
    guessers: Sequence[Guesser], sampler: Sampler, params: SpeculationParams, final: Sequence[int] = ()
) -> ModelDrafter:
    """A drafter without a model."""
    request = DraftRequest(sampler, final)
    return ModelDrafter(None, request, params, estimates_of(), guessers=guessers, clock=lambda: 0.0)


def assert_bounded(tree: TokenTree, max_nodes: int, max_depth: int) -> None:
    assert_well_formed(tree)
    assert len(tree) <= max_nodes
    assert (tree.depths <= max_depth).all()
    assert ((tree.tokens >= 0) & (tree.tokens < VOCAB_SIZE)).all()


def cyclic(period: int) -> Rule:
    """Counts round and round: a target that repeats itself."""
    return lambda prefix: 9.0 * np.eye(VOCAB_SIZE)[(prefix[-1] + 1) % period]


def decode(
    rule: Rule, guessers: Sequence[Guesser], sampler: Sampler, prompt: list[int], num_tokens: int, budget: int = 24
) -> tuple[list[int], list[TokenTree]]:
    """The engine's loop with guessers alone: the text, and every tree that was proposed."""
    drafter, trees = sole_drafter(guessers, sampler, SpeculationParams(budget=budget)), list[TokenTree]()
    return generate(RuleModel(rule, VOCAB_SIZE), drafter, sampler, prompt, num_tokens, proposed=trees), trees


CORPUS = np.array([0, 1, 2, 3, NO_TOKEN, 5, 1, 2, 4, 1, 2, 3, 9], dtype=np.int32)
MAKERS: dict[str, Callable[[], Guesser]] = {
    "prompt": PromptLookup,
    "recycling": lambda: TokenRecycling(VOCAB_SIZE),
    "retrieval": lambda: Retrieval(build_index(CORPUS)),
}

# ------------------------------------------------------------------------------------------------ every guesser


@pytest.mark.parametrize("name", sorted(MAKERS))
@many
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    params=st.sampled_from([GREEDY, SamplingParams(temperature=1.0)]),
    max_nodes=st.integers(0, 30),
    max_depth=st.integers(1, 9),
)
def test_guesses_are_a_tree_within_its_limits(
    name: str, text: list[int], params: SamplingParams, max_nodes: int, max_depth: int
) -> None:
    guesser = MAKERS[name]()
    if isinstance(guesser, TokenRecycling):
        decode(random_rule(VOCAB_SIZE, 1), [guesser], sampler_for(params), text, 12)
    tree = guesser.guess(text, sampler_for(params), max_nodes, max_depth)
    assert_bounded(tree, max_nodes, max_depth)
    fewer = guesser.guess(text, sampler_for(params), max_nodes // 2, max_depth)
    assert fewer.scores.tolist() == tree.scores[: max_nodes // 2].tolist(), (
        "a smaller tree holds the best of the larger"
    )


@pytest.mark.parametrize("name", ["prompt", "recycling"])
def test_a_target_that_repeats_itself_is_guessed(name: str) -> None:
    text, trees = decode(cyclic(6), [MAKERS[name]()], sampler_for(), [0, 1, 2, 3, 4, 5, 0], 120)
    assert text == [token % 6 for token in range(1, 121)]
    assert len(trees) < 15


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_wrong_guesses_lose_their_credit(temperature: float) -> None:
    """The prompt says that 1 follows 0; the target never agrees."""
    rule: Rule = lambda prefix: np.where(np.arange(VOCAB_SIZE) == 1, -30.0, 0.0)  # noqa: E731
    lookup, sampler = PromptLookup(), sampler_for(SamplingParams(temperature=temperature))
    target, text = RuleModel(rule, VOCAB_SIZE), [0, 1] * 8 + [0]
    scores: list[float] = []
    for _ in range(25):
        tree = lookup.guess(text, sampler, 8, 3)
        child = tree.child(ROOT, 1)
        assert child is not None
        scores.append(float(tree.scores[child]))
        logits = target.score(text[target.length :], tree.tokens, tree.depths, tree.parents)
        verdict = verify_exactly(tree, logits, sampler, len(text))
        target.keep([])
        lookup.observe(TargetPass(text, tree, verdict, logits))
    assert scores[-1] < scores[0] - 1
    assert (np.diff(scores) < 1e-9).all()


def test_nothing_is_guessed_below_a_final_token() -> None:
    text = [1, 2, 3, 4, 1, 2, 5, 3, 4, 1, 2]
    for final, expected in (((), 6), ((3,), 3), ((3, 5), 2)):
        drafter = sole_drafter([PromptLookup()], sampler_for(), SpeculationParams(budget=6, max_depth=4), final)
        tree = drafter.propose(text, 9)
        assert len(tree) == expected
        assert not any(token in final for path in paths(tree) for token in path[:-1])


# ------------------------------------------------------------------------------------------------ the index


def matches_by_search(text: Sequence[int], max_match: int) -> dict[int, int]:
    """Every earlier place where the text's end stood, and how many tokens of it: by comparing everything."""
    found: dict[int, int] = {}
    for place in range(1, len(text)):
        length = 0
        while length < min(place, max_match) and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length:
            found[place] = length
    return found


@many
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_index_that_grew_equals_one_built_at_once(text: list[int], cuts: list[int]) -> None:
    grown, whole = NGramIndex(), NGramIndex()
    for cut in [*sorted(cuts), len(text)]:
        grown.extend(text[len(grown) : cut])
    whole.extend(text)
    for max_matches in (1, 5, 100):
        for one, other in zip(grown.continuations(max_matches, 7), whole.continuations(max_matches, 7), strict=True):
            np.testing.assert_array_equal(one, other)


@many
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_index_finds_what_a_search_of_everything_finds(text: list[int]) -> None:
    index = NGramIndex()
    index.extend(text)
    rows, lengths = index.continuations(max_matches=100, depth=5)
    expected = matches_by_search(text, NGramIndex.MAX_MATCH)

    def ahead(place: int) -> tuple[int, ...]:
        return tuple(text[place + step % (len(text) - place)] for step in range(5))

    found = sorted(zip(map(tuple, rows.tolist()), lengths.tolist(), strict=True))
    assert found == sorted((ahead(place), length) for place, length in expected.items())


@many
@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=80), max_matches=st.integers(1, 4))
def test_the_longest_match_is_among_the_few_that_are_kept(text: list[int], max_matches: int) -> None:
    """Up to MAX_ORDER tokens; of longer ones the latest are compared."""
    index = NGramIndex()
    index.extend(text)
    _, lengths = index.continuations(max_matches, depth=1)
    assert (np.diff(lengths) <= 0).all()
    longest = max(matches_by_search(text, NGramIndex.MAX_ORDER).values(), default=0)
    assert min(max(lengths, default=0), NGramIndex.MAX_ORDER) == longest


def test_a_lookup_does_not_touch_the_whole_text() -> None:
    """Of 20,000 tokens: few entries, and a lookup asks for at most MAX_ORDER keys."""
    generator, index = np.random.default_rng(0), NGramIndex()
    index.extend(generator.integers(0, 50, 20_000).tolist())
    num_entries = sum(map(len, index.places.values()))
    assert num_entries < 5 * 20_000
    asked: list[int] = []

    class Counting(dict[int, list[int]]):
        def get(self, key: int, default: list[int] | None = None) -> list[int] | None:  # type: ignore[override]
            asked.append(key)
            return super().get(key, default)

    index.places = Counting(index.places)
    rows, _ = index.continuations(32, 8)
    assert len(asked) <= NGramIndex.MAX_ORDER
    assert rows.shape == (32, 8)


# ------------------------------------------------------------------------------------------------ the trie


@many
@given(
    rows=st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8),
    lengths=st.lists(st.integers(1, 30), min_size=8, max_size=8),
)
def test_trie_holds_every_beginning_once(rows: list[list[int]], lengths: list[int]) -> None:
    padded = np.array([row + [NO_TOKEN] * (4 - len(row)) for row in rows], dtype=np.int64).reshape(-1, 4)
    trie = Trie(padded, np.array(lengths[: len(rows)], dtype=np.int64))
    tree = TokenTree(trie.tokens, trie.parents, trie.depths, np.zeros(len(trie.tokens)))
    beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert sorted(paths(tree)) == sorted(beginnings)
    assert (np.diff(tree.depths) >= 0).all()
    assert (tree.parents < np.arange(len(tree))).all()
    values = np.arange(1.0, len(tree) + 1)
    expected = [values[tree.path(node)].sum() for node in range(len(tree))]
    np.testing.assert_allclose(trie.path_sums(values), expected)
    for node, path in enumerate(paths(tree)):
        through = [length for row, length in zip(rows, lengths, strict=False) if tuple(row[: len(path)]) == path]
        bucket = trie.kinds[node] // NUM_SUPPORTS
        assert MATCH_LENGTHS[bucket] <= max(through) + len(path) - 1
        assert bucket == len(MATCH_LENGTHS) - 1 or max(through) + len(path) - 1 < MATCH_LENGTHS[bucket + 1]
