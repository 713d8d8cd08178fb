"""Low-rank additions to a draft's matrices (LoRA, 2106.09685): W + B A, with A [r, K] and B [N, r], and their file.

The additions are trained with the original weights, and merged into the tensors that drafting uses. So drafting costs
the same as before. The original weights are kept, so repeated merging accumulates no error. Merging is in place, so
captured CUDA graphs stay valid (`cuda_graphs`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.backends.weights import Weight
from offspec.loaders.files.small_files import open_regular
from offspec.loaders.streaming.weights import RamWeights
from offspec.scheduler.trees.token_tree import ROOT

from ..checkpoints.atomic_files import write_atomically
from ..errors import UsageError
from ..model.block import matrix_shapes
from ..model.config import ModelConfig
from ..model.cuda_graphs import is_static
from ..model.decoder import Decoder
from ..model.names import LAYER_PREFIX, in_layer
from ..model.parts.part import Attending, Entries, ExpertsOfLayer, LayerWeights, PassRows, RowsWithoutMemory, TextPaths
from ..model.rope import Rotations

FILE_FORMAT, FILE_VERSION = "offspec draft adapter", "1"
MERGED_ELEMENTS = 2**24  # elements of a matrix merged at once; limits fp32 copies
A, B = "lora_a", "lora_b"
PARTS = ("weight", A, B)


def adapted_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Full name → [N, K] of the matrices with additions: all projections, and the head (if tied, the embedding)."""
    layers = range(config.num_layers)
    shapes = {in_layer(i, f"{name}.weight"): shape for i in layers for name, shape in matrix_shapes(config, i).items()}
    shapes[config.head_name] = (config.vocab_size, config.hidden_size)
    return shapes


def adapter_bytes(config: ModelConfig, rank: int, itemsize: int) -> int:
    """Bytes of an `Adapter` in training: the originals, and four fp32 numbers (value, gradient, Adam's two) each."""
    shapes = adapted_shapes(config).values()
    return sum(rows * columns * itemsize + 16 * rank * (rows + columns) for rows, columns in shapes)


class Adapter:
    """The additions to one draft. `pairs`: (A, B), fp32 parameters, by the full name of their matrix.

    originals: these matrices before training. merged: the draft's own tensors; additions are merged into them in place.
    """

    def __init__(self, draft: Decoder, rank: int, seed: int = 0) -> None:
        """At first, every B is 0: the draft is unchanged. Raises UsageError for a draft with unchangeable weights."""
        if not is_static(draft) or not all(isinstance(weight, Tensor) for weight in weights_of(draft).values()):
            raise UsageError(
                "the draft's weights are quantised or streamed, and only plain resident ones can learn; choose a draft "
                "in bf16, fp16 or fp32 (`draft=PATH`)"
            )
        tensors = {name: weight for name, weight in weights_of(draft).items() if isinstance(weight, Tensor)}
        self._begin(draft, tensors, adapted_shapes(draft.config), rank, seed)

    def _begin(
        self, draft: Decoder, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]], rank: int, seed: int
    ) -> None:
        """tensors: the draft's weights by full name. shapes: of those with additions."""
        self.draft, self.share, self._shapes = draft, 1.0, shapes
        self.merged = {name: tensors[name] for name in shapes}
        self.originals = {name: tensor.clone() for name, tensor in self.merged.items()}
        self._others = {name: tensor for name, tensor in tensors.items() if name not in shapes}
        generator = torch.Generator().manual_seed(seed)
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (rows, columns) in shapes.items():
            a = torch.randn(rank, columns, generator=generator) / columns**0.5
            self._put(name, a, torch.zeros(rows, rank))

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for pair in self.pairs.values() for parameter in pair]

    @torch.no_grad()
    def merge(self, share: float = 1.0) -> None:
        """Set the draft's weights to the originals plus `share` times the additions, rounded once to their dtype."""
        self.share = share
        for name, (a, b) in self.pairs.items():
            step = max(1, MERGED_ELEMENTS // a.shape[1])
            for first in range(0, len(b), step):
                rows = slice(first, first + step)
                self.merged[name][rows] = torch.addmm(self.originals[name][rows].float(), b[rows], a, alpha=share)

    def trainee(self, share: float = 1.0) -> Decoder:
        """The draft as a function of `share` times the additions, for training."""
        tensors = {**self._others, **self.originals}
        for name, (a, b) in self.pairs.items():
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}{A}": a, f"{stem}{B}": b}
        return Trainee(self.draft, tensors, share)

    def _put(self, name: str, a: Tensor, b: Tensor) -> None:
        device = self.draft.device
        self.pairs[name] = (
            a.to(device, torch.float32).requires_grad_(),
            b.to(device, torch.float32).requires_grad_(),
        )

    # ---------------------------------------------------------------------------------------- files

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the original draft, independent of its dtype: its config beyond the shapes, and all weights."""
        c = self.draft.config
        about = (c.model_type, c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps, c.rope, c.windows)
        digest = hashlib.sha256(repr(about).encode())
        if differences := c.differences():
            digest.update(repr(differences).encode())
        for name, tensor in sorted({**self._others, **self.originals}.items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the merged share of the additions as safetensors, atomically. Raises StorageError."""
        tensors = dict[str, Tensor]()
        for name, (a, b) in self.pairs.items():
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}{A}": a.detach().cpu(), f"{stem}{B}": self.share * b.detach().cpu()}
        about = {"format": FILE_FORMAT, "version": FILE_VERSION, "draft": self.fingerprint}
        write_atomically(path, save(tensors, about))

    def load(self, path: Path) -> None:
        """Read additions from a file, and merge them.

        Raises UsageError for another draft's file, or any other file.
        """
        if (saved := SavedAdapter.read(path)).draft != self.fingerprint:
            raise UsageError(
                f"{path} was learnt for another draft; choose that draft (`draft=PATH`) or another file (`learn_file`)"
            )
        adapters = {}
        for name, (rows, columns) in self._shapes.items():
            stem = name.removesuffix("weight")
            a, b = saved.tensors.get(f"{stem}{A}"), saved.tensors.get(f"{stem}{B}")
            fits = a is not None and b is not None and a.dim() == b.dim() == 2
            if not fits or (a.shape[1], *b.shape) != (columns, rows, a.shape[0]):  # type: ignore[union-attr]
                raise UsageError(f"{path} is damaged: its matrices for {name} have wrong shapes; delete it")
            adapters[name] = (a, b)
        if not all(bool(tensor.isfinite().all()) for tensor in saved.tensors.values()):
            raise UsageError(f"{path} is damaged: it contains numbers that are not finite; delete it")
        for name, (a, b) in adapters.items():
            self._put(name, a, b)  # type: ignore[arg-type]
        self.merge()


