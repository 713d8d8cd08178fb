"""The engine on a CUDA device that is only pretended (`tests/pretend_cuda.py`): what CUDA would refuse is refused,
nothing is left to luck, and texts are the CPU's.

In a process of its own, whose torch is told that there is a device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams, convert, loading
from offspec.loaders.formats.process_state import has_bitsandbytes
from offspec.loaders.streaming.placement import places_of
from offspec.model import cuda_graphs
from offspec.model.block import Block
from offspec.model.cuda_graphs import StaticRounds
from offspec.planning.plan import Plan
from offspec.planning.probe import plan_here

from ..assumed_rates import assume_rates
from ..happens_before import Access, Race
from ..pair import build_pair, shorten
from ..pretend_cuda import in_own_process, pretended_cuda
from ..pretend_streams import Machine
from . import pretended_counts
from .drafts.test_head_draft import HEADS
from .model.heads.head_twins import write_folder
from .pretended_counts import REQUESTS as COUNTED
from .pretended_counts import Counted, counted

NUM_TOKENS, NUM_LAYERS = 4, 4
SAMPLED = SamplingParams(NUM_TOKENS, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=3, ignore_eos=True)
REQUESTS = {
    "greedy": (SamplingParams(NUM_TOKENS, ignore_eos=True), SpeculationParams()),
    "sampled": (SAMPLED, SpeculationParams(8)),
    "plain": (SAMPLED, SpeculationParams(0)),
    "sequoia": (SAMPLED, SpeculationParams(8, tree="sequoia")),
    "joint": (SamplingParams(NUM_TOKENS, ignore_eos=True), SpeculationParams(accept="joint")),
}
ALL, GREEDY, SOME = tuple(REQUESTS), ("greedy",), ("sampled",)
SPECIAL = {
    # Enough rounds of one shape to capture it, however fast the machine is.
    "rounds": (SamplingParams(6, ignore_eos=True), SpeculationParams(8, overlap=False)),
    "short": (SamplingParams(4, ignore_eos=True), SpeculationParams(4)),
}
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
    layers = range(len(plan.layers))
    return streamed(plan, resident=tuple(layers[::2]), in_ram=tuple(layers[1::2]))


def streamed(
    plan: Plan, num_host_slots: int = 0, entries_in_ram: tuple[int, ...] = (), **where: tuple[int, ...]
) -> Plan:
    slots = replace(plan.placement.slots, num=2, num_host=num_host_slots)
    placement = replace(plan.placement, places=places_of(**where), slots=slots, entries_in_ram=entries_in_ram)
    return replace(plan, placement=placement)


def has_real_device() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


FORMS = ("plain", "nf4") if has_bitsandbytes() else ("plain",)


def build(folder: Path, forms: Sequence[str] = FORMS, num_layers: int = NUM_LAYERS, **config: Any) -> Path:
    """A pair whose draft has one layer, its target in each of `forms`. config: others than `build_pair`'s."""
    pair = build_pair(folder, num_layers, **config)
    shorten(pair.draft, 1)
    pair.target.rename(folder / "plain")
    if "nf4" in forms:
        convert(folder / "plain", folder / "nf4")
    return folder


