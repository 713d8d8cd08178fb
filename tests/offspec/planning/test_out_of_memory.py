"""Out of memory: explained, and retried once with fewer resident layers; the text does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams, loading
from offspec.checkpoints.load import load_weights
from offspec.drafts import model_draft
from offspec.drafts.without_model import NoDraft
from offspec.errors import MemoryLimitError
from offspec.loaded_target import LoadedTarget, PlannedMemory
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.streaming.placement import Placement
from offspec.loaders.streaming.tiers import TieredWeights
from offspec.model.memory.sequence_cache import SequenceCache
from offspec.planning.out_of_memory import out_of_memory_message
from offspec.running import passes

from ...pair import build_pair, shorten
from ...refusals import refused, tells

pytestmark = pytest.mark.slow

TOLD = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.65 GiB\nSee documentation"
PARAMS = SamplingParams(10, temperature=1.0, seed=1, ignore_eos=True)
SPECULATION = SpeculationParams(budget=2)  # three passes at least: a budget that is found goes by the clock
NUM_LAYERS = 4
Load = Callable[[], Engine]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    pair = build_pair(tmp_path_factory.mktemp("pair"), NUM_LAYERS)
    shorten(pair.draft, 1)
    return lambda: Engine.load(str(pair.target), draft=str(pair.draft), device="cpu")


def says(engine: Engine) -> list[int]:
    steps = engine.generate("def area(", PARAMS, SPECULATION)
    return [token for step in steps for token in step.token_ids]


@pytest.fixture(scope="module")
def expected(load: Load) -> list[int]:
    with load() as engine:
        return says(engine)


@pytest.fixture
def engine(load: Load) -> Iterator[Engine]:
    with load() as engine:
        assert num_resident(engine) == NUM_LAYERS
        yield engine


def num_resident(engine: Engine) -> int:
    assert engine.plan is not None
    return len(engine.plan.placement.resident)


class Scarce:
    """Calls of a method or function that fail for want of memory, by their number; the others go through."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        failing: set[int],
        make_error: Callable[[], RuntimeError] = lambda: torch.OutOfMemoryError(TOLD),
    ) -> None:
        self.num_calls, original = 0, getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls in failing:
                raise make_error()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scarce]:
    return lambda *args, **options: Scarce(monkeypatch, *args, **options)


