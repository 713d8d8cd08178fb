"""GGUF headers: what the `gguf` package writes is read, what is damaged is refused in one line."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects

from offspec.errors import CheckpointError, MissingWeightsError
from offspec.loaders.files import gguf_file
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.gguf_file import GgufFile, part_paths, read_metadata, read_model
from offspec.loaders.files.hub import resolve

from ...refusals import refused
from ..gguf_writing import ARRAY, STRING, UINT32, description, entry, header, string, write_gguf

ARCH = entry("general.architecture", STRING, string("llama"))
F32, Q8_0 = 0, 8


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        "token_embd.weight": np.arange(128, dtype=np.float32).reshape(4, 32),
        "blk.0.attn_norm.weight": np.ones(32, dtype=np.float32),
    }
    metadata = {"llama.block_count": 1, "llama.rope.freq_base": 1e4, "list": ["a", "ü"], "numbers": [1, 2, 3]}
    return write_gguf(tmp_path / "model.gguf", "llama", metadata, tensors, {"token_embd.weight": "Q8_0"})


def test_metadata_and_tensors(model: Path) -> None:
    found = read_model(model)
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.rope.freq_base"] == 1e4
    assert found.metadata["list"] == ["a", "ü"]
    assert found.metadata["numbers"] == [1, 2, 3]
    table, norm = found.tensors["token_embd.weight"], found.tensors["blk.0.attn_norm.weight"]
    assert (table.dtype, table.shape, table.nbytes) == ("Q8_0", (4, 32), 4 * 34)
    content = model.read_bytes()
    assert np.frombuffer(content[norm.offset : norm.offset + norm.nbytes], np.float32).tolist() == [1.0] * 32
    assert read_metadata(model) == found.metadata


def test_a_tokenizer_takes_what_its_model_has_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_model(model)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "_read_header", None)
        taken = read_metadata(model)
    assert taken == read_metadata(model)


def test_a_folder_with_one_model(model: Path) -> None:
    (model.parent / "mmproj-model.gguf").write_bytes(b"")
    assert open_checkpoint(model.parent).tensors.keys() == read_model(model).tensors.keys()
    assert resolve(str(model.parent)) == model.parent
    model.with_name("other.gguf").write_bytes(model.read_bytes())
    with refused(CheckpointError, model.parent, 2, "model.gguf", "other.gguf"):
        open_checkpoint(model.parent)


def test_a_file_of_another_name_is_known_by_its_first_bytes(model: Path) -> None:
    path = model.rename(model.with_name("sha256-abc"))
    assert resolve(str(path)) == path
    assert read_model(path).tensors


def test_headers_alone(model: Path) -> None:
    content = model.read_bytes()
    model.write_bytes(content[:-40])
    with refused(CheckpointError, "truncated"):
        read_model(model)
    assert read_model(model, headers_only=True).tensors
    assert GgufFile().open_config(model).tensors == read_model(model, headers_only=True).tensors


def test_strings_that_are_no_utf8_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens = struct.pack("<IQ", STRING, 1) + string(b"\xff\xfe")
    path.write_bytes(header([ARCH, entry("tokens", ARRAY, tokens)], []))
    (token,) = read_metadata(path)["tokens"]
    assert token.encode("utf-8", "surrogateescape") == b"\xff\xfe"


# ------------------------------------------------------------------------------------------------------------ splits


def split_set(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for part in range(count):
        metadata = {"split.no": part, "split.count": count, "split.tensors.count": count}
        path = folder / f"big-{part + 1:05d}-of-{count:05d}.gguf"
        tensors = {f"blk.{part}.attn_norm.weight": np.full(32, part, dtype=np.float32)}
        paths.append(write_gguf(path, "llama", metadata, tensors))
    return paths


def test_a_split_set_from_any_part(tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    for path in (*paths, tmp_path):
        found = open_checkpoint(path)
        assert {info.path for info in found.tensors.values()} == set(paths)
    assert part_paths(paths[2]) == paths


def test_split_sets_that_are_none(tmp_path: Path) -> None:
    one, two, three = split_set(tmp_path)
    content = two.read_bytes()
    two.write_bytes(one.read_bytes())  # a set that goes round in circles
    with refused(CheckpointError, "part 2 of 3", "part 0"):
        read_model(one)
    two.unlink()
    with refused(MissingWeightsError, "1 of 3", "missing", "big-00002-of-00003.gguf"):
        read_model(three)
    two.symlink_to(two)
    with refused(MissingWeightsError, "1 of 3", "missing"):
        read_model(three)
    two.unlink()
    two.write_bytes(content)
    alone = one.rename(tmp_path / "alone.gguf")
    with refused(CheckpointError, "part 0", "of 3"):
        read_model(alone)
    absurd = tmp_path / "big-00001-of-99999.gguf"
    absurd.write_bytes(content)
    with refused(CheckpointError, "1000"):
        read_model(absurd)
    outside = tmp_path / "big-00000-of-00003.gguf"
    outside.write_bytes(content)
    with refused(CheckpointError, "part 0 of 3"):
        read_model(outside)


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    for part in range(2):
        metadata = {"split.no": part, "split.count": 2, "split.tensors.count": 2}
        tensors = {"output_norm.weight": np.ones(32, dtype=np.float32)}
        path = write_gguf(tmp_path / f"m-{part + 1:05d}-of-00002.gguf", "llama", metadata, tensors)
    with refused(CheckpointError, "output_norm.weight", "another part"):
        read_model(path)


# ------------------------------------------------------------------------------------------------------------ damage

HUGE = 2**62
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "GGUF"),
    "other magic": (header([ARCH], [], magic=b"GGML"), "GGUF b'GGML'"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "version 1": (header([ARCH], [], version=1), "version 1"),
    "big-endian": (header([ARCH], [], version=3 << 24), "big-endian"),
    "cut in the header": (header([ARCH], [])[:40], "header 40"),
    "absurd number of tensors": (header([ARCH], [], counts=(HUGE, 1)), "tensors"),
    "absurd number of keys": (header([ARCH], [], counts=(0, HUGE)), "keys"),
    "more keys than there are": (header([ARCH], [], counts=(0, 9)), "damaged"),
    "a key of gigabytes": (header([struct.pack("<Q", 2**40)], []), "string 1099511627776"),
    "a string of gigabytes": (header([entry("a", STRING, struct.pack("<Q", 2**33))], []), "string 8589934592"),
    "an array of gigabytes": (header([entry("a", ARRAY, struct.pack("<IQ", STRING, 2**40))], []), "arrays"),
    "an array beyond the file": (header([entry("a", ARRAY, struct.pack("<IQ", UINT32, 2**21))], []), "8388608"),
    "an array of arrays": (header([entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1))], []), "array type 9"),
    "an unknown type of value": (header([entry("a", 77, b"")], []), "type 77"),
    "a key twice": (header([ARCH, ARCH], []), "twice"),
    "no dimensions": (header([ARCH], [description("t", (), F32, 0)]), "0 dimensions"),
    "nine dimensions": (header([ARCH], [description("t", (1,) * 9, F32, 0)]), "9 dimensions"),
    "a size of zero": (header([ARCH], [description("t", (0, 4), F32, 0)]), "sizes [0, 4]"),
    "sizes that overflow": (header([ARCH], [description("t", (2**40, 2**40), F32, 0)]), "sizes"),
    "an unknown type of tensor": (header([ARCH], [description("t", (32,), 99, 0)]), "type 99"),
    "a row that is no whole block": (header([ARCH], [description("t", (33, 2), Q8_0, 0)]), "33 Q8_0 32"),
    "an offset that is not aligned": (header([ARCH], [description("t", (8,), F32, 4)]) + bytes(64), "multiple 32"),
    "an offset beyond the file": (header([ARCH], [description("t", (8,), F32, 2**40)]) + bytes(64), "truncated"),
    "tensors that overlap": (
        header([ARCH], [description("a", (16,), F32, 0), description("b", (8,), F32, 32)]) + bytes(64),
        "overlaps",
    ),
    "a tensor twice": (
        header([ARCH], [description("a", (8,), F32, 0), description("a", (8,), F32, 32)]) + bytes(64),
        "'a' twice",
    ),
    "cut in the data": (header([ARCH], [description("a", (64,), F32, 0)]) + bytes(8), "truncated"),
    "alignment of three": (
        header([ARCH, entry("general.alignment", UINT32, struct.pack("<I", 3))], []),
        "power of two",
    ),
    "alignment of gigabytes": (
        header([ARCH, entry("general.alignment", UINT32, struct.pack("<I", 2**31))], []),
        "power of two",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    content, expected = DAMAGED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with refused(MissingWeightsError if name == "git-lfs" else CheckpointError, path, *expected.split()):
            open_checkpoint(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**26


def test_every_cut_of_a_header_is_refused(model: Path, tmp_path: Path) -> None:
    content, path = model.read_bytes(), tmp_path / "cut.gguf"
    for length in range(0, len(content) - 33, 7):
        path.write_bytes(content[:length])
        with refused(CheckpointError, path):
            read_model(path)


# --------------------------------------------------------------------------------------------------------------- hub


@pytest.fixture
def repository(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub repository with a model in two quantisations, one of them in parts, that was downloaded."""
    folder = model.parent / "snapshot"
    (folder / "Q8_0").mkdir(parents=True)
    model.rename(folder / "name-Q4_K_M.gguf")
    split_set(folder / "Q8_0", 2)
    for path in (folder / "Q8_0").iterdir():
        path.rename(path.with_name(path.name.replace("big", "name-Q8_0")))

    def download(repository: str, **patterns: object) -> str:
        assert repository == "org/name"
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return folder


