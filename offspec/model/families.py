"""Families of models, as data: each family's differences from Llama's layout.

A family is an entry of `FAMILIES`, a function from its config.json to the differing fields of `ModelConfig`. It also
has an entry of `DEFAULTS` if its defaults for missing keys differ from Llama's in transformers.
The source is transformers' configuration and modeling files (5.23).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offspec.loaders.files.checkpoint import show

from ..errors import CheckpointError, UnsupportedModelError
from .config_values import EPS_RANGE, Json, integer, interval, mapping, number_in, numbers, optional_number, positive
from .rope import yarn_magnitude
from .rope_config import (
    FULL,
    LAYER_KINDS,
    LINEAR,
    ORIGINAL_CONTEXT,
    SLIDING,
    THETA_RANGE,
    RopeConfig,
    has_null_theta,
    read_rope,
    read_ropes,
    read_rotary_share,
)

Fields = dict[str, Any]  # of ModelConfig
# Names of the number of a layer's experts; transformers 5 writes the second one for all families.
EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
MAX_EXPERTS = 10_000  # of a layer; a wrong config.json must not exhaust memory
CLAMPED = "clamped swiglu"  # gpt-oss's (`parts.mlp.clamped`)
# `parts.mlp` computes them.
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", CLAMPED)


@dataclass(frozen=True)
class NormPlaces:
    """Names of a layer's norms by place; None: no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> list[str]:
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [name for name in places if name is not None]


@dataclass(frozen=True)
class MlpNames:
    """Names of an MLP's matrices.

    gate: None without a gate; equal to `up` if one matrix is both, with the gate's rows first. is_interleaved: rows of
    the gate and of `up` alternate in it.
    """

    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    is_interleaved: bool = False

    @property
    def is_fused(self) -> bool:
        return self.gate == self.up


EXPERT_MLP = MlpNames("gate_proj", "up_proj", "down_proj")
JOINED_EXPERT_MLP = MlpNames("gate_up_proj", "gate_up_proj", "down_proj")
SHARED_EXPERTS = MlpNames("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")
SHARED_EXPERT = MlpNames("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")


@dataclass(frozen=True)
class QKNorm:
    """How queries and keys are normed.

    over: "head" (each head, all with one weight [head_dim]), "own head" (each head with its own row of a weight
    [heads, head_dim]) or "projection" (all heads at once, weight [heads * head_dim]).
    """

    queries: str = "self_attn.q_norm"
    keys: str = "self_attn.k_norm"
    over: str = "head"
    is_after_rope: bool = False


@dataclass(frozen=True)
class DeltaNames:
    """Names of a gated delta net's tensors behind `linear_attn.`.

    inputs: matrices that give queries, keys and values, in this order, together or each its own. convolutions: the
    parts of the kernel in the same order. is_grouped: `inputs` is one matrix, which gives queries, keys, values and
    gates of a key head, then those of the next one. rate: of the update; step: of the decay; equal if one matrix gives
    both, of a key head, then of the next one.
    """

    inputs: tuple[str, ...] = ("in_proj_qkv",)
    convolutions: tuple[str, ...] = ("conv1d",)
    gate: str = "in_proj_z"
    rate: str = "in_proj_b"
    step: str = "in_proj_a"
    norm: str = "norm"
    output: str = "out_proj"
    is_grouped: bool = False


@dataclass(frozen=True)
class DeltaShape:
    """The shape of gated delta nets (`parts.delta_net`).

    num_heads, value_size: of values and states; key_heads, key_size: of queries and keys. kernel: tokens that the
    convolution sees. top_rate: of an update; above 1, a state may change its sign. norm_eps: of the outputs' norm.
    kernel_parts: channels of each part of the kernel; empty: as in `inputs`.
    """

    num_heads: int
    value_size: int
    key_heads: int
    key_size: int
    kernel: int
    norm_eps: float
    top_rate: float = 1.0
    names: DeltaNames = DeltaNames()
    kernel_parts: tuple[int, ...] = ()

    @property
    def values(self) -> int:
        """Numbers of all heads' values of a row."""
        return self.num_heads * self.value_size

    @property
    def keys(self) -> int:
        """Numbers of all heads' keys of a row."""
        return self.key_heads * self.key_size

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of a row."""
        return 2 * self.keys + self.values

    @property
    def inputs(self) -> tuple[int, ...]:
        """Channels of queries, keys and values that each matrix of `names.inputs` gives of a row."""
        return (self.channels,) if len(self.names.inputs) == 1 else (self.keys, self.keys, self.values)

    @property
    def rows(self) -> dict[str, int]:
        """Matrix → the numbers that it gives of a row."""
        names = self.names
        if names.is_grouped:
            rows = {names.inputs[0]: self.channels + self.values}
        else:
            rows = {**dict(zip(names.inputs, self.inputs, strict=True)), names.gate: self.values}
        rates = 2 * self.num_heads if names.rate == names.step else self.num_heads
        return rows | dict.fromkeys((names.rate, names.step), rates)


@dataclass(frozen=True)
class ShortConvolutionShape:
    """The shape of short convolutions (`parts.short_convolution`). kernel: tokens that one sees."""

    kernel: int
    has_bias: bool


@dataclass(frozen=True)
class MambaShape:
    """The shape of Mamba2 layers (`parts.mamba`).

    num_heads, head_size: of inputs x; num_groups, state_size: of B and C. kernel: tokens that the convolution sees.
    prefix: of the tensors' names in a layer. step_limits: the least and the largest dt. norm: of outputs by groups,
    "before gate" or "after gate"; None: only the gate.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel: int
    prefix: str = "mamba"
    step_limits: tuple[float, float] = (0.0, math.inf)
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    norm: str | None = "after gate"

    @property
    def inner(self) -> int:
        """Numbers of all heads' inputs x of a row."""
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C of a row."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def widths(self) -> list[int]:
        """Numbers of a row's z, x, B, C and dt, in the order in which the projection gives them."""
        groups = self.num_groups * self.state_size
        return [self.inner, self.inner, groups, groups, self.num_heads]


