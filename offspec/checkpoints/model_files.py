"""A model's files, opened: what plans and loading know of it. Nothing here reads a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from offspec.loaders.files.checkpoint import Checkpoint
from offspec.loaders.streaming.stored_model import StoredModel

from ..model.block import memory_bytes
from ..model.config import ModelConfig
from ..model.heads.mtp import mtp_names
from ..model.memory.kv_formats import PLAIN, KVFormat
from ..model.transformers_config import is_of_experts


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint whose headers match its config.json, the dtype to compute in, and the format of its KV entries.

    forgets: layers with a window drop KV entries outside of it (`model.memory.window_layers`).
    """

    checkpoint: Checkpoint
    config: ModelConfig
    stored: StoredModel
    dtype: torch.dtype
    kv: KVFormat = PLAIN
    forgets: bool = False

    @cached_property
    def packed_form(self) -> str | None:
        """The format of most packed weights of a layer, its experts among them; None if it has none."""
        elements = Counter[str]()
        for unit in self.stored.first_layer:
            for weight in unit.weights.values():
                if weight.is_packed:
                    elements[weight.dtype] += math.prod(weight.shape)
        return max(elements, key=lambda form: elements[form], default=None)

    def keeping(self, *, packed: bool) -> ModelFiles:
        """The same model, with resident matrices that have two forms packed, or unpacked."""
        return self if self.stored.layers[0].packs == packed else self._kept_otherwise

    @cached_property
    def _kept_otherwise(self) -> ModelFiles:
        return replace(self, stored=self.stored.keeping(packed=not self.stored.layers[0].packs))

    def forgetting(self, *, forgets: bool) -> ModelFiles:
        """The same model, whose layers with a window drop KV entries outside of it, or do not."""
        return self if self.forgets == forgets else self._forgetting_otherwise

    @cached_property
    def _forgetting_otherwise(self) -> ModelFiles:
        return replace(self, forgets=not self.forgets)

    @cached_property
    def elements(self) -> Counter[str]:
        """Elements of all layers' weights: "matrices", "experts" among the weights of their layers, and of matrices
        those that are "packed" and those that resident layers keep so ("kept").
        """
        sums = Counter[str]()
        for layer in self.stored.layers:
            for name, weight in layer.weights.items():
                is_matrix, elements = len(weight.shape) == 2, math.prod(weight.shape)
                if not self.config.is_native and is_of_experts(name, weight.shape):
                    sums["experts"] += elements
                elif is_matrix:
                    sums["matrices"] += elements
                if is_matrix and weight.is_packed:
                    sums["packed"] += elements
                if is_matrix and layer.needs_scratch(weight, self.dtype, is_streamed=False):
                    sums["kept"] += elements
        return sums

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of a resident layer on average, without experts that are units of their own."""
        costs = [layer.cost(self.dtype) for layer in self.stored.layers]
        return sum(cost.resident_bytes for cost in costs) // len(costs)

    def kv_bytes(self, num_entries: int, layers: range | None = None) -> int:
        """Bytes of a KV cache with room for `num_entries` entries, of all layers or of `layers`."""
        return memory_bytes(self.config, num_entries, self.dtype.itemsize, layers, self.kv, forgets=self.forgets)

    def with_kv(self, kv: KVFormat) -> ModelFiles:
        """The same model with another format of its KV entries."""
        return replace(self, kv=kv)

    @cached_property
    def num_parameters(self) -> int:
        return count_parameters(self.stored)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are stored."""
        return sum(info.nbytes for weight in self.stored.by_name.values() for info in weight.streamed)

    @cached_property
    def mtp_names(self) -> Mapping[str, str | None]:
        """Full name → an `MtpHead`'s, of the tensors of MTP layers; None for those that it does not read."""
        return mtp_names(self.checkpoint.tensors, self.config.num_layers)


def count_parameters(stored: StoredModel) -> int:
    return sum(math.prod(weight.shape) for weight in stored.by_name.values())
