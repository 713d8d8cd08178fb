"""Small models of well-known families, as drafts that a plan names before anything is downloaded.

Each is known by its config.json without what plans do not need, as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offspec.loaders.files.safetensors_folder import SafetensorsCheckpoint

from ..checkpoints.model_files import ModelFiles
from ..checkpoints.opening import model_of_config
from ..model.config import ModelConfig

PADDING = 0.01  # of a vocabulary: releases of a family pad it to different numbers
LEAST_RATIO = 4  # of the target's weights to the draft's
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)


def _config(model_type: str, *shape: int, **others: object) -> dict[str, Any]:
    """A config.json. shape: see _SHAPE."""
    named = dict(zip(_SHAPE, shape, strict=True))
    return {"model_type": model_type, "torch_dtype": "bfloat16", "tie_word_embeddings": True, **named, **others}


# By hub id. Qwen 2.5 and 3 share a vocabulary: of several that fit a target, the one of its own generation.
DRAFTS: Mapping[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B-Instruct": _config("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072),
    "Qwen/Qwen2.5-0.5B-Instruct": _config("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768),
    "Qwen/Qwen3-0.6B": _config("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960),
    "Qwen/Qwen3.5-0.8B": _config(
        *("qwen3_5_text", 1024, 3584, 24, 8, 2, 256, 248320, 262144),
        linear_num_value_heads=16,
        rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
    "google/gemma-3-1b-it": _config(
        *("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, 32768), sliding_window=512, query_pre_attn_scalar=256
    ),
    "google/gemma-2-2b-it": _config(
        *("gemma2", 2304, 9216, 26, 8, 4, 256, 256000, 8192), sliding_window=4096, query_pre_attn_scalar=256
    ),
    "allenai/OLMo-2-0425-1B-Instruct": _config(
        *("olmo2", 2048, 8192, 16, 16, 16, 128, 100352, 4096), tie_word_embeddings=False
    ),
}


@dataclass(frozen=True)
class FamilyDraft:
    """A small model of the target's family. name: its hub id. files: to plan with."""

    name: str
    files: ModelFiles

    @property
    def num_bytes(self) -> int:
        """Of its weights: what is downloaded."""
        return self.files.weight_bytes


def family_draft(target: ModelFiles, dtype: str) -> FamilyDraft | None:
    """The draft of the target's family; None if none is known that is small beside it."""
    fitting = {
        name: config
        for name, config in DRAFTS.items()
        if _has_vocabulary_of(target.config, config["model_type"], config["vocab_size"])
    }
    if not fitting:
        return None
    name = max(fitting, key=lambda name: target.config.model_type.startswith(fitting[name]["model_type"]))
    checkpoint = SafetensorsCheckpoint(Path(name), fitting[name], {}, {})
    files = model_of_config(checkpoint, None, dtype, [])
    return FamilyDraft(name, files) if files.num_parameters * LEAST_RATIO <= target.num_parameters else None


def may_share_vocabulary(target: ModelConfig, draft: ModelConfig) -> bool:
    """Whether two models are likely to have one vocabulary, by config.json: of a family, and about as many tokens."""
    return _has_vocabulary_of(target, draft.model_type, draft.vocab_size)


def _has_vocabulary_of(target: ModelConfig, model_type: str, vocab_size: int) -> bool:
    is_of_family = _family(target.model_type) == _family(model_type)
    return is_of_family and abs(target.vocab_size - vocab_size) <= PADDING * vocab_size


def _family(model_type: str) -> str:
    """ "qwen" of "qwen3_moe": the letters at its beginning."""
    return model_type[: next((i for i, letter in enumerate(model_type) if not letter.isalpha()), None)]
