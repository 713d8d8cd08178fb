"""Weights of a model whose files were opened, loaded where a placement puts them; and the decoder over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offspec.loaders.formats.blocked import is_supported as is_blocking_supported
from offspec.loaders.placement import Placement
from offspec.loaders.tiers import Progress, TieredWeights, TierOptions
from offspec.loaders.weights import WeightSource

from ..model.decoder import Decoder
from ..model.foreign_config import ForeignConfig
from ..process import disable_cudnn_attention
from .opening import ModelFiles

LEAST_BLOCKED_BYTES = 512 * 2**20  # of a model; below that a pass is short anyway


@dataclass(frozen=True)
class LoadSettings:
    """How weights are loaded.

    has_far_embedding: the embedding may lie away from the device, unless the head needs it. synchronous: read each
    streamed layer when it is needed (the plain twin of reading ahead). is_written: the weights will be written to
    (`--learn`), and have to lie as they are. progress(bytes_done, bytes_total): follows the loading of what stays.
    """

    has_far_embedding: bool = False
    synchronous: bool = False
    is_written: bool = False
    progress: Progress | None = None


DEFAULT = LoadSettings()


def load_weights(
    model: ModelFiles, placement: Placement, device: torch.device, settings: LoadSettings = DEFAULT
) -> TieredWeights:
    """Load what stays, arm the stream for the rest.

    Raises torch.OutOfMemoryError, MemoryLimitError, CheckpointError.
    """
    if device.type == "cuda":
        disable_cudnn_attention()
    return TieredWeights(
        model.stored,
        placement,
        dtype=model.dtype,
        device=device,
        embedding=model.config.embedding_name if settings.has_far_embedding and not model.config.tied_head else None,
        options=TierOptions(is_blocked(model, device) and not settings.is_written, settings.synchronous),
        progress=settings.progress,
    )


def load_decoder(
    model: ModelFiles, placement: Placement, device: torch.device, settings: LoadSettings = DEFAULT
) -> Decoder:
    """`load_weights`, and the decoder over them."""
    weights = load_weights(model, placement, device, settings)
    return decoder_over(model, weights, device)


def decoder_over(model: ModelFiles, weights: WeightSource, device: torch.device) -> Decoder:
    """The decoder of these files over weights that were loaded: offspec's own, or transformers' modules."""
    if isinstance(model.config, ForeignConfig):
        from ..model.foreign import ForeignDecoder  # here, because it imports transformers

        return ForeignDecoder(model.config, weights, dtype=model.dtype, device=device)
    return Decoder(model.config, weights, dtype=model.dtype, device=device)


def is_blocked(model: ModelFiles, device: torch.device) -> bool:
    """Whether layers of the model are kept in oneDNN's order where all stay: large ones of 16-bit floats, on a CPU.

    Nothing but the model and the machine decides it, so that the same request is computed alike each time.
    """
    layers = model.stored.layers
    is_large = sum(layer.record.nbytes for layer in layers) >= LEAST_BLOCKED_BYTES
    is_plain = not any(weight.is_packed for layer in layers for weight in layer.weights.values())
    if isinstance(model.config, ForeignConfig):  # its modules take parameters that are no matrix of a product, too
        return False
    return device.type == "cpu" and is_large and is_plain and is_blocking_supported(model.dtype)
