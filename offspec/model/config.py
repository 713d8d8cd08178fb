"""Reads a checkpoint's config.json into a `ModelConfig`.

All families share Llama's layout (RMSNorm, RoPE, grouped-query attention, SwiGLU), with the differences in `families`.
This module neither reads weights nor computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any

from offspec.loaders.files.checkpoint import show
from offspec.loaders.params import QUANT_METHODS
from offspec.scheduler.params import MAX_NODES, MAX_ROWS, MOST_STATE_NODES

from ..errors import CheckpointError, UnsupportedModelError
from .config_values import EPS_RANGE, Json, mapping, number_in, number_of_layers, positive
from .families.defaults import DEFAULTS
from .families.reading import Fields
from .families.registry import FAMILIES, MULTIMODAL, PARTLY_ROTATED, TEXT_CLASSES, completed, family_fields
from .names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUT_TABLE,
    LAYER_PREFIX,
)
from .rope_config import LONG_FACTORS, ORIGINAL_CONTEXT, SHORT_FACTORS, RopeConfig, read_rope, read_rotary_share
from .shapes import (
    ACTIVATIONS,
    GATED_MLP,
    HEADS_NORMED,
    NORMS_BEFORE,
    DeltaShape,
    ExpertsShape,
    LatentShape,
    LayerInputs,
    LayerShape,
    MambaShape,
    MlpNames,
    Multipliers,
    NormPlaces,
    QKNorm,
    ShortConvolutionShape,
)

MAX_CONTEXT = 2**31  # a scaled context is at most this long
OUTER_KEYS = ("quantization_config", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id")  # of `text_config`
MAX_EXPERTS_IN_ALL = 2**16  # layers, for the same reason as MAX_LAYERS


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `windows[i]` is layer i's sliding window in tokens; None is full attention.

    Fields with a default are families' differences from Llama; each is read in one place.

    unrotated: layers without RoPE. local_rope: RoPE of the layers with a window, if it is not `rope`. rotary_share:
    RoPE rotates this share of a head's dimensions, the first ones. has_interleaved_rope: RoPE's pairs are neighbours,
    not a dimension of each half of a head. query_growth: (beta, context) of the queries' scaling by position
    (`rope.growth`). attention_scale: of scores; None is head_dim ** -0.5. attention_cap, logit_cap: c of c tanh(x / c).
    norm: "rms", "rms plus one", "layer" or "layer plus one" (`norms.normalize`).
    is_parallel: attention and MLP have the same normed states as input. has_attention_gate: the queries' projection
    also gives a gate for each number of attention's result. has_sinks: each head attends to a key without a value, too,
    whose score is learnt. attention, attention_output: the prefix of its tensors in a layer, and its last matrix.
    layer_norms: each layer's norms; empty: `norms`. delta, mamba, short_convolution, latent, experts: the shape of such
    parts, if there are any. multipliers: Falcon-H1's. parts: names of each layer's parts (`parts.kinds.PARTS`); empty:
    attention and an MLP in every layer. has_value_norm: values are normed, by an RMSNorm without a weight. shapes: of
    each layer, if they differ (`shape_of`). layer_inputs: of what layers get of each token.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_context: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    qk_norm_form: QKNorm = HEADS_NORMED
    local_rope: RopeConfig | None = None
    unrotated: tuple[int, ...] = ()
    rotary_share: float = 1.0
    has_interleaved_rope: bool = False
    query_growth: tuple[float, int] | None = None
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    is_embedding_scale_rounded: bool = False
    residual_scale: float = 1.0
    norm: str = "rms"
    has_norm_bias: bool = False
    norms: NormPlaces = NORMS_BEFORE
    layer_norms: tuple[NormPlaces, ...] = ()
    final_norm: str = FINAL_NORM
    embedding_table: str = EMBEDDING
    is_parallel: bool = False
    activation: str = "silu"
    has_fused_qkv: bool = False
    mlp: MlpNames = GATED_MLP
    has_attention_gate: bool = False
    has_sinks: bool = False
    attention: str = "self_attn"
    attention_output: str = "self_attn.o_proj"
    delta: DeltaShape | None = None
    mamba: MambaShape | None = None
    experts: ExpertsShape | None = None
    multipliers: Multipliers | None = None
    short_convolution: ShortConvolutionShape | None = None
    latent: LatentShape | None = None
    parts: tuple[tuple[str, ...], ...] = ()
    has_value_norm: bool = False
    shapes: tuple[LayerShape, ...] = ()
    layer_inputs: LayerInputs | None = None

    # How the layers are computed: not fields, because they follow from the class.

    is_native = True  # by offspec's own parts, of which drafts can be made, and which can be trained
    has_whole_attention = False  # attention takes all keys at once, with one mask; otherwise it may take parts of them
    has_linear_head = True  # logits are linear in the final states

    @property
    def expert_share(self) -> float:
        """The share of a layer's experts that a row uses."""
        return 1.0 if self.experts is None else self.experts.num_used / self.experts.num

    @property
    def exact_vectors(self) -> tuple[str, ...]:
        """Short names of a layer's vectors that keep their stored dtype, whatever the dtype of the arithmetic."""
        correction = None if self.experts is None else self.experts.correction
        return () if correction is None else (correction,)

    @property
    def most_nodes(self) -> int:
        """The most nodes of a tree whose size is found at run time."""
        states = (self.delta, self.mamba, self.short_convolution)  # layers that keep states of a text
        return MAX_NODES if all(shape is None for shape in states) else MOST_STATE_NODES

    @property
    def most_pending(self) -> int:
        """The most nodes that may be pending in a text of a draft of this shape."""
        return MAX_ROWS if self.most_nodes == MAX_NODES else self.most_nodes

    @property
    def mask_heads(self) -> int:
        """The number of heads whose mask or scores are in memory at once."""
        return self.num_heads // min(self.shape_of(layer).num_kv_heads for layer in range(self.num_layers or 1))

    @property
    def largest_head(self) -> int:
        """The most numbers of a head in any layer."""
        return max(self.shape_of(layer).head_dim for layer in range(self.num_layers or 1))

    @property
    def shares_entries(self) -> bool:
        """Whether some layers attend to the KV entries of others."""
        return any(shape.entries_of is not None for shape in self.shapes)

    def made_numbers(self, num_keys: int) -> int:
        """Numbers that a layer makes of its weights, or of `num_keys` keys and values, beside those of attention."""
        return 0

    def as_native(self) -> ModelConfig:
        """The shape of a decoder of this size that `is_native`."""
        return self

    # Names of tensors in the checkpoint.

    @property
    def layer_prefix(self) -> str:
        """The prefix of layers' tensors, before the layer's number."""
        return LAYER_PREFIX

    @property
    def embedding_name(self) -> str:
        return self.embedding_table

    @property
    def own_head_name(self) -> str:
        """The name of a head that is not tied."""
        return HEAD

    @property
    def head_name(self) -> str:
        """The full name of the head's matrix."""
        return self.embedding_name if self.tied_head else self.own_head_name

    @property
    def final_norm_names(self) -> tuple[str, ...]:
        """Full names of the vectors of the norm after the last layer."""
        weight = self.final_norm
        return (weight, f"{weight.removesuffix('weight')}bias") if self.has_norm_bias else (weight,)

    def ignores(self, name: str) -> bool:
        """Whether a decoder does not need this tensor: a tied head's copy, precomputed frequencies, unread entries."""
        is_copy = self.tied_head and name == self.own_head_name
        return is_copy or name.endswith("rotary_emb.inv_freq") or self._is_of_shared_entries(name)

    def _is_of_shared_entries(self, name: str) -> bool:
        """Whether it would make the KV entries of a layer that attends to another's; Gemma 4 has such tensors."""
        number, _, short = name.removeprefix(self.layer_prefix).partition(".")
        if not self.shares_entries or not name.startswith(self.layer_prefix) or not number.isdecimal():
            return False
        layer = int(number)
        sharing = layer < self.num_layers and self.shape_of(layer).entries_of is not None
        return sharing and short.startswith(("self_attn.k_", "self_attn.v_"))

    @property
    def row_tables(self) -> tuple[str, ...]:
        """Names of the tables of which only rows are used, beside the embedding."""
        return () if self.layer_inputs is None else (INPUT_TABLE,)

    def shape_of(self, layer: int) -> LayerShape:
        if self.shapes:
            return self.shapes[layer]
        return LayerShape(self.num_kv_heads, self.head_dim, self.intermediate_size, layer)

    def rotary_dim_of(self, layer: int) -> int:
        """The number of a head's dimensions that RoPE rotates."""
        if self.latent is not None:
            return self.latent.rope_size
        return int(self.shape_of(layer).head_dim * self.rotary_share)

    def parts_of(self, layer: int) -> tuple[str, ...]:
        """The names of a layer's parts, in their order."""
        if self.parts:
            return self.parts[layer]
        return ("attention beside mlp",) if self.is_parallel else ("attention", "mlp")

    @cached_property
    def made_parts(self) -> dict[int, list[Any]]:
        """By layer, the parts without rotations that `parts.kinds.parts_of` has made, whose shapes plans ask for."""
        return {}

    def norms_of(self, layer: int) -> NormPlaces:
        """The norms of a layer."""
        return self.layer_norms[layer] if self.layer_norms else self.norms

    def rope_of(self, layer: int) -> RopeConfig | None:
        """RoPE of a layer; None for a layer without it."""
        if layer in self.unrotated:
            return None
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope

    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor outside the layers."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {self.embedding_name: table}
        shapes |= dict.fromkeys(self.final_norm_names, (self.hidden_size,))
        if (inputs := self.layer_inputs) is not None:
            shapes[INPUT_TABLE] = (inputs.vocab_size, inputs.width)
            shapes[INPUT_PROJECTION] = (inputs.width, self.hidden_size)
            shapes[INPUT_NORM] = (inputs.size,)
        return shapes if self.tied_head else {**shapes, HEAD: table}

    def only_layers(self, layers: Sequence[int]) -> ModelConfig:
        """The shape of a decoder with these layers only."""
        unrotated = tuple(i for i, layer in enumerate(layers) if layer in self.unrotated)
        windows = tuple(self.windows[layer] for layer in layers)
        parts = tuple(self.parts[layer] for layer in layers if self.parts)
        norms = tuple(self.layer_norms[layer] for layer in layers if self.layer_norms)
        shapes = tuple(self._shape_among(layers, layer) for layer in layers if self.shapes)
        return replace(
            self,
            num_layers=len(layers),
            windows=windows,
            unrotated=unrotated,
            parts=parts,
            layer_norms=norms,
            shapes=shapes,
        )

    def _shape_among(self, layers: Sequence[int], layer: int) -> LayerShape:
        """The shape of a layer in a decoder with `layers` only."""
        shape = self.shapes[layer]
        return shape if shape.entries_of is None else replace(shape, entries_of=layers.index(shape.entries_of))

    def plain_layers(self, count: int) -> ModelConfig:
        """The shape of a decoder of `count` layers of attention and an MLP, each as large as the first layer's.

        Latent attention has no heads of keys; then each query head gets one of as many numbers as a value.
        """
        shape, scale = self.shape_of(0), self.attention_scale
        if self.latent is not None:
            shape, scale = replace(shape, num_kv_heads=self.num_heads, head_dim=self.latent.value_size), None
        return replace(
            self.only_layers([0] * count),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            attention_scale=scale,
            latent=None,
            delta=None,
            mamba=None,
            short_convolution=None,
            experts=None,
            parts=(),
            shapes=(),
            layer_inputs=None,
        )

    def for_context(self, num_tokens: int) -> ModelConfig:
        """The shape for texts of up to `num_tokens` tokens.

        LongRoPE has factors for texts within the original context and others for longer ones. transformers chooses by
        the text's current length. Here a text's keys are computed once, so the maximum length decides. The result
        equals transformers' for all texts if the maximum is within the original context.
        """
        if self.rope.kind != "longrope":
            return self
        is_long = num_tokens > self.rope.scaling[ORIGINAL_CONTEXT]
        return replace(self, rope=replace(self.rope, scaling={**self.rope.scaling, "is_long": is_long}))

    def longest_alike(self, num_tokens: int) -> int:
        """The longest maximum for which texts are computed as for a maximum of `num_tokens`."""
        if self.rope.kind == "longrope" and num_tokens <= self.rope.scaling[ORIGINAL_CONTEXT]:
            return min(self.max_context, int(self.rope.scaling[ORIGINAL_CONTEXT]))
        return self.max_context

    def differences(self) -> dict[str, Any]:
        """The differences from Llama's layout: fields that do not have their default."""
        optional = [field for field in fields(self) if field.default is not MISSING]
        return {f.name: getattr(self, f.name) for f in optional if getattr(self, f.name) != f.default}


