"""Reads torch's pickles of tensors by name, from anyone: memory stays near the file's size, and no code runs.

`torch.load(weights_only=True)` runs no code either, but it inflates compressed entries, and it makes whatever a small
pickle describes: a `bytearray` of any length, or objects that share parts such that one hash takes years. So the file
is checked first: entries as they are, a small pickle, and in it what `torch.save` writes for a dictionary of tensors.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from offspec.loaders.files.checkpoint import show
from offspec.loaders.files.small_files import open_regular

from ..errors import CheckpointError

MOST_PICKLE_BYTES = 2**20  # a tensor's description has some 150
MOST_NESTING = 16  # `torch.save` nests a tensor's description 5 deep
GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(
        f"torch {kind}Storage"
        for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
    ),
}
PUTS, GETS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
NAMES = {"GLOBAL", "BINUNICODE"}  # what is written once and used again; never a container, nor a tensor
ADDITIONS = {"SETITEM", "SETITEMS", "APPEND", "APPENDS", "BUILD"}  # to a container
OPERATIONS = {  # of protocol 2, in which `torch.save` writes
    *("PROTO", "STOP", "MARK", "REDUCE", "BINPERSID", "EMPTY_DICT", "EMPTY_LIST"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *ADDITIONS,
    *PUTS,
    *GETS,
    *NAMES,
}


def read_pickle(file: Path, device: str) -> dict[str, Tensor]:
    """All tensors of a pickle, each at most as large as the file. device: "meta" for shapes only, or "cpu".

    Raises CheckpointError.
    """
    try:
        with open_regular(file) as opened:  # torch.load would block on a pipe
            size = file.stat().st_size
            _check_pickle(_pickle_of(opened))
        read = torch.load(file, map_location=device, weights_only=True, mmap=device == "cpu")
    except Exception as exc:  # zipfile, pickle and torch raise many kinds of exceptions for damaged files
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        raise CheckpointError(f"{file} cannot be read ({lines[0][:200]}); download it again") from exc
    if not isinstance(read, dict) or not all(isinstance(t, Tensor) and isinstance(n, str) for n, t in read.items()):
        raise CheckpointError(f"{file} is not a dictionary of tensors; download it again")
    if large := [name for name, tensor in read.items() if tensor.numel() * tensor.element_size() > size]:
        raise CheckpointError(f"{file}: tensor {show(large[0])} is larger than the file; download it again")
    return read


def _pickle_of(file: BinaryIO) -> bytes:
    """The pickle in torch's zip file. Raises ValueError, BadZipFile for a file that `torch.save` does not write."""
    with ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != ZIP_STORED or entry.compress_size != entry.file_size for entry in entries):
            raise ValueError("it has compressed parts, which torch does not write")
        if archive.comment or not entries or min(entry.header_offset for entry in entries):
            raise ValueError("it has other data around its parts")  # where torch would find other parts
        pickles = [entry for entry in entries if entry.filename.lower().endswith("data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} pickles in place of one")
        if pickles[0].file_size > MOST_PICKLE_BYTES:
            raise ValueError(f"its pickle is larger than {MOST_PICKLE_BYTES >> 20} MiB, the limit")
        return archive.read(pickles[0])


def _check_pickle(content: bytes) -> None:
    """Raises ValueError for what `torch.save` does not write for a dictionary of tensors."""
    stack, named, previous = list[int](), set[str](), ""  # nesting of the objects; -1 is a mark. Numbers of names
    for operation, value, _ in pickletools.genops(content):
        name, argument = operation.name, str(value)
        if name not in OPERATIONS:
            raise ValueError(f"its pickle has the operation {name}, which tensors do not need")
        if name == "GLOBAL" and argument not in GLOBALS:
            raise ValueError(f"its pickle names {argument[:80]!r}, which tensors do not need")
        if name in PUTS and previous in NAMES:
            named.add(argument)
        elif name in PUTS:
            named.discard(argument)
        if name in GETS and argument not in named:
            raise ValueError("objects in its pickle share parts")
        # Change the nestings as the operation changes the objects.
        before = operation.stack_before
        inner = list[int]()
        if pickletools.markobject in before:
            before = before[: before.index(pickletools.markobject)]
            while stack and (top := stack.pop()) >= 0:
                inner.append(top)
        if len(stack) < len(before):
            raise ValueError("its pickle is damaged")
        inner += (stack.pop() for _ in before)
        if operation.name == "MARK":
            stack.append(-1)
        elif operation.name in ADDITIONS:
            container = inner.pop() if inner else 0
            stack.append(max(container, 1 + max(inner, default=0)))
        else:
            stack += (1 + max(inner, default=0) for _ in operation.stack_after)
        if max(stack[-1:], default=0) > MOST_NESTING:
            raise ValueError("its pickle is nested too deeply")
        previous = name
