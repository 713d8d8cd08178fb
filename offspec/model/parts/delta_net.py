"""A gated delta net as a part of a layer (Gated Delta Networks, 2412.06464; Qwen3-Next, Qwen3.5 and newer).

A row's queries, keys and values come from a projection and a short convolution along the text; a state per head maps
keys to values (`recurrence`). The layer's output is the state's answer to the query, normed and gated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.params import MOST_STATE_NODES

from ..config import ModelConfig
from ..memory.recurrent_states import LEAST_COPIED, Nodes, Progress, RecurrentLayout, RecurrentStates, State
from ..pass_rows import AppendedRows, by_text
from ..recurrence import DeltaInputs, chain_convolution, chain_step, path_convolution, path_windows, tree_step
from ..rope import RotaryEmbeddings
from .part import LayerWeights, NativePart, PassRows, Shape

NORM_EPS = 1e-6  # of queries and keys
TREE_ROWS = 128  # nodes that are computed together: each has a product with each ancestor, in each head


class DeltaNet(NativePart):
    """The gated delta net of layer `layer`: norm, projections, convolution, recurrence, and a residual."""

    is_static = False

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        assert config.delta is not None
        self.shape = shape = config.delta
        self.memory = RecurrentLayout(
            shape.num_heads, shape.key_heads, shape.key_size, shape.value_size, shape.channels, shape.kernel - 1
        )

    @property
    def norms(self) -> list[str]:
        name = self.config.norms_of(self.layer).before_attention
        return [] if name is None else [name]

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        shape, names, hidden = self.shape, self.shape.names, self.config.hidden_size
        rows = dict(zip(names.inputs, shape.inputs, strict=True))
        rows |= {names.gate: shape.values, names.rate: shape.num_heads, names.step: shape.num_heads}
        made = {f"linear_attn.{name}": (count, hidden) for name, count in rows.items()}
        return {**made, f"linear_attn.{names.output}": (hidden, shape.values)}

    @property
    def row_numbers(self) -> int:
        shape = self.shape  # what is in fp32 counts twice
        return 2 * ((shape.kernel + 6) * shape.channels + 8 * shape.values + 3 * shape.num_heads * MOST_STATE_NODES)

    def has_bias(self, matrix: str) -> bool:
        return False

    @property
    def shapes(self) -> dict[str, Shape]:
        shape, names = self.shape, self.shape.names
        parts = zip(names.convolutions, shape.kernel_parts or shape.inputs, strict=True)
        return {
            **super().shapes,
            **{f"linear_attn.{name}.weight": (channels, 1, shape.kernel) for name, channels in parts},
            "linear_attn.A_log": (shape.num_heads,),
            "linear_attn.dt_bias": (shape.num_heads,),
            f"linear_attn.{names.norm}.weight": (shape.value_size,),
        }

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        normed = self.norm(x, weights, self.config.norms_of(self.layer).before_attention)
        mixed, gates, rates, steps = self.projected(normed, weights)
        decays = -weights.vector("linear_attn.A_log").float().exp() * F.softplus(
            steps.float() + weights.vector("linear_attn.dt_bias").float()
        )
        outputs = list[Tensor]()
        for text, begin, end, some in by_text(rows, first, last):
            pieces = (mixed[some], decays[some], rates[some].float().sigmoid() * self.shape.top_rate)
            outputs.append(self.advance(text, begin, end, pieces, weights))
        return self.added(x, self.gated(torch.cat(outputs).to(x.dtype), gates, weights))

    def projected(self, x: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of normed states x [T, hidden]: the convolution's inputs [T, channels], gates [T, heads, Dv], and per head
        the inputs of the update's rate and of the decay's step [T, heads].
        """
        shape, names = self.shape, self.shape.names
        *mixed, gates, rates, steps = (
            weights.linear(f"linear_attn.{name}", x) for name in (*names.inputs, names.gate, names.rate, names.step)
        )
        by_head = gates.view(len(x), shape.num_heads, shape.value_size)
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1), by_head, rates, steps

    def advance(
        self, text: AppendedRows, begin: int, end: int, pieces: tuple[Tensor, Tensor, Tensor], weights: LayerWeights
    ) -> Tensor:
        """Outputs [end - begin, heads, Dv] of rows begin .. end of a text. pieces: their `mixed`, decays and rates."""
        memory, place = text.cache.memory_of(self.layer)
        assert isinstance(memory, RecurrentStates)
        progress, num_chain = memory.progress(place, begin), len(text.rows.chain)
        last = max(0, min(end, num_chain) - begin)  # of these rows, those up to `last` are the chain's
        outputs = list[Tensor]()
        if is_copied := end >= num_chain >= LEAST_COPIED and last > 0:
            last -= 1
        if last:
            outputs.append(self._chain(progress, weights, *(each[:last] for each in pieces)))
        if is_copied:
            progress.before_last = progress.state
            outputs.append(self._chain(progress, weights, *(each[last : last + 1] for each in pieces)))
            last += 1
        if last < end - begin:
            nodes = (max(begin, num_chain) - num_chain, end - num_chain)
            outputs.append(self._tree(text, memory, progress, nodes, tuple(each[last:] for each in pieces), weights))
        return torch.cat(outputs)

    def _chain(self, progress: Progress, weights: LayerWeights, mixed: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
        """Outputs of rows that follow the chain so far; moves the state behind them."""
        state = progress.state
        convolved = chain_convolution(mixed.float(), state.inputs.float(), self._kernel(weights))
        inputs = torch.cat((state.inputs, mixed))[len(mixed) :]
        outputs, matrix = chain_step(state.matrix, self._inputs(convolved, decays, rates))
        progress.state = State(matrix, inputs.clone())  # not a view of a whole prompt
        return outputs

    def _tree(
        self,
        text: AppendedRows,
        memory: RecurrentStates,
        progress: Progress,
        nodes: tuple[int, int],
        pieces: tuple[Tensor, ...],
        weights: LayerWeights,
    ) -> Tensor:
        """Outputs of nodes first .. last of the pass, whose ancestors are among the pending ones and among these."""
        mask, (first, last) = text.visibility.tree_mask, nodes
        assert mask is not None
        num_earlier = mask.shape[1] - mask.shape[0]
        if memory not in text.once:  # in the pass's first such layer
            text.once[memory] = memory.parents(to_device(torch.from_numpy(text.rows.parents), mask.device))
        parents: Tensor = text.once[memory]
        outputs = list[Tensor]()
        for begin in range(first, last, TREE_ROWS):
            end, seen = min(begin + TREE_ROWS, last), num_earlier + min(begin + TREE_ROWS, last)
            mixed, decays, rates = (each[begin - first : end - first] for each in pieces)
            inputs = torch.cat((progress.nodes.inputs, mixed))
            windows = path_windows(inputs.float(), progress.state.inputs.float(), parents[:seen], num_earlier + begin)
            given = self._inputs(path_convolution(windows, self._kernel(weights)), decays, rates)
            some, rows = tree_step(progress.state.matrix, given, mask[begin:end, :seen], progress.nodes.rows)
            progress.nodes = Nodes(progress.nodes.rows.with_more(rows), inputs)
            outputs.append(some)
        return torch.cat(outputs)

    def _kernel(self, weights: LayerWeights) -> Tensor:
        parts = [weights.vector(f"linear_attn.{name}.weight").float() for name in self.shape.names.convolutions]
        return torch.cat(parts).view(self.shape.channels, self.shape.kernel)

    def _inputs(self, convolved: Tensor, decays: Tensor, rates: Tensor) -> DeltaInputs:
        """Of the convolution's results [R, channels], in fp32."""
        shape = self.shape
        active = F.silu(convolved)
        queries, keys, values = torch.split(active, [shape.keys, shape.keys, shape.values], -1)
        by_head = (len(active), shape.key_heads, shape.key_size)
        return DeltaInputs(
            _normed(queries.view(by_head)) * shape.key_size**-0.5,
            _normed(keys.view(by_head)),
            values.view(len(active), shape.num_heads, shape.value_size),
            decays,
            rates,
        )

    def gated(self, outputs: Tensor, gates: Tensor, weights: LayerWeights) -> Tensor:
        """Outputs [T, heads, Dv], normed per head and times silu(gate), through the last projection: [T, hidden]."""
        wide = outputs.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.norm_eps)
        normed = weights.vector(f"linear_attn.{self.shape.names.norm}.weight") * normed.to(outputs.dtype)
        gated = (normed * F.silu(gates.float())).to(outputs.dtype)
        return weights.linear(f"linear_attn.{self.shape.names.output}", gated.flatten(1))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
