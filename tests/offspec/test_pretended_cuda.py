"""The engine on a CUDA device that is only pretended (`tests/pretend_cuda.py`): what CUDA would refuse is refused,
nothing is left to luck, and texts are the CPU's.

In a process of its own, whose torch is told that there is a device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams, convert, loading
from offspec.checkpoints.opening import ModelFiles
from offspec.loaders.formats.process_state import has_bitsandbytes
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import places_of
from offspec.model import cuda_graphs
from offspec.model.block import Block
from offspec.model.cuda_graphs import StaticRounds
from offspec.planning.plan import Plan
from offspec.planning.probe import plan_here

from ..happens_before import Access, Race
from ..pair import build_pair
from ..pretend_cuda import in_own_process, pretended_cuda
from ..pretend_streams import Machine
from .drafts.test_head_draft import HEADS
from .model.heads.head_twins import write_folder

NUM_TOKENS = 6
SAMPLED = SamplingParams(NUM_TOKENS, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=3, ignore_eos=True)
REQUESTS = {
    "greedy": (SamplingParams(NUM_TOKENS, ignore_eos=True), SpeculationParams()),
    "sampled": (SAMPLED, SpeculationParams(24)),
    "plain": (SAMPLED, SpeculationParams(0)),
    "sequoia": (SAMPLED, SpeculationParams(8, tree="sequoia")),
    "joint": (SamplingParams(NUM_TOKENS, ignore_eos=True), SpeculationParams(accept="joint")),
}
SOME = ("greedy", "sampled")
# Enough rounds of one shape to capture it, however fast the machine is.
ROUNDS = SamplingParams(16, ignore_eos=True), SpeculationParams(8, overlap=False)
Move = Callable[[Plan], Plan]


def resident(plan: Plan) -> Plan:
    return plan


def in_ram(plan: Plan) -> Plan:
    return streamed(plan, in_ram=tuple(range(len(plan.layers))))


def on_disk(plan: Plan) -> Plan:
    return streamed(plan, on_disk=tuple(range(len(plan.layers))), num_host_slots=2)


def with_entries_in_ram(plan: Plan) -> Plan:
    """Beside the second layer, which is resident, there is another one whose entries are on the device."""
    return streamed(plan, resident=(1,), in_ram=(0, 2, 3), entries_in_ram=(0, 3))


def half_in_ram(plan: Plan) -> Plan:
    return streamed(plan, resident=(0, 2), in_ram=(1, 3))


def streamed(
    plan: Plan, num_host_slots: int = 0, entries_in_ram: tuple[int, ...] = (), **where: tuple[int, ...]
) -> Plan:
    slots = replace(plan.placement.slots, num=2, num_host=num_host_slots)
    placement = replace(plan.placement, places=places_of(**where), slots=slots, entries_in_ram=entries_in_ram)
    return replace(plan, placement=placement)


FORMS = ("plain", "nf4") if has_bitsandbytes() else ("plain",)


def build(folder: Path, **settings: Any) -> Path:
    """A pair, its target in each of FORMS. settings: of its config.json."""
    pair = build_pair(folder, num_layers=4, **settings)
    pair.target.rename(folder / "plain")
    if "nf4" in FORMS:
        convert(folder / "plain", folder / "nf4")
    return folder


def load(folder: Path, form: str, device: str, move: Move = resident, prepared_keys: int = 0, **options: Any) -> Engine:
    """An engine whose layers lie where `move` puts them.

    prepared_keys: of rounds that are captured while it is loaded; others are when a text comes to them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "PREPARED_KEYS", prepared_keys)
        patch.setattr(loading, "plan_here", lambda *args: move(plan_here(*args)))
        options = {"draft": str(folder / "draft"), "dtype": "fp32", **options}
        engine = Engine.load(str(folder / form), device=device, **options)
    assert str(engine.target.device).startswith(device)
    return engine


LAYER_DRAFTS = ("self:1", "shadow:4")
HEAD = "EAGLE-1"
PLACES: dict[str, tuple[Move, ...]] = {"plain": (resident, in_ram, on_disk, with_entries_in_ram), "nf4": (in_ram,)}


def texts(engine: Engine, names: Iterable[str] = REQUESTS) -> dict[str, list[int]]:
    """What these of REQUESTS come to; the engine is closed."""
    with engine:
        return {name: says(engine, name) for name in names}


def says(engine: Engine, name: str) -> list[int]:
    request = ROUNDS if name == "rounds" else REQUESTS[name]
    return [token for step in engine.generate("def area(", *request) for token in step.token_ids]


@contextmanager
def counted_static_rounds() -> Iterator[list[int]]:
    """The rows of each round that is captured on a real device."""
    found, run = list[int](), StaticRounds.run

    def counted(self: StaticRounds, *args: Any) -> Any:
        states = run(self, *args)
        if states is not None:
            found.append(len(states))
        return states

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticRounds, "run", counted)
        yield found


