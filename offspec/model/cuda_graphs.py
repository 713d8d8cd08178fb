"""A resident model's tree rounds with static shapes: buffers laid out once, on a GPU a captured CUDA graph a shape.

A round of the draft is some dozens of rows through a small model; what takes its time is the launching of some hundred
kernels. Here a round is one transfer of its tokens, positions and mask, and one replay. Rows are padded to a width,
keys to a power of two, so that few shapes are captured; the mask over the whole row of keys is made on the device from
whom each row sees in the pending region. What does not fit (a long chain, more rows or keys than there is room for,
weights that are streamed or have to be dequantised) goes `CachedDecoder`'s way, with the same results. Knows nothing of
trees' growth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from offspec.loaders.formats import Weight
from offspec.loaders.small_transfers import page_locked, read_words, seen_by
from offspec.scheduler.params import MAX_ROWS

from .decoder import BoolArray, CachedDecoder, Decoder, IntArray
from .foreign_config import ForeignConfig
from .kv_cache import KVCache
from .rope import Rotations

WIDTHS = (4, 8, 16, 32, 64)  # rows that a round is padded to
MIN_KEYS = 512  # keys that attention looks at, at least; doubled until all that is in use is among them
Work = Callable[[], None]
Recorder = Callable[[Work], Work | None]
Shape = tuple[int, int]  # rows and keys of a round


def is_static(decoder: Decoder) -> bool:
    """Whether a pass is nothing but arithmetic on tensors that stay where they are.

    Packed weights are left out: bitsandbytes does not promise that its kernels can be captured.
    """
    weights = decoder.weights
    if isinstance(decoder.config, ForeignConfig) or not weights.is_resident:
        return False

    def is_ready(weight: Weight) -> bool:
        return isinstance(weight, Tensor) and (weight.dtype, weight.device) == (decoder.dtype, decoder.device)

    for index in range(decoder.config.num_layers):
        with weights.layer(index) as layer:
            if not all(map(is_ready, layer.values())):
                return False
    return all(is_ready(weights.shared(name)) for name in decoder.config.shared_shapes())


class Inputs:
    """What a round is given, in one buffer on the host and its like on the device, so that it takes one transfer.

    counts [2]: committed tokens, then the slot of the first row. ids, positions [W]. region [W, 1 + P + 1]: column 0 is
    true, for the committed prefix; then whom each row sees in the pending region; the last one is false, for what lies
    behind it. W and P are the most there can be; a round of fewer rows transfers fewer.
    """

    def __init__(self, device: torch.device) -> None:
        self._most_rows, self._columns = WIDTHS[-1], MAX_ROWS + 2
        num_bytes = 8 * (2 + 2 * self._most_rows) + self._most_rows * self._columns
        self._host = page_locked(num_bytes, device)
        self._seen = seen_by(device, self._host)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.counts, self.ids, self.positions, self.region = self._views(self._device)
        self._written = tuple(view.numpy() for view in self._views(self._host))
        self._written[3][:, 0] = True

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        most, head = self._most_rows, 8 * (2 + 2 * self._most_rows)
        words, region = buffer[:head].view(torch.int64), buffer[head:].view(torch.bool)
        return words[:2], words[2 : 2 + most], words[2 + most :], region.view(most, self._columns)

    def put(self, length: int, start: int, tokens: IntArray, positions: IntArray, mask: BoolArray, width: int) -> None:
        """Send R rows; those from R to `width` repeat the last one, so that they bring in no numbers of their own."""
        if self._sent is not None:
            self._sent.synchronize()  # the host's buffer may still be on its way
        counts, ids, places, region = self._written
        num_rows, num_pending = mask.shape
        counts[:] = length, start
        for buffer, values in ((ids, tokens), (places, positions), (region[:, 1 : 1 + num_pending], mask)):
            buffer[:num_rows] = values
            buffer[num_rows:width] = values[-1]
        region[:width, 1 + num_pending :] = False
        num_bytes = self._host.nbytes - (self._most_rows - width) * self._columns
        if self._seen is not None:  # whole words: widths are multiples of four, columns an even number
            read_words(self._seen[:num_bytes], self._device[:num_bytes])
        else:
            self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        if self._sent is not None:  # on the stream that was copied on; alone, it would take the current device's
            self._sent.record(torch.cuda.current_stream(self._device.device))


@dataclass(frozen=True)
class StaticRows:
    """`PassRows` of a static round: their slots, and whom they see, are known to the device only.

    slots, positions [W]. seen [W, S]: over all keys that attention looks at.
    """

    cache: KVCache
    slots: Tensor
    positions: Tensor
    seen: Tensor
    rotations: Rotations

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return [(0, len(self.slots))]

    def mask(self, first: int, last: int, window: int | None) -> Tensor:
        if window is None:
            return self.seen
        return self.seen & (self.positions[:, None] - self.cache.positions[: self.seen.shape[1]] < window)

    def exchange(self, layer: int, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        self.cache.scatter(layer, keys, values, self.slots)
        return self.cache.read(layer, self.seen.shape[1])


class CudaRecorder:
    """Records work as a CUDA graph: its kernels are launched at once ever after, on whatever memory they saw.

    All graphs share one pool of memory for what lies between input and output, so only one may run at a time.
    """

    WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # Keeps the pool alive: one without graphs may not be asked for again.
        self._first: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Work) -> Work | None:
        """None where the work runs beside another stream's, which recording would make wait."""
        main = torch.cuda.current_stream(self._device)
        if main != torch.cuda.default_stream(self._device):
            return None
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for _ in range(self.WARM_UPS):  # libraries choose kernels and make workspaces, which may not be recorded
                work()
        main.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that copy weights meanwhile may do what a recording must not.
        with (
            torch.cuda.device(self._device),  # it waits for the current device
            torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"),
        ):
            work()
        self._first = self._first or graph
        return graph.replay


