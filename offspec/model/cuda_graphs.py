"""Tree rounds of a resident model with static shapes: on a GPU, one captured CUDA graph per shape.

A round of the draft takes a few dozen rows through a small model; most of its time is the launch of some hundred
kernels. Here a round is one transfer of its tokens, positions and mask, and one replay. Rows are padded to a width and
keys to a power of two, so that few shapes are captured. The device extends the mask of the pending region to all keys.
Other rounds run through `CachedDecoder`, with the same results: long chains, too many rows or keys, and weights that
are streamed, converted or unpacked by more than kernels.

A draft's cache is its own (`TreeGraphs`), or part of its target's (`LayerDraftText`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from offspec.backends.weights import Weight
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.accelerators.capture import Recorder, Work
from offspec.loaders.streaming.small_transfers import read_words
from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.trees.token_tree import ROOT, IntArray, ancestor_mask

from ..errors import CheckpointError
from .decoder import CachedDecoder, Decoder
from .memory.sequence_cache import SequenceCache
from .parts.part import Entries, RowsOfText
from .rope import Rotations

WIDTHS = (4, 8, 16, 32, 64)  # a round's rows are padded to one of these
# Rounds of a shape before it is recorded, for texts that have rounds, because they have a KV cache, of their own:
# recording one takes as long as three rounds.
USES_BEFORE_RECORDING = 3
MIN_KEYS = 512  # minimum number of keys in attention; doubled until it covers all slots in use
# Rounds up to this number of keys are recorded before the first text, if the cache is the draft's own: 15 shapes, which
# take as long as two or three rounds each. More keys would be 5 shapes per doubling, which most texts never need.
PREPARED_KEYS = 2048
Shape = tuple[int, int]  # rows and keys of a round


def is_static(decoder: Decoder, layers: range | None = None) -> bool:
    """Whether a pass through all layers, or through resident `layers`, only launches kernels, on tensors that stay.

    bitsandbytes does not guarantee that its kernels can be captured.
    """
    weights = decoder.weights
    if layers is None and not weights.is_resident:
        return False
    for index in layers or range(len(decoder.blocks)):
        if not all(part.is_static for part in decoder.blocks[index].parts):
            return False
        with weights.layer(index) as layer:
            if not all(_is_ready(weight, decoder) for weight in layer.values()):
                return False
    return all(_is_ready(weights.shared(name), decoder) for name in decoder.config.final_norm_names)


def _is_ready(weight: Weight, decoder: Decoder) -> bool:
    if not isinstance(weight, Tensor):
        return weight.is_recordable(decoder.dtype)
    return (weight.dtype, weight.device) == (decoder.dtype, decoder.device)


def _has_ready_embedding(decoder: Decoder) -> bool:
    """Whether a graph can look up its rows. A streamed target's are in RAM, or on disk."""
    try:
        return _is_ready(decoder.weights.shared(decoder.config.embedding_name), decoder)
    except CheckpointError:
        return False


