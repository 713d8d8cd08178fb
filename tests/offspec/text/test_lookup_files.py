"""A user's files become an index that is mapped, reused, and made anew when something changed; bad files are named."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from offspec import builtin
from offspec.errors import StorageError, UsageError
from offspec.scheduler.guessing import retrieval
from offspec.scheduler.guessing.lookup import NO_TOKEN
from offspec.scheduler.guessing.retrieval import Retrieval
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.text import lookup_files as corpus
from offspec.text.lookup_files import lookup_memory_bytes, open_index
from offspec.text.tokenizer import Tokenizer

from ...refusals import refused
from ...scheduler.fakes import build_index

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


def test_files_are_kept_apart(file: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Ünïcode, 你好\r\n", encoding="utf-8")
    index = open_index([file, other], tokenizer, tmp_path / "cache")
    ends = np.flatnonzero(index.tokens == NO_TOKEN)
    assert ends[-1] == len(index.tokens) - 1
    texts = [tokenizer.decode(part[part != NO_TOKEN].tolist()) for part in np.split(index.tokens, ends[:-1] + 1)]
    assert texts == [TEXT, "Ünïcode, 你好\r\n"]


def test_the_index_is_mapped_and_found_again(
    file: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    built = open_index([file], tokenizer, folder)
    (kept,) = cached(folder)
    monkeypatch.setattr(corpus, "sorted_places", None)  # whoever builds again fails
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
    folder, renamed = tmp_path / "cache", shutil.copytree(builtin.path("target"), tmp_path / "other")
    backend = tokenizers.Tokenizer.from_file(str(renamed / "tokenizer.json"))
    backend.add_tokens(["width"])
    backend.save(str(renamed / "tokenizer.json"))
    other = Tokenizer.load(renamed)
    ids = [open_index([file], one, folder).tokens.tolist() for one in (tokenizer, other)]
    assert ids[0] != ids[1]
    open_index([file, file], tokenizer, folder)
    assert len(cached(folder)) == 3


def test_a_damaged_index_is_built_again(file: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Cut short, another file, or a wrong byte: a place that is none would be an IndexError in the middle of a text."""
    folder = tmp_path / "cache"
    expected = np.array(open_index([file], tokenizer, folder).order)
    (kept,) = cached(folder)
    sound = kept.read_bytes()
    wrong = (0, 16, 24, 64, len(sound) // 2, len(sound) - 1)
    changed = [sound[:at] + bytes([sound[at] ^ 0x40]) + sound[at + 1 :] for at in wrong]
    for content in (b"", sound[:100], b"no array", *changed):
        kept.write_bytes(content)
        np.testing.assert_array_equal(open_index([file], tokenizer, folder).order, expected)
        assert kept.read_bytes() == sound
    assert cached(folder) == [kept]


def test_shards_are_sorted_as_in_memory(
    file: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (corpus, retrieval):
        monkeypatch.setattr(module, "SHARD_TOKENS", 13)
    index = open_index([file], tokenizer, tmp_path / "cache")
    assert len(index.tokens) > 26
    np.testing.assert_array_equal(index.order, build_index(np.array(index.tokens)).order)


def test_a_disk_that_is_full(
    tmp_path: Path, small_disk: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file without room would kill the process."""
    (file := tmp_path / "long.txt").write_text(TEXT * 100)
    (small_disk / "other").write_bytes(bytes(2**21 - 2**14))
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    with refused(StorageError, "No space left on device", "XDG_CACHE_HOME"):
        open_index([file], tokenizer)
    assert list((small_disk / "offspec" / "lookup").iterdir()) == []


@pytest.mark.nightly("measures the memory of a process with 1.5 million words")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_building_takes_no_more_memory_than_is_said(tmp_path: Path) -> None:
    (file := tmp_path / "long.txt").write_text(random_words(1_500_000))
    build = "import resource, sys; from pathlib import Path; from offspec import builtin; "
    build += "from offspec.text.lookup_files import lookup_memory_bytes, open_index; "
    build += "from offspec.text.tokenizer import Tokenizer; tokenizer = Tokenizer.load(builtin.path('target')); "
    build += "import torch; tokenizer.encode('x'); Path('/proc/self/clear_refs').write_text('5'); "
    build += "peak = lambda key: int(Path('/proc/self/status').read_text().split(key)[1].split()[0]) * 1024; "
    build += "before = peak('VmRSS:'); index = open_index([sys.argv[1]], tokenizer, Path(sys.argv[2])); "
    build += "print(peak('VmHWM:') - before, sum(lookup_memory_bytes([sys.argv[1]])))"
    command = [sys.executable, "-c", build, str(file), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    taken, said = map(int, done.stdout.split())
    assert 0.2 * said < taken < said


def random_words(num_bytes: int) -> str:
    draws = np.random.default_rng(0)
    words = ["".join(map(chr, draws.integers(97, 123, length))) for length in draws.integers(2, 9, 500)]
    return "\n".join(" ".join(draws.choice(words, 12)) for _ in range(num_bytes // 70))


def test_memory_follows_the_texts_up_to_a_shard(tmp_path: Path) -> None:
    small, large, huge = tmp_path / "small", tmp_path / "large", tmp_path / "huge"
    for file, num_bytes in ((small, 1000), (large, 15 * 10**6), (huge, 10**9)):
        with file.open("wb") as opened:
            opened.truncate(num_bytes)
    kept, building = zip(*(lookup_memory_bytes([file]) for file in (small, large, huge)), strict=True)
    assert 15 * 10**6 < kept[1] < 10**8 < kept[2]
    assert building[0] <= building[1] <= building[2] < 250 * 10**6
    assert lookup_memory_bytes([small, large])[0] >= kept[0] + kept[1]
    assert lookup_memory_bytes([tmp_path / "missing"])[0] < 100


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_and_devices_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with refused(UsageError, file, "regular file"):
            open_index([file], tokenizer, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_pieces_are_cut_at_lines_and_lose_nothing(
    file: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_index([file], tokenizer, tmp_path / "whole").tokens.tolist()
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 10)
    seen, encode = list[str](), tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: (seen.append(text), encode(text, **options))[1])
    pieces = open_index([file], tokenizer, tmp_path / "pieces")
    assert tokenizer.decode(pieces.tokens[:-1].tolist()) == tokenizer.decode(whole[:-1]) == TEXT
    assert len(seen) > 2
    assert "".join(seen) == TEXT


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b"\x7fELF\0\0\1", "binary"),
        (b"x = 1\n" * 200_000 + b"\0", "binary"),
        ("façade".encode("latin-1"), "UTF-8"),
    ],
    ids=["missing", "empty", "binary", "binary further on", "latin-1"],
)
def test_bad_files_are_named(content: bytes | None, word: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "bad.txt"
    if content is not None:
        file.write_bytes(content)
    with refused(UsageError, "lookup file", file, word):
        open_index([file], tokenizer, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_folder_and_no_files_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with refused(UsageError, tmp_path, "directory"):
        open_index([tmp_path], tokenizer, tmp_path / "cache")
    with refused(UsageError, "at least one"):
        open_index([], tokenizer, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(file: Path, tokenizer: Tokenizer) -> None:
    with refused(StorageError, file / "cache", "XDG_CACHE_HOME"):
        open_index([file], tokenizer, file / "cache")


def test_the_source_of_accepted_guesses(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """File, bytes before the first accepted token, and how many of them the file has."""
    files = [tmp_path / "first.py", tmp_path / "second.py"]
    files[0].write_text("import math\n\n" + TEXT)
    files[1].write_text(
        "# größer\n\n\ndef perimeter(width, height):\n    return 2 * (width + height)\n", encoding="utf-8"
    )
    index = open_index(files, tokenizer, tmp_path / "cache")
    other = tokenizer.encode("zebra", add_special_tokens=False)[0]
    for file in files:
        content = file.read_bytes()
        ids = tokenizer.encode(content.decode(), add_special_tokens=False)
        for end in range(6, len(ids) - 3):
            found = index.source(ids[end - 6 : end], [*ids[end : end + 3], other])
            assert found is not None
            assert (found.file, found.num_tokens) == (str(file), 3)
            assert content[: found.offset].decode(errors="replace") == tokenizer.decode(ids[:end])
    assert index.source(ids[:6], [other]) is None
    assert index.source([other] * 6, ids[7:8]) is None
    assert index.source(ids[:6], []) is None
