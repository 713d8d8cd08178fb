"""Damaged pickles of trained heads, by seeds: read within the file's size, or refused in one line."""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

import pytest
import torch

from offspec.checkpoints.pickles import GLOBALS, read_pickle

from .damage import damaged, judge

if sys.platform == "win32":
    pytest.skip("alarms as POSIX has them", allow_module_level=True)

NUM_CASES = int(os.environ.get("FUZZ_CASES", "100"))
INSERTED = (
    *(pickle.NONE, pickle.EMPTY_DICT, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.REDUCE, pickle.POP),
    *(pickle.MARK, pickle.STOP, pickle.SETITEM, pickle.SETITEMS, pickle.APPEND, pickle.BUILD, pickle.BINPERSID),
    *(pickle.BININT + b"\xff\xff\xff\x7f", pickle.BININT + b"\x00\x00\x00\x80", pickle.LONG1 + b"\x08" + b"\xff" * 8),
    *(pickle.BINGET + b"\x00", pickle.BINGET + b"\x7f", pickle.BINPUT + b"\x00", pickle.DUP, pickle.NEWTRUE),
    *(pickle.GLOBAL + name.replace(" ", "\n").encode() + b"\n" for name in sorted(GLOBALS)),
    *(pickle.GLOBAL + b"os\nsystem\n", pickle.GLOBAL + b"builtins\nbytearray\n", pickle.BINUNICODE + b"\xff" * 4),
    *(pickle.PROTO + b"\x05", pickle.EMPTY_LIST * 50, b"\xff"),
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The entries of a sound file, by name."""
    weight = torch.arange(12.0).view(3, 4)
    tensors = {"fc.weight": weight, "tied": weight.detach(), "norm": torch.ones(4).half(), "table": torch.arange(300)}
    torch.save(tensors, file := tmp_path_factory.mktemp("sound") / "head.bin")
    with ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(file: Path, parts: dict[str, bytes]) -> None:
    with ZipFile(file, "w", ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def operations(content: bytes) -> Iterator[bytes]:
    places = [place for _, _, place in pickletools.genops(content)]
    for first, last in zip(places, [*places[1:], len(content)], strict=True):
        yield content[first:last]


def damaged_pickle(content: bytes, chance: random.Random) -> bytes:
    """Operations taken out, repeated, exchanged, added, or with other bytes behind them."""
    found = list(operations(content))
    for _ in range(chance.randint(1, 3)):
        at, other = chance.randrange(len(found)), chance.randrange(len(found))
        kind = chance.randrange(5)
        if kind == 0:
            del found[at]
        elif kind == 1:
            found.insert(at, found[other])
        elif kind == 2:
            found[at], found[other] = found[other], found[at]
        elif kind == 3:
            found.insert(at, chance.choice(INSERTED))
        elif len(found[at]) > 1:
            found[at] = found[at][:1] + damaged(found[at][1:], chance)
    return b"".join(found)


def damage(file: Path, parts: dict[str, bytes], chance: random.Random) -> None:
    parts, kind = dict(parts), chance.random()
    (name,) = [name for name in parts if name.endswith("data.pkl")]
    if kind < 0.6:
        parts[name] = damaged_pickle(parts[name], chance)
    elif kind < 0.8:  # numbers that are missing, or fewer than the pickle says
        name = chance.choice(list(parts))
        if chance.random() < 0.3:
            del parts[name]
        else:
            parts[name] = parts[name][: chance.randrange(len(parts[name]) + 1)]
    write(file, parts)
    if kind >= 0.8:
        file.write_bytes(damaged(file.read_bytes(), chance))


def read(file: Path) -> None:
    """Shapes alone, as for a plan, then the numbers, all of which are there."""
    shapes = {name: tensor.shape for name, tensor in read_pickle(file, "meta").items()}
    tensors = read_pickle(file, "cpu")
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
    assert all(tensor.clone().numel() == tensor.numel() for tensor in tensors.values())


def test_damaged_pickles(parts: dict[str, bytes], tmp_path: Path) -> None:
    write(file := tmp_path / "head.bin", parts)
    read(file)
    for seed in range(NUM_CASES):
        damage(file, parts, random.Random(seed))
        judge(f"case {seed}", lambda: read(file))
