"""`ForeignConfig`: the shape of a decoder that only transformers supports, and whose layers its modules compute.

It is data only; transformers is not imported here. `checkpoints.transformers_models` makes it,
`model.transformers_decoder` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from offspec.scheduler.params import MAX_NODES

from .config import ModelConfig
from .config_values import Json
from .memory.kv_cache import KVLayout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """The weights of a checkpoint that form a module's parameter, by their names in a `WeightSource`.

    With one name, the parameter is that weight. Otherwise the parameter [E, N, K] has E experts, and expert e's matrix
    is `names[0][e]`, `names[1][e]`, ... concatenated by rows.
    """

    names: tuple[tuple[str, ...], ...]
    is_experts: bool = False


def is_of_experts(name: str, shape: Shape) -> bool:
    """Whether a layer's parameter or tensor holds the matrix of one expert or of all."""
    return ".experts." in name or len(shape) == 3


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How to call the modules of a model.

    attention: sdpa or eager, as the modules support. num_outputs: 0 if a layer returns hidden states only, otherwise
    the number of its results, hidden states first. has_mask_kinds: masks are passed by kinds of layers.
    """

    attention: str
    num_outputs: int
    has_mask_kinds: bool


@dataclass(frozen=True, kw_only=True)
class ForeignConfig(ModelConfig):
    """The shape of a decoder that transformers' modules compute.

    raw: config.json. prefix: the prefix before a layer's number in the checkpoint's names.
    embedding, head: full names of these matrices in the checkpoint; a tied head may be missing.
    shared: name → shape of the tensors outside the layers. layers: per layer, short name → shape.
    layer_sources: per layer, a parameter's path in the layer → its source. shared_sources: the same with full paths in
    the model, without embedding and head. kv: each layer's KV entry; key_value_dims: the dimensions of a head's key and
    value. made_elements: the maximum number of elements that a layer dequantises at once.
    routed_share: the share of a layer's experts that a row uses. ignored: full names of tensors that no module needs.
    """

    raw: Json
    form: CallForm
    prefix: str
    embedding: str
    head: str
    shared: Mapping[str, Shape]
    layers: tuple[Mapping[str, Shape], ...]
    layer_sources: tuple[Mapping[str, Source], ...]
    shared_sources: Mapping[str, Source]
    kv: tuple[KVLayout, ...]
    key_value_dims: tuple[tuple[int, int], ...]
    has_experts: bool
    routed_share: float
    has_linear_head: bool
    made_elements: int
    ignored: frozenset[str]

    is_native = False
    most_nodes = MAX_NODES
    has_whole_attention = True

    @property
    def expert_share(self) -> float:
        return self.routed_share

    def parts_of(self, layer: int) -> tuple[str, ...]:
        return ("modules",)

    @property
    def mask_heads(self) -> int:
        return self.num_heads if self.form.attention == "eager" else super().mask_heads

    def made_numbers(self, num_keys: int) -> int:
        """Keys and values are repeated for each head, and one expert is made at a time."""
        return 2 * self.num_heads * self.head_dim * num_keys + self.made_elements

    def ignores(self, name: str) -> bool:
        return name in self.ignored or super().ignores(name)

    @property
    def layer_prefix(self) -> str:
        return self.prefix

    @property
    def embedding_name(self) -> str:
        return self.embedding

    @property
    def own_head_name(self) -> str:
        return self.head

    def as_native(self) -> ModelConfig:
        return ModelConfig(**{field.name: getattr(self, field.name) for field in fields(ModelConfig)})

    def shared_shapes(self) -> dict[str, Shape]:
        return {name: shape for name, shape in self.shared.items() if not (self.tied_head and name == self.head)}
