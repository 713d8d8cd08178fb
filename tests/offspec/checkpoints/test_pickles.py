"""Pickled heads from strangers: what `torch.save` writes is read, all else refused before it takes memory or time."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
from torch import nn

from offspec.checkpoints.pickles import MOST_NESTING, MOST_PICKLE_BYTES, read_pickle
from offspec.errors import CheckpointError

START, END = pickle.PROTO + b"\x02", pickle.STOP
ALLOWED = pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n"
DICTIONARY = START + pickle.EMPTY_DICT + END


class Module(nn.Module):
    """Two layers that share a weight, many small tensors, and other kinds of numbers."""

    def __init__(self, num_small: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
        self.second.weight = self.first.weight
        self.rest = nn.ParameterList([nn.Parameter(torch.full((2,), float(i))) for i in range(num_small)])
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("known", torch.tensor([True, False]))
        self.half().register_buffer("bf16", torch.ones(2, 2, dtype=torch.bfloat16).T)


@pytest.mark.parametrize(("what", "num_small"), [("state dict", 300), ("parameters", 3)])
def test_what_torch_writes_is_read(what: str, num_small: int, tmp_path: Path) -> None:
    module, file = Module(num_small), tmp_path / "pytorch_model.bin"
    tensors = module.state_dict() if what == "state dict" else dict(module.named_parameters())
    torch.save(tensors, file)
    read, shapes = read_pickle(file, "cpu"), read_pickle(file, "meta")
    assert list(read) == list(shapes) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].equal(tensor)
        assert shapes[name].shape == tensor.shape


def archive(file: Path, content: bytes = DICTIONARY, *, method: int = ZIP_STORED, name: str = "data.pkl") -> Path:
    """A file like those of `torch.save`, with this pickle."""
    with ZipFile(file, "w", method) as written:
        written.writestr(f"head/{name}", content)
        written.writestr("head/version", "3\n")
    return file


def test_the_smallest_such_file_is_read(tmp_path: Path) -> None:
    assert read_pickle(archive(tmp_path / "pytorch_model.bin"), "meta") == {}


def shared(number: int) -> bytes:
    """A tuple of two tuples, each the same tuple of two, and so on; its hash takes 2 ** number steps."""
    content = START + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.BINPUT + b"\x00"
    for _ in range(number):
        content += pickle.BINGET + b"\x00" + pickle.TUPLE2 + pickle.BINPUT + b"\x00"
    return content + pickle.NONE + pickle.SETITEM + END


REFUSED = {
    "a long pickle": (START + pickle.NONE + pickle.POP * MOST_PICKLE_BYTES + END, "larger than 1 MiB"),
    "a huge bytearray": (
        START + pickle.GLOBAL + b"__builtin__\nbytearray\n" + pickle.BININT + b"\x00\x00\x00\x10" + pickle.TUPLE1
        + pickle.REDUCE + END,
        "bytearray",
    ),
    "a global by other means": (
        START + pickle.MARK + pickle.INST + b"torch._utils\n_rebuild_tensor_v2\n" + END,
        "operation INST",
    ),
    "shared parts": (shared(16), "share parts"),
    "a name's place taken by a tuple": (
        START + ALLOWED + pickle.BINPUT + b"\x00" + shared(16)[2:],
        "share parts",
    ),
    "deep nesting": (
        START + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 10_000 + pickle.NONE + pickle.SETITEM + END,
        "nested too deeply",
    ),
    "deep lists": (START + pickle.EMPTY_LIST * 100 + pickle.APPEND * 99 + END, "nested too deeply"),
    "nothing to take": (START + pickle.TUPLE3 + END, "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_other_pickles_are_refused_before_torch_reads_them(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, words = REFUSED[what]
    refused(archive(tmp_path / "pytorch_model.bin", content), words, monkeypatch)


def test_compressed_parts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(archive(tmp_path / "pytorch_model.bin", method=ZIP_DEFLATED), "compressed", monkeypatch)


def test_a_file_with_two_pickles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compares names without case, and Python with it."""
    file = archive(tmp_path / "pytorch_model.bin", name="DATA.PKL")
    with ZipFile(file, "a") as written:
        written.writestr("head/data.pkl", DICTIONARY)
    refused(file, "2 pickles", monkeypatch)


@pytest.mark.parametrize("where", ["before", "after"])
def test_data_around_the_zip_file_are_refused(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch may see another table of contents than Python."""
    file = archive(tmp_path / "pytorch_model.bin")
    if where == "before":
        file.write_bytes(b"another zip file" + file.read_bytes())
    else:
        with ZipFile(file, "a") as written:
            written.comment = b"another zip file"
    refused(file, "other data", monkeypatch)


def test_nesting_of_many_tensors_is_that_of_one(tmp_path: Path) -> None:
    """Entries are added to a dictionary one after the other."""
    entries = b"".join(pickle.BINUNICODE + b"\x01\x00\x00\x00a" + pickle.NONE + pickle.SETITEM for _ in range(50))
    assert MOST_NESTING < 50
    with pytest.raises(CheckpointError, match="not a dictionary of tensors"):
        read_pickle(archive(tmp_path / "head.bin", START + pickle.EMPTY_DICT + entries + END), "meta")


def refused(file: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch read it")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_pickle(file, "meta")
    assert "\n" not in str(caught.value)
