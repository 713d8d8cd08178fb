"""Models' files, opened and understood: headers, config.json, dtype, tokenizer, but no weights in memory yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from offspec.loaders.checkpoint import Checkpoint, resolve
from offspec.loaders.tiers import StoredModel

from . import builtin
from .config import ModelConfig, read_config
from .errors import CheckpointError, UnsupportedModelError, UsageError, VocabularyMismatchError
from .model import EMBEDDING, LAYER_PREFIX, check_tensors, is_ignored
from .tokenizer import Tokenizer, check_vocabularies

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMALL_MODEL_BYTES = 2 * 2**30


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
    def open(cls, path: Path, dtype: str, device_type: str, notes: list[Note]) -> ModelFiles:
        """Reads headers. `dtype`: auto, bf16, fp16 or fp32; what auto chose is noted. Raises OffspecError's children."""
        checkpoint = Checkpoint.open(path)
        try:
            config = read_config(checkpoint.config)
        except (CheckpointError, UnsupportedModelError) as exc:  # target or draft? it cannot know which file it reads
            raise type(exc)(f"{path}: {exc}") from exc
        ignored = {name for name in checkpoint.tensors if is_ignored(name, config)}
        stored = StoredModel.of(checkpoint, layer_prefix=LAYER_PREFIX, ignore=ignored)
        check_tensors(stored.by_name, config, path)
        return cls(checkpoint, config, stored, choose_dtype(dtype, checkpoint, stored, device_type, notes))

    @property
    def name(self) -> str:
        return self.checkpoint.path.name

    @cached_property
    def num_parameters(self) -> int:
        return count_parameters(self.stored)


def count_parameters(stored: StoredModel) -> int:
    return sum(math.prod(weight.shape) for weight in stored.by_name.values())


def choose_dtype(
    wanted: str, checkpoint: Checkpoint, stored: StoredModel, device_type: str, notes: list[Note]
) -> torch.dtype:
    """`auto`: the checkpoint's own, but fp32 on a CPU for a model so small that exact text costs nothing."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise UsageError(f"--dtype {wanted} is not known; use auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    name = checkpoint.path.name
    if device_type == "cpu" and 4 * count_parameters(stored) <= SMALL_MODEL_BYTES:
        notes.append(Note(f"dtype fp32 for {name} (small enough; text is exact to the token)"))
        return torch.float32
    kept = stored.shared[EMBEDDING].dtype
    chosen = {"F16": torch.float16, "F32": torch.float32}.get(kept, torch.bfloat16)
    notes.append(Note(f"dtype {str(chosen).removeprefix('torch.')} for {name} (the checkpoint's own)"))
    return chosen


# ------------------------------------------------------------------------------------------------ target and draft


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer, and perhaps a draft that speaks the same tokens."""

    target: ModelFiles
    tokenizer: Tokenizer
    draft: ModelFiles | None
    draft_name: str | None


def open_pair(model: str, draft: str, *, revision: str | None, dtype: str, device_type: str, notes: list[Note]) -> Pair:
    """Find MODEL and `draft` (auto, none, or a model), and check that they fit together. Raises OffspecError's children."""
    target = ModelFiles.open(_locate(model, revision, "target"), dtype, device_type, notes)
    tokenizer = Tokenizer.load(target.checkpoint.path)
    draft_name, guesser = _choose_draft(model, draft, notes), None
    if draft_name is not None:
        guesser = ModelFiles.open(_locate(draft_name, None, "draft"), dtype, device_type, notes)
        _check_draft(tokenizer, target, guesser)
    return Pair(target, tokenizer, guesser, draft_name)


def _locate(model: str, revision: str | None, role: str) -> Path:
    if revision is not None and (model == "builtin" or Path(model).expanduser().is_dir()):
        raise UsageError(f"revision {revision!r} belongs to a hub id, and {model} is on this machine; leave it out")
    return builtin.path(role) if model == "builtin" else resolve(model, revision)


def _choose_draft(model: str, wanted: str, notes: list[Note]) -> str | None:
    if wanted == "none":
        return None
    if wanted != "auto":
        return wanted
    if model == "builtin":
        return "builtin"
    remedy = "a small model of its family makes it faster: --draft PATH"
    notes.append(Note(f"no draft is known for {model}, so it decodes one token a pass; {remedy}", advice=True))
    return None


def _check_draft(tokenizer: Tokenizer, target: ModelFiles, draft: ModelFiles) -> None:
    """Refuse a draft with another vocabulary; a draft without a tokenizer must at least have as many tokens."""
    path = draft.checkpoint.path
    if (path / "tokenizer.json").is_file():
        check_vocabularies(tokenizer, Tokenizer.load(path))
    elif draft.config.vocab_size != target.config.vocab_size:
        raise VocabularyMismatchError(
            f"the draft {path} has no tokenizer.json and {draft.config.vocab_size} tokens, the target has "
            f"{target.config.vocab_size}; use a draft of the target's family"
        )