@dataclass(frozen=True)
class SavedAdapter:
    """The content of a file: additions by name, and the fingerprint of their draft."""

    draft: str
    tensors: Mapping[str, Tensor]

    @classmethod
    def is_in(cls, path: Path) -> bool:
        """Whether `Adapter.save` wrote the file."""
        try:
            cls.read(path)
        except UsageError:
            return False
        return True

    @classmethod
    def read(cls, path: Path) -> SavedAdapter:
        """Raises UsageError for a file that cannot be read or that `Adapter.save` did not write."""
        try:
            with open_regular(path):  # safe_open would block on a pipe
                pass
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FILE_FORMAT:
                    raise UsageError(
                        f"{path} was not written by a draft that learns (`learn`); choose another file (`learn_file`)"
                    )
                if about.get("version") != FILE_VERSION:
                    raise UsageError(
                        f"{path} has format version {about.get('version')}, only {FILE_VERSION} is supported; "
                        "update offspec"
                    )
                names = file.keys()
                # Copy: safe_open's tensors are in the mapped file, which another process may overwrite.
                return cls(about.get("draft", ""), {name: file.get_tensor(name).clone() for name in names})
        except OSError as exc:
            raise UsageError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except SafetensorError as exc:
            raise UsageError(f"{path} is not a safetensors file ({exc}); choose another file (`learn_file`)") from exc


def weights_of(decoder: Decoder) -> dict[str, Weight]:
    """All weights of a resident decoder by their full names."""
    weights, named = decoder.weights, dict[str, Weight]()
    for index in range(decoder.config.num_layers):
        with weights.layer(index) as layer:
            named |= {in_layer(index, name): weight for name, weight in layer.items()}
    return named | {name: weights.shared(name) for name in decoder.config.shared_shapes()}


# ------------------------------------------------------------------------------------------------ differentiable


class TreeRows(RowsWithoutMemory):
    """`PassRows` of a tree of T tokens, without a KV cache. Each token attends to itself and its ancestors.

    parents [T]: the row of the previous token, lower than its own; ROOT at a text's start.
    """

    def __init__(self, decoder: Decoder, parents: npt.NDArray[np.integer]) -> None:
        sees = np.eye(len(parents), dtype=np.bool_)
        for row, parent in enumerate(parents.tolist()):
            if parent != ROOT:
                sees[row] |= sees[parent]
        positions = torch.from_numpy(sees.sum(1) - 1).to(decoder.device)
        self.rotations = Rotations(positions)
        self.chunks = [(0, len(parents))]
        self._distance = positions[:, None] - positions
        self._sees = torch.from_numpy(sees).to(decoder.device)
        self._parents = torch.from_numpy(np.asarray(parents, dtype=np.int64)).to(decoder.device)

    def paths(self) -> list[TextPaths]:
        return [TextPaths(slice(0, len(self._parents)), self._sees, self._parents)]

    def mask(self, first: int, last: int, window: int | None) -> Tensor:
        sees = self._sees if window is None else self._sees & (self._distance < window)
        return sees[first:last]

    def exchange(self, layer: int, entries: Entries | None, first: int, last: int) -> Entries:
        assert entries is not None, "layers that share entries are not trained"
        return entries[0].transpose(0, 1), entries[1].transpose(0, 1)


