"""Loads an opened model's weights by a placement, and makes its decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offspec.backends.device_kinds import kind_of
from offspec.loaders.params import Progress
from offspec.loaders.streaming.device_experts import ExpertChoice
from offspec.loaders.streaming.placement import Placement
from offspec.loaders.streaming.tiers import TieredWeights, TierOptions
from offspec.loaders.streaming.weights import WeightSource

from ..model.decoder import Decoder
from ..model.exactness import reason_against_exactness
from ..model.transformers_config import ForeignConfig
from ..process import prepare
from .model_files import ModelFiles

LEAST_EXACT_WEIGHTS = 2**26  # of a draft that computes exact rows


@dataclass(frozen=True)
class WeightSettings:
    """How weights are loaded.

    has_far_embedding: the embedding may stay off the device, unless it is also the head, as other tables of rows do
    anyway. synchronous: no read-ahead; read each streamed layer when the pass needs it. expert_choice: see
    `TierOptions`. progress(bytes_done, bytes_total): called while resident weights load.
    """

    has_far_embedding: bool = False
    synchronous: bool = False
    expert_choice: ExpertChoice | None = None
    progress: Progress | None = None


DEFAULT = WeightSettings()


def load_weights(
    model: ModelFiles, placement: Placement, device: torch.device, settings: WeightSettings = DEFAULT
) -> TieredWeights:
    """Load the resident layers, and prepare the stream for the others. On a GPU, torch's settings are changed first
    (`process.prepare`).

    Raises torch.OutOfMemoryError, MemoryLimitError, CheckpointError.
    """
    prepare(device)
    far = (model.config.embedding_name,) if settings.has_far_embedding and not model.config.tied_head else ()
    return TieredWeights(
        model.stored,
        placement,
        dtype=model.dtype,
        device=device,
        row_tables=model.config.row_tables + far,
        options=TierOptions(settings.synchronous, expert_choice=settings.expert_choice),
        progress=settings.progress,
    )


def load_decoder(
    model: ModelFiles, placement: Placement, device: torch.device, settings: WeightSettings = DEFAULT
) -> Decoder:
    """`load_weights`, and the decoder over them."""
    weights = load_weights(model, placement, device, settings)
    return decoder_over(model, weights, device)


def decoder_over(model: ModelFiles, weights: WeightSource, device: torch.device) -> Decoder:
    """The decoder of a model with loaded weights: offspec's own, or transformers' modules. Prepares a GPU, too."""
    prepare(device)
    if isinstance(model.config, ForeignConfig):
        from ..model.transformers_decoder import ForeignDecoder  # imported here, because it imports transformers

        return ForeignDecoder(
            model.config, weights, dtype=model.dtype, device=device, make_layer_caches=model.kv.layers
        )
    return Decoder(model.config, weights, dtype=model.dtype, device=device, make_layer_caches=model.kv.layers)


def is_exact_as_draft(model: ModelFiles, device: torch.device) -> bool:
    """Whether a draft computes exact rows, though it need not: by a CPU's kernels, the fastest for large models."""
    is_small = sum(unit.num_weights for unit in model.stored.units) < LEAST_EXACT_WEIGHTS
    if is_small or not kind_of(device).multiplies_stored:
        return False
    return reason_against_exactness(model.config, model.dtype, device, model.kv) is None
