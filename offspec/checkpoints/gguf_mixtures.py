"""The tensor types that llama.cpp's mixtures (Q4_K_M and the like) give to each weight, for plans and for `quantize`.

Source: `llama_tensor_get_type` and its fallback in llama.cpp's src/llama-quant.cpp, without an importance matrix.
Value matrices follow the layers of the down projections. In Q3_K_M and Q4_K_S this is llama.cpp's own rule for 32
layers; for other numbers the size differs by less than 0.1 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offspec.loaders.streaming.weights import EXPERT

from ..model.config import ModelConfig
from ..model.names import HEAD

# A row is a whole number of blocks. Where it is not, llama.cpp takes a type with smaller blocks, and else F16.
_SMALLER_BLOCKS = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
_SMALL_BLOCK, _LARGE_BLOCK = 32, 256
_LAYERS_OF_70B, _QUERIES_PER_KEY = 80, 8  # models whose value matrices are small: they get at least Q5_K
_FEW_EXPERTS = 8  # attention is so small a part of such models that its keys and values are stored in 8 bits

_FUSED_QKV = ("self_attn.qkv_proj", "linear_attn.in_proj_qkv")


@dataclass(frozen=True)
class Mixture:
    """Types by role; "" is `usual`. value, output, qkv: of attention's matrices. down: of an MLP's last one.

    better: of value and down matrices in the layers for which is_better(layer, number of layers) holds. With at least
    four queries per key, Q2_K has the value matrices in `shared_value`. With eight experts, `few_experts_output` takes
    the place of `output`.
    """

    usual: str
    value: str = ""
    output: str = ""
    qkv: str = ""
    down: str = ""
    better: str = ""
    is_better: Callable[[int, int], bool] = lambda layer, num_layers: False
    shared_value: str = ""
    few_experts_output: str = ""

    def type_of(self, config: ModelConfig, name: str, shape: tuple[int, ...], layer: int | None) -> str:
        """The type of a weight by its name within its layer; layer: None for weights outside the layers."""
        experts = config.experts
        is_router = experts is not None and name.removesuffix(".weight") in (experts.router, experts.shared_gate)
        if len(shape) != 2 or name.endswith("norm.weight") or is_router:
            return "F32"
        if layer is not None:
            chosen = self._of_matrix(config, name, layer)
        else:  # the embedding, or the head, which a tied embedding is
            is_head = name == HEAD or config.tied_head
            chosen = "Q6_K" if is_head and self.usual != "Q8_0" else self.usual
        if shape[1] % _LARGE_BLOCK:
            chosen = _SMALLER_BLOCKS.get(chosen, chosen)
        return "F16" if shape[1] % _SMALL_BLOCK else chosen

    def _of_matrix(self, config: ModelConfig, name: str, layer: int) -> str:
        name = name.removesuffix(".weight")
        has_few_experts = config.experts is not None and config.experts.num == _FEW_EXPERTS
        if has_few_experts and name in ("self_attn.k_proj", "self_attn.v_proj"):
            return "Q8_0"
        if name == "self_attn.v_proj":
            queries_per_key = config.num_heads // config.num_kv_heads
            chosen = self.better if self.is_better(layer, config.num_layers) else self.value or self.usual
            if self.shared_value and queries_per_key >= 4:
                chosen = self.shared_value
            is_70b = config.num_layers == _LAYERS_OF_70B and queries_per_key == _QUERIES_PER_KEY
            return "Q5_K" if is_70b and chosen in ("Q3_K", "Q4_K") else chosen
        if _is_down(config, name):
            return self.better if self.is_better(layer, config.num_layers) else self.down or self.usual
        output = self.few_experts_output if has_few_experts else self.output
        by_name = {config.attention_output: output, **dict.fromkeys(_FUSED_QKV, self.qkv)}
        return by_name.get(name, "") or self.usual


def _is_down(config: ModelConfig, name: str) -> bool:
    """Whether a matrix is the last one of an MLP, of an expert or of the shared one."""
    shape, match = config.experts, EXPERT.fullmatch(name)
    if shape is not None and match is not None:
        return match[2] == shape.names.down
    return name == config.mlp.down or (shape is not None and name == f"{shape.shared}.down_proj")


def _first(part: int) -> Callable[[int, int], bool]:
    """The first 1/part of the layers."""
    return lambda layer, num_layers: layer < num_layers // part


def _outer(layer: int, num_layers: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and last eighth, and every third layer between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


MIXTURES = {  # by `params.GGUF_MIXTURES`
    "q2_k": Mixture("Q2_K", value="Q3_K", output="Q3_K", down="Q3_K", shared_value="Q4_K", few_experts_output="Q5_K"),
    "q3_k_s": Mixture("Q3_K", few_experts_output="Q5_K"),
    "q3_k_m": Mixture(
        "Q3_K",
        value="Q4_K",
        output="Q4_K",
        qkv="Q4_K",
        down="Q4_K",
        better="Q5_K",
        is_better=_first(16),
        few_experts_output="Q5_K",
    ),
    "q3_k_l": Mixture("Q3_K", "Q5_K", output="Q5_K", qkv="Q4_K", down="Q5_K"),
    "q4_0": Mixture("Q4_0"),
    "q4_1": Mixture("Q4_1"),
    "q4_k_s": Mixture("Q4_K", better="Q5_K", is_better=_first(8), few_experts_output="Q5_K"),
    "q4_k_m": Mixture("Q4_K", qkv="Q5_K", better="Q6_K", is_better=_outer, few_experts_output="Q5_K"),
    "q5_0": Mixture("Q5_0"),
    "q5_1": Mixture("Q5_1"),
    "q5_k_s": Mixture("Q5_K"),
    "q5_k_m": Mixture("Q5_K", qkv="Q6_K", better="Q6_K", is_better=_outer),
    "q6_k": Mixture("Q6_K"),
    "q8_0": Mixture("Q8_0"),
    "iq4_xs": Mixture("IQ4_XS", better="Q5_K", is_better=_first(8), shared_value="Q5_K", few_experts_output="Q5_K"),
}
