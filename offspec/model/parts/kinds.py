"""The kinds of parts by the names that configs use (`ModelConfig.parts_of`)."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ModelConfig
from ..rope import RotaryEmbeddings
from .attention import Attention
from .delta_net import DeltaNet
from .experts import Experts
from .latent_attention import LatentAttention
from .layer_input import LayerInput, LayerScale
from .mamba import AttentionBesideMamba, Mamba
from .mlp import AttentionBesideMlp, Mlp
from .part import Part
from .short_convolution import ShortConvolution
from .transformers_layer import LayerOfModules

PARTS: dict[str, Callable[[ModelConfig, int, RotaryEmbeddings | None], Part]] = {
    "attention": Attention,
    "latent attention": LatentAttention,
    "mlp": Mlp,
    "experts": Experts,
    "delta net": DeltaNet,
    "layer input": LayerInput,
    "layer scale": LayerScale,
    "mamba": Mamba,
    "attention beside mamba": AttentionBesideMamba,
    "short convolution": ShortConvolution,
    "attention beside mlp": AttentionBesideMlp,
    "modules": lambda config, layer, rotaries: LayerOfModules(config, layer),
}


def parts_of(config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> list[Part]:
    """A layer's parts, in their order. rotaries: see `NativePart`; without them a config's parts are made once."""
    if rotaries is None and layer in config.made_parts:
        return list(config.made_parts[layer])
    made = [PARTS[name](config, layer, rotaries) for name in config.parts_of(layer)]
    if rotaries is None:
        config.made_parts[layer] = made
    return list(made)