# ------------------------------------------------------------------------------------------------ reading


def read_config(config: Json) -> ModelConfig:
    """The ModelConfig of a config.json; for a multimodal model, of its language model.

    Raises UnsupportedModelError for an architecture or feature that is not implemented, CheckpointError for a
    config.json with missing or contradictory values.
    """
    config = text_config(config)
    family = _family(config)
    config = {**DEFAULTS.get(config["model_type"], {}), **config}
    config = completed(config)
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    layers = number_of_layers(config)
    kv_heads = positive(config, "num_key_value_heads", heads)
    differing = family(config, layers)
    fields: Fields = {
        "model_type": config["model_type"],
        "vocab_size": positive(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": positive(config, "head_dim", hidden // heads),
        "intermediate_size": positive(config, "intermediate_size"),
        "rms_norm_eps": number_in(config, "rms_norm_eps", 1e-6, EPS_RANGE),
        "max_context": positive(config, "max_position_embeddings"),
        "windows": (None,) * layers,
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False),
        "activation": config.get("hidden_act", "silu"),
        **differing,
    }
    if "rope" not in differing:
        fields["rope"] = read_rope(config)
    if (rope := fields["rope"]).kind == "yarn":  # if a user added it, it extends max_position_embeddings
        stretched = rope.scaling[ORIGINAL_CONTEXT] * rope.scaling["factor"]
        fields["max_context"] = max(fields["max_context"], round(min(stretched, MAX_CONTEXT)))
    result = ModelConfig(**fields)
    _check_parts(result)
    return result


