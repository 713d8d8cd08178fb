"""Files of exit layers: one trained layer as safetensors, with its target's fingerprint in the metadata.

`offspec distill` writes them into the user's data folder, under the target's fingerprint; `--draft self` finds them
there. This module neither trains an exit layer nor computes with it.
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

from offspec.loaders.files.checkpoint import show, without_remedy
from offspec.loaders.files.safetensors_folder import read_header

from ..errors import CheckpointError, StorageError, UsageError
from ..model.block import has_entries_alone, layer_shapes
from ..model.config import ModelConfig
from ..user_folders import user_folder
from .model_files import ModelFiles

FORMAT = "offspec exit layer 1"
SAMPLED_BYTES = 4096  # bytes of each weight in the fingerprint


def fingerprint(target: ModelFiles) -> str:
    """16 hex digits that identify a target: a hash of its config and of a few kilobytes of three layers' weights.

    It does not depend on how the checkpoint is divided into files. Raises CheckpointError for unreadable files.
    """
    config = asdict(target.config)
    usual = {field.name for field in fields(ModelConfig) if field.default is not MISSING}
    for name in usual - target.config.differences().keys():  # so that new fields for other families change nothing
        del config[name]
    digest = sha256(json.dumps(config, sort_keys=True).encode())
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


def has_weights(target: ModelFiles) -> bool:
    """Whether the target's weights are here; of a model that is only planned for, they may be missing."""
    infos = [info for weight in target.stored.layers[0].weights.values() for info in weight.streamed]
    return all(info.path.is_file() for info in infos)


def exits_folder() -> Path:
    """The default folder of exit layers."""
    return user_folder("data") / "exits"


def default_file(target: ModelFiles, exit_layer: int) -> Path:
    """The default file of an exit layer after the target's first `exit_layer` layers."""
    return data_file(target, f"{exit_layer}.safetensors")


def data_file(target: ModelFiles, suffix: str) -> Path:
    """A file of this target in the default folder."""
    return exits_folder() / f"{fingerprint(target)}-{suffix}"


def refuse_foreign(config: ModelConfig, feature: str) -> None:
    """Raises UsageError for a target that transformers' modules run. feature: what needs offspec's own decoder."""
    if not config.is_native:
        raise UsageError(
            f"{feature} needs offspec's own decoder, and a {config.model_type} runs on transformers' modules; use "
            "n-gram lookup (`draft=lookup`) or a small model (`draft=PATH`)"
        )


def refuse_shared_entries(config: ModelConfig) -> None:
    """`refuse_foreign`; also for a target whose layers attend to KV entries of others."""
    refuse_foreign(config, "an exit layer")
    if config.shares_entries:
        raise UsageError(
            f"an exit layer uses some of the target's layers, and those of this {config.model_type} attend to the KV "
            "entries of others; use n-gram lookup (`draft=lookup`) or a small model (`draft=PATH`)"
        )


def refuse_states(config: ModelConfig, feature: str) -> None:
    """`refuse_foreign`; also for a target whose layers keep something else of a text than KV entries."""
    refuse_foreign(config, feature)
    if not has_entries_alone(config):
        raise UsageError(
            f"{feature} shares the target's KV entries, and layers of a {config.model_type} keep a state of the text "
            "instead; use n-gram lookup (`draft=lookup`) or a small model (`draft=PATH`)"
        )


def refuse_experts(config: ModelConfig, feature: str) -> None:
    """Raises UsageError for a mixture. feature: what copies or trains whole layers, most of which are experts."""
    if config.experts is not None:
        raise UsageError(
            f"{feature} is for models without experts, and this {config.model_type} has {config.experts.num} in a "
            "layer; use n-gram lookup (`draft=lookup`) or a small model (`draft=PATH`)"
        )


def check_exit_layer(number: int, config: ModelConfig, setting: str = "exit_layer=") -> None:
    """Raises UsageError unless `number` is at least 1 and less than the layers of offspec's own decoder.

    setting: what names the number in the message: the argument before it.
    """
    refuse_shared_entries(config)
    if not 1 <= number < config.num_layers:
        raise UsageError(
            f"`{setting}{number}` is out of range: the model has {config.num_layers} layers; choose 1 to "
            f"{config.num_layers - 1}"
        )


