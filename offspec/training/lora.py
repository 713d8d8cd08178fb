"""Low-rank additions to a draft's matrices (LoRA, 2106.09685): W + B A, with A [r, K] and B [N, r], and their file.

They are trained beside the weights as those came from the checkpoint, and merged into the tensors that drafting uses:
drafting costs what it did, and because the originals are kept, merging often does not drift. Merging is in place, so
CUDA graphs that were captured before hold (`cuda_graphs`). Knows nothing of what is learnt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from offspec.loaders.formats import Weight
from offspec.loaders.small_files import open_regular
from offspec.loaders.weights import RamWeights
from offspec.scheduler.tree import ROOT

from ..checkpoints.atomic_files import write_atomically
from ..errors import UsageError
from ..model.block import LayerWeights, matrix_shapes
from ..model.config import ModelConfig
from ..model.cuda_graphs import is_static
from ..model.decoder import Decoder
from ..model.names import LAYER_PREFIX, in_layer
from ..model.rope import Rotations

FILE_FORMAT, FILE_VERSION = "offspec draft adapter", "1"
MERGED_ELEMENTS = 2**24  # of a matrix at a time, whose copies in fp32 are what merging takes
A, B = "lora_a", "lora_b"
PARTS = ("weight", A, B)


def adapted_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Full name → [N, K] of the matrices that get an addition: all projections, the head (tied: the embedding)."""
    shapes = matrix_shapes(config).items()
    found = {in_layer(i, f"{name}.weight"): shape for i in range(config.num_layers) for name, shape in shapes}
    found[config.head_name] = (config.vocab_size, config.hidden_size)
    return found


def adapter_bytes(config: ModelConfig, rank: int, itemsize: int) -> int:
    """What an `Adapter` in training takes: the originals, and four fp32 numbers (value, gradient, Adam's two) each."""
    shapes = adapted_shapes(config).values()
    return sum(rows * columns * itemsize + 16 * rank * (rows + columns) for rows, columns in shapes)


