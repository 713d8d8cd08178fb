"""Out of memory all the same: explained, and tried once more with fewer layers that stay; the text is unmoved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offspec import Engine, SamplingParams
from offspec import engine as engines
from offspec.errors import MemoryLimitError
from offspec.loaders.placement import Placement
from offspec.model import CachedDecoder, Decoder

TOLD = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.65 GiB\nSee documentation"
PARAMS = SamplingParams(24, temperature=1.0, seed=5, ignore_eos=True)


def load() -> Engine:
    return Engine.load("builtin", device="cpu", context=512)


def says(engine: Engine, params: SamplingParams = PARAMS) -> list[int]:
    return [token for step in engine.generate("def area(", params) for token in step.token_ids]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return says(load())


def num_resident(engine: Engine) -> int:
    assert engine.plan is not None
    return len(engine.plan.placement.resident)


class Scarce:
    """Calls of a method or function that fail for want of memory, by their number; the others go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, failing: set[int]) -> None:
        self.num_calls, original = 0, getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls in failing:
                raise torch.OutOfMemoryError(TOLD)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scarce]:
    return lambda owner, name, failing: Scarce(monkeypatch, owner, name, failing)


@pytest.mark.parametrize("failing", [1, 2], ids=["draft", "target"])
def test_loading_is_tried_again_with_fewer_residents(
    scarce: Callable[..., Scarce], failing: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[Placement] = []
    loading = engines.load_decoder

    def watched(model: Any, placement: Placement, *args: Any, **kwargs: Any) -> Decoder:
        placed.append(placement)
        return loading(model, placement, *args, **kwargs)

    monkeypatch.setattr(engines, "load_decoder", watched)
    scarce(engines, "load_decoder", {failing})
    engine = load()
    assert num_resident(engine) < 8
    assert engine.plan is not None
    assert placed[-1].resident == engine.plan.placement.resident
    (note,) = [note for note in engine.notes if "ran out of memory" in note.text]
    assert note.advice
    assert "(CUDA out of memory)" in note.text
    assert f"{num_resident(engine)} instead of 8 layers stay" in note.text
    assert says(engine) == expected
    engine.close()


def test_a_pass_is_tried_again_with_fewer_residents(scarce: Callable[..., Scarce], expected: list[int]) -> None:
    engine = load()
    assert num_resident(engine) == 8
    scarce(CachedDecoder, "score_rows", {3})
    assert says(engine) == expected
    assert num_resident(engine) < 8
    assert says(engine) == expected
    engine.close()


def test_counters_go_on_after_a_shortage(scarce: Callable[..., Scarce]) -> None:
    engine = load()
    num_passes = [step.stats.num_passes for step in engine.generate("def area(", PARAMS)]
    scarce(CachedDecoder, "score_rows", {2})
    steps = list(engine.generate("def area(", PARAMS))
    assert [step.stats.num_passes for step in steps] == list(range(1, len(steps) + 1))
    assert len(num_passes) > 2
    assert steps[-1].stats.stream_bytes_per_pass > 0
    engine.close()


def test_the_second_shortage_is_explained(scarce: Callable[..., Scarce]) -> None:
    engine = load()
    scarce(CachedDecoder, "score_rows", {2, 3})
    with pytest.raises(MemoryLimitError) as caught:
        says(engine)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in ("cpu ran out of memory", "were planned of the", "(CUDA out of memory)", "--ram", "--context"):
        assert part in message
    engine.close()


def test_loading_that_fails_twice_is_explained(scarce: Callable[..., Scarce]) -> None:
    scarce(engines, "load_decoder", {2, 4})
    with pytest.raises(MemoryLimitError, match="so it did with fewer layers that stay"):
        load()


def test_an_engine_of_given_decoders_cannot_load_again(scarce: Callable[..., Scarce]) -> None:
    engine = load()
    scarce(CachedDecoder, "score_rows", {1})
    with pytest.raises(MemoryLimitError, match=r"cpu ran out of memory \(CUDA out of memory\)"):
        says(engine.with_draft(None, None))
    engine.close()


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_a_real_shortage_is_survived() -> None:
    """Another program takes what was planned to be free."""
    plain = Engine.load("builtin", device="cuda", dtype="fp32", context=512)
    expected = says(plain)
    assert plain.plan is not None
    granted = plain.plan.placement.device_bytes
    plain.close()
    engine = Engine.load("builtin", device="cuda", dtype="fp32", context=512, vram=granted)
    assert num_resident(engine) == 8
    engine.target.weights.close()
    held = [torch.empty(granted, dtype=torch.uint8, device="cpu")]  # nothing of the device: the limit is what is scarce
    assert engine.plan is not None
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    engine.shed("CUDA out of memory")
    assert held
    assert num_resident(engine) < 8
    assert says(engine) == expected
    engine.close()


@pytest.mark.gpu
def test_a_grant_is_not_exceeded() -> None:
    """A byte less than all of it takes: layers are streamed, the text is the CPU's, and the allocator agrees."""
    expected = says(load())
    plain = Engine.load("builtin", device="cuda", dtype="fp32", context=512)
    assert plain.plan is not None
    granted = plain.plan.placement.device_bytes - 1
    plain.close()
    del plain
    engine = Engine.load("builtin", device="cuda", dtype="fp32", context=512, vram=granted)
    held = torch.cuda.memory_reserved(0)
    assert num_resident(engine) < 8
    steps = list(engine.generate("def area(", PARAMS))
    assert [token for step in steps for token in step.token_ids] == expected
    assert steps[-1].stats.peak_device_bytes <= max(granted, held)
    engine.close()
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