def is_multimodal(config: Json) -> bool:
    """Whether the model also reads images; offspec loads its language model only."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in MULTIMODAL


def text_config(config: Json) -> Json:
    """The language model's part of a config.json; for most models, all of it.

    Settings of the whole checkpoint (OUTER_KEYS) are outside that part.
    """
    if not is_multimodal(config):
        return config
    outer = {key: config[key] for key in OUTER_KEYS if key in config}
    inner = {**mapping(config, "text_config"), **outer}
    model_type = inner.get("model_type")
    model_type = model_type if isinstance(model_type, str) else MULTIMODAL[config["model_type"]]
    named = {"architectures": [TEXT_CLASSES[model_type]]} if model_type in TEXT_CLASSES else {}
    return {**inner, **named, "model_type": model_type}


def _family(config: Json) -> Callable[[Json, int], Fields]:
    """The family's entry. Raises UnsupportedModelError for unknown families and unsupported features."""
    model_type = config.get("model_type")
    supported = ", ".join([*FAMILIES, *MULTIMODAL])
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        architectures = config.get("architectures") or ["no architecture named"]
        named = ", ".join(map(show, architectures[:8])) if isinstance(architectures, list) else show(architectures)
        raise UnsupportedModelError(
            f"model_type {show(model_type)} ({named}) is not supported; supported: {supported} and their fine-tunes"
        )
    if config.get("is_causal") is False:
        raise UnsupportedModelError(
            "is_causal false (attention in both directions) is not supported; the model does not generate text"
        )
    if model_type not in PARTLY_ROTATED and read_rotary_share(config) != 1:
        raise UnsupportedModelError(f"partial_rotary_factor other than 1 is not supported for {model_type}")
    check_quantization(config)
    return family_fields(model_type)


