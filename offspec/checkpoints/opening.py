"""Models' files, opened and understood: headers, config.json, dtype, tokenizer, but no weights in memory yet."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from offspec.loaders.checkpoint import Checkpoint
from offspec.loaders.containers import open_checkpoint, open_config
from offspec.loaders.formats import blank_tensors, format_notes, plan_form
from offspec.loaders.hub import resolve
from offspec.loaders.kernels.compiler import instructions
from offspec.loaders.tiers import StoredModel

from .. import builtin
from ..errors import (
    CheckpointError,
    MissingWeightsError,
    UnsupportedModelError,
    UsageError,
)
from ..model.config import ModelConfig, read_config
from ..model.decoder import check_tensors, is_ignored, wanted_shapes
from ..model.foreign_config import ForeignConfig
from .foreign import read_foreign_config
from .from_config import stored_from_config
from .gguf import in_our_names
from .language_model import language_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMALL_MODEL_BYTES = 2 * 2**30
COMPARED_BYTES = 2**24  # at a time


@dataclass(frozen=True)
class Note:
    """Something that was chosen automatically, with its reason; `advice` when the user could do something about it."""

    text: str
    advice: bool = False


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint whose headers are what its config.json calls for, and the dtype to compute in."""

    checkpoint: Checkpoint
    config: ModelConfig
    stored: StoredModel
    dtype: torch.dtype

    @classmethod
    def open(
        cls, path: Path, dtype: str, device_type: str, notes: list[Note], *, headers_only: bool = False
    ) -> ModelFiles:
        """Read headers. dtype: auto, bf16, fp16 or fp32; what auto chose is noted. Raises OffspecError's children."""
        checkpoint = language_model(in_our_names(open_checkpoint(path, headers_only=headers_only)))
        notes += [Note(told) for told in (*checkpoint.notes, *format_notes(checkpoint))]
        config = _config(path, checkpoint.config, checkpoint, notes)
        if config.tied_head and not headers_only and _has_another_head(checkpoint, config):
            config = replace(config, tied_head=False)
            notes.append(
                Note(f"{path.name} has a head of its own, though config.json says that its embedding serves for it")
            )
        ignored = {name for name in checkpoint.tensors if is_ignored(name, config)}
        ignored |= blank_tensors(checkpoint.tensors, wanted_shapes(config))
        try:
            stored = StoredModel.of(checkpoint, layer_prefix=config.layer_prefix, ignore=ignored)
        except CheckpointError as exc:  # target or draft? tensors' names do not tell
            if str(path) in str(exc):
                raise
            raise CheckpointError(f"{path}: {exc}") from exc
        check_tensors(stored.by_name, config, path)
        return cls(checkpoint, config, stored, choose_dtype(dtype, path.name, config, stored, device_type, notes))

    @classmethod
    def from_config(cls, path: Path, form: str | None, dtype: str, device_type: str, notes: list[Note]) -> ModelFiles:
        """What `open` would give, to plan with: of headers or config.json alone, too, or in another format.

        Raises OffspecError's children, also for weights that are there and damaged.
        """
        why = "as asked"
        if form is None:
            try:
                return cls.open(path, dtype, device_type, notes, headers_only=True)
            except MissingWeightsError:
                why = "its weights are not all there"
        checkpoint = language_model(in_our_names(open_config(path)))
        notes += [Note(told) for told in checkpoint.notes]
        config, form = _config(path, checkpoint.config, None, notes), form or plan_form(checkpoint.config)
        stored = stored_from_config(config, form)
        notes.append(Note(f"sizes of {path.name} as {form}, from config.json alone ({why})"))
        return cls(checkpoint, config, stored, choose_dtype(dtype, path.name, config, stored, device_type, notes))

    @cached_property
    def packed_form(self) -> str | None:
        """The format of most of what is unpacked for each use, as the first layer has it; None where nothing is."""
        elements = Counter[str]()
        for weight in self.stored.layers[0].weights.values():
            if weight.is_packed:
                elements[weight.dtype] += math.prod(weight.shape)
        return max(elements, key=lambda form: elements[form], default=None)

    @cached_property
    def num_parameters(self) -> int:
        return count_parameters(self.stored)


