"""The shapes of layers' parts, and the names of their tensors: what differs between families, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        return [*self.of_attention, *self.of_mlp]

    @property
    def of_attention(self) -> list[str]:
        return [name for name in (self.before_attention, self.after_attention) if name is not None]

    @property
    def of_mlp(self) -> list[str]:
        return [name for name in (self.before_mlp, self.after_mlp) if name is not None]


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
