"""transformers' modules of a model, without weights, and how one of their passes is taken apart into layers.

transformers' code prepares a pass (position embeddings, masks, what is added to the input), goes through its layers,
and finishes it (norms). `Modules.prepare` lets it run with layers that compute nothing and only take down how each of
them is called; the layers are called afterwards, one by one, with the weights that are lent to them.
Imports transformers; nothing is downloaded, and no code of a checkpoint is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offspec.loaders.checkpoint import show

from ..errors import CheckpointError, UnsupportedModelError
from .config_values import MAX_SIZE, Json
from .foreign_config import CallForm

ATTENTION_KINDS = ("full_attention", "sliding_attention")
# What changes with the length of the text: a tree's nodes would be rotated otherwise than the text that they become.
UNSTEADY_ROPE = ("dynamic", "longrope")
MAX_BUFFER_BYTES = 64 * 2**20  # of tables that modules compute from their config
MAX_MODULES = 1024  # of layers, and of a layer's experts
UNLIKELY = 77
RECURRENT = "has recurrent layers (state-space or linear attention), which cannot hold a tree of guesses"
# What is decided here, or is of no use: labels of a classifier make a table as long as config.json says.
_LEFT_OUT = (
    "model_type",
    "quantization_config",
    "auto_map",
    "dtype",
    "torch_dtype",
    "num_labels",
    "id2label",
    "label2id",
)


class RecurrentStateError(Exception):
    """A layer asked for a state that is no key and no value."""


class TextCache(Cache):
    """What transformers' modules are given as a KV cache, with `length` tokens in it. Subclasses keep something."""

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def has_previous_state(self, *args: Any, **kwargs: Any) -> Any:
        raise RecurrentStateError

    get_conv_state: Any = has_previous_state
    update_conv_state: Any = has_previous_state
    get_recurrent_state: Any = has_previous_state
    update_recurrent_state: Any = has_previous_state
    update_indexer: Any = has_previous_state


class Outputs(MoeModelOutputWithPast):
    """A base model's outputs; what it does not have is None."""

    def __getattr__(self, name: str) -> Any:
        return None


@dataclass(frozen=True)
class LayerCall:
    """How a layer is called: what it was given as hidden states [1, T, hidden], and everything else by its name."""

    hidden: Tensor
    kwargs: Mapping[str, Any]

    @property
    def mask(self) -> Any:
        return self.kwargs.get("attention_mask")


