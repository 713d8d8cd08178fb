"""Finds the properties of a model's transformers modules by running them without weights.

These are the form of layers' results, each layer's window, the form of masks, and each layer's KV entries. Anything
inconsistent is refused, because text must be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import UnsupportedModelError
from .memory.kv_cache import KVLayout
from .transformers_config import CallForm
from .transformers_modules import RECURRENT, LayerCall, Modules, RecurrentStateError, TextCache

MAX_PROBED_KEYS = 2**20
OUTPUT_FORMS = (0, 1, 2, 3)  # 0: hidden states only; n: n values, hidden states first


@dataclass(frozen=True)
class Probed:
    """The properties found; `ForeignConfig` explains the fields."""

    form: CallForm
    hidden_size: int
    max_context: int
    windows: tuple[int | None, ...]
    kv: tuple[KVLayout, ...]
    key_value_dims: tuple[tuple[int, int], ...]
    has_linear_head: bool


class SeenKeysError(Exception):
    """Carries the keys and values that a layer passes to the cache."""

    def __init__(self, layer: int, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.keys = keys
        self.values = values


class ProbeCache(TextCache):
    """A cache of `length` tokens that stops a layer at its keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        raise SeenKeysError(layer_idx, key_states, value_states)


def probe(modules: Modules) -> Probed:
    """Probe fresh modules, which cannot be used for anything else afterwards. Raises UnsupportedModelError."""
    return _Probe(modules).found()


