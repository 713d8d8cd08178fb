"""Static rounds against `CachedDecoder`'s own, whatever becomes of the text; what is recorded, and for how long.

On the CPU nothing is recorded, but the arithmetic, its shapes and the bookkeeping are those of a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.background import in_background
from offspec.loaders.accelerators.capture import CudaRecorder, Work, as_it_is
from offspec.model.cuda_graphs import WIDTHS, StaticText, TreeGraphs, is_static
from offspec.model.decoder import CachedDecoder, Decoder, random_decoder

from ...examples import examples
from ...fakes import VOCAB_SIZE, TinyModel
from .test_decoder import NO_NODES, Tree, random_tokens

GetModel = Callable[[str], TinyModel]
FAMILIES = ["mistral-window", "qwen3-biased-window", "gemma4-layer-inputs"]
TOLERANCE = 1e-5  # of logits that lie some units apart; what is computed in fp64 differs by their rounding to fp32 only


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def star(num_nodes: int, seed: int = 1) -> Tree:
    """Half of the nodes below the root, each of the others below one of these."""
    half = (num_nodes + 1) // 2
    return Tree(random_tokens(num_nodes, seed), [-1] * half + list(range(num_nodes - half)))


# ------------------------------------------------------------------------------------------------ a text's life


@dataclass
class Twins:
    """The same text twice, static and not. Every call goes to both, and what they say is compared."""

    static: CachedDecoder
    plain: CachedDecoder
    tree: Tree = field(default_factory=lambda: Tree([], []))  # the pending nodes

    def commit(self, chain: list[int]) -> None:
        self.keep(-1, reroot=False)
        assert_close(self.static.score(chain, *NO_NODES), self.plain.score(chain, *NO_NODES))

    def grow(self, tokens: list[int], places: list[int]) -> None:
        """Nodes below pending ones, or below the root: places are taken modulo what is there."""
        first = len(self.tree.tokens)
        for token, place in zip(tokens, places, strict=True):
            self.tree.parents.append(place % (len(self.tree.tokens) + 1) - 1)
            self.tree.tokens.append(token)
        nodes = self.tree.round(first, len(self.tree.tokens))
        assert_close(self.static.score([], *nodes), self.plain.score([], *nodes))

    def keep(self, node: int, *, reroot: bool) -> None:
        """Commit the path to a node; what is below it stays where `reroot`."""
        path = self.tree.path(node)
        below = [
            n
            for n in range(len(self.tree.tokens))
            if reroot and n not in path and self.tree.path(n)[: len(path)] == path
        ]
        for text in (self.static, self.plain):
            text.keep(path, below)
        places = {node: -1} | {n: i for i, n in enumerate(below)}
        self.tree = Tree([self.tree.tokens[n] for n in below], [places[self.tree.parents[n]] for n in below])

    def truncate(self, length: int) -> None:
        for text in (self.static, self.plain):
            text.truncate(min(length, text.length))
        self.tree = Tree([], [])


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[str, list[int]]]:
    """Calls by name, each with numbers to make arguments of."""
    kinds = st.sampled_from(["commit", "grow", "grow", "grow", "keep", "reroot", "truncate"])
    numbers = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)
    return [("commit", draw(numbers)), *draw(st.lists(st.tuples(kinds, numbers), min_size=2, max_size=8))]


def live(twins: Twins, life: list[tuple[str, list[int]]]) -> None:
    for kind, numbers in life:
        if kind == "commit":
            twins.commit(numbers)
        elif kind == "grow":
            twins.grow(numbers, [7 * number for number in numbers])
        elif kind == "truncate":
            twins.truncate(1 + numbers[0] % 20)
        else:
            twins.keep(numbers[0] % (len(twins.tree.tokens) + 1) - 1, reroot=kind == "reroot")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@given(life=lives())
@examples(20)
def test_static_rounds_give_the_logits_of_plain_ones(
    tiny_model: GetModel, family: str, life: list[tuple[str, list[int]]]
) -> None:
    decoder = cached(tiny_model, family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offspec.model.cuda_graphs.MIN_KEYS", 32)  # so that some texts outgrow it
        graphs = TreeGraphs(decoder, 400)
        twins = Twins(graphs.text(400), CachedDecoder(decoder))
        live(twins, life)
    assert twins.static.cache is graphs.cache
    twins.keep(-1, reroot=False)
    stored = (text.cache.stored(text.length) for text in (twins.static, twins.plain))
    for ours, theirs in zip(*stored, strict=True):
        assert_close(ours, theirs)


_decoders: dict[str, Decoder] = {}


def cached(tiny_model: GetModel, family: str) -> Decoder:
    """In fp64: these models are sharp, and fp32 sums in another order differ by more than 1e-5 after some passes."""
    return _decoders.setdefault(family, tiny_model(family).decoder(torch.float64))


@pytest.mark.parametrize("num_rows", [1, WIDTHS[0] + 1, WIDTHS[1], WIDTHS[-1] - 1, WIDTHS[-1] + 1])
def test_any_number_of_rows(tiny_model: GetModel, num_rows: int) -> None:
    """Those that are padded, those that are not, and those that are too many."""
    decoder = cached(tiny_model, "qwen3-biased-window")
    twins = Twins(TreeGraphs(decoder, 300).text(300), CachedDecoder(decoder))
    twins.commit(random_tokens(num_rows, seed=3))
    twins.grow(random_tokens(num_rows, seed=4), list(range(0, 3 * num_rows, 3)))
    twins.grow(random_tokens(5, seed=5), [1, 3, 5, 0, 2])
    twins.keep(num_rows // 2, reroot=True)
    twins.grow(random_tokens(3, seed=6), [0, 1, 2])


# ------------------------------------------------------------------------------------------------ numbers that are none


@pytest.fixture
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_fresh_memory_is_nan")
def test_what_lies_in_unused_memory_is_never_seen(tiny_model: GetModel) -> None:
    decoder, tree = cached(tiny_model, "llama-gqa"), star(6)
    text = TreeGraphs(decoder, 200).text(200)
    assert text.score(random_tokens(10), *NO_NODES).isfinite().all()
    assert text.score([], *tree.round(0, 6)).isfinite().all()


@pytest.mark.usefixtures("_fresh_memory_is_nan")
def test_a_text_longer_than_its_room_takes_new_memory(tiny_model: GetModel) -> None:
    decoder = cached(tiny_model, "llama-gqa")
    recorder = Recorder()
    twins = Twins(TreeGraphs(decoder, 40, recorder).text(40), CachedDecoder(decoder))
    twins.commit(random_tokens(20))
    twins.grow(random_tokens(15, seed=2), [0] * 15)
    twins.grow(random_tokens(9, seed=3), [1] * 9)  # 44 in all
    twins.grow(random_tokens(2, seed=4), [2, 3])
    assert recorder.shapes == [(32, 40), (16, 40), (4, 60)]


def test_a_text_that_ran_into_nan_leaves_none_behind(tiny_model: GetModel) -> None:
    decoder = cached(tiny_model, "llama-gqa")
    graphs = TreeGraphs(decoder, 100)
    graphs.text(100).score(random_tokens(20), *NO_NODES)
    for layer in range(decoder.config.num_layers):
        for part in graphs.cache.read(layer, graphs.cache.capacity):
            part.fill_(torch.nan)
    assert graphs.text(100).score(random_tokens(4), *NO_NODES).isfinite().all()


# ------------------------------------------------------------------------------------------------ what is recorded


class Recorder:
    """Notes the shapes that it is asked to record; where `refuses`, it does not."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.refuses = refuses

    def __call__(self, work: Work) -> Work | None:
        self.shapes.append(work.args)  # type: ignore[attr-defined]
        return None if self.refuses else work


