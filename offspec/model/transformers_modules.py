"""transformers' modules of a model, without weights, and the division of their passes into layers.

transformers' code prepares a pass (position embeddings, masks, input embeddings), calls its layers, and finishes the
pass (norms). `Modules.prepare` runs it with layers that compute nothing and only record their arguments. Later the real
layers are called with these arguments, one by one, with borrowed weights.
Imports transformers; it downloads nothing, and runs no code of a checkpoint.
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

from offspec.loaders.files.checkpoint import show

from ..errors import CheckpointError, UnsupportedModelError
from .config_values import MAX_SIZE, Json, plain
from .transformers_config import CallForm

ATTENTION_KINDS = ("full_attention", "sliding_attention")
# These depend on the text's length: a tree's node would be rotated differently from the token that it becomes.
UNSTEADY_ROPE = ("dynamic", "longrope")
MAX_BUFFER_BYTES = 64 * 2**20  # of tables that modules compute from their config
MAX_MODULES = 1024  # the maximum number of layers, and of a layer's experts
UNLIKELY = 77
RECURRENT = "has recurrent layers (state-space or linear attention), which cannot process a token tree"
# Keys that are decided here, or unused: a classifier's labels would make a table of any size.
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
    """A layer requested a recurrent state."""


class TextCache(Cache):
    """The KV cache for transformers' modules, with `length` tokens. Subclasses store entries."""

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
    """A base model's outputs; missing ones are None."""

    def __getattr__(self, name: str) -> Any:
        return None


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer's call: hidden states [1, T, hidden], and the others by name."""

    hidden: Tensor
    kwargs: Mapping[str, Any]

    @property
    def mask(self) -> Any:
        return self.kwargs.get("attention_mask")


