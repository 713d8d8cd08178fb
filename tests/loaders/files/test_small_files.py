"""Only regular files of a bounded size are read, and JSON that takes bounded memory."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from offspec.errors import CheckpointError
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.safetensors_folder import read_header
from offspec.loaders.files.small_files import MOST_JSON_BYTES, MOST_JSON_VALUES, parse_json, read_small_file

from ...refusals import refused


def other_kinds(folder: Path) -> list[tuple[Path, str]]:
    """Files that are none, and what they are."""
    pipe, link, listening = (folder / name for name in ("pipe", "zero", "socket"))
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(listening))
    return [(pipe, "a pipe"), (link, "a device"), (listening, "a socket")]


def test_anything_but_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    for path, kind in other_kinds(tmp_path):
        with pytest.raises(OSError, match=kind):
            read_small_file(path)
        with refused(CheckpointError, path, kind):
            read_header(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_a_json_file_is_refused(tmp_path: Path, name: str) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    weights = "model.safetensors" if "index" not in name else "shard.safetensors"
    (tmp_path / weights).write_bytes(struct.pack("<Q", len(header)) + header + b"1")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with refused(CheckpointError, tmp_path / name, "pipe"):
        open_checkpoint(tmp_path)


def test_a_pipe_is_read_where_a_user_names_one(tmp_path: Path) -> None:
    there, here = os.pipe()
    os.write(here, b"text")
    os.close(here)
    assert read_small_file(Path(f"/dev/fd/{there}"), allow_pipe=True) == b"text"
    os.close(there)
    with pytest.raises(OSError, match=r"\b1 MiB"):
        read_small_file(Path("/dev/zero"), 2**20, allow_pipe=True)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MOST_JSON_BYTES + 1)
    with pytest.raises(OSError, match="32 MiB"):
        read_small_file(tmp_path / "config.json")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MOST_JSON_BYTES)
    assert len(read_small_file(tmp_path / "config.json")) == MOST_JSON_BYTES


def test_json_is_bounded_in_values_and_depth() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="2000000"):
        parse_json(b"[" + b"1," * MOST_JSON_VALUES + b"1]")
    with pytest.raises(ValueError, match="deep"):
        parse_json(b"[" * 100_000)


@pytest.mark.nightly("takes three quarters of a gigabyte")
@pytest.mark.parametrize("value", [b"{}", b'{"a":1}', b"1.5", b'"ab"'])
def test_the_largest_json_takes_less_than_three_quarters_of_a_gigabyte(tmp_path: Path, value: bytes) -> None:
    """In an object, with keys of their own: what takes the most."""
    number = min(MOST_JSON_VALUES // (1 + value.count(b"{")), MOST_JSON_BYTES // (len(value) + 12)) - 10
    content = b"{" + b",".join(b'"%08d":%b' % (i, value) for i in range(number)) + b"}"
    (tmp_path / "file.json").write_bytes(content)
    script = """if True:
        import sys
        from pathlib import Path
        from offspec.stats import peak_host_bytes
        from offspec.loaders.files.small_files import parse_json, read_small_file
        before = peak_host_bytes()
        found = parse_json(read_small_file(Path(sys.argv[1])), dict)
        assert found
        print(peak_host_bytes() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "file.json"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 3 * 2**28
