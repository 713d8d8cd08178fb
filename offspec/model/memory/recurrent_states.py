"""What recurrent layers keep of a text: one state for all its tokens, and the rows of pending nodes, from which the
state after any of them follows without weights (`recurrence`).

A state cannot go back, so copies of it are kept where a text is likely to be cut: before the last token of a prompt,
because that token is scored again if the answer is given anew. States are replaced and never written to, so a copy
costs memory and no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offspec.backends.choice import backend_of
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.params import MOST_STATE_NODES

from ..ordered_recurrence import OrderedRows
from ..recurrence import ROOT, PathRows
from .layer_memory import Kept

MOST_COPIES = 4
LEAST_COPIED = 16  # tokens that a pass commits at once: a prompt, or a part of one


@dataclass(frozen=True)
class RecurrentLayout:
    """The shape of a recurrent layer's state: fp32 [num_heads, key_size, value_size], and the last `window` inputs
    [window, channels] of its convolution. key_heads: of keys, each for num_heads / key_heads heads.
    """

    num_heads: int
    key_heads: int
    key_size: int
    value_size: int
    channels: int
    window: int

    def nbytes(self, num_entries: int, itemsize: int, num_copies: int = MOST_COPIES) -> int:
        """At most so many bytes of one layer: the state, the one of a pass under way, the copies, and pending nodes.

        They do not grow with a text.
        """
        state = 4 * self.num_heads * self.key_size * self.value_size  # in fp32
        states = (2 + num_copies) * (state + itemsize * self.window * self.channels)
        row = 4 * (self.key_heads * self.key_size + self.num_heads * (self.value_size + 1)) + itemsize * self.channels
        return states + min(num_entries, MOST_STATE_NODES) * row

    def new(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> RecurrentStates:
        return RecurrentStates(self, num_layers, dtype, device)


@dataclass(frozen=True)
class State:
    """A layer's state after some tokens of a text, and the inputs [window, channels] of the last ones."""

    matrix: Tensor
    inputs: Tensor


@dataclass
class Nodes:
    """Pending nodes of one layer, below the root. inputs [P, channels]: of the convolution."""

    rows: PathRows
    inputs: Tensor


@dataclass
class Progress:
    """What a pass has made of a layer so far, until `append`.

    state: after the chain's rows so far. before_last: before the last of them, if it is to be copied. nodes: those of
    earlier passes and of this one.
    """

    state: State
    nodes: Nodes
    before_last: State | None = None


@dataclass
class _Copy:
    """The states of all layers after a number of tokens."""

    length: int
    states: list[State] = field(default_factory=list)


