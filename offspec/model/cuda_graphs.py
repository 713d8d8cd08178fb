"""Tree rounds of a resident model with static shapes: on a GPU, one captured CUDA graph per shape.

A round of the draft takes a few dozen rows through a small model; most of its time is the launch of some hundred
kernels. Here a round is one transfer of its tokens, positions and mask, and one replay. Rows are padded to a width and
keys to a power of two, so that few shapes are captured. The device extends the mask of the pending region to all keys.
Other rounds run through `CachedDecoder`, with the same results: long chains, too many rows or keys, and weights that
are streamed or dequantised.
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

from .block import RowsOfText
from .decoder import BoolArray, CachedDecoder, Decoder, IntArray
from .foreign_config import ForeignConfig
from .kv_cache import KVCache
from .rope import Rotations

WIDTHS = (4, 8, 16, 32, 64)  # a round's rows are padded to one of these
MIN_KEYS = 512  # minimum number of keys in attention; doubled until it covers all slots in use
Work = Callable[[], None]
Recorder = Callable[[Work], Work | None]
Shape = tuple[int, int]  # rows and keys of a round


def is_static(decoder: Decoder) -> bool:
    """Whether a pass only computes with tensors that keep their addresses.

    Packed weights are excluded: bitsandbytes does not guarantee that its kernels can be captured.
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
    """The inputs of a round, in one host buffer and an equal device buffer, so that one transfer is enough.

    counts [2]: committed tokens, then the slot of the first row. ids, positions [W]. region [W, 1 + P + 1]: column 0 is
    true, for the committed prefix; the next P are the mask of the pending region; the last one is false, for slots
    after it. W and P are maxima; a round of fewer rows transfers fewer.
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
        """Send R rows; rows R to `width` repeat the last one, so that they cannot introduce NaNs."""
        if self._sent is not None:
            self._sent.synchronize()  # the last transfer may still read the host buffer
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
        if self._sent is not None:  # name the copy's stream; the default is the current device's stream
            self._sent.record(torch.cuda.current_stream(self._device.device))


@dataclass(frozen=True)
class StaticRows(RowsOfText):
    """`PassRows` of a static round; only the device knows their slots and mask.

    slots, positions [W]. seen: bool [W, S], the mask over all keys of the round.
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
    """Records work as a CUDA graph, which launches all its kernels at once, on the same memory.

    All graphs share one pool of memory for intermediate tensors, so only one may run at a time.
    """

    WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # Keeps the pool alive: a pool without graphs cannot be used again.
        self._first: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Work) -> Work | None:
        """The recorded work; None outside the default stream, because recording would block the other streams."""
        main = torch.cuda.current_stream(self._device)
        if main != torch.cuda.default_stream(self._device):
            return None
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for _ in range(self.WARM_UPS):  # libraries choose kernels and allocate workspaces, which cannot be recorded
                work()
        main.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may copy weights meanwhile, which is forbidden in a recording.
        with (
            torch.cuda.device(self._device),  # torch.cuda.graph synchronises the current device
            torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"),
        ):
            work()
        self._first = self._first or graph
        return graph.replay


def as_it_is(work: Work) -> Work:
    """A `Recorder` that records nothing: the plain twin."""
    return work


class TreeGraphs:
    """The static rounds of one model, and their KV cache; both exist as long as the model.

    `text` lends the cache to one text at a time.
    """

    def __init__(self, decoder: Decoder, capacity: int, record: Recorder | None = None) -> None:
        """decoder: must be `is_static`. capacity: entries to reserve at the first text."""
        self.decoder, self.cache = decoder, decoder.new_cache()
        self._capacity = capacity
        self._inputs = Inputs(decoder.device)
        self._states = torch.zeros(WIDTHS[-1], decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._record = record or (CudaRecorder(decoder.device) if decoder.device.type == "cuda" else as_it_is)
        self._rounds: dict[Shape, Work] = {}
        # Shapes of rounds that ran during a pass, when nothing can be recorded; in their order.
        self._missed = dict[Shape, None]()
        self._bound_to = 0  # the cache's capacity; if it changes, the cache has new memory
        self._borrower: ReferenceType[StaticText] | None = None

    def text(self, room: int) -> CachedDecoder:
        """An empty text with room for `room` entries; it has its own cache if another text still uses this one."""
        if self._borrower is not None and self._borrower() is not None:
            return CachedDecoder(self.decoder, room)
        self.cache.truncate(0)
        self.cache.num_dropped = 0
        self.cache.reserve(max(room, self._capacity))
        self._bind()
        text = StaticText(self)
        self._borrower = ref(text)
        return text

    def fits(self, num_rows: int) -> bool:
        """Whether `num_rows` more rows can be a static round."""
        if not 0 < num_rows <= WIDTHS[-1] or self.cache.pending + num_rows > MAX_ROWS:
            return False
        return self.cache.size + _width(num_rows) <= self.cache.capacity

    @torch.inference_mode()
    def states(self, tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """`CachedDecoder.states` without a chain; valid until the next call. The caller advances the cache's counts."""
        cache, width = self.cache, _width(len(tokens))
        if cache.capacity != self._bound_to:
            self._bind()
        self._inputs.put(cache.length, cache.size, tokens, cache.next_position - 1 + depths, mask, width)
        shape = width, _num_keys(cache.size + width, cache.capacity)
        if shape not in self._rounds:
            self._missed[shape] = None
        if self._missed:
            self._catch_up()
        replay = self._rounds.get(shape) or partial(self._forward, *shape)
        replay()
        return self._states[: len(tokens)]

    def _catch_up(self) -> None:
        """Record all missed shapes, if recording is possible now.

        It writes to free slots, which later rounds overwrite.
        """
        for shape in list(self._missed):
            if self.cache.size + shape[0] > self.cache.capacity:
                continue
            if (replay := self._record(partial(self._forward, *shape))) is None:
                return
            self._rounds[shape] = replay
            del self._missed[shape]

    def close(self) -> None:
        """Free graphs and cache; texts cannot be used afterwards."""
        self._rounds, self.cache = {}, self.decoder.new_cache()

    def _bind(self) -> None:
        """Bind the rounds to the cache's current memory."""
        self.cache.wipe()
        if self.cache.capacity != self._bound_to:
            self._rounds, self._missed, self._bound_to = {}, {}, self.cache.capacity

    def _forward(self, width: int, num_keys: int) -> None:
        """Compute the states of the round in the inputs. Shapes depend on the arguments only; nothing synchronises."""
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
    """A text with static tree rounds."""

    def __init__(self, graphs: TreeGraphs) -> None:
        self.decoder, self.cache = graphs.decoder, graphs.cache
        self._graphs = graphs

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray, before: int = 0
    ) -> Tensor:
        """`CachedDecoder.states`; the states of a static round are valid until the next call."""
        num_rows = max(len(chain), len(tokens))
        if (chain and len(tokens)) or not self._graphs.fits(num_rows):
            return super().states(chain, tokens, depths, mask, before)
        if not chain:
            states = self._graphs.states(tokens, depths, mask)
            self.cache.append(0, num_rows)
            return states
        # A chain is a tree with one branch, which is then committed.
        steps = np.arange(1, num_rows + 1)
        states = self._graphs.states(np.array(chain), steps, np.tri(num_rows, dtype=np.bool_))
        self.cache.append(num_rows, 0)
        return states[-1 - before :]