class RoundInputs:
    """The inputs of a round, in one host buffer and an equal device buffer, so that one transfer is enough.

    counts [3]: the slots that every row attends to, the first slot of the region after the gap (`SequenceCache.gap`),
    the slot of the first row. ids, positions [W]. region [W, 1 + P + 1]: column 0 is true, for slots before the gap;
    the next P are the mask of the region; the last one is false, for the gap and for slots after the region. W and P
    are maxima; a round of fewer rows transfers fewer.
    """

    def __init__(self, device: torch.device) -> None:
        self._most_rows = WIDTHS[-1]
        self._columns = MAX_ROWS + 2
        num_bytes = 8 * (3 + 2 * self._most_rows) + self._most_rows * self._columns
        self._accelerator = accelerator_of(device)
        self._host = self._accelerator.page_locked(num_bytes)
        self._seen = self._accelerator.view_of(self._host)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._sent = self._accelerator.new_event()
        self.counts, self.ids, self.positions, self.region = self._views(self._device)
        self._written = tuple(view.numpy() for view in self._views(self._host))
        self._written[3][:, 0] = True

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        most, head = self._most_rows, 8 * (3 + 2 * self._most_rows)
        words, region = buffer[:head].view(torch.int64), buffer[head:].view(torch.bool)
        return words[:3], words[3 : 3 + most], words[3 + most :], region.view(most, self._columns)

    def put(self, cache: SequenceCache, tokens: IntArray, depths: IntArray, parents: IntArray, width: int) -> None:
        """Send R rows after the entries of `cache`; arguments as in `CachedDecoder.score`.

        Rows R to `width` repeat the last one, so that they cannot introduce NaNs.
        """
        self._sent.synchronize()  # the last transfer may still read the host buffer
        counts, ids, places, region = self._written
        mask = ancestor_mask(parents, len(parents) - len(tokens))
        num_rows, num_pending, start = *mask.shape, cache.gap.stop
        first = 1 + cache.size - start - cache.pending  # the column of the first pending node
        counts[:] = cache.gap.start, start, cache.size
        region[:width, 1:first] = True
        for buffer, values in (
            (ids, tokens),
            (places, cache.next_position - 1 + depths),
            (region[:, first : first + num_pending], mask),
        ):
            buffer[:num_rows] = values
            buffer[num_rows:width] = values[-1]
        region[:width, first + num_pending :] = False
        num_bytes = self._host.nbytes - (self._most_rows - width) * self._columns
        if self._seen is not None:  # whole words: widths are multiples of four, columns an even number
            read_words(self._seen[:num_bytes], self._device[:num_bytes])
        else:
            self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        self._sent.record(self._accelerator.current_stream)

    def seen(self, width: int, num_keys: int) -> Tensor:
        """Bool [width, num_keys]: the slots that each row attends to. Computed on the device."""
        before, start, _ = self.counts.unbind()
        slots, last = torch.arange(num_keys, device=self.counts.device), self.region.shape[1] - 1
        columns = torch.where(slots < start, last, (slots - start + 1).clamp(max=last))
        return self.region[:width].index_select(1, torch.where(slots < before, 0, columns))


@dataclass(frozen=True)
class StaticRows(RowsOfText):
    """`PassRows` of a static round; only the device knows their slots and mask.

    slots, positions [W]. seen: bool [W, S], the mask over all keys of the round.
    """

    cache: SequenceCache
    slots: Tensor
    positions: Tensor
    seen: Tensor
    rotations: Rotations
    inputs: Tensor | None

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return [(0, len(self.slots))]

    def mask(self, first: int, last: int, window: int | None) -> Tensor:
        if window is None:
            return self.seen
        return self.seen & (self.positions[:, None] - self.cache.positions[: self.seen.shape[1]] < window)

    def exchange(self, layer: int, entries: Entries | None, first: int, last: int) -> Entries:
        if entries is not None:
            self.cache.scatter(layer, *entries, self.slots)
        return self.cache.read(layer, self.seen.shape[1])


class RoundBuffers:
    """What all texts of a model have in common in static rounds: inputs, results, the recorder. One runs at a time."""

    def __init__(self, decoder: Decoder, record: Recorder | None = None, layers: range | None = None) -> None:
        """decoder: must be `is_static`. record: None records CUDA graphs on a GPU, and nothing on a CPU.

        layers: rounds go through these alone, and their states are those after the last one, without the final norm.
        """
        self.decoder = decoder
        self.layers = layers
        self.inputs = RoundInputs(decoder.device)
        shape = WIDTHS[-1], decoder.config.hidden_size
        self.states = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self.embedded = None if _has_ready_embedding(decoder) else torch.zeros_like(self.states)
        self.layer_inputs = decoder.layer_inputs(torch.zeros(len(self.states), dtype=torch.long))
        self.record = record or accelerator_of(decoder.device).recorder()

    def send(self, cache: SequenceCache, tokens: IntArray, depths: IntArray, parents: IntArray, width: int) -> None:
        """The inputs of a round, see `RoundInputs.put`; with rows of tables that a graph cannot look up."""
        self.inputs.put(cache, tokens, depths, parents, width)
        if self.embedded is not None:
            self.embedded[: len(tokens)] = self.decoder.embed(torch.as_tensor(tokens))
        if (inputs := self.decoder.layer_inputs(torch.as_tensor(tokens))) is not None:
            assert self.layer_inputs is not None
            self.layer_inputs[: len(tokens)] = inputs