def _config(path: Path, raw: Mapping[str, Any], checkpoint: Checkpoint | None, notes: list[Note]) -> ModelConfig:
    """By offspec's own decoder, or else by transformers' modules. checkpoint: None where its weights are not there."""
    try:
        try:
            return read_config(raw)
        except UnsupportedModelError as exc:
            found = read_foreign_config(raw, checkpoint, exc)
            notes += _foreign_notes(path.name, found)
            return found
    except (CheckpointError, UnsupportedModelError) as exc:  # target or draft? it cannot know which file it reads
        raise type(exc)(f"{path}: {exc}") from exc


def _foreign_notes(name: str, config: ForeignConfig) -> list[Note]:
    """What somebody should know whose model transformers' modules compute."""
    how = f"{name} computes through transformers' own modules (model_type {config.model_type})"
    notes = [Note(f"{how}: slower than offspec's decoder", advice=True)]
    if config.has_experts:
        every = "a pass reads every expert of a layer, whichever it needs"
        notes.append(Note(f"{name} has experts, and {every}; llama.cpp with experts on the CPU is faster", advice=True))
    return notes


def _has_another_head(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether there is a head that is not the embedding's copy; transformers (from 5 on) does not tie these, either."""
    head, embedding = (checkpoint.tensors.get(name) for name in (config.own_head_name, config.embedding_name))
    if head is None or embedding is None:
        return False
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return True
    try:
        with head.path.open("rb") as one, embedding.path.open("rb") as other:
            one.seek(head.offset)
            other.seek(embedding.offset)
            sizes = [min(COMPARED_BYTES, head.nbytes - start) for start in range(0, head.nbytes, COMPARED_BYTES)]
            return any(one.read(size) != other.read(size) for size in sizes)
    except OSError as exc:
        raise CheckpointError(f"{checkpoint.path} cannot be read ({exc.strerror})") from exc


def count_parameters(stored: StoredModel) -> int:
    return sum(math.prod(weight.shape) for weight in stored.by_name.values())


def choose_device(wanted: str, notes: list[Note]) -> torch.device:
    """`auto` is the first CUDA device where there is one. Raises UsageError for a device that is not there."""
    if wanted == "auto":
        has_cuda = torch.cuda.is_available()
        notes.append(Note("device cuda:0 (found)" if has_cuda else "device cpu (no CUDA device found)"))
        return torch.device("cuda:0" if has_cuda else "cpu")
    if wanted == "cpu":
        return torch.device("cpu")
    named = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", wanted)
    if named is None:
        raise UsageError(f"--device {wanted} is not a device; use auto, cpu, cuda or cuda:N")
    number, count = int(named[1] or 0), torch.cuda.device_count()
    if number >= count:
        raise UsageError(
            f"--device {wanted}: this machine has {count} CUDA devices; use --device cpu or another number"
        )
    return torch.device("cuda", number)


def choose_dtype(
    wanted: str, name: str, config: ModelConfig, stored: StoredModel, device_type: str, notes: list[Note]
) -> torch.dtype:
    """`auto`: the checkpoint's own, but fp32 on a CPU for a model so small that exact text costs nothing."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise UsageError(f"--dtype {wanted} is not known; use auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    if device_type == "cpu" and 4 * count_parameters(stored) <= SMALL_MODEL_BYTES:
        notes.append(Note(f"dtype fp32 for {name} (small enough; text is exact to the token)"))
        return torch.float32
    kept = stored.shared[config.embedding_name].dtype
    chosen = {"F16": torch.float16, "F32": torch.float32}.get(kept, torch.bfloat16)
    is_slow = device_type == "cpu" and chosen is torch.float16 and "avx512_bf16" in instructions()
    remedy = "; on a CPU --dtype bf16 may be several times as fast" if is_slow else ""
    notes.append(Note(f"dtype {str(chosen).removeprefix('torch.')} for {name} (the checkpoint's own){remedy}", is_slow))
    return chosen


def open_target(model: str, revision: str | None, dtype: str, device_type: str) -> ModelFiles:
    """MODEL's files, as a target. Raises OffspecError's children."""
    return ModelFiles.open(locate(model, revision, "target"), dtype, device_type, [])


def locate(model: str, revision: str | None, role: str, *, weights: bool = True) -> Path:
    """Where MODEL lies; a hub id is downloaded, its weights only if they are wanted.

    role: target or draft, of `builtin`.

    Raises OffspecError's children.
    """
    if revision is not None and (model == "builtin" or Path(model).expanduser().is_dir()):
        raise UsageError(f"revision {revision!r} belongs to a hub id, and {model} is on this machine; leave it out")
    return builtin.path(role) if model == "builtin" else resolve(model, revision, weights=weights)
