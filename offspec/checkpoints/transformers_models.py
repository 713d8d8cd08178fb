"""Models that only transformers supports: config.json and names of tensors → `ForeignConfig`.

transformers' own mapping of names tells which tensors of a checkpoint form a parameter of its modules. This module
imports transformers only when such a model is opened.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from offspec.loaders.files.checkpoint import Checkpoint, show
from offspec.loaders.formats import StoredWeight, blank_tensors, formats_in, stored_weights

from ..errors import CheckpointError, UnsupportedModelError
from ..model.config import check_quantization
from ..model.config_values import Json
from ..model.rope_config import RopeConfig
from ..model.transformers_config import ForeignConfig, Shape, Source, is_of_experts

if TYPE_CHECKING:
    from ..model.transformers_modules import Modules
    from ..model.transformers_probe import Probed

REMEDY = "pip install 'offspec[transformers]' adds many more models, which run more slowly"


def is_installed() -> bool:
    """Whether the transformers package is installed."""
    return importlib.util.find_spec("transformers") is not None


def read_foreign_config(raw: Json, checkpoint: Checkpoint | None, refused: UnsupportedModelError) -> ForeignConfig:
    """The shape of a model that `model.config` refused with the error `refused`, by transformers' modules.

    checkpoint: None if only sizes are needed. Raises `refused`, with a remedy, if transformers is not installed or does
    not know the model either; UnsupportedModelError, CheckpointError.
    """
    if raw.get("is_causal") is False:
        raise refused
    check_quantization(raw)
    if not is_installed():
        raise UnsupportedModelError(f"{refused}; {REMEDY}") from refused
    from ..model.transformers_modules import build, knows
    from ..model.transformers_probe import probe

    if not knows(raw.get("model_type")):
        needs_code = "; it needs its own code (auto_map), which offspec never runs" if "auto_map" in raw else ""
        raise UnsupportedModelError(f"{refused}, nor known to the installed transformers{needs_code}") from refused
    names = _Names(build(raw))
    if checkpoint is not None:
        names.match(checkpoint)
    probed = probe(build(raw))
    return _config(raw, names, probed)


def _config(raw: Json, names: _Names, probed: Probed) -> ForeignConfig:
    modules, layouts = names.modules, probed.kv
    config = modules.causal.config
    table = modules.embedding.weight
    if modules.head is None or modules.head.weight.shape[1] != table.shape[1]:
        raise UnsupportedModelError(f"{config.model_type}'s head and embedding differ in width")
    layers, sources = names.layers, names.layer_sources
    shapes = [shape for layer in layers for shape in layer.values() if len(shape) > 1]
    return ForeignConfig(
        model_type=config.model_type,
        vocab_size=int(table.shape[0]),
        hidden_size=probed.hidden_size,
        num_layers=len(modules.layers),
        num_heads=max(int(config.num_attention_heads), layouts[0].num_heads),
        num_kv_heads=max(layout.num_heads for layout in layouts),
        head_dim=max(layout.head_dim for layout in layouts),
        intermediate_size=max(max(shape[-2:]) for shape in shapes),
        rms_norm_eps=1e-6,
        max_context=probed.max_context,
        rope=RopeConfig(10000.0, "default", {}),
        windows=probed.windows,
        tied_head=names.is_tied,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        raw=raw,
        form=probed.form,
        prefix=names.prefix,
        embedding=names.embedding,
        head=names.head,
        shared=names.shared,
        layers=tuple(layers),
        layer_sources=tuple(sources),
        shared_sources=names.shared_sources,
        kv=layouts,
        key_value_dims=probed.key_value_dims,
        has_experts=names.has_experts,
        routed_share=_expert_share(config) if names.has_experts else 1.0,
        has_linear_head=probed.has_linear_head,
        made_elements=names.made_elements(),
        ignored=names.ignored,
    )


def _expert_share(config: Any) -> float:
    """The share of a layer's experts that a row uses; 1 if config.json has other names for it."""

    def first(*names: str) -> int:
        numbers = (getattr(config, name, None) for name in names)
        return next((number for number in numbers if isinstance(number, int) and number > 0), 0)

    there = first("num_local_experts", "n_routed_experts", "num_experts")
    chosen = first("num_experts_per_tok", "moe_topk", "moe_k")
    return min(1.0, chosen / there) if chosen and there else 1.0


