"""A streamed target says what a resident one says, whatever stays, whatever was interrupted."""

from __future__ import annotations

import errno
import gc
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams, loading
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import open_model
from offspec.errors import CheckpointError, MemoryLimitError, UsageError
from offspec.loaded_target import LoadedTarget, PlannedMemory
from offspec.loaders.streaming.placement import KV_ITEM, Item, Limits, Placement, Slots, places_of, scattered
from offspec.model.block import Block, memory_bytes
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.planning.memory import MemoryOptions, MemoryUser
from offspec.planning.plan import Plan, make_plan

from ..fakes import FAMILIES, build
from ..pair import CONFIG, CONTEXT, Pair, build_pair, shorten, variant
from ..refusals import refused, tells

CPU = torch.device("cpu")
MEMORY = MemoryOptions(context=CONTEXT)
NO_NODES = np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0), bool)
REQUESTS = [SamplingParams(10, seed=0, ignore_eos=True), SamplingParams(10, temperature=1.0, top_p=0.9, seed=1)]


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    loaded = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu")
    yield loaded
    loaded.close()


def stream(folder: Path, resident: tuple[int, ...] = (), *, synchronous: bool = False, dtype: str = "fp32") -> Decoder:
    files = open_model(folder, dtype, [])
    costs = [layer.cost(files.dtype) for layer in files.stored.layers]
    places = places_of(resident=resident, on_disk=(i for i in range(len(costs)) if i not in resident))
    slot = max(cost.slot_bytes for cost in costs)
    placement = Placement(places, Slots(2, 0, slot), (), Limits(None, 0), 0, 0)
    return load_decoder(files, placement, CPU, WeightSettings(has_far_embedding=True, synchronous=synchronous))


def behind(engine: Engine, target: Decoder) -> Engine:
    """The engine's draft and tokenizer before another target."""
    return Engine(LoadedTarget(target), engine.tokenizer, engine.draft)


def says(engine: Engine, params: SamplingParams) -> list[int]:
    return [token for step in engine.generate("def area(", params) for token in step.token_ids]


@pytest.mark.parametrize("resident", [(), (0,)])
def test_without_reading_ahead_the_text_is_that_of_a_resident_target(
    engine: Engine, pair: Pair, resident: tuple[int, ...]
) -> None:
    target = stream(pair.target, resident, synchronous=True)
    for params in REQUESTS:
        assert says(behind(engine, target), params) == says(engine, params)
    target.weights.close()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct reads here")
