"""Tokens of equal bytes in two vocabularies, and texts of one vocabulary's tokens in the other's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from offspec.errors import VocabularyMismatchError
from offspec.text.reencoding import FIRST_SPECIAL, Reencoder
from offspec.text.shared_tokens import SharedTokens
from offspec.text.token_bytes import token_bytes
from offspec.text.tokenizer import Tokenizer

from ...examples import examples
from ...refusals import refused
from ...vocabularies import EOS, TURN, backends, byte_level, write

few = examples(40)
NAMES = ["code", "prose", "spaces", "words"]
PAIRS = [*pairwise(NAMES), ("words", "code")]
TEXTS = [
    "def area(width, height):\n    return width * height\n",
    "The area  of it,\n\n  naïve café 日本語 😀👩‍👧 is\tthere.",
    "We return  ",
    "x",
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("vocabularies")
    return {name: Tokenizer.load(write(root / name, backend)) for name, backend in backends().items()}


def shared_of(target: Tokenizer, draft: Tokenizer) -> SharedTokens:
    return SharedTokens.of(target, draft, target.vocab_size, draft.vocab_size)


@pytest.fixture(scope="module")
def reencoders(tokenizers: dict[str, Tokenizer]) -> dict[tuple[str, str], Reencoder]:
    found = {}
    for target, draft in PAIRS:
        both = tokenizers[target], tokenizers[draft]
        found[target, draft] = Reencoder(*both, shared_of(*both), both[1].vocab_size)
    return found


def joined(reencoder: Reencoder, tokens: list[int]) -> str:
    """The string of a text of the target's tokens."""
    pieces, is_first = list[str](), True
    for piece in map(reencoder.piece, tokens):
        is_text = not reencoder.is_special(piece)
        pieces.append(reencoder.first_piece(piece) if is_text and is_first else piece)
        is_first = is_first and not is_text
    return "".join(pieces)


def texts_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    assert tokenizer.token_bytes is not None
    return b"".join(tokenizer.token_bytes.get(token, b"") for token in ids)


# ------------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_shared_tokens_stand_for_the_same_text(target: str, draft: str, tokenizers: dict[str, Tokenizer]) -> None:
    ours, theirs = tokenizers[target], tokenizers[draft]
    shared = shared_of(ours, theirs)
    assert ours.token_bytes is not None
    assert theirs.token_bytes is not None
    assert len(set(shared.to_draft.values())) == len(shared.to_draft)
    for token, other in shared.to_draft.items():
        if token in ours.special_ids:
            assert ours.token_text(token) == theirs.token_text(other)
        else:
            assert ours.token_bytes[token] == theirs.token_bytes[other]
    both = {*ours.token_bytes.values()} & {*theirs.token_bytes.values()}
    assert {ours.token_bytes[token] for token in shared.to_draft if token in ours.token_bytes} == both
    assert len(both) > 60
    mirrored = shared_of(theirs, ours)
    assert mirrored.share == shared.share
    assert mirrored.ratio == pytest.approx(1 / shared.ratio)
    assert {other: token for token, other in mirrored.to_draft.items()} == shared.to_draft


def test_what_ends_a_text_is_shared_and_bos_is_not(tokenizers: dict[str, Tokenizer]) -> None:
    to_draft = shared_of(tokenizers["spaces"], tokenizers["words"]).to_draft
    special = {token for token in to_draft if token in tokenizers["spaces"].special_ids}
    assert {tokenizers["spaces"].token_text(token) for token in special} == {EOS, "<unk>"}


def test_ends_of_two_names_are_one_and_ones_name_in_two_roles_are_not(tmp_path: Path) -> None:
    ours = Tokenizer.load(write(tmp_path / "ours", backends()["code"], eos_token=TURN))
    theirs = Tokenizer.load(write(tmp_path / "theirs", backends()["prose"], eos_token=EOS))
    pairs = {
        ours.token_text(token): theirs.token_text(other)
        for token, other in shared_of(ours, theirs).to_draft.items()
        if token in ours.special_ids
    }
    assert pairs == {TURN: EOS}


