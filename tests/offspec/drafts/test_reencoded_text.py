"""A draft of another vocabulary: it reads the text in its own encoding, and the text stays plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.drafts.reencoded_text import OtherVocabulary, ReencodedText
from offspec.scheduler.trees.token_tree import ROOT, IntArray
from offspec.text.tokenizer import Tokenizer

from ...examples import examples
from ...scheduler.fakes import RuleModel, random_rule
from ...vocabularies import backends, write

few = examples(60)
NONE = np.empty(0, dtype=np.int64)
NO_NODES = NONE, NONE, NONE


class Inner(RuleModel):
    """A draft's own text: it says after its own tokens what a rule does, and checks whoever drives it."""

    def __init__(self, vocab_size: int, max_context: int) -> None:
        super().__init__(random_rule(vocab_size, seed=0), vocab_size, max_context)
        self.num_scored = 0
        self.decoder = self

    def head(self, states: Tensor) -> Tensor:
        return states

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray, before: int = 0
    ) -> Tensor:
        self.num_scored += len(chain) + len(tokens)
        return super().score(chain, tokens, depths, parents)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.text)
        del self.text[length:]
        self._pending, self._sights = [], []

    def reserve(self, capacity: int) -> None:
        self.capacity = capacity


class Both(NamedTuple):
    """Two tokenizers, and what the second one's is to the first's."""

    target: Tokenizer
    draft: Tokenizer
    other: OtherVocabulary

    def text(self, max_context: int = 10**6) -> tuple[ReencodedText, Inner]:
        inner = Inner(self.draft.vocab_size, max_context)
        return self.other.text(inner), inner  # type: ignore[arg-type]

    def canonical(self, text: str) -> list[int]:
        return self.draft.encode(text)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Both]:
    root = tmp_path_factory.mktemp("vocabularies")
    known = {name: Tokenizer.load(write(root / name, backend)) for name, backend in backends().items()}

    def get(target: str, draft: str) -> Both:
        ours, theirs = known[target], known[draft]
        return Both(ours, theirs, OtherVocabulary.of(ours, theirs, ours.vocab_size, theirs.vocab_size))

    return get


TEXT = "The width of the area is the height of it. We return to the items, and print them, café 日本 😀.\n" * 3
PAIRS = [("code", "prose"), ("code", "spaces"), ("spaces", "words")]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_text_that_comes_token_by_token_is_read_as_the_draft_writes_it(
    target: str, draft: str, both: Callable[[str, str], Both]
) -> None:
    """And few of its tokens are scored more than once."""
    pair = both(target, draft)
    text, inner = pair.text()
    for at, token in enumerate(tokens := pair.target.encode(TEXT)):
        logits = text.score([token], *NO_NODES)
        assert logits.shape == (1, pair.draft.vocab_size)
        assert text.length == at + 1
        assert inner.text == text._own.ids
    assert inner.text == pair.canonical(TEXT)
    assert inner.num_scored < 4 * len(tokens)
    expected = inner.rule(tuple(inner.text))
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-5)