def is_exit_file(path: Path) -> bool:
    """Whether `save` wrote the file, for any target."""
    try:
        read_header(path)
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (OSError, SafetensorError, CheckpointError):
        return False


@dataclass(frozen=True)
class ExitFile:
    """An exit layer's file, whose header fits the target.

    exit_layer: the number of the target's layers before it. agreement: how often its likeliest token was the target's
    after training; None if the file does not say.
    """

    path: Path
    exit_layer: int
    num_elements: int
    agreement: float | None = None

    @classmethod
    def open(cls, path: Path, target: ModelFiles) -> ExitFile:
        """Read the header. Raises CheckpointError for anything but an exit layer of this target."""
        try:
            read_header(path)  # refuses files for which safe_open would block or use much memory
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, CheckpointError) as exc:
            fault = without_remedy(exc)
            raise CheckpointError(f"exit layer {path} cannot be read: {fault}; make it with offspec distill") from exc
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not an exit layer (format {show(metadata.get('format'))}); make one with offspec distill"
            )
        if metadata.get("target") != fingerprint(target):
            raise CheckpointError(
                f"exit layer {path} was trained for another target ({metadata.get('name', '?')}) than "
                f"{target.checkpoint.path}; make one with offspec distill"
            )
        number = metadata.get("exit_layer", "")
        if shapes != layer_shapes(target.config) or not (number.isdecimal() and len(number) < 10):
            raise CheckpointError(
                f"exit layer {path} is damaged: its tensors are not a layer's; make it again with offspec distill"
            )
        check_exit_layer(int(number), target.config)
        return cls(
            path,
            int(number),
            sum(torch.Size(shape).numel() for shape in shapes.values()),
            _share(metadata.get("agreement", "")),
        )

    @classmethod
    def find(cls, target: ModelFiles, exit_layer: int | None = None) -> ExitFile:
        """The newest exit layer for this target, or that after so many layers. Raises UsageError if there is none."""
        if exit_layer is not None:
            check_exit_layer(exit_layer, target.config, "draft=self:")
            newest = file if os.path.isfile(file := default_file(target, exit_layer)) else None
        else:
            newest = max(_exit_files(target), key=lambda file: (file.stat().st_mtime_ns, file.name), default=None)
        if newest is None:
            after = "" if exit_layer is None else f" after {exit_layer} layers"
            raise UsageError(
                f"`draft=self` needs an exit layer, and there is none{after} for {target.checkpoint.path}; run "
                "offspec distill MODEL --exit-layer N first, choose a file (`draft=self:FILE`), or draft without a "
                "trained exit layer (`draft=self:N`)"
            )
        return cls.open(newest, target)

    def load(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The layer's weights by their short names. Raises CheckpointError."""
        try:
            with safe_open(self.path, framework="pt") as file:
                # Copy: safe_open's tensors are in the mapped file, which another process may overwrite.
                names = file.keys()  # safe_open's object is not iterable
                return {name: file.get_tensor(name).to(device, dtype, copy=True) for name in names}
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"exit layer {self.path} cannot be read: {exc}") from exc


def found_exits(target: ModelFiles) -> list[int]:
    """The numbers of layers before the exit layers in the default folder, ascending."""
    numbers = (file.stem.rpartition("-")[2] for file in _exit_files(target))
    return sorted(int(number) for number in numbers if number.isdecimal() and len(number) < 10)


def _exit_files(target: ModelFiles) -> list[Path]:
    return list(exits_folder().glob(f"{fingerprint(target)}-*.safetensors"))


def _share(text: str) -> float | None:
    """A number from 0 to 1, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None


def save(path: Path, layer: Mapping[str, Tensor], target: ModelFiles, exit_layer: int, **more: object) -> None:
    """Write an exit layer atomically. more: further metadata. Raises StorageError."""
    metadata = {
        "format": FORMAT,
        "target": fingerprint(target),
        "name": target.checkpoint.path.name,
        "exit_layer": str(exit_layer),
        **{key: str(value) for key, value in more.items()},
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in layer.items()}, unfinished, metadata)
        unfinished.replace(path)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"{path} cannot be written: {exc}; choose another file (`out`)") from exc
    finally:
        unfinished.unlink(missing_ok=True)
