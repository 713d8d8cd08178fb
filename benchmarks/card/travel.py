"""What travels to a lent machine beside the repository: packages that it lacks, unpacked into `.card/site`.

Its packages are PACKAGES_THERE, and what they need. Nothing here imports a package.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from .calls import ROOT

CARRIED = ROOT / ".card"
SITE = CARRIED / "site"
MAX_BYTES = 64 * 2**20  # of the working tree with what is carried
PACKAGES_THERE = ("torch", "triton", "numpy", "safetensors", "tokenizers", "psutil", "jinja2", "huggingface-hub")
PACKAGES_CARRIED = (
    *("pytest", "iniconfig", "pluggy", "packaging", "pygments"),
    *("hypothesis", "sortedcontainers"),  # tests import them
    "gguf",  # the oracle of GGUF's tests
    "platformdirs",
    "bitsandbytes",
)
PYTHON_THERE = "3.12"
PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
# Of bitsandbytes' fifteen libraries, one for each CUDA: the one for torch 2.11+cu130, and the CPU's.
LIBRARIES = ("libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so")


def prepare(python: str = PYTHON_THERE, site: Path = SITE) -> int:
    """Download the wheels for that Python on x86-64, in the versions installed here, and unpack them; bytes in all.

    Raises CalledProcessError if pip cannot download one.
    """
    site.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    chosen = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    names = [f"{name}=={version(name)}" for name in PACKAGES_CARRIED]
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *chosen, "--dest", wheels, *names], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            unpack(wheel, site)
    return sum(file.stat().st_size for file in site.rglob("*") if file.is_file())


def unpack(wheel: Path, site: Path) -> None:
    with ZipFile(wheel) as archive:
        archive.extractall(site, [member for member in archive.infolist() if is_needed(member)])


def is_needed(member: ZipInfo) -> bool:
    name = member.filename
    return not name.startswith("bitsandbytes/lib") or name.endswith(LIBRARIES)


def working_tree() -> Iterator[Path]:
    """Files that travel: tracked ones, and untracked ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    files = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return (file for file in files if file.exists())
