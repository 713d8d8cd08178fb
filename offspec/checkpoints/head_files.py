"""Opens the files of a trained head: which kind it is, and whether its tensors are those of that kind.

Heads are published as safetensors, and many only as pickles of torch (`pytorch_model.bin`). Those are read with torch's
restricted unpickler, which makes tensors and runs no code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offspec.loaders.checkpoint import show
from offspec.loaders.safetensors_folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, SafetensorsFolder, read_header
from offspec.loaders.small_files import parse_json, read_small_file

from ..errors import CheckpointError, MissingWeightsError, UnsupportedModelError
from ..model.config import ModelConfig
from ..model.config_values import Json
from ..model.heads.eagle import eagle_name, eagle_spec
from ..model.heads.head import HeadSpec

SAFETENSORS = (SINGLE_FILE, "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder, whose tensors fit the target. names: those of `spec.shapes` → those in the files."""

    path: Path
    spec: HeadSpec
    names: Mapping[str, str]
    files: Mapping[str, Path]

    @classmethod
    def open(cls, path: Path, target: ModelConfig) -> HeadFiles:
        """Read config.json and headers. Raises CheckpointError, UnsupportedModelError."""
        config = _read_config(path)
        shapes, files = _tensors(path)
        kind = head_kind(config, shapes)
        if kind is None:
            raise UnsupportedModelError(f"{path} is not a head of a known kind")
        names = {own: name for name in shapes if (own := eagle_name(name)) is not None}
        present = {own: shapes[name] for own, name in names.items()}
        try:
            spec = eagle_spec(KINDS[kind], config, present, target)
        except (CheckpointError, UnsupportedModelError) as exc:
            raise type(exc)(f"{path}: {exc}") from exc
        _check(path, spec, present, names)
        return cls(path, spec, names, files)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.spec.shapes.values())

    def load(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Its tensors by the names of `spec.shapes`; tables of integers keep their dtype. Raises CheckpointError."""
        found: dict[str, Tensor] = {}
        for file in sorted(set(self.files.values())):
            wanted = {own: name for own, name in self.names.items() if self.files[name] == file}
            read = _read_pickle(file, "cpu") if file.name in PICKLES else _read_safetensors(file, list(wanted.values()))
            for own, name in wanted.items():
                tensor = read[name]
                kind = dtype if tensor.is_floating_point() else tensor.dtype
                found[own] = tensor.to(device, kind, copy=True)
        return found


KINDS = {"eagle": 1, "eagle3": 3}


def head_kind(config: Json, names: Mapping[str, object]) -> str | None:
    """The kind of head by its config.json; EAGLE-1's says nothing, but has a tensor `fc`. None: it is no head."""
    stated = config.get("architectures")
    classes = [str(name).lower() for name in stated] if isinstance(stated, list) else []
    method = config.get("speculators_model_type")
    plain = {name.removeprefix("model.") for name in names}
    if method == "eagle3" or any("eagle3" in name for name in classes) or any(n.startswith("midlayer.") for n in plain):
        return "eagle3"
    if any("eagle" in name for name in classes) or "fc.weight" in plain:
        return "eagle"
    return None


def is_head(path: Path) -> bool:
    """Whether a folder holds a head, rather than a model; False for anything that cannot be read."""
    try:
        config = _read_config(path)
        if head_kind(config, {}) is not None:
            return True
        return head_kind(config, _tensors(path)[0]) is not None
    except CheckpointError:
        return False


# ------------------------------------------------------------------------------------------------ reading


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        config = parse_json(read_small_file(file))
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{file} cannot be read ({exc}); download the head again") from exc
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object; download the head again")
    return config


def _tensors(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Path]]:
    """Shapes and files of all tensors by name. Raises CheckpointError, MissingWeightsError."""
    names = os.listdir(path) if path.is_dir() else []
    if INDEX_FILE in names and SINGLE_FILE not in names:
        infos = SafetensorsFolder().open(path).tensors
        return {name: info.shape for name, info in infos.items()}, {name: info.path for name, info in infos.items()}
    for name in SAFETENSORS:
        if name in names:
            header = read_header(path / name)
            return {key: info.shape for key, info in header.items()}, dict.fromkeys(header, path / name)
    for name in PICKLES:
        if name in names:
            read = _read_pickle(path / name, "meta")
            return {key: tuple(t.shape) for key, t in read.items()}, dict.fromkeys(read, path / name)
    raise MissingWeightsError(f"{path} has none of {', '.join((*SAFETENSORS, *PICKLES))}; download the head again")


def _read_pickle(file: Path, device: str) -> dict[str, Tensor]:
    """All tensors of a pickle. Each is at most as large as the file, so that a damaged one cannot fill the memory."""
    try:
        size = file.stat().st_size
        read = torch.load(file, map_location=device, weights_only=True, mmap=device == "cpu")
    except Exception as exc:  # zipfile, pickle and torch raise many kinds of exceptions for damaged files
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        raise CheckpointError(f"{file} cannot be read ({lines[0][:200]}); download it again") from exc
    if not isinstance(read, dict) or not all(isinstance(t, Tensor) and isinstance(n, str) for n, t in read.items()):
        raise CheckpointError(f"{file} is not a dictionary of tensors; download it again")
    if large := [name for name, tensor in read.items() if tensor.numel() * tensor.element_size() > size]:
        raise CheckpointError(f"{file}: tensor {show(large[0])} is larger than the file; download it again")
    return read


def _read_safetensors(file: Path, names: list[str]) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{file} cannot be read ({exc}); download it again") from exc


def _check(path: Path, spec: HeadSpec, present: Shapes, names: Mapping[str, str]) -> None:
    """Compare names and shapes. Raises CheckpointError, and UnsupportedModelError for a tensor without a meaning."""
    for own, name in names.items():
        if own not in spec.shapes:
            raise UnsupportedModelError(
                f"{path}: tensor {show(name)} does not belong to an {spec.kind} head; the head has unsupported parts"
            )
    for own, shape in spec.shapes.items():
        if own not in present:
            raise CheckpointError(f"{path}: tensor {own} is missing; the head does not match its config.json")
        if present[own] != shape:
            said = f"tensor {show(names[own])} has shape {list(present[own])}"
            raise CheckpointError(f"{path}: {said}, and an {spec.kind} head for this target has {list(shape)}")


def write_head(path: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Write a head as a folder. Raises OSError, SafetensorError."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path / SINGLE_FILE)
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
