"""What the parts of a layer have in common: their protocol, borrowed weights, and the rows of a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.backends.cpu import steps_add
from offspec.backends.expert_table import Chosen, ExpertTable
from offspec.backends.weights import Weight, dense
from offspec.backends.x86.row_steps import add_rows
from offspec.loaders.streaming.weights import LentExperts

from ..config import ModelConfig
from ..memory.kv_cache import MemoryLayout
from ..norms import normalize
from ..recorded_steps import RecordedSteps
from ..rope import RotaryEmbeddings, Rotations
from ..shapes import LayerShape
from .kv_attention import attend

Shape = tuple[int, ...]
Entries = tuple[Tensor, Tensor]  # keys and values [T, kv_heads, D] of T rows


class Attending(Protocol):
    """A part of layer `layer` that attends to KV entries, those of layer `entries_of`.

    window: positions that a row attends to; None: all.
    """

    layer: int
    entries_of: int
    config: ModelConfig
    shape: LayerShape
    window: int | None


class PassRows(Protocol):
    """The rows of one pass: their positions and chunks, and their attention.

    rotations: of the T rows' positions. chunks: (first, last) ranges of rows that go through a layer together.
    inputs [T, layers, size]: what layers get of each row's token (`parts.layer_input`); None: nothing.
    """

    @property
    def inputs(self) -> Tensor | None: ...

    @property
    def rotations(self) -> Rotations: ...

    @property
    def chunks(self) -> list[tuple[int, int]]: ...

    def attend(
        self,
        part: Attending,
        queries: Tensor,
        entries: Entries | None,
        first: int,
        last: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention [last - first, heads, head_dim] of rows first .. last, given their queries [T, heads, D].

        entries: theirs; None: layer `part.entries_of` has stored them in this pass. sinks: see
        `kv_attention.sink_result`.
        """


