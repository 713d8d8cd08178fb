"""Kernels in the user's cache: compiled once, again after damage, and without a folder that can be written."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from offspec.backends.x86 import kept_code
from offspec.backends.x86.compiler import compile_ir

from ...machines import needs_kernels

SEVEN = """define void @worker(ptr %job) {
  store i64 7, ptr %job
  ret void
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache."""
    monkeypatch.setattr(kept_code, "user_folder", lambda kind: tmp_path / kind)
    return tmp_path / "cache" / "kernels"


def never() -> bytes:
    raise AssertionError("compiled again")


def test_only_the_first_process_compiles(folder: Path) -> None:
    assert kept_code.kept_code("a", lambda: b"code") == b"code"
    assert kept_code.kept_code("a", never) == b"code"
    assert kept_code.kept_code("b", lambda: b"other") == b"other"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 40])
def test_a_damaged_file_is_compiled_again(damage: bytes, folder: Path) -> None:
    kept_code.kept_code("a", lambda: b"code")
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    assert kept_code.kept_code("a", lambda: b"new") == b"new"
    assert kept_code.kept_code("a", never) == b"new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_in_its_place_is_no_matter(folder: Path) -> None:
    kept_code.kept_code("a", lambda: b"code")
    (file,) = folder.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert kept_code.kept_code("a", lambda: b"new") == b"new"


def test_without_a_folder_each_process_compiles(folder: Path) -> None:
    folder.parent.mkdir()
    folder.touch()  # a file in its place
    for code in (b"one", b"two"):
        assert kept_code.kept_code("a", lambda code=code: code) == code


@needs_kernels
def test_code_from_the_cache_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        job = (ctypes.c_int64 * 1)()
        compile_ir(SEVEN, "worker")(job)
        assert job[0] == 7
        assert len(list(folder.iterdir())) == 1
        monkeypatch.setattr(kept_code, "write_cached", lambda file, content: never())


@needs_kernels
def test_a_wrong_text_is_refused_and_not_kept(folder: Path) -> None:
    with pytest.raises(RuntimeError):
        compile_ir("define nonsense", "worker")
    assert not folder.exists()