def test_a_shape_is_recorded_once_and_for_all_texts(tiny_model: GetModel) -> None:
    decoder, recorder = cached(tiny_model, "llama-gqa"), Recorder()
    graphs = TreeGraphs(decoder, 3000, recorder)
    for _ in range(2):
        twins = Twins(graphs.text(3000), CachedDecoder(decoder))
        twins.commit(random_tokens(10))
        for num_nodes in (1, 4, 5, 8, 3):
            twins.grow(random_tokens(num_nodes), [0] * num_nodes)
        del twins
    assert recorder.shapes == [(16, 512), (4, 512), (8, 512)]
    text = graphs.text(3000)
    text.score(random_tokens(240) * 2 + random_tokens(25), *NO_NODES)
    text.score([], *star(7).round(0, 7))  # 505 and 8 rows are 513 keys
    assert recorder.shapes[3:] == [(8, 1024)]


def test_what_cannot_be_recorded_now_is_computed_and_asked_for_again(tiny_model: GetModel) -> None:
    decoder, recorder = cached(tiny_model, "llama-gqa"), Recorder(refuses=True)
    twins = Twins(TreeGraphs(decoder, 100, recorder).text(100), CachedDecoder(decoder))
    twins.commit([1, 2, 3])
    twins.grow([4, 5], [0, 0])
    recorder.refuses = False
    twins.grow([6, 7], [1, 2])
    twins.grow([8], [3])
    assert recorder.shapes == [(4, 100)] * 3