def as_it_is(work: Work) -> Work:
    """A `Recorder` where nothing can be recorded: the plain twin."""
    return work


class TreeGraphs:
    """The static rounds of one model, and the KV cache that they are bound to; both live as long as the model does.

    `text` lends the cache to one text after the other.
    """

    def __init__(self, decoder: Decoder, capacity: int, record: Recorder | None = None) -> None:
        """decoder: one that `is_static`. capacity: entries to make room for, when the first text comes."""
        self.decoder, self.cache = decoder, decoder.new_cache()
        self._capacity = capacity
        self._inputs = Inputs(decoder.device)
        self._states = torch.zeros(WIDTHS[-1], decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._record = record or (CudaRecorder(decoder.device) if decoder.device.type == "cuda" else as_it_is)
        self._rounds: dict[Shape, Work] = {}
        # Of rounds that ran beside a pass, where nothing can be recorded; in their order.
        self._missed = dict[Shape, None]()
        self._bound_to = 0  # the cache's capacity: where that changes, its memory does
        self._borrower: ReferenceType[StaticText] | None = None

    def text(self, room: int) -> CachedDecoder:
        """An empty text with room for `room` entries; with a cache of its own where another text still has this one."""
        if self._borrower is not None and self._borrower() is not None:
            return CachedDecoder(self.decoder, room)
        self.cache.truncate(0)
        self.cache.reserve(max(room, self._capacity))
        self._bind()
        text = StaticText(self)
        self._borrower = ref(text)
        return text

    def fits(self, num_rows: int) -> bool:
        """Whether so many rows more can be a static round."""
        if not 0 < num_rows <= WIDTHS[-1] or self.cache.pending + num_rows > MAX_ROWS:
            return False
        return self.cache.size + _width(num_rows) <= self.cache.capacity

    @torch.inference_mode()
    def states(self, tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """As `CachedDecoder.states` without a chain, valid until the next call. Counts are the caller's."""
        cache, width = self.cache, _width(len(tokens))
        if cache.capacity != self._bound_to:
            self._bind()
        self._inputs.put(cache.length, cache.size, tokens, cache.length - 1 + depths, mask, width)
        shape = width, _num_keys(cache.size + width, cache.capacity)
        if shape not in self._rounds:
            self._missed[shape] = None
        if self._missed:
            self._catch_up()
        replay = self._rounds.get(shape) or partial(self._forward, *shape)
        replay()
        return self._states[: len(tokens)]

    def _catch_up(self) -> None:
        """Record every shape that was missed, if that can be now.

        What it leaves in free slots the next rounds write over.
        """
        for shape in list(self._missed):
            if self.cache.size + shape[0] > self.cache.capacity:
                continue
            if (replay := self._record(partial(self._forward, *shape))) is None:
                return
            self._rounds[shape] = replay
            del self._missed[shape]

    def close(self) -> None:
        """Lets go of graphs and cache; no text may be asked for or used afterwards."""
        self._rounds, self.cache = {}, self.decoder.new_cache()

    def _bind(self) -> None:
        """To the cache's memory as it is now."""
        self.cache.wipe()
        if self.cache.capacity != self._bound_to:
            self._rounds, self._missed, self._bound_to = {}, {}, self.cache.capacity

    def _forward(self, width: int, num_keys: int) -> None:
        """The round that the inputs hold, into the states. The arguments alone make the shapes, and nothing waits."""
        decoder, cache, inputs = self.decoder, self.cache, self._inputs
        length, start = inputs.counts.unbind()
        ids, positions = inputs.ids[:width], inputs.positions[:width]
        slots = start + torch.arange(width, device=ids.device)
        cache.positions.index_copy_(0, slots, positions)
        columns = torch.arange(1, num_keys + 1, device=ids.device) - length
        seen = inputs.region[:width].index_select(1, columns.clamp(0, inputs.region.shape[1] - 1))
        rows = StaticRows(cache, slots, positions, seen, Rotations(positions))
        hidden = decoder.through(decoder.embed(ids), rows)
        self._states[:width].copy_(decoder.normed(hidden))


def _width(num_rows: int) -> int:
    return next(width for width in WIDTHS if width >= num_rows)


def _num_keys(in_use: int, capacity: int) -> int:
    return min(max(MIN_KEYS, 1 << (in_use - 1).bit_length()), capacity)


class StaticText(CachedDecoder):
    """A text whose tree rounds are static."""

    def __init__(self, graphs: TreeGraphs) -> None:
        self.decoder, self.cache = graphs.decoder, graphs.cache
        self._graphs = graphs

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray, before: int = 0
    ) -> Tensor:
        """As `CachedDecoder.states`; those of a static round are valid until the next call."""
        num_rows = max(len(chain), len(tokens))
        if (chain and len(tokens)) or not self._graphs.fits(num_rows):
            return super().states(chain, tokens, depths, mask, before)
        if not chain:
            states = self._graphs.states(tokens, depths, mask)
            self.cache.append(0, num_rows)
            return states
        # A chain is a tree that has one branch, and is committed.
        steps = np.arange(1, num_rows + 1)
        states = self._graphs.states(np.array(chain), steps, np.tri(num_rows, dtype=np.bool_))
        self.cache.append(num_rows, 0)
        return states[-1 - before :]