class Modules:
    """The modules of one model on the meta device; see `build`. path: of its list of layers, in the whole model."""

    def __init__(self, causal: Any) -> None:
        self.causal = causal.eval()
        self.path, self.layers = _find_layers(causal)
        self.base = causal.get_submodule(self.path.rpartition(".")[0])
        self.num_outputs = 0
        self._calls: list[LayerCall | None] = []
        self._substitute: Tensor | None = None
        self._arguments = list(inspect.signature(type(self.layers[0]).forward).parameters)[2:]  # behind hidden states
        for index, layer in enumerate(self.layers):
            layer.forward = partial(self._take_down, index)

    def prepare(self, hidden: Tensor, positions: Tensor, cache: TextCache, mask: Any) -> list[LayerCall]:
        """How each layer is called in a pass over rows hidden [T, hidden] at positions [T]; the first one's hidden
        states are what the pass begins with.

        mask: [1, 1, T, S], or by the layers' kinds.
        """
        self._run(hidden, positions, cache, mask)
        return [call for call in self._calls if call is not None]

    def finish(self, hidden: Tensor) -> Tensor:
        """What a pass makes of its last layer's output [R, hidden]: the same, normed."""
        rows = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        mask = torch.ones(1, 1, len(hidden), len(hidden), dtype=torch.bool, device=hidden.device)
        self._substitute = hidden[None]
        try:
            return self._run(hidden, rows, TextCache(0), mask).view(hidden.shape)
        finally:
            self._substitute = None

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, vocab] of states [R, hidden] as `finish` returns them."""
        with self._saying(states):
            found: Tensor = self.causal(inputs_embeds=states[None], use_cache=False).logits[0]
        return found

    @contextmanager
    def _saying(self, states: Tensor) -> Iterator[None]:
        """A pass computes nothing, and ends with these states. Raises ValueError where nobody asked for them."""
        asked = list[Outputs]()

        def forward(*args: Any, **kwargs: Any) -> Outputs:
            asked.append(Outputs(last_hidden_state=states[None]))
            return asked[-1]

        self.base.forward = forward
        try:
            yield
        finally:
            del self.base.forward
        if not asked:
            raise ValueError("its logits do not follow from what its layers end with")

    def call_layer(self, index: int, call: LayerCall, hidden: Tensor) -> Tensor:
        """Layer `index` over hidden states [T, hidden] → [T, hidden]."""
        layer: Any = self.layers[index]
        out = type(layer).forward(layer, hidden[None], **call.kwargs)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found[0]

    def _run(self, hidden: Tensor, positions: Tensor, cache: TextCache, mask: Any) -> Tensor:
        self._calls = [None] * len(self.layers)
        found = self.base(
            inputs_embeds=hidden[None],
            position_ids=positions[None],
            past_key_values=cache,
            attention_mask=mask,
            use_cache=True,
        )
        states: Tensor = found[0]
        return states

    def _take_down(self, index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._calls[index] = LayerCall(hidden_states, dict(zip(self._arguments, args, strict=False)) | kwargs)
        out = hidden_states if self._substitute is None else self._substitute
        return (out, *[None] * (self.num_outputs - 1)) if self.num_outputs else out

    # ---------------------------------------------------------------------------------------- its parts

    def name_of(self, module: nn.Module) -> str:
        """A module's path in the whole model."""
        names: Iterator[str] = (name for name, found in self.causal.named_modules() if found is module)
        return next(names)

    @property
    def embedding(self) -> Any:
        return self.causal.get_input_embeddings()

    @property
    def head(self) -> Any:
        return self.causal.get_output_embeddings()

    def fill_buffers(self, device: torch.device, *, inside_layers: bool = True) -> None:
        """Compute the tables that modules make from their config, on `device`. Raises UnsupportedModelError."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        modules = [m for m in self.causal.modules() if m._buffers and (inside_layers or id(m) not in inside)]
        found = [(m, name) for m in modules for name in m._non_persistent_buffers_set if m._buffers[name] is not None]
        total = sum(_buffer(m, name).nbytes for m, name in found)
        if total > MAX_BUFFER_BYTES:
            raise UnsupportedModelError(
                f"{self.causal.config.model_type}'s modules keep tables of {total >> 20} MiB beside their weights, "
                "which is more than is made room for"
            )
        for module, name in found:
            module._buffers[name] = torch.full_like(_buffer(module, name), _blank(_buffer(module, name)), device="cpu")
        with torch.no_grad():
            for module in {id(m): m for m, _ in found}.values():
                self.causal._init_weights(module)
        for module, name in found:
            table = _buffer(module, name)
            if bool((table != table).all() if table.is_floating_point() else (table == _blank(table)).all()):
                raise UnsupportedModelError(
                    f"{self.causal.config.model_type}'s modules do not say how their table {name!r} is computed"
                )
            module._buffers[name] = table.to(device)


def _buffer(module: nn.Module, name: str) -> Tensor:
    found = module._buffers[name]
    assert found is not None
    return found


def _blank(table: Tensor) -> float:
    """What stands in a table that nobody has computed: no table is full of it."""
    return float("nan") if table.is_floating_point() else UNLIKELY


def _find_layers(causal: Any) -> tuple[str, list[nn.Module]]:
    """The list of layers with its path: as many modules of one class as config.json says."""
    wanted = causal.config.num_hidden_layers
    lists = [(name, found) for name, found in causal.named_modules() if isinstance(found, nn.ModuleList)]
    fitting = [
        (name, list(found)) for name, found in lists if len(found) == wanted and len({type(m) for m in found}) == 1
    ]
    if not fitting:
        raise UnsupportedModelError(f"{causal.config.model_type}'s layers are not one list of decoder layers")
    return min(fitting, key=lambda item: item[0].count("."))


# ------------------------------------------------------------------------------------------------ from a config.json


def knows(model_type: object) -> bool:
    """Whether transformers has modules that write text with such a model."""
    return (
        isinstance(model_type, str) and model_type in CONFIG_MAPPING and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def build(raw: Json, form: CallForm | None = None, dtype: torch.dtype = torch.float32) -> Modules:
    """The modules of a config.json that transformers `knows`, on the meta device, for arithmetic in `dtype`.

    form: as it was found out before. Raises CheckpointError for a config.json that they do not accept,
    UnsupportedModelError for what cannot be run through them.
    """
    config = _config(raw)
    library: Any = transformers  # not typed where it is used here
    library.logging.set_verbosity_error()  # what it warns of here is training, and speed
    for attention in (form.attention,) if form else ("sdpa", "eager"):
        try:
            with torch.device("meta"):
                causal = library.AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
                )
        except ValueError as exc:
            if attention == "sdpa" and "scaled_dot_product_attention" in str(exc):
                continue
            raise _refusal(raw, exc) from exc
        except Exception as exc:
            raise _refusal(raw, exc) from exc
        break
    modules = Modules(causal)
    _check_arguments(modules, raw)
    modules.num_outputs = form.num_outputs if form else 0
    return modules


def _refusal(raw: Json, exc: Exception) -> CheckpointError:
    told = " ".join(str(exc).split()) or type(exc).__name__
    return CheckpointError(f"config.json: transformers does not accept it as {show(raw['model_type'])}: {told[:300]}")


def _config(raw: Json) -> Any:
    _check_sizes(raw)
    model_type = raw["model_type"]
    named = raw.get("architectures") or []
    if isinstance(named, list) and named and not any("CausalLM" in str(n) or "LMHead" in str(n) for n in named):
        raise UnsupportedModelError(f"{show(named[0])} is no model that writes text; only those are supported")
    try:
        given = {key: value for key, value in raw.items() if key not in _LEFT_OUT}
        config = transformers.AutoConfig.for_model(model_type, **given)
        config.output_attentions = config.output_hidden_states = config.output_router_logits = False
        config.return_dict = config.use_cache = True
        config._experts_implementation = "eager"
    except Exception as exc:
        raise _refusal(raw, exc) from exc
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{model_type} has an encoder; only decoders are supported")
    if config.get_text_config() is not config:
        raise UnsupportedModelError(f"{model_type} is made of several models (images, sound); only text is supported")
    _check_kinds(config)
    return config


def _check_sizes(raw: Json) -> None:
    """Raises CheckpointError for more layers or experts than any model has: each of them is made of Python objects."""
    for key, value in raw.items():
        most = MAX_MODULES if key.endswith(("layer", "layers", "experts")) else MAX_SIZE
        if isinstance(value, int) and abs(value) > most:
            raise CheckpointError(f"config.json: {show(key)} must be at most {most}, not {show(value)}")


def _check_kinds(config: Any) -> None:
    """Raises UnsupportedModelError for kinds of layers, of RoPE and of biases that a tree cannot go through."""
    name = config.model_type
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ATTENTION_KINDS:
            reason = RECURRENT if any(word in kind for word in ("linear", "mamba", "conv", "recurrent")) else ""
            raise UnsupportedModelError(f"{name} {reason or f'has layers of a kind that is not supported ({kind})'}")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{name} biases attention by distance (ALiBi), which is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    if unsteady := [kind["rope_type"] for kind in kinds if kind.get("rope_type") in UNSTEADY_ROPE]:
        raise UnsupportedModelError(f"{name}'s RoPE changes with the text's length ({unsteady[0]}): not supported")


def _check_arguments(modules: Modules, raw: Json) -> None:
    """Raises UnsupportedModelError where a pass cannot be told of positions, masks or a cache."""
    taken = inspect.signature(modules.base.forward).parameters
    missing = [n for n in ("past_key_values", "position_ids", "attention_mask", "inputs_embeds") if n not in taken]
    if missing:
        why = {
            "past_key_values": RECURRENT,
            "position_ids": "counts positions by itself, so that it cannot hold a tree of guesses",
        }.get(missing[0], f"takes no {missing[0]}")
        raise UnsupportedModelError(f"{raw['model_type']} {why}: not supported through transformers' modules")