@dataclass(frozen=True)
class LatentShape:
    """The shape of latent attention (`parts.latent_attention`).

    rank: numbers of a token's latent, of which all heads' keys and values are made. query_rank: of the queries' latent;
    None: queries are made of hidden states. key_size, rope_size: numbers of a head's query and key without RoPE, and
    with it; the latter are one key for all heads. value_size: of a head's value. norm_eps: of the latents' norms.
    is_split: the matrices of keys, transposed, and of values are two.
    """

    rank: int
    query_rank: int | None
    key_size: int
    rope_size: int
    value_size: int
    norm_eps: float = 1e-6
    is_split: bool = False

    @property
    def entry_size(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.rank + self.rope_size


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts of which a row uses `num_used`: those whose `num_ranked` best experts have the largest sum."""

    num: int
    num_used: int
    num_ranked: int = 2


@dataclass(frozen=True)
class ExpertsShape:
    """The shape of a layer's mixture of experts (`parts.experts`), the same in all layers.

    inner_size: of an expert. scores: of experts by the router's logits: "softmax", "sigmoid", or "softmax of chosen",
    which is over the chosen ones only. is_normed: the chosen ones' scores are divided by their sum; then all are
    multiplied by `scale`. correction: the name of an fp32 vector added to the scores that choose. has_fp32_router: the
    router's product is in fp32. has_bias: of the router and the experts. shared_size: of an MLP that every row uses; 0:
    there is none. shared_gate: its output is multiplied by the sigmoid of this matrix's product. router, prefix,
    shared: names within a layer; names: within an expert. joined: other names, in checkpoints with one tensor for all
    experts' gates and `up`. is_transposed: plain tensors of all experts are [experts, inputs, outputs].
    """

    num: int
    num_used: int
    inner_size: int
    scores: str = "softmax"
    is_normed: bool = True
    scale: float = 1.0
    groups: ExpertGroups | None = None
    correction: str | None = None
    has_fp32_router: bool = False
    has_bias: bool = False
    shared_size: int = 0
    shared_gate: str | None = None
    router: str = "mlp.gate"
    prefix: str = "mlp.experts"
    shared: MlpNames = SHARED_EXPERTS
    names: MlpNames = EXPERT_MLP
    joined: MlpNames | None = None
    is_transposed: bool = False


@dataclass(frozen=True)
class Multipliers:
    """Falcon-H1's factors (after 2203.03466): of the inputs and outputs of attention and Mamba2, of the MLP's gate and
    output, and of z, x, B, C and dt.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer, in models whose layers differ.

    number: the layer's number in the model. entries_of: the earlier layer whose KV entries it attends to; None: its
    own. are_values_keys: values are the keys' projection, before its norm and RoPE.
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    number: int
    entries_of: int | None = None
    are_values_keys: bool = False


@dataclass(frozen=True)
class LayerInputs:
    """The shape of what each layer gets of a token, beside hidden states (`parts.layer_input`).

    size: numbers of a token in one layer. num_layers: of the model. vocab_size: rows of their table.
    """

    size: int
    num_layers: int
    vocab_size: int

    @property
    def width(self) -> int:
        """Numbers of a token in all layers."""
        return self.size * self.num_layers


# Llama's layout, and differences that several families share.
HEADS_NORMED = QKNorm()
GATED_MLP = MlpNames()
NORMS_BEFORE = NormPlaces()
FEED_FORWARD = MlpNames("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")
FUSED_MLP = MlpNames("mlp.gate_up_proj", "mlp.gate_up_proj")
SHARED_MLP = MlpNames("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear")
SPLIT_SHARED_MLP = MlpNames("shared_mlp.gate_linear", "shared_mlp.up_linear", "shared_mlp.output_linear")  # in GGUF
UNGATED_MLP = MlpNames(gate=None)
# Kinds of layers of hybrids with Mamba2, by their names in config.json.
NEMOTRON_H_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
MIXERS = {"mamba": "mamba", LINEAR: "mamba", "attention": "attention", FULL: "attention", "mlp": "mlp"}
NORMS_BEHIND = NormPlaces(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORMS_AROUND = NormPlaces(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
GROUPED_DELTA = DeltaNames(inputs=("in_proj_qkvz",), rate="in_proj_ba", step="in_proj_ba", is_grouped=True)
GROUPED_RATES = DeltaNames(rate="in_proj_ba", step="in_proj_ba")  # in GGUF
OLMO_DELTA = DeltaNames(
    inputs=("q_proj", "k_proj", "v_proj"),
    convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
    gate="g_proj",
    rate="b_proj",
    step="a_proj",
    norm="o_norm",
    output="o_proj",
)
# Kinds of layers in `layer_types` → the part beside the MLP; attention is the second.
DELTA_NETS = {LINEAR: "delta net", FULL: "attention"}
SHORT_CONVOLUTIONS = {"conv": "short convolution", FULL: "attention"}


# ------------------------------------------------------------------------------------------------ windows


def _window(config: Json) -> int | None:
    """Mistral and Qwen: null is no window; without the key it is 4096, as in transformers."""
    return None if config.get("sliding_window", 4096) is None else positive(config, "sliding_window", 4096)


def _qwen_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: windows only with `use_sliding_window`: from layer `max_window_layers` on, or as in `layer_types`."""
    window = _window(config) if config.get("use_sliding_window") else None
    if config.get("layer_types") is not None:
        return _listed_windows(config, num_layers, window)
    first = integer(config, "max_window_layers", 28, least=0)
    return tuple(window if i >= first else None for i in range(num_layers))


def _listed_windows(config: Json, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Windows in the layers that `layer_types` lists."""
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        listed = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise CheckpointError(f"config.json: layer_types lists {listed} layers, num_hidden_layers is {num_layers}")
    if unknown := [kind for kind in kinds if kind not in LAYER_KINDS]:
        raise UnsupportedModelError(f"layer type {unknown[0]!r} is not supported; supported: {', '.join(LAYER_KINDS)}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _alternating_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Windows as in `layer_types`; without it, each `sliding_window_pattern`-th layer has full attention."""
    if (window := _window(config)) is None and config.get("layer_types") is None:
        return (None,) * num_layers
    if config.get("layer_types") is None:
        pattern = positive(config, "sliding_window_pattern")
        kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
        config = {**config, "layer_types": kinds}
    return _listed_windows(config, num_layers, window)


def _refuse(config: Json, *keys: str) -> None:
    """Raise UnsupportedModelError if one of `keys` enables its feature."""
    for key in keys:
        if config.get(key):
            raise UnsupportedModelError(f"{key} {config[key]!r} is not supported for {config['model_type']}")


def _biases(config: Json, attention: str = "attention_bias", mlp: str = "mlp_bias") -> Fields:
    """The fields of biases, from the keys that enable them."""
    return {
        "qkv_bias": bool(config.get(attention)),
        "o_bias": bool(config.get(attention)),
        "mlp_bias": bool(config.get(mlp)),
    }


def _expert_layers(config: Json, num_layers: int) -> tuple[tuple[str, ...], ...]:
    """Parts of layers with experts in those that Qwen's keys name, and an MLP in the others."""
    step, dense = integer(config, "decoder_sparse_step", 1, least=1), config.get("mlp_only_layers") or []
    is_sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    return tuple(("attention", "experts" if sparse else "mlp") for sparse in is_sparse)


def _num_experts(config: Json, used: str = "num_experts_per_tok") -> tuple[int, int]:
    """The numbers of a layer's experts, and of those that a row uses, under key `used`. Raises CheckpointError."""
    key = next((key for key in (*EXPERTS_KEYS, "default_experts") if key in config), EXPERTS_KEYS[0])
    num, num_used = positive(config, key), positive(config, used)
    if num_used > num or num > MAX_EXPERTS:
        raise CheckpointError(f"config.json: {used} {num_used} of {num} experts; at most {MAX_EXPERTS} can exist")
    return num, num_used


# ------------------------------------------------------------------------------------------------ families


def _llama(config: Json, num_layers: int) -> Fields:
    """Llama; also Arcee, whose MLP has no gate (see `FAMILIES`)."""
    return _biases(config)


def _mixtral(config: Json, num_layers: int) -> Fields:
    """Mixtral: the softmax over all experts, then over the sum of the chosen ones."""
    num, num_used = _num_experts(config)
    shape = ExpertsShape(
        num,
        num_used,
        positive(config, "intermediate_size"),
        router="block_sparse_moe.gate",
        prefix="block_sparse_moe.experts",
        names=MlpNames("w1", "w3", "w2"),
    )
    return {**_mistral(config, num_layers), "experts": shape, "parts": (("attention", "experts"),) * num_layers}


def _qwen3_moe(config: Json, num_layers: int) -> Fields:
    """Qwen3-MoE: Qwen3's attention, with another default of the heads' size."""
    num, num_used = _num_experts(config)
    size = positive(config, "hidden_size") // positive(config, "num_attention_heads")
    config = {**config, "head_dim": positive(config, "head_dim", max(1, size))}
    inner, is_normed = positive(config, "moe_intermediate_size"), bool(config.get("norm_topk_prob", False))
    shape = ExpertsShape(num, num_used, inner, is_normed=is_normed)
    return {**_qwen3(config, num_layers), "experts": shape, "parts": _expert_layers(config, num_layers)}


def _qwen2_moe(config: Json, num_layers: int) -> Fields:
    """Qwen2-MoE: Qwen2's attention, and a shared expert with a gate."""
    windows = _qwen_windows({**config, "layer_types": _qwen2_moe_layer_types(config, num_layers)}, num_layers)
    return {
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "windows": windows,
        "experts": _qwen_experts(config),
        "parts": _expert_layers(config, num_layers),
    }


def _qwen2_moe_layer_types(config: Json, num_layers: int) -> Any:
    """Every second one of the first `max_window_layers` has a window, unless the layers are listed."""
    first = integer(config, "max_window_layers", 28, least=0)
    kinds = [SLIDING if i % 2 == 0 and i < first else FULL for i in range(num_layers)]
    return kinds if config.get("layer_types") is None else config["layer_types"]


def _qwen_experts(config: Json) -> ExpertsShape:
    """Of Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE, with a shared expert that has a gate."""
    num, num_used = _num_experts(config)
    return ExpertsShape(
        num,
        num_used,
        positive(config, "moe_intermediate_size"),
        is_normed=bool(config.get("norm_topk_prob")),
        shared_size=positive(config, "shared_expert_intermediate_size"),
        shared_gate="mlp.shared_expert_gate",
        shared=SHARED_EXPERT,
        joined=JOINED_EXPERT_MLP,
    )


def _olmoe(config: Json, num_layers: int) -> Fields:
    """OLMoE: queries and keys are normed over all heads."""
    _refuse(config, "clip_qkv")
    num, num_used = _num_experts(config)
    inner, is_normed = positive(config, "intermediate_size"), bool(config.get("norm_topk_prob"))
    return _biases(config, mlp="") | {
        "qk_norm": True,
        "qk_norm_form": QKNorm(over="projection"),
        "experts": ExpertsShape(num, num_used, inner, is_normed=is_normed),
        "parts": (("attention", "experts"),) * num_layers,
    }


def _gpt_oss(config: Json, num_layers: int) -> Fields:
    """gpt-oss: sinks, biases everywhere, every second layer with a window, and experts with a clamped activation."""
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.get(key, value) != value:
            raise UnsupportedModelError(f"{key} {show(config[key])} is not supported for gpt_oss, only {value}")
    num, num_used = _num_experts(config)
    is_split = bool(config.get("has_split_experts"))
    shape = ExpertsShape(
        num,
        num_used,
        positive(config, "intermediate_size"),
        scores="softmax of chosen",
        has_bias=True,
        router="mlp.router",
        names=EXPERT_MLP if is_split else MlpNames("gate_up_proj", "gate_up_proj", "down_proj", is_interleaved=True),
        is_transposed=not is_split,
    )
    config = {"sliding_window_pattern": 2, **config}
    return _biases(config, mlp="") | {
        "has_sinks": True,
        "windows": _alternating_windows(config, num_layers),
        "activation": CLAMPED,
        "experts": shape,
        "parts": (("attention", "experts"),) * num_layers,
    }


def _glm4_moe(config: Json, num_layers: int) -> Fields:
    """GLM-4.5 and newer: the first layers are dense."""
    num, num_used = _num_experts(config)
    inner, num_dense = positive(config, "moe_intermediate_size"), integer(config, "first_k_dense_replace", 1, least=0)
    shape = ExpertsShape(
        num,
        num_used,
        inner,
        scores="sigmoid",
        is_normed=bool(config.get("norm_topk_prob", True)),
        scale=number_in(config, "routed_scaling_factor", 1.0),
        groups=_expert_groups(config, num, num_used),
        correction="mlp.gate.e_score_correction_bias",
        has_fp32_router=True,
        shared_size=inner * integer(config, "n_shared_experts", 1, least=0),
    )
    return {
        "qkv_bias": bool(config.get("attention_bias")),
        "qk_norm": bool(config.get("use_qk_norm")),
        "rotary_share": read_rotary_share(config),
        "experts": shape,
        "parts": tuple(("attention", "mlp" if i < num_dense else "experts") for i in range(num_layers)),
    }


def _expert_groups(config: Json, num: int, num_used: int, num_ranked: int = 2) -> ExpertGroups | None:
    """Groups of experts by DeepSeek's keys; None if all of them are used. Raises CheckpointError.

    num_ranked: how many of a group's experts rank it.
    """
    groups = ExpertGroups(positive(config, "n_group", 1), positive(config, "topk_group", 1), num_ranked)
    if groups.num_used >= groups.num:
        return None
    size = num // groups.num
    if num % groups.num or size < groups.num_ranked or groups.num_used * size < num_used:
        used = f"topk_group {groups.num_used} of n_group {groups.num}"
        raise CheckpointError(f"config.json: {used} groups cannot give {num_used} of {num} experts")
    return groups


def _minimax_m2(config: Json, num_layers: int) -> Fields:
    """MiniMax-M2: queries and keys are normed over all heads. Releases give RoPE's share as `rotary_dim`."""
    num, num_used = _num_experts(config)
    shape = ExpertsShape(
        num,
        num_used,
        positive(config, "intermediate_size"),
        scores="sigmoid",
        correction="block_sparse_moe.e_score_correction_bias",
        router="block_sparse_moe.gate",
        prefix="block_sparse_moe.experts",
        names=MlpNames("w1", "w3", "w2"),
    )
    share = read_rotary_share(config)
    if config.get("rotary_dim") is not None and share == 1:
        share = positive(config, "rotary_dim") / positive(config, "head_dim")
    return {
        "qk_norm": True,
        "qk_norm_form": QKNorm(over="projection"),
        "rotary_share": share,
        "experts": shape,
        "parts": (("attention", "experts"),) * num_layers,
    }


def _latent(config: Json, dense: Sequence[bool]) -> Fields:
    """Latent attention. dense: which layers have an MLP; the others have experts."""
    if config.get("moe_layer_freq") != 1:
        _refuse(config, "moe_layer_freq")
    query_rank = None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank")
    latent = LatentShape(
        rank=positive(config, "kv_lora_rank"),
        query_rank=query_rank,
        key_size=positive(config, "qk_nope_head_dim"),
        rope_size=positive(config, "qk_rope_head_dim"),
        value_size=positive(config, "v_head_dim"),
        is_split=bool(config.get("has_split_latent")),
    )
    rope = read_rope(config)
    return {
        "num_kv_heads": 1,
        "head_dim": latent.entry_size,
        "latent": latent,
        "rope": rope,
        "attention_scale": (latent.key_size + latent.rope_size) ** -0.5 * _squared_magnitude(rope),
        "has_interleaved_rope": bool(config.get("rope_interleave", True)),
        "parts": tuple(("latent attention", "mlp" if is_dense else "experts") for is_dense in dense),
    }


def _dense_layers(config: Json, num_layers: int) -> list[bool]:
    """Which layers have an MLP: the first ones, or those that `mlp_layer_types` lists. Raises CheckpointError."""
    if (kinds := config.get("mlp_layer_types")) is None:
        num_dense = integer(config, "first_k_dense_replace", 0, least=0)
        return [layer < num_dense for layer in range(num_layers)]
    is_list = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not is_list or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: mlp_layer_types must list {num_layers} of dense, sparse")
    return [kind == "dense" for kind in kinds]


def _squared_magnitude(rope: RopeConfig) -> float:
    """The growth of DeepSeek's scores in stretched texts: YaRN's, on numbers without RoPE, too."""
    weight = optional_number(rope.scaling, "mscale_all_dim") if rope.scaling.get("mscale_all_dim") else None
    return 1.0 if weight is None else yarn_magnitude(rope.scaling["factor"], weight) ** 2


def _deepseek_experts(config: Json, num_ranked: int) -> ExpertsShape:
    """num_ranked: how many of a group's experts rank it."""
    num, num_used = _num_experts(config)
    inner = positive(config, "moe_intermediate_size")
    return ExpertsShape(
        num,
        num_used,
        inner,
        is_normed=bool(config.get("norm_topk_prob")),
        scale=number_in(config, "routed_scaling_factor", 1.0),
        groups=_expert_groups(config, num, num_used, num_ranked),
        has_fp32_router=True,
        shared_size=inner * integer(config, "n_shared_experts", 0, least=0),
    )


def _deepseek_v2(config: Json, num_layers: int) -> Fields:
    """DeepSeek-V2 and V2-Lite, which has neither a latent of queries nor groups of experts."""
    _refuse(config, "norm_topk_prob")
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        _refuse(config, "topk_method")
    shape = _deepseek_experts(config, num_ranked=1)
    return {
        **_biases(config),
        **_latent(config, _dense_layers(config, num_layers)),
        "has_interleaved_rope": True,
        "experts": replace(shape, groups=None) if method == "greedy" else shape,
    }


def _deepseek_v3(config: Json, num_layers: int) -> Fields:
    """DeepSeek-V3 and R1, GLM-4.7-Flash, Kimi K2: experts' scores are sigmoids, plus a correction where they choose."""
    for key, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if config.get(key) != value:
            _refuse(config, key)
    shape = _deepseek_experts(config, num_ranked=2)
    return {
        **_biases(config, mlp=""),
        **_latent(config, _dense_layers(config, num_layers)),
        "experts": replace(shape, scores="sigmoid", correction="mlp.gate.e_score_correction_bias"),
    }


def _mistral4(config: Json, num_layers: int) -> Fields:
    """Mistral Small 4: softmax scores, and queries that are scaled by their position."""
    fields = _latent(config, _dense_layers(config, num_layers))
    return {
        **_biases(config, mlp=""),
        **fields,
        "experts": replace(_deepseek_experts(config, num_ranked=2), joined=JOINED_EXPERT_MLP),
        "query_growth": _query_growth(fields["rope"]),
    }


def _youtu(config: Json, num_layers: int) -> Fields:
    return _biases(config, mlp="") | _latent(config, [True] * num_layers)


def _mistral(config: Json, num_layers: int) -> Fields:
    """Mistral, and Ministral, which lists its layers' kinds, under either name."""
    window = _window(config)
    if config.get("layer_types") is not None:
        return {"windows": _listed_windows(config, num_layers, window)}
    return {"windows": (window,) * num_layers}


def _ministral3(config: Json, num_layers: int) -> Fields:
    """Queries are scaled by their position, as in Llama 4."""
    rope = read_rope(config)
    windows = (_window({"sliding_window": None, **config}),) * num_layers
    return {"windows": windows, "rope": rope, "query_growth": _query_growth(rope)}


def _query_growth(rope: RopeConfig) -> tuple[float, int] | None:
    """Llama 4's scaling of queries, if the family has it."""
    beta = optional_number(rope.scaling, "llama_4_scaling_beta")
    return None if beta is None else (beta, positive(rope.scaling, ORIGINAL_CONTEXT))


def _qwen2(config: Json, num_layers: int) -> Fields:
    return {"qkv_bias": True, "windows": _qwen_windows(config, num_layers)}


def _qwen3(config: Json, num_layers: int) -> Fields:
    bias = bool(config.get("attention_bias"))
    windows = _qwen_windows(config, num_layers)
    head_dim = positive(config, "head_dim", 128)  # other families' default is hidden_size / heads
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "windows": windows, "head_dim": head_dim}


def _qwen3_5(config: Json, num_layers: int) -> Fields:
    """Gated delta nets in most layers; attention with a gate in the others, and RoPE for a share of each head."""
    interval = positive(config, "full_attention_interval", 4)
    mixers = _mixers(config, num_layers, DELTA_NETS, [(i + 1) % interval == 0 for i in range(num_layers)])
    bias, rope = bool(config.get("attention_bias")), read_rope(config)
    of_text = {key: value for key, value in rope.scaling.items() if not key.startswith("mrope")}  # that is of images
    return {
        "rope": replace(rope, scaling=of_text),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "norm": "rms plus one",
        "head_dim": positive(config, "head_dim", 256),
        "rotary_share": read_rotary_share(config),
        "has_attention_gate": True,
        "delta": DeltaShape(
            num_heads=positive(config, "linear_num_value_heads", 32),
            value_size=positive(config, "linear_value_head_dim", 128),
            key_heads=positive(config, "linear_num_key_heads", 16),
            key_size=positive(config, "linear_key_head_dim", 128),
            kernel=positive(config, "linear_conv_kernel_dim", 4),
            norm_eps=number_in(config, "rms_norm_eps", 1e-6, EPS_RANGE),
        ),
        "parts": tuple((mixer, "mlp") for mixer in mixers),
    }


def _qwen3_5_moe(config: Json, num_layers: int) -> Fields:
    """Qwen3.5-MoE: Qwen3.5's layers, with experts in all of them."""
    fields = _qwen3_5(config, num_layers)
    experts = _qwen_experts({**config, "norm_topk_prob": True})
    return fields | {"experts": experts, "parts": tuple((mixer, "experts") for mixer, _ in fields["parts"])}


def _qwen3_next(config: Json, num_layers: int) -> Fields:
    """Qwen3-Next: Qwen3.5's layers with other matrices, and experts in those that Qwen's keys name."""
    fields, second = _qwen3_5(config, num_layers), _expert_layers(config, num_layers)
    return fields | {
        "delta": replace(fields["delta"], names=GROUPED_RATES if config.get("has_split_inputs") else GROUPED_DELTA),
        "experts": _qwen_experts(config),
        "parts": tuple((mixer, part) for (mixer, _), (_, part) in zip(fields["parts"], second, strict=True)),
    }


def routed_inner_size(config: Json) -> Json:
    """A config.json with the inner size of the experts that a row uses, for a family without dense MLPs."""
    used = positive(config, "moe_intermediate_size") * positive(config, "num_experts_per_tok")
    return {**config, "intermediate_size": used}


def _mixers(config: Json, num_layers: int, parts: Mapping[str, str], attends: Sequence[bool]) -> list[str]:
    """Each layer's part beside its MLP. parts: kinds in `layer_types` → parts; attends: without `layer_types`."""
    kinds, (other, attention) = config.get("layer_types"), parts
    if kinds is None:
        kinds = [attention if each else other for each in attends]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in tuple(parts) for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must list {num_layers} of {', '.join(parts)}")
    return [parts[kind] for kind in kinds]


def _gemma(config: Json, num_layers: int) -> Fields:
    """The first release's `gelu` means the tanh approximation."""
    _refuse(config, "use_bidirectional_attention")
    fields = {
        **_biases(config, mlp=""),
        "norm": "rms plus one",
        "embedding_scale": math.sqrt(positive(config, "hidden_size")),
        "is_embedding_scale_rounded": True,
    }
    return fields | ({"activation": "gelu_pytorch_tanh"} if config["hidden_act"] == "gelu" else {})


def _gemma2(config: Json, num_layers: int) -> Fields:
    return _gemma(config, num_layers) | {
        "activation": config["hidden_activation"] or "gelu_pytorch_tanh",
        "norms": NORMS_AROUND,
        "windows": _alternating_windows(config, num_layers),
        "attention_scale": number_in(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_cap": optional_number(config, "attn_logit_softcapping"),
        "logit_cap": optional_number(config, "final_logit_softcapping"),
    }


def _gemma3(config: Json, num_layers: int) -> Fields:
    rope, local = read_ropes(config)
    fields = _gemma2(config, num_layers) | {"qk_norm": True, "rope": rope}
    # transformers ignores config.json's cap of attention for this family.
    return fields | {"attention_cap": None, "local_rope": None if local == rope else local}


def _gemma4(config: Json, num_layers: int) -> Fields:
    """The dense ones. Layers with full attention have other heads; the last layers may share earlier ones' entries."""
    _refuse(config, "enable_moe_block")
    if config.get("use_bidirectional_attention") == "all":
        _refuse(config, "use_bidirectional_attention")
    config = {**config, "rope_parameters": mapping(config, "rope_parameters") or _GEMMA4_ROPES}
    rope, local = read_ropes(config)
    windows = (*_alternating_windows(config, num_layers)[:-1], None)  # transformers makes the last one full
    size = integer(config, "hidden_size_per_layer_input", 256, least=0)
    inputs = LayerInputs(size, num_layers, positive(config, "vocab_size_per_layer_input", 262144)) if size else None
    return {
        **_biases(config, mlp=""),
        "activation": config["hidden_activation"],
        "attention_scale": 1.0,
        "embedding_scale": math.sqrt(positive(config, "hidden_size")),
        "is_embedding_scale_rounded": True,
        "has_value_norm": True,
        "layer_inputs": inputs,
        "local_rope": local,
        "logit_cap": optional_number(config, "final_logit_softcapping"),
        "norms": NORMS_AROUND,
        "parts": (("attention", "mlp", *(("layer input",) if inputs else ()), "layer scale"),) * num_layers,
        "qk_norm": True,
        "rope": rope,
        "shapes": tuple(_gemma4_shape(config, windows, layer) for layer in range(num_layers)),
        "windows": windows,
    }


def _gemma4_shape(config: Json, windows: Sequence[int | None], layer: int) -> LayerShape:
    is_full, num_own = windows[layer] is None, len(windows) - integer(config, "num_kv_shared_layers", 0, least=0)
    shared = None
    if layer >= num_own:
        alike = [i for i in range(max(num_own, 0)) if (windows[i] is None) == is_full]
        if not alike:
            raise CheckpointError(f"config.json: num_kv_shared_layers leaves layer {layer} no earlier one of its kind")
        shared = alike[-1]
    has_wide_mlp = shared is not None and bool(config.get("use_double_wide_mlp"))
    are_values_keys = is_full and bool(config.get("attention_k_eq_v"))
    full = {"head_dim": positive(config, "global_head_dim", 512)}
    if are_values_keys and config.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = positive(config, "num_global_key_value_heads")
    listed = mapping(config, "per_layer_config")  # transformers 5 lists the layers that differ
    differing = mapping(listed, str(layer)) if "per_layer_config" in config else full if is_full else {}
    return LayerShape(
        num_kv_heads=positive({**config, **differing}, "num_key_value_heads"),
        head_dim=positive({**config, **differing}, "head_dim"),
        intermediate_size=positive(config, "intermediate_size") * (2 if has_wide_mlp else 1),
        number=layer,
        entries_of=shared,
        are_values_keys=are_values_keys,
    )


def _phi3(config: Json, num_layers: int) -> Fields:
    window = _window({"sliding_window": None, **config})
    return {
        "has_fused_qkv": True,
        "mlp": FUSED_MLP,
        "windows": (window,) * num_layers,
        "rotary_share": read_rotary_share(config),
        "rope": _phi3_rope(config),
    }


def _phi3_rope(config: Json) -> RopeConfig:
    """Early files call LongRoPE su, or yarn."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = mapping(config, key)
    if (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
        config = {**config, key: {**scaling, "rope_type": "longrope"}}
    return read_rope(config)


def _glm(config: Json, num_layers: int) -> Fields:
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "mlp": FUSED_MLP,
        "rotary_share": read_rotary_share(config),
        "has_interleaved_rope": True,
    }


def _glm4(config: Json, num_layers: int) -> Fields:
    norms = NormPlaces("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return _glm(config, num_layers) | {"norms": norms}


def _granite(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {
        "embedding_scale": number_in(config, "embedding_multiplier", 1.0),
        "residual_scale": number_in(config, "residual_multiplier", 1.0),
        "attention_scale": number_in(config, "attention_multiplier", 1.0),
        "logit_scale": 1 / number_in(config, "logits_scaling", 1.0),
    }


def _granite_moe(config: Json, num_layers: int) -> Fields:
    return _granite(config, num_layers) | {
        "mlp_bias": False,
        "experts": _granite_experts(config),
        "parts": (("attention", "experts"),) * num_layers,
    }


def _granite_experts(config: Json, shared_size: int = 0) -> ExpertsShape:
    """Of Granite, whose tensors `checkpoints.language_model` renames."""
    num, num_used = _num_experts(config)
    return ExpertsShape(
        num,
        num_used,
        positive(config, "intermediate_size"),
        scores="softmax of chosen",
        shared_size=shared_size,
        router="block_sparse_moe.router.layer",
        prefix="block_sparse_moe.experts",
        shared=SPLIT_SHARED_MLP if config.get("has_split_mlp") else SHARED_MLP,
        names=EXPERT_MLP if config.get("has_split_mlp") else JOINED_EXPERT_MLP,
    )


def _mamba_mixers(config: Json, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer of a hybrid with Mamba2, under its old name or transformers 5's."""
    kinds = config.get("layers_block_type") or config.get("layer_types") or ["mamba"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers (num_hidden_layers)")
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in MIXERS]:
        description = f"layer type {show(unknown[0])} is not supported for {config['model_type']}"
        raise UnsupportedModelError(f"{description}; supported: {', '.join(MIXERS)}")
    return tuple(MIXERS[kind] for kind in kinds)


def _mamba(config: Json, inner: int, **differing: Any) -> MambaShape:
    """Mamba2 by the keys of Granite 4 H, Bamba and Falcon-H1. inner: numbers of all heads' inputs of a row."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {show(config['hidden_act'])} is not supported behind a convolution")
    heads = positive(config, "mamba_n_heads", 128)
    size = config.get("mamba_d_head", "auto")
    shape = MambaShape(
        num_heads=heads,
        head_size=max(1, inner // heads) if size == "auto" else positive(config, "mamba_d_head"),
        num_groups=positive(config, "mamba_n_groups", 1),
        state_size=positive(config, "mamba_d_state", 256),
        kernel=positive(config, "mamba_d_conv", 4),
        step_limits=interval(config, "time_step_limit", (0.0, math.inf)),
        has_conv_bias=bool(config.get("mamba_conv_bias", True)),
        has_in_bias=bool(config.get("mamba_proj_bias")),
        has_out_bias=bool(config.get("mamba_proj_bias")),
    )
    if shape.inner != inner:
        description = f"config.json: mamba_n_heads {heads} times mamba_d_head {shape.head_size} must be {inner}"
        raise CheckpointError(f"{description} (mamba_expand times hidden_size, or mamba_d_ssm)")
    return _checked(replace(shape, **differing))


def _checked(shape: MambaShape) -> MambaShape:
    if shape.num_heads % shape.num_groups:
        description = (
            f"config.json: {shape.num_heads} heads of Mamba2 are not a multiple of its {shape.num_groups} groups"
        )
        raise CheckpointError(description)
    return shape


def _expanded(config: Json) -> int:
    return positive(config, "mamba_expand", 2) * positive(config, "hidden_size")


def _granite_hybrid(config: Json, num_layers: int) -> Fields:
    """Mamba2 or attention, and one MLP, or experts beside it; in some models attention in each layer."""
    mixers, shared_size = _mamba_mixers(config, num_layers), positive(config, "shared_intermediate_size")
    has_experts = bool(config.get("num_local_experts"))
    if (position := config.get("position_embedding_type")) not in ("rope", "nope", None):
        raise UnsupportedModelError(f"position_embedding_type {position!r} is not supported")
    return _granite(config, num_layers) | {
        "mlp_bias": False,
        "intermediate_size": shared_size,
        "experts": _granite_experts(config, shared_size) if has_experts else None,
        "mlp": SPLIT_SHARED_MLP if config.get("has_split_mlp") else SHARED_MLP,
        "unrotated": () if position == "rope" else tuple(range(num_layers)),
        "mamba": _mamba(config, _expanded(config)) if "mamba" in mixers else None,
        "parts": tuple((mixer, "experts" if has_experts else "mlp") for mixer in mixers),
    }


def _bamba(config: Json, num_layers: int) -> Fields:
    """Mamba2 in all layers but those that `attn_layer_indices` lists."""
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list):
        raise CheckpointError(f"config.json: attn_layer_indices must be a list, not {show(indices)}")
    mixers = tuple("attention" if i in indices else "mamba" for i in range(num_layers))
    return _biases(config) | {
        "norms": NormPlaces(before_mlp="pre_ff_layernorm"),
        "mlp": FEED_FORWARD,
        "final_norm": "model.final_layernorm.weight",
        "rotary_share": read_rotary_share(config),
        "mamba": _mamba(config, _expanded(config)),
        "parts": tuple((mixer, "mlp") for mixer in mixers),
    }


def _falcon_h1(config: Json, num_layers: int) -> Fields:
    """Attention and Mamba2 side by side in each layer, and factors almost everywhere."""
    inner = positive(config, "mamba_d_ssm", 1024) if config.get("mamba_d_ssm", 0) is not None else _expanded(config)
    norm = "before gate" if config.get("mamba_norm_before_gate", True) else "after gate"
    fields: Fields = {
        "norms": NormPlaces(before_mlp="pre_ff_layernorm"),
        "mlp": FEED_FORWARD,
        "final_norm": "model.final_layernorm.weight",
        "embedding_scale": number_in(config, "embedding_multiplier", 1.0),
        "logit_scale": number_in(config, "lm_head_multiplier", 1.0),
        "multipliers": _multipliers(config),
        "mamba": _mamba(
            config,
            inner,
            has_out_bias=bool(config.get("projectors_bias")),
            norm=norm if config.get("mamba_rms_norm") else None,
        ),
        "parts": (("attention beside mamba", "mlp"),) * num_layers,
    }
    if config.get("key_multiplier") is not None:
        head_dim = positive(
            config, "head_dim", positive(config, "hidden_size") // positive(config, "num_attention_heads")
        )
        fields["attention_scale"] = number_in(config, "key_multiplier", 1.0) * head_dim**-0.5
    return _biases(config) | fields


def _multipliers(config: Json) -> Multipliers:
    gate, down = _factors(config, "mlp_multipliers", 2)
    names = ("attention_in", "attention_out", "ssm_in", "ssm_out")
    factors = {name: number_in(config, f"{name}_multiplier", 1.0) for name in names}
    return Multipliers(**factors, gate=gate, down=down, ssm=_factors(config, "ssm_multipliers", 5))


def _factors(config: Json, key: str, count: int) -> tuple[float, ...]:
    factors = numbers(config[key], key) if config.get(key) is not None else (1.0,) * count
    if len(factors) != count:
        raise CheckpointError(f"config.json: {key} must list {count} numbers, not {len(factors)}")
    return factors


def nemotron_h_layers(config: Json) -> Json:
    """A config.json of Nemotron-H that lists its layers and their number: early files have a letter for each layer."""
    kinds, letters = config.get("layers_block_type") or config.get("layer_types"), config.get("hybrid_override_pattern")
    if kinds is None and isinstance(letters, str):
        kinds = [NEMOTRON_H_LETTERS.get(letter, letter) for letter in letters]
    if not isinstance(kinds, list) or not kinds:
        raise CheckpointError("config.json: layers_block_type must list the kinds of layers")
    return {**config, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def _nemotron_h(config: Json, num_layers: int) -> Fields:
    """Each layer is Mamba2, attention without positions, or an MLP, alone.

    transformers limits dt of a prompt, but not of later tokens, to at least `time_step_min`; llama.cpp does not, and
    neither does this.
    """
    shape = MambaShape(
        num_heads=positive(config, "mamba_num_heads", 128),
        head_size=positive(config, "mamba_head_dim", 64),
        num_groups=positive(config, "n_groups", 8),
        state_size=positive(config, "ssm_state_size", 128),
        kernel=positive(config, "conv_kernel", 4),
        prefix="mixer",
        step_limits=interval(config, "time_step_limit", (0.0, math.inf)),
        has_conv_bias=bool(config.get("use_conv_bias", True)),
        has_in_bias=bool(config.get("use_bias")),
        has_out_bias=bool(config.get("use_bias")),
    )
    if config.get("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"mamba_hidden_act {show(config['mamba_hidden_act'])} is not supported")
    return _biases(config) | {
        "rms_norm_eps": number_in(config, "layer_norm_epsilon", 1e-5, EPS_RANGE),
        "head_dim": positive(config, "head_dim", positive(config, "attention_head_dim", 128)),
        "norms": NormPlaces("norm", None, "norm", None),
        "activation": config.get("mlp_hidden_act", "relu2"),
        "mlp": MlpNames(None, "mixer.up_proj", "mixer.down_proj"),
        "attention": "mixer",
        "attention_output": "mixer.o_proj",
        "embedding_table": "model.embeddings.weight",
        "final_norm": "model.norm_f.weight",
        "unrotated": tuple(range(num_layers)),
        "mamba": _checked(shape),
        "parts": tuple((mixer,) for mixer in _mamba_mixers(config, num_layers)),
    }


def _olmo2(config: Json, num_layers: int) -> Fields:
    return _biases(config, mlp="") | {"norms": NORMS_BEHIND, "qk_norm": True, "qk_norm_form": QKNorm(over="projection")}


def _olmo3(config: Json, num_layers: int) -> Fields:
    rope, local = read_ropes(config)
    windows = _alternating_windows(config, num_layers)
    fields = {"windows": windows, "rope": rope, "local_rope": None if local == rope else local}
    return _olmo2(config, num_layers) | fields


def _olmo_hybrid(config: Json, num_layers: int) -> Fields:
    """OLMo 3's attention, whose norms are behind it, without RoPE as released; gated delta nets with norms before."""
    attends = [i % 4 == 3 for i in range(num_layers)]
    mixers = _mixers(config, num_layers, DELTA_NETS, attends if any(attends) else [*attends[1:], True])
    heads = positive(config, "num_attention_heads")
    key_heads = positive(config, "linear_num_key_heads", heads)
    key_size = positive(config, "linear_key_head_dim", max(1, 3 * positive(config, "hidden_size") // (4 * key_heads)))
    return _olmo2(config, num_layers) | {
        "unrotated": tuple(range(num_layers)) if has_null_theta(config) else (),
        "layer_norms": tuple(NORMS_BEHIND if mixer == "attention" else NORMS_BEFORE for mixer in mixers),
        "delta": DeltaShape(
            num_heads=positive(config, "linear_num_value_heads", heads),
            value_size=positive(config, "linear_value_head_dim", 2 * key_size),
            key_heads=key_heads,
            key_size=key_size,
            kernel=positive(config, "linear_conv_kernel_dim", 4),
            norm_eps=1e-5,
            top_rate=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
            names=OLMO_DELTA,
        ),
        "parts": tuple((mixer, "mlp") for mixer in mixers),
    }


def _lfm2(config: Json, num_layers: int) -> Fields:
    """Short convolutions in most layers, attention in the others."""
    attending = config.get("full_attn_idxs")
    if not isinstance(attending, list):
        attending = range(num_layers)
    mixers = _mixers(config, num_layers, SHORT_CONVOLUTIONS, [i in attending for i in range(num_layers)])
    return {
        "rms_norm_eps": number_in(config, "norm_eps", 1e-5, EPS_RANGE),
        "activation": "silu",
        "qk_norm": True,
        "qk_norm_form": QKNorm("self_attn.q_layernorm", "self_attn.k_layernorm"),
        "attention_output": "self_attn.out_proj",
        "norms": NormPlaces("operator_norm", None, "ffn_norm", None),
        "final_norm": "model.embedding_norm.weight",
        "mlp": MlpNames("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
        "intermediate_size": _lfm2_inner_size(config),
        "tied_head": bool(config.get("tie_embedding", config["tie_word_embeddings"])),
        "short_convolution": ShortConvolutionShape(positive(config, "conv_L_cache", 3), bool(config.get("conv_bias"))),
        "parts": tuple((mixer, "mlp") for mixer in mixers),
    }


def _lfm2_inner_size(config: Json) -> int:
    """Of the MLP: two thirds of config.json's, times a factor, rounded up, unless it says that its size is final."""
    size = positive(config, "block_ff_dim", positive(config, "intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    scaled = int(number_in(config, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = positive(config, "block_multiple_of", 256)
    return max(1, -(-scaled // multiple)) * multiple


def _cohere(config: Json, num_layers: int) -> Fields:
    return _biases(config, mlp="") | {
        "rms_norm_eps": number_in(config, "layer_norm_eps", 1e-5, EPS_RANGE),
        "norm": "layer",
        "norms": NormPlaces(before_mlp=None),
        "is_parallel": True,
        "has_interleaved_rope": True,
        "logit_scale": number_in(config, "logit_scale", 0.0625),
        "qk_norm": bool(config.get("use_qk_norm")),
        "qk_norm_form": QKNorm(over="own head"),
    }


def _cohere2(config: Json, num_layers: int) -> Fields:
    """Layers with full attention have no RoPE."""
    windows = _alternating_windows(config, num_layers)
    unrotated = tuple(i for i, window in enumerate(windows) if window is None)
    return _cohere(config, num_layers) | {"windows": windows, "unrotated": unrotated, "qk_norm": False}


def _smollm3(config: Json, num_layers: int) -> Fields:
    interval = positive(config, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers:
        raise CheckpointError(f"config.json: no_rope_layers must list {num_layers} layers (num_hidden_layers)")
    window = _window({"sliding_window": None, **config}) if config.get("use_sliding_window") else None
    if window is not None and config.get("layer_types") is None:
        config = {**config, "layer_types": [FULL if has_rope else SLIDING for has_rope in rotated]}
    windows = (None,) * num_layers if window is None else _listed_windows(config, num_layers, window)
    unrotated = tuple(i for i, has_rope in enumerate(rotated) if not has_rope)
    return _biases(config) | {"windows": windows, "unrotated": unrotated}


def _starcoder2(config: Json, num_layers: int) -> Fields:
    return _biases(config, "use_bias", "use_bias") | {
        "rms_norm_eps": number_in(config, "norm_epsilon", 1e-5, EPS_RANGE),
        "norm": "layer",
        "has_norm_bias": True,
        "mlp": MlpNames(None, "mlp.c_fc", "mlp.c_proj"),
        "windows": (_window({"sliding_window": None, **config}),) * num_layers,
    }


def _nemotron(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {
        "rms_norm_eps": number_in(config, "norm_eps", 1e-5, EPS_RANGE),
        "norm": "layer plus one",
        "has_norm_bias": True,
        "mlp": UNGATED_MLP,
        "rotary_share": read_rotary_share(config),
    }


def _exaone4(config: Json, num_layers: int) -> Fields:
    """If some layers have a window, the others have no RoPE."""
    windows = _alternating_windows(config, num_layers)
    has_windows = config.get("sliding_window", 4096) is not None
    unrotated = tuple(i for i, window in enumerate(windows) if window is None and has_windows)
    return {"windows": windows, "unrotated": unrotated, "norms": NORMS_BEHIND, "qk_norm": True}


def _helium(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {"o_bias": False, "has_interleaved_rope": True}


def _seed_oss(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {"o_bias": bool(config.get("attention_out_bias"))}


def _arcee(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {"mlp": UNGATED_MLP}


def _ernie(config: Json, num_layers: int) -> Fields:
    return _biases(config, "use_bias", "use_bias") | {"has_interleaved_rope": True}


def _hunyuan(config: Json, num_layers: int) -> Fields:
    norm = QKNorm("self_attn.query_layernorm", "self_attn.key_layernorm", is_after_rope=True)
    return _biases(config, mlp="") | {"qk_norm": True, "qk_norm_form": norm, "rope": _hunyuan_rope(config)}


def _hunyuan_rope(config: Json) -> RopeConfig:
    """Its dynamic scaling with an `alpha` is another theta, independent of the text's length."""
    scaling = mapping(config, "rope_scaling") or mapping(config, "rope_parameters")
    if "alpha" not in scaling:
        return read_rope(config)
    kept = {key: value for key, value in scaling.items() if key == "rope_theta"}
    plain = read_rope({**config, "rope_scaling": None, "rope_parameters": kept})
    dim = positive(config, "head_dim")
    theta = plain.theta * number_in(scaling, "alpha", 1.0) ** (dim / max(dim - 2, 1))
    return RopeConfig(min(theta, THETA_RANGE[1]), "default", {})


# To add a family, add one entry: its config.json → the differing fields of ModelConfig.
FAMILIES: dict[str, Callable[[Json, int], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_next": _qwen3_next,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "mistral4": _mistral4,
    "youtu": _youtu,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "ministral3": _ministral3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "phi3": _phi3,
    "glm": _glm,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitemoehybrid": _granite_hybrid,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "olmo_hybrid": _olmo_hybrid,
    "lfm2": _lfm2,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
    "nemotron": _nemotron,
    "exaone4": _exaone4,
    "helium": _helium,
    "seed_oss": _seed_oss,
    "arcee": _arcee,
    "ernie4_5": _ernie,
    "hunyuan_v1_dense": _hunyuan,
}

_GEMMA2 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA4_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_QWEN_3_5 = {"num_attention_heads": 16, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25}
_GLM = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True}
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = {
    **_LATENT,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
}
# Families' defaults for missing keys, if they differ from Llama's; transformers omits keys with its defaults.
# `default_theta`: RoPE's; `default_local_theta`: of layers with a window; `default_experts`: their number.
DEFAULTS: dict[str, Json] = {
    "deepseek_v2": {**_LATENT, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": {
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
    },
    "mistral4": {
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 2048,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "youtu": {**_LATENT, "tie_word_embeddings": True},
    "ministral3": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "gemma": {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2
    | {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "default_theta": 1000000.0,
        "default_local_theta": 10000.0,
    },
    "gemma4_text": {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "qwen3_5_text": {**_QWEN_3_5, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {
        **_QWEN_3_5,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "default_experts": 256,
    },
    "qwen3_next": {
        **_QWEN_3_5,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "default_experts": 512,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "default_experts": 8,
        "default_theta": 1000000.0,
    },
    "qwen3_moe": {
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "default_experts": 128,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "default_experts": 60,
    },
    "olmoe": {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "default_experts": 64},
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "default_experts": 128,
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "default_experts": 128,
        "default_theta": 150000.0,
    },
    "minimax_m2": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts_per_tok": 8,
        "default_experts": 256,
        "default_theta": 5000000.0,
    },
    "granitemoe": {"num_experts_per_tok": 2, "default_experts": 8},
    "phi3": {"rms_norm_eps": 1e-5, ORIGINAL_CONTEXT: 4096},
    "glm": _GLM,
    "glm4": _GLM,
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "default_theta": 500000.0, "sliding_window_pattern": 4},
    "olmo_hybrid": {"vocab_size": 100352, "max_position_embeddings": 65536},
    "lfm2": {
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
        "default_theta": 1000000.0,
    },
    "granitemoehybrid": {"num_experts_per_tok": 2, "num_local_experts": 8, "shared_intermediate_size": 1024},
    "bamba": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
    "falcon_h1": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "nemotron_h": {"num_key_value_heads": 8},
    "cohere": {"tie_word_embeddings": True, "default_theta": 500000.0},
    "cohere2": {"tie_word_embeddings": True, "sliding_window_pattern": 4},
    "smollm3": {"tie_word_embeddings": True, "default_theta": 2000000.0, "num_key_value_heads": 4},
    "starcoder2": {
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "num_key_value_heads": 2,
    },
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "exaone4": {"rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
    "helium": {"rms_norm_eps": 1e-8, "head_dim": 128, "default_theta": 100000.0},
    "seed_oss": {"head_dim": 128, "attention_bias": True},
    "arcee": {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    "ernie4_5": {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "default_theta": 500000.0,
    },
    "hunyuan_v1_dense": {"rms_norm_eps": 1e-5},
}
# Families whose config.json may leave out keys that follow from others.
COMPLETED: dict[str, Callable[[Json], Json]] = {
    "nemotron_h": nemotron_h_layers,
    "qwen3_5_moe_text": routed_inner_size,
}
# Multimodal models → the family of their language model, if `text_config` does not name it.
MULTIMODAL = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "lfm2_vl": "lfm2",
}
TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}
PARTLY_ROTATED = (
    "phi3",
    "mistral4",
    "glm",
    "glm4",
    "glm4_moe",
    "minimax_m2",
    "nemotron",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "bamba",
)  # the families that read `partial_rotary_factor`