class Adapter:
    """The additions to one draft. `pairs`: (A, B), fp32 parameters, by the full name of their matrix.

    originals: these matrices as they came. merged: the draft's own tensors, to which the additions are merged in place.
    """

    def __init__(self, draft: Decoder, rank: int, seed: int = 0) -> None:
        """Changes nothing yet: every B is 0. Raises UsageError for a draft whose weights cannot be changed."""
        if not is_static(draft):
            raise UsageError(
                "the draft's weights are quantised or streamed, and only plain ones can learn; "
                "give one in bf16, fp16 or fp32"
            )
        self.draft, self.share = draft, 1.0
        tensors = _tensors(draft)
        shapes = adapted_shapes(draft.config)
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
        """Make the draft's weights what they came as plus `share` of the additions, rounded once to their dtype."""
        self.share = share
        for name, (a, b) in self.pairs.items():
            step = max(1, MERGED_ELEMENTS // a.shape[1])
            for first in range(0, len(b), step):
                rows = slice(first, first + step)
                self.merged[name][rows] = torch.addmm(self.originals[name][rows].float(), b[rows], a, alpha=share)

    def trainee(self, share: float = 1.0) -> Trainee:
        """The draft as a function of the additions, of which `share` counts."""
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
        """Of the draft as it came, whatever dtype it is computed in: what the shapes do not say, and every weight."""
        c = self.draft.config
        said = (c.model_type, c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps, c.rope, c.windows)
        digest = hashlib.sha256(repr(said).encode())
        if differences := c.differences():
            digest.update(repr(differences).encode())
        for name, tensor in sorted({**self._others, **self.originals}.items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write what was merged of the additions as safetensors, all of it or nothing. Raises StorageError."""
        tensors = dict[str, Tensor]()
        for name, (a, b) in self.pairs.items():
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}{A}": a.detach().cpu(), f"{stem}{B}": self.share * b.detach().cpu()}
        about = {"format": FILE_FORMAT, "version": FILE_VERSION, "draft": self.fingerprint}
        write_atomically(path, save(tensors, about))

    def load(self, path: Path) -> None:
        """Take the additions of a file, and merge them.

        Raises UsageError for another draft's, or what is no such file.
        """
        if (saved := SavedAdapter.read(path)).draft != self.fingerprint:
            raise UsageError(f"{path} was learnt for another draft; give the draft it belongs to, or another file")
        found = {}
        for name, (rows, columns) in adapted_shapes(self.draft.config).items():
            stem = name.removesuffix("weight")
            a, b = saved.tensors.get(f"{stem}{A}"), saved.tensors.get(f"{stem}{B}")
            fits = a is not None and b is not None and a.dim() == b.dim() == 2
            if not fits or (a.shape[1], *b.shape) != (columns, rows, a.shape[0]):  # type: ignore[union-attr]
                raise UsageError(f"{path} is damaged: what it has for {name} does not fit; remove it and learn anew")
            found[name] = (a, b)
        if not all(bool(tensor.isfinite().all()) for tensor in saved.tensors.values()):
            raise UsageError(f"{path} is damaged: it holds numbers that are not finite; remove it and learn anew")
        for name, (a, b) in found.items():
            self._put(name, a, b)  # type: ignore[arg-type]
        self.merge()


@dataclass(frozen=True)
class SavedAdapter:
    """What a file holds: additions by name, and the fingerprint of the draft that they belong to."""

    draft: str
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> SavedAdapter:
        """Raises UsageError for a file that cannot be read or that `Adapter.save` did not write."""
        try:
            with open_regular(path):  # safe_open would wait for a pipe
                pass
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FILE_FORMAT:
                    raise UsageError(f"{path} holds nothing that --learn wrote; give another file")
                if about.get("version") != FILE_VERSION:
                    raise UsageError(
                        f"{path} has version {about.get('version')} of the format, "
                        f"and {FILE_VERSION} is read: update offspec"
                    )
                names = file.keys()
                # Copies: what safe_open gives lies in the mapped file, which somebody may write over.
                return cls(about.get("draft", ""), {name: file.get_tensor(name).clone() for name in names})
        except OSError as exc:
            raise UsageError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except SafetensorError as exc:
            raise UsageError(f"{path} is no safetensors file ({exc}); give another file") from exc


def _tensors(decoder: Decoder) -> dict[str, Tensor]:
    """All of a resident decoder's weights, by their full names."""
    weights, found = decoder.weights, dict[str, Tensor]()
    for index in range(decoder.config.num_layers):
        with weights.layer(index) as layer:
            found |= {in_layer(index, name): w for name, w in layer.items() if isinstance(w, Tensor)}
    shared = {name: weights.shared(name) for name in decoder.config.shared_shapes()}
    return found | {name: w for name, w in shared.items() if isinstance(w, Tensor)}


# ------------------------------------------------------------------------------------------------ differentiable


class TreeRows:
    """`PassRows` of a tree of T tokens, each seeing itself and its ancestors alone; nothing is kept of them.

    parents [T]: the row of the token before, lower than its own; ROOT where a text begins.
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

    def mask(self, first: int, last: int, window: int | None) -> Tensor:
        sees = self._sees if window is None else self._sees & (self._distance < window)
        return sees[first:last]

    def exchange(self, layer: int, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        return keys.transpose(0, 1), values.transpose(0, 1)


class AdaptedWeights(LayerWeights):
    """Weights that have additions: x.lora_a and x.lora_b beside x.weight. `share` of them counts."""

    def __init__(self, tensors: Mapping[str, Weight], share: float) -> None:
        super().__init__(tensors)
        self._share = share

    def linear(self, name: str, x: Tensor) -> Tensor:
        a, b = self._pair(name)
        return super().linear(name, x) + self._share * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))

    def added_rows(self, name: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """What the additions make of rows [T] of `name.weight`: [T, K]."""
        a, b = self._pair(name)
        return self._share * (F.embedding(indices, b).to(dtype) @ a.to(dtype))

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        a, b = self.tensors[f"{name}.{A}"], self.tensors[f"{name}.{B}"]
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        return a, b


class Trainee(Decoder):
    """The draft with additions to its matrices, of which `share` counts. Keeps gradients."""

    def __init__(self, draft: Decoder, tensors: Mapping[str, Tensor], share: float) -> None:
        """tensors: weights and additions by their full names."""
        weights = RamWeights.from_tensors(tensors, layer_prefix=LAYER_PREFIX)
        super().__init__(draft.config, weights, dtype=draft.dtype, device=draft.device)
        self.share = share

    def hidden(self, tokens: Tensor, rows: TreeRows) -> Tensor:
        """Hidden states [T, hidden] of tokens [T], on the device, after the last layer."""
        x = self.embed(tokens)
        for block in self.blocks:
            with self.weights.layer(block.index) as tensors:
                x = block.forward(x, self.layer_weights(tensors), rows, *rows.chunks[0])
        return x

    def layer_weights(self, tensors: Mapping[str, Weight]) -> LayerWeights:
        return AdaptedWeights(tensors, self.share)

    def head_weights(self) -> AdaptedWeights:
        stem = self.config.head_name.removesuffix("weight")
        return AdaptedWeights({f"head.{part}": self.weights.shared(stem + part) for part in PARTS}, self.share)

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        rows = super().embedding_rows(tokens)
        if not self.config.tied_head:
            return rows
        return rows + self.head_weights().added_rows("head", tokens, rows.dtype)