@pytest.mark.parametrize("refused_by", ["open", "preadv"])
def test_without_direct_reads_the_text_is_that_of_a_resident_target(
    engine: Engine, pair: Pair, refused_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    call, num_refused = getattr(os, refused_by), 0

    def refuse(file: Any, second: Any, *rest: Any) -> int:
        nonlocal num_refused
        flags = second if refused_by == "open" else fcntl.fcntl(file, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            num_refused += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        result: int = call(file, second, *rest)
        return result

    monkeypatch.setattr(os, refused_by, refuse)
    target = stream(pair.target)
    assert says(behind(engine, target), REQUESTS[0]) == says(engine, REQUESTS[0])
    assert num_refused > 0
    target.weights.close()


def test_norms_of_heads_are_rounded_alike_wherever_they_lie(tmp_path: Path) -> None:
    """They are matrices, which keep the dtype of the file while they are streamed."""
    folder = build(FAMILIES["cohere-qk-norm"], tmp_path).folder  # in fp32
    said = list[torch.Tensor]()
    for resident in ((), (0, 1, 2)):
        target = stream(folder, resident, dtype="bf16")
        said.append(CachedDecoder(target).score(list(range(40)), *NO_NODES))
        target.weights.close()
    assert torch.equal(*said)


@pytest.mark.slow
def test_layers_stay_as_long_as_texts_are_short(engine: Engine, tmp_path: Path) -> None:
    """A plan makes room for the KV cache of a whole context: what a text does not need of it holds layers meanwhile."""
    folder = build_pair(tmp_path, num_layers=9).target
    target, twin = stream(folder), stream(folder, tuple(range(9)))
    files = open_model(folder, "fp32", [])
    layer = files.stored.layers[0].record

    def kv_bytes(num_entries: int) -> int:
        return memory_bytes(files.config, num_entries, files.dtype.itemsize)

    items = (Item(KV_ITEM, on_device=kv_bytes(CONTEXT)),)
    limit = 5 * layer.nbytes - kv_bytes(CONTEXT)  # so many layers' bytes for texts and what may stay
    placement = Placement(places_of(on_disk=range(9)), Slots(2, 0, layer.nbytes), items, Limits(None, limit), 0, 0)
    plan = SimpleNamespace(context=CONTEXT, tree=0, placement=placement, inputs=SimpleNamespace(target=files))
    loaded = LoadedTarget(target, PlannedMemory(plan, CPU, [], lambda plan: target.weights))  # type: ignore[arg-type]
    one, other = (Engine(each, engine.tokenizer) for each in (loaded, LoadedTarget(twin)))
    records = [each.record for each in files.stored.layers]
    params, plain = SamplingParams(3, seed=0, ignore_eos=True), SpeculationParams(0)
    for prompt, num_kept in (([40], 4), ([40] * 100, 1), ([41], 4)):
        expected = [step.token_ids for step in other.generate(prompt, params, plain)]
        for _ in range(2):  # what is to stay comes with the first text
            steps = list(one.generate(prompt, params, plain))
            assert [step.token_ids for step in steps] == expected
            gc.collect()
        streamed = [i for i in range(9) if i not in scattered(8)[:num_kept]]
        assert steps[-1].stats.stream_bytes_per_pass == sum(records[i].read_bytes for i in streamed)
    one.close()
    other.close()


def test_a_request_that_was_left_does_not_disturb_the_next(engine: Engine, pair: Pair) -> None:
    target = stream(pair.target)
    asked = behind(engine, target).generate("def area(", REQUESTS[0])
    next(asked)
    asked.close()
    assert says(behind(engine, target), REQUESTS[0]) == says(engine, REQUESTS[0])
    target.weights.close()


def test_an_interrupted_pass_does_not_disturb_the_next(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, real = stream(pair.target), Block.forward
    calls: list[int] = []

    def interrupted(self: Block, *rest: object) -> torch.Tensor:
        calls.append(self.index)
        if self in target.blocks and len(calls) > 3:
            raise KeyboardInterrupt
        return real(self, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Block, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            says(behind(engine, target), REQUESTS[0])
    assert says(behind(engine, target), REQUESTS[0]) == says(engine, REQUESTS[0])
    target.weights.close()


def test_a_shard_cut_off_while_running_is_one_clear_error(engine: Engine, pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "cut")
    target = stream(folder)
    says(behind(engine, target), REQUESTS[0])
    os.truncate(folder / "model.safetensors", 5000)
    with refused(CheckpointError, folder / "model.safetensors", "ends", "download"):
        says(behind(engine, target), replace(REQUESTS[0], max_new_tokens=60))
    target.weights.close()


@pytest.mark.slow
def test_a_prompt_of_8192_tokens_reads_the_weights_once(pair: Pair, tmp_path: Path) -> None:
    folder = shorten(variant(pair.target, tmp_path / "long"), 1)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1, "max_position_embeddings": 9000}))
    target = stream(folder)
    per_pass = sum(layer.record.read_bytes for layer in open_model(folder, "fp32", []).stored.layers)
    text = CachedDecoder(target, 8200)
    text.score_rows([i % 300 for i in range(8192)], *NO_NODES)
    assert target.weights.bytes_streamed == per_pass
    text.score_rows([1], *NO_NODES)
    assert target.weights.bytes_streamed == 2 * per_pass
    target.weights.close()


def test_stats_say_what_was_streamed(engine: Engine, pair: Pair) -> None:
    target = stream(pair.target)
    *_, last = behind(engine, target).generate("def area(", REQUESTS[0])
    assert last.stats.stream_bytes_per_pass * last.stats.num_passes == target.weights.bytes_streamed
    assert last.stats.stream_gb_per_s
    *_, last = engine.generate("def area(", REQUESTS[0])
    assert last.stats.stream_bytes_per_pass == 0
    assert last.stats.stream_gb_per_s is None
    target.weights.close()


@pytest.mark.parametrize("draft", ["a model", "none"])
def test_stats_say_what_plain_decoding_would_bring_without_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """The draft's memory has a price: layers that would be resident in its place."""

    def almost_resident(target: ModelFiles, features: Sequence[MemoryUser], *_: object) -> Plan:
        everything = make_plan(target, features, Limits(None, 2**40), MEMORY, 0)
        return make_plan(target, features, Limits(None, everything.placement.ram_bytes - 1), MEMORY, 0)

    monkeypatch.setattr(loading, "plan_here", almost_resident)
    pair = build_pair(tmp_path, 4)
    name = str(pair.draft) if draft == "a model" else draft
    with Engine.load(str(pair.target), draft=name, device="cpu", dtype="fp32", context=CONTEXT) as loaded:
        *_, last = loaded.generate("def area(", REQUESTS[0])
        found, target, plan = last.stats.plain_without_draft_tokens_per_s, loaded.loaded, loaded.plan
        assert plan is not None
        assert plan.placement.streamed
        if draft == "none":
            assert found is target.plan_without_draft is None
            return
        assert target.plan_without_draft is not None
        assert target.plan_without_draft.placement.is_resident
        assert target.rates is not None
        speedup = target.predict_pass_s(1) / target.plan_without_draft.predict_pass_s(target.rates, 1)
        assert speedup > 1
        assert found == pytest.approx(speedup / loaded.draft_stats.costs.target.seconds(np.array([1]))[0])


def test_too_little_memory_is_refused_before_anything_is_read(pair: Pair) -> None:
    with refused(MemoryLimitError, "1 MiB", "at least", "`ram`"):
        Engine.load(str(pair.target), draft="none", device="cpu", ram=2**20)


def test_a_context_asked_for_is_the_limit_and_is_said(pair: Pair) -> None:
    loaded = Engine.load(str(pair.target), draft="none", device="cpu", context=40)
    assert loaded.max_context == 40
    assert any(tells(note.text, "context", "40 tokens") for note in loaded.notes)
    assert len(says(loaded, SamplingParams(100, ignore_eos=True))) < 40
    with refused(UsageError, "`context=1000`", CONTEXT):
        Engine.load(str(pair.target), draft="none", device="cpu", context=1000)


@pytest.mark.slow
def test_threads_take_turns(engine: Engine, pair: Pair) -> None:
    """Each on a request of its own: a ring lends to one pass at a time."""
    expected, target = [says(engine, params) for params in REQUESTS], stream(pair.target)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(says, behind(engine, target)), 2 * REQUESTS))
    assert found == 2 * expected
    target.weights.close()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device_within_a_pass(pair: Pair) -> None:
    """From the first layer to the last no operation makes the host wait; torch raises where one does."""
    device = torch.device("cuda:0")
    files = open_model(pair.target, "fp32", [])
    slot, everything = max(layer.record.nbytes for layer in files.stored.layers), tuple(range(files.config.num_layers))
    placement = Placement(places_of(in_ram=everything), Slots(2, 0, slot), (), Limits(2**30, 2**30), 0, 0)
    decoder = load_decoder(files, placement, device, WeightSettings(has_far_embedding=True))
    through = decoder.through

    def watched(*args: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return through(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    decoder.through = watched  # type: ignore[method-assign]
    nodes = np.arange(3, 7), np.ones(4, np.int64), np.full(4, -1)
    expected = CachedDecoder(stream(pair.target, everything)).score([5, 6, 7], *nodes)
    text = CachedDecoder(decoder, 100)
    for _ in range(3):
        torch.testing.assert_close(text.score([5, 6, 7], *nodes).cpu(), expected, rtol=0, atol=1e-3)
        text.truncate(0)
    decoder.weights.close()