@contextmanager
def measured_once() -> Iterator[None]:
    """Rates of each kind of target and device are measured by the first engine."""
    known, measure = dict[tuple[object, ...], Rates](), loading.measure_quick_rates

    def measured(target: ModelFiles, device: torch.device, link: float | None) -> Rates:
        key = target.packed_form, device, link is None
        if key not in known:
            known[key] = measure(target, device, link)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "measure_quick_rates", measured)
        yield


# Pairs of functions that may touch the same bytes at the same time, and why; the second one is the draft's.
HARMLESS = {
    # A pass writes to the gap of a shared cache. The draft reads it with the rest of its keys, and multiplies by zero.
    ("offspec/model/memory/kv_cache.py write", "offspec/model/parts/kv_attention.py attend"),
}


def is_harmless(race: Race) -> bool:
    if not isinstance(race.later, Access):
        return False
    draft, target = sorted((race.earlier, race.later), key=lambda access: -access.stream)
    pair = target.place.function, draft.place.function
    return pair in HARMLESS and not draft.is_write and target.stream == 0


def races_in(machine: Machine) -> list[str]:
    """Those since the last call that may do harm."""
    races = [str(race) for race in machine.order.races if not is_harmless(race)]
    machine.order.forget_races()
    return races


@contextmanager
def slow_passes() -> Iterator[None]:
    """Each of the target's layers takes a while, so that the draft has rounds during each pass."""
    forward = Block.forward

    def slow(self: Block, *args: Any) -> Any:
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            time.sleep(0.002)
        return forward(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", slow)
        yield


def main(folder: Path) -> None:
    """All texts, as JSON: form and place → name of the request → token ids; and the races of each of them."""
    build(folder)
    config, tensors = HEADS[HEAD]
    head = str(write_folder(folder / "head", config, tensors()))
    found: dict[str, Any] = {f"{form} cpu": texts(load(folder, form, "cpu")) for form in FORMS}
    found["rounds cpu"] = texts(load(folder, "plain", "cpu"), ["rounds"])
    found["packed cpu"] = texts(load(folder, "plain", "cpu", kv_cache=8), SOME)
    races = found["races"] = {}
    with pretended_cuda(folder / "guard.so") as machine, measured_once(), slow_passes():
        for form in FORMS:
            for move in PLACES[form]:
                is_full = (form, move) == ("plain", in_ram)
                names, prepared = (REQUESTS, cuda_graphs.MIN_KEYS) if is_full else (SOME, 0)
                found[f"{form} {move.__name__}"] = texts(load(folder, form, "cuda:0", move, prepared), names)
                races[f"{form} {move.__name__}"] = races_in(machine)
        found["packed"] = texts(load(folder, "plain", "cuda:0", with_entries_in_ram, kv_cache=8), SOME)
        races["packed"] = races_in(machine)
        for draft in (*LAYER_DRAFTS, head):
            name = "head" if draft == head else draft
            with counted_static_rounds() as rounds:
                found[name] = texts(load(folder, "plain", "cuda:0", half_in_ram, draft=draft), (*SOME, "rounds"))
            found[f"{name}, static rounds"] = {"number": [len(rounds)]}
            races[name] = races_in(machine)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `main` prints."""
    results: dict[str, Any] = in_own_process("tests.offspec.test_pretended_cuda", tmp_path_factory.mktemp("pretended"))
    return results


@pytest.mark.slow
def test_texts_are_the_cpus(found: dict[str, Any]) -> None:
    """Also where copies come as late as they may, and what they bring is garbage until then."""
    assert found["packed"] == found["packed cpu"]
    for draft in (*LAYER_DRAFTS, "head"):
        assert found[draft] == {name: found["plain cpu"][name] for name in SOME} | found["rounds cpu"]
    # A kernel that multiplies a shadow's packed matrices needs a real device.
    assert found["self:1, static rounds"]["number"][0] > 0 == found["shadow:4, static rounds"]["number"][0]
    for form in FORMS:
        expected = found[f"{form} cpu"]
        assert all(len(ids) == NUM_TOKENS for ids in expected.values())
        for move in PLACES[form]:
            texts_there = found[f"{form} {move.__name__}"]
            assert texts_there.keys() >= set(SOME)
            assert texts_there == {name: expected[name] for name in texts_there}


@pytest.mark.slow
def test_everything_is_in_order(found: dict[str, Any]) -> None:
    """Of two accesses to the same bytes, by two streams or a stream and the host, an event orders any that write."""
    assert {name: races for name, races in found["races"].items() if races} == {}
    assert {"plain in_ram", "plain on_disk", "plain with_entries_in_ram", *LAYER_DRAFTS, "head"} <= found[
        "races"
    ].keys()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