def test_two_texts_at_a_time_do_not_share(tiny_model: GetModel) -> None:
    decoder = cached(tiny_model, "llama-gqa")
    graphs = TreeGraphs(decoder, 100)
    first = graphs.text(100)
    second = graphs.text(50)
    assert isinstance(first, StaticText)
    assert type(second) is CachedDecoder
    assert second.cache is not first.cache
    del first
    assert isinstance(graphs.text(50), StaticText)


def test_only_weights_that_stay_as_they_are(tiny_model: GetModel) -> None:
    model = tiny_model("llama-gqa")
    decoder = model.decoder()
    assert is_static(decoder)
    assert not is_static(model.lending_decoder()[0])
    wider = Decoder(decoder.config, decoder.weights, dtype=torch.bfloat16, device=decoder.device)
    assert not is_static(wider), "each use would convert them"


def test_shapes_that_were_missed_are_recorded_as_soon_as_they_can_be(tiny_model: GetModel) -> None:
    """Beside a pass nothing is recorded; the next round of any other shape makes up for it, and disturbs no text."""
    decoder, recorded, may_record = cached(tiny_model, "llama-gqa"), list[tuple[int, ...]](), True

    def record(work: Any) -> Work | None:
        if may_record:
            work()  # as warming up does
            recorded.append(work.args)
        return work if may_record else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offspec.model.cuda_graphs.MIN_KEYS", 32)
        twins = Twins(TreeGraphs(decoder, 100, record).text(100), CachedDecoder(decoder))
        twins.commit(random_tokens(8))
        assert recorded == [(8, 32)]
        may_record = False
        twins.grow(random_tokens(20, seed=1), [3 * place for place in range(20)])  # 28 rows behind 8: 64 keys
        twins.grow(random_tokens(20, seed=2), [5 * place for place in range(20)])
        assert recorded == [(8, 32)]
        may_record = True
        twins.keep(2, reroot=True)
        twins.grow(random_tokens(6, seed=3), [0, 1, 0, 1, 2, 0])
        assert (32, 64) in recorded
        assert len(recorded) == len(set(recorded))
        twins.grow(random_tokens(18, seed=4), list(range(18)))
        twins.keep(1, reroot=True)


def test_usual_rounds_are_recorded_before_the_first_text(tiny_model: GetModel) -> None:
    decoder, recorder = cached(tiny_model, "llama-gqa"), Recorder()
    graphs = TreeGraphs(decoder, 5000, recorder)
    graphs.prepare()
    assert recorder.shapes == [(width, num_keys) for num_keys in (512, 1024, 2048) for width in WIDTHS]
    twins = Twins(graphs.text(5000), CachedDecoder(decoder))
    twins.commit(random_tokens(10))
    for num_nodes in (1, 5, 12, 20):
        twins.grow(random_tokens(num_nodes), [0] * num_nodes)
    assert len(recorder.shapes) == 3 * len(WIDTHS)


# ------------------------------------------------------------------------------------------------ how it is recorded


