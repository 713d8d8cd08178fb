"""What parts with a state of the text have in common: a causal convolution, and mostly a linear recurrence behind it.

A text's chain moves the state. A tree's nodes keep no state: their outputs follow from the root's and from what their
ancestors bring (`recurrence`, and on a CPU `ordered_recurrence`), and the convolution looks along their path.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.loaders.streaming.small_transfers import to_device

from ..causal_convolution import chain_convolution, path_convolution, path_windows
from ..memory.recurrent_states import LEAST_COPIED, Nodes, Progress, RecurrentLayout, RecurrentStates, State
from ..ordered_recurrence import OrderedRows, chain_in_order, tree_in_order
from ..pass_rows import AppendedRows, by_text
from ..recurrence import Inputs, PathRows, TreePlaces, chain_step, tree_step
from .part import LayerWeights, NativePart, PassRows, RowsWithoutMemory, TextPaths

TREE_ROWS = 128  # nodes that are computed together: each has a product with each ancestor, in each head


class ConvolvedPart(NativePart):
    """A part with a convolution. Subclasses project rows into it, and say what is behind it."""

    is_static = False
    memory: RecurrentLayout

    @property
    def norms(self) -> list[str]:
        name = self.config.norms_of(self.layer).before_attention
        return [] if name is None else [name]

    @abstractmethod
    def stored_convolution(self, weights: LayerWeights) -> tuple[Tensor, Tensor | None]:
        """The kernel of channels * K numbers, and the bias [channels]; the kernel may have its stored dtype."""

    def convolution(self, weights: LayerWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The kernel [channels, K] and the bias [channels], in fp32; rounded to the arithmetic's dtype.

        Resident ones were rounded when they were loaded.
        """
        kernel, bias = self.stored_convolution(weights)
        kernel = kernel.to(dtype).float().view(self.memory.channels, self.memory.window + 1)
        return kernel, None if bias is None else bias.float()

    @abstractmethod
    def of_chain(
        self, matrix: Tensor, convolved: Tensor, pieces: Sequence[Tensor], backend: Backend
    ) -> tuple[Tensor, Tensor]:
        """Outputs [R, ...] of R rows of a chain, and the state's matrix behind them. matrix: before them.

        convolved: fp32 [R, channels]. pieces: as for `advanced`, of R rows.
        """

    @abstractmethod
    def of_tree(
        self,
        matrix: Tensor,
        convolved: Tensor,
        pieces: Sequence[Tensor],
        places: TreePlaces,
        earlier: PathRows,
        backend: Backend,
    ) -> tuple[Tensor, PathRows]:
        """Outputs [R, ...] of R nodes, and what they bring to the recurrence. earlier: see `tree_step`."""

    def advanced(
        self,
        mixed: Tensor,
        pieces: Sequence[Tensor],
        weights: LayerWeights,
        rows: PassRows,
        first: int,
        last: int,
    ) -> Tensor:
        """Outputs [T, ...] for rows first .. last of a pass, in fp32.

        mixed [T, channels]: inputs of the convolution. pieces [T, ...]: what else the rows bring.
        """
        if isinstance(rows, RowsWithoutMemory):
            texts = rows.paths()
            return torch.cat(
                [self._of_whole(text, [each[text.rows] for each in (mixed, *pieces)], weights) for text in texts]
            )
        outputs = list[Tensor]()
        for text, begin, end, some in by_text(rows, first, last):
            outputs.append(self._advance(text, begin, end, [mixed[some], *(each[some] for each in pieces)], weights))
        return torch.cat(outputs)

    def _of_whole(self, text: TextPaths, pieces: Sequence[Tensor], weights: LayerWeights) -> Tensor:
        """Outputs [T, ...] of a whole text that no memory keeps. Has gradients."""
        (mixed, *others), begun = pieces, self.memory.new(1, pieces[0].dtype, pieces[0].device).progress(0, 0)
        windows = path_windows(mixed.float(), begun.state.inputs.float(), text.parents)
        convolved = path_convolution(windows, *self.convolution(weights, mixed.dtype))
        places = TreePlaces(lambda: text.ancestors, text.parents)
        return self.of_tree(begun.state.matrix, convolved, others, places, begun.nodes.rows, weights.backend)[0]

    def _advance(
        self, text: AppendedRows, begin: int, end: int, pieces: Sequence[Tensor], weights: LayerWeights
    ) -> Tensor:
        """Outputs [end - begin, ...] of rows begin .. end of a text. pieces: `mixed`, then the others."""
        memory, place = text.cache.state_of(self.layer)
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
            outputs.append(self._tree(text, memory, progress, nodes, [each[last:] for each in pieces], weights))
        return torch.cat(outputs)

    def _chain(self, progress: Progress, weights: LayerWeights, mixed: Tensor, *pieces: Tensor) -> Tensor:
        """Outputs of rows that follow the chain so far; moves the state behind them."""
        state = progress.state
        convolved = chain_convolution(mixed.float(), state.inputs.float(), *self.convolution(weights, mixed.dtype))
        inputs = torch.cat((state.inputs, mixed))[len(mixed) :]
        outputs, matrix = self.of_chain(state.matrix, convolved, pieces, weights.backend)
        progress.state = State(matrix, inputs.clone())  # not a view of a whole prompt
        return outputs

    def _tree(
        self,
        text: AppendedRows,
        memory: RecurrentStates,
        progress: Progress,
        nodes: tuple[int, int],
        pieces: Sequence[Tensor],
        weights: LayerWeights,
    ) -> Tensor:
        """Outputs of nodes first .. last of the pass, whose ancestors are among the pending ones and among these."""
        (first, last), num_earlier = nodes, text.rows.num_before
        if memory not in text.once:  # in the pass's first such layer
            text.once[memory] = memory.parents(
                to_device(torch.from_numpy(text.rows.parents[num_earlier:]), pieces[0].device)
            )
        parents: Tensor = text.once[memory]
        outputs = list[Tensor]()
        for begin in range(first, last, TREE_ROWS):
            end, seen = min(begin + TREE_ROWS, last), num_earlier + min(begin + TREE_ROWS, last)
            mixed, *others = (each[begin - first : end - first] for each in pieces)
            inputs = torch.cat((progress.nodes.inputs, mixed))
            windows = path_windows(inputs.float(), progress.state.inputs.float(), parents[:seen], num_earlier + begin)
            convolved = path_convolution(windows, *self.convolution(weights, mixed.dtype))
            places = TreePlaces(partial(text.visibility.ancestors, begin, end), parents[:seen])
            some, rows = self.of_tree(
                progress.state.matrix, convolved, others, places, progress.nodes.rows, weights.backend
            )
            progress.nodes = Nodes(progress.nodes.rows.with_more(rows), inputs)
            outputs.append(some)
        return torch.cat(outputs)


