"""Writes a small trained model as a checkpoint: one safetensors file, config.json, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from offspec.loaders.files.checkpoint import Checkpoint, as_config_json

from .atomic_files import new_folder
from .model_files import ModelFiles

DTYPES = {"F16": torch.float16, "F32": torch.float32}  # by safetensors' names; others are written as bf16


@dataclass(frozen=True)
class NewCheckpoint:
    """All of a checkpoint but its weights. source: whose tokenizer and chat template are copied."""

    config: Mapping[str, Any]
    source: Checkpoint
    dtype: torch.dtype

    @classmethod
    def like(cls, files: ModelFiles) -> NewCheckpoint:
        """A checkpoint with other weights than the model's: unpacked, in its floating-point dtype or in bf16."""
        config = {key: value for key, value in files.checkpoint.config.items() if key != "quantization_config"}
        config["tie_word_embeddings"] = files.config.tied_head
        stored = files.stored.shared[files.config.embedding_name].dtype
        return cls(config, files.checkpoint, DTYPES.get(stored, torch.bfloat16))

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the folder whole or not at all; it must not exist. Raises StorageError, CheckpointError."""
        with new_folder(folder) as unfinished:
            for name, source in self.source.companions().items():
                (unfinished / name).parent.mkdir(exist_ok=True)
                (unfinished / name).write_bytes(source if isinstance(source, bytes) else source.read_bytes())
            (unfinished / "config.json").write_bytes(as_config_json(self.config))
            weights = {name: tensor.to(self.dtype).contiguous() for name, tensor in tensors.items()}
            save_file(weights, unfinished / "model.safetensors", {"format": "pt"})
