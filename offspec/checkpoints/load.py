"""Loads an opened model's weights by a placement, and makes its decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.formats.blocked import is_supported as is_blocking_supported
from offspec.loaders.streaming.device_experts import ExpertChoice
from offspec.loaders.streaming.placement import Placement
from offspec.loaders.streaming.tiers import Progress, TieredWeights, TierOptions
from offspec.loaders.streaming.weights import WeightSource

from ..model.decoder import Decoder
from ..model.exactness import reason_against_exactness
from ..model.transformers_config import ForeignConfig
from ..process import prepare_gpu
from .opening import ModelFiles

LEAST_BLOCKED_BYTES = 512 * 2**20  # a smaller model's passes are short anyway
LEAST_EXACT_WEIGHTS = 2**26  # of a draft that computes exact rows


@dataclass(frozen=True)
class WeightSettings:
    """How weights are loaded.

    has_far_embedding: the embedding may stay off the device, unless it is also the head, as other tables of rows do
    anyway. synchronous: no read-ahead;
    read each streamed layer when the pass needs it. is_written: training will change the weights (`--learn`), so they
    keep their memory layout. is_exact: the decoder will be exact (`model.exactness`), whose kernels read the usual
    layout. expert_choice: see `TierOptions`. progress(bytes_done, bytes_total): called while resident weights load.
    """

    has_far_embedding: bool = False
    synchronous: bool = False
    is_written: bool = False
    is_exact: bool = False
    expert_choice: ExpertChoice | None = None
    progress: Progress | None = None


DEFAULT = WeightSettings()


def load_weights(
    model: ModelFiles, placement: Placement, device: torch.device, settings: WeightSettings = DEFAULT
) -> TieredWeights:
    """Load the resident layers, and prepare the stream for the others. On a GPU, torch's settings are changed first
    (`process.prepare_gpu`).

    Raises torch.OutOfMemoryError, MemoryLimitError, CheckpointError.
    """
    if accelerator_of(device).has_own_memory:
        prepare_gpu()
    is_in_order = is_blocked(model, device) and not settings.is_written and not settings.is_exact
    far = (model.config.embedding_name,) if settings.has_far_embedding and not model.config.tied_head else ()
    return TieredWeights(
        model.stored,
        placement,
        dtype=model.dtype,
        device=device,
        row_tables=model.config.row_tables + far,
        options=TierOptions(is_in_order, settings.synchronous, expert_choice=settings.expert_choice),
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
    if accelerator_of(device).has_own_memory:
        prepare_gpu()
    if isinstance(model.config, ForeignConfig):
        from ..model.transformers_decoder import ForeignDecoder  # imported here, because it imports transformers

        return ForeignDecoder(
            model.config, weights, dtype=model.dtype, device=device, make_layer_caches=model.kv.layers
        )
    return Decoder(model.config, weights, dtype=model.dtype, device=device, make_layer_caches=model.kv.layers)


def is_exact_as_draft(model: ModelFiles, device: torch.device) -> bool:
    """Whether a draft computes exact rows, though it need not: on a CPU their kernels are the fastest for large models.

    Not where its matrices are in oneDNN's order.
    """
    is_small = sum(unit.num_weights for unit in model.stored.units) < LEAST_EXACT_WEIGHTS
    if device.type != "cpu" or is_small or is_blocked(model, device):
        return False
    return reason_against_exactness(model.config, model.dtype, device, model.kv) is None


def is_blocked(model: ModelFiles, device: torch.device) -> bool:
    """Whether a fully resident model is kept in oneDNN's order: a large one of 16-bit floats, on a CPU.

    It depends on the model and the machine only, so that equal requests are computed identically.
    """
    if device.type != "cpu" or not model.config.only_multiplies:
        return False
    layers = model.stored.layers
    is_large = sum(layer.record.nbytes for layer in layers) >= LEAST_BLOCKED_BYTES
    is_plain = all(weight.plain_dtype for layer in layers for weight in layer.weights.values())
    return is_large and is_plain and is_blocking_supported(model.dtype)