def load(
    folder: Path,
    form: str,
    device: str,
    move: Move = resident,
    prepared_keys: int = 0,
    *,
    is_measured: bool = False,
    **options: Any,
) -> Engine:
    """An engine whose layers lie where `move` puts them.

    prepared_keys: of rounds that are captured while it is loaded; others are when a text comes to them.
    is_measured: measure the rates of the pretended device, too; on a real one they always are.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not (is_measured or has_real_device()):
            assume_rates(patch)
        patch.setattr(cuda_graphs, "PREPARED_KEYS", prepared_keys)
        patch.setattr(loading, "plan_here", lambda *args: move(plan_here(*args)))
        options = {"draft": str(folder / "draft"), "dtype": "fp32", **options}
        engine = Engine.load(str(folder / form), device=device, **options)
    assert str(engine.target.device).startswith(device)
    return engine


SHADOW = "shadow:4"
EXIT = "self:1"
LAYER_DRAFTS = (EXIT, SHADOW)
HEAD = "EAGLE-1"
# All requests in one place, and one in each of the others; KV entries are packed in one.
PLACES: dict[str, dict[Move, tuple[str, ...]]] = {
    "plain": {resident: GREEDY, in_ram: ALL, on_disk: SOME, with_entries_in_ram: GREEDY},
    "nf4": {in_ram: SOME},
}
PACKED: dict[Move, dict[str, Any]] = {on_disk: {"kv_cache": 8}}


def texts(engine: Engine, names: Iterable[str] = REQUESTS) -> dict[str, list[int]]:
    """What these of REQUESTS and SPECIAL come to; the engine is closed."""
    with engine:
        return {name: says(engine, name) for name in names}


def says(engine: Engine, name: str) -> list[int]:
    request = (REQUESTS | SPECIAL)[name]
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
    """All that the tests below look at, as JSON.

    Texts: form and place → name of the request → token ids. Beside them are races, counts, and a mixture's results.
    """
    from . import pretended_mixture  # which imports this module

    build(folder)
    config, tensors = HEADS[HEAD]
    head = str(write_folder(folder / "head", config, tensors()))
    found: dict[str, Any] = {
        f"{form} cpu": texts(load(folder, form, "cpu"), max(PLACES[form].values(), key=len)) for form in FORMS
    }
    found["rounds cpu"] = texts(load(folder, "plain", "cpu"), ["rounds"])
    found["packed cpu"] = texts(load(folder, "plain", "cpu", **PACKED[on_disk]), SOME)
    mixture = pretended_mixture.build(folder / "mixture")
    found["mixture cpu"] = texts(load(mixture, "plain", "cpu", draft="lookup"), GREEDY)
    races = found["races"] = {}
    with pretended_cuda(folder / "guard.so") as machine, slow_passes():
        for form in FORMS:
            for move, names in PLACES[form].items():
                engine = load(folder, form, "cuda:0", move, cuda_graphs.MIN_KEYS, **PACKED.get(move, {}))
                with engine:
                    found[f"{form} {move.__name__}"] = {name: says(engine, name) for name in names}
                    if names == ALL:
                        found["counts"] = {name: vars(counted(engine, machine, own)) for name, own in COUNTED.items()}
                races[f"{form} {move.__name__}"] = races_in(machine)
        for draft in (*LAYER_DRAFTS, head):
            name = "head" if draft == head else draft
            with counted_static_rounds() as rounds:  # the others' are not static here
                engine = load(folder, "plain", "cuda:0", half_in_ram, draft=draft)
                # A text before lets the rounds of the next one be captured.
                found[name] = texts(engine, (*SOME, "rounds") if draft == EXIT else SOME)
            found[f"{name}, static rounds"] = {"number": [len(rounds)]}
            races[name] = races_in(machine)
    with pretended_cuda(folder / "guard.so") as machine:
        found["mixture"] = pretended_mixture.measured(mixture, machine)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `main` prints."""
    results: dict[str, Any] = in_own_process("tests.offspec.test_pretended_cuda", tmp_path_factory.mktemp("pretended"))
    return results


@pytest.mark.slow
def test_texts_are_the_cpus(found: dict[str, Any]) -> None:
    """Also where copies come as late as they may, and what they bring is garbage until then."""
    for draft in (*LAYER_DRAFTS, "head"):
        expected = {name: found["plain cpu"][name] for name in SOME}
        assert found[draft] == expected | (found["rounds cpu"] if draft == EXIT else {})
    # A kernel that multiplies a shadow's packed matrices needs a real device.
    assert found[f"{EXIT}, static rounds"]["number"][0] > 0 == found[f"{SHADOW}, static rounds"]["number"][0]
    for form in FORMS:
        for move, names in PLACES[form].items():
            expected = found["packed cpu" if move in PACKED else f"{form} cpu"]
            assert found[f"{form} {move.__name__}"] == {name: expected[name] for name in names}
            assert all(len(expected[name]) == NUM_TOKENS for name in names)


@pytest.mark.slow
def test_everything_is_in_order(found: dict[str, Any]) -> None:
    """Of two accesses to the same bytes, by two streams or a stream and the host, an event orders any that write."""
    assert {name: races for name, races in found["races"].items() if races} == {}
    assert {"plain in_ram", "plain on_disk", "plain with_entries_in_ram", *LAYER_DRAFTS, "head"} <= found[
        "races"
    ].keys()


@pytest.mark.slow
def test_the_host_waits_once_for_each_result(found: dict[str, Any]) -> None:
    """And the copy engine brings layers only (`pretended_counts`)."""
    for name, counts in found["counts"].items():
        pretended_counts.check(Counted(**counts), name, NUM_LAYERS)


@pytest.mark.slow
def test_a_mixture_writes_the_cpus_text_wherever_its_experts_lie(found: dict[str, Any]) -> None:
    from . import pretended_mixture

    pretended_mixture.check(found["mixture"], found["mixture cpu"]["greedy"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
