"""Opens the files of a trained head: which kind it is, and whether its tensors are those of that kind.

Heads are published as safetensors, and many only as pickles of torch (`pytorch_model.bin`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offspec.loaders.files.checkpoint import show
from offspec.loaders.files.safetensors_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsFolder,
    read_header,
)
from offspec.loaders.files.small_files import parse_json, read_small_file

from ..errors import CheckpointError, MissingWeightsError, StorageError, UnsupportedModelError, UsageError
from ..methods import Methods
from ..model.config import ModelConfig
from ..model.config_values import Json
from ..model.heads.eagle import TO_TARGET, eagle_name, eagle_spec
from ..model.heads.fspad import fspad_name, fspad_spec
from ..model.heads.head import HeadSpec
from ..model.heads.hydra import hydra_name, hydra_spec
from ..model.heads.medusa import medusa_name, medusa_spec
from ..model.heads.mlp import mlp_name, mlp_spec
from .exit_layers import data_file
from .opening import ModelFiles
from .pickles import read_pickle

SAFETENSORS = (SINGLE_FILE, "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
TABLES = (TO_TARGET,)  # tensors of integers, by a `Head`'s names
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder, whose tensors fit the target.

    names: those of `spec.shapes` → those in the files. files: of each of these. trained_for: the fingerprint of the
    target, if offspec made the head.
    """

    path: Path
    spec: HeadSpec
    names: Mapping[str, str]
    files: Mapping[str, Path]
    trained_for: str | None = None

    @classmethod
    def open(cls, path: Path, target: ModelConfig) -> HeadFiles:
        """Read config.json and headers. Raises CheckpointError, UnsupportedModelError."""
        config = _read_config(path)
        shapes, files = _tensors(path)
        layout = layout_of(config, shapes)
        if layout is None:
            raise UnsupportedModelError(f"{path} is not a head of a known kind")
        names = {own: name for name in shapes if (own := layout.name_of(name)) is not None}
        try:
            spec = layout.spec(config, shapes, target)
        except (CheckpointError, UnsupportedModelError) as exc:
            raise type(exc)(f"{path}: {exc}") from exc
        _check(path, spec, {own: shapes[name] for own, name in names.items()}, names)
        made_for = config.get(TARGET_KEY)
        return cls(path, spec, names, files, made_for if isinstance(made_for, str) else None)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.spec.shapes.values())

    def load(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Its tensors by the names of `spec.shapes`; tables of integers keep their dtype. Raises CheckpointError."""
        found: dict[str, Tensor] = {}
        for file in sorted(set(self.files.values())):
            wanted = {own: name for own, name in self.names.items() if self.files[name] == file}
            read = read_pickle(file, "cpu") if file.name in PICKLES else _read_safetensors(file, list(wanted.values()))
            for own, name in wanted.items():
                tensor = read[name]
                is_plain = tensor.layout == torch.strided and not tensor.is_complex()
                if not is_plain or tensor.is_floating_point() == (own in TABLES):
                    raise CheckpointError(
                        f"{file}: tensor {show(name)} has numbers of a wrong type ({tensor.dtype}); use a head that is "
                        "not quantised, or download it again"
                    )
                found[own] = tensor.to(device, tensor.dtype if own in TABLES else dtype, copy=True)
        return found


@dataclass(frozen=True)
class Layout:
    """How a kind of head is stored. name_of: a `Head`'s name of a file's tensor; None for one that says nothing more.

    make_spec: from config.json, the tensors' shapes by the head's names, and the target.
    """

    name_of: Callable[[str], str | None]
    make_spec: Callable[[Json, Shapes, ModelConfig], HeadSpec]

    def spec(self, config: Json, shapes: Shapes, target: ModelConfig) -> HeadSpec:
        """What a head with tensors of these `shapes`, by their names in the file, must hold.

        Raises CheckpointError, UnsupportedModelError.
        """
        present = {own: shape for name, shape in shapes.items() if (own := self.name_of(name)) is not None}
        return self.make_spec(config, present, target)


HYDRA_PREFIX = "hydra prefix-mlp"
LAYOUTS = {
    "eagle": Layout(eagle_name, partial(eagle_spec, 1)),
    "eagle3": Layout(eagle_name, partial(eagle_spec, 3)),
    "medusa": Layout(medusa_name, medusa_spec),
    "hydra": Layout(partial(hydra_name, False), partial(hydra_spec, False)),
    HYDRA_PREFIX: Layout(partial(hydra_name, True), partial(hydra_spec, True)),
    "mlp_speculator": Layout(mlp_name, mlp_spec),
    "fspad": Layout(fspad_name, fspad_spec),
}
MARKS = {"medusa_num_heads": "medusa", "hydra_num_heads": "hydra"}  # a key of config.json → the kind
NAMED_KINDS = Methods("kind of head", "medusa", "mlp_speculator")  # named by OWN_KIND, or by model_type
MARKING_TENSORS = Methods("tensor of a head", "fc.fc.weight")  # that only one kind has: FSPAD's, and others'
TARGET_KEY = "offspec_target"  # the key of the target's fingerprint, in heads that offspec trained
OWN_KIND = "offspec_head"  # the key of kinds that nobody else publishes


def layout_of(config: Json, names: Iterable[str]) -> Layout | None:
    """The layout of a head's files by their config.json, or by their tensors where it says nothing; None: no head."""
    if (kind := next((kind for key, kind in MARKS.items() if key in config), None)) is not None:
        return LAYOUTS[HYDRA_PREFIX if config.get("hydra_head_arch") == "prefix-mlp" else kind]
    named = config.get(OWN_KIND, config.get("model_type"))
    if named in NAMED_KINDS:
        return _layout(NAMED_KINDS, str(named), str(named))
    plain = {name.removeprefix("model.") for name in names}
    if (mark := next((name for name in MARKING_TENSORS if name in plain), None)) is not None:
        return _layout(MARKING_TENSORS, mark, "fspad")
    stated = config.get("architectures")
    classes = [str(name).lower() for name in stated] if isinstance(stated, list) else []
    method = config.get("speculators_model_type")
    if method == "eagle3" or any("eagle3" in name for name in classes) or any(n.startswith("midlayer.") for n in plain):
        return LAYOUTS["eagle3"]
    if any("eagle" in name for name in classes) or "fc.weight" in plain:
        return LAYOUTS["eagle"]
    return None


def _layout(methods: Methods, name: str, kind: str) -> Layout:
    """An extension's layout of this name, or else the core's of this kind."""
    layout: Layout | None = methods.load(name)
    return LAYOUTS[kind] if layout is None else layout


def is_head(path: Path) -> bool:
    """Whether a folder holds a head, rather than a model; False for anything that cannot be read."""
    try:
        config = _read_config(path)
        return (layout_of(config, ()) or layout_of(config, _tensors(path)[0])) is not None
    except CheckpointError:
        return False


def head_folder(target: ModelFiles, kind: str) -> Path:
    """Where `offspec distill --head` puts a head of this kind."""
    return data_file(target, f"head-{kind}")


def find_head(target: ModelFiles, kind: str = "") -> Path:
    """The newest head in that place for this target, or that of this kind. Raises UsageError if there is none."""
    pattern = head_folder(target, "*")
    places = [head_folder(target, kind)] if kind else pattern.parent.glob(pattern.name)
    heads = [path for path in places if (path / CONFIG_FILE).is_file()]
    found = max(heads, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    if found is None:
        named, wanted = (f"head:{kind}", kind) if kind else ("head", "eagle3")
        raise UsageError(
            f"`draft={named}` needs a head, and there is none for {target.checkpoint.path}; run offspec distill MODEL "
            f"--head {wanted} first, or give a head's folder (`draft=PATH`)"
        )
    return found


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
            read = read_pickle(path / name, "meta")
            return {key: tuple(t.shape) for key, t in read.items()}, dict.fromkeys(read, path / name)
    raise MissingWeightsError(f"{path} has none of {', '.join((*SAFETENSORS, *PICKLES))}; download the head again")


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
    """Write a head as a folder, whole or not at all. Raises StorageError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, unfinished / SINGLE_FILE)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (unfinished / CONFIG_FILE).write_text(text, encoding="utf-8")
        unfinished.rename(path)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"{path} cannot be written: {exc}; choose another folder (`out`)") from exc
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