@pytest.mark.parametrize("owner", [loading, model_draft], ids=["target", "draft"])
def test_loading_is_tried_again_with_fewer_residents(
    load: Load, scarce: Callable[..., Scarce], owner: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[Placement] = []

    def watched(model: Any, placement: Placement, *args: Any) -> TieredWeights:
        placed.append(placement)
        return load_weights(model, placement, *args)

    monkeypatch.setattr(loading, "load_weights", watched)
    scarce(owner, "load_weights" if owner is loading else "load_decoder", {1})
    with load() as engine:
        assert num_resident(engine) < NUM_LAYERS
        assert engine.plan is not None
        assert placed[-1].resident == engine.plan.placement.resident
        (note,) = [note for note in engine.notes if "out of memory" in note.text]
        assert note.advice
        assert tells(note.text, "CUDA out of memory", num_resident(engine), NUM_LAYERS, "layers")
        before = num_resident(engine)
        scarce(passes, "score_together", {2})  # for which what ran out in loading does not count
        assert says(engine) == expected
        assert num_resident(engine) < before


def accelerator_error(message: str, code: int) -> RuntimeError:
    """torch's, from 2.9 on; a stand-in before."""
    error: RuntimeError = getattr(torch, "AcceleratorError", RuntimeError)(message)
    error.error_code = code  # type: ignore[attr-defined]
    return error


def capture_error() -> RuntimeError:
    """What ends a capture in which memory ran out."""
    try:
        try:
            raise torch.OutOfMemoryError(TOLD)
        finally:
            raise accelerator_error("CUDA error: operation failed due to a previous error during capture", 901)
    except RuntimeError as exc:
        return exc


NVML_IS_MISSING = 'NVML_SUCCESS == nvmlInit_v2_() INTERNAL ASSERT FAILED at "/pytorch/CUDACachingAllocator.cpp"'


@pytest.mark.parametrize(
    ("make_error", "message"),
    [
        (lambda: torch.OutOfMemoryError(TOLD), "CUDA out of memory"),
        (lambda: accelerator_error("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", 2),
         "CUDA error: out of memory"),
        (lambda: accelerator_error("CUDA error: worded otherwise", 2), "CUDA error: worded otherwise"),
        (lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
         "CUDA error: out of memory"),
        (lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
         "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        (lambda: RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error [CUDA]: out of memory"),
        (capture_error, "CUDA out of memory"),
        (lambda: RuntimeError(NVML_IS_MISSING), NVML_IS_MISSING),
    ],
    ids=["allocator", "runtime", "code", "older torch", "cuBLAS", "Triton", "capture", "report without NVML"],
)  # fmt: skip
def test_every_way_to_run_out_of_memory_is_known(make_error: Callable[[], RuntimeError], message: str) -> None:
    assert out_of_memory_message(make_error()) == message


@pytest.mark.parametrize(("owner", "name"), [(passes, "score_together"), (SequenceCache, "keep")])
def test_a_pass_that_runs_out_of_memory_is_tried_again(
    engine: Engine, scarce: Callable[..., Scarce], expected: list[int], owner: Any, name: str
) -> None:
    """In it, or in what follows it."""
    scarce(owner, name, {2}, make_error=capture_error)
    steps = list(engine.generate("def area(", PARAMS, SPECULATION))
    assert [token for step in steps for token in step.token_ids] == expected
    assert [step.stats.num_passes for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1].stats.stream_bytes_per_pass > 0
    assert num_resident(engine) < NUM_LAYERS
    (note,) = [note for note in engine.notes if "ran out of memory" in note.text]
    assert "(CUDA out of memory)" in note.text


def test_errors_that_are_explained(engine: Engine, scarce: Callable[..., Scarce]) -> None:
    """Others, memory that runs out twice in one request, and weights that cannot be loaded again."""
    illegal = accelerator_error("CUDA error: an illegal memory access was encountered", 700)
    for error in (
        illegal,
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
    ):
        assert out_of_memory_message(error) is None
    scarce(passes, "score_together", {2}, make_error=lambda: illegal)
    with pytest.raises(type(illegal), match="illegal memory access"):
        says(engine)
    assert num_resident(engine) == NUM_LAYERS
    given = Engine(LoadedTarget(engine.target), engine.tokenizer)
    scarce(passes, "score_together", {1})
    with refused(MemoryLimitError, "cpu", "CUDA out of memory"):
        says(given)
    assert engine.plan is not None
    memory = PlannedMemory(engine.plan, engine.target.device, [], lambda plan: pytest.fail("nothing is loaded"))
    memory.settle(can_reduce=False)
    for told in ("the first", "the second"):
        with refused(MemoryLimitError, "cpu", "out of memory", told) as caught:
            memory.reduce_residents(told)
        assert "fewer" not in str(caught.value)
    assert memory.plan is engine.plan
    scarce(passes, "score_together", {2, 3})
    with refused(MemoryLimitError, "cpu", "planned", "CUDA out of memory", "`ram`", "`context`"):
        says(engine)


def test_caches_of_another_text_outlive_running_out_of_memory(
    engine: Engine, scarce: Callable[..., Scarce], expected: list[int]
) -> None:
    caches = engine.new_caches()
    first = [
        token for step in engine.generate("def area(", PARAMS, SPECULATION, caches=caches) for token in step.token_ids
    ]
    scarce(passes, "score_together", {1})
    assert says(engine) == expected
    steps = list(engine.generate("def area(", PARAMS, SPECULATION, caches=caches))
    assert first == [token for step in steps for token in step.token_ids] == expected
    assert steps[-1].stats.num_prefilled_tokens == 1


@pytest.mark.parametrize("failing", [1, 4], ids=["target, empty", "draft"])
def test_caches_that_do_not_fit_are_made_with_fewer_residents(
    engine: Engine, scarce: Callable[..., Scarce], failing: int, expected: list[int]
) -> None:
    """They are the largest of what is taken after loading."""
    scarce(SequenceCache, "reserve", {failing})
    assert says(engine) == expected
    assert num_resident(engine) < NUM_LAYERS
    scarce(SequenceCache, "reserve", {failing})
    with refused(MemoryLimitError, "cpu", "out of memory", "`context`"):
        says(engine)


def test_a_target_that_could_not_be_loaded_again_says_so(engine: Engine, scarce: Callable[..., Scarce]) -> None:
    scarce(passes, "score_together", {1})
    scarce(loading, "load_weights", {1, 2})
    with refused(MemoryLimitError, "cpu", "out of memory", "fewer resident layers"):
        says(engine)
    with refused(MemoryLimitError, "no longer in memory"):
        says(engine)


def test_loading_that_fails_twice_is_explained(load: Load, scarce: Callable[..., Scarce]) -> None:
    scarce(loading, "load_weights", {1, 2})
    with refused(MemoryLimitError, "cpu", "out of memory", "fewer resident layers"):
        load()


def test_engines_that_share_a_target_follow_it_when_it_is_loaded_again(
    engine: Engine, scarce: Callable[..., Scarce], expected: list[int]
) -> None:
    """Also a request that is under way, and whichever of them runs out of memory."""
    twin = engine.with_draft(NoDraft())
    steps = engine.generate("def area(", PARAMS, SPECULATION)
    found = next(steps).token_ids
    scarce(passes, "score_together", {2})
    assert says(twin) == expected
    assert num_resident(engine) == num_resident(twin) < NUM_LAYERS
    assert found + [token for step in steps for token in step.token_ids] == expected
    assert says(engine) == says(twin) == expected
    assert twin.draft_stats.costs.target.seconds(np.array([1])) > 0


# ------------------------------------------------------------------------------------------------ on a GPU


def on_gpu(vram: int | None = None) -> Engine:
    return Engine.load("builtin", device="cuda", dtype="fp32", context=512, vram=vram)


@pytest.fixture(scope="module")
def expected_there() -> list[int]:
    with Engine.load("builtin", device="cpu", context=512) as engine:
        return says(engine)


def wanted() -> int:
    """Bytes of device memory for all layers to stay."""
    engine = on_gpu()
    assert engine.plan is not None
    nbytes = engine.plan.placement.device_bytes
    engine.close()
    return nbytes


@pytest.mark.gpu
def test_running_out_of_memory_on_a_gpu(scarce: Callable[..., Scarce], expected_there: list[int]) -> None:
    """The layers that do not stay any more come through the link, beside the draft's stream and graphs."""
    engine = on_gpu(wanted())
    assert num_resident(engine) == 8
    scarce(passes, "score_together", {3})
    assert says(engine) == expected_there
    assert num_resident(engine) < 8
    assert says(engine) == expected_there
    engine.close()


@pytest.mark.gpu
def test_what_is_allowed_is_not_exceeded(expected_there: list[int]) -> None:
    """A byte less than all of it takes: layers are streamed, the text is the CPU's, and the allocator agrees."""
    allowed = wanted() - 1
    accelerator = accelerator_of(torch.device("cuda:0"))
    accelerator.release_memory()
    before = torch.cuda.memory_reserved(0)
    engine = on_gpu(allowed)
    try:
        assert num_resident(engine) < 8
        steps = list(engine.generate("def area(", PARAMS, SPECULATION))
        assert [token for step in steps for token in step.token_ids] == expected_there
        assert 0 < steps[-1].stats.peak_device_bytes <= before + allowed
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(allowed, dtype=torch.uint8, device="cuda")
    finally:
        engine.close()
        accelerator.limit_memory(None)