def check_quantization(config: Json) -> None:
    """Raises UnsupportedModelError for an unsupported quantisation."""
    if quantization := config.get("quantization_config"):
        method = _quant_method(quantization)
        if method not in QUANT_METHODS:
            raise UnsupportedModelError(
                f"checkpoints quantised by {show(method)} are not supported; use one by {', '.join(QUANT_METHODS)}, or "
                "quantise the 16-bit one (offspec quantize)"
            )


def _check_parts(config: ModelConfig) -> None:
    """Checks that need several fields. Raises UnsupportedModelError, CheckpointError."""
    if (activation := config.activation) not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    if config.experts is not None:
        num_mixtures = sum("experts" in config.parts_of(layer) for layer in range(config.num_layers))
        if num_mixtures * config.experts.num > MAX_EXPERTS_IN_ALL:
            description = f"config.json: {num_mixtures} layers of {config.experts.num} experts exceed the limit"
            raise CheckpointError(f"{description} of {MAX_EXPERTS_IN_ALL}")
    for layer in range(config.num_layers):
        shape = config.shape_of(layer)
        rotary_dim = config.rotary_dim_of(layer)
        if config.num_heads % shape.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads "
                f"{shape.num_kv_heads}"
            )
        if shape.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim {shape.head_dim} is odd, but RoPE rotates pairs")
        if rotary_dim % 2 or not rotary_dim:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {config.rotary_share:g} gives RoPE {rotary_dim} of a head's "
                f"{shape.head_dim} dimensions, but RoPE rotates pairs"
            )
    for rope in (config.rope, config.local_rope):
        if rope is not None and rope.kind == "longrope":
            for key in (SHORT_FACTORS, LONG_FACTORS):
                if len(rope.scaling[key]) != config.rotary_dim_of(0) // 2:
                    num_listed, wanted = len(rope.scaling[key]), config.rotary_dim_of(0) // 2
                    raise CheckpointError(f"config.json: {key} lists {num_listed} numbers, RoPE rotates {wanted} pairs")


def _quant_method(quantization: object) -> str:
    """The name of the quantisation method; early files of bitsandbytes do not state it."""
    if not isinstance(quantization, Mapping):
        return "unknown"
    is_nameless = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    return str(quantization.get("quant_method") or ("bitsandbytes" if is_nameless else "unknown"))
