"""Models on this machine: in folders, and in the cache of Hugging Face's hub. Whether they run; removing one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offspec.loaders.files.containers import is_checkpoint
from offspec.loaders.files.gguf_file import BESIDE_MODELS, part_paths

from ..checkpoints.head_files import is_head
from ..checkpoints.opening import locate, open_model
from ..checkpoints.shadows import made_shadows
from ..drafts.self_draft import trained_exits
from ..errors import CheckpointError, OffspecError, UsageError
from ..named_models import BUILTIN, MODEL_NAMES, named_path
from ..notes import Note

MOST_DEPTH = 3  # of folders below the one that is searched
HEAD_FAULT = "a trained head, which is no model: give it as `draft`"


@dataclass(frozen=True)
class LocalModel:
    """name: as commands take it. form: the format of most weights. fault: why it does not run; "" if it does.

    drafts: what was made for it, as `draft` takes it; any model can have `lookup` besides. architecture: its
    config.json's model_type. max_context: its own, in tokens.
    """

    name: str
    path: Path
    size_bytes: int
    form: str = ""
    fault: str = ""
    drafts: tuple[str, ...] = ()
    architecture: str = ""
    num_parameters: int = 0
    max_context: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "drafts": list(self.drafts)}


def described(name: str, path: Path) -> LocalModel:
    """A model from its headers."""
    size = size_of(path)
    try:
        if path.is_dir() and is_head(path):
            return LocalModel(name, path, size, fault=HEAD_FAULT)
        notes = list[Note]()
        files = open_model(path, "auto", notes, headers_only=True)
        form = files.packed_form or str(files.dtype).removeprefix("torch.")
        facts = (files.config.model_type, files.num_parameters, files.config.max_context)
        drafts = [BUILTIN] if name == BUILTIN else [f"shadow:{bits}" for bits in made_shadows(files)]
        if name != BUILTIN:
            drafts += [f"self:{number}" for number in trained_exits(files)]
        return LocalModel(name, path, size, form, "", tuple(drafts), *facts)
    except OffspecError as exc:
        return LocalModel(name, path, size, fault=str(exc).partition("\n")[0])


def size_of(path: Path) -> int:
    """Bytes of a file, or of a folder's files; links count as what they lead to."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def named_models() -> list[LocalModel]:
    """The models that have names here and are installed."""
    models = list[LocalModel]()
    for name in MODEL_NAMES:
        try:
            path = named_path(name)
        except CheckpointError:
            continue
        if path is not None:
            models.append(described(name, path))
    return models


def models_in(folder: Path) -> list[LocalModel]:
    """The models in a folder, itself or below. Raises UsageError if it cannot be read."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give one that has models")
    return [described(str(path), path) for path in checkpoints_in(folder)]


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder: itself, folders below, and GGUF files; in their order by name."""
    return sorted(set(_checkpoints(folder, MOST_DEPTH)))


def _checkpoints(folder: Path, depth: int) -> Iterator[Path]:
    entries = [Path(entry.path) for entry in os.scandir(folder) if not entry.name.startswith(".")]
    if (folder / "config.json").is_file():
        yield folder
        return
    for entry in entries:
        if entry.is_dir() and depth:
            yield from _checkpoints(entry, depth - 1)
            continue
        is_model = entry.suffix == ".gguf" and is_checkpoint(entry) and not entry.name.startswith(BESIDE_MODELS)
        if is_model and part_paths(entry)[0] == entry:  # or the first file of one
            yield entry


def hub_models() -> list[LocalModel]:
    """The models in the hub's cache."""
    models = list[LocalModel]()
    for repository in _hub_repositories():
        for revision in sorted(repository.revisions, key=lambda each: -each.last_modified)[:1]:
            paths = [revision.snapshot_path]
            if not (paths[0] / "config.json").is_file():
                paths = checkpoints_in(paths[0])
            for path in paths:
                name = repository.repo_id if path.is_dir() else str(path)
                models.append(described(name, path))
    return models


def _hub_repositories() -> list[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((each for each in repositories if each.repo_type == "model"), key=lambda each: str(each.repo_id))


def pull(model: str) -> Path:
    """Download a hub id's files, or what is missing of them; its path. Raises CheckpointError."""
    return locate(model, None, "target")


def removable(model: str) -> tuple[Path, int]:
    """What `remove` deletes: its path and bytes. Raises UsageError for what is not in the hub's cache, nor a folder."""
    if model in MODEL_NAMES:
        raise UsageError(f"{model} is part of a package; pip uninstall removes it")
    for repository in _hub_repositories():
        if repository.repo_id == model:
            return Path(repository.repo_path), int(repository.size_on_disk)
    path = Path(model)
    if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".gguf"):
        raise UsageError(f"{model} is neither a model in the hub's cache nor a folder or file of one")
    return path, size_of(path)


def remove(path: Path) -> None:
    """Delete a model. Raises UsageError if it cannot be."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as exc:
        raise UsageError(f"{path} cannot be removed ({exc.strerror or exc})") from exc