class _Probe:
    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self.config = modules.causal.config
        self.name = self.config.model_type
        self.width = int(modules.embedding.weight.shape[1])
        longest = getattr(self.config, "max_position_embeddings", None)
        if not isinstance(longest, int) or longest < 1:
            raise self.refusal("does not state its maximum context")
        self.max_context = longest
        if any(b.dtype == torch.bool for layer in modules.layers for b in layer.buffers()):
            raise self.refusal("has its own masks inside its layers")
        try:
            modules.fill_buffers(torch.device("cpu"), inside_layers=False)
        except UnsupportedModelError:
            raise
        except Exception as exc:  # foreign code may raise anything
            raise self.refusal(f"does not compute its tables ({one_line(exc)})") from exc
        _fill_parameters(modules)

    def refusal(self, problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name} {problem}; not supported through transformers' modules")

    def found(self) -> Probed:
        calls = self._find_outputs()
        windows = self._windows()
        has_kinds = self._has_mask_kinds(windows)
        kept = [self._keys_and_values(index, call) for index, call in enumerate(calls)]
        return Probed(
            CallForm(
                attention=self.config._attn_implementation,
                num_outputs=self.modules.num_outputs,
                has_mask_kinds=has_kinds,
            ),
            self.width,
            self.max_context,
            windows,
            tuple(layout for layout, _ in kept),
            tuple(dims for _, dims in kept),
            self._has_linear_head(),
        )

    def _prepare(self, length: int, num_rows: int, mask: Any) -> list[LayerCall]:
        """The calls of a pass over rows after `length` tokens, on the CPU. Raises any exception of the modules."""
        positions = torch.arange(length, length + num_rows)
        calls = self.modules.prepare(torch.zeros(num_rows, self.width), positions, ProbeCache(length), mask)
        if len(calls) != len(self.modules.layers) or any(c.hidden.shape != (1, num_rows, self.width) for c in calls):
            raise ValueError("its layers are not called one after the other with the same hidden states")
        return calls

    def _find_outputs(self) -> list[LayerCall]:
        """Find the form of layers' results. Returns the calls of a pass of two rows."""
        failures = list[Exception]()
        for form in OUTPUT_FORMS:
            self.modules.num_outputs = form
            try:
                return self._prepare(0, 2, _causal(2))
            except RecurrentStateError as exc:
                raise self.refusal(RECURRENT) from exc
            except Exception as exc:  # noqa: BLE001 (foreign code may raise anything)
                failures.append(exc)
        raise self.refusal(f"does not prepare its passes as decoders do ({one_line(failures[0])})")

    def _windows(self) -> tuple[int | None, ...]:
        """Each layer's window, from the masks that its own code makes; None is full attention."""
        longest = min(self.max_context, MAX_PROBED_KEYS)
        seen = [self._visible(longest - shorter) for shorter in (0, 1)]
        windows = list[int | None]()
        for layer, (most, fewer) in enumerate(zip(*seen, strict=True)):
            if most == longest and fewer == longest - 1:
                windows.append(None)
            elif most == fewer >= 1:
                windows.append(most)
            else:
                raise self.refusal(f"has its own mask in layer {layer}")
        return tuple(windows)

    def _visible(self, num_keys: int) -> list[int]:
        """How many of `num_keys` keys the last row attends to, per layer."""
        try:
            masks = [call.mask for call in self._prepare(num_keys - 1, 1, None)]
        except Exception as exc:
            raise self.refusal(f"does not make masks ({one_line(exc)})") from exc
        return [num_keys if mask is None else int(_seen(mask)[..., -1, :].sum()) for mask in masks]

    def _has_mask_kinds(self, windows: Sequence[int | None]) -> bool:
        """Whether masks must be passed by kinds of layers; otherwise all layers have one mask."""
        kinds = {window is None: _causal(2) for window in windows}
        if len(set(windows)) > len(kinds):
            raise self.refusal("has windows of several widths")
        for mask in (*(kinds.values() if len(kinds) == 1 else ()), by_kind(kinds)):
            try:
                calls = self._prepare(0, 2, mask)
            except Exception:  # noqa: BLE001 (modules may raise anything for unsupported masks)
                continue
            if all(call.mask is kinds[w is None] for call, w in zip(calls, windows, strict=True)):
                return isinstance(mask, dict)
        raise self.refusal("does not pass given masks to its layers")

    def _keys_and_values(self, index: int, call: LayerCall) -> tuple[KVLayout, tuple[int, int]]:
        """The shape of a layer's KV entry, found on the meta device."""

        def on_meta(value: Any) -> Any:
            return value.to("meta") if isinstance(value, Tensor) else value

        meta = LayerCall(call.hidden, tree_map(on_meta, dict(call.kwargs)))
        try:
            self.modules.call_layer(index, meta, torch.zeros(2, self.width, device="meta"))
        except SeenKeysError as seen:
            shapes = seen.keys.shape, seen.values.shape
            if seen.layer == index and all(len(s) == 4 and (s[0], s[2]) == (1, 2) for s in shapes):
                (_, key_heads, _, key_dim), (_, value_heads, _, value_dim) = shapes
                if key_heads == value_heads:
                    return KVLayout(key_heads, max(key_dim, value_dim)), (key_dim, value_dim)
        except RecurrentStateError as exc:
            raise self.refusal(RECURRENT) from exc
        except Exception as exc:
            raise self.refusal(f"has a layer {index} that cannot be probed ({one_line(exc)})") from exc
        raise self.refusal(f"has a layer {index} without its own keys and values")

    def _has_linear_head(self) -> bool:
        """Whether logits are linear in the final states."""
        head = self.modules.head
        if type(head).forward is not nn.Linear.forward:
            raise self.refusal("has a head that is not a matrix")
        head.forward = lambda states: states
        states = torch.randn(2, self.width, generator=torch.Generator().manual_seed(0)) * 20
        try:
            once, twice = (self.modules.logits(factor * states) for factor in (1, 2))
        except Exception as exc:
            raise self.refusal(f"does not compute its logits as decoders do ({one_line(exc)})") from exc
        return head.bias is None and torch.allclose(2 * once, twice)


def one_line(exc: Exception) -> str:
    """An exception of foreign code on one line of limited length."""
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:200]


def by_kind(masks: dict[bool, Tensor]) -> dict[str, Tensor]:
    """Masks of layers without (True) and with (False) a window, by transformers' kinds of layers."""
    some = next(iter(masks.values()))
    return {"full_attention": masks.get(True, some), "sliding_attention": masks.get(False, some)}


def _causal(num_rows: int) -> Tensor:
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()[None, None]


def _seen(mask: Tensor) -> Tensor:
    """A mask as bools; it may be one of numbers to add to scores."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _fill_parameters(modules: Modules) -> None:
    """Zeros for the parameters outside the layers, without allocating memory."""
    inside = {id(p) for layer in modules.layers for p in layer.parameters()}
    for module in modules.causal.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in inside:
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(zeros, requires_grad=False)