class RowsOfText(ABC):
    """`PassRows` of one text: its KV entries, and the mask over them."""

    inputs: Tensor | None = None

    @abstractmethod
    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """Bool [last - first, S]: the keys that rows first .. last attend to; None for all keys."""

    @abstractmethod
    def exchange(self, layer: int, entries: Entries | None, first: int, last: int) -> Entries:
        """Store the entries of rows first .. last, unless they are stored already.

        Returns the keys and values for their attention, [kv_heads, S, head_dim] each.
        """

    def attend(
        self,
        part: Attending,
        queries: Tensor,
        entries: Entries | None,
        first: int,
        last: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        keys, values = self.exchange(part.entries_of, entries, first, last)
        mask, c = self.mask(first, last, part.window), part.config
        return attend(queries, keys, values, mask, scale=c.attention_scale, cap=c.attention_cap, sinks=sinks)


@dataclass(frozen=True)
class TextPaths:
    """One text's rows among those of a pass that no memory keeps. ancestors: bool [T, T], each row itself among them.

    parents [T]: the row before each on its path, lower than its own; ROOT for the first one of a text.
    """

    rows: slice
    ancestors: Tensor
    parents: Tensor


class RowsWithoutMemory(RowsOfText):
    """Rows of whole texts, for training: recurrent parts begin with an empty state."""

    @abstractmethod
    def paths(self) -> list[TextPaths]:
        """The texts, in their order."""


@dataclass(frozen=True)
class ExpertsOfLayer:
    """A layer's experts. lend, table: see `WeightSource.experts` and `expert_table`. announce: see `LayerWeights`.

    table, announce: None if they are of no use.
    """

    lend: Callable[[Mapping[int, int]], Iterator[LentExperts]]
    table: Callable[[], ExpertTable | None] | None = None
    announce: Callable[[Tensor], None] | None = None


class LayerWeights:
    """One unit's weights by their short names, with the operations that parts need: a layer's, or an expert's."""

    def __init__(
        self,
        tensors: Mapping[str, Weight],
        backend: Backend,
        scratch: Tensor | None = None,
        experts: ExpertsOfLayer | None = None,
    ) -> None:
        """backend: what computes rows with them. scratch: memory for a dequantised matrix, see `Backend.linear`."""
        self.tensors = tensors
        self.backend = backend
        self.scratch = scratch
        self._experts = experts

    def experts(self, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        """Groups of the layer's experts; see `WeightSource.experts`."""
        assert self._experts is not None, "weights of a layer with experts"
        return self._experts.lend(rows)

    def expert_table(self) -> ExpertTable | None:
        """Of all experts of the layer; see `WeightSource.expert_table`."""
        return None if self._experts is None or self._experts.table is None else self._experts.table()

    def announce(self, x: Tensor) -> None:
        """Call this before `experts`: the next layer's experts may be read ahead for these states x [T, hidden]."""
        if self._experts is not None and self._experts.announce is not None:
            self._experts.announce(x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x [T, K] times `name.weight` [N, K], plus `name.bias` [N] if there is one → [T, N]. Keeps gradients."""
        bias = self.optional_vector(f"{name}.bias")
        return self.backend.linear(x, self.tensors[f"{name}.weight"], bias, self.scratch)

    def linears(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        """`linear` of x by several matrices."""
        weights = [self.tensors[f"{name}.weight"] for name in names]
        return self.backend.linears(x, weights, [self.optional_vector(f"{name}.bias") for name in names], self.scratch)

    def linear_fp32(self, name: str, x: Tensor) -> Tensor:
        """As `linear`, with an fp32 result; see `Backend.linear_fp32`."""
        bias = self.optional_vector(f"{name}.bias")
        return self.backend.linear_fp32(x, self.tensors[f"{name}.weight"], bias, self.scratch)

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        """The matrix `name.weight` [N, K], maybe in scratch memory, which the next product may overwrite."""
        return dense(self.tensors[f"{name}.weight"], dtype, self.scratch)

    def optional_vector(self, name: str) -> Tensor | None:
        return self.vector(name) if name in self.tensors else None

    def vector(self, name: str) -> Tensor:
        """A norm's weight or a bias; no format packs these."""
        return as_vector(self.tensors[name])


class WeightsOfExperts(LayerWeights):
    """The weights of several experts, of which each multiplies the next of `counts` rows, or all the only row."""

    def __init__(
        self, experts: Sequence[Mapping[str, Weight]], counts: Sequence[int], backend: Backend, scratch: Tensor | None
    ) -> None:
        super().__init__(experts[0], backend, scratch)
        self._each = experts
        self._counts = list(counts)

    @property
    def matrices(self) -> list[Weight]:
        """All of them."""
        return [weight for tensors in self._each for weight in tensors.values()]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.linears([name], x)[0]

    def linears(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        weights = [tensors[name] for name in [f"{name}.weight" for name in names] for tensors in self._each]
        products = self.backend.linear_each(x, self._counts * len(names), weights, self.scratch).chunk(len(names))
        return [self._with_bias(name, product) for name, product in zip(names, products, strict=True)]

    def _with_bias(self, name: str, product: Tensor) -> Tensor:
        if f"{name}.bias" not in self.tensors:
            return product
        biases = (as_vector(tensors[f"{name}.bias"]).to(product.dtype) for tensors in self._each)
        return product + torch.cat([bias.expand(n, -1) for bias, n in zip(biases, self._counts, strict=True)])


class WeightsOfChosen(LayerWeights):
    """The weights of the experts that rows chose, in a table; rows x are T, or one for each of the R places."""

    def __init__(self, table: ExpertTable, chosen: Chosen, backend: Backend) -> None:
        super().__init__({}, backend)
        self._table, self._chosen = table, chosen

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.linears([name], x)[0]

    def linears(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        num_outputs = self._table.kinds[names[0]].shape[0]
        out = x.new_empty(len(names), self._chosen.num_places, num_outputs)
        self.multiply_to(out, names, x)
        return list(out.unbind())

    def multiply_to(self, out: Tensor, names: Sequence[str], x: Tensor) -> None:
        """`linears` into out [names, R, N], contiguous; places whose experts the table lacks are left as they are."""
        kinds = [self._table.kinds[name] for name in names]
        if len(set(kinds)) == 1:
            self._table.multiply(names, x, self._chosen, out)
            return
        for index, name in enumerate(names):
            self._table.multiply([name], x, self._chosen, out[index : index + 1])


def as_vector(weight: Weight) -> Tensor:
    """A norm's weight or a bias as a tensor."""
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


class Part(ABC):
    """One step of layer `layer`, such as attention or an MLP. It holds no weights.

    A part owns its tensors' names and shapes, and the shape of what it keeps of a text. memory: the latter; None:
    nothing. A layer keeps KV entries, or a state, or one of each. is_static: it only launches kernels, on tensors that
    stay, so that CUDA graphs can record it.
    """

    is_static = True
    memory: MemoryLayout | None = None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.config = config
        self.layer = layer

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, Shape]:
        """Short name → shape of each of its tensors."""

    @property
    def memories(self) -> tuple[MemoryLayout, ...]:
        """The shapes of everything that it keeps of a text: more than `memory`, if parts are joined in it."""
        return () if self.memory is None else (self.memory,)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Short name without ".weight" → shape of each matrix that training can change, in the order of use."""
        return {}

    @property
    @abstractmethod
    def row_numbers(self) -> int:
        """Numbers that it holds of a row at once, beside hidden states and what attention reads."""

    @abstractmethod
    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """Rows first .. last of a pass: hidden states x [T, hidden] → [T, hidden], a new tensor.

        weights: of the layer, which the decoder has borrowed.
        """


class NativePart(Part):
    """Base of offspec's own parts: norms, matrices with biases, and a residual. Every method keeps gradients."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        """rotaries: of the decoder; without them, a part tells shapes only. Raises CheckpointError, see `rope`."""
        super().__init__(config, layer)
        self.steps = RecordedSteps()

    @property
    @abstractmethod
    def norms(self) -> list[str]:
        """Names of its norms over hidden states."""

    @abstractmethod
    def has_bias(self, matrix: str) -> bool: ...

    @property
    def shapes(self) -> dict[str, Shape]:
        shapes = dict[str, Shape]()
        for name in self.norms:
            shapes[f"{name}.weight"] = (self.config.hidden_size,)
            if self.config.has_norm_bias:
                shapes[f"{name}.bias"] = (self.config.hidden_size,)
        for name, shape in self.matrices.items():
            shapes[f"{name}.weight"] = shape
            if self.has_bias(name):
                shapes[f"{name}.bias"] = shape[:1]
        return shapes

    def norm(self, x: Tensor, weights: LayerWeights, name: str | None) -> Tensor:
        """x [..., N], normed by the layer's norm `name`; x itself if `name` is None."""
        if name is None:
            return x
        c, bias = self.config, weights.optional_vector(f"{name}.bias")
        return normalize(x, weights.vector(f"{name}.weight"), bias, c.norm, c.rms_norm_eps, weights.backend)

    def added(self, x: Tensor, output: Tensor) -> Tensor:
        """Hidden states x [T, hidden] plus the scaled output of attention or an MLP."""
        scale = self.config.residual_scale
        output = output if scale == 1 else output * scale
        return add_rows(x, output) if steps_add(x, output) else x + output
