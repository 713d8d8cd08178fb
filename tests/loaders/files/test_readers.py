from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from offspec.errors import CheckpointError
from offspec.loaders.files.readers import BLOCK_BYTES, HUGE_PAGE_BYTES, FileReader, FileStates, HostBuffer

from ...refusals import refused

SIZE = 3 * BLOCK_BYTES + 123


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


def test_a_buffer_is_one_memory_seen_twice() -> None:
    for nbytes in (0, 1, BLOCK_BYTES, HUGE_PAGE_BYTES + 17):
        buffer = HostBuffer(nbytes)
        assert len(buffer.view) == buffer.tensor.numel() == buffer.nbytes == nbytes
        if nbytes:
            buffer.view[nbytes - 1] = 7
            assert buffer.tensor[nbytes - 1] == 7
            assert buffer.address % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else BLOCK_BYTES) == 0


def test_buffers_side_by_side_are_one_memory() -> None:
    sizes = [BLOCK_BYTES, 1, HUGE_PAGE_BYTES + 17, 0, 2 * BLOCK_BYTES]
    whole, parts = HostBuffer.side_by_side(sizes)
    assert [part.nbytes for part in parts] == sizes
    assert whole.nbytes == HUGE_PAGE_BYTES + 5 * BLOCK_BYTES
    for number, part in enumerate(parts, 1):
        part.tensor.fill_(number)
    for number, part in enumerate(parts, 1):
        if part.nbytes:
            assert part.address % BLOCK_BYTES == 0
            start = part.address - whole.address
            assert set(whole.view[start : start + part.nbytes]) == {number}


def test_a_buffer_that_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes"):
        HostBuffer(2**60)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("offset", "length"), [(0, 2 * BLOCK_BYTES), (BLOCK_BYTES, 3 * BLOCK_BYTES), (5, 100), (SIZE - 1, 1)]
)
def test_it_reads_what_is_there(file: Path, direct: bool, offset: int, length: int) -> None:
    buffer, least = HostBuffer(length), min(length, SIZE - offset)
    reader = FileReader(direct=direct)
    reader.read(file, offset, buffer.view, least)
    assert bytes(buffer.view[:least]) == file.read_bytes()[offset : offset + least]
    reader.close()


def test_a_file_system_without_direct_reads_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open: Callable[..., int] = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    reader, buffer = FileReader(), HostBuffer(BLOCK_BYTES)
    reader.read(file, 0, buffer.view, BLOCK_BYTES)
    assert bytes(buffer.view) == file.read_bytes()[:BLOCK_BYTES]
    assert "refuses direct reads" in reader.fallbacks[file]
    reader.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [0, 2 * BLOCK_BYTES])
def test_a_file_cut_off_is_named_with_its_size(file: Path, direct: bool, offset: int) -> None:
    reader, buffer = FileReader(direct=direct), HostBuffer(3 * BLOCK_BYTES)
    os.truncate(file, BLOCK_BYTES + 5)
    with refused(CheckpointError, file, f"byte {BLOCK_BYTES + 5}"):
        reader.read(file, offset, buffer.view, BLOCK_BYTES)
        reader.read(file, BLOCK_BYTES, buffer.view, BLOCK_BYTES)
    reader.close()


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("open", errno.ENOENT, ("byte 4096", "No such file", "check the disk")),
        ("preadv", errno.EIO, ("byte 4096", "Input/output error", "check the disk")),
        ("open", errno.EMFILE, ("ulimit -n",)),
    ],
)
def test_an_error_of_the_system_is_told(
    file: Path, call: str, number: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with refused(CheckpointError, file, *words) as caught:
        FileReader().read(file, 4096, HostBuffer(BLOCK_BYTES).view, 1)
    assert ("disk" in str(caught.value)) == (number != errno.EMFILE)


def test_deleting_a_file_that_is_open_changes_nothing(file: Path) -> None:
    content, reader, buffer = file.read_bytes(), FileReader(), HostBuffer(BLOCK_BYTES)
    reader.read(file, 0, buffer.view, BLOCK_BYTES)
    file.unlink()
    reader.read(file, BLOCK_BYTES, buffer.view, BLOCK_BYTES)
    assert bytes(buffer.view) == content[BLOCK_BYTES : 2 * BLOCK_BYTES]
    reader.close()


def test_a_reader_that_nobody_refers_to_closes_its_files(tmp_path: Path) -> None:
    (file := tmp_path / "x.bin").write_bytes(b"x" * 100)
    reader = FileReader(direct=False)
    reader.read(file, 0, memoryview(bytearray(100)), 100)
    (descriptor,) = reader._files.values()
    os.fstat(descriptor)  # it is open
    del reader
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_new_time_stamp_is_no_change(file: Path) -> None:
    states = FileStates([file])
    os.utime(file, (0, 0))
    states.check()
    os.utime(file, (1, 1))
    with file.open("r+b") as rewritten:
        rewritten.seek(SIZE // 2)
        rewritten.write(b"another")
    os.utime(file, (2, 2))
    with refused(CheckpointError, file, "changed"):
        states.check()


def test_another_file_in_its_place_is_a_change(file: Path, tmp_path: Path) -> None:
    states = FileStates([file])
    (other := tmp_path / "other").write_bytes(random.Random(1).randbytes(SIZE))
    other.replace(file)
    with refused(CheckpointError, file, "changed"):
        states.check()


def test_a_deleted_file_is_no_change(file: Path) -> None:
    states = FileStates([file])
    file.unlink()
    states.check()