class RecurrentStates:
    """The states of `num_layers` layers of one text (a `LayerMemory`)."""

    def __init__(self, layout: RecurrentLayout, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of the arithmetic, and of the convolution's inputs."""
        self.layout = layout
        self.num_layers = num_layers
        self.format = f"recurrent {layout.num_heads} x {layout.key_size} x {layout.value_size}"
        self._dtype = dtype
        self._device = device
        self._length = 0
        self._states = [self._zero()] * num_layers
        self._nodes = [self._no_nodes()] * num_layers
        self._late: list[Nodes | None] = [None] * num_layers  # committed, but not in the states yet
        self._parents = torch.empty(0, dtype=torch.long, device=device)  # of pending nodes, among them, or ROOT
        self._new_parents = self._parents
        self._copies = list[_Copy]()
        self._passing = dict[int, Progress]()
        self._stored = dict[int, State]()  # by layer: what is being copied from another text

    def _zero(self) -> State:
        shape = self.layout
        return State(
            torch.zeros(shape.num_heads, shape.key_size, shape.value_size, device=self._device),
            torch.zeros(shape.window, shape.channels, dtype=self._dtype, device=self._device),
        )

    def _no_nodes(self) -> Nodes:
        shape, kind = self.layout, OrderedRows if backend_of(self._device).walks_states else PathRows
        rows = kind(
            torch.empty(0, shape.key_heads, shape.key_size, device=self._device),
            torch.empty(0, shape.num_heads, shape.value_size, device=self._device),
            torch.empty(0, shape.num_heads, device=self._device),
        )
        return Nodes(rows, torch.empty(0, shape.channels, dtype=self._dtype, device=self._device))

    @property
    def nbytes(self) -> int:
        kept = [self._states, *(copy.states for copy in self._copies)]
        tensors = {id(each): each for states in kept for state in states for each in (state.matrix, state.inputs)}
        for nodes in (*self._nodes, *(late for late in self._late if late is not None)):
            tensors |= {id(each): each for each in (*vars(nodes.rows).values(), nodes.inputs)}
        return sum(each.nbytes for each in tensors.values())

    # ------------------------------------------------------------------------------------------------ a pass

    def progress(self, layer: int, first: int) -> Progress:
        """What this pass has made of the layer before its row `first`; from row 0 on, what is committed and pending."""
        if first == 0:
            self._stored.clear()
            self._passing[layer] = Progress(self.state(layer), self._nodes[layer])
        return self._passing[layer]

    def parents(self, nodes: Tensor) -> Tensor:
        """Parents [P + R] of the pending nodes and of the R new ones, whose parents are given: among them, or ROOT."""
        self._new_parents = nodes
        return torch.cat((self._parents, nodes))

    def append(self, num_committed: int, num_pending: int) -> None:
        if self._stored:
            self._states = [self._stored[layer] for layer in range(self.num_layers)]
            self._stored.clear()
            self._length += num_committed
            return
        if not num_committed + num_pending:
            return
        passing = [self._passing[layer] for layer in range(self.num_layers)]
        if all(progress.before_last is not None for progress in passing):
            states = [progress.before_last for progress in passing if progress.before_last is not None]
            self._copy(_Copy(self._length + num_committed - 1, states))
        self._states = [progress.state for progress in passing]
        self._nodes = [progress.nodes for progress in passing]
        if num_pending:
            self._parents = torch.cat((self._parents, self._new_parents))
        self._length += num_committed
        self._passing.clear()

    def keep(self, kept: Kept) -> None:
        if kept.path:  # a state is moved when the next pass needs it: then its layer's weights may be on their way
            path = self._indices(kept.path)
            for layer in range(self.num_layers):
                self.state(layer)
            self._late = [Nodes(nodes.rows.at(path), nodes.inputs[path]) for nodes in self._nodes]
        self._keep_nodes(kept.path, kept.pending)
        self._length += len(kept.path)

    def _indices(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(list(numbers), dtype=torch.long), self._device)

    def _keep_nodes(self, path: Sequence[int], pending: Sequence[int]) -> None:
        """Keep the nodes `pending`, which are below the last one of `path`; without a path, below the root."""
        if not pending:
            self._nodes, self._parents = [self._no_nodes()] * self.num_layers, self._parents[:0]
            return
        indices = self._indices(pending)
        self._nodes = [self._below(nodes, path, indices) for nodes in self._nodes]
        places = torch.full((len(self._parents) + 1,), ROOT, device=self._device)  # the last is ROOT's
        places[indices] = torch.arange(len(pending), device=self._device)
        self._parents = places[self._parents[indices]]

    def state(self, layer: int) -> State:
        """A layer's state after all committed tokens."""
        if (late := self._late[layer]) is not None:
            self._states[layer], self._late[layer] = self._after(self._states[layer], late), None
        return self._states[layer]

    def _after(self, state: State, path: Nodes) -> State:
        inputs = torch.cat((state.inputs, path.inputs))
        return State(path.rows.after(state.matrix), inputs[len(inputs) - self.layout.window :].clone())

    def _below(self, nodes: Nodes, path: Sequence[int], pending: Tensor) -> Nodes:
        rows = nodes.rows.below(path[-1], pending) if path else nodes.rows.at(pending)
        return Nodes(rows, nodes.inputs[pending])

    # ------------------------------------------------------------------------------------------------ a draft's states

    def like(self, num_layers: int) -> RecurrentStates:
        """The empty states of so many layers of a draft that follows these (`shared_cache`)."""
        return RecurrentStates(self.layout, num_layers, self._dtype, self._device)

    def follow(self, states: Sequence[State]) -> None:
        """Drop everything, and go on from these states of the layers."""
        self.rewind(0)
        self._states, self._late = list(states), [None] * self.num_layers

    def follow_with_last(self, states: Sequence[State], path: Sequence[int], pending: Sequence[int]) -> None:
        """Commit the pending nodes `path` and keep `pending` below them, where another text is after all but the last.

        states: that text's. They are moved on by the last node.
        """
        *before, last = path
        place = self._indices([last])
        rows = [self._below(nodes, before, place) for nodes in self._nodes]
        self._states = [self._after(state, row) for state, row in zip(states, rows, strict=True)]
        self._keep_nodes(path, pending)

    # ------------------------------------------------------------------------------------------------ going back

    def _copy(self, copy: _Copy) -> None:
        """Keep a copy; of too many, the one whose neighbours are the nearest to each other is dropped."""
        self._copies = [*(each for each in self._copies if each.length < copy.length), copy]
        if len(self._copies) > MOST_COPIES:
            lengths = [0, *(each.length for each in self._copies)]
            gaps = [lengths[place + 2] - lengths[place] for place in range(len(self._copies) - 1)]
            del self._copies[gaps.index(min(gaps))]

    def restorable(self, length: int) -> int:
        if length == self._length:
            return length
        return max((copy.length for copy in self._copies if copy.length <= length), default=0)

    def copyable(self, length: int) -> int:
        return self.restorable(length)

    def least_cut(self, length: int) -> int:
        return length

    def rewind(self, length: int) -> None:
        self._nodes = [self._no_nodes()] * self.num_layers
        self._parents = self._parents[:0]
        self._passing.clear()
        self._stored.clear()
        if length == self._length:
            return
        self._copies = [copy for copy in self._copies if copy.length <= length]
        self._states = [self._zero()] * self.num_layers if length == 0 else list(self._copies[-1].states)
        self._late = [None] * self.num_layers
        self._length = length

    def reserve(self, capacity: int, in_use: int) -> None:
        pass

    def stored(self, layer: int, end: int) -> list[Tensor]:
        if self._length == 0 and end:  # it is copied from another text
            state = self._stored.setdefault(layer, self._zero())
        elif end == self._length:
            state = self.state(layer)
        else:
            state = next(copy.states[layer] for copy in self._copies if copy.length == end)
        return [state.matrix, state.inputs]
