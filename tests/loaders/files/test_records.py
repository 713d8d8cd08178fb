from __future__ import annotations

import random
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec.backends.weights import ALIGNMENT
from offspec.loaders.files.checkpoint import DTYPE_BYTES, TensorInfo
from offspec.loaders.files.readers import BLOCK_BYTES, READ_BYTES, HostBuffer
from offspec.loaders.files.records import MAX_GAP_BYTES, Record

from ...examples import examples
from ..fakes import FakeReader

FILES = [Path("one"), Path("two")]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[Path, bytes], list[TensorInfo]]:
    """Some files of random bytes, and tensors that lie in them, aligned to their dtype or not, with holes between."""
    files, infos = {}, []
    noise = random.Random(draw(st.integers(0, 2**16)))
    for path in FILES[: draw(st.integers(1, 2))]:
        end = draw(st.integers(8, 5000))
        for i in range(draw(st.integers(1, 6))):
            dtype = draw(st.sampled_from(["F32", "BF16", "U8"]))
            end += draw(st.sampled_from([0, 0, 0, 1, 3, 64, 4096, MAX_GAP_BYTES + 9000]))
            nbytes = draw(st.integers(0, 3000)) * DTYPE_BYTES[dtype]
            infos.append(TensorInfo(f"{path}.{i}", dtype, (nbytes // DTYPE_BYTES[dtype],), path, end, nbytes))
            end += nbytes
        files[path] = noise.randbytes(end)
    noise.shuffle(infos)
    return files, infos


@given(layouts())
@examples(200)
def test_a_record_holds_every_tensor_s_bytes(layout: tuple[dict[Path, bytes], list[TensorInfo]]) -> None:
    files, infos = layout
    record = Record.of(infos)
    buffer = HostBuffer(record.nbytes)
    reader = FakeReader(files)
    for piece in record.reads:
        reader.read(piece.path, piece.offset, buffer.view[piece.start : piece.start + piece.nbytes], piece.least)
    parts = record.parts(buffer.tensor)
    assert parts.keys() == {info.name for info in infos}
    for info in infos:
        assert parts[info.name].numpy().tobytes() == files[info.path][info.offset : info.offset + info.nbytes]
        assert info.nbytes == 0 or parts[info.name].data_ptr() % DTYPE_BYTES[info.dtype] == 0
    assert reader.bytes_read == record.read_bytes


@given(layouts())
@examples(100)
def test_shifted_as_much_as_can_be_lies_where_products_want_it(
    layout: tuple[dict[Path, bytes], list[TensorInfo]],
) -> None:
    """And every tensor still lies where its dtype does."""
    record, dtypes = Record.of(layout[1]), {info.name: DTYPE_BYTES[info.dtype] for info in layout[1]}

    def aligned(shift: int) -> int:
        return sum(nbytes for start, nbytes in record.places.values() if (start + shift) % ALIGNMENT == 0)

    assert 0 <= record.shift < ALIGNMENT
    assert aligned(record.shift) == max(map(aligned, range(0, ALIGNMENT, record.step)))
    assert all((start + record.shift) % dtypes[name] == 0 for name, (start, _) in record.places.items())
    raw = torch.arange(8, dtype=torch.uint8)
    assert record.on(torch.device("cpu"), raw) is raw


# No shift aligns codes at other places together with scales of 4 bytes.
HEADERS = [(dtypes, number) for dtypes in ("BF16", "F16", "F32") for number in range(1000, 1016)]
HEADERS += [("U8, F32, BF16", number) for number in range(1000, 1016, 4)]


def test_every_matrix_lies_where_products_want_it() -> None:
    """Whatever the length of a file's header: norms and matrices of a layer."""
    for dtypes, header_bytes in HEADERS:
        infos, end = list[TensorInfo](), header_bytes
        for number, count in enumerate((64, 64 * 64, 64 * 96, 64, 96 * 64)):
            dtype = dtypes.split(", ")[number % len(dtypes.split(", "))]
            nbytes = count * DTYPE_BYTES[dtype]
            infos.append(TensorInfo(str(number), dtype, (count,), FILES[0], end, nbytes))
            end += nbytes
        record = Record.of(infos)
        misplaced = [name for name, (start, _) in record.places.items() if (start + record.shift) % ALIGNMENT]
        assert misplaced == [], (dtypes, header_bytes)


@given(layouts())
@examples(100)
def test_reads_are_aligned_unless_the_file_is_not(layout: tuple[dict[Path, bytes], list[TensorInfo]]) -> None:
    files, infos = layout
    loose = {(i.path, i.offset) for i in infos if i.offset % DTYPE_BYTES[i.dtype]}
    for piece in Record.of(infos).reads:
        if (piece.path, piece.offset) not in loose:
            assert piece.offset % BLOCK_BYTES == piece.nbytes % BLOCK_BYTES == piece.start % BLOCK_BYTES == 0
        assert piece.least <= piece.nbytes <= READ_BYTES
        assert piece.offset + piece.least <= len(files[piece.path])


def info(name: str, offset: int, nbytes: int, path: Path = FILES[0]) -> TensorInfo:
    return TensorInfo(name, "U8", (nbytes,), path, offset, nbytes)


def test_neighbours_are_read_together_and_distant_tensors_are_not() -> None:
    near = Record.of([info("a", 100, 50), info("b", 150, 5000), info("c", 150 + 5000 + MAX_GAP_BYTES, 10)])
    assert len(near.extents) == 1
    far = Record.of([info("a", 100, 50), info("b", 300 + MAX_GAP_BYTES, 50)])
    assert len(far.extents) == 2
    assert far.read_bytes < 2 * 2 * BLOCK_BYTES


def test_a_long_extent_is_read_in_pieces() -> None:
    record = Record.of([info("a", 4096, 2 * READ_BYTES + 5)])
    assert [piece.nbytes for piece in record.reads] == [READ_BYTES, READ_BYTES, BLOCK_BYTES]
    assert [piece.least for piece in record.reads] == [READ_BYTES, READ_BYTES, 5]