class StaticRounds:
    """The static rounds of one KV cache: one for each shape, as long as the cache keeps its memory."""

    def __init__(self, buffers: RoundBuffers, cache: SequenceCache, *, uses_before: int = 0) -> None:
        """uses_before: rounds of a shape that are not static, because recording takes longer than some rounds."""
        self.cache = cache
        self._buffers = buffers
        self._uses_before = uses_before
        self._rounds: dict[Shape, Work] = {}
        self._uses = Counter[Shape]()
        # Shapes of rounds that ran during a pass, when nothing can be recorded; in their order.
        self._missed = dict[Shape, None]()
        self._bound_to: Tensor | None = None  # the cache's positions; if these are another tensor, so is all its memory

    @torch.inference_mode()
    def run(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor | None:
        """The states [R, hidden] of a chain or of nodes, which are then in the cache; see `CachedDecoder.states`.

        They are valid until the next call. None, and nothing was done, if this cannot be a static round.
        """
        if chain and not len(tokens):  # a chain is a tree with one branch, which is then committed
            steps = np.arange(1, len(chain) + 1)
            states = self._states(np.array(chain), steps, steps - 2)
            num_committed, num_pending = len(chain), 0
        elif not chain and len(tokens):
            states = self._states(tokens, depths, parents)
            num_committed, num_pending = 0, len(tokens)
        else:
            return None
        if states is not None:
            self.cache.append(num_committed, num_pending)
        return states

    def _states(self, tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor | None:
        if not self._fits(len(tokens)):
            return None
        cache, width = self.cache, _width(len(tokens))
        self.bind()
        shape = width, _num_keys(cache.size + width, cache.capacity)
        self._uses[shape] += 1
        if self._uses[shape] <= self._uses_before:
            return None
        self._buffers.send(cache, tokens, depths, parents, width)
        if shape not in self._rounds:
            self._missed[shape] = None
        if self._missed:
            self._catch_up()
        replay = self._rounds.get(shape) or partial(self._forward, *shape)
        replay()
        return self._buffers.states[: len(tokens)]

    def _fits(self, num_rows: int) -> bool:
        """Whether `num_rows` more rows can be a static round."""
        cache = self.cache
        if not 0 < num_rows <= WIDTHS[-1] or cache.size - cache.gap.stop + num_rows > MAX_ROWS:
            return False
        return cache.size + _width(num_rows) <= cache.capacity

    def _catch_up(self) -> None:
        """Record all missed shapes, if recording is possible now.

        It writes to free slots, which later rounds overwrite.
        """
        for shape in list(self._missed):
            if self.cache.size + shape[0] > self.cache.capacity:
                continue
            if (replay := self._buffers.record(partial(self._forward, *shape))) is None:
                return
            self._rounds[shape] = replay
            del self._missed[shape]

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record rounds of all widths up to PREPARED_KEYS keys. The cache must be empty, and have its memory."""
        self.bind()
        one = np.ones(1, dtype=np.int64)  # a valid round, so that nothing becomes NaN
        self._buffers.send(self.cache, 0 * one, one, ROOT * one, WIDTHS[-1])
        most, in_use = min(PREPARED_KEYS, self.cache.capacity), 1
        while (num_keys := _num_keys(in_use, self.cache.capacity)) <= most and in_use <= most:
            self._missed |= dict.fromkeys((width, num_keys) for width in WIDTHS)
            in_use = num_keys + 1
        self._catch_up()

    def bind(self) -> None:
        """Drop the rounds of other memory than the cache has now."""
        if self.cache.positions is not self._bound_to:
            self._rounds, self._missed, self._bound_to = {}, {}, self.cache.positions
            self._uses.clear()

    def close(self) -> None:
        self._rounds = {}

    def _forward(self, width: int, num_keys: int) -> None:
        """Compute the states of the round in the inputs. Shapes depend on the arguments only; nothing synchronises."""
        buffers, cache, decoder = self._buffers, self.cache, self._buffers.decoder
        ids, positions = buffers.inputs.ids[:width], buffers.inputs.positions[:width]
        slots = buffers.inputs.counts[2] + torch.arange(width, device=ids.device)
        cache.positions.index_copy_(0, slots, positions)
        seen, inputs = buffers.inputs.seen(width, num_keys), buffers.layer_inputs
        inputs = None if inputs is None else inputs[:width]
        rows = StaticRows(cache, slots, positions, seen, Rotations(positions), inputs)
        # The layers may overwrite their input.
        hidden = decoder.embed(ids) if buffers.embedded is None else buffers.embedded[:width].clone()
        hidden = decoder.through(hidden, rows, buffers.layers)
        buffers.states[:width].copy_(decoder.normed(hidden) if buffers.layers is None else hidden)


class TreeGraphs:
    """The static rounds of one model, and their KV cache; both exist as long as the model.

    `text` lends the cache to one text at a time.
    """

    def __init__(self, decoder: Decoder, capacity: int, record: Recorder | None = None) -> None:
        """decoder: must be `is_static`. capacity: entries to reserve at the first text."""
        self.decoder = decoder
        self._capacity = capacity
        self.rounds = StaticRounds(RoundBuffers(decoder, record), decoder.new_cache(forgets=False))
        self._borrower: ReferenceType[StaticText] | None = None

    @property
    def cache(self) -> SequenceCache:
        return self.rounds.cache

    def prepare(self) -> None:
        """Reserve the cache and record the usual rounds before the first text, whose rounds would seem slow otherwise.

        If the device has too little memory, the first text will find out, and can make room.
        """
        with suppress(torch.OutOfMemoryError):
            self.cache.reserve(self._capacity)
            self.cache.wipe()
            self.rounds.prepare()

    def text(self, room: int) -> CachedDecoder:
        """An empty text with room for `room` entries; it has its own cache if another text still uses this one."""
        if self._borrower is not None and self._borrower() is not None:
            return CachedDecoder(self.decoder, room, keeps_all=True)
        self.cache.truncate(0)
        self.cache.num_dropped = 0
        self.cache.reserve(max(room, self._capacity))
        self.cache.wipe()
        text = StaticText(self)
        self._borrower = ref(text)
        return text

    def close(self) -> None:
        """Free graphs and cache; texts cannot be used afterwards."""
        self.rounds.close()
        self.rounds.cache = self.decoder.new_cache(forgets=False)


def _width(num_rows: int) -> int:
    return next(width for width in WIDTHS if width >= num_rows)


def _num_keys(in_use: int, capacity: int) -> int:
    return min(max(MIN_KEYS, 1 << (in_use - 1).bit_length()), capacity)


class StaticText(CachedDecoder):
    """A text with static tree rounds."""

    def __init__(self, graphs: TreeGraphs) -> None:
        self.decoder = graphs.decoder
        self.cache = graphs.cache
        self._graphs = graphs

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray, before: int = 0
    ) -> Tensor:
        """`CachedDecoder.states`; the states of a static round are valid until the next call."""
        states = self._graphs.rounds.run(chain, tokens, depths, parents)
        if states is None:
            return super().states(chain, tokens, depths, parents, before)
        return states[-1 - before :] if chain else states

    def joining(self, chain: Sequence[int]) -> None:
        """Its rounds are replayed."""
