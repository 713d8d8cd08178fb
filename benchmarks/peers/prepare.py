"""Prepares the cells: each peer's environment, and the model in the peer's format.

Everything is created once, in one work folder; incomplete results have other names. Nothing here is measured.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from benchmarks.grow import SHAPES, grow

from .catalog import Peer

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


@dataclass(frozen=True)
class Files:
    """The files that a peer opens: target and draft."""

    model: Path
    draft: Path


@dataclass(frozen=True)
class Workshop:
    """A folder for all prepared files. checkpoint: the grown model, which may not exist yet."""

    folder: Path
    shape: str
    source: Path
    draft: Path
    checkpoint: Path

    def python(self, name: str, peer: Peer) -> Path:
        """The interpreter of a peer's environment, created if it is missing. Raises subprocess.CalledProcessError."""
        if not peer.requirements:
            return Path(sys.executable)
        folder = self.folder / "venvs" / name
        python = folder / "bin" / "python"
        done = folder / "installed"
        wanted = "\n".join(peer.requirements)
        if not done.exists() or done.read_text() != wanted:
            tell(f"environment of {name}")
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pins = ["-c", str(REPOSITORY / "constraints.txt")]
            subprocess.run([python, "-m", "pip", "install", "-q", *peer.requirements, *pins], check=True)
            done.write_text(wanted)
        return python

    def files(self, name: str, peer: Peer) -> Files:
        """The model in the peer's format. Raises subprocess.CalledProcessError if the peer's converter fails."""
        return FORMS[peer.form](self, self.python(name, peer))

    @cached_property
    def grown(self) -> Path:
        """The grown checkpoint, created if it is missing."""
        return grow(self.source, self.checkpoint, SHAPES[self.shape], say=tell)

    def _safetensors(self, python: Path) -> Files:
        return Files(self.grown, self.draft)

    def _gguf(self, python: Path, dtype: str) -> Files:
        files = Files(self.folder / f"{self.shape}-{dtype}.gguf", self.folder / f"draft-{dtype}.gguf")
        for source, file in ((self.grown, files.model), (self.draft, files.draft)):
            if not file.exists():
                tell(f"{file.name}")
                subprocess.run([python, HERE / "gguf_file.py", source, file, dtype], check=True)
        return files

    def _openvino(self, python: Path) -> Files:
        """The target as GGUF in fp16. OpenVINO needs the draft in its own format, which it converts from GGUF."""
        files = self._gguf(python, "f16")
        folder = self.folder / "draft-openvino"
        if not (folder / "openvino_model.xml").exists():
            tell("the draft in OpenVINO's own format")
            folder.mkdir(exist_ok=True)
            copy = shutil.copy(files.draft, folder)
            subprocess.run([python, HERE / "workers" / "openvino_worker.py", "--convert", copy], check=True)
        return Files(files.model, folder)

    def _airllm(self, python: Path) -> Files:
        """AirLLM stores every layer in a separate file, in a subfolder of its choice."""
        split = self.folder / f"{self.shape}-airllm"
        if not (split / "done").exists():
            tell("splitting the checkpoint as AirLLM does")
            shutil.rmtree(split, ignore_errors=True)
            subprocess.run([python, HERE / "workers" / "airllm_worker.py", "--split", self.grown, split], check=True)
            (split / "done").touch()
        return Files(self.grown, split)


FORMS: dict[str, Callable[[Workshop, Path], Files]] = {
    "safetensors": Workshop._safetensors,
    "gguf": partial(Workshop._gguf, dtype="bf16"),
    "openvino": Workshop._openvino,
    "airllm": Workshop._airllm,
}


def tell(line: str) -> None:
    print(f"peers: {line}", file=sys.stderr, flush=True)
