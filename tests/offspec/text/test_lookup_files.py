"""A user's files become an index that is mapped, reused, and made anew when something changed; bad files are named."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from offspec import builtin
from offspec.errors import StorageError, UsageError
from offspec.scheduler.lookup import NOTHING
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.retrieval import Retrieval
from offspec.scheduler.sampling import Sampler
from offspec.text import lookup_files as corpus
from offspec.text.lookup_files import default_folder, open_index
from offspec.text.tokenizer import Tokenizer

TEXT = "def area(width, height):\n    return width * height\n\n\ndef volume(area, depth):\n    return area * depth\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(builtin.path("target"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "code.py"
    file.write_text(TEXT)
    return file


def cached(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_retrieval_goes_on_as_the_file_does(file: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    index = open_index([file], tokenizer, tmp_path / "cache")
    for end in range(3, len(ids) - 4):
        tree = Retrieval(index).guess(ids[:end], Sampler(SamplingParams(), 0, tokenizer.vocab_size), 8, 4)
        node: int | None = -1
        for token in ids[end : end + 4]:
            assert node is not None
            node = tree.child(node, token)
        assert node is not None


def test_paths_may_be_texts(file: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    open_index([str(file)], tokenizer, tmp_path / "cache")
    open_index([file], tokenizer, tmp_path / "cache")
    assert len(cached(tmp_path / "cache")) == 1


def test_files_are_kept_apart(file: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Ünïcode, 你好\r\n")
    index = open_index([file, other], tokenizer, tmp_path / "cache")
    ends = np.flatnonzero(index.tokens == NOTHING)
    assert ends[-1] == len(index.tokens) - 1
    texts = [tokenizer.decode(part[part != NOTHING].tolist()) for part in np.split(index.tokens, ends[:-1] + 1)]
    assert texts == [TEXT, "Ünïcode, 你好\r\n"]


def test_the_index_is_mapped_and_found_again(
    file: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    built = open_index([file], tokenizer, folder)
    (kept,) = cached(folder)
    monkeypatch.setattr(corpus, "build_index", None)  # whoever builds again fails
    found = open_index([file], tokenizer, folder)
    for array in (found.tokens, found.order):
        base = array
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, mmap.mmap)
        assert not array.flags.writeable
    np.testing.assert_array_equal(found.order, built.order)
    assert cached(folder) == [kept]


def test_a_change_makes_it_anew_and_the_former_goes(file: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "cache"
    open_index([file], tokenizer, folder)
    former = cached(folder)
    file.write_text(TEXT.replace("area", "zone"))
    index = open_index([file], tokenizer, folder)
    assert "zone" in tokenizer.decode(index.tokens[:-1].tolist())
    assert len(cached(folder)) == 1
    assert cached(folder) != former


def test_another_tokenizer_and_other_files_have_indices_of_their_own(
    file: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder, other = tmp_path / "cache", Tokenizer.load(builtin.path("target"))
    other._backend.add_tokens(["width"])
    ids = [open_index([file], one, folder).tokens.tolist() for one in (tokenizer, other)]
    assert ids[0] != ids[1]
    open_index([file, file], tokenizer, folder)
    assert len(cached(folder)) == 3


def test_a_damaged_index_is_built_again(file: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "cache"
    expected = np.array(open_index([file], tokenizer, folder).order)
    (kept,) = cached(folder)
    for content in (b"", kept.read_bytes()[:100], b"no array"):
        kept.write_bytes(content)
        np.testing.assert_array_equal(open_index([file], tokenizer, folder).order, expected)


def test_pieces_are_cut_at_lines_and_lose_nothing(
    file: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_index([file], tokenizer, tmp_path / "whole").tokens.tolist()
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 10)
    seen: list[tuple[int, int]] = []
    pieces = open_index([file], tokenizer, tmp_path / "pieces", lambda done, total: seen.append((done, total)))
    assert tokenizer.decode(pieces.tokens[:-1].tolist()) == tokenizer.decode(whole[:-1]) == TEXT
    assert len(seen) > 2
    assert seen[-1] == (len(TEXT), len(TEXT))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"\x7fELF\0\0\1", "is binary"),
        (b"x = 1\n" * 200_000 + b"\0", "is binary"),
        ("façade".encode("latin-1"), "is not UTF-8"),
    ],
    ids=["missing", "empty", "binary", "binary further on", "latin-1"],
)
def test_bad_files_are_named(content: bytes | None, complaint: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "bad.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        open_index([file], tokenizer, tmp_path / "cache")
    message = str(caught.value)
    assert f"lookup file {file} {complaint}" in message
    assert "\n" not in message
    assert not (tmp_path / "cache").exists()


def test_a_folder_and_no_files_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        open_index([tmp_path], tokenizer, tmp_path / "cache")
    with pytest.raises(UsageError, match="at least one"):
        open_index([], tokenizer, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(file: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        open_index([file], tokenizer, file / "cache")


def test_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "offspec" / "lookup"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "offspec" / "lookup"
