"""Prepares the cells: each peer's environment, and the model in the peer's format.

Everything is created once, in one work folder; incomplete results have other names. Nothing here is measured.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from benchmarks.grow import SHAPES, grow
from benchmarks.real.prompts import read_set
from offspec import builtin
from offspec.loaders.files.safetensors_folder import INDEX_FILE
from offspec.text.prompt import Prompt

from .catalog import Peer

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


@dataclass(frozen=True)
class Files:
    """The files that a peer opens: target and draft."""

    model: Path
    draft: Path


class Pair(Protocol):
    """A target and a draft that all peers run, each in its own format.

    checkpoint, draft: both models as safetensors in bf16, made if they are missing. sources: the files of both that
    llama.cpp's GGUF files are made of. truth: the model decoded in fp32 for the text that all should give.
    """

    @property
    def name(self) -> str: ...
    @property
    def checkpoint(self) -> Path: ...
    @property
    def draft(self) -> Path: ...
    @property
    def sources(self) -> Files: ...
    @property
    def truth(self) -> Path: ...
    def prompts(self) -> Sequence[Prompt]: ...


@dataclass(frozen=True)
class GrownPair:
    """The small target `source` in the tensors of a large one, and its draft. place: of the grown checkpoint."""

    name: str
    source: Path
    draft: Path
    place: Path

    @cached_property
    def checkpoint(self) -> Path:
        return grow(self.source, self.place, SHAPES[self.name], say=tell)

    @property
    def sources(self) -> Files:
        return Files(self.checkpoint, self.draft)

    @property
    def truth(self) -> Path:
        return self.source  # computes the same function within a second

    def prompts(self) -> Sequence[Prompt]:
        return builtin.prompts()


@dataclass(frozen=True)
class RealPair:
    """Two GGUF files; their quantised weights are rounded to bf16, so the target has twice to four times the bytes.

    The files stay the draft of programs that read them: it is smaller than in bf16.
    """

    name: str
    sources: Files
    folder: Path
    prompt_folder: Path

    @property
    def checkpoint(self) -> Path:
        return self._in_bf16(self.sources.model)

    @property
    def draft(self) -> Path:
        return self._in_bf16(self.sources.draft)

    @property
    def truth(self) -> Path:
        return self.checkpoint

    def prompts(self) -> Sequence[Prompt]:
        """Those of MT-Bench and HumanEval by turns, as chats of one message."""
        sets = (read_set(name, self.prompt_folder) for name in ("mt_bench", "humaneval"))
        return [each.messages for both in zip(*sets, strict=False) for each in both]

    def _in_bf16(self, file: Path) -> Path:
        folder = self.folder / file.stem
        if not (folder / INDEX_FILE).exists():
            tell(f"{file.name} in bf16")
            command = ["quantize", file, folder, "--format", "bf16", "--quiet"]
            subprocess.run([sys.executable, "-m", "offspec", *command], check=True, cwd=REPOSITORY)
        return folder


@dataclass(frozen=True)
class Workshop:
    """A folder for all prepared files of one pair."""

    folder: Path
    pair: Pair

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

    def _safetensors(self, python: Path) -> Files:
        return Files(self.pair.checkpoint, self.pair.draft)

    def _small_draft(self, python: Path) -> Files:
        return Files(self.pair.checkpoint, self.pair.sources.draft)

    def _gguf(self, python: Path, dtype: str) -> Files:
        """Draft files that are GGUF already stay as they are."""
        sources = self.pair.sources
        files = Files(self.folder / f"{self.pair.name}-{dtype}.gguf", self.folder / f"draft-{dtype}.gguf")
        if sources.draft.suffix == ".gguf":
            files = Files(files.model, sources.draft)
        for source, file in ((sources.model, files.model), (sources.draft, files.draft)):
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
        split = self.folder / f"{self.pair.name}-airllm"
        if not (split / "done").exists():
            tell("splitting the checkpoint as AirLLM does")
            shutil.rmtree(split, ignore_errors=True)
            subprocess.run(
                [python, HERE / "workers" / "airllm_worker.py", "--split", self.pair.checkpoint, split], check=True
            )
            (split / "done").touch()
        return Files(self.pair.checkpoint, split)


FORMS: dict[str, Callable[[Workshop, Path], Files]] = {
    "safetensors": Workshop._safetensors,
    "small draft": Workshop._small_draft,
    "gguf": partial(Workshop._gguf, dtype="bf16"),
    "openvino": Workshop._openvino,
    "airllm": Workshop._airllm,
}


def tell(line: str) -> None:
    print(f"peers: {line}", file=sys.stderr, flush=True)