# ------------------------------------------------------------------------------------------------ names


@dataclass
class _Collected:
    """The tensors of one parameter: pattern of their names → names. converter: transformers' own."""

    converter: Any = None
    names: dict[str | None, list[str]] = field(default_factory=dict)


class _Names:
    """The checkpoint's names for the parameters of `modules`; before `match` is called, the parameters' own."""

    def __init__(self, modules: Modules) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.modules = modules
        causal = modules.causal
        self.wanted: dict[str, Shape] = {name: tuple(p.shape) for name, p in causal.state_dict().items()}
        transforms = get_model_conversion_mapping(causal)
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self.module_prefix = self.prefix = f"{modules.path}."
        self._own_embedding = f"{modules.name_of(modules.embedding)}.weight"
        self._own_head = f"{modules.name_of(modules.head)}.weight" if modules.head is not None else ""
        self.embedding, self.head = self._own_embedding, self._own_head
        self.is_tied = bool(causal.config.tie_word_embeddings)
        self.ignored = frozenset[str]()
        self.has_experts = any(is_of_experts(n, s) for n, s in self.wanted.items() if self._is_inner(n))
        self.shared_sources: dict[str, Source] = {}
        self.layer_sources: list[dict[str, Source]] = []
        self.shared = {name: shape for name, shape in self.wanted.items() if not self._is_inner(name)}
        inner = dict[str, Shape]()  # as checkpoints store them: each expert's matrix is separate
        for name, shape in self.wanted.items():
            if self._is_inner(name) and len(shape) == 3:
                inner |= {f"{name}.{expert}.weight": shape[1:] for expert in range(shape[0])}
            elif self._is_inner(name):
                inner[name] = shape
        self.layers = self._layers(inner)

    def _is_inner(self, name: str) -> bool:
        return name.startswith(self.module_prefix)

    def _layers(self, inner: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The values of `inner` by layer and short name. The keys of `inner` begin with the modules' prefix."""
        layers: list[dict[str, Any]] = [{} for _ in self.modules.layers]
        for name, source in inner.items():
            number, _, short = name.removeprefix(self.module_prefix).partition(".")
            layers[int(number)][short] = source
        return layers

    def made_elements(self) -> int:
        """Elements of a layer's parameters other than linear modules' matrices, counting one expert only."""
        linear = {
            f"{name}.weight"
            for name, module in self.modules.causal.named_modules()
            if type(module).__name__ == "Linear"
        }
        sizes = self._layers(
            {
                name: math.prod(shape) // (shape[0] if len(shape) == 3 and shape[0] else 1) * 2
                for name, shape in self.wanted.items()
                if self._is_inner(name) and name not in linear and len(shape) > 1
            }
        )
        return max(sum(map(int, layer.values())) for layer in sizes)

    # ---------------------------------------------------------------------------------------- a checkpoint's

    def match(self, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModelError or CheckpointError if the checkpoint's tensors do not fit these modules."""
        renamed = {name: self._renamed(name)[0] for name in checkpoint.tensors}
        first = f"{self.module_prefix}0."
        matches = (re.match(r"(|.*?\.)0\.", name) for name, target in renamed.items() if target.startswith(first))
        if (match := next(filter(None, matches), None)) is None:
            raise CheckpointError(f"no tensor is one of {first}*; the checkpoint does not match config.json")
        self.prefix = match[1]
        blank = blank_tensors(checkpoint.tensors, self.wanted)
        self.ignored = frozenset(n for n, target in renamed.items() if self._is_ignored(n, target)) | blank
        infos = {name: info for name, info in checkpoint.tensors.items() if name not in self.ignored}
        stored = stored_weights(infos, formats_in(checkpoint))
        sources = {
            target: self._source(target, collected, stored) for target, collected in self._collect(stored).items()
        }
        for name in self.wanted:
            if name not in sources and not (self.is_tied and name == self._own_head):
                raise CheckpointError(f"tensor {show(name)} is missing; the checkpoint does not match its config.json")
        self.embedding = sources[self._own_embedding].names[0][0]
        if self._own_head in sources:
            self.head = sources[self._own_head].names[0][0]
        shared = {n: source for n, source in sources.items() if not self._is_inner(n)}
        self.shared = {name: stored[name].shape for source in shared.values() for name in source.names[0]}
        if self.is_tied:
            self.shared.setdefault(self.head, self.shared[self.embedding])
        matrices = (self._own_embedding, self._own_head)
        self.shared_sources = {name: source for name, source in shared.items() if name not in matrices}
        inner = {name: source for name, source in sources.items() if self._is_inner(name)}
        self.layer_sources = self._layers({})
        self.layers = self._layers({})
        for index, layer in enumerate(self._layers(inner)):
            prefix = f"{self.prefix}{index}."
            for path, source in layer.items():
                names = [name for part in source.names for name in part]
                if wrong := [name for name in names if not name.startswith(prefix)]:
                    raise UnsupportedModelError(
                        f"tensor {show(wrong[0])} has another prefix than its layer's other tensors"
                    )
                self.layers[index] |= {name.removeprefix(prefix): stored[name].shape for name in names}
                short = tuple(tuple(name.removeprefix(prefix) for name in part) for part in source.names)
                self.layer_sources[index][path] = Source(short, source.is_experts)

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """The parameter that a tensor belongs to, and the pattern of the matching converter."""
        from transformers.core_model_loading import rename_source_key

        causal = self.modules.causal
        renamed: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, causal.base_model_prefix, self.wanted
        )
        return renamed

    def _is_ignored(self, name: str, target: str) -> bool:
        """Whether transformers also ignores it: another kind of model's tensors, computed tables."""
        if target in self.wanted:
            return False
        patterns: Collection[str] = self.modules.causal._keys_to_ignore_on_load_unexpected or ()
        return "rotary_emb.inv_freq" in name or any(re.search(pattern, target) for pattern in patterns)

    def _collect(self, stored: Iterable[str]) -> dict[str, _Collected]:
        collected_of: dict[str, _Collected] = {}
        for name in sorted(stored, key=_natural):
            target, pattern = self._renamed(name)
            if target not in self.wanted:
                raise UnsupportedModelError(f"tensor {show(name)} has no place in transformers' modules of this model")
            collected = collected_of.setdefault(target, _Collected())
            if pattern is not None:
                collected.converter = next(c for c in self._converters if pattern in c.source_patterns)
            collected.names.setdefault(pattern, []).append(name)
        return collected_of

    def _source(self, target: str, collected: _Collected, stored: Mapping[str, StoredWeight]) -> Source:
        """Raises CheckpointError for wrong shapes, UnsupportedModelError for an unsupported order of storage."""
        shape = self.wanted[target]
        if collected.converter is None:
            (names,) = collected.names.values()
            if len(names) > 1 or stored[names[0]].shape != shape:
                there = list(stored[names[0]].shape)
                raise CheckpointError(f"tensor {show(names[0])} has shape {there}, config.json requires {list(shape)}")
            return Source(((names[0],),))
        operations = [(type(op).__name__, getattr(op, "dim", None)) for op in collected.converter.operations]
        patterns = collected.converter.source_patterns
        parts = tuple(tuple(collected.names.get(pattern, ())) for pattern in patterns)
        is_list = operations in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
        if not is_list or len(shape) != 3 or (len(parts) > 1) != (len(operations) > 1):
            kinds = ", ".join(kind for kind, _ in operations)
            raise UnsupportedModelError(
                f"tensors like {show(next(iter(collected.names.values()))[0])} are stored in an order that "
                f"transformers converts while loading ({kinds}); this conversion is not supported"
            )
        self._check_experts(target, parts, stored)
        return Source(parts, is_experts=True)

    def _check_experts(
        self, target: str, parts: tuple[tuple[str, ...], ...], stored: Mapping[str, StoredWeight]
    ) -> None:
        num_experts, rows, columns = self.wanted[target]
        if any(len(part) != num_experts for part in parts):
            raise CheckpointError(
                f"{target} has {[len(part) for part in parts]} experts, config.json says {num_experts}"
            )
        for names in zip(*parts, strict=True):
            shapes = [stored[name].shape for name in names]
            if any(len(s) != 2 or s[1] != columns for s in shapes) or sum(s[0] for s in shapes) != rows:
                stored_shapes = ", ".join(str(list(s)) for s in shapes)
                raise CheckpointError(
                    f"tensor {show(names[0])} has shape {stored_shapes}, config.json requires {[rows, columns]}"
                )


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that orders numbers numerically."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
