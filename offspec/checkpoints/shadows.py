"""Shadows in files: a target's layers in 2 to 4 bits, made once from its weights and kept in the user's cache.

A shadow is a folder of safetensors with a file for each layer. It has no embedding, norm and head: those are the
target's. Its config.json is the target's with one more entry, which says to which target it belongs. This module knows
nothing of drafting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from offspec.loaders.convert import Conversion
from offspec.loaders.convert import convert as convert_layers
from offspec.loaders.files.checkpoint import Checkpoint, CheckpointView, without_remedy
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.safetensors_folder import UNFINISHED_MARKER
from offspec.loaders.params import SHADOW_FORMATS, ConvertParams, Progress
from offspec.loaders.streaming.stored_model import StoredModel, StoredUnit

from ..errors import CheckpointError, UsageError
from ..model.block import layer_shapes
from ..model.names import LAYER_PREFIX
from ..user_folders import user_folder
from .atomic_files import locked_name
from .conversion import without_blanks
from .exit_layers import fingerprint, has_weights, refuse_experts, refuse_foreign
from .from_config import layers_from_config
from .model_files import ModelFiles

MAKING = "offspec quantize MODEL DST --shadow BITS"
ENTRY = "offspec_shadow"  # in a shadow's config.json: its target's fingerprint, and its bits


@dataclass(frozen=True)
class Shadow:
    """A shadow whose headers fit its target, or the sizes of one that is not made yet."""

    bits: int
    layers: tuple[StoredUnit, ...]

    @classmethod
    def open(cls, path: Path, target: ModelFiles) -> Shadow:
        """Reads the headers. Raises CheckpointError for anything but a shadow of this target."""
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as exc:
            raise CheckpointError(f"{without_remedy(exc)}; make the shadow again: {MAKING}") from exc
        entry, target_print = checkpoint.config.get(ENTRY), fingerprint(target)
        bits = next((bits for bits in SHADOW_FORMATS if entry == {"target": target_print, "bits": bits}), None)
        if bits is None:
            raise CheckpointError(f"{path} is not a shadow of {target.checkpoint.path}; make one elsewhere: {MAKING}")
        stored = StoredModel.of(checkpoint, layer_prefix=LAYER_PREFIX)
        for i in range(target.config.num_layers):
            shapes = {n: w.shape for n, w in stored.layers[i].weights.items()} if i < len(stored.layers) else {}
            if shapes != layer_shapes(target.config, i):
                raise CheckpointError(f"{path}: the tensors of layer {i} are not the target's; make it again: {MAKING}")
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
    return user_folder("cache") / "shadows" / f"{target.checkpoint.path.name}-{fingerprint(target)}-{bits}bit"


def find_shadow(target: ModelFiles, bits: int, notify: Callable[[str], None] = lambda text: None) -> Shadow | None:
    """The shadow of `bits` bits in the user's cache; None if it is missing, unfinished or damaged.

    notify(text): gets a line about one that is there and does not open. None for a target without weights here.
    """
    if not has_weights(target) or not target.config.is_native:
        return None
    folder = shadow_folder(target, bits)
    try:
        if not folder.exists() or not os.listdir(folder) or (folder / UNFINISHED_MARKER).exists():
            return None
        return Shadow.open(folder, target)
    except (CheckpointError, OSError) as exc:
        notify(f"the shadow of {bits} bits in the cache is damaged ({without_remedy(exc)})")
        return None


def made_shadows(target: ModelFiles, notify: Callable[[str], None] = lambda text: None) -> list[int]:
    """The bits of the shadows that `find_shadow` finds, most first."""
    return [bits for bits in SHADOW_FORMATS if find_shadow(target, bits, notify) is not None]


def make_shadow(
    target: ModelFiles, bits: int, folder: Path | None = None, progress: Progress | None = None
) -> Conversion:
    """Quantises the target's layers one by one into `folder`, or resumes an interrupted run.

    None: into the user's cache, unless it has the shadow already; a damaged one is replaced, and while another process
    makes it, this one waits.
    Needs memory for one layer. `progress(bytes_done, bytes_total)` counts bytes of the target.
    Raises UsageError, CheckpointError (the target), StorageError (the folder; repeat the call to resume).
    """
    check_bits(bits)
    refuse_foreign(target.config, "a shadow")
    refuse_experts(target.config, "a shadow")
    if folder is not None:
        return _make(target, bits, folder, progress)
    folder = shadow_folder(target, bits)
    with locked_name(folder):
        if (shadow := find_shadow(target, bits)) is not None:
            before, after = _stored_bytes(target.stored.layers), _stored_bytes(shadow.layers)
            num_files = len(shadow.layers)
            return Conversion(folder, SHADOW_FORMATS[bits], before, after, num_files, num_files, {})
        return _make(target, bits, folder, progress, is_cache=True)


def _make(
    target: ModelFiles, bits: int, folder: Path, progress: Progress | None, *, is_cache: bool = False
) -> Conversion:
    mark: dict[str, str | int] = {"target": fingerprint(target), "bits": bits}
    return convert_layers(
        target.checkpoint.path,
        folder,
        ConvertParams(SHADOW_FORMATS[bits]),
        layer_prefix=LAYER_PREFIX,
        progress=progress,
        understand=lambda checkpoint: _layers_alone(checkpoint, mark, target.mtp_names),
        is_cache=is_cache,
    )


def _stored_bytes(layers: Iterable[StoredUnit]) -> int:
    weights = (weight for layer in layers for weight in layer.weights.values())
    return sum(info.nbytes for weight in weights for info in weight.streamed)


def _layers_alone(checkpoint: Checkpoint, mark: Mapping[str, str | int], others: Collection[str]) -> Checkpoint:
    """The layers' tensors under offspec's names, and the mark in config.json. others: tensors of other layers."""
    named = without_blanks(checkpoint)
    names = [name for name in named.tensors if name.startswith(LAYER_PREFIX) and name not in others]
    tensors = {name: named.tensors[name] for name in names}
    return CheckpointView(named, tensors, {**named.config, ENTRY: mark})