class Cuda:
    """A stand-in for `torch.cuda`, and for the allocator, that notes calls in their order.

    fails: what each capture raises, None for those that succeed; after the last one all succeed. breaks: a capture that
    fails cannot be ended either.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fails: BaseException | None, breaks: bool = False) -> None:
        self.calls, self.fails, self.breaks = list[str](), list(fails), breaks
        self.is_capturing, self.alive, self.num_pools = False, set[int](), 0
        self.main = SimpleNamespace(name="main", wait_stream=lambda other: self.note("main waits for side"))
        self.side = SimpleNamespace(name="side", wait_stream=lambda other: self.note("side waits for main"))
        self.current = self.main
        fakes: dict[str, Any] = {
            "Stream": lambda device, **options: self.side,
            "graph_pool_handle": self.new_pool,
            "current_stream": lambda device: self.current,
            "default_stream": lambda device: self.main,
            "current_device": lambda: 0,
            "stream": self.stream,
            "CUDAGraph": self.graph_class(),
            "synchronize": lambda device=None: self.note("synchronize"),
            "empty_cache": lambda: self.note("empty_cache"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "graph", None)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, partial(self.allocator, name), raising=False)
        monkeypatch.setattr(gc, "collect", lambda *args: self.note("gc.collect"))

    def note(self, call: str) -> None:
        self.calls.append(call)

    def new_pool(self) -> str:
        self.num_pools += 1
        return f"pool {self.num_pools}"

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def allocator(self, name: str, device: int, pool: str) -> None:
        if not self.breaks:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.note(f"{name} {device} {pool}")

    def graph_class(self) -> type:
        cuda = self

        class Graph:
            def capture_begin(self, pool: str, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                assert cuda.current is cuda.side
                assert not (pool == "pool 1" and "capture_end" in cuda.calls and not cuda.alive), "use_count > 0"
                cuda.is_capturing = True
                cuda.note(f"capture_begin {pool}")

            def capture_end(self) -> None:
                cuda.is_capturing = False
                if cuda.breaks and cuda.has_failed:
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.note("capture_end")
                cuda.alive.add(id(self))

            def __del__(self) -> None:
                cuda.alive.discard(id(self))

            def replay(self) -> None:
                cuda.note("replay")

        return Graph

    def work(self) -> None:
        """What is recorded."""
        self.note("launch, gc " + ("on" if gc.isenabled() else "off"))
        self.has_failed = False
        if self.is_capturing and self.fails and (failure := self.fails.pop(0)) is not None:
            self.has_failed = True
            raise failure


CUDA_DEVICE = torch.device("cuda:0")


def test_a_capture_waits_for_nothing_and_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    replay = CudaRecorder(CUDA_DEVICE)(cuda.work)
    assert replay is not None
    replay()
    assert cuda.calls == [
        "side waits for main",
        "launch, gc on",
        "capture_begin pool 1",
        "launch, gc off",
        "capture_end",
        "main waits for side",
        "replay",
    ]
    assert gc.isenabled()


def test_nothing_is_recorded_beside_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    recorder = CudaRecorder(CUDA_DEVICE)
    cuda.current = cuda.side
    assert recorder(cuda.work) is None
    assert cuda.calls == []


def test_a_capture_that_lacks_memory_is_tried_again_with_what_torch_has_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    replay = CudaRecorder(CUDA_DEVICE)(cuda.work)
    assert replay is not None
    replay()
    assert cuda.calls[2:] == [
        *("capture_begin pool 1", "launch, gc off", "capture_end"),
        "empty_cache",
        *("capture_begin pool 2", "launch, gc off", "capture_end"),  # the first one has had a graph, and has none now
        *("main waits for side", "replay"),
    ]


@pytest.mark.parametrize("breaks", [False, True])
def test_work_that_cannot_be_captured_is_launched_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    failures = [RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors ...")] * 4
    cuda = Cuda(monkeypatch, *failures, breaks=breaks)
    recorder = CudaRecorder(CUDA_DEVICE)
    with pytest.warns(UserWarning, match="slower now: operation not permitted when stream is capturing$") as warned:
        rounds = [recorder(cuda.work) for _ in range(2)]
    assert len(warned) == 1
    assert rounds == [cuda.work, cuda.work]
    assert cuda.calls.count("empty_cache") == 4
    assert gc.isenabled()
    assert cuda.current is cuda.main
    if breaks:  # torch's allocator would take it for underway
        ended = [call for call in cuda.calls if call.startswith("_cuda")]
        assert ended == [
            f"{name} 0 pool {number}"
            for number in (1, 2, 3, 4)
            for name in ("_cuda_endAllocateToPool", "_cuda_releasePool")
        ]
    replay = recorder(cuda.work)
    assert replay is not None
    assert replay != cuda.work, "another shape may be captured"


def test_an_interrupted_capture_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        CudaRecorder(CUDA_DEVICE)(cuda.work)
    assert cuda.calls[-2:] == ["capture_end", "main waits for side"]
    assert gc.isenabled()


# ------------------------------------------------------------------------------------------------ CUDA


def cuda_decoder(tiny_model: GetModel, dtype: torch.dtype) -> Decoder:
    config = tiny_model("qwen3-biased-window").decoder().config
    return random_decoder(config, 0, dtype=dtype, device=torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_captured_round_equals_the_same_launched_one_by_one(
    tiny_model: GetModel, width: int, dtype: torch.dtype
) -> None:
    decoder = cuda_decoder(tiny_model, dtype)
    tree, graphs = star(2 * width), [TreeGraphs(decoder, 2000, record) for record in (None, as_it_is)]
    for seed in range(3):  # captured in the first text, replayed in the others
        found: list[list[Tensor]] = []
        for text in (g.text(2000) for g in graphs):
            logits = [text.score(random_tokens(100 + 300 * seed, seed), *NO_NODES).clone()]
            logits += [text.score([], *tree.round(first, first + width)).clone() for first in (0, width)]
            found.append(logits)
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours, theirs, 1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.gpu
@given(life=lives())
@examples(20)
def test_captured_rounds_give_the_logits_of_plain_ones(tiny_model: GetModel, life: list[tuple[str, list[int]]]) -> None:
    decoder = cuda_decoder(tiny_model, torch.float32)
    live(Twins(TreeGraphs(decoder, 400).text(400), CachedDecoder(decoder)), life)


@pytest.mark.gpu
def test_graphs_are_captured_on_the_main_stream_and_replayed_on_any(tiny_model: GetModel) -> None:
    decoder = cuda_decoder(tiny_model, torch.float32)
    recorded: list[bool] = []
    recorder = CudaRecorder(decoder.device)

    def record(work: Work) -> Work | None:
        replay = recorder(work)
        recorded.append(replay is not None)
        return replay

    text, plain, tree = TreeGraphs(decoder, 500, record).text(500), CachedDecoder(decoder), star(24)
    expected = [plain.score(random_tokens(100), *NO_NODES)]
    expected += [plain.score([], *tree.round(first, first + 8)) for first in (0, 8, 16)]
    found = [text.score(random_tokens(100), *NO_NODES)]

    def work(first: int) -> Callable[[Callable[[], bool]], None]:
        return lambda is_over: found.append(text.score([], *tree.round(first, first + 8)).clone())

    with in_background(work(0), decoder.device):
        pass
    assert recorded == [False]
    found.append(text.score([], *tree.round(8, 16)).clone())
    with in_background(work(16), decoder.device):
        pass
    assert recorded == [False, True]
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.gpu
def test_a_capture_on_a_gpu_waits_for_no_other_stream() -> None:
    recorder, sums = CudaRecorder(torch.device("cuda:0")), torch.zeros(4, device="cuda:0")
    other, is_over = torch.cuda.Stream(), torch.cuda.Event()

    def work() -> None:
        sums.add_(1)

    first = recorder(work)  # loads the kernel, for which CUDA may wait
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(5 * 10**9)  # cycles: seconds on every card
        is_over.record(other)
    second = recorder(work)
    assert not is_over.query(), "the capture waited for the device"
    assert first is not None
    assert second is not None
    first()
    second()
    assert sums.tolist() == [4] * 4  # twice to warm up, twice in replays


@pytest.mark.gpu
def test_what_a_gpu_cannot_capture_is_launched_and_others_are_captured() -> None:
    recorder, sums = CudaRecorder(torch.device("cuda:0")), torch.zeros(4, device="cuda:0")

    def forbidden() -> None:
        sums.add_(1)
        if torch.cuda.is_current_stream_capturing():
            sums.sum().item()

    with pytest.warns(UserWarning, match="CUDA cannot capture"):
        rounds = recorder(forbidden)
    assert rounds is forbidden
    before = sums.clone()

    def allowed() -> None:
        sums.add_(1)

    replay = recorder(allowed)
    assert replay is not None
    assert replay is not allowed
    replay()
    assert torch.equal(sums, before + 2)  # once to warm up, once in the replay
    taken = torch.cuda.memory_reserved()
    large = torch.empty(2**28, device="cuda:0", dtype=torch.uint8)
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= taken, "torch takes the capture for underway"


@pytest.mark.gpu
def test_the_host_may_write_the_next_round_at_once(tiny_model: GetModel) -> None:
    """Nobody waits for the device between these rounds."""
    decoder = cuda_decoder(tiny_model, torch.float32)
    text, plain = TreeGraphs(decoder, 1500).text(1500), CachedDecoder(decoder)
    tree = Tree(random_tokens(400), [-1, *range(399)])
    found, expected = (
        [text.score([], *tree.round(first, first + 4)).clone() for first in range(0, 400, 4)] for text in (text, plain)
    )
    assert_close(torch.cat(found), torch.cat(expected), 1e-4)


@pytest.mark.gpu
def test_graphs_are_captured_anew_where_the_cache_has_grown(tiny_model: GetModel) -> None:
    decoder, tree = cuda_decoder(tiny_model, torch.float32), star(8)
    graphs = TreeGraphs(decoder, 600)
    for room in (600, 1300, 2600):
        text, plain = graphs.text(room), CachedDecoder(decoder)
        assert isinstance(text, StaticText)
        for each in (text, plain):
            each.score(random_tokens(100), *NO_NODES)
        assert_close(text.score([], *tree.round(0, 8)), plain.score([], *tree.round(0, 8)))
        del text, each