class RecurrentPart(ConvolvedPart):
    """A part with a convolution and a recurrence behind it."""

    @abstractmethod
    def inputs(self, convolved: Tensor, pieces: Sequence[Tensor], backend: Backend) -> Inputs:
        """What R rows bring to the recurrence. convolved: fp32 [R, channels]. pieces: as for `advanced`, of R rows."""

    def of_chain(
        self, matrix: Tensor, convolved: Tensor, pieces: Sequence[Tensor], backend: Backend
    ) -> tuple[Tensor, Tensor]:
        inputs = self.inputs(convolved, pieces, backend)
        if backend.walks_states:
            return chain_in_order(matrix, inputs, backend)
        return chain_step(matrix, inputs)

    def of_tree(
        self,
        matrix: Tensor,
        convolved: Tensor,
        pieces: Sequence[Tensor],
        places: TreePlaces,
        earlier: PathRows,
        backend: Backend,
    ) -> tuple[Tensor, PathRows]:
        inputs = self.inputs(convolved, pieces, backend)
        if any(each.requires_grad for each in vars(inputs).values()):  # in training, where nothing is earlier
            return tree_step(matrix, inputs, places.ancestors())
        if isinstance(earlier, OrderedRows):
            return tree_in_order(matrix, inputs, places.parents, earlier, backend)
        return tree_step(matrix, inputs, places.ancestors(), earlier)
