"""The kinds of parts by the names that configs use (`ModelConfig.parts_of`)."""

from __future__ import annotations

from typing import Any

from offspec.loaders.registry import named

from ..config import ModelConfig
from ..rope import RotaryEmbeddings
from .part import Part

PARTS: dict[str, Any] = {  # by `named`
    "attention": "attention.Attention",
    "latent attention": "latent_attention.LatentAttention",
    "mlp": "mlp.Mlp",
    "experts": "experts.Experts",
    "delta net": "delta_net.DeltaNet",
    "layer input": "layer_input.LayerInput",
    "layer scale": "layer_input.LayerScale",
    "mamba": "mamba.Mamba",
    "attention beside mamba": "mamba.AttentionBesideMamba",
    "short convolution": "short_convolution.ShortConvolution",
    "attention beside mlp": "mlp.AttentionBesideMlp",
    "modules": "transformers_layer.of_config",
}


def parts_of(config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> list[Part]:
    """A layer's parts, in their order. rotaries: see `NativePart`; without them a config's parts are made once."""
    if rotaries is None and layer in config.made_parts:
        return list(config.made_parts[layer])
    made: list[Part] = [named(__package__, PARTS[name])(config, layer, rotaries) for name in config.parts_of(layer)]
    if rotaries is None:
        config.made_parts[layer] = made
    return list(made)
