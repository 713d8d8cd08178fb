"""Shadows in files: a target's layers in 2 to 4 bits, made once from its weights and kept in the user's cache.

A shadow is a folder of safetensors with a file for each layer. It has no embedding, norm and head: those are the
target's. Its config.json is the target's with one more entry, which says to which target it belongs. This module knows
nothing of drafting.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from offspec.loaders.convert import Conversion, Progress
from offspec.loaders.convert import convert as convert_layers
from offspec.loaders.files.checkpoint import Checkpoint, CheckpointView
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.safetensors_folder import CONFIG_FILE, UNFINISHED_MARKER
from offspec.loaders.files.user_folders import user_folder
from offspec.loaders.params import SHADOW_FORMATS, ConvertParams
from offspec.loaders.streaming.stored_model import StoredModel, StoredUnit

from ..errors import CheckpointError, UsageError
from ..model.block import layer_shapes
from ..model.names import LAYER_PREFIX
from .conversion import without_blanks
from .exit_layers import fingerprint, has_weights, refuse_experts, refuse_foreign
from .from_config import layers_from_config
from .opening import ModelFiles

ENTRY = "offspec_shadow"  # in a shadow's config.json: its target's fingerprint, and its bits


@dataclass(frozen=True)
class Shadow:
    """A shadow whose headers fit its target, or the sizes of one that is not made yet."""

    bits: int
    layers: tuple[StoredUnit, ...]

    @classmethod
    def open(cls, path: Path, target: ModelFiles) -> Shadow:
        """Reads the headers. Raises CheckpointError for anything but a shadow of this target."""
        checkpoint = open_checkpoint(path)
        entry, target_print = checkpoint.config.get(ENTRY), fingerprint(target)
        bits = next((bits for bits in SHADOW_FORMATS if entry == {"target": target_print, "bits": bits}), None)
        if bits is None:
            remedy = "delete the folder, or make one elsewhere with offspec quantize MODEL DST --shadow BITS"
            raise CheckpointError(f"{path} is not a shadow of {target.checkpoint.path}; {remedy}")
        stored = StoredModel.of(checkpoint, layer_prefix=LAYER_PREFIX)
        for i in range(target.config.num_layers):
            shapes = {n: w.shape for n, w in stored.layers[i].weights.items()} if i < len(stored.layers) else {}
            if shapes != layer_shapes(target.config, i):
                raise CheckpointError(f"{path}: the tensors of layer {i} are not the target's; delete the folder")
        return cls(bits, tuple(stored.layers))

    @classmethod
    def planned(cls, bits: int, target: ModelFiles) -> Shadow:
        """A shadow that is not made yet: sizes only."""
        return cls(bits, tuple(layers_from_config(target.config, SHADOW_FORMATS[bits])))

    def layer_bytes(self, target: ModelFiles) -> tuple[int, ...]:
        """Bytes in memory, by layer."""
        return tuple(layer.cost(target.dtype).resident_bytes for layer in self.layers)


def check_bits(bits: int) -> None:
    """Raises UsageError for a number of bits that no shadow has."""
    if bits not in SHADOW_FORMATS:
        raise UsageError(f"a shadow has {', '.join(map(str, SHADOW_FORMATS))} bits, not {bits}")


def shadow_folder(target: ModelFiles, bits: int) -> Path:
    """The folder for the target's shadow of `bits` bits; it may not exist."""
    return _folders(target)[bits]


def _folders(target: ModelFiles) -> dict[int, Path]:
    """By bits."""
    name = f"{target.checkpoint.path.name}-{fingerprint(target)}"
    cache = user_folder("cache") / "shadows"
    return {bits: cache / f"{name}-{bits}bit" for bits in SHADOW_FORMATS}


def find_shadow(target: ModelFiles, bits: int) -> Shadow | None:
    """The complete shadow of `bits` bits in the user's cache, or None."""
    return Shadow.open(shadow_folder(target, bits), target) if bits in made_shadows(target) else None


def made_shadows(target: ModelFiles) -> list[int]:
    """The bits of the finished shadows in the user's cache, most first. None for a target without weights here."""
    if not has_weights(target) or not target.config.is_native:
        return []
    return [bits for bits, folder in _folders(target).items() if _is_complete(folder)]


def _is_complete(folder: Path) -> bool:
    """Whether a finished shadow may be there."""
    return os.path.isfile(folder / CONFIG_FILE) and not (folder / UNFINISHED_MARKER).exists()


def make_shadow(
    target: ModelFiles, bits: int, folder: Path | None = None, progress: Progress | None = None
) -> Conversion:
    """Quantises the target's layers one by one into `folder`, or resumes an interrupted run. None: the user's cache.

    Needs memory for one layer. `progress(bytes_done, bytes_total)` counts bytes of the target.
    Raises UsageError, CheckpointError (the target), StorageError (the folder; repeat the call to resume).
    """
    check_bits(bits)
    refuse_foreign(target.config, "a shadow")
    refuse_experts(target.config, "a shadow")
    mark: dict[str, str | int] = {"target": fingerprint(target), "bits": bits}
    return convert_layers(
        target.checkpoint.path,
        folder or shadow_folder(target, bits),
        ConvertParams(SHADOW_FORMATS[bits]),
        layer_prefix=LAYER_PREFIX,
        progress=progress,
        understand=lambda checkpoint: _layers_alone(checkpoint, mark, target.mtp_names),
    )


def _layers_alone(checkpoint: Checkpoint, mark: Mapping[str, str | int], others: Collection[str]) -> Checkpoint:
    """The layers' tensors under offspec's names, and the mark in config.json. others: tensors of other layers."""
    named = without_blanks(checkpoint)
    names = [name for name in named.tensors if name.startswith(LAYER_PREFIX) and name not in others]
    tensors = {name: named.tensors[name] for name in names}
    config = {key: value for key, value in named.config.items() if key != "quantization_config"}
    return CheckpointView(named, tensors, {**config, ENTRY: mark})
