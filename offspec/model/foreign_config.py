"""`ForeignConfig`: the shape of a decoder that offspec has no code for, whose layers transformers' modules compute.

It is data alone: transformers is not imported here. `checkpoints.foreign` makes one, `model.foreign` computes by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from .config import ModelConfig
from .config_values import Json
from .kv_cache import KVLayout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Which weights of a checkpoint a module's parameter is made of, by the names that a `WeightSource` lends them by.

    One name: the parameter is that weight. Otherwise the parameter [E, N, K] is that of E experts, and expert e's
    matrix is that of `names[0][e]`, `names[1][e]`, ... below each other.
    """

    names: tuple[tuple[str, ...], ...]
    is_experts: bool = False


def is_of_experts(name: str, shape: Shape) -> bool:
    """Whether a layer's parameter or tensor of this name holds one expert's matrix, or those of all."""
    return ".experts." in name or len(shape) == 3


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How the modules of a model are called.

    attention: sdpa or eager, whichever they have. num_outputs: 0 where a layer returns hidden states, else how many
    values a layer returns, hidden states first. has_mask_kinds: masks are given by the layers' kinds.
    """

    attention: str
    num_outputs: int
    has_mask_kinds: bool


@dataclass(frozen=True, kw_only=True)
class ForeignConfig(ModelConfig):
    """raw: config.json. prefix: what comes before a layer's number in the checkpoint's names.

    embedding, head: the full names of these matrices there; a tied head's may be missing.
    shared: name → shape of what lies outside the layers. layers: of each one, short name → shape.
    layer_sources: of each one, parameter's path in the layer → what it is made of. shared_sources: the same by the full
    path in the model, without embedding and head. kv: what each layer keeps of a token; key_value_dims: and how many
    numbers of a head's key and value. made_elements: at most so many elements of weights are made anew in a layer.
    expert_share: how much of a layer's experts a row goes through. ignored: full names of the checkpoint's tensors that
    no module needs.
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
    expert_share: float
    has_linear_head: bool
    made_elements: int
    ignored: frozenset[str]

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
        """A decoder of Llama's layout as large as this one."""
        return ModelConfig(**{field.name: getattr(self, field.name) for field in fields(ModelConfig)})

    def shared_shapes(self) -> dict[str, Shape]:
        return {name: shape for name, shape in self.shared.items() if not (self.tied_head and name == self.head)}