class CausalTexts(RowsWithoutMemory):
    """`PassRows` of several texts of one length, one after the other: a plain causal pass without a KV cache."""

    def __init__(self, device: torch.device, num_texts: int, length: int) -> None:
        self._positions = torch.arange(length, device=device)
        self._num_texts, self._length = num_texts, length
        self.rotations = Rotations(self._positions.repeat(num_texts))
        self.chunks = [(0, num_texts * length)]

    def paths(self) -> list[TextPaths]:
        ancestors, length = self.mask(0, self._length, None), self._length
        firsts = range(0, self._num_texts * length, length)
        return [TextPaths(slice(first, first + length), ancestors, self._positions - 1) for first in firsts]

    def mask(self, first: int, last: int, window: int | None) -> Tensor:
        """Of one text; `first` and `last` are all of its rows."""
        ages = self._positions[:, None] - self._positions
        return (ages >= 0) if window is None else (ages >= 0) & (ages < window)

    def exchange(self, layer: int, entries: Entries | None, first: int, last: int) -> Entries:
        assert entries is not None, "layers that share entries are not trained"
        return entries[0].transpose(0, 1), entries[1].transpose(0, 1)

    def attend(
        self,
        part: Attending,
        queries: Tensor,
        entries: Entries | None,
        first: int,
        last: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert entries is not None, "layers that share entries are not trained"
        texts = zip(*(torch.split(each, self._length) for each in (queries, *entries)), strict=True)
        attended = (
            super(CausalTexts, self).attend(part, each, (keys, values), 0, self._length, sinks)
            for each, keys, values in texts
        )
        return torch.cat(list(attended))


class AdaptedWeights(LayerWeights):
    """Weights plus `share` times their additions: x.lora_a and x.lora_b beside x.weight."""

    def __init__(
        self, tensors: Mapping[str, Weight], share: float, backend: Backend, experts: ExpertsOfLayer | None = None
    ) -> None:
        super().__init__(tensors, backend, experts=experts)
        self._share = share

    def linear(self, name: str, x: Tensor) -> Tensor:
        a, b = self._pair(name)
        return super().linear(name, x) + self._share * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))

    def linears(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        return [self.linear(name, x) for name in names]

    def linear_fp32(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).float()

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        a, b = self._pair(name)
        return super().matrix(name, dtype) + self._share * (b.to(dtype) @ a.to(dtype))

    def added_rows(self, name: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """The additions to rows `indices` [T] of `name.weight`: [T, K]."""
        a, b = self._pair(name)
        return self._share * (F.embedding(indices, b).to(dtype) @ a.to(dtype))

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        a, b = self.tensors[f"{name}.{A}"], self.tensors[f"{name}.{B}"]
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        return a, b


def hidden_states(decoder: Decoder, tokens: Tensor, rows: PassRows) -> Tensor:
    """States [T, hidden] of tokens [T], on the device, after the last layer. Keeps gradients."""
    x = decoder.embed(tokens)
    for block in decoder.blocks:
        with decoder.weights.layer(block.index) as tensors:
            x = block.forward(x, decoder.layer_weights(tensors), rows, *rows.chunks[0])
    return x


class Trainee(Decoder):
    """The draft with `share` times the additions to its matrices. Keeps gradients."""

    def __init__(self, draft: Decoder, tensors: Mapping[str, Tensor], share: float) -> None:
        """tensors: weights and additions by their full names."""
        weights = RamWeights.from_tensors(tensors, layer_prefix=LAYER_PREFIX)
        super().__init__(draft.config, weights, dtype=draft.dtype, device=draft.device)
        self.share = share

    def layer_weights(
        self, tensors: Mapping[str, Weight], layer: int | None = None, backend: Backend | None = None
    ) -> LayerWeights:
        experts = None if layer is None else ExpertsOfLayer(partial(self.weights.experts, layer))
        return AdaptedWeights(tensors, self.share, backend or self.backend, experts)

    def head_weights(self, backend: Backend) -> AdaptedWeights:
        stem = self.config.head_name.removesuffix("weight")
        tensors = {f"head.{part}": self.weights.shared(stem + part) for part in PARTS}
        return AdaptedWeights(tensors, self.share, backend)

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        rows = super().embedding_rows(tokens)
        if not self.config.tied_head:
            return rows
        return rows + self.head_weights(self.backend).added_rows("head", tokens, rows.dtype)
