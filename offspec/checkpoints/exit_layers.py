"""Exit layers in files: one trained layer as safetensors, with the target that it belongs to in the metadata.

`offspec distill` writes them into the user's data folder, under the target's fingerprint, and `--draft self` finds them
there. Knows nothing of training, or of what an exit layer computes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offspec.loaders.checkpoint import show
from offspec.loaders.safetensors_folder import read_header

from ..errors import CheckpointError, StorageError, UsageError
from ..model.block import layer_shapes
from ..model.config import ModelConfig
from ..model.foreign_config import ForeignConfig
from .opening import ModelFiles

FORMAT = "offspec exit layer 1"
SAMPLED_BYTES = 4096  # of each weight that the fingerprint looks at


def fingerprint(target: ModelFiles) -> str:
    """16 hex digits that tell one target from another: its config, and a few kilobytes of weights of three layers.

    How the checkpoint is cut into files does not count. Raises CheckpointError where the files cannot be read.
    """
    said = asdict(target.config)
    usual = {field.name for field in fields(ModelConfig) if field.default is not MISSING}
    for name in usual - target.config.differences().keys():  # so that fields of other families change nothing
        del said[name]
    digest = sha256(json.dumps(said, sort_keys=True).encode())
    layers = target.stored.layers
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for name in sorted(layer.weights):
            info = layer.weights[name].streamed[0]
            try:
                with open(info.path, "rb") as file:
                    file.seek(info.offset)
                    digest.update(name.encode() + file.read(min(SAMPLED_BYTES, info.nbytes)))
            except OSError as exc:
                raise CheckpointError(f"{info.path} cannot be read: {exc.strerror}") from exc
    return digest.hexdigest()[:16]


def exits_folder() -> Path:
    """Where exit layers are kept that were not told a place."""
    from platformdirs import user_data_path  # here, so that the engine runs without it

    return user_data_path("offspec") / "exits"


def default_file(target: ModelFiles, exit_layer: int) -> Path:
    """Where the exit layer behind the target's layer `exit_layer` is kept."""
    return exits_folder() / f"{fingerprint(target)}-{exit_layer}.safetensors"


def refuse_foreign(config: ModelConfig) -> None:
    """Raises UsageError for a target without layers of offspec's own."""
    if isinstance(config, ForeignConfig):
        raise UsageError(
            f"an exit layer needs offspec's own decoder, and a {config.model_type} computes through transformers' "
            "modules; use --draft lookup, or a small model"
        )


def check_exit_layer(number: int, config: ModelConfig) -> None:
    """Raises UsageError unless a layer of offspec's own decoder follows the first `number`."""
    refuse_foreign(config)
    if not 1 <= number < config.num_layers:
        raise UsageError(
            f"--exit-layer {number} is out of range: the model has {config.num_layers} layers, "
            f"so 1 to {config.num_layers - 1}"
        )


@dataclass(frozen=True)
class ExitFile:
    """An exit layer whose header fits the target. exit_layer: so many of the target's first layers come before it."""

    path: Path
    exit_layer: int
    num_elements: int

    @classmethod
    def open(cls, path: Path, target: ModelFiles) -> ExitFile:
        """Reads the header. Raises CheckpointError for anything but an exit layer of this target."""
        try:
            read_header(path)  # which refuses what safe_open would wait for, or take much memory for
            with safe_open(path, framework="pt") as file:
                said = file.metadata() or {}
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, CheckpointError) as exc:
            raise CheckpointError(f"exit layer {path} cannot be read: {exc}; make it with offspec distill") from exc
        if said.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is no exit layer (format {show(said.get('format'))}); make it with offspec distill"
            )
        if said.get("target") != fingerprint(target):
            raise CheckpointError(
                f"exit layer {path} was trained for another target ({said.get('name', '?')}) than "
                f"{target.checkpoint.path}: make one for it with offspec distill"
            )
        number = said.get("exit_layer", "")
        if shapes != layer_shapes(target.config) or not (number.isdecimal() and len(number) < 10):
            raise CheckpointError(f"exit layer {path} is damaged: its tensors are not those of a layer; make it anew")
        check_exit_layer(int(number), target.config)
        return cls(path, int(number), sum(torch.Size(shape).numel() for shape in shapes.values()))

    @classmethod
    def find(cls, target: ModelFiles) -> ExitFile:
        """The one made last for this target. Raises UsageError where there is none."""
        files = exits_folder().glob(f"{fingerprint(target)}-*.safetensors")
        newest = max(files, key=lambda file: (file.stat().st_mtime_ns, file.name), default=None)
        if newest is None:
            raise UsageError(
                f"--draft self needs an exit layer, and none was made for {target.checkpoint.path}: run "
                "offspec distill MODEL --exit-layer N first, or give one with --exit-file"
            )
        return cls.open(newest, target)

    def load(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The layer's weights by their short names. Raises CheckpointError."""
        try:
            with safe_open(self.path, framework="pt") as file:
                # Copies: what safe_open gives lies in the mapped file, which somebody may write over.
                names = file.keys()  # an open file of safetensors is no mapping: it cannot be iterated
                return {name: file.get_tensor(name).to(device, dtype, copy=True) for name in names}
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"exit layer {self.path} cannot be read: {exc}") from exc


def save(path: Path, layer: Mapping[str, Tensor], target: ModelFiles, exit_layer: int, **said: object) -> None:
    """Write an exit layer, all of it or nothing. said: what else its metadata tells. Raises StorageError."""
    metadata = {
        "format": FORMAT,
        "target": fingerprint(target),
        "name": target.checkpoint.path.name,
        "exit_layer": str(exit_layer),
        **{key: str(value) for key, value in said.items()},
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in layer.items()}, unfinished, metadata)
        unfinished.replace(path)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"{path} cannot be written: {exc}; choose another place with --out") from exc
    finally:
        unfinished.unlink(missing_ok=True)