@few
@given(data=st.data())
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_whatever_becomes_of_a_text_the_draft_reads_its_bytes(
    target: str, draft: str, both: Callable[[str, str], Both], data: st.DataObject
) -> None:
    """Chains, nodes (of tokens that the draft lacks, too), verdicts and rewinds in any order."""
    pair = both(target, draft)
    text, inner = pair.text()
    tokens = st.lists(st.integers(0, pair.target.vocab_size + 1), min_size=1, max_size=6)
    read: list[int] = []
    tree = Nodes()
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["chain", "nodes", "keep", "truncate"])):
            case "chain":
                text.truncate(text.length)
                tree = Nodes()
                new = data.draw(tokens)
                read += new
                found = text.score(new, *NO_NODES)[0]
                np.testing.assert_allclose(found.numpy(), inner.rule(tuple(inner.text)), rtol=1e-5)
            case "nodes" if read and not tree.is_old:
                new = data.draw(tokens)
                parents = [data.draw(st.integers(ROOT, len(tree.tokens) + i - 1)) for i in range(len(new))]
                found = text.score([], *tree.add(new, parents))
                for row, node in enumerate(range(len(tree.tokens) - len(new), len(tree.tokens))):
                    path = [token for token in tree.path_tokens(node) for token in pair.other.reencoder.node_ids(token)]
                    expected = inner.rule((*inner.text, *path))
                    np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-5)
            case "keep" if tree.tokens:
                path = tree.path(data.draw(st.integers(ROOT, len(tree.tokens) - 1)))
                read += [tree.tokens[node] for node in path]
                below = [node for node in range(len(tree.tokens)) if tree.path(node)[: len(path)] == path]
                below = [node for node in below if node not in path] if data.draw(st.booleans()) else []
                text.keep(path, below)
                tree = Nodes(is_old=True)
            case "truncate":
                del read[data.draw(st.integers(0, len(read))) :]
                text.truncate(len(read))
                tree = Nodes()
        assert text.length == len(read)
        assert inner.text == text._own.ids
    text.truncate(text.length)
    end = pair.target.encode("a", add_special_tokens=False)
    text.score(end, *NO_NODES)
    assert read_bytes(pair, text._own.ids) == pieces_bytes(pair, [*read, *end])


class Nodes:
    """A tree that a drafter has in its model: what it says of tokens, depths and who sees whom.

    is_old: something of it may be pending that is not told here.
    """

    def __init__(self, *, is_old: bool = False) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.is_old = is_old

    def path(self, node: int) -> list[int]:
        return [] if node == ROOT else [*self.path(self.parents[node]), node]

    def path_tokens(self, node: int) -> list[int]:
        return [self.tokens[above] for above in self.path(node)]

    def add(self, tokens: list[int], parents: list[int]) -> tuple[IntArray, IntArray, IntArray]:
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += parents
        depths = np.array([len(self.path(node)) for node in range(first, len(self.tokens))])
        return np.array(tokens), depths, np.array(self.parents)


def read_bytes(pair: Both, ids: Sequence[int]) -> bytes:
    assert pair.draft.token_bytes is not None
    return b"".join(pair.draft.token_bytes.get(token, b"") for token in ids)


def pieces_bytes(pair: Both, tokens: Sequence[int]) -> bytes:
    """Of the target's tokens, as the draft's vocabulary writes a text's beginning."""
    reencoder = pair.other.reencoder
    pieces = [piece for piece in map(reencoder.piece, tokens) if not reencoder.is_special(piece)]
    return "".join([reencoder.first_piece(pieces[0]), *pieces[1:]]).encode("latin-1")


def test_a_text_that_is_longer_than_the_draft_can_read_is_its_end(both: Callable[[str, str], Both]) -> None:
    pair = both("code", "spaces")
    text, inner = pair.text(max_context=40)
    tokens = pair.target.encode(TEXT)
    text.score(tokens, *NO_NODES)
    assert inner.text == [*pair.draft.encode(""), *pair.canonical(TEXT)[-20:]]
    assert text.max_context - text.length == 40 - len(inner.text)
    for token in tokens:
        text.score([token], *NO_NODES)
        assert len(inner.text) <= 40
    text.truncate(3)
    text.score(tokens[3:6], *NO_NODES)
    assert inner.text == pair.canonical(pair.target.decode(tokens[:6]))


def test_what_an_interrupted_pass_left_is_forgotten_by_the_next_rewind(both: Callable[[str, str], Both]) -> None:
    pair = both("prose", "code")
    text, inner = pair.text()
    tokens = pair.target.encode(TEXT)
    text.score(tokens[:20], *NO_NODES)
    whole, inner.states = inner.states, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        text.score(tokens[20:40], *NO_NODES)
    inner.states = whole  # type: ignore[method-assign]
    text.truncate(min(text.length, 25))
    text.score(tokens[text.length :], *NO_NODES)
    assert inner.text == text._own.ids == pair.canonical(TEXT)