class Modules:
    """The modules of one model on the meta device; see `build`. path: the path of its list of layers."""

    def __init__(self, causal: Any) -> None:
        self.causal = causal.eval()
        self.path, self.layers = _find_layers(causal)
        self.base = causal.get_submodule(self.path.rpartition(".")[0])
        taken = inspect.signature(self.base.forward).parameters
        self.cache_argument = "cache" if "cache" in taken else "past_key_values"  # its name before transformers 5.24
        self.num_outputs = 0
        self._calls: list[LayerCall | None] = []
        self._substitute: Tensor | None = None
        self._arguments = list(inspect.signature(type(self.layers[0]).forward).parameters)[2:]  # after hidden states
        for index, layer in enumerate(self.layers):
            layer.forward = partial(self._record_call, index)

    def prepare(self, hidden: Tensor, positions: Tensor, cache: TextCache, mask: Any) -> list[LayerCall]:
        """The calls of all layers in a pass over rows hidden [T, hidden] at positions [T].

        The first call has the input of the first layer. mask: [1, 1, T, S], or masks by kinds of layers.
        """
        self._run(hidden, positions, cache, mask)
        return [call for call in self._calls if call is not None]

    def finish(self, hidden: Tensor) -> Tensor:
        """The final states [R, hidden] of a pass, from its last layer's output: after the final norm."""
        rows = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        mask = torch.ones(1, 1, len(hidden), len(hidden), dtype=torch.bool, device=hidden.device)
        self._substitute = hidden[None]
        try:
            return self._run(hidden, rows, TextCache(0), mask).view(hidden.shape)
        finally:
            self._substitute = None

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, vocab] of `finish`'s states [R, hidden]."""
        with self._returning(states):
            logits: Tensor = self.causal(inputs_embeds=states[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def _returning(self, states: Tensor) -> Iterator[None]:
        """Make the base model return these states without computing. Raises ValueError if it was not called."""
        calls = list[Outputs]()

        def forward(*args: Any, **kwargs: Any) -> Outputs:
            calls.append(Outputs(last_hidden_state=states[None]))
            return calls[-1]

        self.base.forward = forward
        try:
            yield
        finally:
            del self.base.forward
        if not calls:
            raise ValueError("its logits do not depend on its layers' output")

    def call_layer(self, index: int, call: LayerCall, hidden: Tensor) -> Tensor:
        """Layer `index` over hidden states [T, hidden] → [T, hidden]."""
        layer: Any = self.layers[index]
        out = type(layer).forward(layer, hidden[None], **call.kwargs)
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states[0]

    def _run(self, hidden: Tensor, positions: Tensor, cache: TextCache, mask: Any) -> Tensor:
        self._calls = [None] * len(self.layers)
        outputs = self.base(
            inputs_embeds=hidden[None],
            position_ids=positions[None],
            attention_mask=mask,
            use_cache=True,
            **{self.cache_argument: cache},
        )
        states: Tensor = outputs[0]
        return states

    def _record_call(self, index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._calls[index] = LayerCall(hidden_states, dict(zip(self._arguments, args, strict=False)) | kwargs)
        out = hidden_states if self._substitute is None else self._substitute
        return (out, *[None] * (self.num_outputs - 1)) if self.num_outputs else out

    # ---------------------------------------------------------------------------------------- its parts

    def name_of(self, module: nn.Module) -> str:
        """A module's path in the whole model."""
        names: Iterator[str] = (name for name, submodule in self.causal.named_modules() if submodule is module)
        return next(names)

    @property
    def embedding(self) -> Any:
        return self.causal.get_input_embeddings()

    @property
    def head(self) -> Any:
        return self.causal.get_output_embeddings()

    def fill_buffers(self, device: torch.device, *, inside_layers: bool = True) -> None:
        """Compute the tables that modules derive from their config, on `device`. Raises UnsupportedModelError."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        modules = [m for m in self.causal.modules() if m._buffers and (inside_layers or id(m) not in inside)]
        buffers = [(m, name) for m in modules for name in m._non_persistent_buffers_set if m._buffers[name] is not None]
        total = sum(_buffer(m, name).nbytes for m, name in buffers)
        if total > MAX_BUFFER_BYTES:
            raise UnsupportedModelError(
                f"{self.causal.config.model_type}'s modules have tables of {total >> 20} MiB beside their weights, "
                f"more than the limit of {MAX_BUFFER_BYTES >> 20} MiB"
            )
        for module, name in buffers:
            module._buffers[name] = torch.full_like(_buffer(module, name), _blank(_buffer(module, name)), device="cpu")
        with torch.no_grad():
            for module in {id(m): m for m, _ in buffers}.values():
                self.causal._init_weights(module)
        for module, name in buffers:
            table = _buffer(module, name)
            if bool((table != table).all() if table.is_floating_point() else (table == _blank(table)).all()):
                raise UnsupportedModelError(
                    f"{self.causal.config.model_type}'s modules do not compute their table {name!r}"
                )
            module._buffers[name] = table.to(device)


def _buffer(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


def _blank(table: Tensor) -> float:
    """The value of a table that was not computed; no real table consists of it."""
    return float("nan") if table.is_floating_point() else UNLIKELY


def _find_layers(causal: Any) -> tuple[str, list[nn.Module]]:
    """The path and the list of layers: num_hidden_layers modules of one class."""
    wanted = causal.config.num_hidden_layers
    lists = [
        (name, module_list) for name, module_list in causal.named_modules() if isinstance(module_list, nn.ModuleList)
    ]
    fitting = [
        (name, list(module_list))
        for name, module_list in lists
        if len(module_list) == wanted and len({type(m) for m in module_list}) == 1
    ]
    if not fitting:
        raise UnsupportedModelError(f"{causal.config.model_type}'s layers are not one list of decoder layers")
    return min(fitting, key=lambda item: item[0].count("."))


# ------------------------------------------------------------------------------------------------ from a config.json


def knows(model_type: object) -> bool:
    """Whether transformers has a text-generating model of this type."""
    return (
        isinstance(model_type, str) and model_type in CONFIG_MAPPING and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def build(raw: Json, form: CallForm | None = None, dtype: torch.dtype = torch.float32) -> Modules:
    """The modules of a config.json that transformers `knows`, on the meta device, for arithmetic in `dtype`.

    form: a result of `transformers_probe.probe`. Raises CheckpointError for a config.json that transformers does not
    accept, UnsupportedModelError for a model that offspec cannot run through these modules.
    """
    config = _config(raw)
    library: Any = transformers  # these functions have no types
    library.logging.set_verbosity_error()  # its warnings here are about training and speed
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
    reason = " ".join(str(exc).split()) or type(exc).__name__
    return CheckpointError(f"config.json: transformers does not accept it as {show(raw['model_type'])}: {reason[:300]}")


def _config(raw: Json) -> Any:
    _check_sizes(raw)
    model_type = raw["model_type"]
    named = raw.get("architectures") or []
    if isinstance(named, list) and named and not any("CausalLM" in str(n) or "LMHead" in str(n) for n in named):
        raise UnsupportedModelError(f"{show(named[0])} does not generate text; only models that do are supported")
    try:
        given = {key: plain(value) for key, value in raw.items() if key not in _LEFT_OUT}
        config = transformers.AutoConfig.for_model(model_type, **given)
        config.output_attentions = config.output_hidden_states = config.output_router_logits = False
        config.return_dict = config.use_cache = True
        config._experts_implementation = "eager"
    except Exception as exc:
        raise _refusal(raw, exc) from exc
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{model_type} has an encoder; only decoders are supported")
    if config.get_text_config() is not config:
        raise UnsupportedModelError(f"{model_type} is a multimodal model (images, sound); only text is supported")
    _check_kinds(config)
    return config


def _check_sizes(raw: Json) -> None:
    """Raises CheckpointError for absurd numbers of layers or experts, each of which needs Python objects."""
    for key, value in raw.items():
        most = MAX_MODULES if key.endswith(("layer", "layers", "experts")) else MAX_SIZE
        if isinstance(value, int) and abs(value) > most:
            raise CheckpointError(f"config.json: {show(key)} must be at most {most}, not {show(value)}")


def _check_kinds(config: Any) -> None:
    """Raises UnsupportedModelError for kinds of layers, RoPE and biases that do not support a token tree."""
    name = config.model_type
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ATTENTION_KINDS:
            reason = RECURRENT if any(word in kind for word in ("linear", "mamba", "conv", "recurrent")) else ""
            raise UnsupportedModelError(f"{name} {reason or f'has layers of an unsupported kind ({kind})'}")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{name} biases attention by distance (ALiBi), which is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    if unsteady := [kind["rope_type"] for kind in kinds if kind.get("rope_type") in UNSTEADY_ROPE]:
        raise UnsupportedModelError(f"{name}'s RoPE changes with the text's length ({unsteady[0]}), not supported")


def _check_arguments(modules: Modules, raw: Json) -> None:
    """Raises UnsupportedModelError if the modules do not accept positions, masks or a cache."""
    taken, cache = inspect.signature(modules.base.forward).parameters, modules.cache_argument
    missing = [name for name in (cache, "position_ids", "attention_mask", "inputs_embeds") if name not in taken]
    if missing:
        why = {
            cache: RECURRENT,
            "position_ids": "counts positions itself, so it cannot process a token tree",
        }.get(missing[0], f"does not accept {missing[0]}")
        raise UnsupportedModelError(f"{raw['model_type']} {why}; not supported through transformers' modules")
