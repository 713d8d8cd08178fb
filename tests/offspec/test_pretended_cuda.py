"""The engine on a CUDA device that is only pretended (`tests/pretend_cuda.py`): what CUDA would refuse is refused,
and texts are the CPU's.

In a process of its own, whose torch is told that there is a device.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
from offspec.loaders.hardware import Rates
from offspec.model.cuda_graphs import StaticRounds
from offspec.planning.plan import Plan
from offspec.planning.probe import plan_here

from ..pair import build_pair
from ..pretend_cuda import build_guard, pretended_cuda

NUM_TOKENS = 8
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
ROUNDS = SamplingParams(20, ignore_eos=True), SpeculationParams(8, overlap=False)
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
    return streamed(plan, resident=(1, 3), in_ram=(0, 2))


def streamed(plan: Plan, num_host_slots: int = 0, **where: Any) -> Plan:
    slots = replace(plan.placement.slots, num=2, num_host=num_host_slots)
    placement = replace(plan.placement, **{"resident": (), "slots": slots, **where})
    return replace(plan, placement=placement)


FORMS = ("plain", "nf4") if has_bitsandbytes() else ("plain",)


def build(folder: Path) -> Path:
    """A pair, its target in each of FORMS."""
    pair = build_pair(folder, num_layers=4)
    pair.target.rename(folder / "plain")
    if "nf4" in FORMS:
        convert(folder / "plain", folder / "nf4")
    return folder


def load(folder: Path, form: str, device: str, move: Move = resident, **options: Any) -> Engine:
    """An engine whose layers lie where `move` puts them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "plan_here", lambda *args: move(plan_here(*args)))
        options = {"draft": str(folder / "draft"), **options}
        engine = Engine.load(str(folder / form), device=device, dtype="fp32", **options)
    assert str(engine.target.device).startswith(device)
    return engine


LAYER_DRAFTS = ("resident", "shadow:4")
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


def main(folder: Path) -> None:
    """All texts, as JSON: form and place → name of the request → token ids."""
    build(folder)
    found = {f"{form} cpu": texts(load(folder, form, "cpu")) for form in FORMS}
    found["rounds cpu"] = texts(load(folder, "plain", "cpu"), ["rounds"])
    found["packed cpu"] = texts(load(folder, "plain", "cpu", kv_cache=8), SOME)
    with pretended_cuda(folder / "guard.so"), measured_once():
        for form in FORMS:
            for move in PLACES[form]:
                found[f"{form} {move.__name__}"] = texts(load(folder, form, "cuda:0", move))
        found["packed"] = texts(load(folder, "plain", "cuda:0", with_entries_in_ram, kv_cache=8), SOME)
        for draft in LAYER_DRAFTS:
            with counted_static_rounds() as rounds:
                found[draft] = texts(load(folder, "plain", "cuda:0", half_in_ram, draft=draft), (*SOME, "rounds"))
            found[f"{draft}, static rounds"] = {"number": [len(rounds)]}
    print(json.dumps(found))


@pytest.mark.slow
def test_texts_are_the_cpus(tmp_path: Path) -> None:
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("pretending takes a C++ compiler, and Linux")
    build_guard(tmp_path)
    command = [sys.executable, "-m", "tests.offspec.test_pretended_cuda", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["packed"] == found["packed cpu"]
    for draft in LAYER_DRAFTS:
        assert found[draft] == {name: found["plain cpu"][name] for name in SOME} | found["rounds cpu"]
    # A kernel that multiplies a shadow's packed matrices needs a real device.
    assert found["resident, static rounds"]["number"][0] > 0 == found["shadow:4, static rounds"]["number"][0]
    for form in FORMS:
        expected = found[f"{form} cpu"]
        assert all(len(ids) == NUM_TOKENS for ids in expected.values())
        for move in PLACES[form]:
            assert found[f"{form} {move.__name__}"] == expected


if __name__ == "__main__":
    main(Path(sys.argv[1]))