def test_a_quantisation_of_a_hub_id(repository: Path) -> None:
    assert resolve("org/name:Q4_K_M") == repository / "name-Q4_K_M.gguf"
    assert resolve("org/name@main:q4_k_m") == resolve("org/name:q4_k_m", "main") == repository / "name-Q4_K_M.gguf"
    first = resolve("org/name:Q8_0")
    assert first == repository / "Q8_0" / "name-Q8_0-00001-of-00002.gguf"
    assert len(open_checkpoint(first).tensors) == 2


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("named", ["Q4_K", "Q2_K"])  # the first is only a part of a name
def test_a_quantisation_that_is_not_there(named: str) -> None:
    with refused(CheckpointError, "org/name", named):
        resolve(f"org/name:{named}")


def test_a_quantisation_that_two_files_have(repository: Path) -> None:
    (repository / "other-Q4_K_M.gguf").write_bytes((repository / "name-Q4_K_M.gguf").read_bytes())
    with refused(CheckpointError, "org/name:Q4_K_M", "2 files"):
        resolve("org/name:Q4_K_M")


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ("F16", {"m-F16.gguf", "f16.gguf", "F16/m-F16-00001-of-00002.gguf"}),
        ("q4_k", {"m.Q4_K.gguf"}),
        ("Q4_K_M", {"m-Q4_K_M.gguf", "UD-Q4_K_M/m-UD-Q4_K_M-00001-of-00002.gguf"}),
    ],
)
def test_no_other_quantisation_is_downloaded(named: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"m-F16.gguf", "f16.gguf", "F16/m-F16-00001-of-00002.gguf", "m-BF16.gguf", "m.Q4_K.gguf", "m-Q4_K_S.gguf"}
    names |= {
        "m-Q4_K_M.gguf",
        "UD-Q4_K_M/m-UD-Q4_K_M-00001-of-00002.gguf",
        "F16/README.md",
        "mmproj-F16.gguf",
        "F16/mmproj-F16.gguf",
    }
    found = set[str]()

    def download(
        repository: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        found.update(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return "nowhere"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with refused(CheckpointError, "org/name", named):
        resolve(f"org/name:{named}")
    assert found == wanted


def test_to_plan_with_only_headers_are_downloaded(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    commits = iter(["a" * 40, "a" * 40, "a" * 40, "b" * 40])

    class Api:
        def model_info(self, name: str, *, revision: str | None) -> SimpleNamespace:
            assert (name, revision) == ("org/name", None)
            files = [SimpleNamespace(rfilename=str(path.relative_to(repository))) for path in repository.rglob("*")]
            return SimpleNamespace(sha=next(commits), siblings=files)

    class FileSystem:
        def read_block(self, name: str, offset: int, length: int) -> bytes:
            read.append(name)
            path = re.sub(r"org/name@(a{40}|b{40})/", "", name)
            return (repository / path).read_bytes()[offset : offset + length][:-16]

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.HfFileSystem", FileSystem)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for times_read in (2, 2, 3, 5):  # they are there; one is damaged; the hub has others
        if times_read == 3:
            min((tmp_path / "cache").rglob("*.gguf")).write_bytes(b"GGUF")
        first = resolve("org/name:Q8_0", weights=False)
        assert (tmp_path / "cache") in first.parents
        assert len(open_checkpoint(first, headers_only=True).tensors) == 2
        assert len(read) == times_read
    with refused(CheckpointError, "truncated"):
        open_checkpoint(first)