def test_vocabularies_that_share_too_little_are_refused(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    characters = Backend(models.BPE({chr(code): code - 0x4E00 for code in range(0x4E00, 0x4F00)}, []))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    draft = Tokenizer.load(write(tmp_path / "characters", characters))
    with refused(VocabularyMismatchError, tokenizers["code"].folder, draft.folder, "25%", "`draft=lookup`"):
        shared_of(tokenizers["code"], draft)


def test_a_tokenizer_whose_tokens_bytes_cannot_be_told_is_refused(
    tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    words = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    other = Tokenizer.load(write(tmp_path / "words", words))
    for pair, role in (((tokenizers["code"], other), "draft"), ((other, tokenizers["code"]), "target")):
        with refused(VocabularyMismatchError, other.folder, role, "`draft=lookup`"):
            shared_of(*pair)


# ------------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_encoded_as_the_drafts_tokenizer_does(
    text: str, target: str, draft: str, tokenizers: dict[str, Tokenizer], reencoders: dict[tuple[str, str], Reencoder]
) -> None:
    reencoder = reencoders[target, draft]
    encoded = reencoder.encode(joined(reencoder, tokenizers[target].encode(text)))
    assert [*reencoder.prefix, *encoded.ids] == tokenizers[draft].encode(text)


@few
@given(data=st.data())
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_no_byte_of_any_tokens_is_lost(
    target: str,
    draft: str,
    tokenizers: dict[str, Tokenizer],
    reencoders: dict[tuple[str, str], Reencoder],
    data: st.DataObject,
) -> None:
    """Also of tokens that no text has, which end inside a character."""
    reencoder, ours = reencoders[target, draft], tokenizers[target]
    tokens = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=30))
    string = joined(reencoder, tokens)
    start = data.draw(st.integers(0, len(string)))
    ids, ends = reencoder.encode(string, start)
    assert all(a < b for a, b in pairwise((start, *ends)))
    text = "".join(char for char in string[start:] if ord(char) < FIRST_SPECIAL)
    assert texts_bytes(tokenizers[draft], ids) == text.encode("latin-1")
    for token, end in zip(ids, ends, strict=True):
        assert string[:end].endswith(texts_bytes(tokenizers[draft], [token]).decode("latin-1"))


def test_special_tokens_are_special_and_others_are_left_out(tokenizers: dict[str, Tokenizer]) -> None:
    ours, theirs = tokenizers["prose"], tokenizers["spaces"]
    reencoder = Reencoder(ours, theirs, shared_of(ours, theirs), theirs.vocab_size)
    turn, end = (ours.token_id(text) for text in (TURN, EOS))
    assert turn is not None
    assert end is not None
    tokens = [turn, *ours.encode("it"), end, *ours.encode("a<s>")]
    ids = reencoder.encode(joined(reencoder, tokens)).ids
    assert [theirs.token_text(token) for token in ids if token in theirs.special_ids] == [EOS]
    assert texts_bytes(theirs, ids) == b" ita<s>"


def test_bytes_that_the_draft_has_no_token_for_are_left_out(tokenizers: dict[str, Tokenizer]) -> None:
    ours = tokenizers["code"]
    shared = shared_of(ours, tokenizers["spaces"])
    (a,) = tokenizers["spaces"].encode("a", add_special_tokens=False)[-1:]
    reencoder = Reencoder(ours, tokenizers["spaces"], shared, 256)  # the last byte tokens and all words are not there
    ids, ends = reencoder.encode(joined(reencoder, ours.encode("a\xffz")))
    assert a not in ids
    assert texts_bytes(tokenizers["spaces"], ids) == " a\xffz".encode()[: len(ends)]


def test_byte_level_tokens_written_by_themselves() -> None:
    backend = byte_level(["a b"], 260, [])
    backend.add_tokens(["\n\n\n"])  # as it stands in texts, not in the alphabet of bytes
    state = backend.get_vocab(with_added_tokens=True)
    found = token_bytes(backend)
    assert found is not None
    assert found[state["\n\n\n"]] == b"\n\n\n"
    assert found[state["Ġ"]] == b" "
    assert found[state["Ċ"]] == b"\n"
    assert sorted(text for text in found.values() if len(text) == 1) == [bytes([byte]) for byte in range(256)]


def test_what_the_drafts_tokenizer_would_change_is_kept_and_the_rest_is_encoded_as_ever(tmp_path: Path) -> None:
    """It composes characters, reads special tokens in texts, and some tokens of it are of characters only."""
    backend = backends()["code"]
    backend.normalizer = normalizers.NFC()
    theirs = Tokenizer.load(write(tmp_path / "composing", backend))
    ours = Tokenizer.load(write(tmp_path / "plain", backends()["prose"]))
    reencoder = Reencoder(ours, theirs, shared_of(ours, theirs), theirs.vocab_size)
    around = "def area(width, height):\n    return width * height\n"
    for text in ("cafe\u0301", f"an {TURN} in a text"):
        string = f"{around} {text} {around}".encode().decode("latin-1")
        ids = reencoder.encode(string).ids
        assert texts_bytes(theirs, ids).decode("latin-1") == string
        assert ids[: len(theirs.encode(around)) - 1] == theirs.encode(around)[:-1]
        assert ids[-len(theirs.encode(around)) + 1 :] == theirs.encode(around)[1:]


def test_a_text_that_the_drafts_vocabulary_does_not_cover_is_read_as_far_as_it_does(tmp_path: Path) -> None:
    words = Backend(
        models.Unigram([("▁the", -1.0), ("▁", -2.0), ("a", -2.0), ("b", -3.0)])
    )  # without a token for what is unknown
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    theirs = Tokenizer.load(write(tmp_path / "few", words))
    ours = Tokenizer.load(write(tmp_path / "plain", backends()["prose"]))
    shared = SharedTokens({}, 1.0, 1.0)
    reencoder = Reencoder(ours, theirs, shared, theirs.vocab_size)
    assert [theirs.token_text(token) for token in reencoder.encode(" thexyz ab").ids] == ["▁the", "▁", "a", "b"]
